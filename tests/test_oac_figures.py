"""A pipeline's own figures: bytes, memory, stale rows, and what a ring could save; nothing grows with a run."""

import functools
import gc
import itertools
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oac_equivalence import same
from oac_link import oracle_rows, window_rows
from oac_task import (
    SPEC,
    make_batches,
    make_state,
    pipeline_with,
    plain_loop,
    task_of,
    train,
)  # fmt: skip
from strategies import chosen, examples
from threads import until

import jaxrec
from jaxrec.embedding import EmbeddingSpec, Lookup, Table, capacity_of
from jaxrec.oac import Pipeline, ring
from jaxrec.oac.options import nbytes
from jaxrec.types import Batch, Rows

WAYS = {
    "sync": {"mode": "sync"},
    "semisync": {"mode": "semisync"},
    "async": {"mode": "async", "window": 3},
    "oac": {"window": 3},
}


class Seen:
    """Transfers that count the bytes passed to them."""

    def __init__(self):
        self.lock, self.bytes = threading.Lock(), {"sent": 0, "fetched": 0}

    def add(self, direction, tree):
        with self.lock:
            self.bytes[direction] += nbytes(tree)

    def send(self, tree, placement):
        self.add("sent", tree)
        return jax.device_put(tree, placement)

    def fetch(self, tree):
        self.add("fetched", tree)
        return jax.tree.map(np.asarray, tree)


def bytes_of_run(batches, **options):
    seen = Seen()
    pipeline, found = train(batches, late=False, send=seen.send, fetch=seen.fetch, loaders=3, fetchers=2, **options)
    return seen.bytes, pipeline.counters, found


@pytest.mark.parametrize("way", WAYS)
def test_bytes_are_those_handed_to_send_and_fetch(way):
    """Inputs and rows: everything in both directions."""
    batches, options = make_batches(20), WAYS[way]
    seen, counters, _ = bytes_of_run(batches, **options)
    assert counters["bytes_sent"] == seen["sent"] and counters["bytes_fetched"] == seen["fetched"]


@settings(max_examples=examples(6, 20))
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.integers(1, 5))
def test_bytes_of_the_ring_are_those_that_its_docs_name(shards, window, unique, rows_per_shard, width):
    """4 W S U (E + K) + 8 S V, here with one slot."""
    rows = Rows(np.zeros((shards, unique, width), np.float32), {"sum": np.zeros((shards, unique, 1), np.float32)})
    expected = 4 * window * shards * unique * (width + 1) + 8 * shards * rows_per_shard
    assert nbytes(ring.init({"s": rows}, {"s": rows_per_shard}, window)) == expected


@settings(max_examples=examples(6, 20))
@given(seed=st.integers(0, 2**31), width=st.sampled_from([1, 7, 24]), shards=st.sampled_from([1, 3]))
def test_rows_of_the_ring_replace_those_gathered(seed, width, shards):
    """Compared with numpy."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    rows_of = lambda *shape: Rows(draw(*shape, 2), {"sum": draw(*shape, 1)})
    gathered = {name: rows_of(shards, width) for name in "ab"}
    held = {name: rows_of(shards, 2, width) for name in "ab"}
    source = {name: rng.integers(-1, 2 * width, (shards, width)).astype(np.int32) for name in "ab"}
    found = ring.replay(ring.Ring(held, {}, {}), gathered, source)
    for name, place in source.items():
        for rows, mine, there in zip(*(jax.tree.leaves(each[name]) for each in (found, gathered, held)), strict=True):
            patched = np.stack([of.reshape(2 * width, -1)[at] for of, at in zip(there, place, strict=True)])
            np.testing.assert_array_equal(rows, np.where(place[..., None] < 0, mine, patched))


def counted_rows(batches, watermarks, window, spec=SPEC):
    """(stale, patched) rows counted by sets: last written at or after the watermark, or within the window."""
    writer: dict = {}
    stale = patched = 0
    for number, batch in enumerate(batches):
        rows = {(name, row) for name, p in jaxrec.plan(spec, batch.ids).items() for row in rows_of(p)}
        last = [writer.get(row, -1) for row in rows]
        stale += sum(w >= watermarks[number] for w in last)
        patched += sum(w >= max(0, number - window) for w in last)
        writer |= dict.fromkeys(rows, number)
    return stale, patched


def rows_of(p):
    return [int(row) for unique, count in zip(p.unique, p.count, strict=True) for row in unique[:count]]


def one_by_one(pipeline, batches):
    """Yields each batch once all before it are written: nothing is stale, although the ring holds rows."""
    flight = pipeline.flight  # this run's, as the first batch has been requested
    for number, batch in enumerate(batches):
        until(lambda n=number: flight.written - flight.first >= n)
        yield batch


def test_stale_rows_are_those_that_were_stale_and_patched_rows_those_of_the_ring():
    batches, window = make_batches(16), 3
    late, (_, losses) = train(batches, window=window)
    stale, patched = counted_rows(batches, [max(0, n - window) for n in range(16)], window)
    assert stale == patched > 16  # write-backs are as late as admission allows
    assert late.counters["stale_rows"] == late.counters["patched_rows"] == stale
    metrics = []
    with Pipeline(task_of(SPEC), make_state(), window=window) as pipeline:
        metrics = [m for _, m in pipeline.run(one_by_one(pipeline, batches))]
    assert all(np.array_equal(m["loss"], loss) for m, loss in zip(metrics, losses, strict=True))
    assert pipeline.counters["stale_rows"] == 0
    assert pipeline.counters["patched_rows"] == patched
    for name in ("stale_rows", "patched_rows"):
        assert sum(int(m[name]) for m in metrics) == pipeline.counters[name]


def is_container(thing):
    return isinstance(thing, (dict, list, set, tuple)) or type(thing).__module__ in ("collections", "_collections")


def reachable(root):
    """{id: object} of all objects reachable from `root` through containers and jaxrec's objects."""
    seen, todo = {}, [root]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, (type, types.ModuleType, types.FunctionType)):
            continue
        seen[id(thing)] = thing
        if is_container(thing):
            todo += [*thing.keys(), *thing.values()] if isinstance(thing, dict) else list(thing)
        elif any(kind.__module__.startswith("jaxrec") for kind in type(thing).__mro__):
            todo += list(getattr(thing, "__dict__", {}).values())
    return seen


def things_in(pipeline):
    """Total number of items in all containers reachable from a pipeline."""
    return sum(len(thing) for thing in reachable(pipeline).values() if is_container(thing))


def steady_batches(kinds=8):
    """An endless cycle of `kinds` batches."""
    return itertools.cycle([jax.tree.map(np.copy, batch) for batch in make_batches(kinds + 1)[:-1]])


def are(what, flight, first, end):
    """Whether all batches from `first` to `end` are "loaded" or "fetched", and not written yet."""
    return all(getattr(flight.items.get(number), what, False) for number in range(first, end))


def growth(number, **options):
    """Growth of (memory blocks, items in containers, live arrays) between batches n/2 and n of a run."""
    found = []

    def look(info):
        if info.step in (number // 2, number):
            pipeline.drain()
            # Planned as far ahead as possible, so that the same number is in flight both times.
            flight, depth = pipeline.flight, pipeline.window + 1
            full = lambda: (
                flight.planned == flight.committed + depth + 2
                and are("loaded", flight, flight.committed, flight.committed + depth)
            )
            until(full)
            gc.collect()
            found.append((sys.getallocatedblocks(), things_in(pipeline), len(jax.live_arrays())))

    with Pipeline(task_of(SPEC), make_state(), [look], window=4, **options) as pipeline:
        pipeline.train(itertools.islice(steady_batches(), number + 20))
    return tuple(b - a for a, b in zip(*found, strict=True))


@pytest.mark.realtime  # it counts memory blocks of the whole process
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"mode": "async"}, marks=pytest.mark.slow),
    ],
)
def test_nothing_grows_with_a_run(options):
    """Even a set of batch numbers would grow by an item and a block per batch."""
    blocks, things, arrays = growth(1_000, **options)
    assert blocks < 400 and things < 200 and arrays < 100, (blocks, things, arrays)


@pytest.mark.slow
@pytest.mark.realtime
def test_nothing_grows_with_a_long_run():
    blocks, things, arrays = growth(8_000)
    assert blocks < 1_000 and things < 100 and arrays < 100, (blocks, things, arrays)


@pytest.mark.realtime  # it counts threads and arrays of the whole process
def test_nothing_grows_with_the_number_of_runs():
    found = []
    with Pipeline(task_of(SPEC), make_state(), window=4) as pipeline:
        for run in range(51):
            for _ in pipeline.run(itertools.islice(steady_batches(), 8)):
                pass
            if run in (10, 50):
                gc.collect()
                found.append((things_in(pipeline), len(jax.live_arrays()), threading.active_count()))
    assert found[0] == found[1]


SHAPES = {  # rows of the table, ids per example, examples, width
    "wide": (20_000, 1, 4096, 64),
    "many ids": (40_000, 24, 512, 8),
    "many features": (5_000, 2, 1024, 4),
}


def shaped(shape):
    """A spec with one stack, and batches with distinct ids; the last shape has many dense features."""
    rows, hots, size, width = SHAPES[shape]
    spec = EmbeddingSpec({"t": Table(rows, width)}, {"t": Lookup(("t",) * hots)}, shards=4)
    rng = np.random.default_rng(0)
    ids = lambda: np.stack([rng.permutation(rows)[:size] for _ in range(hots)], axis=1).astype(np.int32)
    features = 200 if shape == "many features" else 3
    rest = np.zeros(size, np.float32), np.zeros((size, features), np.float32)
    return spec, [Batch({"t": ids()}, *rest) for _ in range(18)]


def held_on_the_host(pipeline):
    """Bytes of a pipeline's numpy arrays without its tables: batches in flight."""
    tables = reachable(pipeline.tables.shards)
    mine = [thing for key, thing in reachable(pipeline).items() if key not in tables]
    return sum(thing.nbytes for thing in mine if isinstance(thing, (np.ndarray, np.generic)))


class Live:
    """Bytes of device buffers created after this object, even if earlier ones are freed meanwhile.

    Buffers, not arrays: inside `jax.device_put` up to four arrays share one buffer for an instant.
    """

    def __init__(self):
        gc.collect()
        self.earlier = jax.live_arrays()  # kept alive, so that later arrays have other ids
        self.ids, self.lock = {id(array) for array in self.earlier}, threading.Lock()

    def bytes(self):
        with self.lock:  # `live_arrays` keeps all arrays alive meanwhile
            later = (array for array in jax.live_arrays() if id(array) not in self.ids)
            return sum(dict(filter(None, map(buffer_of, later))).values())


def buffer_of(array):
    """(address, bytes) of an array's buffer; None if it has been donated."""
    try:
        return array.unsafe_buffer_pointer(), array.nbytes
    except RuntimeError as error:
        if "deleted" not in str(error):
            raise


class Measured:
    """Memory of a run whose device is slow at step `slow_at`, and whose snapshot holds writes at `cut_at`.

    Attributes:
      most: live device bytes after every transfer and update. filled: the same when the pipeline is full.
      host: bytes of numpy arrays while writes are held. capacity: U of each stack.
    """

    def __init__(self, spec, batches, cut_at=5, slow_at=3, **options):
        self.cut_at, self.slow_at, self.inputs = cut_at, slow_at, 0
        self.live, self.most, self.filled, self.host, self.capacity = Live(), [], [], [], {}
        state = make_state(spec, features=batches[0].dense.shape[1])
        self.dense = sum(leaf.nbytes for leaf in jax.tree.leaves(state.dense))
        kind = pipeline_with(lambda update: functools.partial(self.update, update))
        keep = lambda info: self.capacity.update(capacity_of(info.plans))
        with kind(task_of(spec), state, [keep], send=self.send, fetch=self.fetch, **options) as self.pipeline:
            self.pipeline.snapshot_at(cut_at, self.save)
            self.pipeline.train(batches)

    def send(self, tree, placement):
        found = jax.device_put(tree, placement)
        self.most.append(self.live.bytes())  # the formula bounds it at any time
        self.inputs += isinstance(tree, tuple)
        return found

    def fetch(self, tree):
        found = jax.tree.map(np.asarray, tree)
        self.most.append(self.live.bytes())
        return found

    def save(self, state):
        flight = self.pipeline.flight
        end = flight.first + self.cut_at + self.pipeline.window + 1  # committed while writes are held
        until(lambda: (
            flight.committed == end and flight.planned == end + self.pipeline.window + 3
            and are("fetched", flight, end - self.pipeline.window - 1, end)
        ))  # fmt: skip
        self.host.append(held_on_the_host(self.pipeline))

    def update(self, update, *args):
        flight = self.pipeline.flight
        slow = flight.committed == flight.first + self.slow_at
        if slow:  # commits only once the pipeline is full and all threads wait
            end = flight.committed + self.pipeline.window + 1
            until(lambda: (
                flight.planned == end + 2 and flight.written == flight.committed
                and flight.first + self.inputs == end + 2
                and are("loaded", flight, flight.committed, end)
            ))  # fmt: skip
        found = update(*args)
        self.most.append(self.live.bytes())
        self.filled += self.most[-1:] * slow
        return found


PAIRS = [(way, shape) for way in ("sync", "semisync", "async", "oac") for shape in SHAPES]


def memory_bytes(way, window, rows, row_floats, input_bytes, table_rows, ahead=2):
    """Return {place: peak bytes} of a full pipeline with two loaders, as docs/oac.md has it for oac.

    On the device, the rows of each batch in flight, and three copies of those in work (two where nothing is repaired),
    with the inputs; on a CPU fetched rows are views of those. In oac also the ring. On the host,
    rows in transfer, twice where the gathered rows are kept, and what is planned.
    """
    in_flight, repairs = window + 1, way == "oac"
    device = (in_flight + 1 + repairs + repairs * window) * row_floats
    host = in_flight * row_floats * (2 if way in ("semisync", "async") else 1)
    return {
        "device": 4 * rows * device + (in_flight + ahead) * input_bytes + 8 * table_rows * repairs,
        "host": 4 * rows * host + (2 * in_flight + ahead) * input_bytes,
    }


@pytest.mark.parametrize(("way", "shape"), chosen(PAIRS, lambda way, shape: shape == "wide" or way == "oac"))
def test_memory_is_what_the_docs_say(way, shape):
    """Device buffers when the device is slow and the pipeline is full; host arrays when a snapshot holds writes."""
    options, (spec, batches) = WAYS[way], shaped(shape)
    window = {"sync": 0, "semisync": 1}.get(way, 3)
    found = Measured(spec, batches, **options)
    plans = jaxrec.plan(spec, batches[0].ids, found.capacity)
    (p,) = plans.values()
    size = nbytes((plans, batches[0]))
    expected = memory_bytes(way, window, p.unique.size, 2 * SHAPES[shape][3], size, SHAPES[shape][0])
    assert 0.9 < (found.filled[0] - 2 * found.dense) / expected["device"] < 1.1, (found.filled, expected)
    assert (max(found.most) - 2 * found.dense) / expected["device"] < 1.05, (max(found.most), expected)
    assert 0.99 < found.host[0] / expected["host"] < 1.01, (found.host, expected)


def test_the_ring_is_made_where_it_stays():
    """Not on one device and then split: only the dense state's copy goes from one device to another."""
    mesh = jaxrec.make_mesh(devices=jax.devices()[:4])
    batches, state = make_batches(8), make_state(SPEC, mesh)
    with Pipeline(task_of(SPEC, mesh), state, window=3) as pipeline:
        with jax.transfer_guard_device_to_device("disallow_explicit"):
            losses = [np.asarray(m["loss"]) for _, m in pipeline.run(batches)]
    assert same((pipeline.state, losses), plain_loop(batches, SPEC, mesh))


# ---- upper bounds of what can be saved by the ids alone, compared with plain searches

batches_of_rows = st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=9)


def as_arrays(batches):
    return [np.array(sorted(rows)) for rows in batches]


def sent(batches, keep):
    """Rows sent to a cache that holds `keep(number, held)` after each batch."""
    held, total = set(), 0
    for number, rows in enumerate(batches):
        total += len(rows - held)
        held = keep(number, held | rows)
    return total


@given(batches=batches_of_rows, window=st.integers(1, 5))
def test_rows_of_a_window_are_those_of_a_cache_of_what_it_wrote(batches, window):
    recent = lambda number, held: held & set().union(*batches[max(0, number - window + 1) : number + 1])
    assert window_rows(as_arrays(batches), window) == sent(batches, recent)


def best(batches, capacity):
    """The fewest rows sent by any choice of rows to keep, by exhaustive search."""
    reached = {frozenset(): 0}
    for rows in batches:
        following: dict = {}
        for held, total in reached.items():
            there = held | rows
            for size in range(min(capacity, len(there)) + 1):
                for kept in map(frozenset, itertools.combinations(sorted(there), size)):
                    now = total + len(rows - held)
                    following[kept] = min(following.get(kept, 10**9), now)
        reached = following
    return min(reached.values())


@settings(max_examples=40)
@given(batches=st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=5))
@pytest.mark.parametrize("capacity", [0, 1, 2, 3])
def test_no_choice_of_what_to_keep_sends_fewer_rows_than_the_oracle(batches, capacity):
    assert oracle_rows(as_arrays(batches), capacity) == best([frozenset(rows) for rows in batches], capacity)


@given(batches=batches_of_rows, window=st.integers(1, 5))
def test_the_oracle_is_not_behind_a_ring_of_as_many_rows(batches, window):
    capacity = window * max(map(len, batches))
    assert oracle_rows(as_arrays(batches), capacity) <= window_rows(as_arrays(batches), window)
    assert oracle_rows(as_arrays(batches), 10) == len(set().union(*batches))
