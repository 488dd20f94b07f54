"""Histories from interactions, against a reference that looks at every pair of rows."""

import csv
import datetime
import gzip
import hashlib
import io

import numpy as np
import polars as pl
import pytest

from jaxrec.data.tabular import (
    AtRandom,
    ByFile,
    ByTime,
    Categorical,
    Dense,
    History,
    Label,
    Schema,
    Sequence,
    open_table,
    open_vocabularies,
    prepare,
)
from jaxrec.data.tabular import histories as logs
from jaxrec.data.tabular.raw import read_rows

NAMES = ("click", "stars", "user", "item", "time")
FEATURES = [
    Categorical("item", min_count=2),
    History("item", by="user", last=3),
    History("item", by="user", last=5, where="click", column="clicked"),
    History("item", by="user", last=2, where="stars", column="liked"),
]
SCHEMA = Schema([Label("click"), Label("stars", at_least=4)], FEATURES, ByTime("time", 0.6, 0.2), keys=["user"])


def interactions(rows, seed):
    """Random rows in no order, with missing users and items, many of the same second."""
    rng = np.random.default_rng(seed)
    users = [f"u{number}" for number in range(9)] + ["", "12.0", "12"]
    day = lambda second: datetime.datetime.fromtimestamp(1e9 + second, datetime.UTC).isoformat()
    return [
        (rng.integers(2), rng.integers(1, 6), users[rng.integers(len(users))], ["", *"abcdefgh"][rng.integers(9)],
         day(int(rng.integers(40))))
        for _ in range(rows)
    ]  # fmt: skip


def write(path, rows):
    if path.suffix == ".parquet":
        frame = pl.DataFrame([[*map(str, row)] for row in rows], schema=list(NAMES), orient="row")
        frame.with_columns(pl.col("time").str.to_datetime(time_unit="ms", time_zone="UTC")).write_parquet(path)
        return path
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([NAMES, *rows])
    data = text.getvalue().encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def expected(rows, number, history):
    """The items of the rows that one row may see, by the rule alone."""
    whole = lambda user: user.removesuffix(".0")
    _, _, user, _, time = rows[number]
    counts = {None: lambda row: True, "click": lambda row: row[0] == 1, "stars": lambda row: row[1] >= 4}[history.where]
    past = [(row[4], at, row[3]) for at, row in enumerate(rows)
            if user and whole(row[2]) == whole(user) and row[3] and row[4] < time and counts(row)]  # fmt: skip
    return [item for _, _, item in sorted(past)][-history.last :]


def read_all(directory):
    """{split: {column: rows}}"""
    found = {}
    for name in ("train", "validation", "test"):
        split = open_table(directory, name)
        blocks = [split[index] for index in range(len(split))]
        found[name] = {key: np.concatenate([block["ids"][key] for block in blocks]) for key in blocks[0]["ids"]}
        found[name]["label"] = np.concatenate([block["label"] for block in blocks])
    return found


def prepared(directory, rows, schema=SCHEMA, cut=3):
    """Prepare rows, spread over files of three kinds."""
    parts = [part for part in np.array_split(np.arange(len(rows)), cut) if len(part)]
    paths = [write(directory / f"{number}.{['csv', 'csv.gz', 'parquet'][number % 3]}", [rows[at] for at in part])
             for number, part in enumerate(parts)]  # fmt: skip
    return paths, prepare(paths, directory / "out", schema, block_rows=16, blocks_per_shard=1)


@pytest.mark.parametrize("seed", range(4))
def test_a_row_sees_what_its_user_did_strictly_before(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(logs, "SORTED_ROWS", [1 << 22, 4, 50, 7][seed])  # sorted over 1 to 256 files
    rows = interactions(150, seed)
    _, metadata = prepared(tmp_path, rows)
    times = sorted(row[4] for row in rows)
    names = open_vocabularies(tmp_path / "out")["item"]
    side = {"train": [], "validation": [], "test": []}
    at = [sum(metadata["rows"][name] for name in [*side][:number]) for number in range(3)]
    begins = [times[place] for place in at]
    for number, row in enumerate(rows):
        side[[*side][sum(row[4] >= begin for begin in begins[1:])]].append(number)
    seen = 0
    for name, found in read_all(tmp_path / "out").items():
        for history in SCHEMA.bags:
            wanted = [expected(rows, number, history) for number in side[name]]
            padded = np.full((len(wanted), history.last), -1)
            for place, items in enumerate(wanted):
                padded[place, : len(items)] = names.encode(items) if items else []
            np.testing.assert_array_equal(found[history.column], padded, f"{name} {history}")
            seen += (padded >= 0).sum()
    assert seen > 150  # not empty


def test_new_rows_see_the_prepared_ones_as_these_did(tmp_path):
    rows = interactions(150, 5)
    paths, _ = prepared(tmp_path, rows)
    found = read_all(tmp_path / "out")
    whole = {key: np.concatenate([block[key] for block in read_rows(paths, SCHEMA, tmp_path / "out")])
             for key in ("ids.item_history", "ids.clicked")}  # fmt: skip
    order = np.argsort([row[4] for row in rows], kind="stable")
    for key in ("item_history", "clicked"):
        together = np.concatenate([found[name][key] for name in found])
        # A split holds its rows in the order of the files.
        assert sorted(map(tuple, together)) == sorted(map(tuple, whole[f"ids.{key}"]))
    last = datetime.datetime.fromisoformat(rows[order[-1]][4])
    new = [(0, 1, user, "a", (last + datetime.timedelta(seconds=5 + n)).isoformat()) for n, user in
           enumerate(("u1", "u1", "stranger", ""))]  # fmt: skip
    write(tmp_path / "new.csv", new)
    (block,) = read_rows([tmp_path / "new.csv"], SCHEMA, tmp_path / "out")
    wanted = open_vocabularies(tmp_path / "out")["item"].encode(expected([*rows, new[0]], len(rows), SCHEMA.bags[0]))
    np.testing.assert_array_equal(block["ids.item_history"][0], wanted)
    np.testing.assert_array_equal(block["ids.item_history"][1], wanted)  # and not the new row before
    assert (block["ids.item_history"][2:] == -1).all()


class Killed(Exception):
    pass


@pytest.mark.parametrize("stage", ["looks", "histories", "writes"])
def test_a_preparation_that_was_killed_goes_on_with_the_same_bytes(tmp_path, monkeypatch, stage):
    rows = interactions(200, 1)
    paths, metadata = prepared(tmp_path, rows)
    written = lambda directory: [path for path in directory.iterdir() if path.name.startswith(("table-", "history_"))]
    digest = lambda directory: {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in written(directory)}

    def tell(progress):
        if progress.stage == stage:
            raise Killed

    options = {"block_rows": 16, "blocks_per_shard": 1}
    with pytest.raises(Killed):
        prepare(paths, tmp_path / "again", SCHEMA, **options, progress=tell)
    if stage != "writes":
        (tmp_path / "again" / "history_0.log.parts.partial").mkdir()  # as kill -9 leaves it
    assert prepare(paths, tmp_path / "again", SCHEMA, **options) == metadata
    assert digest(tmp_path / "again") == digest(tmp_path / "out")
    assert not list((tmp_path / "again").glob("*.partial"))


def test_a_log_of_an_earlier_vocabulary_is_not_taken(tmp_path):
    rows = interactions(200, 2)
    paths, _ = prepared(tmp_path, rows)

    def tell(progress):
        if progress.stage == "writes":
            raise Killed

    rare = Schema(SCHEMA.label, [Categorical("item", 60), *FEATURES[1:]], SCHEMA.split, keys=["user"])
    with pytest.raises(Killed):
        prepare(paths, tmp_path / "again", rare, progress=tell)
    assert (tmp_path / "again" / "history_0.log").exists() and not list((tmp_path / "again").glob("table-*"))
    prepare(paths, tmp_path / "again", SCHEMA, block_rows=16, blocks_per_shard=1)
    np.testing.assert_equal(read_all(tmp_path / "again"), read_all(tmp_path / "out"))


def test_newer_rows_go_on_where_the_earlier_ones_ended(tmp_path):
    """In the histories as if all had been prepared together, with the categories of before in their rows."""
    rows = sorted(interactions(300, 6), key=lambda row: row[4])
    old = rows[:150]
    new = [(click, stars, user, item.replace("h", "z"), time) for click, stars, user, item, time in rows[150:]]
    paths = [write(tmp_path / name, part) for name, part in (("old.csv", old), ("new.csv", new))]
    before = prepare(paths[:1], tmp_path / "old", SCHEMA)
    after = prepare(paths[1:], tmp_path / "new", SCHEMA, onto=tmp_path / "old")
    names, known = (open_vocabularies(tmp_path / part)["item"] for part in ("new", "old"))
    size = before["table"]["tables"]["item"]
    assert names.decode(range(size)) == known.decode(range(size))
    assert names.encode(["z"]) >= size and known.encode(["z"]) == 1
    assert (
        after["table"]["onto"] == [before["table"]["digest"]] and after["table"]["digest"] not in after["table"]["onto"]
    )
    whole = [*old, *new]
    found = {name: each["item_history"] for name, each in read_all(tmp_path / "new").items()}
    got = [row for name in found for row in found[name]]
    of_old = lambda item, at: (known if at < 150 else names).encode([item])[0]
    for place, row in enumerate(got):  # a split by time, of rows in time order, is in the order of the file
        number = 150 + place
        same = lambda other, user=whole[number][2]: user and other.removesuffix(".0") == user.removesuffix(".0")
        past = [(r[4], at) for at, r in enumerate(whole) if same(r[2]) and r[3] and r[4] < whole[number][4]]
        wanted = [of_old(whole[at][3], at) for _, at in sorted(past)][-3:]
        assert row[row >= 0].tolist() == wanted
    # A third part goes on from the second.
    newest = write(tmp_path / "newest.csv", interactions(60, 8))
    third = prepare([newest], tmp_path / "third", SCHEMA, onto=tmp_path / "new")
    assert third["table"]["onto"] == [before["table"]["digest"], after["table"]["digest"]]


def test_a_table_goes_on_from_one_of_its_own_schema_alone(tmp_path):
    (path, *_), _ = prepared(tmp_path, interactions(60, 3), cut=1)
    other = Schema(SCHEMA.label, [Categorical("item", min_count=3), *FEATURES[1:]], SCHEMA.split)
    with pytest.raises(ValueError, match="out was prepared with another schema"):
        prepare([path], tmp_path / "again", other, onto=tmp_path / "out")
    with pytest.raises(ValueError, match="is no complete dataset"):
        prepare([path], tmp_path / "again", SCHEMA, onto=tmp_path / "nothing")
    options = {"block_rows": 16, "blocks_per_shard": 1}
    path = write(tmp_path / "newer.csv", interactions(60, 3)[::-1])
    again = prepare([path], tmp_path / "again", SCHEMA, **options, onto=tmp_path / "out")
    assert again["table"]["onto"] == [again["table"]["digest"]]  # no category is new
    with pytest.raises(ValueError, match="again holds a preparation with other onto"):
        prepare([path], tmp_path / "again", SCHEMA, **options)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"label": Label("click", regression=True)}, "label"),
        ({"label": [Label("click"), Label("stars", at_least=4)]}, "label"),
        ({"weight": "stars"}, "weight"),
    ],
)
def test_newer_rows_are_learned_by_the_rule_of_before(tmp_path, change, part):
    given = {"label": [Label("click")], "features": FEATURES[:2], "split": SCHEMA.split}
    old, new = (write(tmp_path / f"{day}.csv", interactions(60, day)) for day in range(2))
    prepare([old], tmp_path / "old", Schema(**given))
    with pytest.raises(ValueError, match=f"old was prepared with the {part} .*by two rules"):
        prepare([new], tmp_path / "new", Schema(**given | change), onto=tmp_path / "old")


def test_the_days_before_are_told_apart_though_they_map_values_alike(tmp_path):
    schema = Schema(
        "click", [Categorical("item", hash_cap=50), History("item", "user", time="time")], AtRandom(0.5, 0.2)
    )
    monday, tuesday, wednesday = (write(tmp_path / f"{day}.csv", interactions(40, day)) for day in range(3))
    prepare([monday], tmp_path / "monday", schema)
    prepare([tuesday], tmp_path / "tuesday", schema, onto=tmp_path / "monday")
    prepare([wednesday], tmp_path / "wednesday", schema, onto=tmp_path / "monday")
    prepare([write(tmp_path / "other.csv", interactions(40, 9))], tmp_path / "other", schema)
    for base in ("tuesday", "other"):
        with pytest.raises(ValueError, match="wednesday holds a preparation with other onto"):
            prepare([wednesday], tmp_path / "wednesday", schema, onto=tmp_path / base)
    assert prepare([wednesday], tmp_path / "wednesday", schema, onto=tmp_path / "monday")["rows"]
    for repeated in (monday, tuesday):
        with pytest.raises(
            ValueError, match=f"{repeated.name} is one of the files of the table that it is prepared onto"
        ):
            prepare([wednesday, repeated], tmp_path / f"with {repeated.stem}", schema, onto=tmp_path / "tuesday")


def test_what_a_killed_sort_has_left_is_removed(tmp_path):
    left = tmp_path / "out" / f"history_0.log{logs.SCRATCH}"
    left.mkdir(parents=True)
    prepared(tmp_path, interactions(60, 3))
    assert not left.exists()


def test_numbers_of_newer_rows_are_scaled_as_those_of_before(tmp_path):
    schema = Schema(
        Label("click", regression=True), [Categorical("item", 1), Dense("stars", standardise=True)], AtRandom()
    )
    of = lambda rows, scale: [(scale * row[0], scale * row[1], *row[2:]) for row in rows]
    rows = interactions(80, 7)
    prepare([write(tmp_path / "a.csv", of(rows, 1))], tmp_path / "a", schema)
    found = {}
    for name, onto in (("on", tmp_path / "a"), ("alone", None)):
        prepare([write(tmp_path / "b.csv", of(rows, 3))], tmp_path / name, schema, onto=onto)
        split = open_table(tmp_path / name, "train")
        found[name] = np.concatenate([split[index]["dense"] for index in range(len(split))]), split.metadata["table"]
    one = open_table(tmp_path / "a", "train")
    assert found["on"][1]["targets"] == one.metadata["table"]["targets"] != found["alone"][1]["targets"]
    assert found["on"][0].std() > 2.5 and found["alone"][0].std() == pytest.approx(1, abs=1e-5)


def test_a_log_that_is_missing_or_of_another_length_is_named(tmp_path):
    paths, _ = prepared(tmp_path, interactions(60, 3))
    log = tmp_path / "out" / "history_1.log"
    whole = log.read_bytes()
    for wrong in (whole[: -logs.RECORD.itemsize], whole + whole[: logs.RECORD.itemsize], whole[:-1]):
        log.write_bytes(wrong)
        with pytest.raises(ValueError, match="history_1.log is missing, cut or of another preparation"):
            next(read_rows(paths, SCHEMA, tmp_path / "out"))
    log.unlink()
    with pytest.raises(ValueError, match="history_1.log is missing"):
        next(read_rows(paths, SCHEMA, tmp_path / "out"))


def test_users_without_a_past_have_empty_histories(tmp_path):
    rows = [(n % 2, 1, f"u{n}", "ab"[n % 2], f"2001-01-01T00:00:{n:02}") for n in range(30)]
    _, metadata = prepared(tmp_path, rows, cut=1)
    assert all((found["item_history"] == -1).all() for found in read_all(tmp_path / "out").values())
    shown = metadata["table"]["features"]["item_history"]
    assert shown["missing_share"] == 1 and shown["most"] == 0


def test_a_table_may_have_only_a_hashed_column_and_another_split(tmp_path):
    features = [Categorical("item", hash_cap=50), History("item", "user", time="time"), Dense("stars")]
    schema = Schema("click", features, AtRandom(0.5, 0.2))
    rows = interactions(100, 4)
    prepared(tmp_path, rows, schema)
    found = read_all(tmp_path / "out")
    names = open_vocabularies(tmp_path / "out")["item"]
    wanted = {tuple(names.encode(items)) if (items := expected(rows, n, schema.bags[0])) else () for n in range(100)}
    got = {tuple(row[row >= 0]) for each in found.values() for row in each["item_history"]}
    assert got == wanted and len(got) > 30


@pytest.mark.parametrize(
    ("features", "split", "rule"),
    [
        ([History("item", "user")], ByTime("time"), "'item_history' shares the table of 'item', which is no Categoric"),
        ([Categorical("item"), History("item", "user")], ByFile(), "'item_history' has no time, and the split is not"),
        (
            [Categorical("item"), History("item", "user", where="y")],
            ByTime("time"),
            "where='y' of 'item_history' is no",
        ),
        (
            [Categorical("item"), History("item", "user", where="price")],
            ByTime("time"),
            r"where='price' of 'item_history' is no label of 0 and 1 of this schema \(click, price\)",
        ),
        (
            [Categorical("item"), Sequence("item_history"), History("item", "user")],
            ByTime("time"),
            "the column 'item_history' is given twice",
        ),
    ],
)
def test_a_history_that_nothing_tells_is_refused(features, split, rule):
    with pytest.raises(ValueError, match=rule):
        Schema(["click", Label("price", regression=True)], features, split)


def test_a_row_without_a_time_is_malformed(tmp_path):
    rows = [*interactions(20, 0), (1, 1, "u1", "a", "")]
    with pytest.raises(ValueError, match="'time' is .*, but it is a number, or a date and time"):
        prepared(tmp_path, rows, Schema("click", FEATURES[:1] + [History("item", "user", time="time")], AtRandom()), 1)
