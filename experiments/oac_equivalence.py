"""OAC's claim: batches in flight in parallel, results bitwise those of one batch after the other.

    python experiments/oac_equivalence.py                        1 minute
    python experiments/oac_equivalence.py --soak-minutes 10      random windows, threads, delays and skews until then

Every case trains the same batches through `Pipeline(mode="oac")` and through `mode="sync"`, with one compiled update
and random delays in both transfers, and through a loop of a few lines without any pipeline. Rows, slots, dense
parameters and all losses must agree to the last bit. The share of rows that needed repair stands beside its
expectation, sum_i p_i (1 - (1 - p_i)^W) / sum_i p_i, p_i the chance of row i to be in a batch. Then the mechanism is
broken in five ways, each of which must be noticed, with write-backs held back as long as admission allows: that rows
are stale is not left to luck.
"""

import dataclasses
import itertools
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from contract import Flags, Run, command_line
from tqdm import tqdm

import jaxrec
from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, adagrad, capacity_of, plan
from jaxrec.oac import Pipeline
from jaxrec.oac.flow import Flow
from jaxrec.oac.stale import LastWriters
from jaxrec.step import make_update
from jaxrec.types import Batch, Rows, TrainState

OPTIMIZER, ROW_OPTIMIZER = optax.adam(0.01), adagrad(0.05)


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the check."""

    rows: int = 2_000
    """Rows of each of the two tables."""
    batch_size: int = 128
    soak_minutes: float = 0
    """Go on with random cases for so long."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to run the pipeline."""

    window: int
    threads: int  # loaders, fetchers and writers, each
    exponent: float  # of the power law of the ids; 0 is uniform
    skip: bool  # neither send what will be patched nor write what will be rewritten
    validation: str = "planned"
    longest_delay_ms: float = 2.0


def problem(rows: int):
    """Spec and update of a small factorisation machine: two tables, three ids an example."""
    spec = EmbeddingSpec(
        {"user": Table(rows, 8), "item": Table(rows, 8)},
        {"user": Lookup("user"), "items": Lookup(("item", "item"))},
        shards=4,
    )

    def loss(params, activations, batch):
        vectors = jnp.concatenate([activations["user"][:, None], activations["items"]], axis=1)
        pairs = jnp.sum(vectors, axis=1) ** 2 - jnp.sum(vectors**2, axis=1)
        logit = batch.dense @ params["dense"] + pairs @ params["scale"]
        return optax.sigmoid_binary_cross_entropy(logit, batch.label)

    return spec, make_update(spec, loss, OPTIMIZER, ROW_OPTIMIZER)


def fresh_state(spec) -> TrainState:
    """The state that every run begins with."""
    params = {"dense": jnp.zeros(4), "scale": jnp.ones(8)}
    return jaxrec.init_state(params, OPTIMIZER, HostTables.create(spec, ROW_OPTIMIZER))


def chances(rows: int, exponent: float) -> np.ndarray:
    """The power law: how likely each row is in one draw."""
    weight = np.arange(1, rows + 1) ** -exponent
    return weight / weight.sum()


def make_batches(config: Config, number: int, exponent: float, seed: int) -> list[Batch]:
    """Batches of power-law ids; labels are coin flips, for only equality counts here."""
    rng, size = np.random.default_rng(seed), config.batch_size
    chance = chances(config.rows, exponent)

    def draw(*shape):
        return np.asarray(rng.choice(config.rows, shape, p=chance), np.int32)

    return [
        Batch(
            {"user": draw(size), "items": draw(size, 2)},
            rng.normal(size=(size, 4)).astype(np.float32),
            rng.integers(0, 2, size).astype(np.float32),
            np.ones(size, np.float32),
        )
        for _ in range(number)
    ]


def expected_stale_fraction(config: Config, exponent: float, window: int) -> float:
    """sum_i p_i (1 - (1 - p_i)^W) / sum_i p_i over both tables."""
    chance = chances(config.rows, exponent)
    p = np.concatenate([1 - (1 - chance) ** config.batch_size, 1 - (1 - chance) ** (2 * config.batch_size)])
    return float((p * (1 - (1 - p) ** window)).sum() / p.sum())


def plain_loop(spec, update, batches):
    """Training without a pipeline: (state, losses)."""
    step, state, losses, capacity = jax.jit(update, donate_argnums=0), fresh_state(spec), [], None
    dense, tables = state
    for batch in batches:
        plans = plan(spec, batch.ids, capacity)
        capacity = capacity_of(plans)
        dense, rows, metrics = step(dense, tables.read(plans), plans, batch)
        tables.put(plans, rows)
        losses.append(np.asarray(metrics["loss"]))
    return TrainState(dense, tables), losses


def same(a, b) -> bool:
    """Whether two (state, losses) agree to the last bit."""
    arrays = lambda tables: [x for shards in tables.shards.values() for parts in shards for x in parts.values()]
    left, right = ([*jax.tree.leaves((state.dense, losses)), *arrays(state.tables)] for state, losses in (a, b))
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(left, right, strict=True))


def train(pipeline: Pipeline, batches: list[Batch]):
    """Runs a pipeline to its end: (state, losses)."""
    with pipeline:
        losses = [np.asarray(metrics["loss"]) for _, metrics in pipeline.run(batches)]
    return pipeline.state, losses


class Delayed:
    """Transfers with a random delay, each its own."""

    def __init__(self, longest_ms: float, seed: int):
        self.longest, self.rng, self.lock = longest_ms / 1e3, np.random.default_rng(seed), threading.Lock()

    def wait(self):
        """Sleeps for a while."""
        with self.lock:
            seconds = self.rng.uniform(0, self.longest)
        time.sleep(seconds)

    def send(self, tree, placement):
        """To the device, late."""
        self.wait()
        return jax.device_put(tree, placement)

    def fetch(self, tree):
        """To the host, late."""
        self.wait()
        return jax.tree.map(np.asarray, tree)


class HeldBack:
    """Transfers that deliver every batch's rows as late as admission allows: all that can be stale is stale.

    `fetch` of batch t returns when the rows of batch t + window were gathered, or the stream of `number` has ended.
    """

    def __init__(self, window: int, number: int):
        self.window, self.number, self.sent, self.calls = window, number, 0, itertools.count()
        self.changed, self.open = threading.Condition(), False

    def wait_for_gather(self, number: int):
        """Until the rows of a batch, counted from 0, were gathered."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.open or self.sent > min(number, self.number - 1), timeout=60):
                raise TimeoutError(f"batch {number} was not gathered within 60 s.")

    def send(self, tree, placement):
        """To the device; counts the batches whose rows went."""
        out = jax.device_put(tree, placement)
        if isinstance(tree, tuple) and tree[0] and isinstance(next(iter(tree[0].values())), Rows):
            with self.changed:
                self.sent += 1
                self.changed.notify_all()
        return out

    def fetch(self, tree):
        """To the host, as late as it may be."""
        self.wait_for_gather(next(self.calls) + self.window)
        return jax.tree.map(np.asarray, tree)


class NoReplay(Pipeline):
    """Mutant: stale rows are not repaired."""

    def _repair(self, item, rows, source):
        return rows, super()._repair(item, rows, source)[1]


class RingOfOne(Pipeline):
    """Mutant: the ring holds only the last batch, whatever the window."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._depth = 1
        self._last = LastWriters(self.tables.spec, self.window, self._depth)


class SlotsNotPatched(Pipeline):
    """Mutant: embedding rows are repaired, their optimizer slots are not."""

    def _repair(self, item, rows, source):
        right, source = super()._repair(item, rows, source)
        return {name: Rows(right[name].value, rows[name].slots) for name in rows}, source


class Unordered(Flow):
    """Of every two batches the later one is written first; the watermark is honest about it."""

    def wait_to_write(self, writer):
        """Batches 1, 0, 3, 2, ..."""
        self.done = self.__dict__.get("done", set())
        number = self._first_missing()
        other = self.first + ((number - self.first) ^ 1)
        with self.changed:
            if other not in self.done and self._wait_for(other, lambda: other in self.fetched):
                return other
        return super().wait_to_write(writer)

    def mark_written(self, writer, number):
        """Counts the batches from the first on that are written without a gap."""
        self.done.add(number)
        self.written[writer] = self._first_missing()

    def _first_missing(self):
        return next(n for n in itertools.count(self.first) if n not in self.done)


class NewestWins(Flow):
    """The watermark is that of the fastest writer."""

    def watermark(self):
        """Not contiguous: other writers may still be at earlier batches."""
        return max(self.written)


class UnorderedWriters(Pipeline):
    """Mutant: batches are written in another order."""

    flow_type = Unordered


class WatermarkNotContiguous(Pipeline):
    """Mutant: admission goes by the fastest of two writers; the other one is slow."""

    flow_type = NewestWins
    held: HeldBack

    def _write(self, item, shards):
        if shards.start == 1:  # until a batch was gathered that should have waited for this write
            self.held.wait_for_gather(item.number - self._flow.first + self.window + 1)
        super()._write(item, shards)


MUTANTS = (NoReplay, RingOfOne, SlotsNotPatched, UnorderedWriters, WatermarkNotContiguous)


def mutants_caught(spec, update, batches, window: int) -> dict[str, bool]:
    """Runs every mutant, and the pipeline itself as a control, with rows as late as they may be."""
    expected = plain_loop(spec, update, batches)
    caught = {}
    kinds: tuple[type[Pipeline], ...] = (Pipeline, *MUTANTS)
    for kind in kinds:
        held = HeldBack(window, len(batches))
        about_writers = kind in (UnorderedWriters, WatermarkNotContiguous)
        fetch = (lambda tree: jax.tree.map(np.asarray, tree)) if about_writers else held.fetch
        writers = 2 if kind is WatermarkNotContiguous else 1
        pipeline = kind(fresh_state(spec), update, window=window, send=held.send, fetch=fetch, writers=writers)
        if isinstance(pipeline, WatermarkNotContiguous):
            pipeline.held = held
        caught[kind.__name__] = not same(train(pipeline, batches), expected)
    if caught.pop("Pipeline"):
        raise AssertionError("the pipeline itself differs from the plain loop when rows are held back.")
    return caught


def check(config: Config, case: Case, number: int, seed: int) -> dict:
    """One case: oac against sync and against the plain loop."""
    spec, update = problem(config.rows)
    batches = make_batches(config, number, case.exponent, seed)
    expected = plain_loop(spec, update, batches)
    delayed = Delayed(case.longest_delay_ms, seed)
    threads: dict[str, Any] = {"loaders": case.threads, "fetchers": case.threads, "writers": case.threads}
    options = threads | {"send": delayed.send, "fetch": delayed.fetch}
    skips: dict[str, Any] = {"skip_stale_reads": case.skip, "skip_rewritten": case.skip}
    sync = Pipeline(fresh_state(spec), update, mode="sync", **options)
    oac = Pipeline(
        fresh_state(spec), update, mode="oac", window=case.window, validation=case.validation, **options, **skips
    )
    equal_sync, equal_oac = same(train(sync, batches), expected), same(train(oac, batches), expected)
    counters = oac.counters
    row = dataclasses.asdict(case) | {"equal": equal_sync and equal_oac, "compilations": oac.compilations}
    if case.validation == "planned":
        row["stale_fraction"] = counters["stale_rows"] / counters["rows"]
        row["expected_stale_fraction"] = expected_stale_fraction(config, case.exponent, case.window)
        row["bytes_saved_percent"] = 100 * (
            1 - (counters["bytes_sent"] + counters["bytes_fetched"]) / counters["bytes_without_savings"]
        )
    return row


def cases(config: Config):
    """The cases of a preset."""
    if config.preset == "smoke":
        return [Case(1, 1, 0.0, False), Case(4, 2, 1.05, True), Case(4, 2, 1.05, False, "device")]
    grid = itertools.product((1, 2, 4, 8, 16), (1, 3), (0.0, 0.8, 1.05, 1.2), (False, True))
    every = [Case(*values) for values in grid]
    device = [Case(window, 3, 1.05, False, "device") for window in (1, 4, 16)]
    return every + device if config.preset == "paper" else every[::3] + device


def random_cases(config: Config):
    """Cases without end."""
    rng = np.random.default_rng(config.seed)
    while True:
        skip = bool(rng.integers(2))
        validation = "planned" if skip else str(rng.choice(["planned", "device"]))
        yield Case(
            int(rng.integers(1, 17)), int(rng.integers(1, 5)), float(rng.choice([0.0, 0.8, 1.05, 1.2])), skip,
            validation, float(rng.choice([0.0, 0.3, 3.0, 10.0])),
        )  # fmt: skip


def main(config: Config) -> dict:
    """Checks all cases and all mutants; returns what results.json holds."""
    run = Run("oac_equivalence", config, config.workdir)
    number = {"smoke": 30, "default": 100, "paper": 300}[config.preset]
    todo, until = cases(config), time.monotonic() + 60 * config.soak_minutes
    if config.soak_minutes:
        todo = itertools.takewhile(lambda case: time.monotonic() < until, random_cases(config))
    rows = []
    for index, case in enumerate(tqdm(todo, unit="case", disable=None)):
        rows.append(check(config, case, number, config.seed + index))
        run.log(rows[-1])
        if not rows[-1]["equal"]:
            tqdm.write(f"NOT EQUAL: {case}", file=sys.stdout)
    spec, update = problem(100)
    small = dataclasses.replace(config, rows=100, batch_size=16)
    caught = mutants_caught(spec, update, make_batches(small, 24, 0.5, config.seed), window=4)
    planned = [row for row in rows if "stale_fraction" in row]
    results = {
        "bitwise_equal": all(row["equal"] for row in rows),
        "cases": len(rows),
        "batches": number * len(rows),
        "mutants_caught": sum(caught.values()),
        "mutants_total": len(caught),
        "stale_fraction_error_max": max(abs(r["stale_fraction"] - r["expected_stale_fraction"]) for r in planned),
        "bytes_saved_percent_max": max(row["bytes_saved_percent"] for row in planned),
    } | {f"caught_{name}": value for name, value in caught.items()}
    run.close(results)
    return results


if __name__ == "__main__":
    found = command_line(main, Config, __doc__)
    sys.exit(0 if found["bitwise_equal"] and found["mutants_caught"] == found["mutants_total"] else 1)
