"""n trainers with m Hogwild workers each on one device, in a seeded order of events: the same bits in every run.

An event belongs to one worker: it applies the gradients that it has computed to its trainer's parameters and to the
shared rows as they are by now, reads both, and computes the gradients of its next batch from what it has read. Its
gradient is therefore as old as the events of others that came between, m n - 1 on average: example-level parallelism
is B m n, whatever the machine. In a tick every trainer has one event; in m ticks every worker has one, in an order
that the seed draws anew. Embedding gradients are applied by the row optimizer to the newest row, as embedding parameter
servers do. Synchronisation comes at the ends of ticks, by a script: a round begins every so many ticks, and its result
is folded in `latency_ticks` later; none is the foreground.

Regime: free-running, emulated. Reference: Zheng et al., ShadowSync, arXiv 2003.03477.
Legend: n trainers, m workers a trainer, B batch, U padded unique rows.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.embedding import DeviceTables, plan
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.shadowsync.rules import Rule
from jaxrec.sharding import make_mesh
from jaxrec.step import gradients, step_dense, step_rows
from jaxrec.types import Batch, DenseState, Plan, PyTree, TrainState

ALL_REDUCE = "all_reduce"


class Script(NamedTuple):
    """When replicas are synchronised.

    Attributes:
      rule: from `rules`.
      every_ticks: a round begins so often, the k of FR-k. With a centre trainer i begins in the ticks t where
        (t + i) % k == 0, else all begin together.
      latency_ticks: from the beginning of a round to its result. 0 is the foreground; a shadow whose rounds take k
        ticks, back to back, has every_ticks = latency_ticks = k.
    """

    rule: Rule
    every_ticks: int
    latency_ticks: int = 0


class Pending(NamedTuple):
    """What the workers have computed and not applied yet."""

    gradient: PyTree  # [n, m, ...]
    by_rows: dict[str, jax.Array]  # {stack: f32[n, m, 1, U, E]}
    unique: dict[str, jax.Array]  # {stack: i32[n, m, 1, U]}
    weight: jax.Array  # f32[n, m] of the batch; 0 where there is none


class Replicas(NamedTuple):
    """All that an event changes."""

    dense: DenseState  # step i32[n], other leaves [n, ...]
    tables: DeviceTables
    pending: Pending


class Event(NamedTuple):
    """Whose turn it is, and what is read and computed next."""

    trainer: Any  # i32[]
    worker: Any  # i32[]
    plan: dict[str, Plan]
    batch: Batch


class Emulation:
    """Trains n x m workers on batches, tick by tick.

    Args:
      spec: with one shard.
      loss, optimizer, row_optimizer: as for `make_train_step`.
      params: initial dense parameters of every replica.
      example: a batch of the shapes to come.
      trainers: n.
      workers: m.
      script: how they synchronise; None for not at all; 'all_reduce' for lock-step training of the dense parameters
        with the mean of the trainers' gradients, and m = 1.
      seed: of the order of events.

    Errors:
      ValueError: n or m < 1; several shards; rounds that overlap; all_reduce with several workers.
    """

    def __init__(
        self, spec: EmbeddingSpec, loss: Callable, optimizer, row_optimizer, params, example: Batch,
        trainers: int, workers: int = 1, script: Script | str | None = None, seed: int = 0,
    ):  # fmt: skip
        _check(spec, trainers, workers, script)
        self.spec, self.batch_size, self.trainers, self.workers = spec, len(example.label), trainers, workers
        self._seed, self._capacity = seed, {name: _most_rows(spec, name, example.ids) for name in spec.stacks}
        dense = DenseState(*_copies((jnp.zeros((), jnp.int32), params, optimizer.init(params)), trainers))
        pending = Pending(
            _copies(jax.tree.map(jnp.zeros_like, params), trainers, workers),
            {k: jnp.zeros((trainers, workers, 1, u, spec.stacks[k].width)) for k, u in self._capacity.items()},
            {k: jnp.full((trainers, workers, 1, u), spec.stacks[k].rows) for k, u in self._capacity.items()},
            jnp.zeros((trainers, workers)),
        )
        self.state = Replicas(dense, DeviceTables.create(spec, row_optimizer, make_mesh()), pending)
        self._events = make_tick(spec, loss, optimizer, row_optimizer, all_reduce=script == ALL_REDUCE)
        self._rounds = _Rounds(script, params, trainers) if isinstance(script, Script) else None
        self.ticks = self._played = 0  # with batches, and all

    @property
    def example_level_parallelism(self) -> int:
        """B m n: examples in flight."""
        return self.batch_size * self.workers * self.trainers

    @property
    def average_sync_gap(self) -> float:
        """Steps of a trainer for each round."""
        return self.ticks / max(1, self._rounds.rounds) if self._rounds else float("inf")

    def run(self, batches: Iterable[Batch]) -> np.ndarray:
        """Trains on all batches, n a tick, until every gradient is applied; a last part of a tick is left out.

        Args:
          batches: of B examples; trainer i has every n-th.

        Returns:
          The mean loss of each tick, f32[ticks].

        Errors:
          ValueError: there are fewer batches than trainers.
        """
        losses = []
        for tick in zip(*[iter(batches)] * self.trainers, strict=False):
            losses.append(self._tick(tick))
            last = tick[-1]
            self.ticks += 1
            if self._rounds:
                params = self._rounds.end_of_tick(self.ticks, self.state.dense.params)
                self.state = self.state._replace(dense=self.state.dense._replace(params=params))
        if not losses:
            raise ValueError(f"there are fewer batches than the {self.trainers} trainers, each of which needs one.")
        nothing = last._replace(weight=np.zeros_like(last.weight))
        for _ in range(2 * self.workers):  # each worker has an event in them, and applies what it has in flight
            self._tick([nothing] * self.trainers)
        return np.asarray(jnp.stack(losses))

    def replica(self, number: int = 0) -> TrainState:
        """One trainer's dense state with the shared tables, as a train or evaluation step takes them."""
        return TrainState(jax.tree.map(lambda x: x[number][None], self.state.dense), self.state.tables)

    def _tick(self, batches):
        tick, self._played = self._played, self._played + 1
        turns = np.random.default_rng([self._seed, 0, tick]).permutation(self.trainers).astype(np.int32)
        round_, place = divmod(tick, self.workers)
        orders = [np.random.default_rng([self._seed, 1, round_, i]).permutation(self.workers) for i in turns]
        events = [
            Event(i, np.int32(order[place]), plan(self.spec, batch.ids, self._capacity), batch)
            for i, order, batch in zip(turns, orders, [batches[i] for i in turns], strict=True)
        ]
        self.state, loss = self._events(self.state, jax.tree.map(lambda *x: np.stack(x), *events))
        return loss


def make_tick(spec, loss, optimizer, row_optimizer, all_reduce=False) -> Callable:
    """Makes the pure tick: (Replicas, Event of arrays [n, ...]) -> Replicas', mean loss f32[]; the state is donated."""
    functions = {"spec": spec, "loss": loss, "optimizer": optimizer, "row_optimizer": row_optimizer}

    def one_after_the_other(state, event):
        state = _apply_dense(_apply_rows(state, event, row_optimizer), event, optimizer)
        return _compute(state, event, **functions)

    def tick(state, events):
        if not all_reduce:
            state, losses = jax.lax.scan(one_after_the_other, state, events)
        else:
            state, _ = jax.lax.scan(lambda s, e: (_apply_rows(s, e, row_optimizer), None), state, events)
            state = _apply_mean(state, optimizer)
            state, losses = jax.lax.scan(lambda s, e: _compute(s, e, **functions), state, events)
        return state, losses.mean()

    return jax.jit(tick, donate_argnums=0)


def _apply_dense(state, event, optimizer):
    at = lambda tree, *place: jax.tree.map(lambda x: x[place], tree)
    old, pending = at(state.dense, event.trainer), state.pending
    new = step_dense(old, at(pending.gradient, event.trainer, event.worker), optimizer)
    filled = pending.weight[event.trainer, event.worker] > 0
    keep = lambda every, a, b: every.at[event.trainer].set(jnp.where(filled, a, b))
    return state._replace(dense=jax.tree.map(keep, state.dense, new, old))


def _apply_mean(state, optimizer):
    pending = state.pending
    mean = jax.tree.map(lambda g: g.mean(axis=(0, 1)), pending.gradient)
    old = jax.tree.map(lambda x: x[0], state.dense)
    new = step_dense(old, mean, optimizer)
    filled = pending.weight.sum() > 0
    keep = lambda every, a, b: jnp.broadcast_to(jnp.where(filled, a, b), every.shape)
    return state._replace(dense=jax.tree.map(keep, state.dense, new, old))


def _apply_rows(state, event, row_optimizer):
    """The gradients wait for no one, the row optimizer sees the newest row; where there are none, rows stay."""
    mine = lambda tree: {name: x[event.trainer, event.worker] for name, x in tree.items()}
    plans = {name: Plan(unique, {}, None, None) for name, unique in mine(state.pending.unique).items()}
    rows = state.tables.read(plans)
    new = step_rows(rows, mine(state.pending.by_rows), state.dense.step[event.trainer], row_optimizer)
    return state._replace(tables=state.tables.put(plans, new))


def _compute(state, event, *, spec, loss, optimizer, row_optimizer):
    params = jax.tree.map(lambda x: x[event.trainer], state.dense.params)
    values = {name: rows.value for name, rows in state.tables.read(event.plan).items()}
    gradient, by_rows, metrics = gradients(params, values, event.plan, event.batch, spec=spec, loss=loss)
    unique = {name: p.unique for name, p in event.plan.items()}
    new = Pending(gradient, by_rows, unique, metrics["weight"])
    place = lambda every, x: every.at[event.trainer, event.worker].set(x)
    return state._replace(pending=jax.tree.map(place, state.pending, new)), metrics["loss"]


class _Rounds:
    """Plays a script at the ends of ticks: trainers one by one if there is a centre, else all of them together."""

    def __init__(self, script, params, trainers):
        self._script, self.rounds = script, 0.0  # of each trainer
        self._groups = [np.int32(i) for i in range(trainers)] if script.rule.has_centre else [slice(None)]
        self._shared = script.rule.init(jax.tree.map(jnp.asarray, params))
        self._before = _copies(params, trainers)
        self._fold = jax.jit(functools.partial(_fold, script.rule), donate_argnums=(0, 1))
        self._begin = jax.jit(_begin, donate_argnums=0)

    def end_of_tick(self, tick, params):
        """Folds in what is due, then begins what is due; a foreground round is begun and folded in at once."""
        every, latency = self._script.every_ticks, self._script.latency_ticks
        for number, group in enumerate(self._groups):
            begins = (tick + number) % every == 0
            ends = (tick - latency + number) % every == 0 and tick - latency >= 1
            if begins and not latency:
                self._before = self._begin(self._before, params, *self._only(group))
            if ends:
                self._shared, params = self._fold(self._shared, params, self._before, *self._only(group))
                self.rounds += 1 / len(self._groups)
            if begins and latency:
                self._before = self._begin(self._before, params, *self._only(group))
        return params

    @staticmethod
    def _only(group):
        return () if isinstance(group, slice) else (group,)


def _begin(before, params, trainer=...):
    """Copies the parameters of one trainer, or of all."""
    return jax.tree.map(lambda b, x: b.at[trainer].set(x[trainer]), before, params)


def _fold(rule, shared, params, before, trainer=...):
    """Ends the round of one trainer with the centre, or that of all with their mean."""
    mine = jax.tree.map(lambda x: x[trainer], before)
    brought = mine if rule.has_centre else jax.tree.map(lambda x: x.mean(axis=0), mine)
    shared, target = rule.combine(shared, brought)
    merge = rule.merge if rule.has_centre else jax.vmap(rule.merge, in_axes=(0, 0, None))
    merged = merge(jax.tree.map(lambda x: x[trainer], params), mine, target)
    return shared, jax.tree.map(lambda x, new: x.at[trainer].set(new), params, merged)


def _copies(tree, *axes):
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*axes, *jnp.shape(x))) + 0, tree)


def _most_rows(spec, stack, ids):
    """U that no batch can exceed: every id a row of its own, as far as there are rows."""
    return min(sum(np.size(ids[lookup]) for lookup in spec.lookups_of(stack)), spec.stacks[stack].rows)


def _check(spec, trainers, workers, script):
    if min(trainers, workers) < 1:
        raise ValueError(f"trainers={trainers} and workers={workers} must be 1 or more.")
    if spec.shards != 1:
        raise ValueError(f"the spec has {spec.shards} shards: the emulation wants `EmbeddingSpec(shards=1)`.")
    if script == ALL_REDUCE and workers != 1:
        raise ValueError(f"all_reduce waits for every worker in every step: workers={workers} must be 1.")
    if not isinstance(script, Script):
        return
    if script.every_ticks < 1 or not 0 <= script.latency_ticks <= script.every_ticks:
        raise ValueError(
            f"every_ticks={script.every_ticks} must be 1 or more and latency_ticks={script.latency_ticks} between 0 "
            "and that: the rounds of a trainer do not overlap."
        )
