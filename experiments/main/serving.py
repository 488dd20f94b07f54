"""What a server needs of a run: its model for any number of rows as StableHLO, its weights, and how rows are encoded.

    model.stablehlo   (weights {'dense.PATH'}, stacks {name: f32[V, E]}, ids {lookup: i32[b, ...]}, numbers f32[b, N])
                      -> probability f32[b], or f32[b, K] of K labels, numbers of a regression; see `jax.export`
    weights.npz       'table.NAME' f32[V, E] and 'dense.PATH', the weights of one replica or the mean of all
    serve.json        shapes, stacks, and for each feature its column, its place in the inputs, and its scaling
    categories.json   {table: the categories of its rows from 2 on}; row 0 is for missing ones, row 1 for unknown ones
    serve.py          reads all these, and needs jax, numpy and flatbuffers alone

Legend: b rows, N numbers, F columns, H categories of a bag, V rows of a table or a stack, E embedding width.
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
from jaxrec.data.tabular import Categorical, Dense, MultiHot
from jaxrec.data.tabular.raw import mapping_of
from jaxrec.data.tabular.schema import table_of
from jaxrec.embedding import EmbeddingSpec, activations, embedding_matrix
from jaxrec.files import PARTIAL, make_directory, sync, write_text
from jaxrec.step import without_replica
from jaxrec.types import Batch, Plan
from main.click_data import ClickJob
from main.targets import Target, of_each
from main.trained import Trained, job_of, table_directory

PLATFORMS = ("cpu", "cuda")


def plans_of(spec: EmbeddingSpec, ids: Mapping[str, jax.Array]) -> dict[str, Plan]:
    """Return plans over whole stacks, their tables one after another; an id outside its table counts as missing.

    >>> from jaxrec.embedding import Lookup, Table
    >>> spec = EmbeddingSpec({"a": Table(3, 1), "b": Table(2, 1)}, {"pair": Lookup(("a", "b"))})
    >>> plans_of(spec, {"pair": jnp.array([[2, 0], [-1, 1], [3, 2]])})["width_1"].inverse["pair"].tolist()
    [[2, 3], [5, 4], [5, 5]]
    """
    plans = {}
    for stack, its in spec.stacks.items():
        inverse = {}
        for name, own in spec.ids_of(stack, ids).items():
            offset, limit = (each[None] for each in spec.columns_of(name, stack))
            inverse[name] = jnp.where((own >= 0) & (own < limit), own + offset, its.offsets[-1])
        plans[stack] = Plan(None, inverse, None, None)
    return plans


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
    weights = {f"dense{jax.tree_util.keystr(path)}": np.asarray(leaf) for path, leaf in leaves}
    tables = {f"table.{name}": np.asarray(embedding_matrix(state.tables, name)) for name in job.spec.tables}
    program = exported(job, form, weights, about["lookups"], about["numbers"])
    stacks = {name: stack.tables for name, stack in job.spec.stacks.items()}
    labels = [target.name for target in job.targets]
    about = {"run": image.run, "step": image.step, "labels": labels, "stacks": stacks, **about}
    make_directory(directory.parent)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=directory.name, suffix=PARTIAL) as partial:
        whole = Path(partial) / directory.name
        whole.mkdir()
        (whole / "model.stablehlo").write_bytes(program)
        np.savez(whole / "weights.npz", allow_pickle=False, **weights, **tables)  # type: ignore[arg-type]
        write_text(whole / "categories.json", json.dumps(categories, ensure_ascii=False))
        write_text(whole / "serve.json", json.dumps(about, ensure_ascii=False, indent=2) + "\n")
        shutil.copy(Path(__file__).with_name("serve.py"), whole / "serve.py")
        for path in (*whole.iterdir(), whole):
            sync(path)
        whole.rename(directory)
    return image


def exported(job: ClickJob, form: Any, weights: Mapping, shapes: Mapping, numbers: int) -> bytes:
    """Return the model for batches of any size, serialised."""
    spec = job.spec

    def answer(own, stacks, ids, dense):
        params = jax.tree_util.tree_unflatten(form, [own[name] for name in weights])
        ones = jnp.ones(dense.shape[:1])
        batch = Batch(ids=ids, label=ones, dense=dense, weight=ones)
        found = job.predict(params, activations(spec, stacks, plans_of(spec, ids)), batch)
        return of_each(job.targets, found, Target.served)

    (rows,) = jax.export.symbolic_shape("b")
    of = jax.ShapeDtypeStruct
    inputs = (
        {name: of(leaf.shape, leaf.dtype) for name, leaf in weights.items()},
        {name: of((stack.offsets[-1], stack.width), np.float32) for name, stack in spec.stacks.items()},
        {name: of((rows, *shape), np.int32) for name, shape in shapes.items()},
        of((rows, numbers), np.float32),
    )
    try:
        program = jax.export.export(jax.jit(answer), platforms=PLATFORMS)(*inputs)
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
            one |= {"time": feature.column in schema.times}
        elif isinstance(feature, Dense):
            one |= {"kind": "bucket", "place": schema.single.index(feature.column), "bounds": feature.buckets}
            one |= {"time": feature.column in schema.times}
        else:
            owner: Any = next(each for each in schema.features if each.column == table_of(feature))
            one |= {"table": owner.column, "hash_cap": owner.hash_cap}
            if isinstance(feature, Categorical):
                one |= {"kind": "category", "place": schema.single.index(feature.column)}
            else:
                one |= {"kind": "bag", "separator": feature.separator, "hots": feature.hots}
                one |= {"newest": not isinstance(feature, MultiHot)}
        features.append(one)
    shapes = {"sparse": [len(schema.single)]} if schema.single else {}
    return {
        "lookups": shapes | {bag.column: [bag.hots] for bag in schema.bags},
        "numbers": len(schema.dense),
        "absent": list(schema.absent),
        "text": {"separator": schema.separator, "quote": schema.quote, "columns": schema.columns,
                 "encoding": "utf-8-sig" if schema.encoding == "utf-8" else schema.encoding},
        "features": features,
    }, categories  # fmt: skip
