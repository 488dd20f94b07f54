"""Tables in host memory or in memory-mapped files.

Each file holds one (stack, shard); a manifest names their spec and slots. The file `steps` holds i64[S, 2], the puts
begun and done per shard: the first is written before the first row of a put, the second after its last. Writes of a
killed process stay in the page cache in their order. So tables whose numbers are not all equal are torn, and tables
whose numbers all equal k are in the state after k puts.

Legend: S shards, V rows of a stack, U padded unique rows per shard, E embedding width, K slot width.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from jaxrec.bounds import whole_number
from jaxrec.embedding import kernels
from jaxrec.embedding.spec import EmbeddingSpec, Layout, Stack
from jaxrec.embedding.tables import (
    RowIds,
    aligned_empty,
    check_parts,
    chosen_shards,
    empty_parts,
    fill_initial,
    parts_on_host,
    used_rows,
)
from jaxrec.files import Lock, local_path, make_directory, sync, write_json
from jaxrec.types import Part, Plan, RowOptimizer, Rows

_MANIFEST, _PUTS, _LOCK = "tables.json", "steps", "tables.lock"
# {stack: one {"value": f32[V / S, E], slot: f32[V / S, K]} per shard}
Shards = dict[str, list[dict[str, np.ndarray]]]


class PutCounts:
    """Base of `HostedTables`: counts of puts per shard, which tell whether all rows are of one step."""

    spec: EmbeddingSpec
    puts: np.ndarray
    directory: Path | None = None

    @property
    def hosted(self) -> Self:
        """These tables."""
        return self

    @property
    def step(self) -> int | None:
        """Number of puts applied to all shards, the training step if each step is one put; None if torn."""
        first = self.puts[0, 0]
        return int(first) if (self.puts == first).all() else None

    @contextlib.contextmanager
    def overwriting(self, shards: Sequence[int] | None = None, step: int | None = None) -> Iterator[Self]:
        """Context in which the caller overwrites whole shards; they count as torn until it exits without an error.

            with tables.overwriting(step=image.step):
                ...  # all rows and slots

        Args:
          shards: numbers of the shards to overwrite; all if None.
          step: step of the new rows; if None, the highest step of any shard, to restore lost shards beside the others.
        """
        chosen = chosen_shards(self.spec, shards)
        if step is not None:
            whole_number("step", step, 0)
        self.puts[chosen, 0] = self.puts[chosen, 1] + 1
        yield self
        self.puts[chosen] = self.puts[:, 1].max() if step is None else step


@contextlib.contextmanager
def creating_files(directory: Path, spec: EmbeddingSpec, layout: Layout) -> Iterator[tuple[Shards, np.ndarray]]:
    """Create files for the caller to fill; on exit without an error, write the manifest that marks them complete."""
    make_directory(directory)
    with Lock(directory / _LOCK, f"creating tables in {directory}"):
        if (directory / _MANIFEST).exists():
            raise ValueError(f"{directory} holds tables already: attach them, or give another directory.")
        try:
            yield _map_all(directory, spec, layout, create=True)
            write_json(directory / _MANIFEST, _manifest(spec, layout))
        except OSError as error:
            for path in _sizes(directory, spec, layout):
                path.unlink(missing_ok=True)
            rows = sum(stack.rows for stack in spec.stacks.values())
            error.add_note(
                f"while creating tables of {rows} rows in {directory}: free space there, or use another directory"
            )
            raise


def map_files(directory: Path, spec: EmbeddingSpec, layout: Layout) -> tuple[Shards, np.ndarray]:
    """Map existing files; raises ValueError if they are incomplete, damaged, or of another spec or row optimizer."""
    _check_manifest(directory, _manifest(spec, layout))
    for path, size in _sizes(directory, spec, layout).items():
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            state = "missing" if found is None else f"{found} bytes long"
            raise ValueError(
                f"{path} is {state}, but {size} bytes are expected: these tables are lost. Create tables in another "
                "directory and restore an image into them."
            )
    return _map_all(directory, spec, layout, create=False)


def _torn(directory: Path, puts: np.ndarray) -> ValueError:
    begun, done = puts.T
    within = np.flatnonzero(begun != done).tolist()
    stands = ", ".join(
        f"shards {np.flatnonzero(done == put).tolist()} after put {put}" for put in np.unique(done).tolist()[-4:]
    )
    return ValueError(
        f"the tables in {directory} are torn: {stands:.300}; shards {within[:20]} within a put. A process was "
        "killed while it wrote (or is writing now: then wait). Attach with torn='accept' to overwrite all rows, as "
        "a restore does, or create tables elsewhere."
    )


def _check_manifest(directory, wanted):
    path = directory / _MANIFEST
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{directory} holds no complete tables: create them first.") from None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: create tables in another directory and restore an image into them.")
    differ = [key for key in wanted if wanted[key] != found.get(key)]
    if differ:
        raise ValueError(
            f"the tables in {directory} differ in {differ}: found {[found.get(k) for k in differ]}, wanted "
            f"{[wanted[k] for k in differ]}. Use the spec and row optimizer that created them."
        )


def _manifest(spec: EmbeddingSpec, layout: Layout) -> dict[str, Any]:
    slots = {
        name: {part: [one.width, one.fill] for part, one in parts.items() if one.fill is not None}
        for name, parts in layout.items()
    }
    return {"format": 1, "tables": spec.digest, "slots": slots}


def _sizes(directory, spec, layout) -> dict[Path, int]:
    """Return {file: bytes} of all mapped files."""
    sizes = {directory / _PUTS: 16 * spec.shards}
    for name, stack in spec.stacks.items():
        size = stack.rows_per_shard * sum(part.row_bytes for part in layout[name].values())
        sizes |= {_path(directory, name, shard): size for shard in range(stack.shards)}
    return sizes


def _path(directory, stack, shard):
    return directory / f"{stack}.{shard:03d}"


def _map_all(directory, spec, layout, create):
    mapped = {path: _map(path, size, create) for path, size in _sizes(directory, spec, layout).items()}
    shards = {
        name: [_arrays(mapped[_path(directory, name, shard)], stack, layout[name]) for shard in range(stack.shards)]
        for name, stack in spec.stacks.items()
    }
    return shards, np.frombuffer(mapped[directory / _PUTS], np.int64).reshape(spec.shards, 2)


def _map(path, size, create):
    with open(path, "w+b" if create else "r+b") as file:
        if create:
            # Writing to a sparse map on a full tmpfs raises SIGBUS; this raises OSError instead.
            os.posix_fallocate(file.fileno(), 0, size)
        return mmap.mmap(file.fileno(), size)


def _arrays(mapped, stack: Stack, parts: dict[str, Part]):
    """Return one shard's arrays, which are stored one after the other in its file."""
    arrays, start, rows = {}, 0, stack.rows_per_shard
    for name, part in parts.items():
        arrays[name] = np.frombuffer(mapped, part.dtype, rows * part.width, start).reshape(rows, part.width)
        start += rows * part.row_bytes
    return arrays


_MUCH = 4 << 20  # bytes from which on threads copy faster than the thread that waits


@functools.cache
def _copiers() -> ThreadPoolExecutor | None:
    """Return the threads that help a waiting one to copy rows, or None on a single core."""
    others = _cores() - 1
    return ThreadPoolExecutor(others, "rows", lambda: setattr(_mine, "copies", True)) if others else None


def _cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_mine = threading.local()


def in_copier() -> bool:
    """Return whether this is a thread that copies rows, for which another thread waits."""
    return getattr(_mine, "copies", False)


if hasattr(os, "register_at_fork"):  # a forked child has none of the threads
    os.register_at_fork(after_in_child=_copiers.cache_clear)


def _for_each(copy: Callable[[Any], None], pieces: Iterable, arrays: Iterable[np.ndarray]) -> None:
    """Call copy(piece) for each piece, in threads if the arrays are large, as one core leaves a memory idle."""
    pool = _copiers() if sum(array.nbytes for array in arrays) >= _MUCH else None
    left, helpers = collections.deque(pieces), list[Future]()

    def copy_some():
        while left:
            try:
                piece = left.popleft()
            except IndexError:  # another thread was faster
                return
            copy(piece)

    try:
        if pool is not None:
            with contextlib.suppress(RuntimeError):  # no more threads, as when the interpreter ends: no help
                for _ in range(min(len(left), _cores()) - 1):
                    helpers.append(pool.submit(copy_some))
        copy_some()
        for helper in helpers:
            if not helper.cancel():
                helper.result()
    finally:
        left.clear()  # after an error or Ctrl-C too, nothing is written behind the caller's back
        wait(helpers)


@dataclasses.dataclass(frozen=True, eq=False)
class HostTables(PutCounts):
    """Embedding tables and their optimizer slots in host memory: RAM, or one mapped file per stack and shard.

    Reads and writes release the GIL and take no lock. `put` is for a single writer in batch order; concurrent writers
    use `add`.

    Each `put` is counted in the mapped files as begun and as done, so that `attach` detects and refuses tables torn by
    kill -9. `add` is not counted: its writers are in several processes without a lock, its rows belong to no step, and
    each addition is complete by itself. A power cut can lose pages in any order: after one, trust only tables that have
    not changed since `flush`.

    Attributes:
      spec: tables and shards.
      layout: parts of a row, per stack.
      shards: {stack: one dict {'value': f32[V / S, E], slot: f32[V / S, K]} per shard}.
      directory: directory of the files, or None for tables in RAM.
      puts: i64[S, 2], puts begun and puts done per shard.

    >>> from jaxrec.embedding import Lookup, Table, sgd
    >>> spec = EmbeddingSpec({'item': Table(10, 4)}, {'item': Lookup('item')})
    >>> HostTables.create(spec, sgd(0.1)).step
    0
    """

    spec: EmbeddingSpec
    layout: Layout
    shards: dict[str, list[dict[str, np.ndarray]]]
    directory: Path | None = None
    puts: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 2), np.int64))

    traced: ClassVar[None] = None

    def __post_init__(self):
        if not len(self.puts):  # constructed from arrays, without counts
            object.__setattr__(self, "puts", np.zeros((self.spec.shards, 2), np.int64))

    @classmethod
    def create(
        cls, spec: EmbeddingSpec, row_optimizer: RowOptimizer, directory: str | Path | None = None
    ) -> "HostTables":
        """Create initial tables in RAM, or in files of a directory (best on tmpfs) that other processes can attach.

        Args:
          spec: tables and shards.
          row_optimizer: decides the slots.
          directory: directory for one file per (stack, shard), which must not hold tables yet; RAM if None.

        Raises:
          ValueError: the directory holds tables already, or another process is creating some there; a URL; not a row
            optimizer.
          OSError: no space or no write permission; the files are removed.
        """
        layout = spec.layout(row_optimizer)
        if directory is None:
            shards = {
                name: [empty_parts(stack, layout[name]) for _ in range(spec.shards)]
                for name, stack in spec.stacks.items()
            }
            return cls(spec, layout, shards).filled()
        directory = local_path(directory)
        with creating_files(directory, spec, layout) as (shards, puts):
            tables = cls(spec, layout, shards, directory, puts).filled()
            tables.flush()
        return tables

    def filled(self) -> Self:
        """Overwrite all rows with their initial values, shards in parallel; return the same tables."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for name, shards in self.shards.items():
                fill = functools.partial(fill_initial, self.spec, self.layout, name)
                list(pool.map(fill, range(len(shards)), shards))
        return self

    @classmethod
    def attach(
        cls, spec: EmbeddingSpec, row_optimizer: RowOptimizer, directory: str | Path, torn: str = "refuse"
    ) -> "HostTables":
        """Map the files of tables that this or another process has created.

        Args:
          spec: tables and shards, as at creation.
          row_optimizer: the row optimizer that the tables were created with.
          directory: directory of the files.
          torn: 'refuse' tables whose writer was killed within a put; 'accept' them to overwrite all rows within
            `overwriting`.

        Raises:
          ValueError: the directory holds no complete tables; a file is missing, damaged, truncated or too long; the
            tables are of another spec or row optimizer; they are torn.
        """
        if torn not in ("refuse", "accept"):
            raise ValueError(f"torn={torn!r} must be 'refuse' or 'accept'.")
        directory, layout = local_path(directory), spec.layout(row_optimizer)
        shards, puts = map_files(directory, spec, layout)
        tables = cls(spec, layout, shards, directory, puts)
        if torn == "refuse" and tables.step is None:
            raise _torn(directory, puts)
        return tables

    def read(self, plans: dict[str, Plan]) -> dict[str, Rows]:
        """Gather the planned rows and slots into fresh arrays; padding yields zeros."""
        return {name: self._read_stack(name, *used_rows(self, name, plan)) for name, plan in plans.items()}

    def _read_stack(self, name, unique, count):
        # Never reuse these buffers: jax may alias them (jax#37830).
        out = {part: aligned_empty((*unique.shape, one.width), one.dtype) for part, one in self.layout[name].items()}

        def gather(shard):
            for part, table in self.shards[name][shard].items():
                kernels.gather(table, unique[shard], self.spec.shards, count[shard], out[part][shard])

        _for_each(gather, range(self.spec.shards), out.values())
        return Rows(out.pop("value"), out)

    def put(self, plans: dict[str, Plan], rows: dict[str, Rows], shards: Sequence[int] | None = None) -> Self:
        """Store updated rows of some shards, or of all, in place; return the same tables."""
        work = [
            (name, *used_rows(self, name, plan), parts_on_host(self, name, plan, rows)) for name, plan in plans.items()
        ]

        def scatter(shard):
            self.puts[shard, 0] += 1
            for name, unique, count, values in work:
                for part, table in self.shards[name][shard].items():
                    kernels.scatter(table, unique[shard], self.spec.shards, count[shard], values[part][shard])
            self.puts[shard, 1] += 1

        _for_each(
            scatter, chosen_shards(self.spec, shards), (array for *_, values in work for array in values.values())
        )
        return self

    def add(
        self, plans: dict[str, Plan], rows: dict[str, Rows], old: dict[str, Rows], shards: Sequence[int] | None = None
    ) -> Self:
        """Add rows - old to the current rows, in place and without a lock; return the same tables."""
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
        """Return {part: one array [V / S, width] per shard} of a stack, not copied."""
        shards = self.shards[stack]
        return {part: [mine[part] for mine in shards] for part in self.layout[stack]}

    def on_shards(self, function: Callable[..., Any], *args) -> dict[tuple[str, int], Any]:
        """Run function(stack, shard, parts, *args) for every shard of every stack; parts are not copied."""
        return {
            (name, shard): function(name, shard, parts, *args)
            for name, shards in self.shards.items()
            for shard, parts in enumerate(shards)
        }

    def take(self, rows: RowIds) -> dict[tuple[str, int], dict[str, np.ndarray]]:
        """Copy selected rows to fresh arrays."""
        shards = self.shards
        # Allocated on the calling thread, for which glibc reuses freed memory (see `keep_memory`).
        taken = {
            (name, shard): {part: np.empty((len(ids), one.width), one.dtype) for part, one in self.layout[name].items()}
            for (name, shard), ids in rows.items()
        }

        def copy(key):
            (name, shard), most = key, self.spec.stacks[key[0]].rows - 1
            ids = np.clip(rows[key], 0, most)  # the kernel checks no bounds
            for part, out in taken[key].items():
                kernels.gather(shards[name][shard][part], ids, self.spec.shards, len(ids), out)

        _for_each(copy, taken, (out for parts in taken.values() for out in parts.values()))
        return taken

    def with_shard(self, stack: str, shard: int, parts: Mapping[str, np.ndarray]) -> Self:
        """Overwrite the first n rows of one shard; return the same tables."""
        check_parts(self.spec, self.layout, stack, shard, parts)
        for part, rows in self.shards[stack][shard].items():
            rows[: len(parts[part])] = parts[part]
        return self

    def flush(self) -> None:
        """Flush mapped files to disk; a no-op for tables in RAM."""
        if self.directory is not None:
            for path in _sizes(self.directory, self.spec, self.layout):
                sync(path)
