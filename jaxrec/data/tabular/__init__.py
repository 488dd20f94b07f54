"""Any table, prepared once by a schema of a few lines and read back as blocks for a `Loader`.

Call `prepare` once for each set of files and schema, and `open_table` in every run. Start with `schema`.
"""

from jaxrec.data.blocks import Split
from jaxrec.data.preparation import Progress
from jaxrec.data.tabular.preparation import open_table, prepare
from jaxrec.data.tabular.raw import Vocabulary, open_vocabularies, schema_of
from jaxrec.data.tabular.records import export_records
from jaxrec.data.tabular.schema import Categorical, Dense, History, Label, MultiHot, Schema, Sequence
from jaxrec.data.tabular.splits import AtRandom, ByColumn, ByFile, ByRows, ByTime

__all__ = [
    "AtRandom",
    "ByColumn",
    "ByFile",
    "ByRows",
    "ByTime",
    "Categorical",
    "Dense",
    "History",
    "Label",
    "MultiHot",
    "Progress",
    "Schema",
    "Sequence",
    "Split",
    "Vocabulary",
    "export_records",
    "open_table",
    "open_vocabularies",
    "prepare",
    "schema_of",
]
