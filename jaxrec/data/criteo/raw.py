"""Raw Criteo rows for a trained model: labelled or not, with the ids of its preparation.

Legend: n rows of a block, N = 13 dense features, F = 26 fields.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxrec.data.blocks import read_metadata
from jaxrec.data.criteo import parsing
from jaxrec.data.criteo.preparation import Encoder, load_encoder
from jaxrec.data.preparation import VOCABULARY
from jaxrec.data.sources import local_files, read_chunks
from jaxrec.files import local_path


def open_encoder(directory: str | Path) -> Encoder:
    """Open the vocabulary, or the hashing, of a prepared directory.

    Args:
      directory: as given to `prepare`.

    Raises:
      ValueError: the preparation is incomplete, or its vocabulary is missing, damaged or from another preparation.
    """
    directory = local_path(directory)
    metadata = read_metadata(directory)
    path, remedy = directory / VOCABULARY, f"restore it, or delete {directory} and run the preparation again."
    encoder = load_encoder(path, metadata["options"].get("hash_cap"), remedy)
    if encoder.cardinalities != tuple(metadata["cardinalities"]):
        raise ValueError(f"{path} is the vocabulary of another preparation, as its sizes are others: {remedy}")
    return encoder


def has_labels(paths: Sequence[str | Path]) -> bool:
    """Whether the rows of raw files begin with a label, judged by the first line of each file.

    Args:
      paths: raw files, plain or .gz.
    """
    firsts = {path: next(read_chunks([path])).text.partition(b"\n")[0] for path in local_files(paths)}
    found = {path: parsing.has_labels(line) for path, line in firsts.items()}
    if len(set(found.values())) > 1:
        labelled, bare = (next(path for path, has in found.items() if has is wanted) for wanted in (True, False))
        raise ValueError(f"{labelled} has labels and {bare} has none: give them one after the other, not together.")
    return next(iter(found.values()))


def read_rows(paths: Sequence[str | Path], encoder: Encoder, labelled: bool = True) -> Iterator[dict[str, np.ndarray]]:
    """Stream raw files as blocks, one row per line, in bounded memory.

    Args:
      paths: raw files, plain or .gz.
      encoder: from `open_encoder`.
      labelled: whether each line begins with its label (see `has_labels`); otherwise it has one column less.

    Yields:
      {'label': u8[n], 'dense': f32[n, N], 'ids': i32[n, F]} in line order, without 'label' if not labelled.
    """
    for chunk in read_chunks(local_files(paths)):
        columns = parsing.parse(chunk, labelled)
        if columns.bad_rows:
            raise ValueError(f"{columns.why}. Correct it: every line has its result, in their order.")
        ids = encoder.encode(columns.category, columns.present)
        yield ({"label": columns.label} if labelled else {}) | {"dense": columns.dense, "ids": ids}
