"""Knowledge graphs as triples: batches with shared negatives, and known tails for filtered ranking.

Every triple (h, r, t) is also learned and queried as its reciprocal (t, r + R, h), so that a model ranks tails only
(Lacroix et al., arXiv 1806.07297, section 3.2).

Legend: n triples, N entities, R relations (2 R with their reciprocals), B batch, G groups of a batch, K negatives of a
group.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxrec.bounds import real_number
from jaxrec.types import Batch

_ORDER, _NEGATIVES, _GRAPH = 1, 2, 3  # streams of random numbers


class Triples(NamedTuple):
    """A knowledge graph in three splits; ids of entities and of relations start at 0."""

    train: np.ndarray  # i32[n, 3]: head, relation, tail
    valid: np.ndarray  # i32[n, 3]
    test: np.ndarray  # i32[n, 3]
    entities: int  # N
    relations: int  # R, without reciprocals
    # Names of entities and of relations, str[N] and str[R], in the order of their ids; empty if files give ids.
    names: tuple[np.ndarray, np.ndarray] = (np.zeros(0, str), np.zeros(0, str))


def generate_triples(
    entities: int = 400, relations: int = 8, clusters: int = 20, tails: int = 4, seed: int = 0
) -> Triples:
    """Generate a small learnable graph: relation r links the entities of cluster c to those of cluster p_r(c).

    Args:
      entities: N; entity e belongs to cluster e % clusters.
      relations: R; each has a permutation p_r of the clusters.
      clusters: number of clusters.
      tails: number of tails drawn for each entity and relation.
      seed: seed of the permutations, the tails and the split into 80 % train, 10 % valid and 10 % test.

    Returns:
      Triples, all distinct.
    """
    if not 1 <= clusters <= entities or entities * relations * tails < 10:
        raise ValueError(
            f"entities={entities}, relations={relations}, clusters={clusters}, tails={tails}: need 1 <= clusters <= "
            "entities and at least ten triples in all."
        )
    rng = np.random.default_rng([seed, _GRAPH])
    permutation = np.stack([rng.permutation(clusters) for _ in range(relations)])
    head, relation, _ = (a.reshape(-1) for a in np.mgrid[:entities, :relations, :tails])
    cluster = permutation[relation, head % clusters]
    members = (entities - cluster + clusters - 1) // clusters
    tail = cluster + clusters * rng.integers(members)
    triples = np.unique(np.stack([head, relation, tail], axis=1), axis=0).astype(np.int32)
    rng.shuffle(triples)
    train, valid, test = np.split(triples, [len(triples) * 8 // 10, len(triples) * 9 // 10])
    return Triples(train, valid, test, entities, relations)


def generate_power_law(entities: int, relations: int, triples: int, exponent: float = 0.8, seed: int = 0) -> Triples:
    """Generate a graph to measure speeds with: degrees follow a power law, and there is nothing to learn.

    Args:
      entities: N, of which the n-th most popular has a share proportional to n^-exponent of all ends of triples.
      relations: R, uniform.
      triples: number of triples, of which up to 1,000 each are for validation and test; repeats are left in.
      exponent: above 0, not 1.
      seed: seed of all draws.

    Returns:
      Triples; the numbers of entities are by popularity.
    """
    if not (entities > 0 and relations > 0 and triples >= 10) or exponent <= 0 or exponent == 1:
        raise ValueError(
            f"entities={entities}, relations={relations}, triples={triples}, exponent={exponent}: need at least one, "
            "one and ten, and an exponent above 0 that is not 1."
        )
    rng, rest = np.random.default_rng([seed, _GRAPH]), 1 - exponent
    # The inverse of the distribution of a density x^-exponent from 1 to N + 1.
    x = (1 + rng.random((2, triples)) * ((entities + 1.0) ** rest - 1)) ** (1 / rest)
    head, tail = np.minimum(x.astype(np.int64) - 1, entities - 1).astype(np.int32)
    whole = np.stack([head, rng.integers(relations, size=triples, dtype=np.int32), tail], axis=1)
    held_out = min(1000, triples // 10)
    train, valid, test = np.split(whole, [triples - 2 * held_out, triples - held_out])
    return Triples(train, valid, test, entities, relations)


def both_directions(triples: np.ndarray, relations: int) -> np.ndarray:
    """Append the reciprocals (t, r + R, h) to the triples (h, r, t): i32[n, 3] -> i32[2 n, 3].

    >>> both_directions(np.array([[5, 1, 7]]), relations=3).tolist()
    [[5, 1, 7], [7, 4, 5]]
    """
    return np.concatenate([triples, triples[:, ::-1] + np.array([0, relations, 0], triples.dtype)])


@dataclasses.dataclass(frozen=True, eq=False)
class TripleBatches:
    """Training batches as a pure function of (seed, index), with uniform negatives shared by groups of examples.

    The examples of a batch are cut, in order, into G groups of B / G, each with its own K negatives. A batch thus means
    the same on any number of devices that divides G, each with whole groups. The last batch of an epoch is padded with
    examples of weight 0 and missing ids.

    Attributes:
      triples: i32[n, 3], including the reciprocals to be learned.
      entities: N; negatives are drawn from all entities.
      batch_size: B.
      negatives: K.
      groups: G, a divisor of B.
      seed: seed of the order of each epoch and of the negatives.
      by_degree: share of the negatives, from 0 to 1, that are tails of random triples, so drawn by their degree;
        the others are uniform (Lerer et al., arXiv 1903.12287, section 3.1).
    """

    triples: np.ndarray
    entities: int
    batch_size: int
    negatives: int
    groups: int = 1
    seed: int = 0
    by_degree: float = 0.0

    def __post_init__(self):
        sizes = {k: getattr(self, k) for k in ("entities", "batch_size", "negatives", "groups")}
        if min(sizes.values()) < 1 or self.batch_size % self.groups or not len(self.triples):
            raise ValueError(
                f"{len(self.triples)} triples, {sizes}: need at least one of each, and groups that divide the batch."
            )
        real_number("by_degree", self.by_degree, "a share from 0 to 1", lambda share: 0 <= share <= 1)
        if self.by_degree and not round(self.by_degree * self.negatives):
            raise ValueError(
                f"by_degree={self.by_degree} of {self.negatives} negatives is none: draw more of them, or give 0."
            )
        if not (0 <= self.triples[:, ::2].min() and self.triples[:, ::2].max() < self.entities):
            ends = self.triples[:, ::2]
            raise ValueError(f"heads and tails run from {ends.min()} to {ends.max()}, and entities={self.entities}.")
        if self.triples[:, 1].max() >= 2**24:
            raise ValueError(
                f"relation {self.triples[:, 1].max()}: ids travel as float32, exact below 2**24: number them densely."
            )

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches that cover every triple once."""
        return -(-len(self.triples) // self.batch_size)

    def batch(self, index: int) -> Batch:
        """Make batch `index`, of epoch index // batches_per_epoch.

        Args:
          index: 0, 1, ...

        Returns:
          Batch with ids {'head': i32[B], 'tail': i32[B], 'negative': i32[G, K]}, dense f32[B, 1] the relation (see
          `relation_of`), label f32[B] ones, weight f32[B].
        """
        epoch, position = divmod(index, self.batches_per_epoch)
        start, size = position * self.batch_size, self.batch_size
        chosen = self.triples[_order(self.seed, epoch, len(self.triples))[start : start + size]]
        rows = np.full((size, 3), -1, np.int32)
        rows[: len(chosen)] = chosen
        real = np.arange(size) < len(chosen)
        rng = np.random.default_rng([self.seed, _NEGATIVES, index])
        negative = rng.integers(self.entities, size=(self.groups, self.negatives), dtype=np.int32)
        popular = round(self.by_degree * self.negatives)
        if popular:
            negative[:, :popular] = self.triples[rng.integers(len(self.triples), size=(self.groups, popular)), 2]
        ids = {"head": rows[:, 0].copy(), "tail": rows[:, 2].copy(), "negative": negative}
        relation = np.where(real, rows[:, 1], 0).astype(np.float32)[:, None]
        return Batch(ids, np.ones(size, np.float32), relation, real.astype(np.float32))

    def stream(self, start: int = 0, batches: int | None = None) -> Iterator[Batch]:
        """Yield batches `start`, `start` + 1, ..., below index `batches`, or without end if `batches` is None."""
        return map(self.batch, itertools.count(start) if batches is None else range(start, batches))


@dataclasses.dataclass(frozen=True, eq=False)
class KnownTails:
    """All known tails of each query (h, r), reciprocals included: the filter of filtered ranking.

    Attributes:
      relations: 2 R.
      queries: i64[q], sorted keys h * 2 R + r of the queries that have a tail.
      starts: i64[q + 1], offsets in `tails` of the tails of each query.
      tails: i32[m], ascending within a query.
    """

    relations: int
    queries: np.ndarray
    starts: np.ndarray
    tails: np.ndarray

    @classmethod
    def of(cls, triples: Triples) -> "KnownTails":
        """Collect the tails of train, valid and test, in both directions.

        Raises:
          ValueError: a relation is none of the R.
        """
        relations = 2 * triples.relations
        largest = max((int(part[:, 1].max()) for part in triples[:3] if len(part)), default=-1)
        if largest >= triples.relations:
            raise ValueError(f"there are relations up to {largest}, and relations={triples.relations}.")
        head, relation, tail = both_directions(np.concatenate(triples[:3]), triples.relations).T
        query = head.astype(np.int64) * relations + relation  # one key for all three would not fit for large graphs
        order = np.lexsort((tail, query))
        query, tail = query[order], tail[order]
        new = np.append(True, (np.diff(query) != 0) | (np.diff(tail) != 0))[: len(query)]
        queries, starts = np.unique(query[new], return_index=True)
        return cls(relations, queries, np.append(starts, int(new.sum())), tail[new].astype(np.int32))

    def pairs(self, head: np.ndarray, relation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """List the known tails of n queries.

        Args:
          head: i32[n].
          relation: i32[n], below 2 R.

        Returns:
          (query index i32[m], tail i32[m]), in query order; an unknown query has no tails.
        """
        wanted = head.astype(np.int64) * self.relations + relation
        place = np.minimum(np.searchsorted(self.queries, wanted), len(self.queries) - 1)
        count = np.where(self.queries[place] == wanted, self.starts[place + 1] - self.starts[place], 0)
        query = np.repeat(np.arange(len(wanted), dtype=np.int32), count)
        first = np.repeat(self.starts[place] - (np.cumsum(count) - count), count)
        return query, self.tails[first + np.arange(len(query))]


@functools.lru_cache(maxsize=2)  # of this epoch, and the next one, which is prefetched
def _order(seed: int, epoch: int, n: int) -> np.ndarray:
    """Return the order of an epoch, i64[n]; cached, since each of its batches needs it."""
    return np.random.default_rng([seed, _ORDER, epoch]).permutation(n)
