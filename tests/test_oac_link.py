"""Upper bounds of the savings: row counts from ids alone, compared with plain searches."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oac_link import oracle_rows, window_rows

batches_of_rows = st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=9)


def as_arrays(batches):
    return [np.array(sorted(rows)) for rows in batches]


def moved(batches, keep):
    """Rows moved in both directions by a cache that holds `keep(number, held)` after each batch and is emptied last."""
    held, total = set(), 0
    for number, rows in enumerate(batches):
        total += len(rows - held)
        after = keep(number, held | rows)
        total += len((held | rows) - after)
        held = after
    return total + len(held)


@given(batches=batches_of_rows, window=st.integers(1, 5))
def test_rows_of_a_window_are_those_of_a_cache_of_what_it_wrote(batches, window):
    recent = lambda number, held: held & set().union(*batches[max(0, number - window + 1) : number + 1])
    assert window_rows(as_arrays(batches), window) == moved(batches, recent)


def best(batches, capacity):
    """The fewest rows moved by any choice of rows to keep, by exhaustive search."""
    reached = {frozenset(): 0}
    for rows in batches:
        following: dict = {}
        for held, total in reached.items():
            there = held | rows
            for size in range(min(capacity, len(there)) + 1):
                for kept in map(frozenset, itertools.combinations(sorted(there), size)):
                    now = total + len(rows - held) + len(there - kept)
                    following[kept] = min(following.get(kept, 10**9), now)
        reached = following
    return min(total + len(held) for held, total in reached.items())


@settings(max_examples=40)
@given(batches=st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=5))
@pytest.mark.parametrize("capacity", [0, 1, 2, 3])
def test_no_choice_of_what_to_keep_moves_fewer_rows_than_the_oracle(batches, capacity):
    assert oracle_rows(as_arrays(batches), capacity) == best([frozenset(rows) for rows in batches], capacity)


@given(batches=batches_of_rows, window=st.integers(1, 5))
def test_the_oracle_is_not_behind_a_ring_of_as_many_rows(batches, window):
    capacity = window * max(map(len, batches))
    assert oracle_rows(as_arrays(batches), capacity) <= window_rows(as_arrays(batches), window)
    assert oracle_rows(as_arrays(batches), 10) == 2 * len(set().union(*batches))
