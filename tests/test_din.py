"""The click job over a prepared table: every kind of column is a feature; DIN weighs a history by its candidate."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import train
from main import table_data
from main.config import config_of
from main.model import make_model

import jaxrec
from jaxrec.embedding import adagrad
from jaxrec.metrics import exact_auc
from jaxrec.models import DIN, DNN
from jaxrec.types import Batch

T, ITEMS = 10, 200
TABLE = {
    "tables": {"user": 9, "item": ITEMS, "tag": 5},
    "sparse": ["user", "item"],
    "bags": {"tags": {"table": "tag", "hots": 2}, "seen": {"table": "item", "hots": T}},
    "dense": [],
    "labels": ["click"],
}


def batch_of(seed, size=256):
    """Examples whose click depends only on whether the item was seen before."""
    rng = np.random.default_rng(seed)
    seen = np.where(rng.random((size, T)) < 0.3, -1, rng.integers(2, ITEMS, (size, T)))
    item = np.where(rng.random(size) < 0.5, seen[:, 0], rng.integers(2, ITEMS, size)).clip(0)
    before = (seen == item[:, None]).any(1)
    label = (rng.random(size) < np.where(before, 0.9, 0.1)).astype(np.float32)
    user, tags = rng.integers(0, 9, size), rng.integers(-1, 5, (size, 2))
    ids = {"sparse": np.stack([user, item], 1), "seen": seen, "tags": tags}
    ids = {name: array.astype(np.int32) for name, array in ids.items()}
    return Batch(ids, label)


def job_of(model):
    return table_data.table_job(TABLE, model, optax.adam(0.01), adagrad(0.1), 8, 2)


def auc_of(model, steps=250):
    job = job_of(model)
    with jaxrec.Serial(job.task, job.state("device", 0)) as engine:
        state = engine.train(map(batch_of, range(steps)))
        test = batch_of(10**6, 2000)
        return exact_auc(job.eval_step()(state, test), test.label)


@pytest.mark.slow
def test_a_history_is_weighed_by_its_candidate():
    """The mean of a history, concatenated with the candidate, does not reveal this in as few steps."""
    weighed, pooled = auc_of(DIN((32, 16), (16, 8))), auc_of(DNN((32, 16)))
    assert weighed > 0.8 and weighed > pooled + 0.1, (weighed, pooled)


def test_what_is_missing_in_a_history_does_not_count():
    job, batch = job_of(DIN((16,), (8,))), batch_of(0)
    state = job.state("device", 0)
    logit = lambda batch: np.asarray(job.eval_step()(state, batch))
    shorter = np.pad(batch.ids["seen"], ((0, 0), (0, 3)), constant_values=-1)
    padded = batch._replace(ids=batch.ids | {"seen": shorter})
    np.testing.assert_allclose(logit(padded), logit(batch), rtol=1e-5, atol=1e-6)
    fuller = batch._replace(ids=batch.ids | {"seen": np.abs(batch.ids["seen"])})
    assert (logit(fuller) != logit(batch)).any()  # negative control


def test_every_model_takes_a_table():
    batch = batch_of(1, 16)
    for name in ("lr", "fm", "wide_deep", "deepfm", "dnn", "finalmlp", "dlrm", "dcnv2", "din"):
        job = job_of(make_model(name, 8))
        state = jax.eval_shape(lambda job=job: job.init(0))
        assert jax.tree.leaves(state), name
        activations = {"sparse": jnp.ones((16, 2, 8)), "tags": jnp.ones((16, 8))}
        activations["seen"] = jnp.ones((16, T, 8)) if name == "din" else jnp.ones((16, 8))
        shapes = jax.eval_shape(job.predict, state, activations, batch)
        assert shapes.shape == (16,), name


def test_a_model_of_histories_wants_one():
    alone = TABLE | {"bags": {"tags": TABLE["bags"]["tags"]}}
    with pytest.raises(ValueError, match=r"--model din weighs a history .* \(tags\) shares the table of a column"):
        table_data.table_job(alone, DIN(), optax.adam(0.01), adagrad(0.1))
    with pytest.raises(ValueError, match="--model din weighs a history by a candidate: give --data tabular"):
        train.main(config_of(model="din", preset="smoke"))
