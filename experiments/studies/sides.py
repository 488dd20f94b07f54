"""Processes that measure the reference work when they are asked to: jaxrec in one, each way of
PyTorch in another.

They take turns, a round of steps each, so that a slow minute hits all of them. All of them keep the
memory that they free, as jaxrec does by `keep_memory`. A process that is not asked computes
nothing; each has its own tables, on the same device. Times are of whole turns: the device is waited
for at the end of each, never between two steps.
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
    """jaxrec's step: as the loop runs it, planned in a thread, and in the other ways that a device
    allows."""

    def __init__(self, job: Job):
        import jax

        from jaxrec.embedding import DeviceTables, HostTables
        from jaxrec.loop import keep_memory
        from jaxrec.sharding import make_mesh
        from jaxrec.step import init_state, make_train_step, make_update

        if job.precision != "default":
            jax.config.update("jax_default_matmul_precision", job.precision)
        keep_memory()
        self.spec, loss, params, optimizer, rows = reference_work(job)
        self.batches = [in_bags(job, self.spec, batch) for batch in synthetic(job)[1]]
        mesh = make_mesh()
        tables = (
            HostTables.create(self.spec, rows) if job.tables == "host" else DeviceTables.create(self.spec, rows, mesh)
        )
        self.state = init_state(params, optimizer, tables, mesh)
        self.step = make_train_step(self.spec, loss, optimizer, rows, mesh)
        self.update = jax.jit(make_update(self.spec, loss, optimizer, rows, mesh))
        self.gemm = matrix_products(params, job)
        self.capacity: dict[str, int] | None = None
        self.table_bytes = sum(
            4 * s.rows * (s.width + sum(slot.width for slot in rows.init(s.width).values()))
            for s in self.spec.stacks.values()
        )

    def run(self, steps: int) -> float:
        """Seconds per step of the loop: planned on the host in a thread, inputs sent with each
        step."""
        from jaxrec.embedding import capacity_of
        from jaxrec.loop import planned

        batches = (self.batches[i % BATCHES] for i in range(steps + 1))
        with contextlib.closing(planned(self.spec, batches, self.capacity)) as pairs:
            _, plans = next(pairs)  # not timed: it starts the thread
            self.capacity = capacity_of(plans)
            return self._timed(self.step, ((plans, batch) for batch, plans in pairs), steps)

    def run_planned(self, steps: int) -> float:
        """Seconds per step where plans and batches are on the device before the clock starts: the
        step alone."""
        return self._timed(self.step, itertools.cycle(self._on_device[1]), steps)

    def run_device_plan(self, steps: int) -> float:
        """Seconds per step where ids are sent and planned on the device, in the step's own
        program."""
        return self._timed(self._plan_and_step, itertools.cycle((batch,) for batch in self.batches), steps)

    def run_device_plan_resident(self, steps: int) -> float:
        """The same with the batches on the device before the clock starts."""
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
        """Batches, and (plans, batch) pairs, all of one capacity, on the device."""
        import jax

        from jaxrec.embedding import plan

        capacity = self._capacity_of_all
        batches = [(jax.device_put(batch),) for batch in self.batches]
        plans = [jax.device_put(plan(self.spec, batch.ids, capacity)) for batch in self.batches]
        return jax.block_until_ready((batches, [(p, *b) for p, b in zip(plans, batches, strict=True)]))

    @functools.cached_property
    def _capacity_of_all(self):
        """A capacity that every batch fits: under jit none can be planned again."""
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
            state, metrics = self.step(state, plans, batch)
            over = [jnp.sum(jnp.maximum(p.count - p.unique.shape[1], 0)) + p.invalid for p in plans.values()]
            return state, metrics | {"dropped": sum(over)}

        return jax.jit(plan_and_step, donate_argnums=0)

    def matmul_error(self, size: int) -> float:
        """The relative error of an f32 matrix product: about 1e-7 in f32, about 3e-4 in TF32."""
        import jax.numpy as jnp

        a, b = matrices(size)
        return relative_error(np.asarray(jnp.asarray(a) @ jnp.asarray(b)), a, b)

    def allocated_mb(self, _=None) -> float | None:
        """MB that a step makes anew: rows read, what `update` gives back, and what it holds meanwhile.

        As XLA planned it: the same at each step, on a loaded machine too. None where XLA does not tell.
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

    def parts(self, repeats: int) -> dict[str, float]:
        """Median milliseconds of plan, read, update and put, each waited for, on the same
        batches."""
        import jax

        from jaxrec.embedding import DeviceTables, plan

        on_device = isinstance(self.state.tables, DeviceTables)
        reader = lambda tables, plans: tables.read(plans)
        putter = lambda tables, plans, new: tables.put(plans, new)
        if on_device:
            reader, putter = jax.jit(reader), jax.jit(putter, donate_argnums=0)
        tables = self.state.tables
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
            if on_device:
                jax.block_until_ready(tables)
            marks.append(time.perf_counter())
            for name, begin, end in zip(times, marks, marks[1:], strict=False):
                times[name].append(end - begin)
        self.state = self.state._replace(tables=tables)
        return {f"{name}_ms": 1e3 * float(np.median(values[1:])) for name, values in times.items()}


def matrix_products(params, job):
    """A function that runs the matrix products of one step and nothing else; returns seconds.

    Those of DLRM's interaction are in the layout of `dot_interaction`, the best that was found.
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
    """Two square matrices to multiply."""
    rng = np.random.default_rng(1)
    return (rng.standard_normal((size, size), np.float32) for _ in range(2))


def relative_error(product, a, b) -> float:
    """Of a matrix product against that in f64, as a ratio of norms."""
    exact = a.astype(np.float64) @ b.astype(np.float64)
    return float(np.linalg.norm(product - exact) / np.linalg.norm(exact))


class TorchSide:
    """One variant of torch_dlrm.py, on a device."""

    def __init__(self, job: Job, variant: str, device: str = "cpu"):
        # A process of multiprocessing may have no children: torch.compile must not start any.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        import torch

        from studies import torch_dlrm

        if device != "cpu":
            torch.set_float32_matmul_precision("high" if job.precision == "default" else "highest")
        self.wait: Callable = (lambda: None) if device == "cpu" else torch.cuda.synchronize
        self.torch, self.device, self.index = torch, device, 0
        batches = synthetic(job)[1]
        work = torch_dlrm.TorchWork(job.cardinalities, job.width, batches, job.model, device, job.field_hots)
        self.step = torch_dlrm.VARIANTS[variant](work)

    def run(self, steps: int, resident: bool = False) -> float:
        """Seconds per step, over some steps; inputs travel with each, from pinned memory."""
        self.wait()
        start = time.perf_counter()
        for _ in range(steps):
            self.step(self.index, resident)
            self.index += 1
        self.wait()
        return (time.perf_counter() - start) / steps

    def run_resident(self, steps: int) -> float:
        """Seconds per step with the batches on the device before the clock starts."""
        return self.run(steps, resident=True)

    def matmul_error(self, size: int) -> float:
        """As of `JaxSide`."""
        a, b = matrices(size)
        product = self.torch.as_tensor(a).to(self.device) @ self.torch.as_tensor(b).to(self.device)
        return relative_error(product.cpu().numpy(), a, b)


class Failed(RuntimeError):
    """A side's process could not do what it was asked; the text is its own traceback."""


def serve(pipe, make):
    """A side's process: answers (method, argument) until the pipe closes; sends (answer, traceback
    or None)."""
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
        # As text: exceptions of other libraries do not always survive a pipe.
        pipe.send((None, traceback.format_exc()))


# What `jaxrec.loop.keep_memory` does, for processes of any kind: glibc looks for these when one starts.
KEPT_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_ARENA_MAX": "1",
}


class Side:
    """A process that measures when it is asked to.

    Args:
      make: makes the object whose methods are asked for; runs in the process.
      start: wait until it is made; else `ready` does.
    """

    def __init__(self, make: Callable, start: bool = True):
        context = multiprocessing.get_context("spawn")
        os.environ |= KEPT_MEMORY  # who is spawned inherits it
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, make), daemon=True)
        self.process.start()
        other.close()
        self.table_bytes = 0
        if start:
            self.ready()

    def ready(self) -> None:
        """Waits until the object is made."""
        self.table_bytes = self.answer()

    def ask(self, method: str, argument: Any = None):
        """Runs a method there and waits for what it returns."""
        self.begin(method, argument)
        return self.answer()

    def begin(self, method: str, argument: Any = None) -> None:
        """Asks without waiting."""
        try:
            self.pipe.send((method, argument))
        except OSError:
            pass  # the process is gone; the answer says so

    def answer(self):
        """What was asked for with `begin`, waited for."""
        try:
            answer, error = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            raise Failed(f"the process ended with code {self.process.exitcode}") from None
        if error is not None:
            raise Failed(error)
        return answer

    def close(self):
        """Ends the process."""
        self.pipe.close()
        self.process.join()
