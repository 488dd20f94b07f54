"""Embedding tables, the lookups that read them, and the stacks that store them.

A stack concatenates all tables of one width into V rows; row r is stored on shard r % S at index r // S, so that each
shard holds an equal share of every table.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping

import jax
import numpy as np

from jaxrec.bounds import is_not_negative, real_number, whole_number
from jaxrec.types import Part, RowOptimizer


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
        for name in ("rows", "width"):
            why = ", such as 1_000_000 instead of 1e6"
            object.__setattr__(self, name, whole_number(f"{self}: {name}", getattr(self, name), why=why))
        if self.scale is not None:
            rule = "0 or more and finite, or None for 1 / sqrt(rows)"
            scale = real_number(f"{self}: scale", self.scale, rule, is_not_negative)
            object.__setattr__(self, "scale", scale if isinstance(scale, int) else float(scale))


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Mapping from the ids of one feature group to activations.

    Attributes:
      tables: the name of one table for ids of any shape [B, ...], or a tuple of F names, one per column, for ids of
        shape [B, F]. If these tables differ in width, the activations are a list, with one array for each column.
      hots: number of ids in a bag; if above 1, ids have a last axis of that size, which pooling removes.
      pooling: 'sum' or 'mean' over the ids of a bag that are not missing (-1); an empty bag yields zeros.
    """

    tables: str | tuple[str, ...]
    hots: int = 1
    pooling: str = "sum"

    def __post_init__(self):
        if not isinstance(self.tables, str):
            object.__setattr__(self, "tables", tuple(self.tables))
        object.__setattr__(self, "hots", whole_number(f"{self}: hots", self.hots))
        if self.pooling not in ("sum", "mean"):
            raise ValueError(f"{self}: pooling must be 'sum' or 'mean'.")

    @property
    def columns(self) -> tuple[str, ...]:
        """Table names, one per column; a single name if one table serves all columns."""
        return (self.tables,) if isinstance(self.tables, str) else self.tables

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ValueError if ids of this shape do not fit the lookup."""
        tail: tuple[int, ...] = () if isinstance(self.tables, str) else (len(self.tables),)
        tail += () if self.hots == 1 else (self.hots,)
        if len(shape) <= len(tail) or shape[len(shape) - len(tail) :] != tail:
            raise ValueError(
                f"ids[{name!r}] has shape {tuple(shape)}, but its lookup wants {('B', ..., *tail)}: one column for "
                "each of its tables, then one for each of its hots. Reshape the ids or change the lookup."
            )


@dataclasses.dataclass(frozen=True)
class Stack:
    """All tables of one width, concatenated.

    Attributes:
      width: embedding width E.
      tables: table names, in storage order.
      offsets: first row of each table, followed by the number of rows in use.
      shards: number of shards S.
    """

    width: int
    tables: tuple[str, ...]
    offsets: tuple[int, ...]
    shards: int

    @property
    def rows_per_shard(self) -> int:
        """V / S: rows of one shard; the last ones may be padding."""
        return -(-self.offsets[-1] // self.shards)

    @property
    def rows(self) -> int:
        """V: rows of the stack, a multiple of S; also the marker for "no row" in a plan."""
        return self.rows_per_shard * self.shards


@dataclasses.dataclass(frozen=True)
class EmbeddingSpec:
    """Tables, lookups, number of shards and seed of the initial rows.

    Attributes:
      tables: {name: Table}.
      lookups: {name: Lookup}; plans number rows in this order.
      shards: number of shards S, a multiple of the number of devices.
      seed: seed of the initial rows, and of the rounding of 16-bit rows.
      dtype: of the stored embeddings: "float32", or "float16" for half the memory, also in images and on the link.
        Losses and optimizers see them as float32, slots are float32, and updates are rounded stochastically, by
        `rounding.to_float16`.

    >>> spec = EmbeddingSpec({'user': Table(100, 8), 'item': Table(10, 8)}, {'pair': Lookup(('user', 'item'))})
    >>> spec.stacks['width_8'].offsets
    (0, 100, 110)
    """

    tables: Mapping[str, Table]
    lookups: Mapping[str, Lookup]
    shards: int = 8
    seed: int = 0
    dtype: str = "float32"

    def __post_init__(self):
        object.__setattr__(self, "tables", dict(self.tables))
        object.__setattr__(self, "lookups", dict(self.lookups))
        object.__setattr__(self, "shards", whole_number("shards", self.shards))
        object.__setattr__(self, "seed", whole_number("seed", self.seed, 0, 2**32 - 1))
        if self.dtype not in ("float32", "float16"):
            raise ValueError(
                f"dtype={self.dtype!r:.80} must be 'float32' or 'float16', the rows that tables can store."
            )
        for name, lookup in self.lookups.items():
            unknown = [t for t in lookup.columns if t not in self.tables]
            if unknown:
                raise ValueError(f"lookup {name!r} names unknown tables {unknown}; known: {list(self.tables)}.")
        unread = set(self.tables) - {t for lookup in self.lookups.values() for t in lookup.columns}
        if unread:
            raise ValueError(f"no lookup reads the tables {sorted(unread)}: remove them or name them in one.")
        for name, stack in self.stacks.items():
            if stack.rows >= 2**31:
                raise ValueError(f"{name} has {stack.rows} rows, row numbers are int32: use several widths.")

    def __hash__(self):
        return hash(self.digest)

    def __eq__(self, other):
        # jit compares the specs of tables at every dispatch: mostly the same object.
        if self is other:
            return True
        if not isinstance(other, EmbeddingSpec):
            return NotImplemented
        # In order, since plans number rows in the order of the lookups.
        return self.digest == other.digest and list(self.lookups.items()) == list(other.lookups.items())

    @functools.cached_property
    def stacks(self) -> dict[str, Stack]:
        """{'width_E': Stack}, one per width, with tables in the order of the spec."""
        widths = dict.fromkeys(table.width for table in self.tables.values())
        return {f"width_{width}": self._stack(width) for width in widths}

    def _stack(self, width: int) -> Stack:
        names = tuple(name for name, table in self.tables.items() if table.width == width)
        ends = np.cumsum([self.tables[name].rows for name in names])
        return Stack(width, names, (0, *map(int, ends)), self.shards)

    def lookups_of(self, stack: str) -> dict[str, Lookup]:
        """Return the lookups of which a column is in one stack, in order."""
        return {name: lookup for name, lookup in self.lookups.items() if (name, stack) in self._columns}

    def columns_of(self, lookup: str, stack: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return, for the table of each column, its first row in its stack and its number of rows, i32[F] each.

        Args:
          lookup: name of a lookup.
          stack: stack of the columns; None for all columns.
        """
        return self._columns[lookup, stack][1:]

    def ids_of(self, stack: str, ids: Mapping) -> dict:
        """Return, of ids {lookup: i32[B, ...]}, the columns in one stack: all, unless a lookup has several widths."""
        found = {}
        for name, lookup in self.lookups_of(stack).items():
            places = self.places_of(name, stack)
            if len(places) == len(lookup.columns):
                found[name] = ids[name]
            else:
                found[name] = ids[name][..., places, :] if lookup.hots > 1 else ids[name][..., places]
        return found

    def places_of(self, lookup: str, stack: str) -> np.ndarray:
        """Return which columns of a lookup are in one stack, ascending."""
        return self._columns[lookup, stack][0]

    @functools.cached_property
    def _columns(self):
        first = {t: row for stack in self.stacks.values() for t, row in zip(stack.tables, stack.offsets, strict=False)}
        found = {}
        for name, lookup in self.lookups.items():
            home = np.array([f"width_{self.tables[t].width}" for t in lookup.columns])
            offset = np.array([first[t] for t in lookup.columns], np.int32)
            limit = np.array([self.tables[t].rows for t in lookup.columns], np.int32)
            found[name, None] = np.arange(len(home)), offset, limit
            for stack in dict.fromkeys(home.tolist()):
                places = np.flatnonzero(home == stack)
                found[name, stack] = places, offset[places], limit[places]
        return found

    def layout(self, row_optimizer: RowOptimizer) -> "Layout":
        """Return the parts of a row (embedding and optimizer slots) for each stack.

        Args:
          row_optimizer: decides the slots.

        >>> from jaxrec.embedding import rowwise_adagrad
        >>> spec = EmbeddingSpec({'item': Table(10, 4)}, {'item': Lookup('item')})
        >>> spec.layout(rowwise_adagrad(0.1))['width_4']['accumulator']
        Part(width=1, dtype='float32', fill=0.0)
        """
        check_row_optimizer(row_optimizer)
        parts = {}
        for name, stack in self.stacks.items():
            slots = row_optimizer.init(stack.width)
            if "value" in slots:
                raise ValueError("a slot named 'value', which is the name of the embedding: choose another one.")
            parts[name] = {"value": Part(stack.width, self.dtype, None)}
            parts[name] |= {slot: Part(one.width, "float32", one.fill) for slot, one in slots.items()}
        return Layout(parts)

    def row_scale(self, stack: str, row, xp=np):
        """Return half the width of the initial distribution, f32[n], of the rows i32[n] of a stack."""
        layout = self.stacks[stack]
        tables = [self.tables[name] for name in layout.tables]
        scales = [t.rows**-0.5 if t.scale is None else t.scale for t in tables]
        table = xp.searchsorted(xp.asarray(layout.offsets[1:-1], dtype=np.int32), row, side="right")
        return xp.asarray(scales, dtype=np.float32)[table]

    def check_ids(self, ids: Mapping) -> None:
        """Raise ValueError if ids do not fit the lookups."""
        if ids.keys() != self.lookups.keys():
            raise ValueError(f"ids for {sorted(ids)}, but the spec has lookups {sorted(self.lookups)}.")
        for name, lookup in self.lookups.items():
            array = ids[name]
            lookup.check(name, np.shape(array))
            dtype = getattr(array, "dtype", type(array))
            if not np.issubdtype(dtype, np.integer):
                raise ValueError(
                    f"ids[{name!r}] are {dtype}, but ids are arrays of integers: cast them, and pad bags of several "
                    "lengths with -1."
                )
            # XLA compares u32 with i32 as i32: from 2**31 on, an id would be another row, or none.
            if isinstance(array, jax.Array) and np.issubdtype(dtype, np.unsignedinteger) and dtype.itemsize > 2:
                raise ValueError(
                    f"ids[{name!r}] are {dtype} on a device, where ids are i32: send batches by jaxrec.to_device, "
                    "which checks and casts them on the host."
                )

    @functools.cached_property
    def digest(self) -> str:
        """Short hash of all that determines a row's initial value and location: tables in order, shards, seed, type."""
        tables = {name: dataclasses.asdict(table) for name, table in self.tables.items()}
        others = [self.dtype] if self.dtype != "float32" else []  # images of earlier versions keep their digest
        text = json.dumps([tables, self.shards, self.seed, *others])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Layout(Mapping[str, dict[str, Part]]):
    """{stack: {part: Part}}, 'value' first and then the slots; hashable, so that tables can pass it through jit."""

    def __init__(self, parts: Mapping[str, Mapping[str, Part]]):
        self._parts = {stack: dict(mine) for stack, mine in parts.items()}
        self._hash = hash(tuple((stack, *mine.items()) for stack, mine in self._parts.items()))

    def __getitem__(self, stack: str) -> dict[str, Part]:
        return self._parts[stack]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        return self is other or (isinstance(other, Layout) and self._parts == other._parts)

    def __repr__(self) -> str:
        return f"Layout({self._parts})"

    def __reduce__(self):
        return Layout, (self._parts,)  # without the hash, which differs between processes


def check_row_optimizer(optimizer) -> RowOptimizer:
    """Return the optimizer; raise ValueError if it is not a `RowOptimizer` but, say, an optax transformation.

    Dense optimizers move every row at every step (momentum, weight decay, Adam's moments), which would need a gradient
    the size of the table; only optimizers that leave untouched rows unchanged can be exact here.
    """
    if not isinstance(optimizer, RowOptimizer):
        raise ValueError(
            f"row optimizer {optimizer!r:.200} is not a RowOptimizer: a dense optimizer would move rows that the batch "
            "did not touch. Use one of jaxrec.embedding (adagrad, lazy_adam, ...), or write a RowOptimizer."
        )
    return optimizer
