"""The click job: its data follow the configuration, seeds work as documented, and every engine runs it."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import optax
import pytest
from main import click_data
from studies.reference import MLPERF_HOTS, Job, in_bags, reference_work, synthetic

import jaxrec
from jaxrec.data.criteo import prepare
from jaxrec.embedding import HostTables, rowwise_adagrad
from jaxrec.loop import fit, planned
from jaxrec.oac import Pipeline
from jaxrec.shadowsync import Emulation

ROOT = Path(__file__).parent.parent
CARDINALITIES = (30, 20, 10)


def small_job(seed=0):
    model = click_data.make_model("small_dlrm", 4)
    return click_data.click_job(CARDINALITIES, model, optax.adam(0.01), rowwise_adagrad(0.1), 4, shards=1, seed=seed)


def host_state(job, seed=0):
    return job.state(HostTables.create(job.spec, job.row_optimizer), seed)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """240 prepared rows of a raw file: 200 to train on."""
    rng, place = np.random.default_rng(0), tmp_path_factory.mktemp("criteo")
    line = lambda: [int(rng.random() < 0.3), *rng.integers(0, 50, 13), *(f"{x:08x}" for x in rng.integers(0, 9, 26))]
    rows = [line() for _ in range(240)]
    (place / "train.txt").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    prepare([place / "train.txt"], place / "rows", min_count=2)
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
    for batch, again in zip(batches[1:], data.train(1), strict=True):  # from step 1 on
        np.testing.assert_array_equal(batch.ids["sparse"], again.ids["sparse"])


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


def test_synthetic_batches_begin_where_they_are_asked_to_and_tests_are_others():
    data = click_data.synthetic_clicks(CARDINALITIES, 16, 5, seed=3, test_batches=2, test_batch_size=16)
    whole, rest, test = list(data.train(0)), list(data.train(2)), list(data.test())
    assert (len(whole), len(rest), len(test), data.examples) == (5, 3, 2, 80)
    np.testing.assert_array_equal(whole[2].ids["sparse"], rest[0].ids["sparse"])
    assert not np.array_equal(whole[0].dense, test[0].dense)
    other = next(click_data.synthetic_clicks(CARDINALITIES, 16, 5, seed=4, test_batches=2).train(0))
    assert not np.array_equal(whole[0].ids["sparse"], other.ids["sparse"])


def test_a_job_of_another_seed_differs_in_its_initial_rows_alone():
    job = small_job()
    other = job.of_seed(7)
    assert other[1:] == job[1:] and other.spec == small_job(seed=7).spec
    a, b = (HostTables.create(each.spec, each.row_optimizer).shards["width_4"][0]["value"] for each in (job, other))
    assert not np.array_equal(a, b)


@pytest.mark.slow
def test_a_loop_a_pipeline_and_an_emulation_take_the_same_job():
    job, data = small_job(), click_data.synthetic_clicks(CARDINALITIES, 32, 6, seed=0, test_batches=1)
    losses = []
    note = lambda state, step, plans, metrics: (losses.append(float(metrics["loss"])), state)[1]
    fit(host_state(job), planned(job.spec, data.train(0)), job.train_step(), [note])
    with Pipeline(host_state(job), job.update(), mode="oac", window=2) as pipeline:
        overlapped = [float(metrics["loss"]) for _, metrics in pipeline.run(data.train(0))]
    assert overlapped == losses and losses[-1] < losses[0]
    emulation = Emulation(job.spec, job.loss, job.optimizer, job.row_optimizer, job.init(0), trainers=1)
    np.testing.assert_allclose(emulation.run(itertools.islice(data.train(0), 6)), losses, rtol=1e-5)


def test_an_unknown_model_is_refused():
    with pytest.raises(
        ValueError, match="model='dcn' must be one of dlrm, dcnv2, dcnv2_mlperf, small_dlrm, lr, fm, dnn, "
    ):
        click_data.make_model("dcn", 4)


@pytest.mark.process
def test_the_reference_work_wants_nothing_but_jaxrec():
    """A bare benchmark machine has no optional packages."""
    lines = ["import sys", "for name in 'tyro polars tensorflow_datasets matplotlib tqdm simpy'.split():"]
    lines += ["    sys.modules[name] = None", "from studies.reference import Job, reference_work"]
    lines += ["spec, *_ = reference_work(Job(rows=100, model='dcnv2'))", "assert 'main.cli' not in sys.modules"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "experiments")))}
    program = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(program, capture_output=True, text=True, cwd="/", env=environment)
    assert done.returncode == 0, done.stderr


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
