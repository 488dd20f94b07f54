"""Claim: batches in flight train faster than one after another, at the rate of the slowest stage of a pipeline.

    python experiments/oac_throughput.py                 an emulated link in three regimes, and none; 10 minutes
    python experiments/oac_throughput.py --sweep window  or batch, or width, over the balanced link; 5 minutes
    python experiments/oac_throughput.py --link none     tables and device as they are; 2 minutes
    python experiments/oac_throughput.py --link remote   rows at 2 servers, on Ray: a link that is measured; 5 minutes
    ... --link remote --server-cores 1                   the same, servers and trainer on cores of their own
    ... --link remote --ray-address HOST:6379            the same, on a running Ray cluster

DLRM-Kaggle of throughput.py over tables in host memory, all modes in 24 interleaved rounds; ratios are of the rates
within a round, medians with 95 % bootstrap intervals. A CPU has no link to its tables, so one is EMULATED: a channel
of given bandwidth whose time is slept (`stages_ms`). Result: results/two_cores_cpu/oac_throughput*.json.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from main.cli import Flags, Run, bars, belongs, command_line, plot, refuse, rule_of_ray, unread
from main.homes import SERVER_TIMEOUT_S, share_of
from main.report import Figure, figures, number, said
from main.run_dir import cores
from studies.oac_turns import PipelineWay, at_servers, compare, compiled, equal, measure_remote, turns_of
from studies.oac_work import LINKS, EmulatedLink, Work, bytes_a_batch, bytes_per_s, compute_ms
from studies.reference import Job, ratio
from studies.turns import in_turns

from jaxrec.cluster import Cluster, Supervisor

REGIMES = {
    "balanced_link": "link as slow as compute", "link_link": "slower link", "compute_link": "faster link",
    "no_link": "no link", "remote": "rows at servers",
}  # fmt: skip
BASIC = ("sync", "semisync", "async", "oac")
WINDOWS = (2, 4, 8, 16)
SWEEPS: dict[str, tuple[dict[str, Any], ...]] = {
    "none": ({},),
    "window": ({},),
    "batch": ({"batch_size": 512}, {"batch_size": 4096}),
    "width": ({"width": 8}, {"width": 64}),
}


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the benchmark."""

    link: Literal["emulated", "none", "remote"] = "emulated"
    sweep: Literal["none", "window", "batch", "width"] = "none"
    """Parameter to measure at several values."""
    rounds: int = 0
    """Timed rounds of each mode; 0 takes the preset's number."""
    rows: int = 1_000_000
    batch_size: int = 2048
    width: int = 16
    window: int = 4
    latency_ms: float = 0.05
    """Latency of the emulated link, each way."""
    servers: int | None = None
    """Number of server processes of the remote link; 2 by default."""
    server_cores: int | None = None
    """Cores of this machine for the servers alone, as on a machine of their own; by default they share all cores."""
    ray_address: str | None = None
    """Address of a running Ray cluster for the servers of the remote link; by default Ray is started here."""
    server_resource: str | None = None
    """Ray resource that the machines of the servers have, such as rows; by default Ray chooses them."""


def ways_of(config: Config, regime: str) -> list[PipelineWay]:
    """Modes compared in a regime."""
    if config.sweep == "window":
        return [PipelineWay("sync"), *itertools.starmap(PipelineWay, itertools.product(("async", "oac"), WINDOWS))]
    return [PipelineWay(mode) for mode in BASIC]


def stages_ms(work: Work, regime: str, link: EmulatedLink | None, size: dict[str, float]) -> dict[str, float]:
    """Milliseconds of each stage of a batch alone, by its own workers, after setting the bandwidth of the link.

    `balanced`: both directions together take as long as the compute; `link`: the slower one alone 1.5 times as long;
    `compute`: both together a quarter.
    """
    stages = work.stages_ms(12)
    found = {name: stages[name] for name in ("plan", "gather", "write_back")} | {"commit": compute_ms(stages)}
    if link:
        link.bytes_per_s = bytes_per_s(regime, found["commit"], size)
        found |= {way: 1e3 * (size[way] / link.bytes_per_s + link.latency_s) for way in ("send", "fetch")}
    return found


def measure_ways(work: Work, regime: str, size: dict[str, float], config: Config, rounds: int, counted: int) -> dict:
    """Rates, ratios and stage times of all ways in a regime; `size` holds the bytes that `oac` moves per batch.

    Rates are of the steady state. `pipeline_efficiency`: the rate of `oac` over that of the slowest stage alone, where
    the link's time is computed, so values slightly above 1 are possible. `replay_share_of_step`: of the whole commit.
    """
    link = None if regime == "none" else EmulatedLink(math.inf, config.latency_ms / 1e3)
    ways, stages = ways_of(config, regime), []
    pipelines = compiled(work, ways, **({"send": link.send, "fetch": link.fetch} if link else {}))
    times = in_turns(
        turns_of(pipelines, work.batches, counted), rounds, regime,
        prepare=lambda: stages.append(stages_ms(work, regime, link, size)),
    )  # fmt: skip
    alone = {name: np.array([stage[name] for stage in stages]) for name in stages[0]}
    results: dict[str, Any] = {"emulated_link": link is not None, "rounds": rounds, "counted_batches": counted}
    results |= compare(times, ways, work.job.batch_size)
    results |= {f"stage_ms_{stage}": float(np.median(each)) for stage, each in alone.items()}
    results["slowest_stage"] = max(alone, key=lambda stage: results[f"stage_ms_{stage}"])
    slowest = 1e-3 * np.max(list(alone.values()), axis=0)
    for way in ways:
        if way.mode == "oac":
            results |= ratio(f"pipeline_efficiency{way.name.removeprefix('oac')}", slowest / times[way.name])
    return results | {f"compilations_{name}": pipeline.compilations for name, pipeline in pipelines.items()}


def table(results: dict[str, Any], ways: dict[str, list[PipelineWay]]) -> str:
    """Format all ways of all regimes, favourable or not: rate, ratios over sync and over async, with intervals."""

    def figure(key, label, digits):
        if f"{key}_{label}" not in results:
            return ""
        low, high = (results[f"{key}_{end}_{label}"] for end in ("low", "high"))
        interval = "" if low is None else f" ({low:.{digits}f} to {high:.{digits}f})"
        return f"{results[f'{key}_{label}']:.{digits}f}{interval}"

    lines = [f"{'link':<28}{'mode':<24}{'examples/s':<26}{'over sync':<24}over async"]
    for label, each in ways.items():
        for way in each:
            rate = figure(f"examples_per_s_{way.name}", label, 0)
            over = [figure(f"{way.name}_over_{other}", label, 2) for other in ("sync", way.of("async"))]
            lines.append(f"{label:<28}{way.name:<24}{rate:<26}{over[0]:<24}{over[1]}".rstrip())
    return "\n".join(lines)


def points(config: Config) -> list[tuple[str, Job]]:
    """Points of the sweep: [(suffix of the keys, job)]."""
    found = []
    for change in SWEEPS[config.sweep]:
        job = Job(rows=config.rows, batch_size=config.batch_size, width=config.width, seed=config.seed)
        words = "".join(f"_{key}_{value}" for key, value in change.items())
        found.append((words, dataclasses.replace(job, **change)))
    return found


def measure_point(run: Run, config: Config, words: str, job: Job, rounds: int, counted: int) -> tuple[dict, dict]:
    """Measure all regimes of a job: (results, {label of a regime: its ways})."""
    work = Work(job, max(config.window, *WINDOWS) + 3 + counted, config.window)
    work.stages_ms(4)  # compiles
    stages, size = work.stages_ms(12), bytes_a_batch(work, len(work.batches))
    results: dict[str, Any] = {f"{name}_alone_ms{words}": value for name, value in stages.items()}
    results[f"replay_share_of_step{words}"] = (stages["replay"] + stages["append"]) / compute_ms(stages)
    ways = {}
    emulated = ["balanced"] if config.sweep != "none" else [*LINKS, "none"]
    for regime in ["none"] if config.link == "none" else emulated:
        label = ("no_link" if regime == "none" else f"{regime}_link") + words
        found = measure_ways(work, regime, size, config, rounds, counted)
        run.log({"regime": label} | found)
        results |= {f"{key}_{label}": value for key, value in found.items()}
        ways[label] = ways_of(config, regime)
    return results, ways


def measure_at_servers(
    run: Run, config: Config, words: str, job: Job, rounds: int, counted: int, cluster: Cluster
) -> tuple[dict, dict]:
    """As `measure_point`, over rows at servers, where messages share the cores with the compute.

    `remote_oac_over_local_oac`: rates over those with tables in this process. `bitwise_equal_remote`: 12 batches
    against `sync` over such tables; `bitwise_equal_async_remote` is its control.
    """
    number, label = max(config.window, *WINDOWS) + 3 + counted, f"remote{words}"
    ways, taken = ways_of(config, "remote"), share_of(config.server_resource)
    start = functools.partial(
        Supervisor, cluster, servers=config.servers or 2, timeout_s=SERVER_TIMEOUT_S, resources=taken
    )
    with contextlib.ExitStack() as opened:
        remote = at_servers(job, number, config.window, start, opened)
        local = Work(job, number, config.window)
        found = equal(remote, local) | measure_remote(remote, local, ways, rounds, counted)
    run.log({"regime": label} | found)
    return {f"{key}{words}": value for key, value in found.items()}, {label: ways}


@contextlib.contextmanager
def cluster_apart(server_cores: int) -> Iterator[Cluster]:
    """Start Ray on the last `server_cores` cores, and leave the others to this process.

    Call it before JAX counts its cores: its processes and threads keep the cores of their start.
    """
    before = sorted(os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, before[-server_cores:])
        with Cluster() as cluster:
            os.sched_setaffinity(0, before[:-server_cores])
            yield cluster
    finally:
        os.sched_setaffinity(0, before)


def check(config: Config) -> None:
    """Refuse inconsistent flags."""
    remote = config.link == "remote"
    refuse(unread(config, {
        "--link remote": (remote, ("servers", "server_cores", "ray_address", "server_resource")),
        "--link emulated": (config.link == "emulated", ("latency_ms",)),
    }) | {
        f"--server-cores {config.server_cores} must leave a core of {cores()} to the trainer.": (
            config.server_cores is not None and not 0 < config.server_cores < cores()
        ),
        "--server-cores is for servers of this machine: leave out --ray-address.": (
            config.server_cores is not None and config.ray_address is not None
        ),
        belongs("server_resource", config.server_resource, "--ray-address"): (
            config.server_resource is not None and config.ray_address is None
        ),
    } | (rule_of_ray() if remote else {}))  # fmt: skip


def main(config: Config) -> dict:
    """Run all points and regimes and return the contents of results.json."""
    check(config)
    rounds, counted = {"smoke": (2, 4), "default": (24, 8), "paper": (96, 16)}[config.preset]
    if config.preset == "smoke":
        config = dataclasses.replace(config, rows=20_000, batch_size=256)
    results: dict[str, Any] = {}
    ways: dict[str, list[PipelineWay]] = {}
    with contextlib.ExitStack() as opened:
        cluster = None
        if config.link == "remote":
            apart, address = config.server_cores, config.ray_address
            cluster = opened.enter_context(cluster_apart(apart) if apart else Cluster(address))
        run = Run("oac_throughput", config, config.workdir)  # starts JAX
        for words, job in points(config):
            here = run, config, words, job, config.rounds or rounds, counted
            found, each = measure_at_servers(*here, cluster) if cluster else measure_point(*here)
            results, ways = results | found, ways | each
        draw(run, results, {label: [way.name for way in each] for label, each in ways.items()})
        run.close(results, table(results, ways))
    return results


def finding(results: Mapping[str, Any], ways: Mapping[str, list[str]]) -> str:
    """Title of the plot of the modes: OAC over sync for each link, with the fastest window of a sweep."""
    found = figures(results)
    each = []
    for label, names in ways.items():
        of = {name: found[f"{name}_over_sync_{label}"] for name in names if re.fullmatch(r"oac(_window_\d+)?", name)}
        best, figure = max(of.items(), key=lambda one: one[1].value)
        window = best.removeprefix("oac").replace("_", " ")
        each.append(f"{in_words(label)}{window and f',{window}'}: {said(figure)}")
    return f"OAC has the results of sync. Its rate over that of sync, {'; '.join(each)}"


def in_words(label: str) -> str:
    """Readable name of a regime.

    >>> in_words("link_link"), in_words("balanced_link_width_64"), in_words("remote")
    ('slower link', 'link as slow as compute, width 64', 'rows at servers')
    """
    named = next(name for name in REGIMES if label.startswith(name))
    more = label.removeprefix(named).replace("_", " ").strip()
    return ", ".join(filter(None, (REGIMES[named], more)))


def over_windows(found: Mapping[str, Figure], label: str, names: list[str]) -> dict[str, tuple]:
    """{mode: (windows, rates)} of a window sweep."""
    lines: dict[str, tuple[list, list]] = {}
    for name in names:
        mode, _, window = name.partition("_window_")
        if window:
            windows, rates = lines.setdefault(mode, ([], []))
            windows.append(int(window))
            rates.append(found[f"examples_per_s_{name}_{label}"])
    return dict(lines)


def draw(run: Run, results: Mapping[str, Any], ways: Mapping[str, list[str]]) -> None:
    """Plot the rates of all ways, {label of a regime: names of its ways}; over the window if that is swept."""
    found, title, path = figures(results), finding(results, ways), run.directory / "modes.png"
    what = "over servers" if any(label.startswith("remote") for label in ways) else "link emulated"
    unit = f"examples/s ({what})"
    swept = {label: over_windows(found, label, names) for label, names in ways.items()}
    if all(swept.values()):
        panels = {f"{unit}, {in_words(label)}": lines for label, lines in swept.items()}
        levels = {
            panel: {"sync": results[f"examples_per_s_sync_{label}"]} for panel, label in zip(panels, swept, strict=True)
        }
        plot(path, panels, "window, batches", title, log_x=True, levels=levels)
        return
    series = {
        in_words(label): {name.replace("_", " "): found[f"examples_per_s_{name}_{label}"] for name in names}
        for label, names in ways.items()
    }
    bars(path, {unit: series}, title)
    if "oac_over_sync_link_link" in results:  # a sweep and `--link none` have other regimes
        draw_ratios(run.directory / "over_sync.png", results)


def finding_over_sync(results: Mapping[str, Any]) -> str:
    """Title of `draw_ratios`."""
    of = lambda mode, label: number(results[f"{mode}_over_sync_{label}"], 3)
    return (
        f"OAC, with the results of sync, has {of('oac', 'balanced_link')} of its rate over a link as slow as compute "
        f"and {of('oac', 'no_link')} without a link; async, whose rows are stale, {of('async', 'balanced_link')} and "
        f"{of('async', 'no_link')}"
    )


def draw_ratios(path: Path, results: Mapping[str, Any]) -> bool:
    """Plot the rates of all modes over sync, with and without an emulated link."""
    found = figures(results)
    series = {
        mode: {in_words(label): found[f"{mode}_over_sync_{label}"] for label in REGIMES if label != "remote"}
        for mode in ("semisync", "async", "oac")
    }
    label = "rate over that of sync (link emulated)"
    return bars(path, {label: series}, finding_over_sync(results), {label: {"sync": 1.0}})


def rates_on_gpu(results: Mapping[str, Any]) -> dict[str, dict[str, Figure]]:
    """Return {mode: {width and batch: rate over sync}}, window 4, of parts `oac` and `oac_wide` of on_accelerator.py.

    Points of a single round, which have no interval, are left out.
    """
    rates: dict[str, dict[str, Figure]] = {"semisync": {}, "async": {}, "oac": {}}
    for name, figure in figures(results).items():
        way, found, point = name.partition("_rate_over_sync_")
        if found and figure.low is not None and way.removesuffix("_4") in rates:
            words = point.split("_")
            of = dict(zip(words[::2], words[1::2], strict=False))
            rates[way.removesuffix("_4")][f"width {of['width']}, batch {int(of['batch']):,}"] = figure
    return rates


def finding_on_gpu(found: Mapping[str, Any]) -> str:
    """Title of the README's plot: OAC over sync at best and at worst."""
    oac, about = rates_on_gpu(found["results"])["oac"].values(), found["environment"]
    best, worst = (said(which(oac, key=lambda figure: figure.value)) for which in (max, min))
    return (
        f"{about['device']}, tables in host memory, code of {about['date']} (commit {about['commit']}): OAC has {best} "
        f"times the rate of sync at best, {worst} at worst"
    )


def draw_on_gpu(path: Path, found: Mapping[str, Any]) -> bool:
    """The README's plot: measured rates of the modes over sync on a GPU, with wide rows and with narrow ones."""
    label = "rate over that of sync (measured, window 4)"
    return bars(path, {label: rates_on_gpu(found["results"])}, finding_on_gpu(found), {label: {"sync": 1.0}})


if __name__ == "__main__":
    command_line(main, Config, __doc__)
