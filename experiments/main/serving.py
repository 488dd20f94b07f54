"""What a server needs of a run: its model for any number of rows as StableHLO, its weights, and how rows are encoded.

    model.stablehlo   (weights, ids {lookup: i32[b, ...]}, numbers f32[b, N]) -> probability f32[b], see `jax.export`
    weights.npz       'table.NAME' f32[V, E] and 'dense.PATH', the weights of one replica or the mean of all
    serve.json        shapes, and for each feature its column, its place in the inputs, and its scaling
    categories.json   {table: the categories of its rows from 2 on}; row 0 is for missing ones, row 1 for unknown ones
    serve.py          reads all these, and needs jax, numpy and flatbuffers alone

Legend: b rows, N numbers, F columns, H categories of a bag, V rows of a table, E embedding width.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.checkpoint import Image, restore_for_prediction
from jaxrec.data.tabular import Categorical, Dense, Sequence
from jaxrec.data.tabular.raw import mapping_of
from jaxrec.data.tabular.schema import table_of
from jaxrec.embedding import EmbeddingSpec, embedding_matrix
from jaxrec.files import PARTIAL, make_directory, sync, write_text
from jaxrec.step import without_replica
from jaxrec.types import Batch
from main.click_data import ClickJob
from main.trained import Trained, job_of, table_directory

PLATFORMS = ("cpu", "cuda")


def activations_of(spec: EmbeddingSpec, tables: Mapping[str, jax.Array], ids: Mapping[str, jax.Array]) -> dict:
    """Look ids up in whole tables {name: f32[V, E]}, as a training step does in the rows of its batch.

    >>> from jaxrec.embedding import Lookup, Table
    >>> spec = EmbeddingSpec({"a": Table(3, 1)}, {"bag": Lookup("a", hots=2, pooling="mean")})
    >>> tables, ids = {"a": jnp.array([[1.0], [2.0], [4.0]])}, {"bag": jnp.array([[0, 2], [1, -1]])}
    >>> activations_of(spec, tables, ids)["bag"].tolist()
    [[2.5], [2.0]]
    """
    found = {}
    for name, lookup in spec.lookups.items():
        own, hots = ids[name], lookup.hots
        if isinstance(lookup.tables, str):
            rows, there = tables[lookup.tables][jnp.maximum(own, 0)], own >= 0
        else:
            axis = own.ndim - 1 - (hots > 1)
            columns = [jnp.take(own, column, axis) for column in range(len(lookup.tables))]
            each = [tables[table][jnp.maximum(column, 0)] for table, column in zip(lookup.tables, columns, strict=True)]
            rows, there = jnp.stack(each, axis=axis), own >= 0
        rows = jnp.where(there[..., None], rows, 0.0)
        if hots > 1:
            rows = rows.sum(axis=-2)
            if lookup.pooling == "mean":
                rows = rows / jnp.maximum(there.sum(axis=-1), 1)[..., None]
        found[name] = rows
    return found


def write(run: Trained, directory: Path, prepared: Path | None = None) -> Image:
    """Write the files of a run for a server; return the image that they are of.

    Args:
      run: a run of train.py.
      directory: where to; created if missing.
      prepared: current location of its prepared table, if it has moved.

    Raises:
      ValueError: the model is written for one size of batch.
    """
    if run.config["data"] != "tabular":
        raise ValueError(
            f"--serve is for a run of --data tabular, and {run.directory} is one of --data {run.config['data']}: "
            "prepare the rows by a schema (prepare.py --schema, which has criteo too), and train on that."
        )
    job, (about, categories) = job_of(run, prepared), described(table_directory(run, prepared))
    state, image = restore_for_prediction(run.images, job.spec, job.init(0))
    leaves, form = jax.tree_util.tree_flatten_with_path(without_replica(state.dense).params)  # the mean of all
    names = [f"dense{jax.tree_util.keystr(path)}" for path, _ in leaves]
    weights = {name: np.asarray(leaf) for name, (_, leaf) in zip(names, leaves, strict=True)}
    weights |= {f"table.{name}": np.asarray(embedding_matrix(state.tables, name)) for name in job.spec.tables}
    program = exported(job, form, names, weights, about["lookups"], about["numbers"])
    about = {"run": image.run, "step": image.step, **about}
    make_directory(directory.parent)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=directory.name, suffix=PARTIAL) as partial:
        whole = Path(partial) / directory.name
        whole.mkdir()
        (whole / "model.stablehlo").write_bytes(program)
        np.savez(whole / "weights.npz", allow_pickle=False, **weights)  # type: ignore[arg-type]
        write_text(whole / "categories.json", json.dumps(categories, ensure_ascii=False))
        write_text(whole / "serve.json", json.dumps(about, ensure_ascii=False, indent=2) + "\n")
        shutil.copy(Path(__file__).with_name("serve.py"), whole / "serve.py")
        for path in (*whole.iterdir(), whole):
            sync(path)
        whole.rename(directory)
    return image


def exported(job: ClickJob, form: Any, names: list[str], weights: Mapping, shapes: Mapping, numbers: int) -> bytes:
    """Return the model for batches of any size, serialised."""
    spec = job.spec

    def probability(weights, ids, dense):
        params = jax.tree_util.tree_unflatten(form, [weights[name] for name in names])
        tables = {name: weights[f"table.{name}"] for name in spec.tables}
        ones = jnp.ones(dense.shape[:1])
        batch = Batch(ids=ids, label=ones, dense=dense, weight=ones)
        return jax.nn.sigmoid(job.predict(params, activations_of(spec, tables, ids), batch))

    (rows,) = jax.export.symbolic_shape("b")
    of_weights = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in weights.items()}
    of_ids = {name: jax.ShapeDtypeStruct((rows, *shape), np.int32) for name, shape in shapes.items()}
    of_dense = jax.ShapeDtypeStruct((rows, numbers), np.float32)
    try:
        program = jax.export.export(jax.jit(probability), platforms=PLATFORMS)(of_weights, of_ids, of_dense)
    except (TypeError, jax.errors.JAXTypeError, jax.errors.InconclusiveDimensionOperation) as error:
        raise ValueError(
            f"the model cannot be written for batches of any size ({error!s:.200}): take sizes from shapes, as in "
            "dense.shape[0] for len(dense), and compare them with no number."
        ) from error
    return bytes(program.serialize())


def described(directory: Path) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return how rows become the inputs of a model over a prepared table, as in serve.json, and categories.json."""
    schema, categories, moments = mapping_of(directory)
    features: list[dict[str, Any]] = []
    for feature in schema.features:
        one: dict[str, Any] = {"column": feature.column}
        if isinstance(feature, Dense) and not feature.buckets:
            mean, deviation = moments[feature.column] if feature.standardise else (0.0, 1.0)
            one |= {"kind": "number", "place": schema.dense.index(feature), "log": feature.log, "mean": mean}
            one |= {"deviation": deviation if deviation > 0 else 1.0, "missing": feature.missing}
        elif isinstance(feature, Dense):
            one |= {"kind": "bucket", "place": schema.single.index(feature.column), "bounds": feature.buckets}
        else:
            one |= {"table": table_of(feature), "hash_cap": feature.hash_cap}
            if isinstance(feature, Categorical):
                one |= {"kind": "category", "place": schema.single.index(feature.column)}
            else:
                one |= {"kind": "bag", "separator": feature.separator, "hots": feature.hots}
                one |= {"newest": isinstance(feature, Sequence)}
        features.append(one)
    shapes = {"sparse": [len(schema.single)]} if schema.single else {}
    return {
        "label": schema.label[0].column,
        "lookups": shapes | {bag.column: [bag.hots] for bag in schema.bags},
        "numbers": len(schema.dense),
        "absent": list(schema.absent),
        "text": {"separator": schema.separator, "quote": schema.quote, "columns": schema.columns},
        "features": features,
    }, categories  # fmt: skip
