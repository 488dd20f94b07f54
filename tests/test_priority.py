"""One harness over all schemes and homes: picks keep the budget, hold only changed rows and forget none unsaved."""

import functools
import threading

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import examples

from jaxrec.cpr import counters, row_set
from jaxrec.cpr.priority import budget_rows, mfu, random_rows, round_robin, scar, ssu
from jaxrec.embedding import EmbeddingSpec, Lookup, Table, host_plan
from jaxrec.sharding import SPLIT, make_mesh, put_on_mesh
from jaxrec.types import Plan

SCHEMES = {
    "mfu": mfu(),
    "ssu": ssu(every=1),
    "ssu_every_2": ssu(),
    "scar": scar(),
    "round_robin": round_robin(),
    "random": random_rows(seed=3),
}
HOMES = ["host", "device", "device4", "jitted"]
SHARDS, ROWS, WIDTH, IDS = 4, 150, 2, 12
SPEC = EmbeddingSpec({"t": Table(ROWS, WIDTH)}, {"t": Lookup("t")}, shards=SHARDS)
STACK = f"width_{WIDTH}"
IN_SHARD = SPEC.stacks[STACK].rows_per_shard


def plan_of(ids):
    return host_plan(SPEC, {"t": np.asarray(ids, np.int32)}, {STACK: IDS})[STACK]


def random_ids(seed):
    """A few rows often, others seldom, and one missing id."""
    ids = (np.random.default_rng(seed).random(IDS) ** 3 * ROWS).astype(np.int32)
    ids[0] = -1
    return ids


def place(value, home):
    """Copy rows f32[S, V / S, E] to a home."""
    if home == "host":
        return [shard.copy() for shard in value]
    devices = jax.devices()[: 4 if home == "device4" else 1]
    return put_on_mesh(value.copy(), make_mesh(devices=devices), SPLIT)


@functools.cache
def toucher(scheme):
    return jax.jit(scheme.touch, donate_argnums=0)


class World:
    """A tracker and the reference of what it must know."""

    def __init__(self, scheme, home, budget):
        self.scheme, self.home, self.budget = scheme, home, budget
        self.value = np.zeros((SHARDS, IN_SHARD, WIDTH), np.float32)
        self.saved_value, self.count = self.value.copy(), np.zeros((SHARDS, IN_SHARD), int)
        self.tracker = scheme.init(place(self.value, home), budget)
        self.touch_tracker = toucher(scheme) if home == "jitted" else scheme.touch
        self.picks = []
        # Whether more rows than a list holds were touched since all were saved, so that it may have forgotten some.
        self.overflowed = np.zeros(SHARDS, bool)

    def touch(self, ids):
        plan = plan_of(ids)
        self.tracker = self.touch_tracker(self.tracker, plan if self.home == "host" else jax.device_put(plan))
        for row in ids[ids >= 0] if self.scheme.name == "mfu" else np.unique(ids[ids >= 0]):
            self.count[row % SHARDS, row // SHARDS] += 1
        for row in np.unique(ids[ids >= 0]):
            self.value[row % SHARDS, row // SHARDS] += 1 + row % 3
        self.overflowed |= (self.count > 0).sum(axis=1) > self.budget

    def weight(self):
        """The priority of each row; 0 where there is nothing to save."""
        if self.scheme.name == "scar":
            return np.linalg.norm(self.value - self.saved_value, axis=-1)
        return self.count

    def pick(self):
        rows_of, self.tracker = self.scheme.pick(self.tracker, self.budget, place(self.value, self.home))
        weight = self.weight()
        for shard, rows in enumerate(rows_of):
            assert rows.dtype == np.int32 and len(rows) <= self.budget
            assert (np.diff(rows) > 0).all() and (rows % SHARDS == shard).all()
            local = rows // SHARDS
            assert (weight[shard, local] > 0).all(), "unchanged since it was saved"
            if self.scheme.name != "ssu" or (self.scheme.recipe == (ssu, (1,)) and not self.overflowed[shard]):
                assert len(rows) == min(self.budget, (weight[shard] > 0).sum())
            if self.scheme.name in ("mfu", "scar") and len(rows):
                assert weight[shard, local].min() >= np.delete(weight[shard], local).max(initial=0)
        self.picks.append(rows_of)
        return rows_of

    def copy(self, rows_of):
        pick, self.tracker = self.scheme.copied(self.tracker, rows_of, place(self.value, self.home))
        for shard, rows in enumerate(pick.rows):
            if self.scheme.name == "mfu":
                assert (pick.seen[shard] == self.count[shard, rows // SHARDS]).all()
        return pick, self.count.copy(), self.value.copy()

    def commit(self, copied):
        pick, count, value = copied
        self.tracker = self.scheme.saved(self.tracker, pick)
        for shard, rows in enumerate(pick.rows):
            local = rows // SHARDS
            self.count[shard, local] -= count[shard, local]
            self.saved_value[shard, local] = value[shard, local]
        self.overflowed &= (self.count > 0).any(axis=1)

    def restore(self, shard):
        self.count[shard], self.value[shard], self.overflowed[shard] = 0, self.saved_value[shard], False
        self.tracker = self.scheme.restored(self.tracker, shard, place(self.value, self.home))


def live(scheme, home, budget, operations):
    """Run (operation, number) pairs through a world."""
    world = World(scheme, home, budget)
    for what, number in operations:
        if what == "touch":
            world.touch(random_ids(number))
        elif what == "restore":
            world.restore(number % SHARDS)
        else:
            picked = world.pick()
            for _ in range(number % 3 if scheme.by_tracker else 0):  # picked ahead of the save
                world.touch(random_ids(number + 1))
            copied = world.copy(picked)
            for _ in range(number // 3 % 2):  # before it is committed
                world.touch(random_ids(number + 2))
            if what == "save":
                world.commit(copied)
    return world


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["touch", "touch", "touch", "save", "save", "fail", "restore"]), st.integers(0, 99)),
    max_size=25,
)
BUSY = [("touch", seed) if seed % 4 else ("save", seed) for seed in range(1, 60)]


@pytest.mark.parametrize("name", SCHEMES)
@settings(max_examples=examples(25, 50))
@given(operations=OPERATIONS, budget=st.sampled_from([1, 3, 8, 17, IN_SHARD]))
def test_laws_of_every_scheme(name, operations, budget):
    live(SCHEMES[name], "host", budget, operations)


@pytest.mark.parametrize("home", HOMES[1:])
@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "random"])
@settings(max_examples=3)
@given(operations=OPERATIONS)
def test_devices_pick_what_the_host_picks(name, home, operations):
    operations = [*operations, *BUSY[:8]]
    host, device = (live(SCHEMES[name], h, 9, operations) for h in ("host", home))
    for a, b in zip(host.picks, device.picks, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.asarray(b)), host.tracker[0], device.tracker[0])


def _forgets_between(scheme):
    def saved(tracker, pick):
        for shard, rows in enumerate(pick.rows):
            tracker.count[shard, rows // SHARDS] = 0
        return tracker

    return scheme._replace(saved=saved)


def _picks_untouched(scheme):
    rows = lambda budget: [np.arange(budget, dtype=np.int32) * SHARDS + shard for shard in range(SHARDS)]
    return scheme._replace(pick=lambda tracker, budget, value: (rows(budget), tracker))


def _saves_at_once(scheme):
    def copied(tracker, rows, value):
        pick, tracker = scheme.copied(tracker, rows, value)
        return pick, scheme.saved(tracker, pick)

    return scheme._replace(copied=copied)


def _lists_half(scheme):
    return scheme._replace(init=lambda value, budget: scheme.init(value, max(1, budget // 2)))


BROKEN = {
    "resets to zero": _forgets_between(mfu()),
    "exceeds its budget": mfu()._replace(pick=lambda t, budget, value: mfu().pick(t, budget + 1, value)),
    "saves rows that are unchanged": _picks_untouched(mfu()),
    "never resets": mfu()._replace(saved=lambda tracker, pick: tracker),
    "never drops what was saved": ssu(1)._replace(saved=lambda tracker, pick: tracker),
    "does not know what was saved": scar()._replace(saved=lambda tracker, pick: tracker),
    "forgets rows of a list with room": _lists_half(ssu(1)),
    "forgets rows of a failed save": _saves_at_once(ssu(1)),
    "drops the list": ssu(1)._replace(restored=lambda tracker, shard, value: tracker),
    "picks the frequent ones": mfu()._replace(name="scar"),
    "counts batches": mfu()._replace(touch=round_robin().touch),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_scheme_is_found(what):
    """Negative control of the harness."""
    restore = [("restore", shard) for shard in range(SHARDS)] + [("save", 3)]
    with pytest.raises(AssertionError):
        live(BROKEN[what], "host", 9, [("touch", 1), ("fail", 0), ("save", 0), *BUSY, *restore])


def test_ssu_picks_again_what_was_touched_after_the_copy_and_rows_of_a_failed_save():
    """Random ones of them, if there are more than its list has entries, here 3 per shard."""
    world = World(ssu(1), "host", 3)
    pick = lambda: set(np.concatenate(world.pick()).tolist())
    world.touch(np.array([1, 2, 5, 9] * 3))
    world.copy(world.pick())  # its save fails
    world.touch(np.array([1, 13] * 6))
    world.touch(np.array([1, 17] * 6))
    unsaved = {1, 2, 5, 9, 13, 17}  # all but 2 of shard 1
    drawn = []
    for batch in range(30):
        world.tracker = world.scheme.recall(world.tracker, {"batch": batch})
        drawn.append(pick())
    assert all(2 in rows and len(rows) == 4 for rows in drawn) and set.union(*drawn) == unsaved
    copied = world.copy(world.pick())
    world.touch(np.array([2, 2, 10] * 4))
    world.commit(copied)
    assert pick() == {2, 10} | (unsaved - set(np.concatenate(copied[0].rows).tolist()))


def held_by(rows, shard=0):
    return rows.entry[shard, : rows.size[shard, 0]].tolist()


@pytest.mark.parametrize("size", [8, 50])
def test_a_full_list_gives_up_random_rows_whatever_their_numbers(size):
    """Each of k new rows replaces one of C: an old row stays with the chance (1 - 1 / C)^k, a new one with its mean."""
    listed, new, draws = np.arange(0, 3 * size, 3), np.arange(1, 3 * size, 3)[: size // 2], 2000
    stayed = np.zeros(3 * size)
    plan = lambda rows: Plan(rows[None].astype(np.int32), {}, np.array([len(rows)], np.int32), 0)
    for batch in range(draws):
        rows = row_set.insert(row_set.empty([np.zeros((3 * size, 1))], size), plan(listed), batch)
        held = held_by(row_set.insert(rows, plan(new), batch))
        assert len(held) == len(set(held)) == size
        stayed[held] += 1 / draws
    chance = (1 - 1 / size) ** np.arange(len(new) + 1)
    error = 5 * (0.25 / draws) ** 0.5  # five standard deviations at most
    np.testing.assert_allclose(stayed[listed], chance[-1], atol=error)
    np.testing.assert_allclose(stayed[new], chance[:-1].mean(), atol=error)


def test_round_robin_takes_turns():
    world = World(round_robin(), "host", 3)
    for seed in range(40):
        world.touch(random_ids(seed))
    touched, seen = np.flatnonzero(world.count.T.reshape(-1)), []
    for _ in range(-(-world.count.astype(bool).sum(axis=1).max() // 3)):  # one round
        picked = world.pick()
        seen += np.concatenate(picked).tolist()
        world.commit(world.copy(picked))
        world.touch(np.zeros(IDS, int))  # row 0 always changes, but is picked once per round
    assert set(seen) == set(touched) and len(set(seen) - {0}) == len([row for row in seen if row])


def coverage(make, seed):
    """Share of all accesses that go to the rows of the first pick."""
    world = World(make(seed), "host", 8)
    for batch in range(60):
        world.touch(random_ids(100 * seed + batch))
    rows = np.concatenate(world.pick())
    return world.count[rows % SHARDS, rows // SHARDS].sum() / world.count.sum()


def test_frequent_rows_are_covered_best_by_counting_then_by_listing():
    makers = {"mfu": lambda seed: mfu(), "ssu": lambda seed: ssu(1), "random": random_rows}
    found = {name: np.mean([coverage(make, seed) for seed in range(10)]) for name, make in makers.items()}
    assert found["mfu"] > found["ssu"] + 0.05 and found["ssu"] > found["random"] + 0.05, found


def test_memory_is_that_of_the_paper():
    """4 bytes per row for MFU, r x 4 for SSU: 6.25 % and 0.78 % of the rows at E = 16 and r = 0.125.

    Beside its list SSU has two bits per row, another 0.39 %, and the size of the list.
    """
    value = [np.zeros((8000, 16), np.float32) for _ in range(SHARDS)]
    budget, rows = budget_rows(8000, 0.125), SHARDS * 8000
    size = lambda scheme: sum(array.nbytes for array in jax.tree.leaves(scheme.init(value, budget)[0]))
    assert size(mfu()) == 4 * rows == 0.0625 * 64 * rows
    assert ssu().init(value, budget).rows.entry.nbytes == 0.125 * 4 * rows
    assert size(ssu()) == (0.125 * 4 + 2 / 8) * rows + 4 * SHARDS
    assert size(scar()) == 64 * rows


def test_arguments_out_of_range_are_refused():
    for fraction in (0, -1, 1.01):
        with pytest.raises(ValueError, match=f"fraction={fraction} must"):
            budget_rows(10, fraction)
    with pytest.raises(ValueError, match="every=0"):
        ssu(every=0)


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 12), st.booleans())
def test_the_largest_are_picked_never_more_and_never_zeros(weight, budget, real):
    weight = np.array(weight, np.int32)
    rows = counters.largest(weight.astype(np.float32) / 7 if real else weight, budget)
    assert len(rows) == min(budget, (weight > 0).sum()) and (np.diff(rows) > 0).all()
    assert sorted(weight[rows]) == sorted(weight)[len(weight) - len(rows) :]


def test_changes_whose_squares_leave_float32_are_in_order():
    new = np.array([[1e25, 0], [1e30, 0], [3e-25, 0], [0, 0]], np.float32)
    ((huge, larger, tiny, none),) = counters.changes([new], [np.zeros_like(new)])
    assert np.inf > larger > huge > tiny > none == 0


def test_a_pick_beside_touches_loses_no_access():
    """Concurrent touches are either seen by a copy or still counted in the tracker."""
    world, done = World(SCHEMES["mfu"], "host", 9), threading.Event()

    def touch():
        for seed in range(2000):
            world.tracker = world.scheme.touch(world.tracker, plans[seed % 50])
        done.set()

    plans = [plan_of(random_ids(seed)) for seed in range(50)]
    thread = threading.Thread(target=touch)
    thread.start()
    copies = []
    while not done.is_set() or not copies:
        rows, _ = world.scheme.pick(world.tracker, 9, None)
        copies.append(world.scheme.copied(world.tracker, rows, None)[0])
    thread.join()
    world.tracker = world.scheme.saved(world.tracker, copies[-1])
    assert (world.tracker.count >= 0).all()
    assert all(len(rows) <= 9 for pick in copies for rows in pick.rows)
    total = sum((np.bincount(plan.inverse["t"], minlength=4 * IDS + 1)[:-1]).sum() for plan in plans) * 40
    assert world.tracker.count.sum() + sum(seen.sum() for seen in copies[-1].seen) == total
