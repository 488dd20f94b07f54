"""Mapped files with the tables of a run: they belong to that run, and are used again when it goes
on."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from jaxrec.embedding import EmbeddingSpec, HostTables
from jaxrec.files import Lock, local_path, make_directory, write_text
from jaxrec.types import RowOptimizer


def host_tables(spec: EmbeddingSpec, row_optimizer: RowOptimizer, directory: Path | None) -> HostTables:
    """Fresh tables in host memory, or in mapped files if there is a directory for them."""
    if directory is None or not (directory / "tables.json").exists():
        return HostTables.create(spec, row_optimizer, directory)
    # A kill in the middle of a step has torn them, which is no loss: their rows come from the image
    # of the run.
    tables = HostTables.attach(spec, row_optimizer, directory, torn="accept")
    with tables.overwriting(step=0):
        for name, stack in spec.stacks.items():
            for shard in range(stack.shards):
                tables.reset_shard(name, shard)
    return tables


@contextlib.contextmanager
def own(directory: Path | None, run: str) -> Iterator[None]:
    """Keeps other runs out of a directory of mapped tables, now and later.

    Args:
      directory: None if the tables are in no files.
      run: its id.

    Raises:
      ValueError: another run is at work there, or has left its tables there.
    """
    if directory is None:
        yield
        return
    directory = local_path(directory)
    make_directory(directory)
    with Lock(directory / "run.lock", "training on these tables"):
        owner = directory / "run"
        if (directory / "tables.json").exists() and not (owner.exists() and owner.read_text() == run):
            raise ValueError(f"{directory} holds tables of another run: give another --table-directory, or remove it.")
        write_text(owner, run)
        yield
