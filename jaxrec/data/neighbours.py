"""Neighbourhoods of a graph's nodes, sampled as bags of row numbers: the inputs of `models.graph_sage`.

A batch needs the vectors of some nodes, its targets, and a model of L layers the embeddings of all nodes up to L edges
away. Neighbours come in bags of 8, so that a hub has many of them, and no other node is padded to its size.

Legend: N nodes, M edges, n numbered nodes of a layer, P bags of a layer, G subgraphs of a batch, L layers.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numba
import numpy as np

from jaxrec.bounds import whole_number
from jaxrec.data.triples import TripleBatches
from jaxrec.embedding.kernels import empty_entries, mix, number_rows
from jaxrec.embedding.lookup import bucket
from jaxrec.types import Batch

BAG = 8  # neighbours of a bag, as many as `activations` sums at once


class Layer(NamedTuple):
    """The edges of a layer, from the neighbours to its n nodes. Of several subgraphs, all have a first axis G."""

    node: np.ndarray  # i32[P], ascending, the node of each bag; n for padding
    degree: np.ndarray  # f32[n], number of sampled neighbours of each node
    # i32[P, 8], -1 for none: places among the nodes of the layer below; of the lowest, row numbers, which are looked up
    # in the tables and are no part of the labels.
    neighbour: np.ndarray


class Subgraph(NamedTuple):
    """What a model needs to compute the vectors of the targets."""

    nodes: np.ndarray  # i32[n] of the lowest layer: the targets first, each once, then their neighbours
    layers: list[Layer]  # the lowest, whose inputs are the embeddings, first


@dataclasses.dataclass(frozen=True, eq=False)
class Neighbours:
    """The neighbours of each node, whichever way an edge points.

    Attributes:
      starts: i64[N + 1], offsets in `nodes` of the neighbours of each node.
      nodes: i32[2 M]; a neighbour by two edges is there twice.
    """

    starts: np.ndarray
    nodes: np.ndarray

    @classmethod
    def of(cls, heads: np.ndarray, tails: np.ndarray, nodes: int) -> "Neighbours":
        """Collect the neighbours of N = `nodes` nodes from edges (head, tail), i32[M] each.

        Raises:
          ValueError: an end is none of the nodes; there are more heads than tails, or fewer.

        >>> Neighbours.of(np.array([0, 0]), np.array([1, 2]), nodes=4).nodes.tolist()
        [1, 2, 0, 0]
        """
        if len(heads) != len(tails):
            raise ValueError(f"{len(heads)} heads and {len(tails)} tails: one of each for an edge.")
        ends = np.concatenate([heads, tails])
        if len(ends) and not 0 <= ends.min() <= ends.max() < nodes:
            raise ValueError(f"edges end at {ends.min()} to {ends.max()}, and there are {nodes} nodes.")
        order = np.argsort(ends, kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(ends, minlength=nodes))])
        return cls(starts, np.concatenate([tails, heads]).astype(np.int32)[order])

    def sample(self, targets: np.ndarray, fanouts: Sequence[int | None], seed: int = 0) -> Subgraph:
        """Sample the neighbourhood of some nodes, without replacement.

        Args:
          targets: i32[n], distinct.
          fanouts: for each layer, from that of the targets downwards, the most neighbours of a node; None for all.
          seed: the same arguments give the same sample.

        Returns:
          Subgraph. Its targets are the first n nodes of each layer.

        Raises:
          ValueError: a target is no node of the graph, or, with several layers, there twice; a fanout is negative, or
            there is none.
        """
        if not fanouts:
            raise ValueError("fanouts=() has no layer: give one for each, None for all neighbours.")
        for fanout in fanouts:
            whole_number("fanout", 0 if fanout is None else fanout, least=0)
        if len(targets) and not 0 <= np.min(targets) <= np.max(targets) < len(self.starts) - 1:
            raise ValueError(
                f"targets run from {np.min(targets)} to {np.max(targets)}, and there are {len(self.starts) - 1} nodes."
            )
        if len(targets) and np.asarray(targets).dtype.kind not in "iu":
            raise ValueError(f"targets are {np.asarray(targets).dtype}, but numbers of nodes are expected.")
        nodes, layers = np.ascontiguousarray(targets, np.int32), []
        for layer, fanout in enumerate(fanouts):
            degree = self.starts[nodes + 1] - self.starts[nodes]
            degree = degree if fanout is None else np.minimum(degree, fanout)
            bags = -(-degree // BAG)
            found = np.full((int(bags.sum()), BAG), -1, np.int32)
            key = np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, layer], np.uint32)
            _sample(self.starts, self.nodes, nodes, degree, key, found)
            below = nodes
            if layer + 1 < len(fanouts):
                below, places = distinct(np.concatenate([nodes, found.reshape(-1)]))
                if len(nodes) and places[len(nodes) - 1] != len(nodes) - 1:
                    raise ValueError(
                        "a target is there twice: sample each once, see `distinct`, and repeat its vector."
                    )
                found = places[len(nodes) :].reshape(found.shape)
            owner = np.repeat(np.arange(len(nodes), dtype=np.int32), bags)
            layers.append(Layer(owner, degree.astype(np.float32), found))
            nodes = below
        return Subgraph(nodes, layers[::-1])


@numba.njit(cache=True, nogil=True)
def _sample(starts, neighbours, nodes, degree, key, bags):
    """Fill the bags with `degree` of the neighbours of each node: all, or a sample by Floyd's algorithm."""
    chosen = np.empty(max(1, degree.max()) if len(degree) else 1, np.int64)
    bag = 0
    for i in range(len(nodes)):
        start, wanted = starts[nodes[i]], degree[i]
        there = starts[nodes[i] + 1] - start
        random = mix(mix(mix(np.uint32(nodes[i]) ^ key[0]) ^ key[1]) ^ key[2])
        for k in range(wanted):
            place = np.int64(k)
            if wanted < there:
                last = there - wanted + k
                random = mix(np.uint32(random + np.uint32(0x9E3779B9)))
                place = np.int64((np.uint64(random) * np.uint64(last + 1)) >> np.uint64(32))
                for before in range(k):
                    if chosen[before] == place:
                        place = last
                        break
                chosen[k] = place
            bags[bag + k // BAG, k % BAG] = neighbours[start + place]
        bag += (wanted + BAG - 1) // BAG


def distinct(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number ids by first appearance.

    Args:
      ids: i32[n], -1 for none.

    Returns:
      The distinct ids, i32[u], and the number of each, i32[n], -1 for none.

    >>> distinct(np.array([7, 3, -1, 7], np.int32))
    (array([7, 3], dtype=int32), array([ 0,  1, -1,  0], dtype=int32))
    """
    found, count = np.empty((1, len(ids)), np.int32), np.zeros(1, np.int32)
    place, zero, any_id = np.empty(len(ids), np.int64), np.zeros(1, np.int32), np.full(1, 2**31 - 1, np.int32)
    number_rows(ids, 1, zero, any_id, 1, empty_entries(len(ids)), found, count, place)
    return found[0, : count[0]].copy(), place.astype(np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class SubgraphBatches:
    """The batches of `TripleBatches` for a graph network: what `models.graph_sage.make_link_loss` takes.

    A batch is G subgraphs, each with its share of the triples and of the groups of negatives: G devices can share it.

    Attributes:
      triples: TripleBatches, whose batches are taken.
      neighbours: Neighbours of the training graph.
      fanouts: as for `Neighbours.sample`.
      subgraphs: G, a divisor of the groups of negatives.
    """

    triples: TripleBatches
    neighbours: Neighbours
    fanouts: Sequence[int | None] = (None,)
    subgraphs: int = 1

    def __post_init__(self):
        groups = self.triples.groups
        if groups % whole_number("subgraphs", self.subgraphs):
            raise ValueError(f"subgraphs={self.subgraphs} must divide {groups} groups of negatives.")

    def batch(self, index: int) -> Batch:
        """Make batch `index`, padded to the sizes of the first ones if it fits, so that few programs are compiled.

        Returns:
          Batch with ids {'node': i32[G, n], 'neighbour': i32[G, P, 8]}, label {'head', 'tail', 'relation': i32[G, B],
          'weight': f32[G, B], 'negative': i32[G, groups, K], 'layers': [Layer]}, of which all but relation and weight
          are places among the nodes, and the weights of the subgraphs, f32[G].
        """
        whole, g = self.triples.batch(index), self.subgraphs
        graphs, places = self._sampled(whole, index)
        ids, layers = stacked(graphs, self._sizes)
        shapes = {name: (g, -1, *array.shape[1:]) for name, array in whole.ids.items()}
        ends = np.cumsum([array.size // g for array in whole.ids.values()])[:-1]
        cut = zip(shapes.items(), np.split(np.stack(places), ends, axis=1), strict=True)
        label: dict = {name: part.reshape(shape) for (name, shape), part in cut}
        weight = whole.weight.reshape(g, -1)
        label |= {"relation": whole.dense[:, 0].astype(np.int32).reshape(g, -1), "weight": weight, "layers": layers}
        return Batch(ids, label, weight=weight.sum(axis=1))

    def stream(self, start: int = 0, batches: int | None = None) -> Iterator[Batch]:
        """Yield batches as `TripleBatches.stream`."""
        return map(self.batch, itertools.count(start) if batches is None else range(start, batches))

    def _sampled(self, batch, index):
        """Return the subgraphs of a batch, and the places of all its ids among their nodes."""
        g = self.subgraphs
        graphs, places = [], []
        for part in range(g):
            targets, mine = distinct(np.concatenate([ids.reshape(g, -1)[part] for ids in batch.ids.values()]))
            seed = ((self.triples.seed * 2**20 + index) * g + part) & (2**64 - 1)
            graphs.append(self.neighbours.sample(targets, self.fanouts, seed))
            places.append(mine)
        return graphs, places

    @functools.cached_property
    def _sizes(self):
        """A little more than the largest sizes of the first batches: [(nodes, bags)] of the layers."""
        first = [self._sampled(self.triples.batch(index), index)[0] for index in range(8)]
        return [(nodes * 21 // 20, bags * 21 // 20) for nodes, bags in _largest(itertools.chain(*first))]


def _largest(graphs):
    sizes = [[(len(layer.degree), len(layer.node)) for layer in graph.layers] for graph in graphs]
    return [tuple(map(max, zip(*layer, strict=True))) for layer in zip(*sizes, strict=True)]


def stacked(
    graphs: Sequence[Subgraph], least: Sequence[tuple[int, int]] = ()
) -> tuple[dict[str, np.ndarray], list[Layer]]:
    """Pad G subgraphs to the same sizes, of which there are few.

    Args:
      graphs: subgraphs of as many layers each.
      least: (nodes, bags) of each layer, to which they are padded if they are smaller.

    Returns:
      The ids of a Batch, {'node': i32[G, n], 'neighbour': i32[G, P, 8]}, and 'layers' of its label, whose lowest has no
      neighbours of its own, as they are ids. Nodes keep their places, so those of the layer above come first.
    """
    layers: list[Layer] = []
    largest = _largest(graphs)
    for number, (own, wanted) in enumerate(zip(largest, least or largest, strict=True)):
        nodes, bags = (bucket(max(sizes)) for sizes in zip(own, wanted, strict=True))
        each = [graph.layers[number] for graph in graphs]
        node = np.stack([_padded(layer.node, bags, nodes) for layer in each])
        degree = np.stack([_padded(layer.degree, nodes, 0) for layer in each])
        layers.append(Layer(node, degree, np.stack([_padded(layer.neighbour, bags, -1) for layer in each])))
    all_nodes = np.stack([_padded(graph.nodes, layers[0].degree.shape[1], -1) for graph in graphs])
    ids = {"node": all_nodes, "neighbour": layers[0].neighbour}
    return ids, [layers[0]._replace(neighbour=layers[0].neighbour[:, :, :0]), *layers[1:]]


def _padded(array, size, fill):
    return np.pad(array, [(0, size - len(array))] + [(0, 0)] * (array.ndim - 1), constant_values=fill)
