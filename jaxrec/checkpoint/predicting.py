"""What is wanted of a trained run behind its training: its model alone, and single tables.

Legend: S shards, V rows of a stack, E embedding width, K slot width, R replicas.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.checkpoint.deltas import is_delta
from jaxrec.checkpoint.image import Image, leaves_of, load_arrays
from jaxrec.checkpoint.restoring import fill, with_chain
from jaxrec.checkpoint.state import ROW_IDS, leaf_name
from jaxrec.embedding import DeviceTables, EmbeddingSpec, HostTables, Layout, Lookup, Table, sgd
from jaxrec.embedding.tables import initial_parts, range_of, write_shard
from jaxrec.sharding import EVERYWHERE, PER_REPLICA, REPLICA, as_mesh, put_on_mesh, replicate
from jaxrec.types import DenseState, Part, PyTree, TrainState


def restore_for_prediction(
    path: str | Path,
    spec: EmbeddingSpec,
    params: PyTree,
    replica: int | Literal["mean"] = "mean",
    home: type[HostTables] | type[DeviceTables] = HostTables,
    mesh: jax.sharding.Mesh | None = None,
    cast: bool = False,
) -> tuple[TrainState, Image]:
    """Restores the model of a run, without the state of either optimizer, for `make_eval_step`.

    Args:
      path: as for `restore`: an image, a row delta with its dense state, or a directory of them.
      spec: of the run; shards and lookups may be others.
      params: any dense parameters of the model, without a replica axis; their shapes are enough, as
        from `jax.eval_shape(model.init, ...)`.
      replica: whose parameters to take, from 0 to R - 1, or "mean" for the mean of all, the model that
        they are together (`jaxrec.shadowsync.with_mean_replica`); the rows are shared by all.
      home: where the rows go, `HostTables` or `DeviceTables`.
      mesh: as for `make_eval_step`; one device if None.
      cast: accept parameters of another dtype, and cast them to those of `params`.

    Returns:
      A state whose optimizer state is empty and whose rows have no slots, and what the manifest
      says of the image.

    Raises:
      ValueError: as `restore`; there is no such replica; an argument of another kind than wanted.
      DamagedImage: as `restore`.

    >>> import tempfile, optax, jaxrec
    >>> from jaxrec.checkpoint import Checkpointer
    >>> from jaxrec.embedding import adagrad
    >>> spec = EmbeddingSpec({"item": Table(50, 4)}, {"item": Lookup("item")})
    >>> def predict(params, activations, batch):
    ...     return activations["item"] @ params["weights"]
    >>> params, directory = {"weights": jnp.ones(4)}, tempfile.mkdtemp()
    >>> trained = jaxrec.init_state(params, optax.adam(0.1), HostTables.create(spec, adagrad(0.1)))
    >>> with Checkpointer(directory) as checkpointer:
    ...     waited = checkpointer.save(trained)

    The optimizers are not needed any more:

    >>> state, image = restore_for_prediction(directory, spec, params)
    >>> ids = {"item": np.array([3, 7], np.int32)}
    >>> batch = jaxrec.Batch(ids, np.zeros((2, 0)), label=np.zeros(2), weight=np.ones(2))
    >>> jaxrec.make_eval_step(spec, predict)(state, jaxrec.plan(spec, ids), batch).shape
    (2,)
    """
    if home not in (HostTables, DeviceTables):
        raise ValueError(f"home={home!r:.200} must be HostTables or DeviceTables, the class itself.")
    if not isinstance(spec, EmbeddingSpec):
        raise ValueError(f"spec is a {type(spec).__name__}, but the EmbeddingSpec of the run is wanted.")
    try:
        shapes = jax.eval_shape(lambda tree: tree, params)
    except TypeError as error:
        raise ValueError(
            f"params are a {type(params).__name__} with leaves that are no arrays, but the dense parameters of the "
            "model are wanted, or their shapes: jax.eval_shape(model.init, ...)."
        ) from error
    mesh = as_mesh(mesh)
    no_slots = sgd(0.0)  # rows of this optimizer are their embeddings alone
    tables = HostTables.create(spec, no_slots) if home is HostTables else DeviceTables.create(spec, no_slots, mesh)
    blank = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    dense = DenseState(
        put_on_mesh(jnp.zeros((), jnp.int32), mesh, EVERYWHERE),
        put_on_mesh(replicate(blank, mesh.shape[REPLICA]), mesh, PER_REPLICA),
        (),
    )
    return with_chain(path, lambda found: fill(found, TrainState(dense, tables), cast, replica))


def spec_of(image: Image) -> EmbeddingSpec:
    """The spec of an image's tables, with a lookup of its own for each.

    Args:
      image: from `read_manifest` or `restore`.

    Returns:
      Tables, shards and seed as they were; what the lookups were stands in no image.
    """
    tables = {name: Table(rows, width, image.scales[name]) for name, (rows, width) in image.tables.items()}
    return EmbeddingSpec(tables, {name: Lookup(name) for name in tables}, image.shards, image.seed)


def read_tables(
    path: str | Path, tables: Sequence[str], parts: Sequence[str] = ("value",)
) -> dict[str, dict[str, np.ndarray]]:
    """Reads whole tables of an image, or of a chain of deltas, without a state to restore into.

    Memory: that of these tables, and one shard of their stack.

    Args:
      path: an image, a delta, or a directory of them: then the newest whole one.
      tables: their names.
      parts: 'value' for the embeddings, and names of slots of the row optimizer.

    Returns:
      {table: {part: f32[rows, width]}}, rows in the order of their ids.

    Raises:
      ValueError: there is no image, no such table, or no such part.
      DamagedImage: as `restore`.
    """
    return with_chain(path, lambda found: tables_of_chain(found, tables, parts), dense=False)


def tables_of_chain(
    found: list[Image], tables: Sequence[str], parts: Sequence[str]
) -> dict[str, dict[str, np.ndarray]]:
    """As `read_tables`, from a verified chain, oldest image first."""
    image = found[-1]
    spec, layout = spec_of(image), _layout_of(image)
    rows: dict[str, dict[str, np.ndarray]] = {}
    for name in tables:
        stack, first, last = range_of(spec, name)
        unknown = [part for part in parts if part not in layout[stack]]
        if unknown:
            raise ValueError(f"the rows of {name!r} in {image.path} have no {unknown}, only {list(layout[stack])}.")
        if is_delta(found[0].path.name):
            _refuse_slots(image, parts)
            drawn = initial_parts(spec, layout, stack, np.arange(first, last))
            rows[name] = {part: drawn[part] for part in parts}
        else:
            rows[name] = {
                part: np.empty((last - first, layout[stack][part].width), layout[stack][part].dtype) for part in parts
            }
    for other in found:
        _write_over(other, spec, rows)
    return rows


def _write_over(image: Image, spec: EmbeddingSpec, rows: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Writes what an image holds of some tables over their rows, a shard at a time."""
    there = leaves_of(image, "rows.")
    for stack in dict.fromkeys(range_of(spec, name)[0] for name in rows):
        of_stack = [name for name in rows if range_of(spec, name)[0] == stack]
        parts = list(rows[of_stack[0]])
        for shard in range(spec.shards):
            wanted = {leaf_name(stack, shard, part): part for part in (ROW_IDS, *parts)}
            saved = load_arrays(image, wanted.keys() & there)
            leaves = {wanted[leaf]: array for leaf, array in saved.items()}
            ids = leaves.pop(ROW_IDS, None)
            for name in of_stack if leaves else ():
                _, first, last = range_of(spec, name)
                for part, array in leaves.items():
                    if ids is None:
                        write_shard(rows[name][part], array, first, shard, spec.shards)
                    else:
                        mine = (ids >= first) & (ids < last)
                        rows[name][part][ids[mine] - first] = array[mine]


def _refuse_slots(image, parts):
    """Which value the slots of a row begin with stands in no image."""
    if set(parts) != {"value"}:
        raise ValueError(
            f"{image.path} goes over initial rows, and what their slots {[p for p in parts if p != 'value']} begin "
            "with stands in no image: read 'value' alone, or restore it with its row optimizer and save that state "
            "with a Checkpointer, as a whole image."
        )


def _layout_of(image: Image) -> Layout:
    """The layout that a manifest tells of; it does not tell what slots begin with, and nobody asks
    for that here."""
    return Layout(
        {
            name: {part: Part(width, dtype, None) for part, (width, dtype) in parts.items()}
            for name, parts in image.layout.items()
        }
    )
