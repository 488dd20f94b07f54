"""Graph networks: samples of neighbours and GraphSAGE against plain code; every engine and home gives the same bits."""

import dataclasses
import functools
import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrec import Batch, Serial
from jaxrec.data.neighbours import BAG, Neighbours, SubgraphBatches, distinct, stacked
from jaxrec.data.triples import TripleBatches, both_directions, generate_triples
from jaxrec.embedding import EmbeddingSpec, Lookup, Table, adagrad, embedding_matrix
from jaxrec.models.graph_sage import encode, init_encoder, make_link_loss
from jaxrec.models.link_prediction import DISTMULT, make_loss
from jaxrec.oac import Overlap, Pipeline
from jaxrec.sharding import make_mesh
from jaxrec.step import make_eval_step
from jaxrec.task import Task

GRAPH = generate_triples(entities=60, relations=3, clusters=6, tails=4)
NEIGHBOURS = Neighbours.of(GRAPH.train[:, 0], GRAPH.train[:, 2], 60)
STEPS = 10
LOOKUPS = {"node": Lookup("entity"), "neighbour": Lookup("entity", hots=BAG)}


def adjacency(edges, nodes):
    """{node: sorted list of its neighbours, with repeats}, by a loop."""
    found = {node: [] for node in range(nodes)}
    for a, b in edges:
        found[a].append(b)
        found[b].append(a)
    return {node: sorted(its) for node, its in found.items()}


def neighbours_in(layer, below):
    """{place of a node: sorted list of its sampled neighbours}, as ids, given those of the layer below."""
    found = {place: [] for place in range(len(layer.degree))}
    for node, bag in zip(layer.node, layer.neighbour, strict=True):
        found[int(node)] += [int(below[place] if below is not None else place) for place in bag if place >= 0]
    return {place: sorted(its) for place, its in found.items()}


graphs = st.integers(1, 30).flatmap(
    lambda nodes: st.tuples(
        st.just(nodes), st.lists(st.tuples(st.integers(0, nodes - 1), st.integers(0, nodes - 1)), max_size=60)
    )
)


# ---- samples


@given(graphs, st.integers(0, 5))
def test_without_a_fanout_a_sample_holds_all_neighbours(graph, seed):
    nodes, edges = graph
    heads, tails = (np.array([edge[end] for edge in edges], np.int32) for end in (0, 1))
    targets = np.random.default_rng(seed).permutation(nodes)[: 1 + nodes // 2].astype(np.int32)
    found = Neighbours.of(heads, tails, nodes).sample(targets, (None, None))
    wanted, (low, high) = adjacency(edges, nodes), found.layers
    assert found.nodes[: len(targets)].tolist() == targets.tolist() and len(set(found.nodes)) == len(found.nodes)
    for layer, below, own in ((high, found.nodes, targets), (low, None, found.nodes)):
        assert neighbours_in(layer, below) == {place: wanted[node] for place, node in enumerate(own.tolist())}
        assert (np.diff(layer.node) >= 0).all()
        assert layer.degree.tolist() == [len(wanted[node]) for node in own.tolist()]


@given(graphs, st.integers(1, 9), st.integers(0, 2**40))
def test_a_fanout_draws_that_many_of_the_neighbours_without_replacement(graph, fanout, seed):
    nodes, edges = graph
    heads, tails = (np.array([edge[end] for edge in edges], np.int32) for end in (0, 1))
    neighbours, targets = Neighbours.of(heads, tails, nodes), np.arange(nodes, dtype=np.int32)
    found, again = (neighbours.sample(targets, (fanout,), seed) for _ in range(2))
    for place, its in neighbours_in(found.layers[0], None).items():
        there = adjacency(edges, nodes)[place]
        assert len(its) == min(fanout, len(there)) == found.layers[0].degree[place]
        for node in set(its):
            assert its.count(node) <= there.count(node)
    jax.tree.map(np.testing.assert_array_equal, tuple(found), tuple(again))


@pytest.mark.parametrize(("degree", "fanout"), [(5, 3), (12, 2), (20, 19)])
def test_every_sample_is_equally_likely(degree, fanout):
    # Node i < n has the neighbours n, n + 1, ..., n + degree - 1.
    n = 6000
    heads, tails = np.repeat(np.arange(n), degree), n + np.tile(np.arange(degree), n)
    neighbours = Neighbours.of(heads, tails, n + degree)
    layer = neighbours.sample(np.arange(n, dtype=np.int32), (fanout,), 3).layers[0]
    sets = np.zeros((n, degree), bool)
    bags, places = np.nonzero(layer.neighbour >= 0)
    sets[layer.node[bags], layer.neighbour[bags, places] - n] = True
    assert (sets.sum(axis=1) == fanout).all()
    kinds = math.comb(degree, fanout)
    counts = np.unique(np.packbits(sets, axis=1), axis=0, return_counts=True)[1]
    chi_squared = np.sum((counts - n / kinds) ** 2) / (n / kinds) + (kinds - len(counts)) * n / kinds
    assert abs(chi_squared - kinds) < 6 * (2 * kinds) ** 0.5
    other = neighbours.sample(np.arange(n, dtype=np.int32), (fanout,), 4).layers[0]
    assert (other.neighbour != layer.neighbour).any()


def test_what_is_no_node_and_what_is_no_fanout_is_refused():
    with pytest.raises(ValueError, match="end at 0 to 9, and there are 5"):
        Neighbours.of(np.array([0, 9]), np.array([1, 2]), nodes=5)
    with pytest.raises(ValueError, match="3 heads and 2 tails"):
        Neighbours.of(np.arange(3), np.arange(2), nodes=5)
    for targets, fanouts, message in [
        ([-1], (3,), "targets run from -1 to -1"),
        ([60], (3,), "and there are 60 nodes"),
        ([2**32], (3,), "run from 4294967296"),
        ([1], (), "has no layer"),
        ([1], (-2,), "fanout=-2"),
        ([3, 5, 3], (None, 2), "a target is there twice"),
        ([True, False], (3,), "targets are bool"),
        ([1.5], (3,), "targets are float64"),
    ]:
        with pytest.raises(ValueError, match=message):
            NEIGHBOURS.sample(np.array(targets), fanouts)


def test_ids_are_numbered_by_first_appearance():
    ids = np.random.default_rng(0).integers(-1, 40, 500).astype(np.int32)
    found, places = distinct(ids)
    assert found.tolist() == list(dict.fromkeys(i for i in ids.tolist() if i >= 0))
    np.testing.assert_array_equal(np.where(places < 0, -1, found[places]), ids)


# ---- the encoder


def plain_encode(layers, rows, graph, targets):
    """GraphSAGE node by node, in float64, from the sampled neighbours."""
    x = dict(enumerate(rows.astype(np.float64)))
    below = [None, *[graph.nodes] * (len(layers) - 1)]  # the nodes of each layer are the first of these
    own = graph.nodes
    for number, (layer, edges, names) in enumerate(zip(layers, graph.layers, below, strict=True)):
        new = {}
        for place, its in neighbours_in(edges, names).items():
            mean = np.mean([x[node] for node in its], axis=0) if its else np.zeros(x[int(own[0])].shape)
            value = x[int(own[place])] @ layer["self"] + mean @ layer["neighbour"] + layer["bias"]
            new[int(own[place])] = value if number == len(layers) - 1 else np.maximum(value, 0)
        x = new
    return np.stack([x[int(node)] for node in targets])


@pytest.mark.parametrize("fanouts", [(None,), (4,), (3, 5), (None, 2, 3)])
def test_vectors_are_those_of_a_loop_over_nodes(fanouts):
    rows = np.random.default_rng(1).standard_normal((60, 8), np.float32)
    layers = jax.tree.map(np.asarray, init_encoder(jax.random.key(0), [8, *[6] * len(fanouts)]))
    for layer in layers:
        layer["bias"] = np.random.default_rng(2).standard_normal(6, np.float32)
    targets = [np.array([3, 9, 41], np.int32), np.arange(20, 60, dtype=np.int32)]  # of two subgraphs
    graphs = [NEIGHBOURS.sample(own, fanouts, seed) for seed, own in enumerate(targets)]
    ids, edges = stacked(graphs)
    taken = lambda places: np.where(places[..., None] >= 0, rows[places], 0)
    activations = {"node": taken(ids["node"]), "neighbour": taken(ids["neighbour"]).sum(axis=2)}
    found = jax.jit(encode)(layers, activations, Batch(ids, {"layers": edges}))
    for own, graph, vectors in zip(targets, graphs, found, strict=True):
        np.testing.assert_allclose(vectors[: len(own)], plain_encode(layers, rows, graph, own), rtol=1e-4, atol=1e-4)


# ---- training


def job(subgraphs=1, fanouts=(4, 4), devices=1, groups=4):
    """A task and its batches."""
    spec = EmbeddingSpec({"entity": Table(60, 16, 0.1)}, LOOKUPS, shards=2)
    mesh = make_mesh(devices=jax.devices()[:devices])
    task = Task(spec, make_link_loss(make_loss(DISTMULT)), optax.sgd(0.1), adagrad(0.1), mesh)
    batches = TripleBatches(both_directions(GRAPH.train, 3), 60, batch_size=64, negatives=12, groups=groups)
    return task, SubgraphBatches(batches, NEIGHBOURS, fanouts, subgraphs)


def params(layers=2):
    relation = np.random.default_rng(3).standard_normal((6, 16)).astype(np.float32)
    return {"relation": relation, "encoder": init_encoder(jax.random.key(1), [16] * (layers + 1))}


def result(engine, batches):
    with engine:
        losses = [metrics["loss"] for _, metrics in engine.run(batches)]
        state = engine.state
    dense = jax.tree.leaves(jax.device_get(state.dense))
    return [np.asarray(losses), embedding_matrix(state.tables, "entity"), *map(np.asarray, dense)]


@pytest.fixture(scope="module")
def serial():
    """The task, its batches, and what training one batch after the other gives."""
    task, batches = job()
    return task, batches, result(Serial(task, task.init(params(), "host")), batches.stream(0, STEPS))


ENGINES = {
    "window 5": ("host", functools.partial(Pipeline, window=5)),
    "on pinned streams": ("pinned", lambda task, state: Serial(Overlap(task, window=3), state)),
    "on devices": ("device", Serial),
    "pinned": ("pinned", Serial),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.more] * (i > 1)) for i, name in enumerate(ENGINES)]
)
def test_all_engines_give_the_same_bits(serial, name):
    task, batches, wanted = serial
    home, make = ENGINES[name]
    found = result(make(task, task.init(params(), home)), batches.stream(0, STEPS))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_rows_that_are_one_batch_stale_give_other_bits(serial):
    task, batches, wanted = serial
    stale = result(Pipeline(task, task.init(params(), "host"), mode="semisync"), batches.stream(0, STEPS))
    assert all((a != b).any() for a, b in zip(stale[:2], wanted[:2], strict=True))


def test_training_means_the_same_over_subgraphs_and_devices():
    task, batches = job(fanouts=(None,), groups=2)
    one = result(Serial(task, task.init(params(1), "host")), batches.stream(0, STEPS))
    task, batches = job(subgraphs=2, fanouts=(None,), devices=2, groups=2)
    two = result(Serial(task, task.init(params(1), "host")), batches.stream(0, STEPS))
    for found, wanted in zip(two, one, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="subgraphs=3 must divide"):
        dataclasses.replace(batches, subgraphs=3)


def test_batches_are_a_function_of_their_index_and_hold_the_triples():
    _, batches = job(subgraphs=2)
    plain, n = batches.triples, batches.triples.batches_per_epoch
    assert len(plain.triples) % 64  # the last one is padded
    for index in (0, n - 1, n):
        batch, again, whole = batches.batch(index), next(batches.stream(index)), plain.batch(index)
        jax.tree.map(np.testing.assert_array_equal, batch, again)
        label, ids = batch.label, batch.ids
        for name in ("head", "tail", "negative"):
            places = label[name].reshape(2, -1)
            found = np.where(places < 0, -1, np.take_along_axis(ids["node"], np.maximum(places, 0), axis=1))
            np.testing.assert_array_equal(found.reshape(-1), whole.ids[name].reshape(-1))
        np.testing.assert_array_equal(label["weight"].reshape(-1), whole.weight)
        assert batch.weight.sum() == whole.weight.sum()
    shapes = {
        jax.tree.structure(b).num_leaves and tuple(x.shape for x in jax.tree.leaves(b)) for b in batches.stream(0, n)
    }
    assert len(shapes) < 4


def test_each_batch_and_each_seed_draws_its_own_neighbours():
    _, batches = job(fanouts=(2,))
    triples = batches.triples
    always = lambda seed: types.SimpleNamespace(groups=4, seed=seed, batch=lambda index: triples.batch(0))
    drawn = lambda seed, index: SubgraphBatches(always(seed), NEIGHBOURS, (2,)).batch(index).ids["neighbour"]
    assert (drawn(0, 0) == drawn(0, 0)).all()
    assert (drawn(0, 0) != drawn(0, 1)).any() and (drawn(0, 0) != drawn(1, 0)).any()


def test_the_loss_of_a_padded_batch_is_the_mean_over_its_examples():
    task, batches = job(fanouts=(None,), groups=1)
    last = batches.batch(batches.triples.batches_per_epoch - 1)
    real = int(last.weight[0])
    of_each = ("head", "tail", "relation", "weight")
    label = last.label | {name: last.label[name][:, :real] for name in of_each}
    assert 0 < real < 64 and label["weight"].all()
    loss = make_link_loss(make_loss(DISTMULT))
    step, state = make_eval_step(task.spec, lambda *given: loss(*given)), task.init(params(1), "host")
    np.testing.assert_allclose(step(state, last), step(state, last._replace(label=label)), rtol=1e-5)


def test_padding_counts_for_nothing():
    task, batches = job(fanouts=(None,))
    last = batches.batch(batches.triples.batches_per_epoch - 1)
    state, loss = task.init(params(1), "host"), make_link_loss(make_loss(DISTMULT))
    step = make_eval_step(task.spec, lambda *given: loss(*given))
    found = step(state, last)
    label = dict(last.label)
    label["relation"] = np.where(label["weight"] > 0, label["relation"], 5)
    assert (step(state, last._replace(label=label)) == found).all()
    label["relation"] = (label["relation"] + 1) % 6  # negative control
    assert (step(state, last._replace(label=label)) != found).all()


def test_nodes_are_classified_from_their_neighbours():
    """A planted partition: a class shows in whom a node is linked to, and half of the nodes have no label."""
    rng, n, classes = np.random.default_rng(0), 240, 4
    kind = np.arange(n) % classes
    ends = rng.integers(n, size=(20 * n, 2))
    ends = ends[rng.random(len(ends)) < np.where(kind[ends[:, 0]] == kind[ends[:, 1]], 0.5, 0.05)]
    neighbours = Neighbours.of(ends[:, 0], ends[:, 1], n)
    spec = EmbeddingSpec({"entity": Table(n, 16, 0.1)}, LOOKUPS)
    predict = lambda params, *given: encode(params, *given)

    def loss(params, activations, batch):
        vectors = encode(params, activations, batch)[:, : batch.label["kind"].shape[1]]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(vectors, batch.label["kind"]), axis=1)

    def batch(targets, seed):
        ids, layers = stacked([neighbours.sample(targets, (8, 8), seed)], [(n, n), (n, n)])
        return Batch(ids, {"kind": kind[targets][None], "layers": layers}, weight=np.full(1, len(targets), np.float32))

    task = Task(spec, loss, optax.adam(0.01), adagrad(0.02))
    start = task.init(init_encoder(jax.random.key(0), (16, 16, classes)), "host")
    known, hidden = np.arange(n // 2, dtype=np.int32), np.arange(n // 2, n, dtype=np.int32)
    drawn = (rng.permutation(known)[:40] for _ in itertools.count())
    with Pipeline(task, start, window=4) as engine:
        state = engine.train(batch(targets, seed) for seed, targets in zip(range(150), drawn, strict=False))
    found = make_eval_step(spec, predict)(state, batch(hidden, 0))[0, : len(hidden)]
    assert np.mean(np.argmax(found, axis=1) == kind[hidden]) > 0.8
