"""Export the embeddings and dense weights of a run to .npz files, or import them as an image.

    python experiments/export.py --run runs/a --table C3 --ids 5 7 --to rows.npz     some rows, or the whole table
    python experiments/export.py --run runs/a --all --to model.npz                   all tables, all dense weights
    python experiments/export.py --run runs/a --all --optimizer --to state.npz       with the state of both optimizers
    python experiments/export.py --run runs/a --serve DIR                            for a server, without jaxrec
    python experiments/export.py --back state.npz --into runs/b/checkpoints          an image of it, bit for bit

--ids are rows of the table, shown and stored with their names if there is a schema. --run takes a run, an image
directory or one image; a run that keeps its best state exports that one, unless --state last is given. Memory: the
largest table plus one shard. An image from a file written without --optimizer can only predict.
"""

import dataclasses
import json
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from main import serving
from main.cli import command_line, refuse, say
from main.signals import stop_on_signals
from main.trained import State, images_directory, open_run, vocabularies_of, words_of

from jaxrec.checkpoint import Checkpointer, DamagedImage, Image, Snapshot, deltas, read_manifest, spec_of, write_image
from jaxrec.checkpoint.format import is_intact, leaves_of, load_arrays
from jaxrec.checkpoint.restore import tables_of_chain, with_chain
from jaxrec.checkpoint.state import dense_name, leaf_name
from jaxrec.embedding import Layout
from jaxrec.embedding.tables import initial_parts, range_of
from jaxrec.files import PARTIAL, atomic_write, local_path, make_directory

AT_ONCE_BYTES = 1 << 26  # limit for tables read together, or the size of the largest table
MANIFEST = "manifest"  # name of the image's manifest in the file, as JSON
_OF_FILES = {"path", "format", "files", "digest", "parents"}  # fields of the image's files, not of its state


@dataclasses.dataclass(frozen=True)
class Config:
    """Flags of the export."""

    run_directory: Annotated[Path | None, tyro.conf.arg(name="run")] = None
    """The directory of a run, of images, or one image."""
    state: State | None = None
    """The best or the last state of the run, or that of a step; by default the best one if the run keeps it."""
    table: str | None = None
    """Name of a table, such as C3."""
    ids: tuple[int, ...] = ()
    """Rows of that table; all if none is given."""
    prepared: Path | None = None
    """For --serve, and the names of --ids: current location of the run's prepared directory, if it has moved."""
    all: bool = False
    """All tables and all dense weights."""
    optimizer: bool = False
    """Include the slots of the rows, and with --all the state of the dense optimizer."""
    to: Path | None = None
    """The .npz file to write."""
    serve: Path | None = None
    """A directory in which to write what a server needs, of a run of --data tabular: see docs/serving.md."""
    back: Path | None = None
    """A file written by --all, to import."""
    into: Path | None = None
    """Run or image directory in which to write its image."""


def export_table(config: Config, found: list[Image], to: Path) -> str:
    """Write a table or some of its rows: `value`, slots if requested, `ids` if given, and their `names` if known.

    Returns:
      A description.
    """
    assert config.table is not None
    image, ids = found[-1], np.asarray(config.ids, np.int64)
    spec = spec_of(image)
    parts = parts_of(image, config.table, config.optimizer)
    rows = tables_of_chain(found, [config.table], parts)[config.table]
    if len(ids):
        last = spec.tables[config.table].rows - 1
        wrong = ids[(ids < 0) | (ids > last)]
        refuse(
            {f"--ids {wrong[:3].tolist()} are no rows of {config.table}, whose ids run from 0 to {last}.": len(wrong)}
        )
        rows = {"ids": ids, **{part: array[ids] for part, array in rows.items()}}
        if names := names_of(config):
            rows |= {"names": np.array(names)}
            say("\n".join(f"{row:>10}  {name!r}" for row, name in zip(config.ids, names, strict=True)))
    with atomic_write(to) as partial, open(partial, "wb") as file:
        np.savez(file, allow_pickle=False, **rows)
    return f"{len(rows['value'])} rows of {config.table}: {', '.join(rows)}"


def names_of(config: Config) -> list[str]:
    """Return what the rows of --ids stand for; nothing if that is not known, as where a table hashes."""
    assert config.run_directory is not None
    if not (local_path(config.run_directory) / "config.json").exists():
        return []  # images alone
    try:
        known = vocabularies_of(open_run(config.run_directory), config.prepared)
        return [name or "<missing>" for name in known[config.table or ""].decode(config.ids)]
    except (KeyError, ValueError):
        return []


def parts_of(image: Image, table: str, optimizer: bool) -> list[str]:
    """Return the exported parts of a table's rows; an unknown table is refused where it is read."""
    width = image.tables.get(table, [0, 0])[1]
    return [part for part in image.layout.get(f"width_{width}", ["value"]) if optimizer or part == "value"]


def export_all(config: Config, found: list[Image], to: Path) -> str:
    """Write tables as `table.NAME.PART`, dense weights as `dense.PATH`, and the manifest; return a description."""
    image = found[-1]
    manifest = manifest_of(image, config.optimizer)
    with atomic_write(to) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
        write_array(archive, MANIFEST, np.array(json.dumps(manifest)))
        dense = load_arrays(image, leaves_of(image, "dense."))
        for number, (path, *_) in enumerate(image.dense):
            if dense_name(number) in dense and path in {kept for kept, *_ in manifest["dense"]}:
                write_array(archive, f"dense{path}", dense[dense_name(number)])
        for names in together(image, config.optimizer):
            write_tables(archive, found, names, parts_of(image, names[0], config.optimizer))
    return f"{len(image.tables)} tables and {len(manifest['dense'])} dense leaves"


def write_tables(archive: zipfile.ZipFile, found: list[Image], names: list[str], parts: list[str]) -> None:
    """Add some tables; a separate function, so that they are freed before the next ones are read."""
    for name, rows in tables_of_chain(found, names, parts).items():
        for part, array in rows.items():
            write_array(archive, f"table.{name}.{part}", array)


def manifest_of(image: Image, optimizer: bool) -> dict[str, Any]:
    """Return the manifest of the exported state; without `optimizer`, as if trained without optimizers."""
    fields = {key: value for key, value in image._asdict().items() if key not in _OF_FILES}
    if not optimizer:
        fields["layout"] = {name: {"value": parts["value"]} for name, parts in image.layout.items()}
        fields["dense"] = [leaf for leaf in image.dense if not leaf[0].startswith(".opt_state")]
    return fields


def together(image: Image, optimizer: bool) -> Iterator[list[str]]:
    """Yield groups of tables to read together: of one width, up to AT_ONCE_BYTES or the largest table's size.

    Each read passes over all shards, and takes as much memory as its tables.
    """
    most = max(AT_ONCE_BYTES, *(bytes_of(image, [name], optimizer) for name in image.tables))
    for width in dict.fromkeys(width for _, width in image.tables.values()):
        waiting: list[str] = []
        for name in (name for name, (_, own) in image.tables.items() if own == width):
            if waiting and bytes_of(image, [*waiting, name], optimizer) > most:
                yield waiting
                waiting = []
            waiting.append(name)
        yield waiting


def bytes_of(image: Image, tables: list[str], optimizer: bool) -> int:
    """Return the size of the rows of some tables, in bytes."""
    return sum(
        image.tables[name][0] * width * np.dtype(dtype).itemsize
        for name in tables
        for part in parts_of(image, name, optimizer)
        for width, dtype in [image.layout[f"width_{image.tables[name][1]}"][part]]
    )


def write_array(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    """Add one array to an open .npz file."""
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array(file, np.ascontiguousarray(array).reshape(array.shape), allow_pickle=False)


# ---- import


class Unpacked:
    """Arrays of an .npz file, unpacked into one file each, from which any rows can be read."""

    def __init__(self, path: Path, directory: Path):
        self._path, self._directory = path, directory
        try:
            with zipfile.ZipFile(path) as archive:
                self._files = {member.removesuffix(".npy"): str(n) for n, member in enumerate(archive.namelist())}
                for name, file in self._files.items():
                    # Reading verifies the archive's checksums; mapping would not.
                    with archive.open(f"{name}.npy") as packed, open(directory / file, "wb") as unpacked:
                        shutil.copyfileobj(packed, unpacked, 1 << 20)
            self.manifest = json.loads(str(self[MANIFEST][()]))
            self.image = Image(**self.manifest, path=path, format=0, files={}, parents={}, digest="")
            is_whole_spec = spec_of(self.image).digest == self.image.spec
        except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no file of `export.py --all`, or damaged: {error!s:.300}") from None
        refuse({f"{path} is damaged: its manifest does not fit its spec's digest.": not is_whole_spec})

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._files:
            raise ValueError(f"{self._path} has no {name!r}: give a file that `export.py --all` has written.")
        return np.load(self._directory / self._files[name], mmap_mode="r", allow_pickle=False)

    def of_shape(self, name: str, shape: Sequence[int], dtype: str) -> np.ndarray:
        """Return an array, checked for shape and dtype."""
        array = self[name]
        if array.dtype.kind == "V":  # dtypes unknown to numpy, such as bfloat16
            array = array.view(np.dtype(dtype))
        if list(array.shape) != list(shape) or str(array.dtype) != dtype:
            raise ValueError(
                f"{name!r} in {self._path} is {array.dtype}{list(array.shape)}, and the manifest wants "
                f"{dtype}{list(shape)}: cast or reshape it."
            )
        return array


def image_of(arrays: Unpacked) -> Snapshot:
    """Return the exported state as a snapshot; rows are read shard by shard while it is written."""
    image, dense = arrays.image, {}
    for number, (path, shape, dtype) in enumerate(image.dense):
        if 0 in shape:
            continue
        if dtype.startswith("key<"):
            dense[dense_name(number)] = np.array(arrays[f"dense{path}"])
        else:
            dense[dense_name(number)] = np.array(arrays.of_shape(f"dense{path}", shape, dtype))
    for name, (rows, width) in image.tables.items():  # checked before anything is written
        for part, (own, dtype) in image.layout[f"width_{width}"].items():
            arrays.of_shape(f"table.{name}.{part}", (rows, own), dtype)
    return Snapshot(dense, {**arrays.manifest, "parents": {}}, shards_of(arrays))


def shards_of(arrays: Unpacked) -> Iterator[dict[str, np.ndarray]]:
    """Yield {leaf: rows}, shard by shard of each stack."""
    image, spec = arrays.image, spec_of(arrays.image)
    for name in spec.stacks:
        for shard in range(spec.shards):
            parts = image.layout[name].items()
            yield {leaf_name(name, shard, part): shard_of(arrays, name, shard, part, *one) for part, one in parts}


def shard_of(arrays: Unpacked, name: str, shard: int, part: str, width: int, dtype: str) -> np.ndarray:
    """Return one part of the rows of a stack's shard, [V / S, width]; a row of no table gets its initial value."""
    spec = spec_of(arrays.image)
    stack = spec.stacks[name]
    rows = np.zeros((stack.rows_per_shard, width), dtype)
    if part == "value":
        last = np.array([stack.rows - stack.shards + shard])  # the only row of a shard that can belong to no table
        rows[-1] = initial_parts(spec, Layout({name: {}}), name, last)["value"][0]
    for table in stack.tables:
        _, first, _ = range_of(spec, table)
        begin = (shard - first) % stack.shards  # the table's first row on this shard
        mine, place = arrays[f"table.{table}.{part}"][begin :: stack.shards], (first + begin) // stack.shards
        rows[place : place + len(mine)] = mine
    return rows


def bring_back(path: Path, into: Path) -> Image:
    """Write an image from an exported file."""
    refuse({f"{path} is no file: give what `export.py --all` has written.": not path.is_file()})
    directory, run = images_directory(into), run_of(path)
    with Checkpointer(directory, run=run) as saver:
        # Named so that the directory's next saver removes it if this process is killed.
        with tempfile.TemporaryDirectory(dir=directory, prefix="step_", suffix=PARTIAL) as unpacked:
            arrays = Unpacked(path, Path(unpacked))
            check_no_newer_image(saver, arrays.image.step)
            return write_image(saver.path_of(arrays.image.step), image_of(arrays))


def run_of(path: Path) -> str | None:
    """Return the run id of an exported file, or None if it has none."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return json.loads(str(arrays[MANIFEST][()]))["run"] or None
    except (zipfile.BadZipFile, zlib.error, LookupError, EOFError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no file of `export.py --all`, or damaged: {error!s:.200}") from None


def check_no_newer_image(saver: Checkpointer, step: int) -> None:
    """Refuse a directory with images of this step, or with images that would pass for newer ones."""
    saver.check_no_newer_image(step)
    there = saver.path_of(step)
    refuse({f"{there} exists already: give another --into, or remove it.": is_intact(there)})
    for path in deltas(saver.directory):
        try:
            newer = read_manifest(path).step >= step
        except DamagedImage:
            continue
        refuse({f"{path} would pass for newer than step {step}: give another --into.": newer})


def main(config: Config) -> dict[str, Any]:
    """Export or import; return what was written and where."""
    refuse(rules(config))
    with stop_on_signals():
        if config.back is not None and config.into is not None:
            image = bring_back(local_path(config.back), config.into)
            more = "" if any(leaf[0].startswith(".opt_state") for leaf in image.dense) else ": it can predict"
            say(f"wrote {image.path}, an image of step {image.step} of run {image.run}{more}")
            return {"written": str(image.path), "step": image.step}
        assert config.run_directory is not None
        if config.serve is not None:
            to = local_path(config.serve)
            image = serving.write(open_run(config.run_directory, config.state), to, config.prepared)
            say(f"wrote {to}, of {words_of(image)}; python {to}/serve.py rows.csv predictions.csv")
            return {"written": str(to), "step": image.step}
        assert config.to is not None
        to, write = local_path(config.to), export_all if config.all else export_table
        make_directory(to.parent)
        images = images_directory(config.run_directory, config.state)
        written = lambda found: f"{write(config, found, to)}, of {words_of(found[-1])},"
        # Restarted if the active run removes an image while it is read.
        say(f"wrote {with_chain(images, written, dense=config.all)} to {to}")
        return {"written": str(to)}


def rules(config: Config) -> dict[str, object]:
    """Return {problem and remedy: whether it applies} for flags that do not fit together."""
    out = config.table is not None or config.all
    asked = [config.table is not None, config.all, config.serve is not None, config.back is not None]
    return {
        "give one of --table NAME, --all, --serve DIR and --back FILE.": sum(asked) != 1,
        "--serve DIR needs --run DIR, which it is of.": config.serve is not None and config.run_directory is None,
        f"--serve {config.serve} exists already: give another name.": (
            config.serve and local_path(config.serve).exists()
        ),
        "--to, --optimizer and --ids are not for --serve: leave them out.": (
            config.serve is not None and (config.to or config.optimizer or config.ids)
        ),
        "--run DIR and --to FILE.npz are needed: from where, and where to.": (
            out and (config.run_directory is None or config.to is None)
        ),
        "--back FILE needs --into DIR: where its image goes.": config.back is not None and config.into is None,
        "--into is for --back alone: an export goes --to a file.": config.back is None and config.into is not None,
        "--run, --to, --state, --optimizer and --ids are for exports: --back takes all from its file.": (
            config.back is not None
            and (config.run_directory or config.to or config.state or config.optimizer or config.ids)
        ),
        f"--state {config.state} is of a run, and --run {config.run_directory} is no run's directory: leave it out.": (
            config.state and config.run_directory and not (config.run_directory / "config.json").exists()
        ),
        f"--prepared {config.prepared} is for the names of --ids: give --table NAME --ids N, or leave it out.": (
            config.prepared is not None and not config.ids and config.serve is None
        ),
        "--ids are rows of one table: give --table NAME, or leave them out.": config.ids and config.table is None,
        f"--to {config.to} must end in .npz, as what it will be.": config.to and config.to.suffix != ".npz",
        f"--to {config.to} exists already: give another name.": config.to and config.to.exists(),
    }


if __name__ == "__main__":
    command_line(main, Config, __doc__)
