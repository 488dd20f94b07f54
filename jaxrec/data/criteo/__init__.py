"""Criteo click logs (Kaggle `train.txt`, 1TB `day_N`), prepared once and read back as blocks.

`prepare` is called once for each set of files, `open_split` by every run. Read `preparation` first.
"""

from jaxrec.data.criteo.dataset import Split, open_split
from jaxrec.data.criteo.preparation import prepare

__all__ = ["Split", "open_split", "prepare"]
