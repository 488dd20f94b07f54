"""The click job: its data follow the configuration, and another seed makes other rows alone."""

import numpy as np
import optax
import pytest
from main import click_data
from studies.reference import MLPERF_HOTS, Job, in_bags, reference_work, synthetic
from trained_run import criteo_lines, write_lines

import jaxrec
from jaxrec.data.criteo import prepare
from jaxrec.embedding import HostTables, rowwise_adagrad

CARDINALITIES = (30, 20, 10)


def small_job(seed=0):
    model = click_data.make_model("small_dlrm", 4)
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


@pytest.mark.parametrize("every", [1, 3, 4])
@pytest.mark.parametrize("first", [0, 2, 7])
def test_every_third_batch_is_that_of_the_whole_stream_over_all_epochs(directory, first, every):
    for data in (
        click_data.criteo_clicks(directory, batch_size=24, epochs=3, shuffle_seed=1),
        click_data.synthetic_clicks(CARDINALITIES, 16, 5, seed=3, test_batches=1, epochs=2, shuffle=True),
    ):
        whole = list(data.train(0))
        for batch, other in zip(data.train(first, every), whole[first::every], strict=True):
            np.testing.assert_equal(batch._asdict(), other._asdict())


@pytest.mark.parametrize(
    "flags", [{"batch_size": 300, "padded": False}, {"batch_size": 64, "examples": 50, "padded": False}]
)
def test_less_than_one_batch_is_refused(directory, flags):
    with pytest.raises(ValueError, match="not examples enough for one batch of"):
        click_data.criteo_clicks(directory, **flags)


def test_a_job_of_another_seed_differs_in_its_initial_rows_alone():
    job = small_job()
    other = job.of_seed(7)
    assert other[1:] == job[1:] and other.spec == small_job(seed=7).spec
    a, b = (HostTables.create(each.spec, each.row_optimizer).shards["width_4"][0]["value"] for each in (job, other))
    assert not np.array_equal(a, b)


def test_an_unknown_model_is_refused():
    with pytest.raises(
        ValueError, match="model='dcn' must be one of dlrm, dcnv2, dcnv2_mlperf, small_dlrm, lr, fm, dnn, "
    ):
        click_data.make_model("dcn", 4)


@pytest.mark.parametrize("hots", ["one", "mlperf"])
def test_the_reference_work_trains_with_bags_of_mlperfs_sizes_and_without(hots):
    job = Job(rows=2_000, batch_size=32, hots=hots, hots_scale=0.5)
    spec, loss, params, optimizer, rows = reference_work(job)
    batches = [in_bags(job, spec, batch) for batch in synthetic(job, 2)[1]]
    shapes = {name: spec.lookups[name].hots for name in spec.lookups}
    sizes = [max(1, round(size / 2)) for size in MLPERF_HOTS]
    assert list(shapes.values()) == (sizes if hots == "mlperf" else [1]) and sum(MLPERF_HOTS) == 214
    assert {name: len(spec.columns_of(name)[1]) for name in shapes} == dict.fromkeys(shapes, 26 if hots == "one" else 1)
    state = jaxrec.init_state(params, optimizer, HostTables.create(spec, rows))
    step, losses = jaxrec.make_train_step(spec, loss, optimizer, rows), []
    for batch in batches * 10:
        state, metrics = step(state, jaxrec.plan(spec, batch.ids), batch)
        losses.append(float(metrics["loss"]))
    assert np.mean(losses[-2:]) < np.mean(losses[:2])
