"""A task for pinned rows, and a fixture that skips the tests of a module where no compiler is installed."""

import numpy as np
import optax
import pytest
from homes import needs_compiler
from strategies import draw_ids, small_spec

import jaxrec
from jaxrec.embedding import rowwise_adagrad

ROWS = rowwise_adagrad(0.1)
SPEC = small_spec(shards=4)


def loss(params, activations, batch):
    return (activations["ab"].sum((1, 2)) + activations["w"][:, 0] + params["bias"] - batch.label) ** 2


TASK = jaxrec.Task(SPEC, loss, optax.sgd(0.1), ROWS)


@pytest.fixture(autouse=True)
def compiler():
    needs_compiler()


def batch_at(step, size=12):
    return jaxrec.Batch(draw_ids(SPEC, size, step), np.ones(size, np.float32))
