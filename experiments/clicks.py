"""The click job: tables, model, loss and step, for every experiment that trains a
click-through-rate model. Its data are those of click_data.py.

    data = synthetic_clicks(scaled_cardinalities(200_000), batch_size=2048, steps=1000, seed=0, test_batches=50)
    job = click_job(data.cardinalities, make_model("dlrm", 16), optax.adam(1e-3), rowwise_adagrad(0.02))
    state = job.state(HostTables.create(job.spec, job.row_optimizer), seed=0)
    state = fit(state, planned(job.spec, data.train(0)), job.train_step())

A job is pure: it fits any home of the rows, a loop, a pipeline, replicas and the emulation of them.
Nothing but jaxrec is imported, so that the reference work runs where only jaxrec is installed.

Legend: B batch, N dense features, F fields, E embedding width.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from jaxrec.embedding import EmbeddingSpec, Lookup, Table
from jaxrec.models import DIN, DLRM, DNN, FM, LR, DCNv2, DeepFM, FinalMLP, WideAndDeep
from jaxrec.step import init_state, make_eval_step, make_train_step, make_update
from jaxrec.types import RowOptimizer, TrainState

DENSE_FEATURES = 13  # of Criteo's logs, and of the synthetic one


class ClickJob(NamedTuple):
    """A click model over embedding tables, and how it learns."""

    spec: EmbeddingSpec
    init: Callable[[int], Any]  # seed -> dense parameters
    predict: Callable  # (params, activations {'sparse': f32[B, F, E]}, batch) -> logit f32[B]
    loss: Callable  # the same -> f32[B]
    optimizer: optax.GradientTransformation
    row_optimizer: RowOptimizer

    def of_seed(self, seed: int) -> "ClickJob":
        """The same job with the initial rows of another seed; programs compiled for one serve the
        other."""
        return self._replace(spec=dataclasses.replace(self.spec, seed=seed))

    def state(self, tables, seed: int, mesh=None) -> TrainState:
        """The initial state: the parameters of a seed over fresh tables, in whatever home."""
        return init_state(self.init(seed), self.optimizer, tables, mesh)

    def update(self, mesh=None) -> Callable:
        """The pure step, for a pipeline: as `make_update`."""
        return make_update(self.spec, self.loss, self.optimizer, self.row_optimizer, mesh)

    def train_step(self, mesh=None) -> Callable:
        """As `make_train_step`."""
        return make_train_step(self.spec, self.loss, self.optimizer, self.row_optimizer, mesh)

    def eval_step(self, mesh=None) -> Callable:
        """As `make_eval_step`."""
        return make_eval_step(self.spec, self.predict, mesh)


def click_job(
    cardinalities: Sequence[int],
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    row_optimizer: RowOptimizer,
    width: int = 16,
    shards: int = 8,
    seed: int = 0,
) -> ClickJob:
    """The job of a model over one table for each categorical field.

    Args:
      cardinalities: rows of each table, C1, C2 and so on.
      model: (dense f32[B, N], activations f32[B, F, E]) -> logit f32[B].
      optimizer: of the dense parameters.
      row_optimizer: of the rows.
      width: E, of all tables.
      shards: S, of every table.
      seed: of the initial rows.
    """
    fields = tuple(f"C{i + 1}" for i in range(len(cardinalities)))
    tables = {name: Table(rows, width) for name, rows in zip(fields, cardinalities, strict=True)}
    spec = EmbeddingSpec(tables, {"sparse": Lookup(fields)}, shards, seed)

    def init(seed):
        example = jnp.zeros((1, DENSE_FEATURES)), jnp.zeros((1, len(fields), width))
        return model.init(jax.random.key(seed), *example)

    def predict(params, activations, batch):
        return model.apply(params, batch.dense, activations["sparse"])

    def loss(params, activations, batch):
        return optax.sigmoid_binary_cross_entropy(predict(params, activations, batch), batch.label)

    return ClickJob(spec, init, predict, loss, optimizer, row_optimizer)


def make_model(name: str, width: int) -> nn.Module:
    """A model of the usual size; 'small_dlrm' is for many short runs.

    'dcnv2_mlperf' is that of MLPerf Training at width 128; its rank, 512 there, follows the width.
    Of 'lr', 'fm', 'wide_deep' and 'deepfm' the first number of a row is the weight of its category.

    Raises:
      ValueError: there is no such model.
    """
    models = {
        "dlrm": DLRM((512, 256, 64, width), (512, 256, 1)),
        "dcnv2": DCNv2(cross_layers=3, tower=(512, 256)),
        "dcnv2_mlperf": DCNv2(3, 4 * width, (1024, 1024, 512, 256), parallel=False, bottom=(512, 256, width)),
        "small_dlrm": DLRM((64, width), (64, 1)),
        "lr": LR(),
        "fm": FM(),
        "dnn": DNN((512, 256)),
        "wide_deep": WideAndDeep((512, 256)),
        "deepfm": DeepFM((512, 256)),
        "finalmlp": FinalMLP(((512, 256), (512, 256))),
        "din": DIN((200, 80)),
    }
    if name not in models:
        raise ValueError(f"model={name!r} must be one of {', '.join(models)}.")
    return models[name]
