"""Measure what server failures really cost: CPR compared with full recovery and with no failure, processes killed.

    python tests/soak/cluster_failures.py                     1 GB of tables at 2 servers, 3 kills; ten minutes
    python tests/soak/cluster_failures.py --preset smoke      small tables and one kill; two minutes
    python tests/soak/cluster_failures.py --trace FILE        gaps and servers of a trace, scaled to the run
    python tests/soak/cluster_failures.py --kill trainers servers sync    of a pool of free-running trainers

DLRM with OAC over server processes of this machine, which are killed by `os.kill(pid, 9)` at the same steps in every
arm but `none`; all arms save at the same steps. **All costs are measured, on one machine.** `equal_to_serial`: a
partial arm has the bits of `Serial` that loses the same shards at the same steps; full recovery has those of `none`.
`seconds_kill_to_next_step` is a median over the partial arms, an overhead the time of an arm over that of `none`, minus
1; comparing the rows of survivors is excluded. (cluster_overhead.py saves at the intervals that equations give.) With
--kill, processes of those kinds die in turn; `KIND_seconds_until_all_step`: until every trainer with work left has made
another step. Result: experiments/results/two_cores_cpu/cluster_failures*.json.
"""

import dataclasses
import functools
import itertools
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import numpy as np
import optax
from cluster_work import SCHEMES, ClusterJob, Killer, with_sizes
from main.cli import Flags, Run, command_line, grid, listing, plot, refuse, rule_of_ray, unread
from main.click_data import TEST_BATCH, ClickJob, click_job
from main.model import make_model
from main.pools import SharedStream
from main.report import number
from studies.failure_traces import load_infinitehbd, load_lanl
from studies.pool_kills import KINDS, click_stream, pool_figures, trained_pool
from studies.recovery_overheads import ARMS, PARTS, draw_overheads

from jaxrec.cluster import Cluster
from jaxrec.cluster.trainers import TrainerWork
from jaxrec.data.synthetic import SyntheticClicks, scaled_cardinalities
from jaxrec.embedding import rowwise_adagrad
from jaxrec.loop import evaluate
from jaxrec.prefetch import planned
from jaxrec.shadowsync import easgd

SMOOTHED = 8  # steps per point of a picture
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"rows": 20_000, "steps": 64, "batch_size": 256, "kills": 1},
    "default": {"rows": 14_700_000, "steps": 400, "batch_size": 2048, "kills": 3},
    "paper": {"rows": 14_700_000, "steps": 4000, "batch_size": 2048, "kills": 16},
}


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the experiment; the preset decides those that are not given."""

    rows: int | None = None
    """Rows of all tables together; each takes 68 bytes with its slot."""
    steps: int | None = None
    batch_size: int | None = None
    kills: int | None = None
    """Servers killed in each arm but none."""
    kill: tuple[Literal["servers", "trainers", "sync"], ...] = ("servers",)
    """Kinds of processes to kill, in turn."""
    trainers: int = 2
    """Trainers of the pool in which more than servers are killed."""
    servers: int = 2
    spares: int = 1
    """Standby processes, in which a successor begins without waiting for a start."""
    save_every_steps: float | None = None
    """T_save of all arms; by default a fifth of the steps."""
    fail_shape: float = 0.5
    """Shape of the gamma law of the gaps; below 1 failures come in bursts."""
    trace: Path | None = None
    """Take gaps and servers from InfiniteHBD's fault trace (.json) or LANL's records (.csv), compressed or not."""
    lanl_system: int = 20
    """Number of the system in LANL's records."""


def sized(config: Config) -> Config:
    """Return the flags with the values of the preset filled in."""
    config = with_sizes(config, SIZES)
    return config if config.save_every_steps else dataclasses.replace(config, save_every_steps=(config.steps or 0) / 5)


def kills_of(config: Config) -> dict[int, int]:
    """Draw the kills of all arms by the seed; return {step: server}.

    The gaps before, between and after the kills are drawn, or taken from a random position of the trace, and scaled to
    fill the run after its first eighth.
    """
    rng, number, steps = np.random.default_rng(config.seed), config.kills or 0, config.steps or 0
    if config.trace is None:
        gaps = rng.gamma(config.fail_shape, 1.0, number + 1)
        servers = rng.integers(config.servers, size=number)
    else:
        lanl = lambda path: load_lanl(path, config.lanl_system)
        failures = (load_infinitehbd if is_json(config.trace) else lanl)(config.trace)
        hours, places = np.unique(failures.hours, return_index=True)
        if len(hours) < number + 2:
            raise ValueError(f"{config.trace} has {len(hours)} failures: too few for --kills {number}.")
        start = int(rng.integers(len(hours) - number - 1))
        gaps = np.diff(hours[start : start + number + 2])
        servers = failures.node[places[start + 1 : start + number + 1]] % config.servers
    begin, end = steps // 8, steps - 1
    share = np.cumsum(gaps)[:number] / gaps.sum()
    found: dict[int, int] = {}
    for place, server in zip(share, servers, strict=True):
        step = begin + int(place * (end - begin))
        while step in found:  # one kill per step: the other one goes to the step before
            step -= 1
        found[step] = int(server)
    return found


def is_of_pool(config: Config) -> bool:
    """Whether processes of a pool of free-running trainers are killed."""
    return set(config.kill) != {"servers"}


def is_json(trace: Path) -> bool:
    """Whether a trace is InfiniteHBD's."""
    return ".json" in trace.name


def check(config: Config) -> None:
    """Refuse given flags that do not go together."""
    pool, trace = is_of_pool(config), config.trace
    never_read = unread(config, {
        "--kill trainers or sync": (pool, ("trainers",)),
        "--kill servers alone": (not pool, ("spares", "save_every_steps")),
        "gaps that are drawn, without --trace": (trace is None, ("fail_shape",)),
        "--trace with LANL's records": (trace is not None and not is_json(trace), ("lanl_system",)),
    })  # fmt: skip
    config = sized(config)
    steps, kills = config.steps or 0, config.kills or 0
    refuse(never_read | {
        f"--kills {kills} are too many for --steps {steps}: give at least 16 steps, and 8 for each.": (
            steps < max(16, 8 * kills)
        ),
        f"--servers {config.servers} must be at most 8, the number of shards.": config.servers > 8,
        f"--save-every-steps {config.save_every_steps:g} must be at least 8 and at most --steps {steps}.": (
            not 8 <= (config.save_every_steps or 0) <= steps
        ),
        "--kill needs at least one kind of process.": not config.kill,
    } | rule_of_ray())  # fmt: skip


def of_kills(killers: dict[str, Killer]) -> dict[str, Any]:
    """Return the seconds of each part of recovery: sums per arm, and medians over the partial arms."""
    results: dict[str, Any] = {}
    seconds = {arm: [kill.seconds() for kill in killer.kills if kill.next_step] for arm, killer in killers.items()}
    for arm, each in seconds.items():
        results |= {f"{arm}_{part}_s": sum(one[part] for one in each) for part in PARTS}
        results |= {f"{arm}_{part}_s_median": statistics.median(one[part] for one in each) for part in PARTS if each}
    partial = [one for arm in SCHEMES for one in seconds.get(arm, ())]
    for key, part in (("kill_to_next_step", "to_next_step"), ("noticing", "noticing"), ("starting", "starting"),
                      ("restoring", "restoring")):  # fmt: skip
        values = [one[part] for one in partial]
        results |= {f"seconds_{key}": statistics.median(values), f"seconds_{key}_max": max(values)}
    return results


def overheads(rows: dict[str, dict[str, Any]], parts: dict[str, Any]) -> dict[str, Any]:
    """Return the overhead of each arm and its parts, in percent of the time of arm none."""
    useful, results = rows["none"]["seconds"], dict[str, Any]()
    for arm, row in rows.items():
        if arm == "none":
            continue
        results[f"{arm}_overhead_percent"] = 100 * (row["seconds"] / useful - 1)
        results |= {f"{arm}_{part}_percent": 100 * parts[f"{arm}_{part}_s"] / useful for part in PARTS}
        results[f"{arm}_saving_percent"] = 100 * row["saving_s"] / useful
        results[f"auc_lost_{arm}"] = rows["none"]["test_auc"] - row["test_auc"]
    return results | {"cpr_overhead_percent": results["mfu_overhead_percent"]}


def bits(job: ClusterJob, known: dict[str, dict], above: Path) -> dict[str, bool]:
    """Return whether each arm ended with the required bits."""
    same = {f"{arm}_equal_to_serial": known[arm]["digests"] == job.serially(
        arm, known[arm]["losses"], known[arm]["voided"], above) for arm in SCHEMES}  # fmt: skip
    same["full_equal_to_none"] = known["full"]["digests"] == known["none"]["digests"]
    control = known["vanilla"]["digests"] != known["none"]["digests"]
    return same | {"equal_to_serial": all(same.values()), "vanilla_differs_from_none": control}


def table(results: dict[str, Any]) -> str:
    """Format overheads and their parts, then the times of a kill."""
    columns: dict[str, Any] = {"overhead, %": "{}_overhead_percent"}
    columns |= {f"{part}, %": f"{{}}_{part}_percent" for part in (*PARTS, "saving")}
    columns |= {"PLS": "{}_pls", "AUC lost": "auc_lost_{}", "steps repeated": "{}_lost_steps"}
    arms = [arm for arm in ARMS if arm != "none"]
    rest = {key: value for key, value in results.items() if key.startswith("seconds_")}
    rest |= {key: results[key] for key in ("kills", "survivors_bit_identical", "equal_to_serial")}
    return grid(results, "arm", arms, columns) + "\n\n" + listing(rest, {"A kill": [""]})


def finding(results: Mapping[str, Any], arm: str) -> str:
    """Return the caption of the picture of an arm."""
    to_next = sum(results[f"{arm}_{part}_s_median"] for part in PARTS if part != "repeating")
    again = f", after which it repeats {results[f'{arm}_lost_steps']} steps" if results[f"{arm}_lost_steps"] else ""
    kills = results[f"{arm}_kills"]
    there = f"s there are {kills} kills" if kills > 1 else " there is one kill"
    return (
        f"{arm} takes {number(results[f'{arm}_overhead_percent'], 3)} % more time than none, and goes on "
        f"{number(to_next, 3)} s after a server is killed (the sum of medians). At the dotted line{there}{again}"
    )


def draw(run: Run, config: Config, killers: dict[str, Killer], results: Mapping[str, Any]) -> None:
    """Draw the rate of new examples over time, each arm beside none, with kills marked; and the parts of overheads."""
    lines = {arm: rates(killer.times, config.batch_size or 0) for arm, killer in killers.items()}
    for arm, killer in killers.items():
        marks = [(kill.killed - killer.times[0][0], "") for kill in killer.kills]  # labels would overlap
        panels = {"new examples/s": {name: lines[name] for name in dict.fromkeys(("none", arm))}}
        if arm != "none":
            plot(run.directory / f"rates_{arm}.png", panels, "seconds", finding(results, arm), marks=marks)
    draw_overheads(run.directory / "overheads.png", results)


def rates(times: list[tuple[float, int]], batch_size: int, every: int = SMOOTHED) -> tuple[list[float], list[float]]:
    """Return seconds since the first step, and the rate of examples that were not trained before.

    Args:
      times: (seconds, step) of each committed step.
      batch_size: examples per step.
      every: steps per point.

    >>> rates([(0.0, 1), (8.0, 9), (16.0, 5), (24.0, 13)], batch_size=2, every=1)
    ([8.0, 16.0, 24.0], [2.0, 0.0, 1.0])
    """
    points = times[::every]
    furthest = np.maximum.accumulate([step for _, step in points])
    seconds = np.array([at for at, _ in points]) - points[0][0]
    return seconds[1:].tolist(), (np.diff(furthest) * batch_size / np.diff(seconds)).tolist()


def pool_work(config: Config, clicks: SyntheticClicks, job: ClickJob) -> TrainerWork:
    """Return the work of a pool whose trainers make all --steps together."""
    steps = config.steps or 0
    stream = SharedStream(functools.partial(click_stream, clicks, config.batch_size or 0, steps), steps)
    params = job.init(config.seed)
    return TrainerWork(job.task, params, stream, easgd())


def kill_in_pool(run: Run, config: Config) -> dict:
    """Kill processes of several kinds in a pool; return the contents of results.json."""
    clicks = SyntheticClicks(scaled_cardinalities(config.rows or 0), seed=config.seed)
    job = click_job(clicks.cardinalities, make_model("dlrm", 16), optax.adam(1e-3), rowwise_adagrad(0.02))
    work, eval_step = pool_work(config, clicks, job), job.eval_step()
    steps, batch_size = config.steps or 0, config.batch_size or 0
    kinds = itertools.cycle([KINDS[kind] for kind in config.kill])
    plan = {step: next(kinds) for step in sorted(kills_of(config))}
    results: dict[str, Any] = {"regime": "free-running, measured", "trainers": config.trainers}
    lines, marks = {}, []
    with Cluster() as cluster:
        for arm, killed in (("none", {}), ("killed", plan)):
            directory = run.directory / "images" if killed else None
            options = config.trainers, config.servers, killed, config.seed, directory
            with trained_pool(cluster, work, *options) as (state, stats, killer):
                stream = clicks.stream(TEST_BATCH, batches=max(4, min(50, steps // 8)), test=True)
                auc = evaluate(state, planned(job.spec, stream), eval_step)["auc"]
            row = pool_figures(stats, killer, steps // config.trainers * config.trainers * batch_size)
            run.log({"arm": arm, "test_auc": auc} | row)
            results |= {f"{arm}_{key}": value for key, value in row.items()} | {f"{arm}_test_auc": auc}
            looks = [look for look in killer.looks if look[1]]
            lines[arm] = rates(looks, batch_size, every=10)
            marks = [(kill.killed - looks[0][0], "") for kill in killer.kills]
    results["killed_overhead_percent"] = 100 * (results["killed_seconds"] / results["none_seconds"] - 1)
    results["auc_lost_killed"] = results["none_test_auc"] - results["killed_test_auc"]
    more = number(results["killed_overhead_percent"], 3)
    title = f"{config.trainers} trainers: {results['killed_kills']} kills (dotted) take {more} % more time"
    panels = {"examples/s, repeated ones included": lines}
    plot(run.directory / "rates_of_pool.png", panels, "seconds", title, marks=marks)
    columns = {"seconds": "{}_seconds", "kills": "{}_kills", "test AUC": "{}_test_auc", "lost": "{}_examples_lost"}
    rest = {key: value for key, value in results.items() if "_seconds_" in key or "percent" in key}
    run.close(results, grid(results, "arm", ["none", "killed"], columns) + "\n\n" + listing(rest, {"A kill": [""]}))
    return results


def main(config: Config) -> dict:
    """Train all arms and compare their bits; return the contents of results.json."""
    check(config)
    given, config = config, sized(config)
    run = Run("cluster_failures", given, config.workdir)
    if is_of_pool(config):
        return kill_in_pool(run, config)
    plan = kills_of(config)
    job = ClusterJob(
        config.rows or 0, config.steps or 0, config.batch_size or 0, config.save_every_steps or 0.0, config.servers,
        config.seed, config.spares,
    )  # fmt: skip
    rows: dict[str, dict[str, Any]] = {}
    killers: dict[str, Killer] = {}
    known: dict[str, dict] = {}
    with Cluster() as cluster:
        for arm in ARMS:
            rows[arm], killers[arm], known[arm] = job.run(arm, plan, cluster, run.directory)
            run.log(rows[arm] | {"kill": [kill.seconds() for kill in killers[arm].kills if kill.next_step]})
    found = of_kills({arm: killer for arm, killer in killers.items() if arm != "none"})
    results = {f"{arm}_{key}": value for arm, row in rows.items() for key, value in row.items() if key != "arm"}
    results |= found | overheads(rows, found) | bits(job, known, run.directory)
    results["kills"] = sum(len(killer.kills) for killer in killers.values())
    results["survivors_bit_identical"] = not any(killers[arm].survivors_changed for arm in SCHEMES)
    draw(run, config, killers, results)
    run.close(results, table(results))
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
