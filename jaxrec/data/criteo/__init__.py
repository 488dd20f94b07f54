"""Criteo click logs (Kaggle `train.txt`, 1TB `day_N`), prepared once and read back as blocks.

Call `prepare` once for each set of files, and `open_split` in every run. `open_encoder` and `read_rows` encode other
raw rows, labelled or not, as a preparation did. Start with `preparation`. The terms of the raw files hold for prepared
ones: Criteo's allow non-commercial research and forbid distribution.
"""

from jaxrec.data.blocks import Split, open_split
from jaxrec.data.criteo.preparation import Encoder, prepare
from jaxrec.data.criteo.raw import has_labels, open_encoder, read_rows

__all__ = ["Encoder", "Split", "has_labels", "open_encoder", "open_split", "prepare", "read_rows"]
