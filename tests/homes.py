"""Homes of rows by their name, and all rows of any of them, for the harnesses that run over several."""

import functools
import shutil

import jax
import numpy as np
import pytest

from jaxrec.embedding import PinnedTables, create_tables, native
from jaxrec.sharding import SPLIT

_THREADS = 37  # as many play on a CPU as one launch has, a number that divides nothing


def needs_compiler():
    """Skip a test where the kernels of pinned rows cannot be compiled for the CPU."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("pinned rows need a C++ compiler")


def tables_in(home, spec, row_optimizer, mesh=None):
    """Create tables in a home: host, device, pinned, or programs (pinned rows that only programs read and put)."""
    if home in ("pinned", "programs"):
        needs_compiler()
        native.load(jax.devices()[0]).jaxrec_play(_THREADS, 5)
    if home == "programs":
        return ByPrograms.create(spec, row_optimizer, mesh)
    return create_tables(home, spec, row_optimizer, mesh)


class ByPrograms(PinnedTables):
    """Pinned tables that are read and put as within a step: by programs, each device its own shards."""

    def read(self, plans):
        return self._mapped(lambda rows, plans: rows.read(plans))(self.traced, _of_rows(plans))

    def put(self, plans, rows):
        put = self._mapped(lambda tables, plans, rows: tables.put(plans, rows))
        return self.with_traced(put(self.traced, _of_rows(plans), rows))

    def _mapped(self, function):
        mesh = jax.tree.leaves(self.traced)[0].sharding.mesh
        mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False)
        return jax.jit(mapped(function))


def _of_rows(plans):
    # What is split over the devices: reads and puts of rows need no positions.
    return {name: plan._replace(inverse={}, invalid=plan.count) for name, plan in plans.items()}


def each_part(tables):
    """Yield ((stack, part), f32[V / S, width]) of every shard of tables that are written in place."""
    for name in tables.spec.stacks:
        for part, shards in tables.parts(name).items():
            for array in shards:
                yield (name, part), array


def dense_table(tables, stack, part="value"):
    """All rows of a stack in order, f32[V, width]."""
    shards = np.stack([np.asarray(rows) for rows in tables.parts(stack)[part]])
    return shards.transpose(1, 0, 2).reshape(-1, shards.shape[-1])


def every_row(tables):
    """{(stack, part): f32[V, width]}, copies on the host."""
    return {(stack, part): dense_table(tables, stack, part) for stack, parts in tables.layout.items() for part in parts}
