"""Criteo click logs (Kaggle `train.txt`, 1TB `day_N`), prepared once and read back as blocks."""

from jaxrec.data.criteo.dataset import Split, open_split
from jaxrec.data.criteo.preparation import prepare

__all__ = ["Split", "open_split", "prepare"]
