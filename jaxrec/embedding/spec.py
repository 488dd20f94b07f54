"""What is embedded: tables, the lookups that read them, and the stacks that store them.

A stack is all tables of one width in one array of V rows; row r lives on shard r % S at r // S, so that each shard
holds an equal share of every table.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class Table:
    """One embedding table.

    Attributes:
      rows: number of rows; ids run from 0 to rows - 1.
      width: embedding width E.
      scale: initial rows are uniform in [-scale, scale); 1 / sqrt(rows) if None, as in DLRM (arXiv 1906.00091).
    """

    rows: int
    width: int
    scale: float | None = None

    def __post_init__(self):
        if self.rows < 1 or self.width < 1:
            raise ValueError(f"{self}: rows and width must be at least 1.")


@dataclasses.dataclass(frozen=True)
class Lookup:
    """How ids of one feature group turn into activations.

    Attributes:
      tables: the name of one table for ids of any shape [B, ...], or a tuple of F names, one a column, for ids of
        shape [B, F].
      hots: ids of one bag; if above 1, ids have a last axis of that size, which pooling removes.
      pooling: 'sum' or 'mean' over the ids of a bag that are not missing (-1); an empty bag reads zero.
    """

    tables: str | tuple[str, ...]
    hots: int = 1
    pooling: str = "sum"

    def __post_init__(self):
        if not isinstance(self.tables, str):
            object.__setattr__(self, "tables", tuple(self.tables))
        if self.hots < 1 or self.pooling not in ("sum", "mean"):
            raise ValueError(f"{self}: hots must be at least 1 and pooling 'sum' or 'mean'.")
        if not self.tables:
            raise ValueError(f"{self}: a lookup names at least one table.")

    @property
    def columns(self) -> tuple[str, ...]:
        """The table of each column; a single name if one table serves all."""
        return (self.tables,) if isinstance(self.tables, str) else self.tables

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuses ids whose shape does not fit this lookup."""
        tail: tuple[int, ...] = () if isinstance(self.tables, str) else (len(self.tables),)
        tail += () if self.hots == 1 else (self.hots,)
        if len(shape) <= len(tail) or shape[len(shape) - len(tail) :] != tail:
            raise ValueError(
                f"ids[{name!r}] has shape {tuple(shape)}, but its lookup wants {('B', ..., *tail)}: one column for "
                "each of its tables, then one for each of its hots. Reshape the ids or change the lookup."
            )


@dataclasses.dataclass(frozen=True)
class Stack:
    """All tables of one width, stored one after the other.

    Attributes:
      width: embedding width E.
      tables: names, in the order in which they are stored.
      offsets: first row of each table, then the number of rows in use.
      shards: S.
    """

    width: int
    tables: tuple[str, ...]
    offsets: tuple[int, ...]
    shards: int

    @property
    def rows_per_shard(self) -> int:
        """V / S: rows of one shard, the last ones possibly not in use."""
        return -(-self.offsets[-1] // self.shards)

    @property
    def rows(self) -> int:
        """V: rows of the stack, a multiple of S; also the mark of "no row" in a plan."""
        return self.rows_per_shard * self.shards


@dataclasses.dataclass(frozen=True)
class EmbeddingSpec:
    """Tables, lookups, number of shards and the seed of the initial rows.

    Attributes:
      tables: {name: Table}.
      lookups: {name: Lookup}; their order is the order in which rows are numbered.
      shards: S, a multiple of the number of devices.
      seed: of the initial rows.

    Errors:
      ValueError: a lookup names an unknown table or tables of several widths; a table without a lookup; a stack of
        2**31 rows or more.

    >>> spec = EmbeddingSpec({'user': Table(100, 8), 'item': Table(10, 8)}, {'pair': Lookup(('user', 'item'))})
    >>> spec.stacks['width_8'].offsets
    (0, 100, 110)
    """

    tables: Mapping[str, Table]
    lookups: Mapping[str, Lookup]
    shards: int = 8
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "tables", dict(self.tables))
        object.__setattr__(self, "lookups", dict(self.lookups))
        if self.shards < 1 or not 0 <= self.seed < 2**32:
            raise ValueError(f"shards={self.shards}, seed={self.seed}: need shards >= 1 and 0 <= seed < 2**32.")
        for name, lookup in self.lookups.items():
            unknown = [t for t in lookup.columns if t not in self.tables]
            if unknown:
                raise ValueError(f"lookup {name!r} names unknown tables {unknown}; known: {list(self.tables)}.")
            widths = {self.tables[t].width for t in lookup.columns}
            if len(widths) > 1:
                raise ValueError(f"lookup {name!r} mixes embedding widths {sorted(widths)}: make one lookup a width.")
        unread = set(self.tables) - {t for lookup in self.lookups.values() for t in lookup.columns}
        if unread:
            raise ValueError(f"no lookup reads the tables {sorted(unread)}: remove them or name them in one.")
        for name, stack in self.stacks.items():
            if stack.rows >= 2**31:
                raise ValueError(f"{name} has {stack.rows} rows, row numbers are int32: use several widths.")

    def __hash__(self):
        return hash(self.digest)

    @functools.cached_property
    def stacks(self) -> dict[str, Stack]:
        """{'width_E': Stack}, one for each width, tables in the order of the spec."""
        widths = dict.fromkeys(table.width for table in self.tables.values())
        return {f"width_{width}": self._stack(width) for width in widths}

    def _stack(self, width: int) -> Stack:
        names = tuple(name for name, table in self.tables.items() if table.width == width)
        ends = np.cumsum([self.tables[name].rows for name in names])
        return Stack(width, names, (0, *map(int, ends)), self.shards)

    def lookups_of(self, stack: str) -> dict[str, Lookup]:
        """The lookups that read one stack, in order."""
        names = self.stacks[stack].tables
        return {name: lookup for name, lookup in self.lookups.items() if lookup.columns[0] in names}

    def columns_of(self, lookup: str) -> tuple[np.ndarray, np.ndarray]:
        """First row in the stack and number of rows, i32[F] each, of the table of each column."""
        columns = self.lookups[lookup].columns
        stack = self.stacks[f"width_{self.tables[columns[0]].width}"]
        offset = np.array([stack.offsets[stack.tables.index(t)] for t in columns], np.int32)
        return offset, np.array([self.tables[t].rows for t in columns], np.int32)

    def row_scale(self, stack: str, row, xp=np):
        """Half width of the initial distribution, f32[n], of rows i32[n] of a stack."""
        layout = self.stacks[stack]
        tables = [self.tables[name] for name in layout.tables]
        scales = [t.rows**-0.5 if t.scale is None else t.scale for t in tables]
        table = xp.searchsorted(xp.asarray(layout.offsets[1:-1], dtype=np.int32), row, side="right")
        return xp.asarray(scales, dtype=np.float32)[table]

    def check_ids(self, ids: Mapping) -> None:
        """Refuses a dict of ids that does not fit the lookups."""
        if set(ids) != set(self.lookups):
            raise ValueError(f"ids for {sorted(ids)}, but the spec has lookups {sorted(self.lookups)}.")
        for name, lookup in self.lookups.items():
            lookup.check(name, np.shape(ids[name]))
            if not np.issubdtype(ids[name].dtype, np.integer):
                raise ValueError(f"ids[{name!r}] are {ids[name].dtype}, but ids are integers: cast them.")

    @functools.cached_property
    def digest(self) -> str:
        """A short hash of what decides the content and place of a row: tables in order, shards, seed."""
        tables = {name: dataclasses.asdict(table) for name, table in self.tables.items()}
        text = json.dumps([tables, self.shards, self.seed])
        return hashlib.sha256(text.encode()).hexdigest()[:16]
