"""The click job over a prepared table (prepare.py --schema): its data, and the model over its tables.

Columns of one category are columns of the lookup 'sparse'. Each bag, several categories or a sequence, is a separate
lookup, whose mean is one more feature of the model.

Legend: B batch, N dense features, F features with an embedding, E embedding width, K labels.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from jaxrec.data.blocks import read_metadata
from jaxrec.data.tabular import Split, open_table
from jaxrec.embedding import EmbeddingSpec, Lookup, Table
from jaxrec.files import local_path
from jaxrec.models import DIN
from jaxrec.types import RowOptimizer
from main.click_data import ClickJob, job_of_model
from main.model import as_functions
from main.targets import Targets, targets_of


def labels_at(label: np.ndarray, places: Sequence[int]) -> np.ndarray:
    """Return some of the labels [n, K] or [n] of rows, in the order of their places: [n] if it is one.

    >>> labels_at(np.array([[1, 2, 3]]), [2, 0]).tolist(), labels_at(np.array([1, 2]), [0]).tolist()
    ([[3, 1]], [1, 2])
    """
    found = label.reshape(len(label), -1)[:, list(places)]
    return found[:, 0] if len(places) == 1 else found


class Labelled:
    """A split with the labels that a run predicts, in their order."""

    def __init__(self, split: Split, labels: Sequence[str]):
        self._split, self.rows, self.metadata = split, split.rows, split.metadata
        known = split.metadata["table"]["labels"]
        for label in labels:
            if label not in known:
                raise ValueError(f"a table without the label {label!r} does not say what the run predicts: {known}.")
        self._places = [known.index(label) for label in labels]

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        block = self._split[index]
        return {**block, "label": labels_at(block["label"], self._places)}


def open_rows(directory: Path, name: str, targets: Targets) -> Labelled:
    """Open a split of a prepared table with the labels to predict; raises as `open_table`."""
    return Labelled(open_table(directory, name), [target.name for target in targets])


def table_of(directory: Path) -> Mapping[str, Any]:
    """Return the metadata of a prepared table."""
    metadata = read_metadata(local_path(directory))
    if "table" not in metadata:
        raise ValueError(f"{directory} holds Criteo rows, prepared without a schema: give --data criteo.")
    return metadata["table"]


def tables_of(table: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the tables of the columns of 'sparse', of which some may share one."""
    shared = table.get("shared", {})  # which tables prepared by an earlier version do not have
    return tuple(shared.get(name, name) for name in table["sparse"])


def tables_by_field(table: Mapping[str, Any]) -> dict[str, str]:
    """Return {field: its table} of the columns of 'sparse' and the bags."""
    single = zip(table["sparse"], tables_of(table), strict=True)
    return dict(single) | {name: bag["table"] for name, bag in table["bags"].items()}


def with_vocabulary(table: Mapping[str, Any]) -> frozenset[str]:
    """Return the features looked up in a table with a vocabulary, in which row 1 stands for unknown ids.

    >>> table = {"sparse": ["user", "item"], "bags": {"seen": {"table": "item"}}, "features": {"item": {"distinct": 9}}}
    >>> sorted(with_vocabulary(table | {"features": {"user": {}, "item": {"distinct": 9}, "seen": {}}}))
    ['item', 'seen']
    """
    return frozenset(name for name, its in tables_by_field(table).items() if "distinct" in table["features"][its])


def history_of(table: Mapping[str, Any]) -> tuple[str, int]:
    """Return the history bag and its candidate's column of 'sparse': the first bag that shares a column's table.

    >>> history_of({"sparse": ["user", "item"], "bags": {"tags": {"table": "tag"}, "seen": {"table": "item"}}})
    ('seen', 1)
    """
    for name, bag in table["bags"].items():
        if bag["table"] in table["sparse"]:
            return name, table["sparse"].index(bag["table"])
    raise ValueError(
        f"--model din weighs a history by a candidate, and no bag of this table ({', '.join(table['bags']) or 'none'}) "
        'shares the table of a column: prepare it with Sequence("seen", share="item") or History("item", by="user"), '
        "or give another model."
    )


def spec_of(
    table: Mapping[str, Any],
    width: int,
    shards: int,
    seed: int,
    history: str | None = None,
    widths: Mapping[str, int] | None = None,
    dtype: str = "float32",
) -> EmbeddingSpec:
    """Build the spec of a prepared table; the steps of the bag `history` keep separate embeddings.

    >>> table = {"tables": {"user": 9, "tag": 5}, "sparse": ["user"], "bags": {"tags": {"table": "tag", "hots": 3}}}
    >>> spec = spec_of(table, 4, 2, 0)
    >>> {name: (lookup.columns, lookup.hots, lookup.pooling) for name, lookup in spec.lookups.items()}
    {'sparse': (('user',), 1, 'sum'), 'tags': (('tag',), 3, 'mean')}
    """
    lookups = {"sparse": Lookup(tables_of(table))} if table["sparse"] else {}
    hots = {name: 1 if name == history else bag["hots"] for name, bag in table["bags"].items()}
    lookups |= {name: Lookup(bag["table"], hots[name], "mean") for name, bag in table["bags"].items()}
    tables = {name: Table(rows, (widths or {}).get(name, width)) for name, rows in table["tables"].items()}
    return EmbeddingSpec(tables, lookups, shards, seed, dtype)


def table_job(
    table: Mapping[str, Any],
    model: Any,
    optimizer: optax.GradientTransformation,
    row_optimizer: RowOptimizer,
    width: int = 16,
    shards: int = 8,
    seed: int = 0,
    widths: Mapping[str, int] | None = None,
    dtype: str = "float32",
    targets: Targets = (),
) -> ClickJob:
    """Build the job of a model over a prepared table.

    Args:
      table: metadata of the table, see `table_of`.
      model: (dense f32[B, N], activations f32[B, F, E]) -> output f32[B] or f32[B, K], see model.py; without dense
        features it gets one of zeros. Or a `DIN`, with candidate and history from `history_of`.
      width: E, of all tables but those in `widths`.
      seed: of the initial rows, and of a model that draws numbers.
      widths, dtype: as for `click_job`.
      targets: what the outputs predict; the first label of the table if there are none.
    """
    targets = targets or targets_of(table)
    history, column = history_of(table) if isinstance(model, DIN) else (None, 0)
    features = [*table["sparse"], *(name for name in table["bags"] if name != history)]
    steps = 1 if history is None else table["bags"][history]["hots"]
    examples = [jnp.zeros((1, max(1, len(table["dense"])))), jnp.zeros((1, len(features), width))]
    if history is not None:
        examples += [jnp.zeros((1, width)), jnp.zeros((1, steps, width)), jnp.zeros((1, steps), bool)]

    def inputs(activations, batch):
        # Zeros derived from the batch: on several devices they vary over the mesh as it does, as autodiff requires.
        numbers = batch.dense if table["dense"] else 0.0 * batch.weight[:, None]
        parts = [activations["sparse"]] if table["sparse"] else []
        rows = numbers.shape[0]  # symbolic in an export
        parts += [activations[name].reshape(rows, 1, width) for name in table["bags"] if name != history]
        seen = [numbers, jnp.concatenate(parts, axis=1)]
        if history is not None:
            steps = activations[history].reshape(rows, -1, width)
            seen += [activations["sparse"][:, column], steps, batch.ids[history].reshape(rows, -1) >= 0]
        return seen

    spec = spec_of(table, width, shards, seed, history, widths, dtype)
    return job_of_model(as_functions(model, examples), inputs, spec, optimizer, row_optimizer, width, targets)
