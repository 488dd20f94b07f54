"""How fast each mode of the pipeline trains, beside the slowest of its stages alone.

    python experiments/oac_throughput.py                     an emulated link in three regimes, and none; 6 minutes
    python experiments/oac_throughput.py --link none         tables and device as they are

The work is DLRM-Kaggle of throughput.py over tables in host memory. On a machine whose device is its CPU there is no
link between tables and device, so one is EMULATED: a full-duplex channel of given bandwidth and latency, passed to the
pipeline as its transfer functions; its time is slept, which leaves the cores to the compute. Regimes are set from the
measured compute time of a batch: `balanced` - both directions together take as long as the compute; `link` - each
direction alone takes 1.5 times as long; `compute` - both together take a quarter. All modes take turns in one run.
`sync`, `async` and `semisync` run without ring and replay. Rates are of the steady state: the first W + 2 batches of a
turn are not counted.

`pipeline_efficiency` is the rate of `oac` over that of the slowest stage run alone, by its own workers, on the same
batches. `replay_share_of_step` is the time of replay and append over that of the whole commit.
"""

import dataclasses
import threading
import time
from typing import Any, Literal

import jax
import numpy as np
from contract import Flags, Run, command_line, plot
from oac_work import MODES, Work, turn
from reference import Job, ratio
from tqdm import tqdm


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the benchmark."""

    link: Literal["emulated", "none"] = "emulated"
    rows: int = 1_000_000
    batch_size: int = 2048
    width: int = 16
    window: int = 4
    latency_ms: float = 0.05
    """Of the emulated link, each way."""


class EmulatedLink:
    """A full-duplex channel between host and device: its time is slept, its bytes are those of the arrays."""

    def __init__(self, bytes_per_s: float, latency_s: float):
        self.bytes_per_s, self.latency_s = bytes_per_s, latency_s
        self.lock, self.free_at = threading.Lock(), {"send": 0.0, "fetch": 0.0}

    def pass_time(self, direction: str, tree) -> None:
        """Waits until these bytes would be through, behind all that went this way before."""
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
        with self.lock:
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
    return {
        "balanced": EmulatedLink(both / compute_s, latency),
        "link": EmulatedLink(larger / (1.5 * compute_s), latency),
        "compute": EmulatedLink(both / (0.25 * compute_s), latency),
        "none": None,
    }


def measure(work: Work, regime: str, link: EmulatedLink | None, rounds: int, names: list[str]) -> dict[str, Any]:
    """All modes in turns over one link."""
    options: dict[str, Any] = {"send": link.send, "fetch": link.fetch} if link else {}
    pipelines = {name: work.pipeline(name, **options) for name in names}
    skip = work.window + 2
    for pipeline in pipelines.values():
        turn(pipeline, work.batches[: skip + 2], skip)  # compiles
    turns: dict[str, list[float]] = {name: [] for name in names}
    alone: list[dict[str, float]] = []
    for _ in tqdm(range(rounds), desc=regime, unit="round", disable=None):
        for name, pipeline in pipelines.items():
            turns[name].append(turn(pipeline, work.batches, skip))
        stages, size = work.stages_ms(12)
        commit = stages["replay"] + stages["update"] + stages["append"]
        stage = {name: stages[name] for name in ("plan", "gather", "write_back")} | {"commit": commit}
        if link:
            for direction in ("send", "fetch"):
                stage[direction] = 1e3 * (size[direction] / link.bytes_per_s + link.latency_s)
        alone.append(stage)
    times = {name: np.array(values) for name, values in turns.items()}
    slowest = np.array([max(stage.values()) for stage in alone]) / 1e3
    results: dict[str, Any] = {"emulated_link": link is not None, "examples_per_s": {}}
    results["examples_per_s"] = {n: work.job.batch_size / float(np.median(t)) for n, t in times.items()}
    results["stage_ms"] = {name: float(np.median([stage[name] for stage in alone])) for name in alone[0]}
    results["slowest_stage"] = max(results["stage_ms"], key=results["stage_ms"].__getitem__)
    results |= ratio("oac_over_async", times["async"] / times["oac"])
    results |= ratio("oac_over_sync", times["sync"] / times["oac"])
    results |= ratio("semisync_over_sync", times["sync"] / times["semisync"])
    results |= ratio("pipeline_efficiency", slowest / times["oac"])
    for name in names[4:]:
        counters = pipelines[name].counters
        moved = counters["bytes_sent"] + counters["bytes_fetched"]
        results[f"{name}_bytes_saved_percent"] = 100 * (1 - moved / counters["bytes_without_savings"])
        results |= ratio(f"{name}_over_oac", times["oac"] / times[name])
    results["compilations"] = {name: pipeline.compilations for name, pipeline in pipelines.items()}
    return results


def flat(results: dict, suffix: str) -> dict[str, Any]:
    """One level of keys, with units and regime in them."""
    found: dict[str, Any] = {}
    for key, value in results.items():
        inner = {f"{key}_{name}": v for name, v in value.items()} if isinstance(value, dict) else {key: value}
        found |= {f"{name}_{suffix}": v for name, v in inner.items()}
    return found


def main(config: Config) -> dict:
    """Runs all regimes; returns what results.json holds."""
    run = Run("oac_throughput", config, config.workdir)
    rounds, number = {"smoke": (1, 12), "default": (4, 36), "paper": (20, 100)}[config.preset]
    if config.preset == "smoke":
        config = dataclasses.replace(config, rows=20_000, batch_size=256)
    job = Job(rows=config.rows, batch_size=config.batch_size, width=config.width, seed=config.seed)
    work = Work(job, number, config.window)
    work.stages_ms(4)  # compiles
    stages, size = work.stages_ms(12)
    commit = stages["replay"] + stages["update"] + stages["append"]
    results: dict[str, Any] = {f"{name}_alone_ms": value for name, value in stages.items()}
    results["replay_share_of_step"] = (stages["replay"] + stages["append"]) / commit
    names, lines = list(MODES), {}
    for regime, link in links(config, stages, size).items():
        found = measure(work, regime, link, rounds, names)
        run.log({"regime": regime} | found)
        results |= flat(found, f"{regime}_link" if regime != "none" else "no_link")
        lines[regime] = (names, [found["examples_per_s"][name] for name in names])
    first = "balanced_link" if config.link == "emulated" else "no_link"
    for key in ("oac_over_async", "oac_over_sync", "semisync_over_sync", "pipeline_efficiency"):
        results[key] = results[f"{key}_{first}"]
    results["bytes_saved_percent"] = results[f"oac_skip_both_bytes_saved_percent_{first}"]
    plot(run.directory / "modes.png", {"examples/s (link emulated)": lines}, "mode")
    run.close(results)
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
