"""Part 1: step time with tables on the device, beside PyTorch on the same card with the same work, in turns.

Ways of jaxrec: `jaxrec` is the loop, whose thread sends the batches to the device, which then plans them;
`jaxrec_device_plan` sends ids and plans in one program with the step; `..._resident` is the same with batches on the
device before the clock starts; `jaxrec_planned` is the step alone, planned before. Ways of PyTorch: duplicates reduced
by hand (`unique`) or by coalescing a sparse gradient (`stacked`), eager and with the dense part under torch.compile;
batches sent from pinned memory, or `_resident`. `matmul_error` shows the precision of both: about 1e-7 is f32, about
3e-4 TF32.

Every way is a separate process on the card (the ways of jaxrec share one), with separate tables: none may take all the
memory, so XLA does not preallocate (set by on_accelerator.py).
"""

import functools
import importlib.util
import itertools
from typing import Any

from studies.reference import Job
from studies.sides import Failed, JaxSide, Side, TorchSide

from accelerator.measure import Task, interval, last_line, over

JAX_WAYS = {
    "jaxrec": "run",
    "jaxrec_device_plan": "run_device_plan",
    "jaxrec_device_plan_resident": "run_device_plan_resident",
    "jaxrec_planned": "run_planned",
}
TORCH_VARIANTS = ("torch_unique", "torch_unique_compiled", "torch_stacked", "torch_compiled")
TURN_S = 0.1  # target duration of a turn


def sizes_of_steps(smoke: bool) -> list[dict]:
    """Return models, widths, batch sizes and precisions, most valuable first."""
    if smoke:
        return [{"model": model, "width": 16, "batch": 64, "precision": "default"} for model in ("dlrm", "dcnv2")]

    def of(model, width, batch, precision="default"):
        return {"model": model, "width": width, "batch": batch, "precision": precision}

    first = [of(model, width, 16384) for width, model in itertools.product((16, 128), ("dlrm", "dcnv2"))]
    batches = [of("dlrm", width, batch) for batch, width in itertools.product((65536, 4096), (16, 128))]
    precise = [of("dlrm", 16, 16384, "highest")]
    rest = [of("dcnv2", width, batch) for batch, width in itertools.product((65536, 4096), (16, 128))]
    return first + batches + precise + rest


def run(task: Task) -> None:
    """Measure point after point."""
    import jax

    device = "cpu" if jax.default_backend() == "cpu" else "cuda"
    variants = list(TORCH_VARIANTS[:1] if task.smoke else TORCH_VARIANTS)
    if importlib.util.find_spec("torch") is None:
        variants = []
        task.leave_out("PyTorch", "torch is not installed")

    def one(point, until):
        job = Job(
            "device", 20_000 if task.smoke else 10_000_000, point["batch"], point["width"], point["model"],
            precision=point["precision"],
        )  # fmt: skip
        task.row(point | {"rows": job.rows}, measure_steps(task, job, variants, device, until))

    task.each(sizes_of_steps(task.smoke), one)


def measure_steps(task: Task, job: Job, variants, device: str, until: float) -> dict[str, Any]:
    """Return the figures of one point."""
    sides = {"jaxrec": Side(functools.partial(JaxSide, job), start=False)}
    sides |= {name: Side(functools.partial(TorchSide, job, name, device), start=False) for name in variants}
    try:
        _warm_up(task, sides)
        ways = {way: (sides["jaxrec"], method) for way, method in JAX_WAYS.items()}
        for name in variants:
            if name in sides:
                ways |= {name: (sides[name], "run"), f"{name}_resident": (sides[name], "run_resident")}
        for _ in range(2):  # twice, as a capacity that has grown meanwhile compiles once more
            longest = max(side.ask(method, 2) for side, method in ways.values())
        steps = 2 if task.smoke else max(3, min(30, int(TURN_S / longest)))
        asked = {way: functools.partial(side.ask, method, steps) for way, (side, method) in ways.items()}
        return _figures(job, task.turns(asked, until)) | {
            f"{name}_matmul_error": side.ask("matmul_error", 256 if task.smoke else 2048)
            for name, side in sides.items()
            if name in ("jaxrec", "torch_unique")
        } | {"steps_of_a_turn": steps}  # fmt: skip
    finally:
        for side in sides.values():
            side.close()


def _warm_up(task, sides):
    """Compile all ways, processes in parallel; a variant of PyTorch that fails is left out."""
    for name, side in list(sides.items()):
        try:
            side.ready()
            side.begin("run", 3)
        except Failed as error:
            _drop(task, sides, name, error)
    for name, side in list(sides.items()):
        try:
            side.answer()
            for method in list(JAX_WAYS.values())[1:] if name == "jaxrec" else ["run_resident"]:
                side.ask(method, 3)
        except Failed as error:
            _drop(task, sides, name, error)


def _drop(task, sides, name, error):
    if name == "jaxrec":
        raise error
    sides.pop(name).close()
    task.leave_out(name, last_line(error))


def _figures(job, turns):
    """Return milliseconds of every way, and the ratio of PyTorch to jaxrec where both do the same work."""
    found: dict[str, Any] = {f"{way}_ms": interval([1e3 * t for t in times]) for way, times in turns.items()}
    found["jaxrec_examples_per_s"] = interval([job.batch_size / t for t in turns["jaxrec"]])
    for way in turns:
        if way.startswith("torch"):
            sent = ("jaxrec", "jaxrec_device_plan")
            for ours in ("jaxrec_device_plan_resident",) if way.endswith("_resident") else sent:
                found[f"{way}_over_{ours}"] = over(turns[way], turns[ours])
    return found
