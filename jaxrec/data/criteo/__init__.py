"""Criteo click logs (Kaggle `train.txt`, 1TB `day_N`), prepared once and read back as blocks.

`prepare` is called once for each set of files, `open_split` by every run. `open_encoder` and
`read_rows` map other raw rows, with labels or without, as a preparation did. Read `preparation`
first.
"""

from jaxrec.data.blocks import Split, open_split
from jaxrec.data.criteo.preparation import prepare
from jaxrec.data.criteo.raw import Encoder, has_labels, open_encoder, read_rows

__all__ = ["Encoder", "Split", "has_labels", "open_encoder", "open_split", "prepare", "read_rows"]
