"""Streams of clicks and of a prepared table: parts without a common row, runs that go on at any step, and flags."""

import inspect
import itertools
import re
from collections import Counter
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from main import click_data, table_data
from main.cli import Run
from main.click_data import criteo_clicks, criteo_of_seeds, data_of_blocks, set_apart, synthetic_clicks
from main.config import Config, config_of, parse
from main.model import make_model
from main.pools import SharedStream
from main.sources import PREPARATION, Criteo, Tabular, prepared_directory
from main.table_summary import open_schema, words
from studies.reference import MLPERF_HOTS, Job, in_bags, reference_work, synthetic
from trained_run import criteo_lines, write_lines

from jaxrec.data.criteo import open_split, prepare
from jaxrec.data.loader import Loader
from jaxrec.data.synthetic import SyntheticClicks
from jaxrec.data.tabular import AtRandom, Categorical, Dense, MultiHot, Schema, Sequence
from jaxrec.data.tabular import prepare as prepare_table
from jaxrec.embedding import rowwise_adagrad, sgd

LINES, TRAINED = 240, 200
CARDINALITIES = (30, 20, 10)


def raw_file(path, lines=LINES):
    """Criteo lines whose first feature is the line number."""
    rng = np.random.default_rng(0)
    line = lambda number: [number % 2, number, *rng.integers(0, 50, 12), *(f"{x:08x}" for x in rng.integers(0, 9, 26))]
    path.write_text("".join("\t".join(map(str, line(number))) + "\n" for number in range(lines)))
    return path


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """{split: 240 lines prepared in blocks of 16}."""
    place = tmp_path_factory.mktemp("criteo")
    source = raw_file(place / "train.txt")
    for split in ("time", "random"):
        prepare([source], place / split, hash_cap=7, split=split, block_rows=16, blocks_per_shard=3)
    return {split: place / split for split in ("time", "random")}


def lines_of(batches):
    """The first dense feature of each example with weight: it identifies the line and grows with its number."""
    found = [batch.dense[batch.weight > 0, 0] for batch in batches]
    return np.concatenate(found) if found else np.zeros(0)


def assert_same_batches(a, b):
    for one, other in zip(a, b, strict=True):
        np.testing.assert_array_equal(one.ids["sparse"], other.ids["sparse"])
        for name in ("dense", "label", "weight"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


# Steps

ORDERS = {"epochs": st.integers(1, 4), "shuffle": st.booleans(), "seed": st.integers(0, 3)}


@given(data=st.data(), batch_size=st.integers(1, 5), steps=st.integers(1, 7), **ORDERS)
@settings(max_examples=40)
def test_a_synthetic_run_goes_on_at_any_step(data, batch_size, steps, epochs, shuffle, seed):
    made = lambda: synthetic_clicks(CARDINALITIES, batch_size, steps, seed, 2, 8, epochs=epochs, shuffle=shuffle)
    whole, first = list(made().train(0)), data.draw(st.integers(0, epochs * steps), label="first")
    assert len(whole) == made().steps == epochs * steps
    assert_same_batches(made().train(first), whole[first:])
    once = list(SyntheticClicks(CARDINALITIES, seed=seed).stream(batch_size, batches=steps))
    by_content = lambda batches: sorted((batch.dense.tobytes(), batch.label.tobytes()) for batch in batches)
    for epoch in range(epochs):
        mine = whole[epoch * steps : (epoch + 1) * steps]
        assert by_content(mine) == by_content(once)
        if not shuffle:
            assert_same_batches(mine, once)


@given(
    data=st.data(), batch_size=st.integers(1, 90), split=st.sampled_from(["time", "random"]), padded=st.booleans(),
    limit=st.none() | st.integers(1, 12), share=st.sampled_from([0.0, 0.05, 0.3]), **ORDERS,
)  # fmt: skip
@settings(max_examples=25)
def test_a_criteo_run_goes_on_at_any_step(
    directories, data, batch_size, split, padded, limit, share, epochs, shuffle, seed
):
    made = lambda: criteo_clicks(
        directories[split], batch_size, limit, padded=padded, epochs=epochs, shuffle_seed=seed if shuffle else None,
        validation_fraction=share,
    )  # fmt: skip
    clicks = made()
    whole, first = list(clicks.train(0)), data.draw(st.integers(0, clicks.steps), label="first")
    assert len(whole) == clicks.steps == min(epochs * clicks.epoch_steps, limit or 10**9)
    assert_same_batches(made().train(first), whole[first:])
    counts = np.cumsum([0, *(batch.weight.sum() for batch in whole)])
    assert [clicks.examples_after(step) for step in range(len(counts))] == counts.tolist()
    assert clicks.examples == counts[-1]


def test_a_step_that_the_run_does_not_have_is_refused_at_once(directories):
    for data in (synthetic_clicks(CARDINALITIES, 4, 3, 0, 1, epochs=2), criteo_clicks(directories["time"], 50)):
        assert not list(data.train(data.steps))
        for first in (-1, data.steps + 1, 0.5):
            with pytest.raises(ValueError, match="first=.* must be a whole number from 0 to .*, the steps of the run"):
                data.train(first)


# Epochs and order


def test_one_pass_in_the_order_of_the_file_is_what_it_always_was(directories):
    assert_same_batches(
        criteo_clicks(directories["time"], 32).train(0), Loader(open_split(directories["time"], "train"), 32)
    )


@pytest.mark.parametrize("split", ["time", "random"])
@pytest.mark.parametrize("share", [0.0, 0.25])
def test_each_epoch_trains_every_row_once_in_an_order_of_its_own(directories, split, share):
    flags = {"batch_size": 16, "epochs": 3, "validation_fraction": share}
    epochs = {}
    for seed in (None, 0, 1):
        data = criteo_clicks(directories[split], shuffle_seed=seed, **flags)
        whole = list(data.train(0))
        parts = [whole[epoch * data.epoch_steps :][: data.epoch_steps] for epoch in range(3)]
        epochs[seed] = [lines_of(part) for part in parts]
    in_order = epochs[None][0]
    assert len(in_order) == data.epoch_examples and (np.diff(in_order) > 0).all()
    for seed, orders in epochs.items():
        for lines in orders:
            np.testing.assert_array_equal(np.sort(lines), in_order)
            assert (seed is None) == np.array_equal(lines, in_order)
    different = [lines.tobytes() for seed in (0, 1) for lines in epochs[seed]]
    assert len(set(different)) == 6


# Training, validation and test sets


@pytest.mark.parametrize("split", ["time", "random"])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.99])
def test_train_validation_and_test_have_no_row_in_common_and_are_all_rows(directories, split, share):
    data = criteo_clicks(directories[split], 32, validation_fraction=share)
    trained, validated, tested = (lines_of(each) for each in (data.train(0), data.validation(), data.test()))
    together = np.concatenate([trained, validated, tested])
    assert len(np.unique(together)) == len(together) == LINES
    assert len(validated) == int(share * (len(trained) + len(validated)))
    if split == "time":
        assert trained.max() < validated.min() and validated.max() < tested.min()
    elif share == 0.5:  # a random part of every block: neither the last rows nor every second one
        assert validated.min() < np.quantile(trained, 0.1) and trained.max() > np.quantile(validated, 0.9)
        assert len(set(np.diff(np.sort(validated)))) > 2


@pytest.mark.parametrize("split", ["time", "random"])
def test_validation_and_test_are_the_same_whatever_a_run_does_in_training(directories, split):
    usual = criteo_clicks(directories[split], 32, validation_fraction=0.2)
    other = criteo_clicks(directories[split], 7, 5, epochs=3, shuffle_seed=8, validation_fraction=0.2)
    assert_same_batches(usual.validation(), other.validation())
    assert_same_batches(usual.validation(), usual.validation())  # repeatable
    assert_same_batches(usual.test(), criteo_clicks(directories[split]).test())


def test_without_a_share_nothing_validates_and_training_keeps_its_rows(directories):
    data = criteo_clicks(directories["time"], 32)
    assert data.validation is None and data.examples == TRAINED
    assert criteo_clicks(directories["time"], 32, validation_fraction=0.25).examples == 150
    assert len(lines_of(criteo_clicks(directories["time"], 32, examples=120).train(0))) == 120


def test_seeds_take_preparations_in_turn_and_each_has_its_own_test_set(directories, tmp_path):
    source = raw_file(tmp_path / "train.txt")
    prepare([source], tmp_path / "again", hash_cap=7, split="random", seed=1)
    prepare([source], tmp_path / "other", hash_cap=5, split="random", seed=1)
    paths = [directories["random"], tmp_path / "again"]
    lines = [set(lines_of(criteo_clicks(path, 32).test())) for path in paths]
    assert lines[0] != lines[1]
    data = criteo_of_seeds(paths, 1, 32, examples=64)
    assert [set(lines_of(data(number).test())) for number in range(3)] == [lines[1], lines[0], lines[1]]
    assert data(0).cardinalities == data(1).cardinalities and data(0).examples == 64
    with pytest.raises(ValueError, match="prepare all with the same --hash-cap"):
        criteo_of_seeds([*paths, tmp_path / "other"], 0)


def test_synthetic_sets_are_streams_apart():
    """No example of a stream occurs in another, however far they are read."""
    clicks = SyntheticClicks(CARDINALITIES, seed=3)
    streams = [{}, {"test": True}, {"validation": True}]
    rows = [np.concatenate([batch.dense for batch in clicks.stream(16, batches=40, **stream)]) for stream in streams]
    together = np.concatenate(rows)
    assert len(np.unique(together, axis=0)) == len(together) == 3 * 640
    data = synthetic_clicks(CARDINALITIES, 16, 5, 3, test_batches=4, test_batch_size=16)
    for found, wanted in (
        (data.train(0), rows[0][:80]),
        (data.test(), rows[1][:64]),
        (data.validation(), rows[2][:64]),
    ):
        np.testing.assert_array_equal(np.concatenate([batch.dense for batch in found]), wanted)


@example(sizes=[0], percent=50, seed=0)  # an empty source has no rows to split
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    percent=st.integers(0, 100),
    seed=st.none() | st.integers(0, 5),
)
def test_rows_set_apart_and_the_others_are_a_partition_in_order(sizes, percent, seed):
    class Blocks:
        rows = sizes

        def __getitem__(self, index):
            start = sum(sizes[:index])
            return {"label": np.arange(start, start + sizes[index])}

    apart = percent * sum(sizes) // 100
    parts = set_apart(Blocks(), apart, seed)
    labels = []
    for part in parts:
        blocks = [part[index]["label"] for index in range(len(part.rows))]
        assert [len(block) for block in blocks] == list(part.rows) and 0 not in part.rows
        labels.append(np.concatenate([*blocks, np.zeros(0, int)]))
        assert (np.diff(labels[-1]) > 0).all()
    assert len(labels[1]) == apart and sorted(np.concatenate(labels)) == list(range(sum(sizes)))
    if seed is None:
        assert list(labels[1]) == list(range(sum(sizes)))[sum(sizes) - apart :]
    else:  # an equal share of every block, within one row
        for index, size in enumerate(sizes):
            start = sum(sizes[:index])
            taken = int(((labels[1] >= start) & (labels[1] < start + size)).sum())
            assert abs(taken - apart * size / max(sum(sizes), 1)) < 1


# Flags


def checked(**flags):
    config = config_of(**flags).check()
    return config.source.open(config.seed)


def test_the_flags_of_the_preparation_reach_it(tmp_path, monkeypatch, capsys):
    """Each way of preparing a file has its own directory, so that one does not refuse the other."""
    monkeypatch.chdir(tmp_path)
    path = (raw_file(tmp_path / "train.txt"),)
    flags = {"path": path, "data": "criteo", "batch_size": 64}
    hashed = checked(hash_cap=5, **flags)
    assert hashed.expectation.startswith("with the defaults DLRM reaches about 0.761 in one pass")
    assert max(hashed.cardinalities) <= 6 and hashed.examples == TRAINED
    assert checked(path=path, data="criteo", seed=3).examples == TRAINED
    rare = checked(min_count=100, train_fraction=0.5, **flags)
    assert max(rare.cardinalities) < min(checked(**flags).cardinalities) and rare.examples == LINES // 2
    random = checked(split="random", validation_fraction=0.1, **flags)
    assert (np.diff(lines_of(random.test())) > 1).any() and random.validation is not None
    with path[0].open("a") as file:
        file.write("no row\n")
    with pytest.raises(ValueError, match=r"train.txt, line 241: 1 fields, .*--max-bad-rows N"):
        checked(split="random", train_fraction=0.7, **flags)
    assert checked(max_bad_rows=1, train_fraction=0.5, **flags).examples == LINES // 2
    assert len(list(tmp_path.glob("train.*.prepared"))) == 6
    assert capsys.readouterr().out.count("preparing") == 7
    prepared = next(place for place in tmp_path.glob("train.*.prepared") if (place / "dataset_info.json").exists())
    again = checked(path=(prepared,), data="criteo", batch_size=64)
    assert again.steps > 0 and "preparing" not in capsys.readouterr().out


def test_what_is_given_as_the_default_is_the_default():
    """Nothing is prepared twice, and directories of earlier versions are found again."""
    assert Criteo().preparation == Criteo(min_count=6, split="time", train_fraction=5 / 6).preparation == {}
    source = (Path("/data/train.txt"),)
    assert prepared_directory(source) == prepared_directory(source, {}) == Path("train.0b1fc966.prepared")
    assert prepared_directory(source, {"hash_cap": 9}) != prepared_directory(source)
    usual = {name: parameter.default for name, parameter in inspect.signature(prepare).parameters.items()}
    assert PREPARATION == {name: usual[name] for name in PREPARATION} | {"min_count": 6}


def test_flags_shape_the_run():
    flags = {"preset": "smoke", "rows": 500, "batch_size": 8}
    data = checked(steps=6, epochs=3, shuffle=True, **flags)
    assert (data.steps, data.epoch_steps, data.examples) == (18, 6, 144)
    batches = [batch.dense.tobytes() for batch in data.train(0)]
    assert sorted(batches[:6]) == sorted(batches[6:12]) and batches[:6] != batches[6:12]
    assert data.validation is not None


def small_job(seed=0):
    model = make_model("small_dlrm", 4)
    return click_data.click_job(CARDINALITIES, model, optax.adam(0.01), rowwise_adagrad(0.1), 4, shards=1, seed=seed)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """240 prepared rows of a raw file: 200 to train on."""
    place = tmp_path_factory.mktemp("criteo")
    prepare([write_lines(place / "train.txt", criteo_lines(240))], place / "rows", min_count=2)
    return place / "rows"


@pytest.mark.parametrize(
    ("flags", "steps", "examples"),
    [
        ({"batch_size": 64}, 4, 200),  # three full ones, one padded
        ({"batch_size": 64, "padded": False}, 3, 192),
        ({"batch_size": 64, "steps": 2}, 2, 128),
        ({"batch_size": 50, "examples": 120, "padded": False}, 2, 100),
        ({}, 2, 200),  # small batches for few rows
    ],
)
def test_criteo_gives_the_batches_that_were_asked_for(directory, flags, steps, examples):
    data = click_data.criteo_clicks(directory, **flags)
    assert (data.steps, data.examples) == (steps, examples)
    batches = list(data.train(0))
    assert len(batches) == steps and sum(batch.weight.sum() for batch in batches) == examples
    assert {len(batch.label) for batch in batches} == {data.batch_size}


class Numbered:
    """Blocks of numbered rows, which note which of them were read."""

    def __init__(self, sizes):
        self.rows, self.starts, self.read = list(sizes), np.cumsum([0, *sizes]), []

    def __getitem__(self, index):
        self.read.append(index)
        row = np.arange(self.starts[index], self.starts[index + 1])
        return {"label": row % 2, "dense": row[:, None].astype(np.float32), "ids": row[:, None]}


def reads_of(source, data, trainers, in_a_row):
    """The batches of each trainer, and how many blocks all have read together."""
    source.read.clear()
    shared = SharedStream(lambda: data.train, data.steps, in_a_row)
    return [list(shared(trainer, trainers)(0)) for trainer in range(trainers)], len(source.read)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=60), batch_size=st.integers(1, 60),
    trainers=st.integers(1, 8), seed=st.none() | st.integers(0, 3), epochs=st.integers(1, 3), padded=st.booleans(),
)  # fmt: skip
def test_trainers_share_the_very_batches_of_the_stream_and_read_little_twice(
    sizes, batch_size, trainers, seed, epochs, padded
):
    assume(padded or sum(sizes) >= batch_size)
    source = Numbered(sizes)
    data = data_of_blocks(source, source, None, batch_size, padded=padded, epochs=epochs, shuffle_seed=seed)
    bits = lambda batches: [(batch.dense.tobytes(), batch.weight.tobytes()) for batch in batches]
    whole, (shares, reads) = bits(data.train(0)), reads_of(source, data, trainers, data.batches_in_a_row)
    found = [bits(share) for share in shares]
    assert Counter(itertools.chain(*found)) == Counter(whole[: data.steps // trainers * trainers])
    assert trainers > 1 or found == [whole]
    turns = trainers * -(-(data.steps // trainers) // data.batches_in_a_row)
    # A turn reads at most one window that the turn before has read.
    assert reads <= epochs * len(sizes) + turns * (1 if seed is None else 16)


def test_trainers_that_take_batches_one_by_one_read_everything_each():
    source = Numbered([32] * 64)
    data = data_of_blocks(source, source, None, 4)
    assert reads_of(source, data, 8, data.batches_in_a_row)[1] == 64
    assert reads_of(source, data, 8, 1)[1] == 8 * 64


@pytest.mark.parametrize(
    "flags", [{"batch_size": 300, "padded": False}, {"batch_size": 64, "examples": 50, "padded": False}]
)
def test_less_than_one_batch_is_refused(directory, flags):
    with pytest.raises(ValueError, match="not examples enough for one batch of"):
        click_data.criteo_clicks(directory, **flags)


def test_an_unknown_model_is_refused():
    with pytest.raises(
        ValueError, match="model='dcn' must be one of dlrm, dcnv2, dcnv2_mlperf, small_dlrm, lr, fm, dnn, "
    ):
        make_model("dcn", 4)


@pytest.mark.parametrize("hots", ["one", "mlperf"])
def test_the_reference_work_trains_with_bags_of_mlperfs_sizes_and_without(hots):
    job = Job(rows=2_000, batch_size=32, hots=hots, hots_scale=0.5)
    task, params = reference_work(job)
    spec = task.spec
    batches = [in_bags(job, spec, batch) for batch in synthetic(job, 2)[1]]
    shapes = {name: spec.lookups[name].hots for name in spec.lookups}
    sizes = [max(1, round(size / 2)) for size in MLPERF_HOTS]
    assert list(shapes.values()) == (sizes if hots == "mlperf" else [1]) and sum(MLPERF_HOTS) == 214
    assert {name: len(spec.columns_of(name)[1]) for name in shapes} == dict.fromkeys(shapes, 26 if hots == "one" else 1)
    state, losses = task.init(params, "host"), []
    for batch in batches * 10:
        state, metrics = task.step(state, batch)
        losses.append(float(metrics["loss"]))
    assert np.mean(losses[-2:]) < np.mean(losses[:2])


# ---- a prepared table

OTHERS = ("lr", "fm", "dnn", "wide_deep", "deepfm", "finalmlp", "dcnv2")
FEATURES = [
    Categorical("user", 1),
    Categorical("z", share="user"),
    MultiHot("tags", at_most=3),
    Sequence("seen", last=1, share="user"),
]
WITHOUT = {
    "everything": [*FEATURES, Dense("x")],
    "no number": FEATURES,
    "bags alone": [MultiHot("tags", at_most=2), Dense("x")],
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """{kind of schema: directory}"""
    folder, rng = tmp_path_factory.mktemp("tables"), np.random.default_rng(0)
    rows = [f"{rng.integers(2)},{rng.integers(3)},u{rng.integers(9)},{rng.random()},a|b,u{rng.integers(9)}"
            for _ in range(300)]  # fmt: skip
    (folder / "a.csv").write_text("\n".join(["y,z,user,x,tags,seen", *rows]) + "\n")
    for kind, features in WITHOUT.items():
        schema = Schema(label=["y"], features=features, split=AtRandom(0.6, 0.2))
        prepare_table([folder / "a.csv"], folder / kind, schema, block_rows=32)
    return folder


def opened(directory, **flags):
    return Tabular(path=(directory,), batch_size=16, epochs=2, shuffle=True, **flags).open(seed=3)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("dlrm", kind) for kind in WITHOUT]
    + [pytest.param(name, "everything", marks=pytest.mark.slow) for name in OTHERS],
)
def test_every_model_trains_on_every_kind_of_table(prepared, kind, name):
    data = opened(prepared / kind)
    job = table_data.table_job(data.table, make_model(name, 4), optax.sgd(0.1), sgd(0.1), 4, 2)
    _, metrics = job.task.step(job.state("host", 0), next(data.train(0)))
    assert jnp.isfinite(metrics["loss"])


def test_a_run_goes_on_where_it_was_and_its_parts_have_no_row_in_common(prepared):
    data = opened(prepared / "everything")
    whole = list(data.train(0))
    assert len(whole) == data.steps == 2 * data.epoch_steps
    for later, batch in zip(data.train(7), whole[7:], strict=True):
        np.testing.assert_equal(later._asdict(), batch._asdict())
    seen = lambda batches: {float(x) for b in batches for x, w in zip(b.dense[:, 0], b.weight, strict=True) if w}
    parts = [seen(whole), seen(data.validation()), seen(data.test())]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 300


def test_flags_that_do_not_fit_a_table_are_refused(prepared, tmp_path):
    with pytest.raises(ValueError, match="has validation rows of its own"):
        opened(prepared / "everything", validation_fraction=0.1)
    schema = Schema(label="y", features=FEATURES)
    prepare_table([prepared / "a.csv"], tmp_path / "out", schema)
    own = {"data": "tabular", "path": (tmp_path / "out",)}
    with pytest.raises(ValueError, match="--patience 2 is for a run with a validation"):
        checked(patience=2, **own)
    with pytest.raises(ValueError, match="--monitor gauc is for a run with a validation"):
        checked(monitor="gauc", group="a", **own)
    assert checked(patience=2, validation_fraction=0.1, **own).validation
    with pytest.raises(ValueError, match="is no complete dataset"):
        opened(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("separator", "new", "warnings"),
    [
        (" ", False, []),
        (" ", True, [r"many ids are unknown: seen \(100.0 % in test\). They share one row"]),
        # Each list is a category, of which hardly any occurs twice.
        (
            "|",
            False,
            [r"seen \(.* % in train, 100.0 % in test\)", "no row has more than one category of seen: is the sep"],
        ),
    ],
)
def test_a_summary_warns_of_a_wrong_separator_and_of_ids_of_another_table(tmp_path, separator, new, warnings):
    """And of nothing else: neither of few unknown ids, nor of lists with one category where no more are asked for."""
    rng = np.random.default_rng(0)
    seen = lambda row: " ".join(f"{'n' if new and row >= 240 else 'i'}{item}" for item in rng.integers(0, 50, 3))
    rows = [f"{row % 2},i{rng.integers(50)},{seen(row)},a" for row in range(300)]
    (tmp_path / "a.csv").write_text("\n".join(["y,item,seen,tag", *rows]) + "\n")
    features = [Categorical("item"), Sequence("seen", separator, share="item"), MultiHot("tag", at_most=1)]
    said = words(prepare_table([tmp_path / "a.csv"], tmp_path / "out", Schema("y", features)))
    said = [line for line in said.splitlines() if line.startswith("warning: ")]
    assert len(said) == len(warnings) and all(re.search(*pair) for pair in zip(warnings, said, strict=True)), said


def test_a_schema_that_a_windows_editor_has_written_is_read(tmp_path):
    text = "from jaxrec.data.tabular import *\r\nschema = Schema('größe', [Categorical('user')])\r\n"
    (tmp_path / "schema.py").write_bytes(text.encode("utf-8-sig"))
    assert open_schema(str(tmp_path / "schema.py")).label[0].column == "größe"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("schema = (", "schema.py, line 1: SyntaxError"),
        ("x = 1\n\nschema = nobody", "schema.py, line 3: NameError"),
        ("x = 1", "has no schema: write"),
        ("from jaxrec.data.tabular import *\nschema = Schema(label='y', features=[])", "line 2: ValueError: features"),
    ],
)
def test_a_file_without_a_schema_is_refused_by_its_line(tmp_path, text, rule):
    (tmp_path / "schema.py").write_text(text)
    with pytest.raises(ValueError, match=rule):
        open_schema(str(tmp_path / "schema.py"))


@pytest.mark.parametrize(
    "flags",
    [
        {"rows": 500, "shuffle": True, "learning_rate": 0.5},
        {"tables": "host", "pipeline": "oac", "window": 3, "cpr": "mfu", "fail": ("3:5", "7:1"), "seeds": 2},
        {"data": "criteo", "path": (Path("a.txt"), Path("b.txt")), "split": "random", "patience": 2,
         "validation_fraction": 0.25, "tables": "host", "shadowsync": "ma", "workers": 2},
    ],
)  # fmt: skip
def test_the_configuration_of_a_run_is_given_back_by_its_file(tmp_path, flags):
    config = config_of(**flags).check()
    with Run("train", config, tmp_path / "run"):
        file = str(tmp_path / "run" / "config.json")
    assert parse(Config, ["--config", file]) == config
    assert parse(Config, ["--seed", "7", "--config", file]).seed == 7
    with pytest.raises(ValueError, match=r"--config .*none.json cannot be read"):
        parse(Config, ["--config", str(tmp_path / "none.json")])
