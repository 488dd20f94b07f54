"""Rows of a user's own pytree: saved over a base, restored alone; survivors keep their bits."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jaxrec.checkpoint import DamagedImage, deltas
from jaxrec.checkpoint.trees import restore_rows, rows_on, save_rows, save_tree

V = 24
ITEM = "['emb']['item']"


def mesh_of(devices):
    return jax.make_mesh((devices,), ("rows",), devices=jax.devices()[:devices])


def tree_of(seed, home="numpy"):
    rng = np.random.default_rng(seed)
    tree = {
        "emb": {"item": rng.standard_normal((V, 3)).astype(np.float32), "user": rng.integers(0, 9, (8, 2), np.int32)},
        "half": rng.standard_normal(5).astype(jnp.bfloat16),
        "scale": np.array(seed, np.float32),
    }
    if home == "numpy":
        return tree
    sharded, everywhere = (NamedSharding(mesh_of(4), spec) for spec in (PartitionSpec("rows"), PartitionSpec()))
    place = lambda leaf: jax.device_put(leaf, sharded if leaf.shape == (V, 3) else everywhere)
    return jax.tree.map(place, tree)


def equal(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y), strict=True), a, b)


@settings(max_examples=4)
@given(seed=st.integers(0, 10**6), home=st.sampled_from(["numpy", "sharded"]))
def test_a_row_has_its_newest_value_and_what_was_not_asked_for_keeps_its_bits(tmp_path_factory, seed, home):
    rng, directory = np.random.default_rng(seed), tmp_path_factory.mktemp("trees")
    tip = save_tree(directory, tree_of(seed, home), 1)
    wanted = jax.tree.map(np.array, tree_of(seed))
    for step in range(2, 2 + int(rng.integers(0, 4))):
        now, rows = tree_of(seed + step, home), rng.integers(0, V, int(rng.integers(0, 9)))
        tip = save_rows(directory, tip, {ITEM: rows, "['scale']": None}, now, step)
        wanted["emb"]["item"][rows] = np.asarray(now["emb"]["item"])[rows]
        wanted["scale"] = np.asarray(now["scale"])
    live = tree_of(seed + 99, home)
    before = jax.tree.map(np.array, live)
    equal(restore_rows(tip, live), wanted)
    lost = rng.integers(0, V, 5)
    found = restore_rows(tip, live, {ITEM: lost})
    before["emb"]["item"][lost] = wanted["emb"]["item"][lost]
    equal(found, before)
    assert jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), found) == jax.tree.map(
        lambda leaf: getattr(leaf, "sharding", None), live
    )


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_a_tree_with_an_empty_leaf_is_saved_and_restored(tmp_path, shape):
    with_empty = lambda seed: tree_of(seed) | {"empty": np.zeros(shape, np.float32)}
    base = save_tree(tmp_path, with_empty(0), 1)
    equal(restore_rows(base, with_empty(1)), with_empty(0))
    delta = save_rows(tmp_path, base, {"['empty']": np.arange(shape[0]), "['scale']": None}, with_empty(2))
    delta = save_rows(tmp_path, delta, {"['empty']": None}, with_empty(3))
    equal(restore_rows(delta, with_empty(1)), with_empty(0) | {"scale": with_empty(2)["scale"]})
    equal(restore_rows(delta, with_empty(1), {"['empty']": np.arange(shape[0])}), with_empty(1))
    with pytest.raises(ValueError, match="other leaves"):
        restore_rows(delta, tree_of(0) | {"empty": np.zeros((0, 7), np.float32)})


def test_a_lost_device_of_a_sharded_tree_comes_back_alone(tmp_path):
    tree = tree_of(0, "sharded")
    base, later = save_tree(tmp_path, tree, 1), tree_of(1, "sharded")
    lost = rows_on(tree["emb"]["item"], jax.devices()[2:3])
    assert lost.tolist() == list(range(12, 18))
    found = restore_rows(base, later, {ITEM: lost})["emb"]["item"]
    wanted = np.array(later["emb"]["item"])
    wanted[lost] = np.asarray(tree["emb"]["item"])[lost]
    equal(found, wanted)
    where = lambda leaf: [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]
    same = [a == b for a, b in zip(where(found), where(later["emb"]["item"]), strict=True)]
    assert same == [True, True, False, True]  # surviving shards are not copied


def test_rows_that_another_device_holds_too_are_not_lost():
    mesh = jax.make_mesh((2, 2), ("copies", "rows"), devices=jax.devices()[:4])
    leaf = jax.device_put(np.zeros((8, 3)), NamedSharding(mesh, PartitionSpec("rows")))
    assert rows_on(leaf, jax.devices()[:1]).tolist() == []
    assert rows_on(leaf, [mesh.devices[0, 1], mesh.devices[1, 1]]).tolist() == [4, 5, 6, 7]
    columns = jax.device_put(np.zeros((8, 4)), NamedSharding(mesh, PartitionSpec(None, "rows")))
    assert len(rows_on(columns, mesh.devices[:, 0])) == 8  # a part of each row is lost


def test_a_damaged_or_foreign_image_is_refused_and_nothing_changes(tmp_path):
    tree = tree_of(0)
    base = save_tree(tmp_path / "a", tree, 1)
    delta = save_rows(tmp_path / "a", base, {ITEM: np.arange(3)}, tree)
    other = save_tree(tmp_path / "b", tree_of(1), 1)
    file = next(path for path in base.rglob("*") if path.is_file() and path.stat().st_size == V * 3 * 4)
    data = bytearray(file.read_bytes())
    data[7] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedImage, match="checksum differ"):
        restore_rows(delta, tree)
    os.rename(base, tmp_path / "away")
    with pytest.raises(DamagedImage, match="no readable manifest"):
        save_rows(tmp_path / "a", delta, {ITEM: np.arange(3)}, tree)
    os.rename(other, base)
    with pytest.raises(DamagedImage, match="is not the image that .* was saved over"):
        restore_rows(delta, tree)
    equal(tree, tree_of(0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t | {"more": np.zeros(3)}, r"other leaves: .* wanted .*\['more'\]"),
        (lambda t: t | {"scale": np.zeros(2, np.float32)}, r"\['scale'\]"),
        (lambda t: t | {"half": t["half"].astype(np.float32)}, "bfloat16.* wanted .*float32"),
        (lambda t: {}, "other leaves"),
    ],
)
def test_another_tree_is_refused(tmp_path, change, words):
    base = save_tree(tmp_path, tree_of(0), 1)
    for call in (lambda t: restore_rows(base, t), lambda t: save_rows(tmp_path, base, {}, t)):
        with pytest.raises(ValueError, match=words):
            call(change(tree_of(0)))
    assert not deltas(tmp_path)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({ITEM: [3, V]}, "from 0 to 23: .*24"),
        ({ITEM: [-1]}, "from 0 to 23"),
        ({ITEM: [0.5]}, "must be whole numbers"),
        ({ITEM: [True] * V}, "must be whole numbers"),
    ],
)
def test_rows_that_there_are_not_are_refused(tmp_path, rows, words):
    base = save_tree(tmp_path, tree_of(0), 1)
    for call in (lambda: save_rows(tmp_path, base, rows, tree_of(0)), lambda: restore_rows(base, tree_of(0), rows)):
        with pytest.raises(ValueError, match=words):
            call()
    assert not deltas(tmp_path)


def test_other_mistakes_are_refused(tmp_path):
    base = save_tree(tmp_path, tree_of(0), 1)
    with pytest.raises(ValueError, match="exists already"):
        save_tree(tmp_path, tree_of(0), 1)
    with pytest.raises(ValueError, match="rows are saved beside what they go over"):
        save_rows(tmp_path / "other", base, {}, tree_of(0))
    with pytest.raises(ValueError, match="step=-1"):
        save_tree(tmp_path, tree_of(0), -1)


@pytest.mark.process
def test_a_killed_save_leaves_what_was_there(tmp_path):
    """kill -9 within the write: the base is unchanged, and the next save replaces the partial files."""
    base = save_tree(tmp_path, tree_of(0), 1)
    program = f"""
        import os, numpy as np, jaxrec.checkpoint.format as image
        from jaxrec.checkpoint.trees import save_rows
        from test_trees import ITEM, tree_of
        image.sync = lambda path: os.kill(os.getpid(), 9)
        save_rows({str(tmp_path)!r}, {str(base)!r}, {{ITEM: np.arange(9)}}, tree_of(1))
    """
    here = os.path.dirname(__file__)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(here), here])}
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment, capture_output=True)
    assert killed.returncode == -9, killed.stderr
    assert not deltas(tmp_path) and list(tmp_path.glob("*.partial"))
    delta = save_rows(tmp_path, base, {ITEM: np.arange(9)}, tree_of(1))
    wanted = tree_of(0)
    wanted["emb"]["item"][:9] = tree_of(1)["emb"]["item"][:9]
    equal(restore_rows(delta, tree_of(2)), wanted)
