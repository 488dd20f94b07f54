"""A prepared table as a source for `Loader`: a lookup 'sparse' for the single-category columns, and one per bag."""

from pathlib import Path

from jaxrec.data.blocks import Split, open_split


def open_table(directory: str | Path, name: str) -> Split:
    """Open the 'train', 'validation' or 'test' split of a prepared table.

    Args:
      directory: as given to `prepare`.
      name: name of the split.

    Raises:
      ValueError: the preparation is incomplete or not of a table, there is no such split, or a file is missing,
        truncated or damaged.
    """
    split = open_split(directory, name)
    if "table" not in split.metadata:
        raise ValueError(f"{directory} holds Criteo rows, prepared without a schema: open it with --data criteo.")
    return split
