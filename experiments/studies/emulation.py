"""Emulation of n trainers with m Hogwild workers each on one device, bitwise reproducible on one processor.

On another one rows differ by up to 3e-4, as XLA sums in another order there.

An event belongs to one worker: the worker applies its pending gradients to the current parameters of its trainer and to
the current shared rows, reads both, and computes the gradients of its next batch from them. The staleness of a gradient
is the number of events of other workers in between, m n - 1 on average, so the example-level parallelism is B m n on
any machine. In one tick every trainer has one event; in m ticks every worker has one, in a newly drawn, seeded order.
The row optimizer applies embedding gradients to the newest row, as in an embedding parameter server. Rounds of
synchronisation happen at the ends of ticks, by a script: a round begins every `every_ticks` ticks, and its result is
folded in `latency_ticks` later, at once in the foreground. `Emulation.finish` emulates the last rounds made by
`finish` of a real synchroniser; without them the evaluated model would differ from the one a user gets.

The small programs of an event are called one after the other: with `lax.scan`, XLA:CPU took 2.5 times as long.

Regime: free-running, emulated. Reference: Zheng et al., ShadowSync, arXiv 2003.03477.
Legend: n trainers, m workers per trainer, B batch, U padded unique rows.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.bounds import whole_number
from jaxrec.embedding import DeviceTables, plan
from jaxrec.shadowsync.rules import Rule, is_synchronised, mean_of
from jaxrec.step import gradients, step_dense, step_rows, with_replica
from jaxrec.task import Task, check_gradients_suffice, once_per_task
from jaxrec.types import Batch, DenseState, Plan, PyTree, TrainState

ALL_REDUCE = "all_reduce"


class Script(NamedTuple):
    """Schedule of synchronisation rounds.

    Attributes:
      rule: synchronisation rule.
      every_ticks: ticks from one round to the next, the k of FR-k. With a centre, trainer i begins a round in ticks t
        with (t + i) % k == 0; without one, all trainers begin together.
      latency_ticks: ticks from the beginning of a round to its result; 0 is the foreground. A shadow with back-to-back
        rounds of k ticks has every_ticks = latency_ticks = k.
    """

    rule: Rule
    every_ticks: int
    latency_ticks: int = 0


class Pending(NamedTuple):
    """Gradients that a worker has computed but not applied yet."""

    gradient: PyTree
    by_rows: dict[str, jax.Array]  # {stack: f32[1, U, E]}
    unique: dict[str, jax.Array]  # {stack: i32[1, U]}


class Emulation:
    """Emulation of n trainers with m workers each, tick by tick.

    Args:
      task: Task with one shard, whose loss may neither take a key nor return variables.
      params: initial dense parameters of every replica.
      trainers: n.
      workers: m.
      script: schedule of synchronisation; None for no synchronisation; 'all_reduce' for lock-step training of the dense
        parameters with the mean of the trainers' gradients, which requires m = 1.
      seed: seed of the order of events.
      tables: initial tables, which are donated; those of the spec if None.

    Attributes:
      dense: DenseState of each trainer, without a replica axis.
      tables: embedding tables shared by all trainers.
      ticks: number of ticks so far.
      batch_size: examples per batch of the last tick.
    """

    def __init__(
        self,
        task: Task,
        params: PyTree,
        trainers: int,
        workers: int = 1,
        script: Script | str | None = None,
        seed: int = 0,
        tables: DeviceTables | None = None,
    ):
        spec = task.spec
        _check(spec, trainers, workers, script)
        self.spec, self.trainers, self.workers, self._seed = spec, trainers, workers, seed
        self._lock_step = script == ALL_REDUCE
        copy = lambda tree: jax.tree.map(lambda x: jnp.array(x), tree)
        start = DenseState(jnp.zeros((), jnp.int32), params, task.optimizer.init(params))
        self.dense = [copy(start) for _ in range(trainers)]
        self.tables = DeviceTables.create(spec, task.row_optimizer) if tables is None else tables
        self._pending: list[list[Pending | None]] = [[None] * workers for _ in range(trainers)]
        self._rounds = _Rounds(script, params, trainers) if isinstance(script, Script) else None
        self._compute, self._apply_rows, self._apply_dense = _programs(task)
        self.ticks = self.batch_size = 0
        self._finished = False

    @property
    def example_level_parallelism(self) -> int:
        """B m n: examples in flight."""
        return self.batch_size * self.workers * self.trainers

    @property
    def average_sync_gap(self) -> float:
        """Steps of a trainer per round, without the rounds of `finish`; inf without a round."""
        rounds = self._rounds.rounds if self._rounds else 0
        return self.ticks / rounds if rounds else float("inf")

    def replica(self, number: int = 0) -> TrainState:
        """Return one trainer's state, with a replica axis of length 1 and the shared tables."""
        return TrainState(with_replica(self.dense[number]), self.tables)

    def run(self, batches: Iterable[Batch]) -> np.ndarray:
        """Train on all batches, n per tick, until every gradient is applied.

        An incomplete last tick is dropped.

        Args:
          batches: batches of one size; trainer i gets batches i, i + n, i + 2 n, ...

        Returns:
          The mean loss of each tick, f32[ticks].
        """
        if self._finished:
            raise ValueError("`run` comes before `finish`: these trainers have made their last rounds.")
        losses = []
        for tick in zip(*[iter(batches)] * self.trainers, strict=False):
            losses.append(self._tick(tick))
            self.ticks += 1
            if self._rounds:
                self._rounds.end_of_tick(self.ticks, self.dense)
        if not losses:
            raise ValueError(f"there are fewer batches than the {self.trainers} trainers, each of which needs one.")
        for place in range(self.workers):
            self._apply(self._order(self.ticks, place))
        return np.array(jax.device_get(losses)).mean(axis=1)

    def finish(self) -> None:
        """Emulate `finish` of every trainer after its last step.

        Results of rounds in flight are folded in. Then, with a centre, every trainer makes one more round, in order of
        trainer number, and all take the centre's parameters; without a centre, all make one common round. No effect
        without a script and with all_reduce.
        """
        if self._finished:
            raise ValueError("`finish` comes once, after the last `run`: these trainers have made their last rounds.")
        self._finished = True
        if self._rounds:
            self._rounds.finish(self.dense)

    def _order(self, tick, place):
        """Return [(trainer, worker)] of a tick's events; `place` is the index of the tick in its group of m ticks."""
        turns = np.random.default_rng([self._seed, 0, tick]).permutation(self.trainers)
        workers = _worker_orders(self._seed, tick // self.workers, self.trainers, self.workers)
        return [(int(i), int(workers[i][place])) for i in turns]

    def _tick(self, batches):
        events = self._order(self.ticks, self.ticks % self.workers)
        self.batch_size = len(batches[0].label)
        if self._lock_step:  # all gradients are applied before any trainer reads
            self._apply(events)
        losses = []
        for i, worker in events:
            if not self._lock_step:
                self._apply([(i, worker)])
            batch = batches[i]
            capacity = {name: _most_rows(self.spec, name, batch.ids) for name in self.spec.stacks}
            plans, params = plan(self.spec, batch.ids, capacity), self.dense[i].params
            self._pending[i][worker], loss = self._compute(params, self.tables, plans, batch)
            losses.append(loss)
        return losses

    def _apply(self, events):
        gradients_of = {}
        for i, worker in events:
            pending, self._pending[i][worker] = self._pending[i][worker], None
            if pending is not None:
                self.tables = self._apply_rows(self.tables, pending.by_rows, pending.unique, self.dense[i].step)
                gradients_of[i] = pending.gradient
        if self._lock_step and gradients_of:
            mean = mean_of([gradients_of[i] for i in sorted(gradients_of)])
            gradients_of = dict.fromkeys(gradients_of, mean)
        for i, gradient in gradients_of.items():
            self.dense[i] = self._apply_dense(self.dense[i], gradient)


@functools.lru_cache(maxsize=1)
def _worker_orders(seed, number, trainers, workers):
    """Return the order of each trainer's workers in group `number` of m ticks."""
    return [np.random.default_rng([seed, 1, number, i]).permutation(workers) for i in range(trainers)]


@once_per_task
def _programs(task):
    """Create the programs of an event: compute gradients, apply them to rows, apply them to parameters."""
    check_gradients_suffice(task)

    def compute(params, tables, plans, batch):
        values = {name: rows.value for name, rows in tables.read(plans).items()}
        gradient, by_rows, metrics = gradients(params, values, plans, batch, spec=task.spec, loss=task.loss)
        return Pending(gradient, by_rows, {name: p.unique for name, p in plans.items()}), metrics["loss"]

    def apply_rows(tables, by_rows, unique, step):
        plans = {name: Plan(rows, {}, None, None) for name, rows in unique.items()}
        return tables.put(plans, step_rows(tables.read(plans), by_rows, plans, step, task.spec, task.row_optimizer))

    def apply_dense(dense, gradient):
        return step_dense(dense, gradient, task.optimizer)

    return jax.jit(compute), jax.jit(apply_rows, donate_argnums=0), jax.jit(apply_dense, donate_argnums=0)


class _Rounds:
    """Rounds of a script at the ends of ticks: one trainer at a time with a centre, else all together."""

    def __init__(self, script, params, trainers):
        self._script, self.rounds = script, 0.0  # rounds per trainer
        all_of_them = list(range(trainers))
        self._groups = [[i] for i in all_of_them] if script.rule.has_centre else [all_of_them]
        self._shared = script.rule.init(jax.tree.map(jnp.array, params))
        self._before = [None] * trainers
        self._combine, self._merge = jax.jit(script.rule.combine), jax.jit(script.rule.merge)
        self._mean = jax.jit(lambda replicas: mean_of(replicas))
        self._copy = jax.jit(lambda params: jax.tree.map(jnp.copy, params))  # in one program: a third of the time

    def end_of_tick(self, tick, dense):
        """Fold in results that are due, then begin rounds that are due; a foreground round does both at once."""
        # A shadow's copy is taken after the fold, as in `Shadow.exchange`.
        every, latency = self._script.every_ticks, self._script.latency_ticks
        for number, group in enumerate(self._groups):
            begins = (tick + number) % every == 0
            ends = (tick - latency + number) % every == 0 and tick - latency >= 1
            if begins and not latency:
                self._begin(group, dense)
            if ends:
                self._end(group, dense)
                self.rounds += len(group) / len(self._before)
            if begins and latency:
                self._begin(group, dense)

    def finish(self, dense):
        """End the rounds in flight and make the last ones; none of them is counted."""
        for group in self._groups:
            if self._before[group[0]] is not None:
                self._end(group, dense)
        for group in self._groups:
            self._begin(group, dense)
            self._end(group, dense)
        if self._script.rule.has_centre:
            for i, state in enumerate(dense):
                dense[i] = state._replace(params=jax.tree.map(_as_centre, state.params, self._shared))

    def _begin(self, group, dense):
        for i in group:  # copied, as a later step donates the parameters
            self._before[i] = self._copy(dense[i].params)

    def _end(self, group, dense):
        brought = self._mean([self._before[i] for i in group])
        self._shared, target = self._combine(self._shared, brought)
        for i in group:
            dense[i] = dense[i]._replace(params=self._merge(dense[i].params, self._before[i], target))
            self._before[i] = None


def _as_centre(mine, centre):
    """Return the centre's leaf in the trainer's dtype, or the trainer's leaf if it is not synchronised."""
    return jnp.array(centre, mine.dtype) if is_synchronised(mine) else mine


def _most_rows(spec, stack, ids):
    """Return an upper bound of U for batches of this size: the number of ids, at most the rows of the stack."""
    return min(sum(np.size(ids[lookup]) for lookup in spec.lookups_of(stack)), spec.stacks[stack].rows)


def _check(spec, trainers, workers, script):
    for name, number in (("trainers", trainers), ("workers", workers)):
        whole_number(name, number)
    if spec.shards != 1:
        raise ValueError(f"the spec has {spec.shards} shards: the emulation wants `EmbeddingSpec(shards=1)`.")
    if script == ALL_REDUCE and workers != 1:
        raise ValueError(f"all_reduce waits for every worker in every step: workers={workers} must be 1.")
    if not isinstance(script, Script):
        return
    every = whole_number("every_ticks", script.every_ticks)
    why = f", every_ticks={every}, as the rounds of a trainer do not overlap"
    whole_number("latency_ticks", script.latency_ticks, 0, every, why)
