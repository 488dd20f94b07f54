"""Table files: one a (stack, shard), a manifest that says what they hold, and the puts that each
shard has seen.

`steps` holds i64[S, 2], for each shard the puts begun and the puts done: the first is written
before the first row of a put, the second after its last. What a killed process has written stays in
the page cache, in its order, so that files whose numbers are not all equal are torn, and files
whose numbers are equal stand after that many puts.

Legend: S shards, V rows of a stack, E embedding width, K slot width.
"""

import contextlib
import json
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxrec.embedding.spec import EmbeddingSpec, Layout, Stack
from jaxrec.embedding.tables import empty_parts
from jaxrec.files import Lock, make_directory, sync, write_json
from jaxrec.types import Part

_MANIFEST, _STEPS, _LOCK = "tables.json", "steps", "tables.lock"
# {stack: one {"value": f32[V / S, E], slot: f32[V / S, K]} per shard}
Shards = dict[str, list[dict[str, np.ndarray]]]


def in_memory(spec: EmbeddingSpec, layout: Layout) -> tuple[Shards, np.ndarray]:
    """Makes arrays in RAM, rows not filled yet, and the steps."""

    shards = {
        name: [empty_parts(stack, layout[name]) for _ in range(stack.shards)] for name, stack in spec.stacks.items()
    }
    return shards, np.zeros((spec.shards, 2), np.int64)


@contextlib.contextmanager
def making(directory: Path, spec: EmbeddingSpec, layout: Layout) -> Iterator[tuple[Shards, np.ndarray]]:
    """Makes files for the caller to fill; on leaving without an error a manifest names them
    complete.

    Raises:
      ValueError: the directory holds tables already, or somebody is making some there.
      OSError: there is no room, or no right to write; what was begun is removed.
    """
    make_directory(directory)
    with Lock(directory / _LOCK, f"making tables in {directory}"):
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
                f"while making tables of {rows} rows in {directory}: free space there, or use another directory"
            )
            raise


def attach(directory: Path, spec: EmbeddingSpec, layout: Layout, torn: str) -> tuple[Shards, np.ndarray]:
    """Maps files that are there.

    Raises:
      ValueError: they are not complete, damaged, of another spec or row optimizer, or torn.
    """
    _check_manifest(directory, _manifest(spec, layout))
    for path, size in _sizes(directory, spec, layout).items():
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            state = "missing" if found is None else f"{found} bytes long"
            raise ValueError(
                f"{path} is {state}, but {size} bytes are wanted: these tables are lost. Create tables in another "
                "directory and restore an image into them."
            )
    shards, steps = _map_all(directory, spec, layout, create=False)
    if torn == "refuse":
        _check_whole(directory, steps)
    return shards, steps


def flush(directory: Path, spec: EmbeddingSpec, layout: Layout) -> None:
    """Waits until all files are on disk, what was written through their maps included."""
    for path in _sizes(directory, spec, layout):
        sync(path)


def is_untorn(steps: np.ndarray) -> bool:
    """Whether all shards stand after the same put, and none within one."""
    return bool((steps == steps[0, 0]).all())


def _check_whole(directory, steps):
    if not is_untorn(steps):
        begun, done = steps.T
        within = np.flatnonzero(begun != done).tolist()
        stands = ", ".join(
            f"shards {np.flatnonzero(done == put).tolist()} after put {put}" for put in np.unique(done).tolist()[-4:]
        )
        raise ValueError(
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
    """{file: bytes} of all that is mapped."""
    sizes = {directory / _STEPS: 16 * spec.shards}
    for name, stack in spec.stacks.items():
        size = stack.rows_per_shard * sum(map(_row_bytes, layout[name].values()))
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
    return shards, np.frombuffer(mapped[directory / _STEPS], np.int64).reshape(spec.shards, 2)


def _map(path, size, create):
    with open(path, "w+b" if create else "r+b") as file:
        if create:
            # A sparse map on a full tmpfs dies with SIGBUS; this raises OSError instead.
            os.posix_fallocate(file.fileno(), 0, size)
        return mmap.mmap(file.fileno(), size)


def _arrays(mapped, stack: Stack, parts: dict[str, Part]):
    """One shard's arrays, one behind the other in its file."""
    arrays, start, rows = {}, 0, stack.rows_per_shard
    for name, part in parts.items():
        arrays[name] = np.frombuffer(mapped, part.dtype, rows * part.width, start).reshape(rows, part.width)
        start += rows * _row_bytes(part)
    return arrays


def _row_bytes(part: Part) -> int:
    return part.width * np.dtype(part.dtype).itemsize
