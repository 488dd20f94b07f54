"""Use of a trained run: wrong models, other rows, files that are missing, damaged or of another run."""

import json
import shutil

import evaluate
import export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from click_model import pair_batch, pair_loss
from criteo_files import criteo_lines, write_lines
from trained_run import criteo_run, synthetic_run, without_labels

import jaxrec
from abuse import refused, situation
from jaxrec.checkpoint import read_tables, restore_for_prediction, snapshot, write_image
from jaxrec.data.criteo import prepare
from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, adagrad, embedding_matrix

SPEC = EmbeddingSpec({"user": Table(40, 4), "item": Table(9, 4)}, {"pair": Lookup(("user", "item"))}, shards=2)
OTHER = EmbeddingSpec({"user": Table(40, 4), "item": Table(8, 4)}, SPEC.lookups, shards=2)
PARAMS, ROWS = {"bias": jnp.zeros(3)}, adagrad(0.1)
TASK = jaxrec.Task(SPEC, pair_loss, optax.adam(0.1), ROWS)


def saved(directory, step=1):
    state = TASK.init(PARAMS, "host")
    state = state._replace(dense=state.dense._replace(step=jnp.asarray(step, jnp.int32)))
    write_image(directory / f"step_{step:08d}", snapshot(state, run="run"))
    return state


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


# ---- a model


@situation("predicting with tables of other sizes", ValueError, "saved with other tables.*'item': \\[9, 4\\]")
def _(directory):
    saved(directory)
    restore_for_prediction(directory, OTHER, PARAMS)


@situation("predicting with another model", ValueError, "other dense state.*params\\['weights'\\]")
def _(directory):
    saved(directory)
    restore_for_prediction(directory, SPEC, {"weights": jnp.zeros(3)})


@situation("parameters of another dtype", ValueError, "other dense state.*float32.*wanted.*bfloat16")
def _(directory):
    saved(directory)
    restore_for_prediction(directory, SPEC, {"bias": jnp.zeros(3, jnp.bfloat16)})


@situation("the last replica counted from the end", ValueError, "replica=-1, but .* holds 1 of them")
def _(directory):
    saved(directory)
    restore_for_prediction(directory, SPEC, PARAMS, replica=-1)


@situation("tables instead of their place", ValueError, "'device', 'pinned' or 'host' memory, not HostTables")
def _(directory):
    restore_for_prediction(directory, SPEC, PARAMS, place=HostTables.create(SPEC, ROWS))


@situation("training goes on with a state for prediction", ValueError, "tables have slots|optimizer state is")
def _(directory):
    saved(directory)
    state, _image = restore_for_prediction(directory, SPEC, PARAMS)
    TASK.step(state, pair_batch())


# ---- embeddings


def matrix(*ids):
    return embedding_matrix(HostTables.create(SPEC, ROWS), *ids)


EMBEDDINGS = {
    "table 'pair' is none": lambda _: matrix("pair"),
    "1 ids of 'item' are outside of it, the first is -1": lambda _: matrix("item", [0, -1]),
    "ids of 'item' are bool": lambda _: matrix("item", np.ones(9, bool)),
}
refused(EMBEDDINGS)


@situation("the slots of a table that has others", ValueError, "have no \\['momentum'\\], only")
def _(directory):
    saved(directory)
    read_tables(directory, ["item"], ["momentum"])


# ---- experiments/evaluate.py


def evaluated(run, directory, *path, **flags):
    """Evaluate a run; a refused evaluation must leave no results.json."""
    try:
        evaluate.main(evaluate.Config(run_directory=run, workdir=directory / "e", path=path, **flags))
    finally:
        assert not (directory / "e" / "results.json").exists()


@situation("evaluating a directory that is no run", ValueError, "is no run: it has no config.json")
def _(directory):
    evaluated(directory, directory)


@situation("evaluating a run of another experiment", ValueError, "is a run of oac_throughput")
def _(directory):
    (directory / "config.json").write_text('{"experiment": "oac_throughput"}')
    evaluated(directory, directory)


@situation("evaluating a run whose config.json is cut", ValueError, "config.json is damaged")
def _(directory):
    (directory / "config.json").write_text('{"experiment": "tr')
    evaluated(directory, directory)


@situation("evaluating a run that has saved nothing yet", ValueError, "holds no image yet")
def _(directory):
    (directory / "config.json").write_text('{"experiment": "train", "data": "synthetic", "path": [], "model": "dlrm"}')
    evaluated(directory, directory)


@situation("Criteo rows for a run over synthetic clicks", ValueError, "Criteo rows mean nothing to it")
def _(directory):
    run, *_ = synthetic_run(directory, trained=False)
    evaluated(run, directory, write_lines(directory / "rows.txt", criteo_lines(3)))


@situation("an evaluation inside of its run", ValueError, "was begun with experiment train, not evaluate")
def _(directory):
    run, *_ = synthetic_run(directory, trained=False)
    files = lambda: sorted(path for path in run.rglob("*") if path.name != "lock")
    before = files()
    try:
        evaluate.main(evaluate.Config(run_directory=run, workdir=run))
    finally:
        assert files() == before


@situation("groups of a field that there is not", ValueError, "--group user is no field of the run .* C1, C2")
def _(directory):
    run, *_ = synthetic_run(directory, trained=False)
    evaluate.main(evaluate.Config(run_directory=run, workdir=directory / "e", group="user"))


@situation("an interval from one draw", ValueError, "draws=1 must be a whole number from 2")
def _(directory):
    run, *_ = synthetic_run(directory, trained=False)
    evaluate.main(evaluate.Config(run_directory=run, workdir=directory / "e", bootstrap=1))


@situation("segments of rows without labels", ValueError, "need labels, and these rows have none")
def _(directory):
    run, lines, *_ = criteo_run(directory, trained=False)
    evaluated(run, directory, write_lines(directory / "rows.txt", without_labels(lines)), segments=("C1",))


@situation("the prepared directory of a run is gone", ValueError, "prepared directory of .* is not at .*--prepared")
def _(directory):
    run, lines, *_ = criteo_run(directory, trained=False)
    shutil.rmtree(directory / "prepared")
    evaluated(run, directory, write_lines(directory / "rows.txt", lines))


@situation("the prepared directory of a run has moved, and --prepared finds it")
def _(directory):
    run, lines, *_ = criteo_run(directory, trained=False)
    (directory / "prepared").rename(directory / "moved")
    rows, moved = write_lines(directory / "rows.txt", lines[:5]), directory / "moved"
    evaluate.main(evaluate.Config(run_directory=run, workdir=directory / "e", path=(rows,), prepared=moved))
    assert json.loads((directory / "e" / "results.json").read_text())["rows"] == 5


@situation("the vocabulary of a run is gone", ValueError, "vocabulary.npz is missing, cut or damaged .*No such file")
def _(directory):
    run, lines, *_ = criteo_run(directory, trained=False)
    (directory / "prepared" / "vocabulary.npz").unlink()
    evaluated(run, directory, write_lines(directory / "rows.txt", lines))


@situation("the vocabulary of a run is damaged", ValueError, "vocabulary.npz is missing, cut or damaged .*not a zip")
def _(directory):
    run, lines, *_ = criteo_run(directory, trained=False)
    path = directory / "prepared" / "vocabulary.npz"
    path.write_bytes(path.read_bytes()[:-40])
    evaluated(run, directory, write_lines(directory / "rows.txt", lines))


def swapped(lines):
    """The same rows with two categories exchanged, so that the vocabulary has the same size."""
    a, b = "00001eef", "00003dde"
    return [line.replace(a, "x").replace(b, a).replace("x", b) for line in lines]


@situation("another vocabulary of the same sizes as --prepared", ValueError, "another vocabulary .*digest")
def _(directory):
    run, lines, *_ = criteo_run(directory, trained=False)
    prepare([write_lines(directory / "swapped.txt", swapped(lines))], directory / "other", min_count=3)
    evaluated(run, directory, directory / "train.txt", prepared=directory / "other")


@situation("a directory of another vocabulary as --path", ValueError, "its ids mean other categories")
def _(directory):
    run, lines, *_ = criteo_run(directory, noted=False, trained=False)
    prepare([write_lines(directory / "swapped.txt", swapped(lines))], directory / "other", min_count=3)
    evaluated(run, directory, directory / "other")


@situation("hashed rows of a run divided by another seed as --path", ValueError, "trained on some of its test rows")
def _(directory):
    run, *_ = criteo_run(directory, trained=False, hash_cap=50, split="random")
    prepare([directory / "train.txt"], directory / "other", hash_cap=50, split="random", seed=1)
    evaluated(run, directory, directory / "other")


@situation("some files of a run as --path, divided anew", ValueError, "trained on some of its test rows")
def _(directory):
    run, *_ = criteo_run(directory, trained=False, hash_cap=50)
    more = write_lines(directory / "more.txt", criteo_lines(60, seed=1))
    prepare([directory / "train.txt", more], directory / "other", hash_cap=50)
    evaluated(run, directory, directory / "other")


@situation("the files of a run in another order as --path", ValueError, "trained on some of its test rows")
def _(directory):
    run, *_ = criteo_run(directory, trained=False, hash_cap=50)
    files = [directory / "train.txt", write_lines(directory / "more.txt", criteo_lines(240, seed=1))]
    prepare(files, directory / "both", hash_cap=50)
    prepare(files[::-1], directory / "other", hash_cap=50)
    evaluated(run, directory, directory / "other", prepared=directory / "both")


@situation("hashed rows of other files as --path, and the same division in another place")
def _(directory):
    run, *_ = criteo_run(directory, trained=False, hash_cap=50)
    more = write_lines(directory / "more.txt", criteo_lines(60, seed=1))
    prepare([more], directory / "other", hash_cap=50)
    prepare([directory / "train.txt"], directory / "again", hash_cap=50, block_rows=8)
    for name, rows in (("other", 10), ("again", 40)):
        flags = evaluate.Config(run_directory=run, workdir=directory / f"e_{name}", path=(directory / name,))
        evaluate.main(flags)
        assert json.loads((flags.workdir / "results.json").read_text())["rows"] == rows


@situation("a directory whose tables are larger than the run's", ValueError, "another vocabulary .*C1 has")
def _(directory):
    run, *_ = criteo_run(directory, noted=False, trained=False)
    prepare([directory / "train.txt"], directory / "other", hash_cap=50)
    evaluated(run, directory, directory / "train.txt", prepared=directory / "other")


@situation("files with labels and files without together", ValueError, "has labels and .* has none")
def _(directory):
    run, lines, *_ = criteo_run(directory, trained=False)
    bare = write_lines(directory / "bare.txt", without_labels(lines))
    evaluated(run, directory, directory / "train.txt", bare)


@situation("a bad line amid rows with labels", ValueError, "rows.txt, line 3: I1 is 'x'.*every line has its result")
def _(directory):
    run, lines, *_ = criteo_run(directory, trained=False)
    lines[2] = lines[2][:2] + "x" + lines[2][lines[2].index("\t", 2) :]
    evaluated(run, directory, write_lines(directory / "rows.txt", lines))


@situation("a line that is too short amid rows without labels", ValueError, "line 2: 38 fields, .* has 39")
def _(directory):
    run, lines, *_ = criteo_run(directory, trained=False)
    bare = without_labels(lines)
    bare[1] = bare[1].rpartition("\t")[0]
    evaluated(run, directory, write_lines(directory / "rows.txt", bare))


@situation("an evaluation that a bad line ended begins anew in its directory once the line is mended")
def _(directory):
    run, lines, *_ = criteo_run(directory, trained=False)
    rows = write_lines(directory / "rows.txt", [*lines[:4], "bad"])
    with pytest.raises(ValueError, match="line 5: 1 fields"):
        evaluated(run, directory, rows)
    write_lines(rows, lines[:5])
    evaluate.main(evaluate.Config(run_directory=run, workdir=directory / "e", path=(rows,)))


# ---- experiments/export.py


def exported(directory, *, to="a.npz", run=None, **flags):
    """Export from a run; a refused export must leave no file and touch no existing one."""
    before = sorted(path.name for path in directory.iterdir())
    try:
        export.main(export.Config(run_directory=run or directory, to=directory / to, **flags))
    finally:
        assert sorted(path.name for path in directory.iterdir()) in (before, sorted([*before, "a.npz"]))


@situation("an export over a file that is there", ValueError, "exists already: give another name")
def _(directory):
    (directory / "a.npz").write_text("dear")
    try:
        exported(directory, all=True)
    finally:
        assert (directory / "a.npz").read_text() == "dear"


@situation(
    "an export of rows that there are not", ValueError, "--ids \\[9, -1\\] are no rows of item, whose ids run from 0"
)
def _(directory):
    saved(directory)
    exported(directory, table="item", ids=(0, 9, -1))


def out_and_back(directory, change=lambda arrays: None, into="other", prepare_into=lambda into: None):
    """Export all, change the file, and import it again; a refused import must leave no image."""
    saved(directory / "images")
    export.main(export.Config(run_directory=directory / "images", to=directory / "a.npz", all=True, optimizer=True))
    change(directory / "a.npz")
    prepare_into(directory / into)
    before = [path for path in (directory / into).rglob("*") if path.is_file()]
    try:
        export.main(export.Config(back=directory / "a.npz", into=directory / into))
    except BaseException:
        left = [path for path in (directory / into).rglob("*") if path.is_file() and path.suffix != ".lock"]
        assert {path for path in left if path.name != "run.json"} <= set(before)
        raise


def edited(edit):
    def change(path):
        with np.load(path) as arrays:
            found = dict(arrays)
        edit(found)
        np.savez(path, **found)

    return change


BACK = {
    "is no file of `export.py --all`, or damaged": lambda directory: out_and_back(directory, damage),
    "is no file of `export.py --all`": lambda directory: out_and_back(
        directory, lambda path: np.savez(path, value=np.zeros((9, 4)))
    ),
    "'table.item.value' .* is float64\\[9, 4\\].* float32": lambda directory: out_and_back(
        directory, edited(lambda arrays: arrays.update({"table.item.value": np.zeros((9, 4))}))
    ),
    "has no 'table.item.value'": lambda directory: out_and_back(
        directory, edited(lambda arrays: arrays.pop("table.item.value"))
    ),
    "give one of --table NAME, --all, --serve DIR and --back FILE": lambda directory: exported(directory),
    "--ids are rows of one table": lambda directory: exported(directory, all=True, ids=(1,)),
    "--state best is of a run, and --run .* is no run's directory": lambda directory: exported(
        directory, all=True, state="best"
    ),
    "must end in .npz": lambda directory: exported(directory, table="item", to="a.csv"),
    "is whole and of a later step than 1": lambda directory: out_and_back(
        directory, prepare_into=lambda into: saved(into, 2)
    ),
    "step_00000001 exists already": lambda directory: out_and_back(directory, into="images"),
}
refused(BACK)


@situation("a table of one's own in an exported file comes back as it is, also from a packed file")
def _(directory):
    mine = np.arange(36, dtype=np.float32).reshape(9, 4)

    def change(path):
        edited(lambda arrays: arrays.update({"table.item.value": mine}))(path)
        with np.load(path) as arrays:
            np.savez_compressed(path, **arrays)

    out_and_back(directory, change)
    found, _image = restore_for_prediction(directory / "other", SPEC, PARAMS)
    assert (embedding_matrix(found.tables, "item") == mine).all()


@situation("an image among those of another run", ValueError, "of run other, and this is run run")
def _(directory):
    def another(into):
        state = TASK.init(PARAMS, "host")
        write_image(into / "step_00000000", snapshot(state, run="other"))

    out_and_back(directory, prepare_into=another)
