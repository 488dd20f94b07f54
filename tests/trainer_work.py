"""The work of a trainer in a pool: a task, its parameters and its share of a stream of clicks."""

import numpy as np
import optax

from jaxrec import Task
from jaxrec.cluster.trainers import TrainerWork
from jaxrec.data.synthetic import SyntheticClicks
from jaxrec.embedding import EmbeddingSpec, Lookup, Table, adagrad

ROWS = {"user": 60, "item": 40}
SPEC = EmbeddingSpec({name: Table(rows, 4) for name, rows in ROWS.items()}, {"sparse": Lookup(tuple(ROWS))}, shards=4)
CLICKS = SyntheticClicks(tuple(ROWS.values()), dense_features=3)
PARAMS = {"dense": np.zeros(3, np.float32), "bias": np.float32(0)}
OWN = optax.adam(0.01), adagrad(0.1)


def loss(params, activations, batch):
    logit = batch.dense @ params["dense"] + activations["sparse"].sum((1, 2)) + params["bias"]
    return optax.sigmoid_binary_cross_entropy(logit, batch.label)


def batches(trainer, trainers, steps=12):
    return lambda start: (CLICKS.batch(i * trainers + trainer, 16) for i in range(start, steps))


TASK = Task(SPEC, loss, *OWN)


def work(**changes):
    return TrainerWork(TASK, PARAMS, batches)._replace(**changes)
