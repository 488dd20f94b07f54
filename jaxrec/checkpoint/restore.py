"""Restore a whole state, single shards, or the model without its optimizers, from an image or a chain of row deltas.

All files are verified before anything changes. A directory stands for its newest intact image; damaged ones are skipped
with a warning that names them.

Legend: S shards, V rows of a stack, E embedding width, K slot width, R replicas.
"""

import collections
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    check_matches,
    described,
    is_remote,
    leaf_name,
    place_dense,
    select_replica,
    tables_of,
)
from jaxrec.embedding import DeviceTables, EmbeddingSpec, HostTables, Layout, Lookup, Table, Tables, sgd
from jaxrec.embedding.tables import check_shard, empty_parts, fill_initial, initial_parts, range_of, write_shard
from jaxrec.files import local_path
from jaxrec.sharding import EVERYWHERE, PER_REPLICA, REPLICA, as_mesh, put_on_mesh, replicate
from jaxrec.types import DenseState, Part, PyTree, TrainState

_THREADS, _TRIES, _GROUP_BYTES = 4, 3, 1 << 26
Home = TypeVar("Home", bound=Tables)
Loaded = TypeVar("Loaded")


def restore(
    path: str | Path,
    template: TrainState,
    cast: bool = False,
) -> tuple[TrainState, Image]:
    """Restore a whole state, value for value, into any home, mesh and number of shards.

    Reads an image, or a row delta that was saved with its dense state: then each row has its value from the newest
    delta that holds it, else from the base, else its initial value. All files are verified before the template changes.

    Args:
      path: an image, a delta, or a directory of them: then the newest one that gives a whole state, with a warning that
        names the damaged ones skipped.
      template: a new state with the wanted placement, whose tables match those of the image; shards and lookups may
        differ. Host tables are filled in place, device tables are donated.
      cast: accept dense leaves of another dtype, and cast them to the template's.

    Returns:
      The state, and the manifest of the image or delta; continue the run with `run=image.run`.

    Raises:
      ValueError: there is no image, or it is of other tables, slots or another model (names the difference).
      DamagedImage: the image at `path`, or every image of the directory, is damaged.

    If another process saves and prunes in the directory meanwhile, the newest images are looked up again.
    """
    return with_chain(path, lambda found: fill(found, template, cast))


def with_chain(path: str | Path, load: Callable[[list[Image]], Loaded], dense: bool = True) -> Loaded:
    """Call `load` with the verified chain of an image, or of the newest intact image of a directory.

    Args:
      path: as for `restore`.
      load: function of the chain, oldest image first.
      dense: whether the newest image must have a dense state, for a whole state.

    Raises:
      ValueError, DamagedImage: as `restore`.
    """
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
    found: list[Image], template: TrainState, cast: bool = False, replica: int | Literal["mean"] | None = None
) -> tuple[TrainState, Image]:
    """Return the state of a verified chain; the template changes only once all of the chain is read.

    Args:
      found: chain, oldest image first.
      template, cast: as for `restore`.
      replica: replica whose parameters to take, for a template without optimizers; None restores the whole state.
    """
    image, tables = found[-1], template.tables
    spec, layout = tables.spec, described(tables.layout)
    for other in found:
        check_matches(other, "tables", tables_of(spec), other.tables)
        if replica is None:
            check_matches(other, "row optimizer slots", layout, other.layout)
        if other.shards != image.shards:
            raise ValueError(f"{other.path} has {other.shards} shards and {image.path} has {image.shards}.")
    if not image.dense:
        raise ValueError(
            f"{image.path} was saved without its dense state, so no whole state can be had from it: restore shards of "
            "it (restore_shard), or an image of the whole state."
        )
    saved, dense = image, load_arrays(image, leaves_of(image, "dense."))
    if replica is not None:
        saved, dense = select_replica(image, dense, replica)
    placed = place_dense(saved, template.dense, dense, cast)
    if is_remote(tables) and all(other.spec == spec.digest for other in found):
        return TrainState(placed, _restore_at_servers(image, tables)), image
    rows = _base_rows(found[0], tables)
    wanted = {ROW_IDS, *(part for parts in layout.values() for part in parts)}
    for other in found:
        arrays = load_arrays(other, [leaf for leaf in leaves_of(other, "rows.") if leaf.rpartition(".")[2] in wanted])
        for (name, part), table in rows.items():
            for shard in range(other.shards):
                _write_over(table[shard :: other.shards], arrays, name, shard, part, other.shards)
    with tables.overwriting(step=image.step):  # mapped files are marked as torn meanwhile
        for name, stack in spec.stacks.items():
            used = {part: rows[name, part][: stack.offsets[-1]] for part in layout[name]}
            for shard in range(spec.shards):
                mine = {part: table[shard :: spec.shards] for part, table in used.items()}
                tables = tables.with_shard(name, shard, mine)
    return TrainState(placed, tables), image


def _restore_at_servers(image, tables):
    """Restore tables that live at servers, by all servers in parallel."""
    with tables.overwriting(step=image.step):
        return restore_shards(image.path, tables, range(tables.spec.shards))[0]


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


def _base_rows(base, tables):
    """Return {(stack, part): array [V of the image, width]} over which to write a chain.

    Holds initial rows if the chain begins with a delta.
    """
    rows: dict[tuple[str, str], np.ndarray] = {}
    for name, stack in tables.spec.stacks.items():
        padded = -(-stack.offsets[-1] // base.shards) * base.shards
        if is_delta(base.path.name):
            _refuse_other_initial_rows(base, tables.spec)
            parts = initial_parts(tables.spec, tables.layout, name, np.arange(padded))
        else:
            layout = described(tables.layout)[name]
            parts = {part: np.empty((padded, width), dtype) for part, (width, dtype) in layout.items()}
        rows |= {(name, part): array for part, array in parts.items()}
    return rows


def _refuse_other_initial_rows(base, spec):
    scales = {table: t.scale for table, t in spec.tables.items()}
    if (base.seed, base.scales) != (spec.seed, scales):
        raise ValueError(
            f"{base.path} goes over initial rows of seed {base.seed} and scales {base.scales}, not of seed "
            f"{spec.seed} and {scales}: use the spec of that run."
        )


def _write_over(table, arrays, name, shard, part, shards):
    """Write one part of one shard from an image over its rows, f32[V / S, width]."""
    saved = arrays.get(leaf_name(name, shard, part))
    ids = arrays.get(leaf_name(name, shard, ROW_IDS))
    if saved is not None:
        table[slice(None) if ids is None else ids // shards] = saved


def restore_shard(path: str | Path | None, tables: Home, shard: int) -> tuple[Home, list[Image]]:
    """Restore one shard of all stacks, as `restore_shards`."""
    return restore_shards(path, tables, [shard])


def restore_shards(path: str | Path | None, tables: Home, shards: Sequence[int]) -> tuple[Home, list[Image]]:
    """Restore shards of all stacks from base, deltas in order and initial rows; read nothing else.

    All files of a shard are verified before its first row changes. Rows at servers are restored there, by all servers
    in parallel, each within the time-out of one call; other tables one shard after the other.

    Args:
      path: a delta, an image, or a directory of them (the newest); None for initial rows.
      tables: tables with the number of shards of the image. Host tables change in place, device tables are donated.
      shards: distinct, from 0 to S - 1.

    Returns:
      The tables, and the manifests of the images read, oldest first.

    Raises:
      DamagedImage: an image is missing or damaged.
      ValueError: an image is of another spec; a shard does not exist or is given twice.
      ShardsLost: a server died meanwhile; once it is replaced, restore all of these shards again.
    """
    for shard in shards:
        check_shard(tables.spec, shard)
    if len({*shards}) < len(shards):
        raise ValueError(f"shards={list(shards)} must be distinct.")
    path = None if path is None else _image_at(local_path(path))
    found = [] if path is None else chain(path)
    if is_remote(tables):  # the servers read the files: no row is transferred
        with tables.overwriting(shards):
            return tables.change_shards(shards, _server_restore, path and path.resolve()), found  # type: ignore[attr-defined]
    for shard in shards:
        tables = _restored(found, tables, shard)
    return tables, found


def _restored(found, tables, shard):
    """Restore one shard from a chain, all of which is read before the first row changes."""
    spec = tables.spec

    def load(image):
        _verified(spec, described(tables.layout), [shard], image)
        return load_arrays(image, _leaves_of_shards(spec, [shard], image))

    with ThreadPoolExecutor(_THREADS) as pool:
        loaded = list(pool.map(load, found))
    with tables.overwriting([shard]):
        for name, stack in spec.stacks.items():
            if not found or is_delta(found[0].path.name):
                parts, over = empty_parts(stack, tables.layout[name]), loaded
                fill_initial(spec, tables.layout, name, shard, parts)
            else:  # the base holds all rows: another buffer for them would cost as much as reading them
                leaves, over = {part: leaf_name(name, shard, part) for part in tables.layout[name]}, loaded[1:]
                parts = {part: np.require(loaded[0].pop(leaf), requirements="W") for part, leaf in leaves.items()}
            for arrays in over:  # oldest first
                for part, table in parts.items():
                    _write_over(table, arrays, name, shard, part, spec.shards)
            tables = tables.with_shard(name, shard, parts)
    return tables


def _server_restore(server, shards, path):
    """Restore shards in place at their server, in groups: a copy of them would double the memory."""
    spec, layout = server.spec, described(server.layout)
    found = [] if path is None else chain(path)
    for image in found:
        _verified(spec, layout, shards, image)
    if not found or is_delta(found[0].path.name):
        for name, shard in itertools.product(spec.stacks, shards):
            server.reset_shard(name, shard)
    for image in found:  # oldest first
        for group in _shard_groups(spec, shards, image):
            arrays = load_arrays(image, _leaves_of_shards(spec, group, image))
            for name, shard in itertools.product(spec.stacks, group):
                for part, table in server.writable(name, shard).items():
                    _write_over(table, arrays, name, shard, part, spec.shards)
            del arrays  # before the next group is read


def _shard_groups(spec, shards, image) -> Iterator[list[int]]:
    """Split the shards into groups of about `_GROUP_BYTES` in an image.

    Opening a small delta for each shard would cost more than reading it.
    """
    sizes = collections.Counter[str]()
    for file, (size, _) in image.files.items():
        sizes[file.split("/")[1] if file.count("/") > 1 else ""] += size
    group, total = [], 0
    for shard in shards:
        group.append(shard)
        total += sum(sizes[leaf] for leaf in _leaves_of_shards(spec, [shard], image))
        if total >= _GROUP_BYTES:
            yield group
            group, total = [], 0
    if group:
        yield group


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


def _image_at(path: Path) -> Path:
    """Return the path if it is an image, else the newest image of the directory."""
    found = path if is_image(path) else newest(path)
    if found is None:
        raise ValueError(f"{path} holds no image: give the directory of a run that has saved one, or None.")
    return found


def _verified(spec, layout, shards, image):
    """Raise if an image is of other tables, or if its files of some shards are damaged."""
    check_matches(image, "spec", spec.digest, image.spec)
    check_matches(image, "row optimizer slots", layout, image.layout)
    verify(image, _leaves_of_shards(spec, shards, image))


def _leaves_of_shards(spec, shards, image):
    """Return the names of an image's leaves for some shards."""
    parts = [(name, part) for name in spec.stacks for part in (ROW_IDS, *image.layout[name])]
    mine = {leaf_name(name, shard, part) for name, part in parts for shard in shards}
    return sorted(mine & leaves_of(image))


def restore_for_prediction(
    path: str | Path,
    spec: EmbeddingSpec,
    params: PyTree,
    replica: int | Literal["mean"] = "mean",
    home: type[HostTables] | type[DeviceTables] = HostTables,
    mesh: jax.sharding.Mesh | None = None,
    cast: bool = False,
) -> tuple[TrainState, Image]:
    """Restore the model of a run, without the state of either optimizer, for `make_eval_step`.

    Args:
      path: as for `restore`: an image, a row delta with its dense state, or a directory of them.
      spec: spec of the run; shards and lookups may differ.
      params: dense parameters of the model, without a replica axis; only shapes and dtypes are used, as from
        `jax.eval_shape(model.init, ...)`.
      replica: replica whose parameters to take, from 0 to R - 1, or "mean" for the mean of all (see
        `jaxrec.shadowsync.with_mean_replica`); the rows are shared by all replicas.
      home: class of the tables, `HostTables` or `DeviceTables`.
      mesh: as for `make_eval_step`; one device if None.
      cast: accept parameters of another dtype, and cast them to those of `params`.

    Returns:
      A state with an empty optimizer state and rows without slots, and the manifest of the image.

    Raises:
      ValueError: as `restore`; there is no such replica.
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
    shapes = jax.eval_shape(lambda tree: tree, params)
    mesh = as_mesh(mesh)
    no_slots = sgd(0.0)  # this optimizer has no slots
    tables = HostTables.create(spec, no_slots) if home is HostTables else DeviceTables.create(spec, no_slots, mesh)
    blank = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    dense = DenseState(
        put_on_mesh(jnp.zeros((), jnp.int32), mesh, EVERYWHERE),
        put_on_mesh(replicate(blank, mesh.shape[REPLICA]), mesh, PER_REPLICA),
        (),
    )
    return with_chain(path, lambda found: fill(found, TrainState(dense, tables), cast, replica))


def spec_of(image: Image) -> EmbeddingSpec:
    """Return the spec of an image's tables, with one lookup per table.

    Args:
      image: from `read_manifest` or `restore`.

    Returns:
      Tables, shards and seed of the image; images do not record the original lookups.
    """
    tables = {name: Table(rows, width, image.scales[name]) for name, (rows, width) in image.tables.items()}
    return EmbeddingSpec(tables, {name: Lookup(name) for name in tables}, image.shards, image.seed)


def read_tables(
    path: str | Path, tables: Sequence[str], parts: Sequence[str] = ("value",)
) -> dict[str, dict[str, np.ndarray]]:
    """Read whole tables from an image or a chain of deltas, without a state to restore into.

    Peak memory: these tables, and one shard of their stack.

    Args:
      path: an image, a delta, or a directory of them: then the newest intact one.
      tables: table names.
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
        _write_rows_over(other, spec, rows)
    return rows


def _write_rows_over(image: Image, spec: EmbeddingSpec, rows: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Write an image's rows of some tables over `rows`, one shard at a time."""
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
    """Raise if slots are requested: images do not record their initial values."""
    if set(parts) != {"value"}:
        raise ValueError(
            f"{image.path} goes over initial rows, and what their slots {[p for p in parts if p != 'value']} begin "
            "with stands in no image: read 'value' alone, or restore it with its row optimizer and save that state "
            "with a Checkpointer, as a whole image."
        )


def _layout_of(image: Image) -> Layout:
    """Return the layout in a manifest, without initial slot values, which are not needed here."""
    return Layout(
        {
            name: {part: Part(width, dtype, None) for part, (width, dtype) in parts.items()}
            for name, parts in image.layout.items()
        }
    )
