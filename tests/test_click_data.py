"""The data of the click job: a step's batch does not depend on where training began; the three sets are disjoint."""

import inspect
from pathlib import Path

import numpy as np
import pytest
import train
from hypothesis import example, given, settings
from hypothesis import strategies as st
from main.cli import refuse, refuse_small
from main.click_data import criteo_clicks, set_apart, synthetic_clicks
from main.flags import PREPARATION, DataFlags, data_of, preparation, prepared_directory, rules_of

from jaxrec.data.criteo import open_split, prepare
from jaxrec.data.loader import Loader
from jaxrec.data.synthetic import SyntheticClicks

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
    config = train.Config(**flags)
    refuse_small(config)
    refuse(rules_of(config))
    return config


def test_the_flags_of_the_preparation_reach_it(tmp_path, monkeypatch, capsys):
    """Each way of preparing a file has its own directory, so that one does not refuse the other."""
    monkeypatch.chdir(tmp_path)
    path = (raw_file(tmp_path / "train.txt"),)
    flags = {"path": path, "data": "criteo", "batch_size": 64}
    hashed = data_of(checked(hash_cap=5, **flags))
    assert hashed.expectation.startswith("with the defaults DLRM reaches about 0.761 in one pass")
    assert max(hashed.cardinalities) <= 6 and hashed.examples == TRAINED
    assert data_of(checked(path=path, data="criteo", seed=3)).examples == TRAINED
    rare = data_of(checked(min_count=100, train_fraction=0.5, **flags))
    assert max(rare.cardinalities) < min(data_of(checked(**flags)).cardinalities) and rare.examples == LINES // 2
    random = data_of(checked(split="random", validation_fraction=0.1, **flags))
    assert (np.diff(lines_of(random.test())) > 1).any() and random.validation is not None
    with path[0].open("a") as file:
        file.write("no row\n")
    with pytest.raises(ValueError, match=r"train.txt, line 241: 1 fields, .*--max-bad-rows N"):
        data_of(checked(split="random", train_fraction=0.7, **flags))
    assert data_of(checked(max_bad_rows=1, train_fraction=0.5, **flags)).examples == LINES // 2
    assert len(list(tmp_path.glob("train.*.prepared"))) == 6
    assert capsys.readouterr().out.count("preparing") == 7
    prepared = next(place for place in tmp_path.glob("train.*.prepared") if (place / "dataset_info.json").exists())
    again = data_of(checked(path=(prepared,), data="criteo", batch_size=64))
    assert again.steps > 0 and "preparing" not in capsys.readouterr().out


def test_what_is_given_as_the_default_is_the_default():
    """Nothing is prepared twice, and directories of earlier versions are found again."""
    assert preparation(DataFlags()) == preparation(DataFlags(min_count=6, split="time", train_fraction=5 / 6)) == {}
    source = (Path("/data/train.txt"),)
    assert prepared_directory(source) == prepared_directory(source, {}) == Path("train.0b1fc966.prepared")
    assert prepared_directory(source, {"hash_cap": 9}) != prepared_directory(source)
    usual = {name: parameter.default for name, parameter in inspect.signature(prepare).parameters.items()}
    assert PREPARATION == {name: usual[name] for name in PREPARATION} | {"min_count": 6}


def test_flags_shape_the_run():
    flags = {"preset": "smoke", "rows": 500, "batch_size": 8}
    data = data_of(checked(steps=6, epochs=3, shuffle=True, **flags))
    assert (data.steps, data.epoch_steps, data.examples) == (18, 6, 144)
    batches = [batch.dense.tobytes() for batch in data.train(0)]
    assert sorted(batches[:6]) == sorted(batches[6:12]) and batches[:6] != batches[6:12]
    assert data.validation is not None
