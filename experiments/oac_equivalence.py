"""OAC's claim: batches in flight in parallel give results bitwise equal to one batch after another.

    python experiments/oac_equivalence.py                    1 minute
    python experiments/oac_equivalence.py --soak-minutes 10  random windows, threads, delays and skews until then

Every case trains the same batches by `Pipeline(mode="oac")`, `mode="sync"` and a plain loop, with random delays in both
transfers: rows, slots, dense parameters and losses must be bitwise equal, and stale rows are counted a second time from
the ids. Then the mechanism is broken in five ways, each of which must be detected. A soak also injects failures; a run
must raise the error, leave no thread, and either reach the state of the plain loop bit for bit or refuse to resume.
Result: results/two_cores_cpu/oac_equivalence_soak.json.
"""

import dataclasses
import faulthandler
import functools
import itertools
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from main.cli import Flags, Run, command_line
from studies.oac_failures import KINDS, Problem, Tally, break_one, equal, equal_leaves
from tqdm import tqdm

from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, adagrad, capacity_of, plan
from jaxrec.oac import Pipeline
from jaxrec.oac.flight import Flight, Worker
from jaxrec.oac.stages import Stages
from jaxrec.task import Task
from jaxrec.types import Batch, Rows, TrainState

OPTIMIZER, ROW_OPTIMIZER = optax.adam(0.01), adagrad(0.05)


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the check."""

    rows: int = 2_000
    """Rows of each of the two tables."""
    batch_size: int = 128
    soak_minutes: float = 0
    """Spend half of this time on random cases and half on injected failures."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration of the pipeline."""

    window: int
    threads: int  # loaders and fetchers, each
    exponent: float  # of the power law of the ids; 0 is uniform
    longest_delay_ms: float = 2.0


def problem(rows: int) -> Task:
    """The task of a small factorisation machine: two tables, three ids per example."""
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

    return Task(spec, loss, OPTIMIZER, ROW_OPTIMIZER)


def fresh_state(task: Task) -> TrainState:
    """The initial state of every run."""
    params = {"dense": jnp.zeros(4), "scale": jnp.ones(8)}
    return task.init(params, "host")


def make_batches(config: Config, number: int, exponent: float, seed: int) -> list[Batch]:
    """Batches of power-law ids; labels are coin flips, as only equality counts here."""
    rng, size = np.random.default_rng(seed), config.batch_size
    weight = np.arange(1, config.rows + 1) ** -exponent
    chance = weight / weight.sum()  # of the power law

    def draw(*shape):
        return np.asarray(rng.choice(config.rows, shape, p=chance), np.int32)

    return [
        Batch(
            {"user": draw(size), "items": draw(size, 2)},
            dense=rng.normal(size=(size, 4)).astype(np.float32),
            label=rng.integers(0, 2, size).astype(np.float32),
        )
        for _ in range(number)
    ]


class NotingFlight(Flight):
    """Flight that records the watermark of each batch's gather."""

    def admit(self, item):
        """See `Flight`."""
        admitted = super().admit(item)
        if admitted:
            self.__dict__.setdefault("seen", {})[item.number - self.first] = item.watermark - self.first
        return admitted


class WatchedPipeline(Pipeline):
    """A pipeline that records its gathers."""

    flight_type = NotingFlight


def stale_rows(batches: list[Batch], watermarks: dict[int, int]) -> int:
    """Count the rows gathered before their last writer was written, row by row from the ids alone."""
    writer: dict[tuple[str, int], int] = {}
    stale = 0
    for number, batch in enumerate(batches):
        touched = {(table, int(row)) for table, ids in batch.ids.items() for row in np.unique(ids)}
        stale += sum(writer.get(row, -1) >= watermarks[number] for row in touched)
        writer |= dict.fromkeys(touched, number)
    return stale


def plain_loop(task, batches, after=None):
    """Train without a pipeline and return (state, losses); calls `after` with the state after every step."""
    step, state = jax.jit(task.checked_update, donate_argnums=0), fresh_state(task)
    losses, capacity = [], None
    dense, tables = state
    for batch in batches:
        plans = plan(task.spec, batch.ids, capacity)
        capacity = capacity_of(plans)
        dense, rows, metrics = step(dense, tables.read(plans), plans, batch)
        tables.put(plans, rows)
        losses.append(np.asarray(metrics["loss"]))
        if after is not None:
            after(TrainState(dense, tables))
    return TrainState(dense, tables), losses


def frozen(state: TrainState) -> TrainState:
    """An independent copy of a state."""
    tables = state.tables
    shards = {n: [{p: a.copy() for p, a in parts.items()} for parts in s] for n, s in tables.shards.items()}
    return TrainState(jax.tree.map(np.array, state.dense), HostTables(tables.spec, tables.layout, shards))


@functools.lru_cache(maxsize=8)
def problem_to_break(seed: int, number: int = 16) -> Problem:
    """A problem with few rows and batches, and the states of the plain loop."""
    task = problem(100)
    batches = make_batches(Config(rows=100, batch_size=16), number, 0.5, seed)
    states = [frozen(fresh_state(task))]
    plain_loop(task, batches, after=lambda state: states.append(frozen(state)))
    return Problem(lambda: fresh_state(task), task, batches, states)


def broken_runs(config: Config, until: float) -> Tally:
    """Inject failures of all kinds in turn until `until` (time.monotonic()), each at least once."""
    rng, tally = np.random.default_rng(config.seed), Tally()
    for index in tqdm(itertools.count(), unit="broken run", disable=None):
        if index >= len(KINDS) and time.monotonic() >= until:
            return tally
        # A run that hangs dumps its stacks and fails the soak.
        faulthandler.dump_traceback_later(120, exit=True)
        made, wrong = break_one(problem_to_break(config.seed + index % 5), KINDS[index % len(KINDS)], rng)
        faulthandler.cancel_dump_traceback_later()
        tally.add(made, wrong)
        for words in wrong:
            tqdm.write(f"WRONG: {words}", file=sys.stdout)
    return tally


def same(a, b) -> bool:
    """Whether two (state, losses) are bitwise equal."""
    return equal(a[0], b[0]) and equal_leaves(a[1], b[1])


def train_case(pipeline: Pipeline, batches: list[Batch]):
    """Run a pipeline to its end: (state, losses)."""
    with pipeline:
        losses = [np.asarray(metrics["loss"]) for _, metrics in pipeline.run(batches)]
    return pipeline.state, losses


class Delayed:
    """Transfers with independent random delays."""

    def __init__(self, longest_ms: float, seed: int):
        self.longest, self.rng, self.lock = longest_ms / 1e3, np.random.default_rng(seed), threading.Lock()

    def wait(self):
        """Sleep for a random time."""
        with self.lock:
            seconds = self.rng.uniform(0, self.longest)
        time.sleep(seconds)

    def send(self, tree, placement):
        """Transfer to the device after a delay."""
        self.wait()
        return jax.device_put(tree, placement)

    def fetch(self, tree):
        """Transfer to the host after a delay."""
        self.wait()
        return jax.tree.map(np.asarray, tree)


def batch_in_work() -> int:
    """Return the number of the batch, counted from the first of the run, that this thread of a pipeline has in work."""
    worker = threading.current_thread()
    assert isinstance(worker, Worker)
    return worker.batch


class HeldBack:
    """Transfers that deliver rows as late as admission allows, so that every row that can be stale is stale.

    `fetch` of batch t returns once the rows of batch t + window were gathered, or those of all `number` batches.
    """

    def __init__(self, window: int, number: int):
        self.window, self.number, self.changed = window, number, threading.Condition()
        self.gathered: set[int] = set()

    def wait_for_gather(self, number: int):
        """Wait until the rows of all batches up to `number`, counted from 0, were gathered.

        All of them: the loader with the later batch may be faster, and a write after its gather would reach the gather
        of the earlier batch, which would then be less stale than it may be.
        """
        expected = set(range(min(number, self.number - 1) + 1))
        with self.changed:
            if not self.changed.wait_for(lambda: expected <= self.gathered, timeout=60):
                raise TimeoutError(f"batch {number} was not gathered within 60 s.")

    def send(self, tree, placement):
        """Transfer to the device; record the batch if these are its rows."""
        out = jax.device_put(tree, placement)
        if isinstance(tree, dict) and isinstance(next(iter(tree.values()), None), Rows):
            with self.changed:
                self.gathered.add(batch_in_work())
                self.changed.notify_all()
        return out

    def fetch(self, tree):
        """Transfer to the host as late as admission allows."""
        self.wait_for_gather(batch_in_work() + self.window)
        return jax.tree.map(np.asarray, tree)


class RowsNotRepaired(Stages):
    """Stages that leaves stale rows stale."""

    def repair(self, item):
        """Find stale rows without repairing them."""
        super().repair(item)
        return item.rows


class SlotsNotRepaired(Stages):
    """Stages that repairs embedding rows but not their optimizer slots."""

    def repair(self, item):
        """Repair values only."""
        right = super().repair(item)
        return {name: Rows(right[name].value, rows.slots) for name, rows in item.rows.items()}


class NoReplay(Pipeline):
    """Mutant: stale rows are not repaired."""

    stages_type = RowsNotRepaired


class SlotsNotPatched(Pipeline):
    """Mutant: the optimizer slots of stale rows are not repaired."""

    stages_type = SlotsNotRepaired


class RingOfOne(Pipeline):
    """Mutant: the ring holds only the last batch, whatever the window."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        programs = self._stages._programs
        self._stages._programs = programs | {"init": lambda rows, size, window: programs["init"](rows, size, 1)}


class Unordered(Flight):
    """Flight that writes the later one of every two batches first; its count of written ones is correct."""

    def take(self, stage, ready):
        """Batches 1, 0, 3, 2, ... for the writer."""
        if stage == "write back":
            self.done = self.__dict__.get("done", set())
            number = self._first_missing()
            other = self.first + ((number - self.first) ^ 1)
            if other not in self.done:
                self.next[stage] = other
                if item := super().take(stage, ready):
                    return item
            self.next[stage] = number
        return super().take(stage, ready)

    def count_written(self, number):
        """Count the contiguous batches written from the first one on."""
        self.done.add(number)
        self.written = self._first_missing()

    def _first_missing(self):
        return next(n for n in itertools.count(self.first) if n not in self.done)


class Early(Flight):
    """Flight that admits a batch when all but the last W + 1 are written."""

    def __init__(self, *args):
        super().__init__(*args)
        self.written += 1

    def count_written(self, number):
        """Count one batch more than are written."""
        self.written = number + 2


class UnorderedWrites(Pipeline):
    """Mutant: batches are written out of order."""

    flight_type = Unordered


class AdmittedEarly(Pipeline):
    """Mutant: a batch is gathered one write too early, before rows that the ring no longer has."""

    flight_type = Early


MUTANTS = (NoReplay, RingOfOne, SlotsNotPatched, UnorderedWrites, AdmittedEarly)


def mutants_caught(task: Task, batches, window: int) -> dict[str, bool]:
    """Run every mutant, and the unmodified pipeline as a control, with rows as late as admission allows."""
    expected = plain_loop(task, batches)
    caught = {}
    kinds: tuple[type[Pipeline], ...] = (Pipeline, *MUTANTS)
    for kind in kinds:
        held = HeldBack(window + (kind is AdmittedEarly), len(batches))
        fetch = (lambda tree: jax.tree.map(np.asarray, tree)) if kind is UnorderedWrites else held.fetch
        pipeline = kind(task, fresh_state(task), window=window, send=held.send, fetch=fetch)
        caught[kind.__name__] = not same(train_case(pipeline, batches), expected)
    if caught.pop("Pipeline"):
        raise AssertionError("the pipeline itself differs from the plain loop when rows are held back.")
    return caught


def check_case(config: Config, case: Case, number: int, seed: int) -> dict:
    """Compare one case of OAC with sync and with the plain loop."""
    task = problem(config.rows)
    batches = make_batches(config, number, case.exponent, seed)
    expected = plain_loop(task, batches)
    delayed = Delayed(case.longest_delay_ms, seed)
    threads: dict[str, Any] = {"loaders": case.threads, "fetchers": case.threads}
    options = threads | {"send": delayed.send, "fetch": delayed.fetch}
    sync = Pipeline(task, fresh_state(task), mode="sync", **options)
    oac = WatchedPipeline(task, fresh_state(task), mode="oac", window=case.window, **options)
    equal_sync = same(train_case(sync, batches), expected)
    equal_oac = same(train_case(oac, batches), expected)
    counters = oac.counters
    row = dataclasses.asdict(case) | {"equal": equal_sync and equal_oac, "compilations": oac.compilations}
    row["stale_fraction"] = counters["stale_rows"] / counters["rows"]
    row["patched_fraction"] = counters["patched_rows"] / counters["rows"]
    row["stale_rows_miscounted"] = abs(counters["stale_rows"] - stale_rows(batches, vars(oac.flight)["seen"]))
    return row


def cases(config: Config):
    """The cases of a preset."""
    if config.preset == "smoke":
        return [Case(1, 1, 0.0), Case(4, 2, 1.05)]
    grid = itertools.product((1, 2, 4, 8, 16), (1, 3), (0.0, 0.8, 1.05, 1.2))
    every = [Case(*values) for values in grid]
    return every if config.preset == "paper" else every[::3]


def random_cases(config: Config):
    """Yield random cases without end."""
    rng = np.random.default_rng(config.seed)
    while True:
        yield Case(
            int(rng.integers(1, 17)), int(rng.integers(1, 5)), float(rng.choice([0.0, 0.8, 1.05, 1.2])),
            float(rng.choice([0.0, 0.3, 3.0, 10.0])),
        )  # fmt: skip


def main(config: Config) -> dict:
    """Check all cases and mutants and return the contents of results.json."""
    run = Run("oac_equivalence", config, config.workdir)
    number = {"smoke": 30, "default": 100, "paper": 300}[config.preset]
    todo, until = cases(config), time.monotonic() + 30 * config.soak_minutes
    if config.soak_minutes:
        todo = itertools.takewhile(lambda case: time.monotonic() < until, random_cases(config))
    rows = []
    for index, case in enumerate(tqdm(todo, unit="case", disable=None)):
        rows.append(check_case(config, case, number, config.seed + index))
        run.log(rows[-1])
        if not rows[-1]["equal"]:
            tqdm.write(f"NOT EQUAL: {case}", file=sys.stdout)
    task = problem(100)
    small = dataclasses.replace(config, rows=100, batch_size=16)
    caught = mutants_caught(task, make_batches(small, 24, 0.5, config.seed), window=4)
    results = {
        "bitwise_equal": all(row["equal"] for row in rows),
        "cases": len(rows),
        "batches": number * len(rows),
        "mutants_caught": sum(caught.values()),
        "mutants_total": len(caught),
        "stale_fraction_max": max(row["stale_fraction"] for row in rows),
        "stale_rows_miscounted": sum(row["stale_rows_miscounted"] for row in rows),
    } | {f"caught_{name}": value for name, value in caught.items()}
    tally = broken_runs(config, time.monotonic() + 30 * config.soak_minutes)
    results |= {"broken_runs": tally.runs.total(), "broken_runs_wrong": len(tally.wrong)}
    results |= {f"broken_by_{kind.replace(' ', '_')}": count for kind, count in sorted(tally.runs.items())}
    run.close(results)
    return results


if __name__ == "__main__":
    found = command_line(main, Config, __doc__)
    right = found["bitwise_equal"] and found["mutants_caught"] == found["mutants_total"]
    sys.exit(0 if right and not found["broken_runs_wrong"] and not found["stale_rows_miscounted"] else 1)
