"""A prepared table as a source for `Loader`: a lookup 'sparse' for columns of one category, and one for each bag."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrec.data.blocks import Split, open_split, read_metadata
from jaxrec.files import local_path

_IDS = "ids."


class TableSplit:
    """The blocks of one split, read in any order; a source for `Loader`.

    Attributes:
      metadata: as `prepare` returns it.
      rows: rows of each block.
    """

    def __init__(self, split: Split):
        self._split, self.metadata, self.rows = split, split.metadata, split.rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """One block: {'label': f32[n] or f32[n, K], 'dense': f32[n, N], 'ids': {'sparse': i32[n, F], bag: i32[n, H]}},
        and 'weight': f32[n] if the schema has one.

        Raises:
          IndexError: there is no such block.
          ValueError: its shard is damaged or gone.
        """
        block = self._split[index]
        found: dict[str, Any] = {key: np.asarray(block[key]) for key in block if not key.startswith(_IDS)}
        found.setdefault("dense", np.zeros((self.rows[index], 0), np.float32))
        found["ids"] = {key.removeprefix(_IDS): np.asarray(block[key]) for key in block if key.startswith(_IDS)}
        return found


def open_table(directory: str | Path, name: str) -> TableSplit:
    """Opens the 'train', 'validation' or 'test' split of a prepared table.

    Args:
      directory: as given to `prepare`.
      name: of the split.

    Raises:
      ValueError: the preparation is not complete or not of a table, there is no such split, or a file is missing, cut
        or damaged.
    """
    metadata = read_metadata(local_path(directory))
    if "table" not in metadata:
        raise ValueError(f"{directory} holds Criteo rows, prepared without a schema: open it with --data criteo.")
    return TableSplit(open_split(directory, name))
