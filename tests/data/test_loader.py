"""Properties of the loader: a permutation of the rows, the same from any position."""

import itertools
import threading
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threads import no_automatic_gc as no_automatic_gc  # a fixture

from jaxrec.data.loader import Loader


class Blocks:
    """Rows numbered from 0 in blocks of given sizes; every column holds the row number."""

    def __init__(self, sizes):
        self.rows, self.starts = list(sizes), np.cumsum([0, *sizes])

    def __getitem__(self, index):
        row = np.arange(self.starts[index], self.starts[index + 1])
        return {
            "label": (row % 2).astype(np.uint8),
            "dense": np.repeat(row[:, None], 2, axis=1).astype(np.float32),
            "ids": np.repeat(row[:, None], 3, axis=1).astype(np.int32),
        }


loaders = st.fixed_dictionaries(
    {
        "sizes": st.lists(st.integers(1, 9), min_size=1, max_size=8),
        "batch_size": st.integers(1, 12),
        "shuffle_seed": st.none() | st.integers(0, 3),
        "window_blocks": st.integers(1, 4),
        "epochs": st.integers(1, 3),
    }
)


def make(kwargs, kind=Blocks):
    kwargs = dict(kwargs)
    return Loader(kind(kwargs.pop("sizes")), kwargs.pop("batch_size"), **kwargs)


@given(loaders)
def test_every_epoch_is_a_permutation_of_the_rows(kwargs):
    loader, rows = make(kwargs), sum(kwargs["sizes"])
    batches = list(loader)
    assert len(batches) == len(loader)
    per_epoch = loader.batches_per_epoch
    for epoch in range(kwargs["epochs"]):
        part = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert all(len(b.label) == kwargs["batch_size"] for b in part)
        ids = np.concatenate([b.ids["sparse"][b.weight > 0, 0] for b in part])
        expected = np.arange(rows)
        np.testing.assert_array_equal(ids if kwargs["shuffle_seed"] is None else np.sort(ids), expected)
        for b in part:
            real = b.weight > 0
            np.testing.assert_array_equal(b.dense[real, 0], b.ids["sparse"][real, 0])
            np.testing.assert_array_equal(b.label[real], b.ids["sparse"][real, 0] % 2)
            assert (b.ids["sparse"][~real] == -1).all()
            assert not b.dense[~real].any() and not b.label[~real].any()


class Read(Blocks):
    """Blocks that note which of them were read."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)


@given(loaders, st.data())
def test_batches_in_a_row_read_the_windows_of_their_rows_alone(kwargs, data):
    kwargs = kwargs | {"epochs": 1}
    source = Read(kwargs["sizes"])
    loader = make(kwargs, lambda sizes: source)
    count = len(list(loader))
    order, source.read = source.read, []
    assert sorted(order) == [*range(len(kwargs["sizes"]))]
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first, count - 1))
    loader.seek(first)
    found = list(itertools.islice(loader, last - first + 1))
    width = 1 if kwargs["shuffle_seed"] is None else kwargs["window_blocks"]
    wanted, row = [], 0
    for window in (order[start : start + width] for start in range(0, len(order), width)):
        end = row + sum(kwargs["sizes"][block] for block in window)
        if row < (last + 1) * kwargs["batch_size"] and end > first * kwargs["batch_size"]:
            wanted += window
        row = end
    assert source.read == wanted and len(found) == last - first + 1


class RichBlocks(Blocks):
    """Blocks with several lookups, one of them multi-hot with padding, and weights."""

    def __getitem__(self, index):
        block = super().__getitem__(index)
        row = np.arange(self.starts[index], self.starts[index + 1])
        bag = np.repeat(row[:, None, None], 2, axis=1) + np.zeros((1, 1, 4), np.int32)
        bag[:, 1, 2:] = -1
        ids = {"pair": block["ids"][:, :2], "bag": bag.astype(np.int32), "one": row.astype(np.int64)}
        return {**block, "ids": ids, "weight": (row % 3).astype(np.float64) / 2}


@given(loaders, st.data())
def test_from_any_position_weights_hots_and_several_lookups_stay_with_their_rows(kwargs, data):
    kwargs = dict(kwargs)
    plain, source = make(kwargs), RichBlocks(kwargs.pop("sizes"))
    loader = Loader(source, kwargs.pop("batch_size"), **kwargs)
    whole = list(plain)
    position = data.draw(st.integers(0, len(whole)))
    loader.seek(position)
    for at, (a, b) in enumerate(zip(whole[position:], loader, strict=True), position + 1):
        assert loader.position() == at
        real, number = a.weight > 0, a.ids["sparse"][:, 0]
        np.testing.assert_array_equal(b.weight, np.where(real, number % 3 / 2, 0))
        assert b.weight.dtype == np.float32 and set(b.ids) == {"pair", "bag", "one"}
        np.testing.assert_array_equal(b.ids["pair"], a.ids["sparse"][:, :2])
        np.testing.assert_array_equal(b.ids["one"], number)
        bag = np.repeat(np.repeat(number[:, None, None], 2, axis=1), 4, axis=2)
        bag[:, 1, 2:] = -1
        np.testing.assert_array_equal(b.ids["bag"], bag)
        np.testing.assert_array_equal(b.dense, a.dense)
        np.testing.assert_array_equal(b.label, a.label)


def test_batches_of_the_loader_train_a_model_of_bags():
    """The last batch is padded, and its padding touches nothing."""
    import jaxrec
    from jaxrec.embedding import EmbeddingSpec, Lookup, Table

    spec = EmbeddingSpec(
        {"a": Table(40, 4), "b": Table(40, 4)},
        {"pair": Lookup(("a", "b")), "bag": Lookup(("a", "b"), hots=4), "one": Lookup("a")},
    )
    for batch in Loader(RichBlocks([9, 8, 7]), 10):
        plans = jaxrec.plan(spec, batch.ids)
        assert all(int(plan.invalid) == 0 for plan in plans.values())
    stack = spec.stacks["width_4"]
    used = np.concatenate([plan.unique.ravel() for plan in plans.values()])
    assert set(used[used < stack.rows]) == {*range(20, 24), *range(60, 64)}


class Broken(Blocks):
    """Blocks whose second one differs from the first."""

    def __init__(self, sizes, **columns):
        super().__init__(sizes)
        self.columns = columns

    def __getitem__(self, index):
        block = super().__getitem__(index)
        if index == 1:
            block |= self.columns
        return {key: array for key, array in block.items() if array is not None}


BROKEN = {
    "too few rows": ({"dense": np.zeros((2, 2))}, r"block 1: 'dense' has 2 rows instead of 5"),
    "a weight in one block only": ({"weight": np.ones(5)}, "block 1 has .*'weight'.* block 0"),
    "another lookup": ({"ids": {"x": np.zeros((5, 3), int)}}, "block 1 has .* block 0"),
}


@pytest.mark.parametrize("case", sorted(BROKEN))
@pytest.mark.parametrize("window_blocks", [1, 4])
def test_a_block_that_does_not_fit_is_named(case, window_blocks):
    columns, message = BROKEN[case]
    loader = Loader(Broken([5, 5, 5], **columns), 4, window_blocks=window_blocks)
    with pytest.raises(ValueError, match=message):
        list(loader)


def test_another_loop_goes_on_where_the_last_one_was_left_and_after_seek_the_old_iterator_ends():
    loader = Loader(Blocks([6]), 2)
    first = iter(loader)
    next(first)
    assert iter(loader) is first and [b.ids["sparse"][0, 0] for b in loader] == [2, 4]
    for _ in loader:
        raise AssertionError("one epoch is over")
    loader.seek(0)
    batches = iter(loader)
    next(batches)
    loader.seek(2)
    with pytest.raises(ValueError, match="`seek` was called"):
        next(batches)
    assert [b.ids["sparse"][0, 0] for b in loader] == [4]


def test_a_seek_frees_what_was_read_and_ends_the_old_iterator_for_good(no_automatic_gc):
    loader = Loader(Blocks([6, 6]), 2)
    next(old := iter(loader))
    window = weakref.ref(old.batches)
    loader.seek(2)
    assert window() is None
    for _ in range(3):
        with pytest.raises(ValueError, match="`seek` was called"):
            next(old)
    assert loader.position() == 2


def test_a_loop_after_an_error_of_the_source_reads_the_batch_again():
    class Once(Blocks):
        def __getitem__(self, index):
            if index == 1 and not failed:
                failed.append(index)
                raise OSError("of the disk")
            return super().__getitem__(index)

    failed, found = [], []
    loader = Loader(Once([2] * 3), 2, window_blocks=1)
    with pytest.raises(OSError, match="of the disk"):
        for batch in loader:
            found.append(batch)
    assert len(found) == 1 and [b.ids["sparse"][0, 0] for b in loader] == [2, 4]


def test_an_iterator_that_reads_during_a_seek_moves_no_position():
    """As that of a planner that still waits for a slow disk after a rollback: a batch would be skipped silently."""
    inside, more = threading.Event(), threading.Event()

    class Slow(Blocks):
        def __getitem__(self, index):
            if index == 2 and not inside.is_set():
                inside.set()
                assert more.wait(60)
            return super().__getitem__(index)

    loader = Loader(Slow([2] * 4), 2, window_blocks=1)
    old = iter(loader)
    thread = threading.Thread(target=lambda: [next(old) for _ in range(3)])
    thread.start()
    assert inside.wait(60)
    loader.seek(1)
    new = iter(loader)
    first = next(new)
    more.set()
    thread.join()
    assert loader.position() == 2
    found = [batch.ids["sparse"][0, 0] for batch in (first, *new)]
    assert found == [2, 4, 6] and loader.position() == 4
    with pytest.raises(ValueError, match="`seek` was called"):
        next(old)


def test_shuffles_differ_by_seed_and_epoch():
    def order(seed, epochs=1):
        return [b.ids["sparse"][0, 0] for b in Loader(Blocks([50] * 4), 1, shuffle_seed=seed, epochs=epochs)]

    assert order(0) == order(0) != order(1)
    assert order(0, 2)[:200] != order(0, 2)[200:]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Loader(Blocks([3]), 0), "batch_size=0"),
        (lambda: Loader(Blocks([3]), 2, window_blocks=0), "window_blocks=0"),
        (lambda: Loader(Blocks([3]), 2, epochs=0), "epochs=0"),
        (lambda: Loader(Blocks([3]), 2, shuffle_seed=-1), "shuffle_seed=-1"),
        (lambda: Loader(Blocks([3]), 2).seek(-1), "position=-1"),
        (lambda: Loader(Blocks([]), 2), "no rows"),
        (lambda: Loader(Blocks([3]), 2).seek(3), "position=3"),
        (lambda: len(Loader(Blocks([3]), 2, epochs=None)), "no length"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
