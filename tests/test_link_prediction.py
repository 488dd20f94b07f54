"""Link prediction: scores, loss, ranks, files and batches against plain code; a small graph is learned."""

import dataclasses
import gzip
import json
import signal
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from main.graphs import GraphFlags, check_same_graph, settled
from smoke import EXPERIMENTS, logged, smoke

from jaxrec import Serial
from jaxrec.data.triple_files import load_triples
from jaxrec.data.triples import (
    KnownTails,
    TripleBatches,
    Triples,
    both_directions,
    generate_power_law,
    generate_triples,
)
from jaxrec.embedding import EmbeddingSpec, Lookup, Table, activations, adagrad, plan
from jaxrec.models.link_prediction import (
    COMPLEX,
    DISTMULT,
    ROTATE,
    TRANSE,
    Model,
    filtered_ranks,
    make_loss,
    ranking_metrics,
    relation_of,
    score,
)
from jaxrec.sharding import make_mesh
from jaxrec.task import Task

GRAPH = generate_triples(entities=60, relations=3, clusters=6, tails=4)
MODELS = {"distmult": DISTMULT, "complex": COMPLEX, "transe": TRANSE, "rotate": ROTATE}


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def complex_rows(x):
    return x[..., : x.shape[-1] // 2] + 1j * x[..., x.shape[-1] // 2 :]


def naive_score(name, h, r, t):
    if name == "distmult":
        return sum(float(a) * float(b) * float(c) for a, b, c in zip(h, r, t, strict=True))
    if name == "transe":
        return -(sum((float(a) + float(b) - float(c)) ** 2 for a, b, c in zip(h, r, t, strict=True)) ** 0.5)
    if name == "rotate":
        turned = complex_rows(np.float64(h)) * np.exp(1j * np.float64(r))
        return -float(np.sum(np.abs(turned - complex_rows(np.float64(t)))))
    h, r, t = (complex_rows(x) for x in (h, r, t))
    return sum((complex(a) * complex(b) * complex(c).conjugate()).real for a, b, c in zip(h, r, t, strict=True))


def naive_cube(name, x):
    return float(np.sum(np.abs(complex_rows(x) if name in ("complex", "rotate") else x) ** 3))


def relations_of(name, *shape, make=normal, **seed):
    """Relations for rows of f32[n, E]: of half the width if they are phases."""
    return make(*shape[:-1], shape[-1] // (2 if name == "rotate" else 1), **seed)


# ---- scores


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_a_loop_over_coordinates(name):
    head, relation, tail = normal(4, 6), relations_of(name, 4, 6, seed=1), normal(9, 6)
    found = score(MODELS[name], head, relation, tail)
    wanted = [[naive_score(name, h, r, t) for t in tail] for h, r in zip(head, relation, strict=True)]
    assert found.shape == (4, 9) and found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    near = MODELS[name].near(MODELS[name].query(head, relation), tail[:4])
    np.testing.assert_allclose(near, np.diag(found[:, :4]), rtol=1e-4, atol=1e-5)


def test_only_complex_tells_a_relation_from_its_inverse():
    a, b, r = normal(1, 8), normal(1, 8, seed=1), normal(1, 8, seed=2)
    np.testing.assert_allclose(score(DISTMULT, a, r, b), score(DISTMULT, b, r, a), rtol=1e-5)
    assert abs(score(COMPLEX, a, r, b) - score(COMPLEX, b, r, a)).item() > 0.1
    inverse = np.concatenate([r[:, :4], -r[:, 4:]], axis=1)
    np.testing.assert_allclose(score(COMPLEX, a, r, b), score(COMPLEX, b, inverse, a), rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_the_written_gradient_of_a_score_is_that_of_autodiff(name):
    inputs, weight = (normal(4, 6), relations_of(name, 4, 6, seed=1), normal(9, 6)), normal(4, 9)
    near = MODELS[name].near  # of all pairs, without products of matrices
    plain = lambda head, relation, tail: near(MODELS[name].query(head, relation)[:, None], tail[None])
    written = lambda *x: score(MODELS[name], *x)
    found, wanted = (jax.grad(lambda *x, f=f: jnp.sum(f(*x) * weight), (0, 1, 2))(*inputs) for f in (written, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="even width"):
        score(COMPLEX, normal(4, 5), normal(4, 5), normal(9, 5))
    with pytest.raises(ValueError, match="n3=-1"):
        make_loss(COMPLEX, -1)


# ---- loss


def loss_inputs(name="complex", groups=2):
    """Inputs with a missing example at the end; in every group, one negative is an example's tail."""
    batches = TripleBatches(both_directions(GRAPH.train, 3)[:11], 60, batch_size=12, negatives=5, groups=groups)
    batch = batches.batch(0)
    batch.ids["negative"][:, 2] = batch.ids["tail"][:: 12 // groups]
    rows = np.concatenate([normal(60, 8), np.zeros((1, 8), np.float32)])  # id -1 reads zero
    return {"relation": relations_of(name, 6, 8, seed=1)}, {key: rows[ids] for key, ids in batch.ids.items()}, batch


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_that_of_a_loop_over_examples(name):
    params, vectors, batch = loss_inputs(name)
    found = make_loss(MODELS[name], 0.01)(params, vectors, batch)
    for i in range(11):
        h, t, r = vectors["head"][i], vectors["tail"][i], params["relation"][int(batch.dense[i, 0])]
        others = zip(batch.ids["negative"][i // 6], vectors["negative"][i // 6], strict=True)
        scores = [naive_score(name, h, r, t)] + [
            naive_score(name, h, r, x) for n, x in others if n != batch.ids["tail"][i]
        ]
        wanted = (
            np.log(np.sum(np.exp(scores)))
            - scores[0]
            + 0.01 * sum(naive_cube(name, x) for x in ((h, t) if name == "rotate" else (h, r, t)))
        )
        assert found[i] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_right_and_finite_where_ids_are_missing(name):
    params, vectors, batch = loss_inputs(name)
    total = jax.jit(lambda p, v: jnp.sum(make_loss(MODELS[name], 0.01)(p, v, batch) * batch.weight))
    gradients = jax.grad(total, (0, 1))(params, vectors)
    assert all(np.isfinite(leaf).all() and np.any(leaf) for leaf in jax.tree.leaves(gradients))
    assert not gradients[1]["head"][11].any() and not gradients[1]["tail"][11].any()
    length = optax.tree.norm(gradients)
    ahead, behind = (
        total(*jax.tree.map(lambda x, g, s=s: x + s * g / length, (params, vectors), gradients)) for s in (1e-2, -1e-2)
    )
    np.testing.assert_allclose((ahead - behind) / 2e-2, length, rtol=1e-2)  # along the gradient


def test_a_loss_with_no_negative_left_is_zero():
    params, vectors, batch = loss_inputs(groups=12)
    batch.ids["negative"][:] = batch.ids["tail"][:, None]
    assert np.abs(make_loss(COMPLEX)(params, vectors, batch)).max() < 1e-5


# ---- ranks


def brute_force_rank(scores, tail, known):
    others = [s for e, s in enumerate(scores) if e not in known and e != tail]
    return 1 + sum(s > scores[tail] for s in others) + sum(s == scores[tail] for s in others) / 2


def small_integers(*shape, seed):
    """Vectors whose scores are exact, and often equal."""
    return np.random.default_rng(seed).integers(-1, 2, shape).astype(np.float32)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("chunk", "block"), [(7, 100), (64, 60), (1000, 25), (7, 1)])
def test_filtered_ranks_are_those_of_brute_force_with_ties(name, chunk, block):
    entities, relations = small_integers(60, 4, seed=0), relations_of(name, 6, 4, make=small_integers, seed=1)
    relations = 0 * relations if name == "rotate" else relations  # of other phases, scores are not exact
    queries = both_directions(GRAPH.test, 3)
    found = filtered_ranks(MODELS[name], entities, relations, queries, KnownTails.of(GRAPH).pairs, chunk, block)
    facts = {tuple(fact) for fact in both_directions(np.concatenate(GRAPH[:3]), 3).tolist()}
    ties = 0
    for (h, r, t), rank in zip(queries.tolist(), found, strict=True):
        scores = [naive_score(name, entities[h], relations[r], entity) for entity in entities]
        wanted = brute_force_rank(scores, t, {e for e in range(60) if (h, r, e) in facts})
        assert rank == wanted
        ties += wanted % 1 > 0
    assert ties > 3


@pytest.mark.parametrize("name", MODELS)
def test_entities_with_one_vector_are_ties_in_blocks_too(name):
    make = lambda *shape, seed: np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    relations, once = relations_of(name, 6, 8, make=make, seed=1), make(30, 8, seed=0)
    ranks = lambda block: filtered_ranks(
        MODELS[name], np.concatenate([once, once]), relations, both_directions(GRAPH.test, 3),
        KnownTails.of(GRAPH).pairs, 16, block,
    )  # fmt: skip
    for block in (16, 59, 60):
        assert (ranks(block) == ranks(1000)).all()
    assert (ranks(16) % 1 > 0).any()


def test_unknown_queries_equal_scores_and_broken_scores_gain_nothing():
    zeros, nothing = np.zeros((9, 4), np.float32), lambda head, relation: (np.zeros(0, np.int32),) * 2
    queries = np.array([[0, 1, 2], [8, 0, 8]])
    assert filtered_ranks(COMPLEX, zeros, zeros, queries, nothing).tolist() == [5, 5]
    assert filtered_ranks(COMPLEX, zeros * np.nan, zeros, queries, nothing).tolist() == [9, 9]
    assert filtered_ranks(COMPLEX, zeros, zeros, np.zeros((0, 3)), nothing).shape == (0,)
    with pytest.raises(ValueError, match="no ranks"):
        ranking_metrics(np.zeros(0))
    for query, message in [([0, 1, 9], "entities from 0 to 9, and there are 9"), ([0, 9, 2], "relations from 9 to 9")]:
        with pytest.raises(ValueError, match=f"queries have {message}"):
            filtered_ranks(COMPLEX, zeros, zeros, np.array([query]), nothing)


def test_known_tails_are_those_of_a_dictionary():
    known, facts = KnownTails.of(GRAPH), {}
    for h, r, t in np.concatenate(GRAPH[:3]).tolist():
        facts.setdefault((h, r), set()).add(t)
        facts.setdefault((t, r + 3), set()).add(h)
    head, relation = (a.reshape(-1).astype(np.int32) for a in np.mgrid[:60, :6])
    query, tail = known.pairs(head, relation)
    found = {
        (int(h), int(r)): set(tail[query == i].tolist()) for i, (h, r) in enumerate(zip(head, relation, strict=True))
    }
    assert {key: tails for key, tails in found.items() if tails} == facts
    assert len(tail) == sum(map(len, facts.values())) == len(known.tails)


def test_relations_that_are_not_there_are_told():
    with pytest.raises(ValueError, match="relations up to 2, and relations=2"):
        KnownTails.of(GRAPH._replace(relations=2))
    activations, batch = loss_inputs()[1:]
    loss = make_loss(COMPLEX)
    some = lambda relations: loss({"relation": normal(relations, 8)}, activations, batch)
    assert np.isfinite(some(3)).all() and np.isnan(some(1)).any()


def test_the_tails_of_a_graph_of_freebases_size_are_known():
    nodes, relations = 86_054_151, 14_824
    moved = [part + np.array([nodes - 60, relations - 3, nodes - 60], np.int32) for part in GRAPH[:3]]
    known = KnownTails.of(Triples(*moved, nodes, relations))
    query, tail = known.pairs(moved[2][:, 0], moved[2][:, 1])
    assert all(t in tail[query == i] for i, (_, _, t) in enumerate(moved[2].tolist()))


# ---- files


def write(directory, packed=True, **changed):
    for split, rows in zip(("train", "valid", "test"), GRAPH[:3], strict=True):
        lines = [str(len(rows))] + [f"{h} {t} {r}" for h, r, t in rows.tolist()]
        text = changed.get(split, "\n".join(lines) + "\n").encode()
        (directory / f"{split}2id.txt{'.gz' * packed}").write_bytes(gzip.compress(text) if packed else text)


@pytest.mark.parametrize("packed", [True, False])
def test_files_come_back_as_they_were_written(tmp_path, packed):
    write(tmp_path, packed)
    found = load_triples(tmp_path)
    for part, wanted in zip(found[:3], GRAPH[:3], strict=True):
        assert part.dtype == np.int32
        np.testing.assert_array_equal(part, wanted)
    assert (found.entities, found.relations) == (60, 3)
    assert not len(found.names[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: '' is not the number of triples"),
        ("0\n", "line 1: '0' is not the number of triples"),
        ("3\n0 1 2\n1 2 0\n", "line 1: '3' is not the number of triples, one on each of the 2 lines"),
        ("2\n0 1 2\n1 2\n", "line 3: '1 2' is not"),
        ("2\n0 1 2\n1 \u00b2 0\n", "line 3: '1 . 0' is not"),
        ("2\n0 1 2\n1 -2 0\n", "line 3: '1 -2 0' is not"),
        ("2\n0 1 2\n1 99999999999999999999999 0\n", "line 3: '1 9+ 0' is not"),
    ],
)
def test_a_bad_file_is_refused_by_name_and_line(tmp_path, text, message):
    write(tmp_path, packed=False, valid=text)
    with pytest.raises(ValueError, match=f"valid2id.txt, {message}"):
        load_triples(tmp_path)


def test_ids_that_would_make_rows_for_nothing_are_refused(tmp_path):
    write(tmp_path, packed=False, valid="1\n0 99999999 0\n")
    with pytest.raises(ValueError, match=r"[0-9]+ triples have ids up to 99999999"):
        load_triples(tmp_path)


def test_a_missing_or_torn_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_triples(tmp_path / "edges.tsv")
    with pytest.raises(ValueError, match=r"holds neither OpenKE's train2id.txt.*, but nothing"):
        load_triples(tmp_path)
    write(tmp_path)
    (tmp_path / "train2id.txt.gz").rename(tmp_path / "other")
    with pytest.raises(ValueError, match="but other, test2id.txt.gz, valid2id.txt.gz"):
        load_triples(tmp_path)
    (tmp_path / "other").rename(tmp_path / "train2id.txt.gz")
    (tmp_path / "test2id.txt.gz").write_bytes((tmp_path / "test2id.txt.gz").read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"test2id.txt.gz cannot be read"):
        load_triples(tmp_path)


@pytest.mark.parametrize("counted", [True, False])
def test_names_of_ids_are_read(tmp_path, counted):
    write(tmp_path)
    for kind, number in (("entity", 61), ("relation", 3)):  # one of them is in no triple
        lines = ["61"] * counted + [f"the {kind} {i}\t{i}" for i in reversed(range(number))]
        (tmp_path / f"{kind}2id.txt").write_text("\n".join(lines) + "\n")
    found = load_triples(tmp_path)
    assert (found.entities, found.relations, found.names[0][7]) == (61, 3, "the entity 7")
    (tmp_path / "relation2id.txt").write_text("of\t0\nin\t2\nat\t2\n")
    with pytest.raises(ValueError, match="relation2id.txt does not name the ids from 0 to at least 2, each once"):
        load_triples(tmp_path)


def named():
    """The graph with names whose order is not that of the ids."""
    entity, relation = (np.array([f"{letter}{(7 * i) % 60}" for i in range(60)]) for letter in "er")
    return [np.stack([entity[p[:, 0]], relation[p[:, 1]], entity[p[:, 2]]], axis=1) for p in GRAPH[:3]]


def name_triples(triples):
    entity, relation = triples.names
    return [np.stack([entity[p[:, 0]], relation[p[:, 1]], entity[p[:, 2]]], axis=1) for p in triples[:3]]


def write_table(path, rows):
    if path.suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table(dict(zip("abc", rows.T.tolist(), strict=True))), path)
    else:
        text = "".join("\t".join(row) + "\n" for row in rows.tolist()).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


@pytest.mark.parametrize("ending", ["tsv", "txt.gz", "parquet"])
def test_tables_of_names_come_back_with_their_names(tmp_path, ending):
    for split, rows in zip(("train", "valid", "test"), named(), strict=True):
        write_table(tmp_path / f"{split}.{ending}", rows)
    found = load_triples(tmp_path)
    for part, wanted in zip(name_triples(found), named(), strict=True):
        np.testing.assert_array_equal(part, wanted)
    ids = np.unique(np.concatenate(found[:3])[:, [0, 2]])
    assert ids.tolist() == list(range(found.entities)) and found.relations == 3


def test_what_is_held_out_is_told_by_nothing_in_training_and_its_ends_are_trained(tmp_path):
    rng = np.random.default_rng(0)
    ends = np.unique(rng.integers(0, 60, (400, 2)), axis=0)
    both = np.array([[f"n{a}", "of", f"n{b}"] for a, b in np.concatenate([ends, ends[:, ::-1]]).tolist()])
    leaves = np.array([[f"n{i}", f"r{i}", f"leaf{i}"] for i in range(60)])
    write_table(tmp_path / "edges.tsv", np.concatenate([both, leaves]))
    found = load_triples(tmp_path / "edges.tsv")
    train, *rest = (set(map(tuple, part.tolist())) for part in found[:3])
    total = len(train) + sum(map(len, rest))
    assert not {(t, r, h) for part in rest for h, r, t in part if h != t} & train
    assert total == 60 + len(np.unique(both, axis=0))
    assert all(abs(len(part) - total // 20) < 2 for part in rest)
    assert len({e for h, _, t in train for e in (h, t)}) == found.entities
    assert len({r for _, r, _ in train}) == found.relations == 61
    write_table(tmp_path / "star.tsv", np.where(leaves == leaves[:, 1:2], "of", leaves))
    with pytest.raises(ValueError, match="60 distinct triples, too few to split"):
        load_triples(tmp_path / "star.tsv")


def test_one_table_is_split_by_its_seed(tmp_path):
    rows = np.concatenate(named())
    write_table(tmp_path / "edges.tsv", rows)
    found, again, other = (load_triples(tmp_path / "edges.tsv", seed) for seed in (1, 1, 2))
    assert [len(part) for part in found[1:3]] == [len(rows) // 20] * 2
    write_table(tmp_path / "twice.tsv", np.concatenate([rows, rows[::-1]]))
    twice = load_triples(tmp_path / "twice.tsv", 1)
    jax.tree.map(np.testing.assert_array_equal, twice, found)
    order = lambda rows: sorted(map(tuple, rows.tolist()))
    assert order(np.concatenate(name_triples(found))) == order(rows)
    assert (found.test == again.test).all() and (found.test != other.test).any()
    write_table(tmp_path / "few.tsv", rows[:19])
    with pytest.raises(ValueError, match="too few to split"):
        load_triples(tmp_path / "few.tsv")


def test_a_bad_table_is_refused_by_name_and_line(tmp_path):
    long = "x" * 1001
    for text, message in [
        ("", "is empty"),
        ("Head\trelation\tTail\na\tb\tc\n", "line 1, names the columns"),
        ("h\tr\tt\na\tb\tc\n", "line 1, names the columns"),
        ("a\tb\tc\na b c\n", "line 2: 'a b c' is not head, relation and tail"),
        ("a\tb\tc\na\t \tc\n", r"line 2: .* is not head, relation and tail"),
        (f"a\t{long}\tc\n", "has a name of 1001 characters"),
    ]:
        (tmp_path / "edges.tsv").write_text(text)
        with pytest.raises(ValueError, match=rf"edges.tsv,? {message}"):
            load_triples(tmp_path / "edges.tsv")


def test_a_first_line_of_names_of_its_own_is_told(tmp_path):
    for split, rows in zip(("train", "valid", "test"), named(), strict=True):
        write_table(tmp_path / f"{split}.tsv", np.concatenate([[["node1", "kind", "node2"]], rows]))
    with pytest.warns(UserWarning, match="the first triple, node1 kind node2, has names of its own"):
        assert load_triples(tmp_path).relations == 4


def test_columns_are_taken_by_their_names(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows, path = np.concatenate(named()), tmp_path / "edges.PARQ"
    columns = dict(zip(("head", "relation", "tail"), rows.T.tolist(), strict=True))
    write_table(tmp_path / "edges.tsv", rows)
    wanted = load_triples(tmp_path / "edges.tsv")
    spaced = {"id": list(range(len(rows))), "Tail": columns["tail"], "head": [f" {name}" for name in columns["head"]]}
    parquet.write_table(pyarrow.table(spaced | {"rel": columns["relation"]}), path)
    jax.tree.map(np.testing.assert_array_equal, load_triples(path), wanted)
    three = {"from": columns["head"], "to": columns["tail"], "kind": columns["relation"]}
    parquet.write_table(pyarrow.table(three), path)
    jax.tree.map(np.testing.assert_array_equal, load_triples(path), wanted)
    for wrong, message in [
        (columns | {"source": columns["head"]}, "has the columns head, relation, tail, source"),
        (columns | {"head": ["", *columns["head"][1:]]}, "has an empty name"),
    ]:
        parquet.write_table(pyarrow.table(wrong), path)
        with pytest.raises(ValueError, match=f"edges.PARQ {message}"):
            load_triples(path)


def test_names_are_read_without_a_mark_at_the_beginning_and_spaces_around(tmp_path):
    plain, other = tmp_path / "plain.tsv", tmp_path / "other.tsv"
    write_table(plain, np.concatenate(named()))
    text = plain.read_text().replace("\t", " \t ").replace("\n", "\r\n")
    other.write_bytes(("\ufeff" + text).encode())
    jax.tree.map(np.testing.assert_array_equal, load_triples(plain), load_triples(other))


def test_columns_of_numbers_keep_them_all_apart(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    large = [2**60 + i for i in range(40)]
    columns = {"h": pyarrow.array(large, pyarrow.uint64()), "r": ["of"] * 40, "t": pyarrow.array(large[1:] + large[:1])}
    parquet.write_table(pyarrow.table(columns), tmp_path / "edges.parquet")
    found = load_triples(tmp_path / "edges.parquet")
    assert found.entities == 40 and set(found.names[0]) == {str(i) for i in large}
    parquet.write_table(pyarrow.table(columns | {"t": np.arange(40.0)}), tmp_path / "edges.parquet")
    with pytest.raises(ValueError, match="edges.parquet has 3 columns, t of them floats"):
        load_triples(tmp_path / "edges.parquet")


# ---- batches


def test_batches_depend_on_their_index_alone():
    make = lambda **changed: TripleBatches(GRAPH.train, 60, **({"batch_size": 32, "negatives": 7, "seed": 3} | changed))
    first, last = list(make().stream(0, 40)), make().batches_per_epoch
    for seed in range(9):
        make(seed=seed).batch(0)  # evicts cached epoch orders
    for index in (39, last, last - 1, 0):
        jax.tree.map(np.testing.assert_array_equal, make().batch(index), first[index])
    others = [make(seed=4).batch(0), make().batch(1), make().batch(last)]
    assert all((other.ids[name] != first[0].ids[name]).any() for other in others for name in ("head", "negative"))


def test_an_epoch_holds_every_triple_once_and_pads_its_end():
    batches = TripleBatches(GRAPH.train, 60, batch_size=32, negatives=7, groups=4)
    n, per_epoch = len(GRAPH.train), batches.batches_per_epoch
    assert n % 32 and per_epoch == n // 32 + 1
    for epoch in range(2):
        found = []
        for batch in batches.stream(epoch * per_epoch, (epoch + 1) * per_epoch):
            assert batch.ids["negative"].shape == (4, 7) and batch.ids["negative"].dtype == np.int32
            real = batch.weight > 0
            assert (batch.ids["head"][~real] == -1).all() and (batch.ids["tail"][~real] == -1).all()
            found.append(np.stack([batch.ids["head"], relation_of(batch), batch.ids["tail"]], axis=1)[real])
        np.testing.assert_array_equal(np.unique(np.concatenate(found), axis=0), np.unique(GRAPH.train, axis=0))
        assert sum(map(len, found)) == n
    assert set(np.concatenate([b.ids["negative"] for b in batches.stream(0, 20)]).reshape(-1)) == set(range(60))


def test_negatives_by_degree_are_drawn_as_often_as_they_are_tails():
    heads, tails = np.arange(60), np.where(np.arange(60) < 45, 7, 8)
    star = np.stack([heads, 0 * heads, tails], axis=1).astype(np.int32)
    batches = TripleBatches(star, 60, batch_size=32, negatives=10, groups=2, by_degree=0.4)
    drawn = np.concatenate([batch.ids["negative"] for batch in batches.stream(0, 200)])  # [400, 10]
    popular, uniform = drawn[:, :4], drawn[:, 4:]
    assert set(popular.reshape(-1)) == {7, 8} and abs(np.mean(popular == 7) - 0.75) < 0.05
    assert len(set(uniform.reshape(-1))) == 60
    for share, message in ((1.5, "must be a share"), (0.04, "of 10 negatives is none")):
        with pytest.raises(ValueError, match=f"by_degree={share} {message}"):
            TripleBatches(star, 60, 32, 10, by_degree=share)
    with pytest.raises(ValueError, match="run from 0 to 59, and entities=59"):
        TripleBatches(star, 59, 32, 10)


@pytest.mark.parametrize("changed", [{"batch_size": 0}, {"negatives": 0}, {"groups": 5}, {"triples": GRAPH.train[:0]}])
def test_sizes_that_make_no_batch_are_refused(changed):
    with pytest.raises(ValueError, match="groups that divide the batch"):
        TripleBatches(**({"triples": GRAPH.train, "entities": 60, "batch_size": 32, "negatives": 7} | changed))


def test_degrees_of_a_power_law_have_its_exponent():
    graph = generate_power_law(1000, 5, 400_000, exponent=0.7)
    assert [len(part) for part in graph[:3]] == [398_000, 1000, 1000] and graph.relations == 5
    degree = np.bincount(graph.train[:, [0, 2]].reshape(-1), minlength=1000)
    rank = np.arange(1, 1001)
    slope = np.polyfit(np.log(rank[5:]), np.log(degree[5:]), 1)[0]
    assert abs(slope + 0.7) < 0.02 and set(graph.train[:, 1]) == set(range(5))
    with pytest.raises(ValueError, match="exponent=1"):
        generate_power_law(9, 9, 90, exponent=1)


def test_a_generated_graph_is_split_distinct_and_follows_its_clusters():
    whole = np.concatenate(GRAPH[:3])
    assert len(np.unique(whole, axis=0)) == len(whole) and whole[:, [0, 2]].max() < 60
    links = np.unique(np.stack([whole[:, 0] % 6, whole[:, 1], whole[:, 2] % 6], axis=1), axis=0)
    assert len(links) == 6 * 3  # one target for each cluster and relation
    with pytest.raises(ValueError, match="clusters=9"):
        generate_triples(entities=8, clusters=9)


# ---- training


def trained(model: Model, steps, devices=1, groups=1):
    spec = EmbeddingSpec({"entity": Table(60, 16, 0.1)}, {k: Lookup("entity") for k in ("head", "tail", "negative")})
    mesh = make_mesh(devices=jax.devices()[:devices])
    task = Task(spec, make_loss(model, 0.01), optax.sgd(10.0), adagrad(0.1), mesh)
    state = task.init({"relation": 0.1 * normal(6, 16)}, "host")
    batches = TripleBatches(both_directions(GRAPH.train, 3), 60, batch_size=128, negatives=24, groups=groups)
    state = Serial(task, state).train(batches.stream(0, steps))
    nothing = np.zeros((0, 1), np.int32)
    plans = plan(spec, {"head": np.arange(60, dtype=np.int32), "tail": nothing, "negative": nothing})
    entities = activations(spec, {name: rows.value for name, rows in state.tables.read(plans).items()}, plans)["head"]
    return np.asarray(entities), np.asarray(state.dense.params["relation"][0])


def test_training_means_the_same_on_any_number_of_devices_that_divides_the_groups():
    steps = -(-2 * len(GRAPH.train) // 128)
    assert 2 * len(GRAPH.train) % 128  # the last batch is padded
    wanted, found = trained(COMPLEX, steps, groups=2), trained(COMPLEX, steps, devices=2, groups=2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, wanted)
    start = trained(COMPLEX, 0)  # negative control
    moved = [float(np.abs(a - b).max()) for a, b in zip(start, wanted, strict=True)]
    assert min(moved) > 0.1, moved


@pytest.mark.parametrize(("name", "times"), [("complex", 3), ("distmult", 1.5)])
def test_a_small_graph_is_learned(name, times):
    queries, known = both_directions(GRAPH.test, 3), KnownTails.of(GRAPH).pairs
    before, after = (
        ranking_metrics(filtered_ranks(MODELS[name], *trained(MODELS[name], steps), queries, known))["mrr"]
        for steps in (0, 200)
    )
    assert after > times * before


# ---- the experiments


def test_a_run_does_not_go_on_over_another_graph(tmp_path):
    config = GraphFlags(path=tmp_path)
    run = types.SimpleNamespace(directory=tmp_path, kept={}, resumed=False)
    run.read_json, run.write_json = lambda name: run.kept, lambda name, content: run.kept.update(content)
    names = tuple(np.array([f"{kind}{i}" for i in range(n)]) for kind, n in (("e", 60), ("r", 3)))
    check_same_graph(run, config, GRAPH._replace(names=names))
    run.resumed = True
    check_same_graph(run, config, GRAPH._replace(names=names))
    names[0][59] = "f59"
    for other in (GRAPH._replace(names=names), GRAPH, GRAPH._replace(train=GRAPH.train[::-1])):
        with pytest.raises(ValueError, match="was begun with another graph"):
            check_same_graph(run, config, other)
    run.kept = {}  # of an earlier version
    check_same_graph(run, config, GRAPH)
    run.kept = {}
    (tmp_path / "edges.tsv").touch()
    with pytest.raises(ValueError, match="was begun by an earlier version"):
        check_same_graph(run, GraphFlags(path=tmp_path / "edges.tsv"), GRAPH)


def test_a_graph_network_has_no_penalty_unless_it_is_given():
    encoded = GraphFlags(encoder="graph_sage")
    flags = (GraphFlags(), encoded, dataclasses.replace(encoded, n3=0.1))
    assert [settled(each).n3 for each in flags] == [0.05, 0.0, 0.1]


@pytest.mark.slow
def test_the_comparison_trains_in_every_mode_and_goes_on(tmp_path):
    flags = "--epochs", 4, "--encoder", "graph_sage", "--model", "distmult", "--n3", 0
    flags += "--windows", 2, 6, "--factors", 1, 0.1
    found = smoke(tmp_path, "oac_link_prediction", *flags, "--seeds", 2)
    ways = ("sync", "async_window_2", "async_window_6", "oac")
    names = [f"{way}{rate}" for way in ways for rate in ("", "_factor_0.1")]
    for name in names:
        assert {f"{key}_{name}" for key in ("test_mrr", "test_hits_at_10", "train_seconds")} <= found.keys()
    with pytest.raises(AssertionError, match="--factors has 1"):
        smoke(tmp_path / "no", "oac_link_prediction", "--factors", 0.5)
    assert found["train_loss_sync_factor_0.1"] > found["train_loss_sync"]  # it learns more slowly
    best = max(("sync", "sync_factor_0.1"), key=lambda name: found[f"valid_mrr_{name}"])
    assert found["best_test_mrr_sync"] == found[f"test_mrr_{best}"] and found["best_test_mrr_change_oac"] == 0
    assert 0 < found["oac_over_sync_low"] <= found["oac_over_sync"] <= found["oac_over_sync_high"]
    assert (
        found["oac_equals_sync"] and found["test_mrr_oac"] == found["test_mrr_sync"] != found["test_mrr_async_window_2"]
    )
    rows = logged(tmp_path)
    epochs = [(row["seed"], row["mode"], row["epoch"]) for row in rows if "epoch" in row]
    assert epochs == [(seed, name, epoch) for seed in (0, 1) for name in names for epoch in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[:12]))  # an arm is torn
    again = smoke(tmp_path, "oac_link_prediction", *flags, "--seeds", 2, "--resume")
    count = lambda rows: sorted((row["seed"], row["mode"], row.get("epoch", 0)) for row in rows)
    assert again["oac_equals_sync"] and count(logged(tmp_path)) == count(rows)
    same = [
        key for key in found if key.startswith("test_") and key.endswith(("_sync", "_oac"))
    ]  # async does not repeat
    assert {key: again[key] for key in same} == {key: found[key] for key in same}


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--tables", "pinned", "--pipeline", "oac"), ("--pipeline", "oac", "--window", 4)])
def test_vectors_are_trained_ranked_and_exported_and_a_stopped_run_goes_on_bit_for_bit(tmp_path, flags):
    write_table(tmp_path / "edges.tsv", np.concatenate(named()))
    common = "--path", tmp_path / "edges.tsv", "--epochs", 6, "--encoder", "graph_sage", "--fanout", 3, *flags
    found = smoke(tmp_path / "whole", "link_prediction", *common)
    vectors = dict(np.load(tmp_path / "whole" / "vectors.npz"))
    assert vectors["entity"].shape == (60, 64) and vectors["relation"].shape == vectors["reciprocal"].shape == (3, 64)
    assert set(vectors["entity_name"]) == {f"e{i}" for i in range(60)} and found["test_mrr"] > 0.15
    other = tmp_path / "stopped"
    stop_after_a_line(("link_prediction", "--preset", "smoke", *common, "--workdir", other), other / "metrics.jsonl")
    assert not (other / "results.json").exists()
    again = smoke(other, "link_prediction", *common, "--resume")
    assert {key: value for key, value in again.items() if "per_s" not in key} == {
        key: value for key, value in found.items() if "per_s" not in key
    }
    jax.tree.map(np.testing.assert_array_equal, dict(np.load(other / "vectors.npz")), vectors)


def stop_after_a_line(command, file):
    """Start an experiment and send it SIGTERM once it has logged a line."""
    name, *flags = command
    with subprocess.Popen([sys.executable, EXPERIMENTS / f"{name}.py", *map(str, flags)]) as process:
        while not (file.exists() and file.read_bytes().count(b"\n")):
            assert process.poll() is None
            time.sleep(0.01)
        process.terminate()
        assert process.wait() == 128 + signal.SIGTERM
