"""Retrieval: the best possible ranking follows from the log, evaluation reads the trained rows, and runs resume."""

import collections
import json
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import retrieval
from main.signals import Asked, Stopped
from retrieval import ITEM, PLACE, USER, Config, Size, clicks_of, in_batches, ranked, size_of, towers_of, train
from smoke import smoke

from jaxrec.data.synthetic import SyntheticClicks
from jaxrec.embedding import activations, plan
from jaxrec.ranking import gain_of_places, places_of

SCRIPT = Path(__file__).parent.parent / "experiments" / "retrieval.py"
SIZE = Size(users=30, items=40, places=5, examples=1000, test_clicks=300, batch_size=32, epochs=2, seeds=1)
CLICKS = clicks_of(SIZE, 0)
CONFIG = Config(preset="smoke", embedding_width=8)
SMALL = {"preset": "smoke", "examples": 2000, "epochs": 1, "batch_size": 64, "embedding_width": 4}


def trained(way="corrected"):
    towers = towers_of(CONFIG, SIZE, 0, corrected=True)
    return towers, *train(towers, CLICKS, way, SIZE, 0, Asked())


# ---- the log


def test_the_best_possible_score_is_the_share_of_each_item_among_the_clicks_of_a_query():
    log = SyntheticClicks((2, 6, 2), 0, 0.6, 3, 4.0, -2.0)
    clicks = retrieval.clicked(log, 40_000)
    for user, place in np.ndindex(2, 2):
        mine = clicks[(clicks[:, USER] == user) & (clicks[:, PLACE] == place), ITEM]
        score = retrieval.best_possible(log, np.array([[user, 5, place]]))[0]
        wanted = np.exp(score) / np.exp(score).sum()
        found = np.bincount(mine, minlength=6) / len(mine)
        assert len(mine) > 500
        assert (np.abs(found - wanted) < 4.5 * np.sqrt(wanted * (1 - wanted) / len(mine)) + 1e-4).all()


def test_the_first_clicks_of_a_log_are_those_of_a_plain_loop_and_the_test_set_is_of_its_own():
    wanted = []
    for batch in CLICKS.log.stream(8192, batches=4):
        wanted += [row for row, label in zip(batch.ids["sparse"].tolist(), batch.label, strict=True) if label == 1]
    np.testing.assert_array_equal(CLICKS.train, wanted[: SIZE.examples])
    assert (CLICKS.train[: SIZE.test_clicks] != CLICKS.test).any()


def test_the_share_of_an_item_is_that_of_its_clicks_and_finite_without_any():
    counts = collections.Counter(CLICKS.train[:, ITEM].tolist())
    for item, n in counts.items():
        assert np.exp(CLICKS.log_share[item]) == pytest.approx(n / SIZE.examples, rel=0.03)
    gone = CLICKS._replace(train=CLICKS.train[CLICKS.train[:, ITEM] != 3])
    assert np.isfinite(gone.log_share).all() and gone.log_share[3] == gone.log_share.min()
    assert np.exp(gone.log_share).sum() == pytest.approx(1, rel=1e-5)


def test_batches_are_whole_and_hold_each_click_once_in_an_epoch():
    per_epoch = SIZE.examples // 32
    batches = list(in_batches(CLICKS, 32, 2, seed=1))
    assert len(batches) == 2 * per_epoch and all(len(batch.label) == 32 for batch in batches)
    row = lambda batch: np.column_stack([batch.ids["query"][:, 0], batch.ids["item"], batch.ids["query"][:, 1]])
    known = collections.Counter(map(tuple, CLICKS.train.tolist()))
    for epoch in (batches[:per_epoch], batches[per_epoch:]):
        seen = collections.Counter(tuple(one) for batch in epoch for one in row(batch).tolist())
        assert seen <= known and seen.total() == 32 * per_epoch
    assert (row(batches[0]) != row(batches[per_epoch])).any()
    again = next(in_batches(CLICKS, 32, 2, seed=1))
    jax.tree.map(np.testing.assert_array_equal, again, batches[0])
    np.testing.assert_array_equal(again.dense[:, 0], CLICKS.log_share[again.ids["item"][:, 0]])


# ---- towers


@pytest.mark.slow
def test_what_is_ranked_is_what_was_trained():
    """Evaluation computes the same vectors as a training step from the same rows."""
    towers, state, *_ = trained()
    query, item = retrieval.vectors(towers, state, CLICKS.test)
    ids = {"query": CLICKS.test[:, [USER, PLACE]], "item": CLICKS.test[:, [ITEM]]}
    plans = plan(towers.task.spec, ids)
    found = activations(towers.task.spec, {name: rows.value for name, rows in state.tables.read(plans).items()}, plans)
    params = jax.tree.map(lambda leaf: leaf[0], state.dense.params)
    apply = lambda name: towers.side.apply(params[name], found[name])
    np.testing.assert_allclose(query, apply("query"), atol=1e-6)
    np.testing.assert_allclose(item[CLICKS.test[:, ITEM]], apply("item"), atol=1e-6)
    assert item.shape == (SIZE.items, 32)


@pytest.mark.parametrize("corrected", [True, False])
def test_only_the_corrected_loss_sees_how_often_an_item_is_clicked(corrected):
    towers = towers_of(CONFIG, SIZE, 0, corrected)
    params = jax.tree.map(lambda leaf: leaf[0], towers.fresh(0).dense.params)
    rng = np.random.default_rng(0)
    vectors = {
        "query": rng.standard_normal((32, 2, 8), np.float32),
        "item": rng.standard_normal((32, 1, 8), np.float32),
    }
    batch = next(in_batches(CLICKS, 32, 1, 0))
    loss = lambda shift: towers.task.loss(params, vectors, batch._replace(dense=batch.dense + shift))
    np.testing.assert_allclose(loss(1.0), loss(0.0), rtol=1e-4)  # a softmax is invariant to a constant
    assert bool((loss(rng.random((32, 1), np.float32)) != loss(0.0)).any()) is corrected


def test_batches_in_flight_leave_the_same_bits_and_a_digest_sees_any_other():
    _, state, losses, none = trained()
    _, flown, flown_losses, patched = trained("oac")
    assert patched > 0.5 and none == 0
    same = retrieval.digest(state, losses)
    assert retrieval.digest(flown, flown_losses) == same
    dense, last = state.dense, losses[-1] + 1e-6
    others = [state._replace(dense=dense._replace(params=jax.tree.map(lambda leaf: leaf * 1.000001, dense.params)))]
    others.append(state._replace(dense=dense._replace(opt_state=jax.tree.map(lambda leaf: leaf + 1, dense.opt_state))))
    digests = [retrieval.digest(other, losses) for other in others]
    digests.append(retrieval.digest(state, [*losses[:-1], last]))
    for stack in state.tables.spec.stacks:
        for part in state.tables.parts(stack).values():  # parts of host tables are the rows themselves, not copies
            list(part)[-1][0, 0] += 1
            digests.append(retrieval.digest(state, losses))
    assert same not in digests and len(set(digests)) == len(digests)


def test_a_signal_ends_the_step_and_then_the_run():
    asked = Asked()
    towers = towers_of(CONFIG, SIZE, 0, True)
    steps = []

    def batches(*args):
        for number, batch in enumerate(in_batches(*args)):
            if number == 9:
                asked.on_signal(signal.SIGTERM, None)
            steps.append(number)
            yield batch

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped, match="SIGTERM"):
        patch.setattr(retrieval, "in_batches", batches)
        train(towers, CLICKS, "corrected", SIZE, 0, asked)
    assert 9 < len(steps) < 2 * SIZE.examples // 32 - 5


# ---- figures


def test_a_test_set_is_ranked_in_parts_as_it_is_at_once():
    assert len(CLICKS.test) > retrieval._QUERIES
    score = np.random.default_rng(0).standard_normal((SIZE.test_clicks, SIZE.items))
    wanted = gain_of_places(places_of(score, CLICKS.test[:, ITEM]), at=(10, 100))
    assert ranked(CLICKS, lambda part: score[part]) == wanted
    assert ranked(CLICKS, lambda part: np.eye(SIZE.items)[CLICKS.test[part, ITEM]])["mrr"] == 1


def test_those_beside_are_in_their_order_and_chance_is_what_it_must_be():
    found = {name: retrieval.beside(name, CLICKS, 0) for name in retrieval.BESIDE}
    assert found["teacher"]["mrr"] > found["popularity"]["mrr"] > found["chance"]["mrr"]
    assert found["chance"]["recall_at_10"] == pytest.approx(10 / 40, abs=4 * (0.25 * 0.75 / 300) ** 0.5)
    most = np.argsort(-CLICKS.counts, kind="stable")[:10]
    assert found["popularity"]["recall_at_10"] == pytest.approx(np.isin(CLICKS.test[:, ITEM], most).mean(), abs=0.02)


def test_differences_are_within_seeds_and_one_other_digest_is_told():
    common = np.random.default_rng(0).standard_normal(5)
    more = {"popularity": 0.0, "corrected": 0.3, "plain": 0.1, "oac": 0.3}
    both = [(seed, way) for seed in range(5) for way in more]
    rows = [{"seed": seed, "way": way, "digest": str(seed), "patched_share": 0.25} for seed, way in both]
    rows = [row | dict.fromkeys(retrieval.METRICS, common[row["seed"]] + more[row["way"]]) for row in rows]
    found = retrieval.summary(rows)
    assert found["corrected_minus_popularity_mrr"] == pytest.approx(0.3)
    assert found["corrected_minus_plain_ndcg_at_10"] == pytest.approx(0.2)
    assert found["corrected_minus_plain_half_interval_mrr"] < 1e-9 and found["plain_deviation_mrr"] > 0.3
    assert found["oac_equals_corrected"] is True
    assert found["oac_patched_share"] == 0.25
    rows[-1]["digest"] = "another"
    found = retrieval.summary(rows)
    assert found["oac_equals_corrected"] is False and "bit for bit: NO" in retrieval.table(found)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"batch_size": 1}, "--batch-size 1 must be at least 2"),
        ({"examples": 100}, "--examples 100 must fill a batch, of 256"),
        ({"temperature": 0.0}, "--temperature 0.0 must be above 0"),
        ({"temperature": float("nan")}, "--temperature nan must be above 0"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_a_directory_is_made(tmp_path, flags, words):
    with pytest.raises(ValueError, match=words):
        retrieval.main(Config(preset="smoke", workdir=tmp_path / "run", **flags))
    assert not (tmp_path / "run").exists()


def test_flags_come_before_the_preset():
    assert size_of(Config(preset="smoke", epochs=7))[5:] == (256, 7, 2)


# ---- runs


@pytest.mark.slow
def test_a_run_goes_on_seed_by_seed_and_trains_nothing_twice(tmp_path):
    flags = SMALL | {"ways": ("plain",), "workdir": tmp_path}
    retrieval.main(Config(seeds=1, **flags))
    before = (tmp_path / "metrics.jsonl").read_text()
    found = retrieval.main(Config(seeds=2, resume=True, **flags))
    after = (tmp_path / "metrics.jsonl").read_text()
    assert after.startswith(before) and len(after.splitlines()) == 2 * len(before.splitlines()) == 10
    lines = after.splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:-1]))  # as if killed before the result of the variant
    assert retrieval.main(Config(seeds=2, resume=True, **flags)) == found
    once = retrieval.main(Config(seeds=1, resume=True, **flags))
    assert once["seeds"] == 1 and once["plain_mrr"] == json.loads(lines[4])["mrr"]


@pytest.mark.slow
def test_towers_are_between_popularity_and_the_best_possible(tmp_path):
    found = smoke(tmp_path, "retrieval")
    of = lambda way: found[f"{way}_recall_at_10"]
    assert of("teacher") > of("corrected") > 1.1 * of("popularity") > 5 * of("chance")
    assert of("plain") < of("popularity") < of("plain_with_share") and found["oac_equals_corrected"]


@pytest.mark.slow
def test_a_process_that_is_stopped_says_how_to_go_on(tmp_path):
    words = [sys.executable, SCRIPT, "--preset", "smoke", "--seeds", "1", "--workdir", str(tmp_path)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "corrected" in process.stdout.readline()  # the first variant is complete
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 143 and "--resume" in error and "Traceback" not in error
    first = (tmp_path / "metrics.jsonl").read_text()
    done = subprocess.run([*words, "--resume"], capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "metrics.jsonl").read_text().startswith(first), done.stderr
    assert json.loads((tmp_path / "results.json").read_text())["oac_equals_corrected"]
