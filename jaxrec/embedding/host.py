"""Tables in host memory or in mapped files.

Legend: S shards, V rows of a stack, U padded unique rows per shard, E embedding width, K slot
width.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxrec.bounds import whole_number
from jaxrec.embedding import kernels, mapped
from jaxrec.embedding.spec import EmbeddingSpec, Layout
from jaxrec.embedding.tables import (
    RowIds,
    check_parts,
    check_shard,
    chosen_shards,
    fill_initial,
    parts_on_host,
    used_rows,
)
from jaxrec.files import local_path
from jaxrec.types import Plan, RowOptimizer, Rows

_THREADS = 4  # that copy rows while training waits for a save


@dataclasses.dataclass(frozen=True, eq=False)
class HostTables:
    """Embedding tables and their optimizer slots in host memory: RAM, or one mapped file per shard.

    Reads and writes release the GIL and take no lock. `put` is for one writer in batch order;
    writers that do not take turns use `add`.

    Mapped files know where they stand: each `put` counts itself in them as begun and as done, so
    that after a kill -9 `attach` finds torn tables and refuses them. `add` does not count: its
    writers come from several processes without a lock, no row of theirs belongs to a step, and each
    sum is whole by itself. A power cut is another matter, as pages reach the disk in any order:
    after one, only tables that nobody has changed since `flush` are what they say.

    Attributes:
      spec: the tables.
      layout: what a row consists of.
      shards: {stack: one dict {'value': f32[V / S, E], slot: f32[V / S, K]} per shard}.
      directory: where the files are, or None.
      steps: i64[S, 2], for each shard the puts begun and the puts done.
    """

    spec: EmbeddingSpec
    layout: Layout
    shards: dict[str, list[dict[str, np.ndarray]]]
    directory: Path | None = None
    steps: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 2), np.int64))

    in_place: ClassVar[bool] = True

    def __post_init__(self):
        if not len(self.steps):  # made from arrays
            object.__setattr__(self, "steps", np.zeros((self.spec.shards, 2), np.int64))

    @classmethod
    def create(
        cls, spec: EmbeddingSpec, row_optimizer: RowOptimizer, directory: str | Path | None = None
    ) -> "HostTables":
        """Makes initial tables in RAM, or as files under a directory (best on tmpfs) that others
        can attach.

        Args:
          spec: the tables.
          row_optimizer: decides the slots.
          directory: where to put one file a (stack, shard); must not hold tables yet.

        Raises:
          ValueError: the directory holds tables already, or another process is making some there; a
            URL; not a row optimizer.
          OSError: there is no room, or no right to write; what was begun is removed.
        """
        layout = spec.layout(row_optimizer)
        if directory is None:
            shards, steps = mapped.in_memory(spec, layout)
            return cls(spec, layout, shards, None, steps)._filled()
        directory = local_path(directory)
        with mapped.making(directory, spec, layout) as (shards, steps):
            tables = cls(spec, layout, shards, directory, steps)._filled()
            tables.flush()
        return tables

    def _filled(self):
        for name, stack in self.spec.stacks.items():
            for shard in range(stack.shards):
                self.reset_shard(name, shard)
        return self

    @classmethod
    def attach(
        cls, spec: EmbeddingSpec, row_optimizer: RowOptimizer, directory: str | Path, torn: str = "refuse"
    ) -> "HostTables":
        """Maps the files of tables that this or another process has created.

        Args:
          spec: the tables.
          row_optimizer: that created them.
          directory: where the files are.
          torn: 'refuse' tables that a process was killed in the middle of writing; 'accept' them if
            all rows will be overwritten, within `overwriting`.

        Raises:
          ValueError: no complete tables are there; a file is missing, damaged, cut short or too
            long; they were made for another spec or row optimizer; they are torn.
        """
        if torn not in ("refuse", "accept"):
            raise ValueError(f"torn={torn!r} must be 'refuse' or 'accept'.")
        directory, layout = local_path(directory), spec.layout(row_optimizer)
        shards, steps = mapped.attach(directory, spec, layout, torn)
        return cls(spec, layout, shards, directory, steps)

    @property
    def step(self) -> int | None:
        """How many puts all shards have seen, which is the step of training where each step is one
        put; None if torn.

        >>> from jaxrec.embedding import Lookup, Table, sgd
        >>> spec = EmbeddingSpec({'item': Table(10, 4)}, {'item': Lookup('item')})
        >>> HostTables.create(spec, sgd(0.1)).step
        0
        """
        return int(self.steps[0, 0]) if mapped.is_untorn(self.steps) else None

    @contextlib.contextmanager
    def overwriting(self, shards: Sequence[int] | None = None, step: int | None = None) -> Iterator["HostTables"]:
        """Within it the caller fills whole shards through `shards`; until it is left without an
        error they are torn.

            with tables.overwriting(step=image.step):
                ...  # all rows and slots

        Args:
          shards: which ones will be filled; all if None.
          step: where they will stand; if None, where the furthest of all shards stands, so that one
            lost shard comes back beside the others.

        Raises:
          ValueError: there is no such shard, or a negative step; nothing was marked.
        """
        chosen = chosen_shards(self.spec, shards)
        if step is not None:
            whole_number("step", step, 0)
        self.steps[chosen, 0] = self.steps[chosen, 1] + 1
        yield self
        self.steps[chosen] = self.steps[:, 1].max() if step is None else step

    def read(self, plans: dict[str, Plan]) -> dict[str, Rows]:
        """Gathers the planned rows and slots into fresh arrays; padding reads zero.

        Raises:
          ValueError: the plans were made with another spec.
        """
        return {name: self._read_stack(name, *used_rows(self, name, plan)) for name, plan in plans.items()}

    def _read_stack(self, name, unique, count):
        out = {}
        for part, table in self.shards[name][0].items():
            # Never reuse these buffers: jax may alias them (jax#37830).
            out[part] = np.empty((*unique.shape, table.shape[1]), np.float32)
        for shard, tables in enumerate(self.shards[name]):
            for part, table in tables.items():
                kernels.gather(table, unique[shard], self.spec.shards, count[shard], out[part][shard])
        return Rows(out.pop("value"), out)

    def put(self, plans: dict[str, Plan], rows: dict[str, Rows], shards: Sequence[int] | None = None) -> "HostTables":
        """Stores final rows, in place, of all shards or of some; returns the same tables.

        Raises:
          ValueError: plans or rows do not fit these tables; nothing was written.
        """
        work = [
            (name, *used_rows(self, name, plan), parts_on_host(self, name, plan, rows)) for name, plan in plans.items()
        ]
        for shard in chosen_shards(self.spec, shards):
            self.steps[shard, 0] += 1
            for name, unique, count, values in work:
                for part, table in self.shards[name][shard].items():
                    kernels.scatter(table, unique[shard], self.spec.shards, count[shard], values[part][shard])
            self.steps[shard, 1] += 1
        return self

    def add(
        self,
        plans: dict[str, Plan],
        rows: dict[str, Rows],
        old: dict[str, Rows],
        shards: Sequence[int] | None = None,
    ) -> "HostTables":
        """Adds rows - old to what the tables hold now, in place and without a lock; returns the
        same tables.

        Raises:
          ValueError: plans or rows do not fit these tables; nothing was written.
        """
        work = [
            (
                name,
                *used_rows(self, name, plan),
                parts_on_host(self, name, plan, rows),
                parts_on_host(self, name, plan, old),
            )
            for name, plan in plans.items()
        ]
        for name, unique, count, values, before in work:
            for shard in chosen_shards(self.spec, shards):
                for part, table in self.shards[name][shard].items():
                    kernels.scatter_add(
                        table, unique[shard], self.spec.shards, count[shard],
                        values[part][shard], before[part][shard],
                    )  # fmt: skip
        return self

    def parts(self, stack: str) -> dict[str, list[np.ndarray]]:
        """{part: [V / S, width] of each shard} of a stack: the rows themselves, no copies."""
        shards = self.shards[stack]
        return {part: [mine[part] for mine in shards] for part in self.layout[stack]}

    def on_shards(self, function: Callable[..., Any], *args) -> dict[tuple[str, int], Any]:
        """Runs function(stack, shard, parts, *args) for every shard; parts are the rows."""
        return {
            (name, shard): function(name, shard, parts, *args)
            for name, shards in self.shards.items()
            for shard, parts in enumerate(shards)
        }

    def take(self, rows: RowIds) -> dict[tuple[str, int], dict[str, np.ndarray]]:
        """Copies picked rows, in threads: training waits for the copy, and its cores are free."""
        shards = self.shards
        # Allocated on this thread, to which glibc gives back what it freed (see `keep_memory`).
        taken = {
            (name, shard): {part: np.empty((len(ids), one.width), one.dtype) for part, one in self.layout[name].items()}
            for (name, shard), ids in rows.items()
        }

        def copy(key):
            (name, shard), local = key, rows[key] // self.spec.shards
            for part, out in taken[key].items():
                shards[name][shard][part].take(local, axis=0, out=out, mode="clip")

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(copy, taken))
        return taken

    def with_shard(self, stack: str, shard: int, parts: Mapping[str, np.ndarray]) -> "HostTables":
        """Overwrites the first rows of one shard, as many as are given; returns the same tables."""
        check_parts(self.spec, self.layout, stack, shard, parts)
        for part, rows in self.shards[stack][shard].items():
            rows[: len(parts[part])] = parts[part]
        return self

    def reset_shard(self, stack: str, shard: int) -> "HostTables":
        """Gives all rows of one shard their initial values and slots; returns the same tables."""
        check_shard(self.spec, stack, shard)
        fill_initial(self.spec, self.layout, stack, shard, self.shards[stack][shard])
        return self

    def flush(self) -> None:
        """Writes mapped files through to their disk; a no-op for tables in RAM."""
        if self.directory is not None:
            mapped.flush(self.directory, self.spec, self.layout)
