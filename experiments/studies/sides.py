"""Processes that measure the reference workload on request: jaxrec in one, each PyTorch variant in another.

They alternate, one round of steps each, so that a slow minute hits all of them. All of them keep freed memory, as
jaxrec does by `keep_memory`. An idle process computes nothing; each has its own tables, on the same device. Times are
of whole rounds: the device is synchronised at the end of each round, never between two steps.
"""

import contextlib
import functools
import itertools
import multiprocessing
import os
import resource
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from studies.reference import BATCHES, Job, in_bags, reference_work, synthetic


class JaxSide:
    """jaxrec's training step: as the loop runs it, planned in a thread, and in the alternatives of a device."""

    def __init__(self, job: Job, work: Callable = reference_work):
        import jax

        from jaxrec.loop import keep_memory

        if job.precision != "default":
            jax.config.update("jax_default_matmul_precision", job.precision)
        keep_memory()
        self.job = job
        self.task, self.params = work(job)
        self.spec = self.task.spec
        self.batches = self.make_batches()
        self.state, self.update = self.task.init(self.params, job.tables), jax.jit(self.task.checked_update)
        self.capacity: dict[str, int] | None = None
        self.table_bytes = sum(
            4 * s.rows * (s.width + sum(slot.width for slot in self.task.row_optimizer.init(s.width).values()))
            for s in self.spec.stacks.values()
        )

    def make_batches(self) -> list:
        """Make the batches that all ways train."""
        return [in_bags(self.job, self.spec, batch) for batch in synthetic(self.job)[1]]

    def run(self, steps: int) -> float:
        """Seconds per step of the loop: its thread plans on the host, or sends batches to a GPU, which plans them."""
        from jaxrec.embedding import capacity_of
        from jaxrec.prefetch import planned

        batches = (self.batches[i % BATCHES] for i in range(steps + 1))
        with contextlib.closing(planned(self.spec, batches, self.capacity)) as pairs:
            _, plans = next(pairs)  # starts the thread, so it is not timed
            self.capacity = capacity_of(plans)
            return self._timed(self.task.step, pairs, steps)

    def run_planned(self, steps: int) -> float:
        """Seconds per step alone: plans and batches are on the device before the timing starts."""
        return self._timed(self.task.step, itertools.cycle(self._on_device[1]), steps)

    def run_device_plan(self, steps: int) -> float:
        """Seconds per step if ids are sent and planned on the device, in the same program as the step."""
        return self._timed(self._plan_and_step, itertools.cycle((batch,) for batch in self.batches), steps)

    def run_device_plan_resident(self, steps: int) -> float:
        """As `run_device_plan`, with the batches on the device before the timing starts."""
        return self._timed(self._plan_and_step, itertools.cycle(self._on_device[0]), steps)

    def _timed(self, step, inputs, steps):
        import jax

        counts = []
        start = time.perf_counter()
        for given in itertools.islice(inputs, steps):
            self.state, metrics = step(self.state, *given)
            counts.append(metrics.get("dropped", 0))
        jax.block_until_ready((self.state.dense, metrics))
        seconds = (time.perf_counter() - start) / steps
        if dropped := sum(map(int, counts)):
            raise ValueError(f"{dropped} rows did not fit the capacity {self.capacity}: the figures are void.")
        return seconds

    @functools.cached_property
    def _on_device(self):
        """Batches, and (batch, plans) pairs of one common capacity, on the device."""
        import jax

        from jaxrec.embedding import plan

        capacity = self._capacity_of_all
        batches = [(jax.device_put(batch),) for batch in self.batches]
        plans = [jax.device_put(plan(self.spec, batch.ids, capacity)) for batch in self.batches]
        return jax.block_until_ready((batches, [(*b, p) for p, b in zip(plans, batches, strict=True)]))

    @functools.cached_property
    def _capacity_of_all(self):
        """A capacity that fits every batch: under jit no batch can be planned again."""
        from jaxrec.embedding import capacity_of, plan

        for batch in self.batches:
            self.capacity = capacity_of(plan(self.spec, batch.ids, self.capacity))
        return self.capacity

    @functools.cached_property
    def _plan_and_step(self):
        import jax
        import jax.numpy as jnp

        from jaxrec.embedding import device_plan

        capacity = self._capacity_of_all

        def plan_and_step(state, batch):
            plans = device_plan(self.spec, batch.ids, capacity)
            state, metrics = self.task.step(state, batch, plans)
            over = [jnp.sum(jnp.maximum(p.count - p.unique.shape[1], 0)) + p.invalid for p in plans.values()]
            return state, metrics | {"dropped": sum(over)}

        return jax.jit(plan_and_step, donate_argnums=0)

    @functools.cached_property
    def gemm(self) -> Callable[[int], float]:
        """Seconds per step of the matrix products alone."""
        return matrix_products(self.params, self.job)

    def matmul_error(self, size: int) -> float:
        """Relative error of an f32 matrix product: about 1e-7 in f32, about 3e-4 in TF32."""
        import jax.numpy as jnp

        a, b = matrices(size)
        return relative_error(np.asarray(jnp.asarray(a) @ jnp.asarray(b)), a, b)

    def allocated_mb(self, _=None) -> float | None:
        """MB allocated per step: rows read, outputs of `update`, and its temporaries.

        From XLA's memory analysis, so it is the same at each step and on a loaded machine; None where XLA gives none.
        """
        import jax

        from jaxrec.embedding import plan

        batch = self.batches[0]
        plans = plan(self.spec, batch.ids, self._capacity_of_all)
        rows = self.state.tables.read(plans)
        planned = self.update.lower(self.state.dense, rows, plans, batch).compile().memory_analysis()
        if planned is None:
            return None
        read = sum(leaf.nbytes for leaf in jax.tree.leaves(rows))
        return (read + planned.output_size_in_bytes + planned.temp_size_in_bytes) / 2**20

    @functools.cached_property
    def _read_and_put(self):
        """The tables' `read` and `put`, compiled where a program reaches the rows."""
        import jax

        reader = lambda tables, plans: tables.read(plans)
        putter = lambda tables, plans, new: tables.put(plans, new)
        if self.state.tables.traced is None:
            return reader, putter
        compiled, donate = jax.jit(reader), () if self.state.tables.hosted else 0
        put = jax.jit(putter, donate_argnums=donate)
        return (
            lambda tables, plans: compiled(tables.traced, plans),
            lambda tables, plans, new: tables.with_traced(put(tables.traced, plans, new)),
        )

    def parts(self, repeats: int) -> dict[str, float]:
        """Mean seconds of plan, read, update and put, each synchronised, on the same batches."""
        import jax

        from jaxrec.embedding import plan

        (reader, putter), tables = self._read_and_put, self.state.tables
        times = {name: list[float]() for name in ("plan", "read", "update", "put")}
        for i in range(repeats):
            batch, marks = self.batches[i % BATCHES], [time.perf_counter()]
            plans = plan(self.spec, batch.ids, self.capacity)
            marks.append(time.perf_counter())
            rows = jax.block_until_ready(reader(tables, plans))
            marks.append(time.perf_counter())
            _, new, _ = jax.block_until_ready(self.update(self.state.dense, rows, plans, batch))
            marks.append(time.perf_counter())
            tables = putter(tables, plans, new)
            jax.block_until_ready(tables.traced)
            marks.append(time.perf_counter())
            for name, begin, end in zip(times, marks, marks[1:], strict=False):
                times[name].append(end - begin)
        self.state = self.state._replace(tables=tables)
        return {name: float(np.mean(values[1:])) for name, values in times.items()}

    def transfers(self, repeats: int) -> dict[str, float]:
        """Mean seconds of a plan on the device, a read and a put, each dispatched without waiting; and GB of rows."""
        import jax

        from jaxrec.embedding import device_plan

        (reader, putter), capacity = self._read_and_put, self._capacity_of_all
        ids = jax.device_put(self.batches[0].ids)
        planner = jax.jit(lambda ids: device_plan(self.spec, ids, capacity))
        plans = planner(ids)
        rows = reader(self.state.tables, plans)

        def put():
            self.state = self.state._replace(tables=putter(self.state.tables, plans, rows))
            return self.state.tables.traced

        found = {}
        work = {"plan": lambda: planner(ids), "read": lambda: reader(self.state.tables, plans), "put": put}
        for name, once in work.items():
            jax.block_until_ready(once())
            start = time.perf_counter()
            for _ in range(repeats):
                last = once()
            jax.block_until_ready(last)
            found[name] = (time.perf_counter() - start) / repeats
        floats = {name: sum(leaf.shape[-1] for leaf in jax.tree.leaves(its)) for name, its in rows.items()}
        gb = sum(4e-9 * floats[name] * int(its.count.sum()) for name, its in plans.items())
        return found | {"gb": gb, "rows": sum(int(its.count.sum()) for its in plans.values())}


def matrix_products(params, job):
    """Return a function steps -> seconds per step that runs only the matrix products of a step.

    Those of DLRM's interaction use the layout of `dot_interaction`, the fastest we found.
    """
    import jax
    import jax.numpy as jnp

    from jaxrec.models.dlrm import of_each_example

    rng = np.random.default_rng(0)
    kernels = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 2]

    def random(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    operands = [(random(job.batch_size, k.shape[0]), k, random(job.batch_size, k.shape[1])) for k in kernels]
    size = len(job.cardinalities) + 1 if job.model == "dlrm" else 0
    vectors, square = random(job.batch_size, size, job.width), random(job.batch_size, size, size)

    @jax.jit
    def products(operands, vectors, square):
        result = [of_each_example(lambda x: x @ x.T, vectors), of_each_example(lambda x, z: z @ x, vectors, square)]
        for x, kernel, gradient in operands:
            result += [x @ kernel, x.T @ gradient]
            if x.shape[1] != 13:  # the dense features need no gradient
                result.append(gradient @ kernel.T)
        return result

    def run(steps):
        start = time.perf_counter()
        for _ in range(steps):
            jax.block_until_ready(products(operands, vectors, square))
        return (time.perf_counter() - start) / steps

    return run


def matrices(size: int):
    """Two random square matrices to multiply."""
    rng = np.random.default_rng(1)
    return (rng.standard_normal((size, size), np.float32) for _ in range(2))


def relative_error(product, a, b) -> float:
    """Relative error, as a ratio of norms, of a matrix product against the product in f64."""
    exact = a.astype(np.float64) @ b.astype(np.float64)
    return float(np.linalg.norm(product - exact) / np.linalg.norm(exact))


class TorchSide:
    """One variant of torch_dlrm.py on a device."""

    def __init__(self, job: Job, variant: str, device: str = "cpu"):
        # A daemonic process of multiprocessing may have no children, so torch.compile must not start any.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        import torch

        from studies import torch_dlrm

        if device != "cpu":
            torch.set_float32_matmul_precision("high" if job.precision == "default" else "highest")
        self.wait: Callable = (lambda: None) if device == "cpu" else torch.cuda.synchronize
        self.torch, self.device, self.index = torch, device, 0
        batches = synthetic(job)[1]
        work = torch_dlrm.TorchWork(job.cardinalities, job.width, batches, job.model, device, job.field_hots)
        self.step = (torch_dlrm.VARIANTS | torch_dlrm.HOST_MEMORY_VARIANTS)[variant](work)

    def run(self, steps: int, resident: bool = False) -> float:
        """Seconds per step; inputs are sent with each step from pinned memory, or are on the device if `resident`."""
        self.wait()
        start = time.perf_counter()
        for _ in range(steps):
            self.step(self.index, resident)
            self.index += 1
        self.wait()
        return (time.perf_counter() - start) / steps

    def run_resident(self, steps: int) -> float:
        """Seconds per step with the batches on the device before the timing starts."""
        return self.run(steps, resident=True)

    def matmul_error(self, size: int) -> float:
        """See `JaxSide`."""
        a, b = matrices(size)
        product = self.torch.as_tensor(a).to(self.device) @ self.torch.as_tensor(b).to(self.device)
        return relative_error(product.cpu().numpy(), a, b)


class Failed(RuntimeError):
    """A request failed in the process of a side; the message is the traceback from there."""


def serve(pipe, make):
    """Serve requests in the process of a side until the pipe closes.

    A request is (method, argument), a response is (answer, traceback or None).
    """
    try:
        side = make()
        pipe.send((getattr(side, "table_bytes", 0), None))
        while True:
            method, argument = pipe.recv()
            if method == "peak_mb":
                answer = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            else:
                answer = getattr(side, method)(argument)
            pipe.send((answer, None))
    except EOFError:
        return
    except Exception:
        # As text: not all exceptions of other libraries can be pickled.
        pipe.send((None, traceback.format_exc()))


# The effect of `jaxrec.loop.keep_memory` for any process: glibc reads these when a process starts.
KEPT_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_ARENA_MAX": "1",
}


class Side:
    """A process that measures on request.

    Args:
      make: creates, in the process, the object whose methods are called.
      start: wait until the object exists; otherwise call `ready`.
    """

    def __init__(self, make: Callable, start: bool = True):
        context = multiprocessing.get_context("spawn")
        os.environ |= KEPT_MEMORY  # inherited by spawned processes
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, make), daemon=True)
        self.process.start()
        other.close()
        self.table_bytes = 0
        if start:
            self.ready()

    def ready(self) -> None:
        """Wait until the object exists."""
        self.table_bytes = self.answer()

    def ask(self, method: str, argument: Any = None):
        """Call a method in the process and return its result."""
        self.begin(method, argument)
        return self.answer()

    def begin(self, method: str, argument: Any = None) -> None:
        """Send a request without waiting for its result."""
        try:
            self.pipe.send((method, argument))
        except OSError:
            pass  # the process is dead; `answer` reports it

    def answer(self):
        """Wait for the result of the last request; raises Failed if it failed or the process ended."""
        try:
            answer, error = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            raise Failed(f"the process ended with code {self.process.exitcode}") from None
        if error is not None:
            raise Failed(error)
        return answer

    def close(self):
        """End the process."""
        self.pipe.close()
        self.process.join()
