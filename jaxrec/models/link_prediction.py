"""Link prediction in knowledge graphs: four models, a sampled softmax with N3 penalty, filtered ranks.

A relation maps a head to a query; the score of a tail is its dot product with the query (DistMult, ComplEx), or minus
its distance from it (TransE, RotatE). Complex rows are f32[2 C]: C real parts, then C imaginary parts.

Legend: B batch, G groups per batch, K candidates or negatives, E row width, N entities, R relations, Q queries, C
complex coordinates.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.bounds import is_not_negative, real_number
from jaxrec.types import Batch


class Model(NamedTuple):
    """How a relation acts on a head, how near a tail is to the result, and the cubed modulus of each coordinate."""

    query: Callable  # (head f32[..., E], relation f32[..., E], or f32[..., C] of RotatE) -> f32[..., E]
    near: Callable  # (query f32[..., E], tail f32[..., E]) -> f32[...]
    near_all: Callable  # (query f32[B, E], tail f32[K, E]) -> f32[B, K]
    cube: Callable  # f32[..., E] -> f32[..., E], or f32[..., C] where coordinates are complex


def _halves(x):
    if x.shape[-1] % 2:
        raise ValueError(f"complex rows have an even width, real beside imaginary parts, got {x.shape[-1]}.")
    return jnp.split(x, 2, axis=-1)


def _complex_query(head, relation):
    (a, b), (c, d) = _halves(head), _halves(relation)
    return jnp.concatenate([a * c - b * d, a * d + b * c], axis=-1)


def _rotated(head, phase):
    (a, b), c, d = _halves(head), jnp.cos(phase), jnp.sin(phase)
    return jnp.concatenate([a * c - b * d, a * d + b * c], axis=-1)


def _complex_cube(x):
    real, imaginary = _halves(x)
    return _cube(jnp.square(real) + jnp.square(imaginary))


def _real_cube(x):
    return _cube(jnp.square(x))


def _cube(squared):
    return squared * _root(squared)


def _root(squared):
    # The constant keeps the gradient finite at 0, as for the activation of a missing id.
    return jnp.sqrt(squared + 1e-30)


@jax.custom_vjp
def _products(query, tail):
    """Compute query tail^T, f32[B, E] and f32[K, E] -> f32[B, K]; gradients contract last axes (models/tower.py)."""
    return jax.lax.dot_general(query, tail, (((1,), (1,)), ((), ())))


def _products_backward(saved, gradient):
    query, tail = saved
    by_tail = jax.lax.optimization_barrier(jax.lax.optimization_barrier(query.T) @ gradient)
    return gradient @ tail, by_tail.T


_products.defvjp(lambda query, tail: (_products(query, tail), (query, tail)), _products_backward)


def _product(query, tail):
    return jnp.sum(query * tail, axis=-1)


def _minus_distance(query, tail):
    return _minus_length(jnp.sum(jnp.square(query - tail), axis=-1))


def _minus_distances(query, tail):
    # By products, as [B, K, E] would take most of the step. Of rows much longer than their distance, that is inexact:
    # by 4 % for a distance of 0.03 between rows of length 11.
    squared = jnp.sum(jnp.square(query), axis=-1)[:, None] + jnp.sum(jnp.square(tail), axis=-1)[None]
    return _minus_length(squared - 2 * _products(query, tail))


def _minus_length(squared):
    # Rounding can make the square of a short one negative; the constant bounds the gradient there.
    return -jnp.sqrt(jnp.maximum(squared, 0) + 1e-6)


@jax.checkpoint
def _minus_moduli_of_one(query, tail):
    return _minus_moduli(query[None], tail)


def _minus_moduli_of_all(query, tail):
    # Some queries at a time, and again for the gradient: [B, K, C] need not fit into memory.
    return jax.lax.map(lambda one: _minus_moduli_of_one(one, tail), query, batch_size=16)


def _minus_moduli(query, tail):
    real, imaginary = _halves(query - tail)
    return -jnp.sum(_root(jnp.square(real) + jnp.square(imaginary)), axis=-1)


# s = sum_i h_i r_i t_i (Yang et al., arXiv 1412.6575, section 3.1)
DISTMULT = Model(lambda head, relation: head * relation, _product, _products, _real_cube)
# s = Re(sum_i h_i r_i conj(t_i)) (Trouillon et al., arXiv 1606.06357)
COMPLEX = Model(_complex_query, _product, _products, _complex_cube)
# s = -|h + r - t|_2 (Bordes et al., NIPS 2013)
TRANSE = Model(lambda head, relation: head + relation, _minus_distance, _minus_distances, _real_cube)
# s = -sum_i |h_i exp(i r_i) - t_i|, r_i a phase (Sun et al., arXiv 1902.10197)
ROTATE = Model(_rotated, _minus_moduli, _minus_moduli_of_all, _complex_cube)


def score(model: Model, head: jax.Array, relation: jax.Array, tail: jax.Array) -> jax.Array:
    """Score every query against every tail: f32[B, E], f32[B, E], f32[K, E] -> f32[B, K]."""
    return model.near_all(model.query(head, relation), tail)


def relation_of(batch: Batch) -> jax.Array:
    """Return the relation of each example, i32[B], which `data.triples` stores in `dense` f32[B, 1]."""
    return batch.dense[:, 0].astype(jnp.int32)


def make_loss(model: Model, n3: float = 0.0) -> Callable:
    """Make the loss of a triple (h, r, t): softmax cross-entropy against shared negatives, plus the N3 penalty.

    -s(h, r, t) + log(exp s(h, r, t) + sum_k exp s(h, r, k)) + n3 (|h|_3^3 + |r|_3^3 + |t|_3^3), where k runs over the
    negatives of the example's group except t itself. The factor 1 / 3 of the paper's penalty is part of n3 here, as in
    the paper's code (Lacroix et al., arXiv 1806.07297, section 4).

    Args:
      model: DISTMULT, COMPLEX, TRANSE or ROTATE.
      n3: weight of the penalty; phases of ROTATE are left out of it.

    Returns:
      A loss for a `Task`: (params {'relation': f32[2 R, E], or f32[2 R, C] of ROTATE}, activations {'head',
      'tail': f32[B, E], 'negative': f32[G, K, E]}, Batch) -> f32[B].
    """
    real_number("n3", n3, "0 or more: the weight of a penalty", is_not_negative)

    def loss(params, activations, batch):
        head, tail, negative = (activations[name] for name in ("head", "tail", "negative"))
        if len(head) % len(negative):
            raise ValueError(f"{len(negative)} groups of negatives must divide a batch of {len(head)}.")
        # Filled with NaN where there is none, as with R relations in place of 2 R, so that the loss tells.
        relation = jnp.take(params["relation"], relation_of(batch), axis=0)
        positive = model.near(model.query(head, relation), tail)
        entropy = [
            _cross_entropy(positive[rows], score(model, head[rows], relation[rows], negative[g]), batch, rows, g)
            for g, rows in enumerate(_groups(len(head), len(negative)))
        ]
        penalised = (head, tail) if model is ROTATE else (head, relation, tail)
        penalty = sum(jnp.sum(model.cube(x), axis=-1) for x in penalised)
        return jnp.concatenate(entropy) + n3 * penalty

    return loss


def _groups(batch_size, groups):
    size = batch_size // groups
    return [slice(g * size, (g + 1) * size) for g in range(groups)]


def _cross_entropy(positive, negatives, batch, rows, group):
    """log(1 + sum_k exp(s_k - s)), f32[B / G], over the negatives that are neither missing nor the tail itself."""
    ids = batch.ids["negative"][group][None, :]
    counts = (ids != batch.ids["tail"][rows][:, None]) & (ids >= 0)
    negatives = jnp.where(counts, negatives, -jnp.inf)
    highest = jax.lax.stop_gradient(jnp.maximum(positive, jnp.max(negatives, axis=1)))
    total = jnp.exp(positive - highest) + jnp.sum(jnp.exp(negatives - highest[:, None]), axis=1)
    return jnp.log(total) + highest - positive


def filtered_ranks(
    model: Model,
    entities: np.ndarray,
    relations: jax.Array,
    queries: np.ndarray,
    known: Callable,
    chunk: int = 512,
    block: int = 1 << 16,
) -> np.ndarray:
    """Rank the true tail of each query among all entities, leaving out its other known tails.

    rank = 1 + #{higher} + #{equal} / 2: ties get their mean rank, so that equal scores gain nothing; NaN counts as
    higher. The filter is that of Bordes et al., NIPS 2013.

    Args:
      model: DISTMULT, COMPLEX, TRANSE or ROTATE.
      entities: f32[N, E], of which the device holds a block at a time.
      relations: f32[2 R, E], or f32[2 R, C] of ROTATE.
      queries: i32[Q, 3]: head, relation, true tail; the two directions of a triple are two queries. The device holds
        the vectors of all.
      known: (head i32[q], relation i32[q]) -> (query index i32[m], known tail i32[m]), such as
        `data.triples.KnownTails.pairs`.
      chunk: number of queries scored at once, in f32[chunk, block].
      block: number of entities scored at once.

    Returns:
      f64[Q], from 1 to N.

    Raises:
      ValueError: a query has an entity or a relation that is not there.
    """
    entities, queries = np.asarray(entities), np.asarray(queries, np.int32)
    for what, asked, there in (("entities", queries[:, ::2], entities), ("relations", queries[:, 1], relations)):
        if asked.size and not 0 <= asked.min() <= asked.max() < len(there):
            raise ValueError(f"queries have {what} from {asked.min()} to {asked.max()}, and there are {len(there)}.")
    order = np.argsort(queries[:, 2], kind="stable")  # the tails of a chunk lie in few blocks
    places = [order[start : start + chunk] for start in range(0, len(order), chunk)]
    filters = [known(queries[place, 0], queries[place, 1]) for place in places]
    longest = max((len(query) for query, _ in filters), default=0)
    parts, none = [], np.zeros(chunk, np.int32)
    for place, (query, tail) in zip(places, filters, strict=True):
        head, relation, true = queries[np.pad(place, (0, chunk - len(place)), "edge")].T
        rest = 0, longest - len(query)
        pairs = np.pad(query, rest, constant_values=chunk), np.pad(tail, rest)
        vectors = model.query(jnp.asarray(entities[head]), relations[relation])
        parts.append(_Part(vectors, *map(jnp.asarray, (true, *pairs))))
    counts = [(np.full(chunk, np.nan, np.float32), none, none)] * len(parts)
    # First the blocks that have the tails of a chunk, to read their scores there: those of another product of the same
    # vectors may differ in the last bit, and break ties.
    for first_pass in (True, False):
        for first in range(0, len(entities), block):
            here = [(first <= tails) & (tails < first + block) for tails in (queries[place, 2] for place in places)]
            wanted = [index for index, one in enumerate(here) if (one.any() if first_pass else not one.all())]
            if not wanted:
                continue
            some = entities[first : first + block]
            rows = jnp.asarray(np.pad(some, ((0, min(block, len(entities)) - len(some)), (0, 0))))
            for index in wanted:
                counts[index] = _compared(model, first_pass, parts[index], *counts[index], rows, first, len(entities))
    ranks = np.zeros(len(queries))
    for place, (_, higher, equal) in zip(places, counts, strict=True):
        ranks[place] = (1 + np.asarray(higher) + np.asarray(equal) / 2)[: len(place)]
    return ranks


class _Part(NamedTuple):
    """Queries that are ranked together."""

    query: jax.Array  # f32[q, E]
    tail: jax.Array  # i32[q]
    known_query: jax.Array  # i32[m], q for padding
    known_tail: jax.Array  # i32[m]


@jax.jit(static_argnums=0)
def _compared(model, first_pass, part, own, higher, equal, rows, first, entities):
    """Compare queries with rows f32[K, E] of the entities from `first` on.

    Args:
      first_pass: bool[], whether to read the scores of the tails that are among the rows, and to count for their
        queries alone; else the others are counted.
      own, higher, equal: f32[q], i32[q], i32[q]: score of each tail, and counts so far.

    Returns:
      The new own, higher and equal.
    """
    scores, number, place = model.near_all(part.query, rows), len(part.query), part.tail - first
    here = (0 <= place) & (place < len(rows))
    of_tail = jnp.take_along_axis(scores, jnp.clip(place, 0, len(rows) - 1)[:, None], axis=1)
    own = jnp.where(here & first_pass, of_tail[:, 0], own)
    ids, at = first + jnp.arange(len(rows))[None], jnp.minimum(part.known_query, number - 1)
    others = (ids < entities) & (ids != part.tail[:, None])
    place = part.known_tail - first
    known = (0 <= place) & (place < len(rows)) & (part.known_tail != part.tail[at])
    place = jnp.clip(place, 0, len(rows) - 1)

    def count(compare):
        left_out = (compare(scores[at, place], own[at]) & known).astype(jnp.int32)
        left_out = jax.ops.segment_sum(left_out, part.known_query, number)
        found = jnp.sum(compare(scores, own[:, None]) & others, axis=1, dtype=jnp.int32) - left_out
        return jnp.where(here == first_pass, found, 0)

    higher += count(lambda scores, own: ~(scores <= own))
    equal += count(lambda scores, own: scores == own)
    return own, higher, equal


def ranking_metrics(ranks: np.ndarray) -> dict[str, float]:
    """Summarise ranks: mean reciprocal rank and Hits@k, the share of ranks up to k.

    Args:
      ranks: f64[Q], 1 is best.

    Returns:
      mrr, hits_at_1, hits_at_3, hits_at_10.

    >>> ranking_metrics(np.array([1.0, 2.0, 4.0, 20.0]))
    {'mrr': 0.45, 'hits_at_1': 0.25, 'hits_at_3': 0.5, 'hits_at_10': 0.75}
    """
    if not len(ranks):
        raise ValueError("there are no ranks to sum up: evaluate at least one query.")
    hits = {f"hits_at_{k}": float(np.mean(ranks <= k)) for k in (1, 3, 10)}
    return {"mrr": float(np.mean(1 / ranks)), **hits}
