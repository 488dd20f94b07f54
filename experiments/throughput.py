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

import contextlib
import dataclasses
import functools
import multiprocessing
import resource
import time
from typing import Any, Literal

import numpy as np
from contract import Flags, Run, command_line

from jaxrec.data.synthetic import SyntheticClicks, scaled_cardinalities

BATCHES = 16  # made before the clock starts, used in turn


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the benchmark."""

    tables: Literal["device", "host"] = "host"
    against: Literal["none", "torch"] = "none"
    rows: int = 10_000_000
    batch_size: int = 2048
    width: int = 16
    rounds: int = 0
    """Turns of each side; by the preset if 0."""
    sweep: Literal["none", "rows", "batch", "width"] = "none"


def synthetic(config: Config):
    """The click log of the reference work, and its batches."""
    clicks = SyntheticClicks(scaled_cardinalities(config.rows), seed=config.seed)
    return clicks, list(clicks.stream(config.batch_size, batches=BATCHES))


def reference_work(config: Config):
    """The job of the benchmark for jaxrec: (spec, loss, initial parameters, dense optimizer, row optimizer)."""
    import jax
    import jax.numpy as jnp
    import optax

    from jaxrec.embedding import EmbeddingSpec, Lookup, Table, rowwise_adagrad
    from jaxrec.models.dlrm import DLRM

    cardinalities = scaled_cardinalities(config.rows)
    fields = [f"C{i + 1}" for i in range(len(cardinalities))]
    spec = EmbeddingSpec(
        {name: Table(n, config.width) for name, n in zip(fields, cardinalities, strict=True)},
        {"sparse": Lookup(tuple(fields))},
    )
    model = DLRM((512, 256, 64, config.width), (512, 256, 1))

    def loss(params, activations, batch):
        logit = model.apply(params, batch.dense, activations["sparse"])
        return optax.sigmoid_binary_cross_entropy(logit, batch.label)

    params = model.init(jax.random.key(0), jnp.zeros((1, 13)), jnp.zeros((1, len(fields), config.width)))
    return spec, loss, params, optax.sgd(0.01), rowwise_adagrad(0.02)


class JaxSide:
    """jaxrec's step as the loop runs it: planned in a thread, one batch after the other."""

    def __init__(self, config: Config):
        import jax

        from jaxrec.embedding import DeviceTables, HostTables
        from jaxrec.loop import keep_memory
        from jaxrec.sharding import make_mesh
        from jaxrec.step import init_state, make_train_step, make_update

        keep_memory()
        clicks, self.batches = synthetic(config)
        self.spec, loss, params, optimizer, rows = reference_work(config)
        mesh = make_mesh()
        tables = (
            HostTables.create(self.spec, rows)
            if config.tables == "host"
            else DeviceTables.create(self.spec, rows, mesh)
        )
        self.state = init_state(params, optimizer, tables, mesh)
        self.step = make_train_step(self.spec, loss, optimizer, rows, mesh)
        self.update = jax.jit(make_update(self.spec, loss, optimizer, rows, mesh))
        self.gemm = matrix_products(params, config, len(clicks.cardinalities))
        self.capacity: dict[str, int] | None = None
        self.table_bytes = sum(
            4 * s.rows * (s.width + sum(slot.width for slot in rows.init(s.width).values()))
            for s in self.spec.stacks.values()
        )

    def run(self, steps: int) -> float:
        """Seconds a step, over some steps of the loop."""
        import jax

        from jaxrec.embedding import capacity_of
        from jaxrec.loop import planned

        batches = (self.batches[i % BATCHES] for i in range(steps + 1))
        with contextlib.closing(planned(self.spec, batches, self.capacity)) as pairs:
            batch, plans = next(pairs)  # not timed: it starts the thread
            start = time.perf_counter()
            for batch, plans in pairs:
                self.state, metrics = self.step(self.state, plans, batch)
            jax.block_until_ready((self.state.dense, metrics))
            self.capacity = capacity_of(plans)
            return (time.perf_counter() - start) / steps

    def parts(self, repeats: int) -> dict[str, float]:
        """Median milliseconds of plan, read, update and put, each waited for, on the same batches."""
        import jax

        from jaxrec.embedding import plan, put, read

        on_device = not hasattr(self.state.tables, "reset_shard")
        reader, putter = (jax.jit(read), jax.jit(put, donate_argnums=0)) if on_device else (read, put)
        tables, times = self.state.tables, {name: list[float]() for name in ("plan", "read", "update", "put")}
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


def matrix_products(params, config, fields):
    """A function that runs the matrix products of one step and nothing else; returns seconds."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    kernels = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 2]

    def random(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    operands = [(random(config.batch_size, k.shape[0]), k, random(config.batch_size, k.shape[1])) for k in kernels]
    vectors = random(config.batch_size, fields + 1, config.width)
    square = random(config.batch_size, fields + 1, fields + 1)

    @jax.jit
    def products(operands, vectors, square):
        result = [jnp.einsum("bie,bje->bij", vectors, vectors), jnp.einsum("bij,bje->bie", square, vectors)]
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


class TorchSide:
    """One variant of torch_dlrm.py."""

    def __init__(self, config: Config, variant: str):
        import torch_dlrm

        clicks, batches = synthetic(config)
        self.step = torch_dlrm.VARIANTS[variant](clicks.cardinalities, config.width, batches)
        self.index = 0

    def run(self, steps: int) -> float:
        """Seconds a step, over some steps."""
        start = time.perf_counter()
        for _ in range(steps):
            self.step(self.index)
            self.index += 1
        return (time.perf_counter() - start) / steps


def serve(pipe, make):
    """A side's process: answers (method, argument) until the pipe closes; sends an exception instead of an answer."""
    try:
        side = make()
        pipe.send(getattr(side, "table_bytes", 0))
        while True:
            method, argument = pipe.recv()
            if method == "peak_mb":
                pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
            else:
                pipe.send(getattr(side, method)(argument))
    except EOFError:
        return
    except Exception as error:
        pipe.send(error)


class Side:
    """A process that measures when it is asked to."""

    def __init__(self, make):
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, make), daemon=True)
        self.process.start()
        other.close()
        self.table_bytes = self._answer()

    def ask(self, method: str, argument=None):
        """Runs a method there and waits for what it returns."""
        self.pipe.send((method, argument))
        return self._answer()

    def _answer(self):
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self):
        """Ends the process."""
        self.pipe.close()
        self.process.join()


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
        except (ImportError, OSError, RuntimeError) as error:
            sides.pop(name, None)
            print(f"{name} left out: {type(error).__name__}: {str(error)[:200]}")
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


def ratio(key: str, values) -> dict[str, float]:
    """Median, least and most of a ratio over the rounds."""
    return {key: float(np.median(values)), f"{key}_min": float(values.min()), f"{key}_max": float(values.max())}


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
