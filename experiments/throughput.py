"""How fast a training step is, part by part, beside the fastest PyTorch doing the same work.

    python experiments/throughput.py --tables host
    python experiments/throughput.py --tables host --against torch          needs torch; FBGEMM where it is installed
    python experiments/throughput.py --sweep rows                           1M to 50M rows

The reference work DLRM-Kaggle: bottom 13-512-256-64-16, 26 lookups of width 16 in one stack of 10M rows, dot
interaction, top 512-256-1, row-wise Adagrad on rows, SGD on the dense part, batch 2,048, f32, ids by a power law of
exponent 1.05. Every side is a process of its own; they take turns, a round of steps each, so that a slow minute hits
all of them. The ratios are of times: above 1 jaxrec is faster. `gemm_share_of_step` is the time of the step's matrix
products alone in JAX, in the same turns, over that of the step. Expected: 6 minutes with `--against torch`, two cores;
figures in the README.
"""

import dataclasses
import functools
from typing import Any, Literal

import numpy as np
from contract import Flags, Run, command_line
from reference import Job, ratio
from sides import Failed, JaxSide, Side, TorchSide


@dataclasses.dataclass(frozen=True)
class Config(Flags, Job):
    """Flags of the benchmark."""

    against: Literal["none", "torch"] = "none"
    rounds: int = 0
    """Turns of each side; by the preset if 0."""
    sweep: Literal["none", "rows", "batch", "width"] = "none"


def measure(config: Config, rounds: int, steps: int) -> dict:
    """All sides in turns; the flat results of one configuration."""
    makers: dict[str, Any] = {"jaxrec": functools.partial(JaxSide, config)}
    if config.against == "torch":
        import torch_dlrm

        makers |= {name: functools.partial(TorchSide, config, name) for name in torch_dlrm.VARIANTS}
    sides: dict[str, Side] = {}
    results: dict[str, Any] = {}
    for name, make in makers.items():
        try:
            sides[name] = Side(make)
            sides[name].ask("run", steps)  # compiles
        except Failed as error:
            sides.pop(name, None)
            print(f"{name} left out: {str(error).strip().splitlines()[-1][:200]}")
    turns: dict[str, list[float]] = {name: [] for name in [*sides, "gemm"]}
    sides["jaxrec"].ask("gemm", steps)  # compiles
    for _ in range(rounds):
        for name, side in sides.items():
            turns[name].append(side.ask("run", steps))
        turns["gemm"].append(sides["jaxrec"].ask("gemm", steps))
    ours = np.array(turns["jaxrec"])
    results["examples_per_s"] = config.batch_size / float(np.median(ours))
    results["step_ms"] = 1e3 * float(np.median(ours))
    results |= sides["jaxrec"].ask("parts", 4 * steps)
    results["plan_read_put_share_of_step"] = (
        sum(results[f"{part}_ms"] for part in ("plan", "read", "put")) / results["step_ms"]
    )
    results["gemm_ms"] = 1e3 * float(np.median(turns["gemm"]))
    results["gemm_share_of_step"] = float(np.median(np.array(turns["gemm"]) / ours))
    results["peak_memory_mb"] = sides["jaxrec"].ask("peak_mb")
    results["tables_and_slots_mb"] = sides["jaxrec"].table_bytes / 2**20
    for name in sides:
        if name != "jaxrec":
            results |= ratio(f"jaxrec_over_{name}", np.array(turns[name]) / ours)
            results[f"{name}_step_ms"] = 1e3 * float(np.median(turns[name]))
    peers = [name for name in sides if name.startswith("torch")]
    if peers:
        best = min(peers, key=lambda name: np.median(turns[name]))
        results |= {"fastest_torch": best} | ratio("jaxrec_over_torch", np.array(turns[best]) / ours)
    for side in sides.values():
        side.close()
    return results


SWEEPS = {
    "rows": ("rows", (1_000_000, 10_000_000, 50_000_000)),
    "batch": ("batch_size", (512, 2048, 8192, 32768)),
    "width": ("width", (16, 32, 64, 128)),
}


def main(config: Config) -> dict:
    """Runs one configuration or a sweep; returns what results.json holds."""
    run = Run("throughput", config, config.workdir)
    rounds, steps = {"smoke": (2, 3), "default": (8, 10), "paper": (30, 20)}[config.preset]
    rounds = config.rounds or rounds
    if config.preset == "smoke":
        config = dataclasses.replace(config, rows=min(config.rows, 200_000))
    if config.sweep == "none":
        results = measure(config, rounds, steps)
        run.log(results)
    else:
        field, values = SWEEPS[config.sweep]
        results = {}
        for value in values:
            changed: dict[str, Any] = {field: value}
            row = measure(dataclasses.replace(config, **changed), rounds, steps)
            run.log({field: value} | row)
            results |= {f"{key}_at_{field}_{value}": row[key] for key in row}
    run.close(results)
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
