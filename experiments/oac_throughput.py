"""How fast each mode of the pipeline trains, beside the slowest of its stages alone.

    python experiments/oac_throughput.py                 an emulated link in three regimes, and none; 10 minutes
    python experiments/oac_throughput.py --sweep window  windows 2, 4, 8 and 16 over the balanced link; 5 minutes
    python experiments/oac_throughput.py --sweep batch   batches of 512 and 4,096 examples; 5 minutes
    python experiments/oac_throughput.py --sweep width   rows of width 8 and 64; 5 minutes
    python experiments/oac_throughput.py --link none     tables and device as they are; 2 minutes

The work is DLRM-Kaggle of throughput.py over tables in host memory. On a machine whose device is
its CPU there is no link between tables and device, so one is EMULATED: a full-duplex channel of
given bandwidth and latency, passed to the pipeline as its transfer functions; its time is slept,
which leaves the cores to the compute. Regimes are set from the measured compute time of a batch:
`balanced` - both directions together take as long as the compute; `link` - each direction alone
takes 1.5 times as long; `compute` - both together take a quarter; `none` - no link. A sweep
measures the balanced one.

All modes take turns, 24 rounds of about a second per mode; a ratio is of the two rates within a
round. Given are the median over the rounds with its 95 % bootstrap interval (`_low`, `_high`), and
the least and most. Rates are of the steady state: the first W + 2 batches of a turn are not
counted, and behind the last one the stream goes on. `sync`, `async` and `semisync` run without ring
and replay; `oac_device` finds stale rows on the device, as the paper says, where `oac` plans them
on the host. The way that moves the fewest rows is timed over the link-bound link only.

`pipeline_efficiency` is the rate of `oac` over that of the slowest stage run alone, by its own
workers, on the same batches. `replay_share_of_step` is the time of replay and append over that of
the whole commit. `bytes_saved_percent` compares the bytes that went to the device and back with
those of `oac` on the same batches; it is negative where the lists of what may stay weigh more than
what stays.
"""

import dataclasses
import itertools
import threading
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from contract import Flags, Run, command_line, plot
from oac_work import Work, turn
from pictures import bars
from reference import Job, ratio
from report import figures
from tqdm import tqdm

from jaxrec.oac import Pipeline
from jaxrec.oac.ways import nbytes

BASIC = ("sync", "semisync", "async", "oac", "oac_device")
FEWER_ROWS = ("oac_skip_stale_reads", "oac_skip_rewritten", "oac_skip_both")
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

    link: Literal["emulated", "none"] = "emulated"
    sweep: Literal["none", "window", "batch", "width"] = "none"
    """What to measure several points of."""
    rounds: int = 0
    """Turns of each mode; by the preset if 0."""
    rows: int = 1_000_000
    batch_size: int = 2048
    width: int = 16
    window: int = 4
    latency_ms: float = 0.05
    """Of the emulated link, each way."""


class PipelineWay(NamedTuple):
    """A mode of oac_work.py, and its window where it has one."""

    mode: str
    window: int | None = None

    @property
    def name(self) -> str:
        """For example oac_window_8; the mode alone for the window of --window."""
        return self.mode if self.window is None else f"{self.mode}_window_{self.window}"

    def of(self, mode: str) -> str:
        """The name of another mode with this window."""
        return PipelineWay(mode, self.window).name


class EmulatedLink:
    """A full-duplex channel between host and device: its time is slept, its bytes are those of the
    arrays.

    `passed` counts the bytes that went through, {"send": ..., "fetch": ...}.
    """

    def __init__(self, bytes_per_s: float, latency_s: float):
        self.bytes_per_s, self.latency_s = bytes_per_s, latency_s
        self.lock, self.free_at = threading.Lock(), {"send": 0.0, "fetch": 0.0}
        self.passed = {"send": 0, "fetch": 0}

    def pass_time(self, direction: str, tree) -> None:
        """Waits until these bytes would be through, behind all that went this way before."""
        size = nbytes(tree)
        with self.lock:
            self.passed[direction] += size
            start = max(time.perf_counter(), self.free_at[direction])
            self.free_at[direction] = start + size / self.bytes_per_s
            until = self.free_at[direction] + self.latency_s
        time.sleep(max(0.0, until - time.perf_counter()))

    def send(self, tree, placement):
        """To the device."""
        self.pass_time("send", tree)
        return jax.device_put(tree, placement)

    def fetch(self, tree):
        """To the host, when the device has made it."""
        jax.block_until_ready(tree)
        self.pass_time("fetch", tree)
        return jax.tree.map(np.asarray, tree)


def links(config: Config, stages: dict[str, float], size: dict[str, int]) -> dict[str, EmulatedLink | None]:
    """The regimes: {name: link}."""
    if config.link == "none":
        return {"none": None}
    compute_s = 1e-3 * (stages["replay"] + stages["update"] + stages["append"])
    both, larger, latency = sum(size.values()), max(size.values()), config.latency_ms / 1e3
    balanced = EmulatedLink(both / compute_s, latency)
    if config.sweep != "none":
        return {"balanced": balanced}
    return {
        "balanced": balanced,
        "link": EmulatedLink(larger / (1.5 * compute_s), latency),
        "compute": EmulatedLink(both / (0.25 * compute_s), latency),
        "none": None,
    }


def ways_of(config: Config, regime: str) -> list[PipelineWay]:
    """What is compared in a regime."""
    if config.sweep == "window":
        return [PipelineWay("sync"), *itertools.starmap(PipelineWay, itertools.product(("async", "oac"), WINDOWS))]
    return [PipelineWay(mode) for mode in (*BASIC, *(("oac_skip_both",) if regime == "link" else ()))]


def take_turns(work: Work, ways: list[PipelineWay], link: EmulatedLink | None, rounds: int, counted: int, words: str):
    """All ways in turns over one link.

    Returns:
      ({way: seconds per batch f64[rounds]}, {stage: milliseconds f64[rounds]}, {way: programs
      compiled}).
    """
    options: dict[str, Any] = {"send": link.send, "fetch": link.fetch} if link else {}
    pipelines: dict[str, Pipeline] = {}
    for way in ways:
        window: dict[str, Any] = {} if way.window is None else {"window": way.window}
        pipelines[way.name] = pipeline = work.pipeline(way.mode, **window, **options)
        turn(pipeline, work.batches[: pipeline.window + 4], pipeline.window + 2)  # compiles
    turns: dict[str, list[float]] = {name: [] for name in pipelines}
    stages: list[dict[str, float]] = []
    for _ in tqdm(range(rounds), desc=words, unit="round", disable=None):
        for name, pipeline in pipelines.items():
            skip = pipeline.window + 2
            turns[name].append(turn(pipeline, work.batches[: skip + 1 + counted], skip))
        stages.append(stages_ms(work, link))
    alone = {name: np.array([stage[name] for stage in stages]) for name in stages[0]}
    compiled = {name: pipeline.compilations for name, pipeline in pipelines.items()}
    return {name: np.array(times) for name, times in turns.items()}, alone, compiled


def stages_ms(work: Work, link: EmulatedLink | None) -> dict[str, float]:
    """What each stage of a batch takes alone, by its own workers."""
    stages, size = work.stages_ms(6)
    commit = stages["replay"] + stages["update"] + stages["append"]
    found = {name: stages[name] for name in ("plan", "gather", "write_back")} | {"commit": commit}
    if link:
        found |= {way: 1e3 * (size[way] / link.bytes_per_s + link.latency_s) for way in ("send", "fetch")}
    return found


def compare(times: dict[str, np.ndarray], ways: list[PipelineWay], batch_size: int) -> dict[str, Any]:
    """Rates, and the ratios of rates within a round: over sync, of all oac's over async and of its
    kinds over oac.

    Args:
      times: seconds per batch f64[rounds] of each way, by its name.
      ways: those that were timed, sync and async or not.
      batch_size: examples in a batch.

    Returns:
      Flat results, as `ratio` makes them.

    >>> times = {"sync": np.array([2.0, 3.0]), "oac": np.array([1.0, 2.0])}
    >>> found = compare(times, [PipelineWay("sync"), PipelineWay("oac")], 6)
    >>> found["examples_per_s_sync"], found["oac_over_sync"], "oac_over_async" in found
    (2.5, 1.75, False)
    """
    results: dict[str, Any] = {}
    for way in ways:
        mine, name = times[way.name], way.name
        results |= ratio(f"examples_per_s_{name}", batch_size / mine)
        others = ["sync"] if way.mode != "sync" else []
        if way.mode.startswith("oac"):
            others += [way.of("async")] + ([way.of("oac")] if way.mode != "oac" else [])
        for other in others:
            if other in times:
                results |= ratio(f"{name}_over_{other}", times[other] / mine)
    return results


def measure_ways(work: Work, regime: str, link: EmulatedLink | None, config: Config, rounds: int, counted: int) -> dict:
    """All ways in turns over one link: rates, ratios and stages."""
    ways = ways_of(config, regime)
    times, alone, compiled = take_turns(work, ways, link, rounds, counted, regime)
    results: dict[str, Any] = {"emulated_link": link is not None, "rounds": rounds, "counted_batches": counted}
    results |= compare(times, ways, work.job.batch_size)
    results |= {f"stage_ms_{stage}": float(np.median(each)) for stage, each in alone.items()}
    results["slowest_stage"] = max(alone, key=lambda stage: results[f"stage_ms_{stage}"])
    slowest = 1e-3 * np.max(list(alone.values()), axis=0)
    for way in ways:
        if way.mode == "oac":
            results |= ratio(f"pipeline_efficiency{way.name.removeprefix('oac')}", slowest / times[way.name])
    return results | {f"compilations_{name}": number for name, number in compiled.items()}


def savings(work: Work, number: int) -> dict[str, float]:
    """What the ways that move fewer rows move, in bytes, beside `oac` on the same batches."""
    results: dict[str, float] = {}
    moved: dict[str, int] = {}
    for mode in ("oac", *FEWER_ROWS):
        meter = EmulatedLink(float("inf"), 0.0)
        with work.pipeline(mode, send=meter.send, fetch=meter.fetch) as pipeline:
            for _ in pipeline.run(itertools.islice(itertools.cycle(work.batches), number)):
                pass
        moved[mode] = sum(meter.passed.values())
        results |= {f"{mode}_{way}_mb_a_batch": 1e-6 * size / number for way, size in meter.passed.items()}
        if mode != "oac":
            results[f"{mode}_bytes_saved_percent"] = 100 * (1 - moved[mode] / moved["oac"])
    return results


def table(results: dict[str, Any], ways: dict[str, list[PipelineWay]]) -> str:
    """All ways of all regimes, favourable or not: rate, rate over sync and over async, with
    intervals."""

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
    """What the flags ask for: [(words for the keys, job)]."""
    found = []
    for change in SWEEPS[config.sweep]:
        job = Job(rows=config.rows, batch_size=config.batch_size, width=config.width, seed=config.seed)
        words = "".join(f"_{key}_{value}" for key, value in change.items())
        found.append((words, dataclasses.replace(job, **change)))
    return found


def measure_point(run: Run, config: Config, words: str, job: Job, rounds: int, counted: int) -> tuple[dict, dict]:
    """All regimes of a job: (results, {label of a regime: its ways})."""
    work = Work(job, max(config.window, *WINDOWS) + 3 + counted, config.window)
    work.stages_ms(4)  # compiles
    stages, size = work.stages_ms(12)
    commit = stages["replay"] + stages["update"] + stages["append"]
    results: dict[str, Any] = {f"{name}_alone_ms{words}": value for name, value in stages.items()}
    results[f"replay_share_of_step{words}"] = (stages["replay"] + stages["append"]) / commit
    ways = {}
    for regime, link in links(config, stages, size).items():
        label = ("no_link" if link is None else f"{regime}_link") + words
        found = measure_ways(work, regime, link, config, rounds, counted)
        run.log({"regime": label} | found)
        results |= {f"{key}_{label}": value for key, value in found.items()}
        ways[label] = ways_of(config, regime)
    return results | (savings(work, 4 * counted) if config.sweep == "none" else {}), ways


def main(config: Config) -> dict:
    """Runs all points and regimes; returns what results.json holds."""
    run = Run("oac_throughput", config, config.workdir)
    rounds, counted = {"smoke": (2, 4), "default": (24, 8), "paper": (96, 16)}[config.preset]
    if config.preset == "smoke":
        config = dataclasses.replace(config, rows=20_000, batch_size=256)
    results: dict[str, Any] = {}
    ways: dict[str, list[PipelineWay]] = {}
    for words, job in points(config):
        found, each = measure_point(run, config, words, job, config.rounds or rounds, counted)
        results, ways = results | found, ways | each
    draw(run, results, ways)
    run.close(results, table(results, ways))
    return results


def draw(run: Run, results: dict[str, Any], ways: dict[str, list[PipelineWay]]) -> None:
    """The rates of all ways."""
    lines = {
        label: ([way.name for way in each], [results[f"examples_per_s_{way.name}_{label}"] for way in each])
        for label, each in ways.items()
    }
    plot(run.directory / "modes.png", {"examples/s (link emulated)": lines}, "mode")
    if "oac_over_sync_link_link" in results:  # a sweep and `--link none` have other regimes
        draw_ratios(run.directory / "over_sync.png", results)


def draw_ratios(path: Path, results: dict[str, Any]) -> bool:
    """The picture of the README: the rates of all modes over that of sync, with and without a link."""
    regimes = {
        "link as slow\nas compute": "balanced_link",
        "link slower": "link_link",
        "link faster": "compute_link",
        "no link": "no_link",
    }
    found = figures(results)
    series = {
        mode: {label: found[f"{mode}_over_sync_{key}"] for label, key in regimes.items()}
        for mode in ("semisync", "async", "oac")
    }
    title = "OAC has the results of sync, and nearly the rate of modes whose rows are stale"
    return bars(path, {"rate over that of sync (link emulated)": series}, title)


if __name__ == "__main__":
    command_line(main, Config, __doc__)
