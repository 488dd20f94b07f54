"""Restore a whole state, single shards, or the model without its optimizers, from an image or a chain of row deltas.

All files are verified before anything changes. A directory stands for its newest intact image; damaged ones are skipped
with a warning that names them.

Legend: S shards, V rows of a stack, E embedding width, K slot width, R replicas.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.checkpoint.format import DamagedImage, Image, is_image, leaves_of, load_arrays, verify, warn_skipped
from jaxrec.checkpoint.row_deltas import Verified, chain, is_delta, newest, newest_first, verified_chain
from jaxrec.checkpoint.state import (
    ROW_IDS,
    check_has_grown,
    check_matches,
    described,
    leaf_name,
    place_dense,
    select_replica,
    tables_of,
)
from jaxrec.embedding import EmbeddingSpec, Layout, Lookup, Place, RemoteTables, Table, Tables, create_tables, sgd
from jaxrec.embedding.kernels import scatter
from jaxrec.embedding.tables import Parts, chosen_shards, empty_parts, fill_initial, range_of, write_shard
from jaxrec.files import local_path
from jaxrec.sharding import EVERYWHERE, PER_REPLICA, REPLICA, as_mesh, put_on_mesh, replicate
from jaxrec.types import DenseState, Part, PyTree, TrainState

_THREADS, _TRIES, _GROUP_BYTES = 4, 3, 1 << 27
Home = TypeVar("Home", bound=Tables)
Loaded = TypeVar("Loaded")


def restore(path: str | Path, template: TrainState, grow: bool = False) -> tuple[TrainState, Image]:
    """Restore a whole state, value for value, into any home, mesh and number of shards.

    Reads an image, or a row delta that was saved with its dense state: then each row has its value from the newest
    delta that holds it, else from the base, else its initial value. All files are verified before the template changes.

    Args:
      path: an image, a delta, or a directory of them: then the newest one that gives a whole state, with a warning that
        names the damaged ones skipped.
      template: a new state with the wanted placement, whose tables match those of the image; shards and lookups may
        differ. Host tables are filled in place, device tables are donated.
      grow: whether tables of the template may have more rows than in the image, or be new, for ids that came up later.
        These rows and their slots have the initial values of the template; all others keep their bits.

    Returns:
      The state, and the manifest of the image or delta; continue the run with `run=image.run`.

    Raises:
      ValueError: there is no image, or it is of other tables, slots or another model (names the difference).
      DamagedImage: the image at `path`, or every image of the directory, is damaged.

    If another process saves and prunes in the directory meanwhile, the newest images are looked up again. After an
    error in reading, or an interrupt, tables of the template on the host may hold some rows of the image already.
    """
    return with_chain(path, lambda found: fill(found, template, grow=grow))


def with_chain(path: str | Path, load: Callable[[list[Image]], Loaded], dense: bool = True) -> Loaded:
    """Call `load` with the verified chain of an image, or of a directory's newest intact one (with `dense` state)."""
    path = local_path(path)
    if is_image(path):
        return load(verified_chain(path))
    for _ in range(_TRIES - 1):
        found = _newest_intact_chain(path, dense)
        try:
            return load(found)
        except DamagedImage:  # intact when verified, removed since
            continue
    return load(_newest_intact_chain(path, dense))


def fill(
    found: list[Image], template: TrainState, replica: int | Literal["mean"] | None = None, grow: bool = False
) -> tuple[TrainState, Image]:
    """Return the state of a verified chain.

    With `replica`, only its parameters are taken, for a template without optimizers; `grow` is as for `restore`.
    """
    image, tables = found[-1], template.tables
    spec, layout = tables.spec, described(tables.layout)
    for other in found:
        if grow:
            check_has_grown(other, tables_of(spec))
        else:
            check_matches(other, "tables", tables_of(spec), other.tables)
        check_matches(other, "shards", image.shards, other.shards)
        if replica is None:
            wanted = {name: layout[name] for name in other.layout if name in layout} if grow else layout
            check_matches(other, "row optimizer slots", wanted, other.layout)
    if not image.dense:
        raise ValueError(
            f"{image.path} was saved without its dense state, so no whole state can be had from it: restore shards of "
            "it (restore_shards), or an image of the whole state."
        )
    saved, dense = image, load_arrays(image, leaves_of(image, "dense."))
    if replica is not None:
        saved, dense = select_replica(image, dense, replica)
    placed = place_dense(saved, template.dense, dense)
    if isinstance(tables.hosted, RemoteTables) and all(other.spec == spec.digest for other in found):
        with tables.overwriting(step=image.step):
            return TrainState(placed, restore_shards(image.path, tables, range(spec.shards))[0]), image
    saved_spec = spec_of(found[0])  # its shards and initial rows may be others
    saved_layout = Layout(  # in a template that only predicts, the dtype may be another
        {
            name: {part: one._replace(dtype=saved[part][1]) for part, one in tables.layout[name].items()}
            for name, saved in found[0].layout.items()
        }
    )
    saved_rows = rows_of_chain(found, saved_spec, saved_layout, range(image.shards))
    # In order, which determines the row numbers.
    same = [*tables_of(saved_spec).items()] == [*tables_of(spec).items()]
    if not same or saved_spec.shards != spec.shards:
        saved_rows = _in_shards_of(spec, tables.layout, saved_spec, saved_layout, saved_rows, same)
    if tables.hosted is None:  # read to the end first: writing donates the template, which a second try would need
        saved_rows = iter([*saved_rows])
    with tables.overwriting(step=image.step):  # mapped files are marked as torn meanwhile
        for key, mine in saved_rows:
            tables = tables.with_shard(*key, mine)
    return TrainState(placed, tables), image


def _in_shards_of(spec, layout, saved_spec, saved_layout, saved_rows, same):
    """Yield ((stack, shard), rows) of a template whose shards or tables are others than those saved."""
    rows = {
        (name, part): np.empty((saved_spec.stacks[name].rows, one.width), one.dtype)
        for name, parts in saved_layout.items()
        for part, one in parts.items()
    }
    for (name, shard), parts in saved_rows:
        for part, array in parts.items():
            rows[name, part][shard :: saved_spec.shards] = array
    for name, stack in spec.stacks.items():
        for shard in range(spec.shards):
            if same:
                used = {part: rows[name, part][: stack.offsets[-1]] for part in layout[name]}
                yield (name, shard), {part: table[shard :: spec.shards] for part, table in used.items()}
            else:
                yield (name, shard), _grown_shard(saved_spec, rows, spec, layout, name, shard)


def _grown_shard(saved_spec, rows, spec, layout, name, shard):
    """Return the rows of a shard of larger tables: initial ones, and over them those that were saved."""
    parts = _initial_shard(spec, layout, name, shard)
    for table in saved_spec.stacks[name].tables if name in saved_spec.stacks else ():
        _, first, _ = range_of(spec, table)
        _, before, end = range_of(saved_spec, table)
        ids = np.arange((shard - first) % spec.shards, end - before, spec.shards)
        for part, array in parts.items():
            array[(first + ids) // spec.shards] = rows[name, part][before + ids]
    return parts


def _newest_intact_chain(directory, dense=True) -> list[Image]:
    """Return the verified chain of the newest intact image or delta, with a dense state if `dense`."""
    skipped: list[DamagedImage] = []
    known: Verified = {}
    for path in newest_first(directory):
        try:
            found = verified_chain(path, known)
        except DamagedImage as error:
            skipped.append(error)
            continue
        if found[-1].dense or not dense:
            warn_skipped(skipped)
            return found
    if skipped:
        raise DamagedImage(f"every image in {directory} is damaged; the newest one: {skipped[0]}")
    raise ValueError(f"{directory} holds no image of a whole state: give the directory of a run that has saved one.")


def rows_of_chain(
    found: Sequence[Image],
    spec: EmbeddingSpec,
    layout: Layout,
    shards: Sequence[int],
    initial: Callable[[str, int], Parts] | None = None,
) -> Iterator[tuple[tuple[str, int], Parts]]:
    """Yield ((stack, shard), rows) of a verified chain: each row as in the newest image that holds it, else initial.

    Args:
      found: chain, oldest image first; empty for initial rows.
      spec: spec of the images.
      layout: stacks and parts to read.
      shards: shards to read, in groups of about `_GROUP_BYTES`: reading a small delta once per shard takes longer.
      initial: (stack, shard) -> initial rows, to write deltas without a base over; new arrays if None.
    """
    initial = initial or functools.partial(_initial_shard, spec, layout)
    size = sum(
        spec.stacks[name].rows_per_shard * part.row_bytes for name, parts in layout.items() for part in parts.values()
    )
    most = max(1, _GROUP_BYTES // max(1, size))
    for first in range(0, len(shards), most):
        keys = list(itertools.product(layout, shards[first : first + most]))
        yield from _rows_of_group(found, spec.shards, layout, keys, initial).items()


def _initial_shard(spec, layout, stack, shard):
    parts = empty_parts(spec.stacks[stack], layout[stack])
    fill_initial(spec, layout, stack, shard, parts)
    return parts


def _rows_of_group(found, shards, layout, keys, initial):
    """Return {(stack, shard): rows} of a chain for some keys."""
    leaves = {leaf_name(name, shard, part) for name, shard in keys for part in (ROW_IDS, *layout[name])}
    load = lambda image: load_arrays(image, leaves & leaves_of(image))
    if found and not is_delta(found[0].path.name):
        base, found = load(found[0]), found[1:]
        # Not copied: another buffer for all rows would cost as much as reading them.
        array_of = lambda name, shard, part: np.require(base[leaf_name(name, shard, part)], requirements="W")
        rows = {(name, shard): {part: array_of(name, shard, part) for part in layout[name]} for name, shard in keys}
    else:
        rows = {(name, shard): initial(name, shard) for name, shard in keys}
    with ThreadPoolExecutor(_THREADS) as pool:
        for first in range(0, len(found), _THREADS):  # few deltas at a time, as they take memory
            for delta in pool.map(load, found[first : first + _THREADS]):
                for (name, shard), parts in rows.items():
                    if (ids := delta.get(leaf_name(name, shard, ROW_IDS))) is None:
                        continue
                    for part, array in parts.items():
                        scatter(array, ids, shards, len(ids), delta[leaf_name(name, shard, part)])
    return rows


def restore_shards(path: str | Path | None, tables: Home, shards: Sequence[int]) -> tuple[Home, list[Image]]:
    """Restore shards of all stacks from base, deltas in order and initial rows; read nothing else.

    All files of these shards are verified before the first row changes. Rows at servers are restored there, by all
    servers in parallel, each within the time-out of one call.

    Args:
      path: a delta, an image, or a directory of them (the newest); None for initial rows.
      tables: tables with the number of shards of the image. Host tables change in place, device tables are donated.
      shards: from 0 to S - 1.

    Returns:
      The tables, and the manifests of the images read, oldest first.

    Raises:
      DamagedImage: an image is missing or damaged.
      ValueError: an image is of another spec; a shard does not exist.
      ShardsLost: a server died meanwhile; once it is replaced, restore all of these shards again.
    """
    shards = chosen_shards(tables.spec, shards)
    path = None if path is None else _image_at(local_path(path))
    found = [] if path is None else chain(path)
    if isinstance(remote := tables.hosted, RemoteTables):  # the servers read the files: no row is transferred
        with remote.overwriting(shards):
            remote.change_shards(shards, _restore_at_server, path and path.resolve())
        return tables, found
    return _restored(tables, shards, found), found


def _restored(tables, shards, found, initial=None):
    """Return tables, or the server at which this runs, with shards restored from a chain that is verified first."""
    spec, layout = tables.spec, described(tables.layout)
    for image in found:
        check_matches(image, "spec", spec.digest, image.spec)
        check_matches(image, "row optimizer slots", layout, image.layout)
        parts = [(name, part) for name in layout for part in (ROW_IDS, *layout[name])]
        verify(image, {leaf_name(name, shard, part) for name, part in parts for shard in shards})
    with tables.overwriting(shards):
        for key, rows in rows_of_chain(found, spec, tables.layout, shards, initial):
            tables = tables.with_shard(*key, rows)
    return tables


def _restore_at_server(server, shards, path):
    # In place, and a successor has just drawn its initial rows.
    initial = lambda stack, shard: server.reset_shard(stack, shard).writable(stack, shard)
    _restored(server, shards, [] if path is None else chain(path), initial)


def shard_source(sources: Sequence[Path], shard: int, known: Verified) -> tuple[Path, list[DamagedImage]]:
    """Return the first of several images and deltas from which a shard can be restored; read only what is verified.

    Args:
      sources: paths, in order of preference.
      shard: from 0 to S - 1.
      known: cache of earlier results, updated in place, so that no file is read twice.

    Returns:
      The path, and the errors of the damaged ones before it.

    Raises:
      DamagedImage: the error of the first one, if none is intact.
    """
    damaged: list[DamagedImage] = []
    for path in sources:
        try:
            verified_chain(path, known, shard)
            return path, damaged
        except DamagedImage as error:
            damaged.append(error)
    raise damaged[0]


def restore_each(
    sources: Sequence[Path], tables: Home, shards: Sequence[int]
) -> tuple[Home, list[tuple[Path | None, list[DamagedImage]]]]:
    """Restore each shard from the first of several images and deltas in which it is intact, and warn of the others.

    All of them are verified before the first row changes.

    Args:
      sources: paths, in order of preference; none for initial rows.
      tables, shards: as for `restore_shards`.

    Returns:
      The tables, and for each shard the path and the errors of the damaged ones before it.

    Raises:
      As `shard_source` and `restore_shards`.
    """
    known: Verified = {}
    found = [shard_source(sources, shard, known) if sources else (None, []) for shard in shards]
    # One warning, for the shard that skipped the most images.
    warn_skipped(max((damaged for _, damaged in found), key=len, default=[]))
    for source in dict.fromkeys(path for path, _ in found):
        its_shards = [shard for shard, (path, _) in zip(shards, found, strict=True) if path == source]
        tables, _ = restore_shards(source, tables, its_shards)
    return tables, found


def _image_at(path: Path) -> Path:
    """Return the path if it is an image, else the newest image of the directory."""
    found = path if is_image(path) else newest(path)
    if found is None:
        raise ValueError(f"{path} holds no image: give the directory of a run that has saved one, or None.")
    return found


def restore_for_prediction(
    path: str | Path,
    spec: EmbeddingSpec,
    params: PyTree,
    replica: int | Literal["mean"] = "mean",
    place: Place = "host",
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[TrainState, Image]:
    """Restore the model of a run, without the state of either optimizer, for `make_eval_step`.

    Args:
      path: as for `restore`: an image, a row delta with its dense state, or a directory of them.
      spec: spec of the run; shards and lookups may differ.
      params: dense parameters of the model, without a replica axis; only shapes and dtypes are used, as from
        `jax.eval_shape(model.init, ...)`.
      replica: replica whose parameters to take, from 0 to R - 1, or "mean" for the mean of all (see
        `jaxrec.shadowsync.with_mean_replica`); the rows are shared by all replicas.
      place: where the rows are: "host", "device" or "pinned".
      mesh: as for `make_eval_step`; one device if None.

    Returns:
      A state with an empty optimizer state and rows without slots, and the manifest of the image.

    Raises:
      ValueError: as `restore`; there is no such replica.
      DamagedImage: as `restore`.

    >>> import tempfile, optax, jaxrec
    >>> from jaxrec import adagrad
    >>> from jaxrec.checkpoint import Checkpointer
    >>> spec = EmbeddingSpec({"item": Table(50, 4)}, {"item": Lookup("item")})
    >>> def predict(params, activations, batch):
    ...     return activations["item"] @ params["weights"]
    >>> params, directory = {"weights": jnp.ones(4)}, tempfile.mkdtemp()
    >>> loss = lambda params, activations, batch: (predict(params, activations, batch) - batch.label) ** 2
    >>> trained = jaxrec.Task(spec, loss, optax.adam(0.1), adagrad(0.1)).init(params)
    >>> with Checkpointer(directory) as checkpointer:
    ...     waited = checkpointer.save(trained)

    The optimizers are not needed any more:

    >>> state, image = restore_for_prediction(directory, spec, params)
    >>> batch = jaxrec.Batch({"item": np.array([3, 7])}, label=np.zeros(2))
    >>> jaxrec.make_eval_step(spec, predict)(state, batch).shape
    (2,)
    """
    shapes = jax.eval_shape(lambda tree: tree, params)
    mesh = as_mesh(mesh)
    tables = create_tables(place, spec, sgd(0.0), mesh)  # this optimizer has no slots
    blank = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    dense = DenseState(
        put_on_mesh(jnp.zeros((), jnp.int32), mesh, EVERYWHERE),
        put_on_mesh(replicate(blank, mesh.shape[REPLICA]), mesh, PER_REPLICA),
        (),
    )
    return with_chain(path, lambda found: fill(found, TrainState(dense, tables), replica))


def spec_of(image: Image) -> EmbeddingSpec:
    """Return the spec of an image's tables, with one lookup per table.

    Args:
      image: from `read_manifest` or `restore`.

    Returns:
      Tables, shards, seed and dtype of the image; images do not record the original lookups.
    """
    tables = {name: Table(rows, width, image.scales[name]) for name, (rows, width) in image.tables.items()}
    dtype = next(parts["value"][1] for parts in image.layout.values())
    return EmbeddingSpec(tables, {name: Lookup(name) for name in tables}, image.shards, image.seed, dtype)


def read_tables(
    path: str | Path, tables: Sequence[str], parts: Sequence[str] = ("value",)
) -> dict[str, dict[str, np.ndarray]]:
    """Read whole tables from an image or a chain of deltas, without a state to restore into.

    Peak memory: these tables, and one shard of their stacks (or 128 MB).

    Args:
      path: an image, a delta, or a directory of them: then the newest intact one.
      tables: table names.
      parts: 'value' for the embeddings, and names of slots of the row optimizer.

    Returns:
      {table: {part: [rows, width]}} of the dtype that was saved, rows in the order of their ids.

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
    spec = spec_of(found[0])
    where = {name: range_of(spec, name) for name in tables}
    for name, (stack, _, _) in where.items():
        if unknown := [part for part in parts if part not in image.layout[stack]]:
            raise ValueError(
                f"the rows of {name!r} in {image.path} have no {unknown}, only {list(image.layout[stack])}."
            )
    if is_delta(found[0].path.name) and set(parts) != {"value"}:
        raise ValueError(
            f"{image.path} goes over initial rows, and what their slots {[p for p in parts if p != 'value']} begin "
            "with stands in no image: read 'value' alone, or restore it with its row optimizer and save that state "
            "with a Checkpointer, as a whole image."
        )
    layout = Layout(
        {
            stack: {part: Part(width, dtype, None) for part, (width, dtype) in of.items() if part in parts}
            for stack, of in image.layout.items()
            if stack in {its_stack for its_stack, _, _ in where.values()}
        }
    )
    rows = {
        name: {part: np.empty((last - first, one.width), one.dtype) for part, one in layout[stack].items()}
        for name, (stack, first, last) in where.items()
    }
    for (stack, shard), held in rows_of_chain(found, spec, layout, range(spec.shards)):
        for name, (its_stack, first, _) in where.items():
            for part, array in held.items() if its_stack == stack else ():
                write_shard(rows[name][part], array, first, shard, spec.shards)
    return rows
