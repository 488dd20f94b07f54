"""Time of a training step and its parts, compared with the fastest PyTorch doing the same work.

    python experiments/throughput.py --tables host --against torch  needs torch; FBGEMM where installed; 7 minutes
    python experiments/throughput.py --sweep rows                   1M to 50M rows
    python experiments/throughput.py --sweep width --against torch  width 16 to 128, 2M rows are enough
    python experiments/throughput.py --hots mlperf --against torch  bags, 214 ids an example
    python experiments/throughput.py --model dcnv2_mlperf --width 128

The reference workload DLRM-Kaggle: bottom MLP 13-512-256-64-16, 26 lookups of width 16 in one stack of 10M rows, dot
interaction, top MLP 512-256-1, row-wise Adagrad on rows, SGD on the dense part, batch 2,048, f32, ids from a power law
of exponent 1.05. Sides are processes that alternate; ratios are of times: above 1 jaxrec is faster (`measure_sides`
has the keys). Result: results/two_cores_cpu/throughput_*.json.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from accelerator.measure import last_line
from main.cli import Figure, Flags, Run, bars, command_line, grid, listing, plot, say
from main.report import figures, number, said
from studies.reference import Job, ratio
from studies.sides import Failed, JaxSide, Side, TorchSide
from studies.turns import in_turns


@dataclasses.dataclass(frozen=True)
class Config(Flags, Job):
    """Flags of the benchmark."""

    against: Literal["none", "torch"] = "none"
    rounds: int = 0
    """Timed rounds of each side; 0 takes the preset's number."""
    sweep: Literal["none", "rows", "batch", "width"] = "none"


def started(config: Config, steps: int) -> dict[str, Side]:
    """Start and compile a process per side; sides that cannot do the work are left out with a message."""
    makers: dict[str, Any] = {"jaxrec": functools.partial(JaxSide, config)}
    if config.against == "torch":
        from studies import torch_dlrm

        makers |= {name: functools.partial(TorchSide, config, name) for name in torch_dlrm.VARIANTS}
    sides: dict[str, Side] = {}
    for name, make in makers.items():
        try:
            sides[name] = Side(make)
            sides[name].ask("run", steps)  # compiles
        except Failed as error:
            sides.pop(name, None)
            say(f"{name} left out: {last_line(error)[:200]}")
    for what in ("gemm", "run_planned", "parts"):
        sides["jaxrec"].ask(what, steps)  # compiles
    return sides


def sides_in_turns(sides: dict[str, Side], rounds: int, steps: int) -> dict[str, np.ndarray]:
    """Seconds per step, f64[rounds], of every side, and of what jaxrec's step consists of, interleaved."""
    ours = sides["jaxrec"]
    ask = lambda side, what: functools.partial(side.ask, what, steps)
    asked = {name: ask(side, "run") for name, side in sides.items()}
    asked |= {"gemm": ask(ours, "gemm"), "planned": ask(ours, "run_planned"), "parts": ask(ours, "parts")}
    turns = in_turns(asked, rounds, "rounds")
    parts = turns.pop("parts")
    turns |= {name: [each[name] for each in parts] for name in STEP_PARTS}
    return {name: np.array(times) for name, times in turns.items()}


def measure_sides(config: Config, rounds: int, steps: int) -> dict:
    """Measure all sides in interleaved rounds; return the flat results of one configuration.

    `gemm_share_of_step`: the time of the step's matrix products alone over that of the step. `step_over_parts`: a step
    over its read, update and put, each waited for; `planned_step_over_parts`: the same of a step planned before.
    `allocated_mb_per_step`: what XLA plans to allocate in a step.
    """
    sides = started(config, steps)
    times, ours = sides_in_turns(sides, rounds, steps), sides["jaxrec"]
    ms = {name: 1e3 * float(np.median(each)) for name, each in times.items()}
    results: dict[str, Any] = {"examples_per_s": 1e3 * config.batch_size / ms["jaxrec"], "step_ms": ms["jaxrec"]}
    results |= {f"{part}_ms": ms[part] for part in (*STEP_PARTS, "gemm")}
    moved = sum(results[f"{part}_ms"] for part in ("plan", "read", "put"))
    results |= {"plan_read_put_share_of_step": moved / ms["jaxrec"], "planned_step_ms": ms["planned"]}
    parts = times["read"] + times["update"] + times["put"]
    results |= ratio("step_over_parts", times["jaxrec"] / parts)
    results |= ratio("planned_step_over_parts", times["planned"] / parts)
    results["gemm_share_of_step"] = float(np.median(times["gemm"] / times["jaxrec"]))
    results |= {"peak_memory_mb": ours.ask("peak_mb"), "tables_and_slots_mb": ours.table_bytes / 2**20}
    results["peak_over_tables_and_slots"] = results["peak_memory_mb"] / results["tables_and_slots_mb"]
    results["allocated_mb_per_step"] = ours.ask("allocated_mb")
    for name in [name for name in sides if name != "jaxrec"]:
        results |= ratio(f"jaxrec_over_{name}", times[name] / times["jaxrec"]) | {f"{name}_step_ms": ms[name]}
    peers = [name for name in sides if name.startswith("torch")]
    if peers:
        best = min(peers, key=ms.__getitem__)
        results |= {"fastest_torch": best} | ratio("jaxrec_over_torch", times[best] / times["jaxrec"])
    for side in sides.values():
        side.close()
    return results


STEP_PARTS = ("plan", "read", "update", "put")
SWEEPS = {
    "rows": ("rows", (1_000_000, 10_000_000, 50_000_000)),
    "batch": ("batch_size", (512, 2048, 8192, 32768)),
    "width": ("width", (16, 32, 64, 128)),
}


FIGURES = {"examples/s": "examples_per_s", "step, ms": "step_ms"}
FIGURES |= {f"{part}, ms": f"{part}_ms" for part in ("plan", "read", "update", "put", "gemm")}
FIGURES |= {"peak, MB": "peak_memory_mb", "made in a step, MB": "allocated_mb_per_step"}
FIGURES |= {"PyTorch's time over ours": "jaxrec_over_torch", "FBGEMM's": "jaxrec_over_fbgemm"}
GROUPS = {
    "Speed": ["examples_per_s", "step_ms"],
    "A step in parts, each waited for": ["plan", "read", "update", "put", "gemm", "step_over_parts"],
    "Memory": ["peak", "tables", "allocated"],
    "Times of PyTorch over those of jaxrec": ["jaxrec_over", "torch", "fbgemm", "fastest"],
}


def table(config: Config, results: dict[str, Any]) -> str:
    """Format the figures of one configuration, or a line per point of a sweep."""
    if config.sweep == "none":
        return listing(results, GROUPS)
    field, values = SWEEPS[config.sweep]
    columns = {head: f"{key}_at_{field}_{{}}" for head, key in FIGURES.items()}
    return grid(results, field, {f"{value:,}": str(value) for value in values}, columns)


def peers_of(results: Mapping[str, Any], end: str = "") -> dict[str, Figure]:
    """{side: its time over that of jaxrec}, for all sides measured.

    >>> peers_of({"jaxrec_over_torch_unique": 1.26, "jaxrec_over_torch": 1.26, "step_ms": 60.0})
    {'torch_unique': Figure(value=1.26, low=None, high=None)}
    """
    found = {key: each for key, each in figures(results).items() if key.endswith(end)}
    beginning = "jaxrec_over_"
    names = [key.removesuffix(end) for key in found if key.startswith(beginning)]
    # `torch` repeats the fastest variant.
    return {name.removeprefix(beginning): found[name + end] for name in names if name != f"{beginning}torch"}


def finding(results: Mapping[str, Any], end: str = "") -> str:
    """Title of the plot of one configuration; `end` is the suffix of its keys in a sweep."""
    step, parts = (results[f"{key}{end}"] for key in ("step_ms", "plan_read_put_share_of_step"))
    peers = peers_of(results, end)
    said_of = f"A step takes {number(step, 3)} ms; its plan, read and put, each waited for, {parts:.1%} of that"
    if not peers:
        return said_of
    name = min(peers, key=lambda one: peers[one].value)
    return f"{said_of}. {name}, the fastest beside it, takes {said(peers[name])} times as long"


def draw(run: Run, config: Config, results: Mapping[str, Any]) -> None:
    """Plot the parts of a step and the times of other sides; for a sweep the rates over the swept parameter."""
    path, ratio_of = run.directory / "throughput.png", "its time over that of jaxrec"
    if config.sweep == "none":
        parts = {part: results[f"{part}_ms"] for part in STEP_PARTS}
        parts |= {"whole step": results["step_ms"], "its matrix products": results["gemm_ms"]}
        panels: dict[str, dict[str, dict[str, Any]]] = {"ms": {"": parts}}
        if peers := peers_of(results):
            panels[ratio_of] = {"": {name.replace("_", " "): each for name, each in peers.items()}}
        bars(path, panels, finding(results), {ratio_of: {"jaxrec": 1.0}})
        return
    field, values = SWEEPS[config.sweep]
    of = lambda key: [results[f"{key}_at_{field}_{value}"] for value in values]
    lines: dict[str, dict[str, tuple]] = {"examples/s": {"jaxrec": (values, of("examples_per_s"))}}
    last = f"_at_{field}_{values[-1]}"
    if names := list(peers_of(results, last)):
        each = {value: peers_of(results, f"_at_{field}_{value}") for value in values}
        lines[ratio_of] = {name: (values, [each[v].get(name, Figure(None)) for v in values]) for name in names}
    title = f"{field.replace('_', ' ')} {values[-1]:,}: {finding(results, last)}"
    plot(path, lines, field.replace("_", " "), title, log_x=True, levels={ratio_of: {"jaxrec": 1.0}})


def main(config: Config) -> dict:
    """Run one configuration or a sweep and return the contents of results.json."""
    run = Run("throughput", config, config.workdir)
    rounds, steps = {"smoke": (2, 3), "default": (8, 10), "paper": (30, 20)}[config.preset]
    rounds = config.rounds or rounds
    if config.preset == "smoke":
        config = dataclasses.replace(config, rows=min(config.rows, 200_000))
    if config.sweep == "none":
        results = measure_sides(config, rounds, steps)
        run.log(results)
    else:
        field, values = SWEEPS[config.sweep]
        results = {}
        for value in values:
            changed: dict[str, Any] = {field: value}
            row = measure_sides(dataclasses.replace(config, **changed), rounds, steps)
            run.log({field: value} | row)
            results |= {f"{key}_at_{field}_{value}": row[key] for key in row}
    draw(run, config, results)
    run.close(results, table(config, results))
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
