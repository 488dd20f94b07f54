"""Random specs, ids and arrays for tests of several files, a small spec, and the share of cases that the gate runs."""

import os

import numpy as np
import pytest
from hypothesis import strategies as st

from jaxrec.embedding import EmbeddingSpec, Lookup, Table


def examples(gate, more):
    """Number of examples of a property test with expensive examples: `gate` in the gate, `more` in `make test-all`."""
    return more if os.environ.get("HYPOTHESIS_PROFILE") == "random" else gate


def chosen(cases, gate):
    """Pytest parameters of the cases (tuples); a case is in the gate only if `gate(*case)` is true."""
    return [pytest.param(*case, marks=[] if gate(*case) else pytest.mark.more) for case in cases]


TABLES = {"a": Table(30, 4), "b": Table(5, 4), "w": Table(21, 1)}


def small_spec(shards=8, tables=None):
    return EmbeddingSpec(tables or TABLES, {"ab": Lookup(("a", "b")), "w": Lookup("w")}, shards=shards)


@st.composite
def specs(draw, shards=None):
    """Specs with one or two widths, lookups of every form, and rows of either dtype."""
    widths = draw(st.lists(st.sampled_from([1, 3, 4]), min_size=1, max_size=2, unique=True))
    tables, lookups = {}, {}
    for width in widths:
        names = [f"t{width}_{i}" for i in range(draw(st.integers(1, 3)))]
        tables |= {name: Table(draw(st.integers(1, 40)), width) for name in names}
        hots = draw(st.integers(1, 3))
        pooling = draw(st.sampled_from(["sum", "mean"]))
        lookups[f"columns{width}"] = Lookup(tuple(names), hots, pooling)
        lookups[f"single{width}"] = Lookup(names[0], draw(st.integers(1, 2)), pooling)
    shards = shards or draw(st.sampled_from([1, 2, 8]))
    dtype = draw(st.sampled_from(["float32", "float16"]))
    return EmbeddingSpec(tables, lookups, shards=shards, seed=draw(st.integers(0, 5)), dtype=dtype)


def draw_ids(spec, batch_size, seed, missing=0.2):
    """Random ids of all lookups, some missing, many duplicates."""
    rng = np.random.default_rng(seed)
    ids = {}
    for key, lookup in spec.lookups.items():
        _, rows = spec.columns_of(key)
        columns = () if isinstance(lookup.tables, str) else (len(rows),)
        hots = () if lookup.hots == 1 else (lookup.hots,)
        limit = (rows if columns else rows[0]) if not hots else np.reshape(rows, (*columns, 1))
        array = rng.integers(0, np.broadcast_to(limit, (batch_size, *columns, *hots)))
        ids[key] = np.where(rng.random(array.shape) < missing, -1, array).astype(np.int32)
    return ids


def random_like(activation, seed):
    return np.random.default_rng(seed).standard_normal(activation.shape, np.float32).astype(activation.dtype)
