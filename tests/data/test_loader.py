"""Laws of the loader: a permutation of the rows, the same from any position, threads that end."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrec.data.loader import Loader, prefetch


class Blocks:
    """Rows numbered 0, 1, ... in blocks of given sizes; the number stands in all columns."""

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


def make(kwargs):
    kwargs = dict(kwargs)
    return Loader(Blocks(kwargs.pop("sizes")), kwargs.pop("batch_size"), **kwargs)


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


@given(loaders, st.data())
def test_seek_continues_exactly(kwargs, data):
    whole = list(make(kwargs))
    position = data.draw(st.integers(0, len(whole)))
    loader = make(kwargs)
    loader.seek(position)
    for number, (a, b) in enumerate(zip(whole[position:], loader, strict=True), position + 1):
        assert loader.position() == number
        np.testing.assert_array_equal(a.ids["sparse"], b.ids["sparse"])
        np.testing.assert_array_equal(a.weight, b.weight)


def test_shuffles_differ_by_seed_and_epoch():
    def order(seed, epochs=1):
        return [b.ids["sparse"][0, 0] for b in Loader(Blocks([50] * 4), 1, shuffle_seed=seed, epochs=epochs)]

    assert order(0) == order(0) != order(1)
    assert order(0, 2)[:200] != order(0, 2)[200:]


def test_a_loader_goes_on_where_it_was_left():
    loader = Loader(Blocks([5, 5]), 2)
    first = [b.ids["sparse"][0, 0] for b, _ in zip(loader, range(2), strict=False)]
    assert first == [0, 2]
    assert [b.ids["sparse"][0, 0] for b in loader][-1] == 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Loader(Blocks([3]), 0), "at least 1"),
        (lambda: Loader(Blocks([]), 2), "no rows"),
        (lambda: Loader(Blocks([3]), 2).seek(3), "position=3"),
        (lambda: len(Loader(Blocks([3]), 2, epochs=None)), "no length"),
        (lambda: prefetch([], 0), "depth=0"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name == "prefetch"]


def test_the_exception_of_a_prefetch_reaches_the_caller_in_its_place():
    def items():
        yield 1
        raise OSError("disk on fire")

    iterator = prefetch(items())
    assert next(iterator) == 1
    with pytest.raises(OSError, match="disk on fire"):
        next(iterator)
    assert not prefetch_threads()


def test_closing_a_prefetch_ends_its_thread_and_closes_the_source():
    closed = []

    def endless():
        try:
            while True:
                yield 0
        finally:
            closed.append(threading.current_thread().name)

    iterator = prefetch(prefetch(endless()))
    next(iterator)
    assert len(prefetch_threads()) == 2
    iterator.close()
    assert closed == ["prefetch"] and not prefetch_threads()


def test_a_prefetch_stays_within_its_depth():
    made = []
    asked = threading.Semaphore(0)

    def counted():
        for i in range(50):
            made.append(i)
            asked.release()
            yield i

    iterator = prefetch(counted(), depth=3)
    assert next(iterator) == 0
    for _ in range(5):  # 0 to 3 are made, then one that waits for room
        asked.acquire()
    assert len(made) <= 5
    assert list(iterator) == list(range(1, 50))
