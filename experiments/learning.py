"""How the click job learns: the flags of the model, its optimizers and the schedule of their rates."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import optax
from contract import Flags

from jaxrec.embedding import (
    adagrad,
    ftrl,
    lazy_adam,
    momentum_sgd,
    rowwise_adagrad,
    rowwise_adam,
    sgd,
    with_clipping,
    with_weight_decay,
)
from jaxrec.types import RowOptimizer

OPTIMIZERS: dict[str, Callable] = {"adam": optax.adam, "adagrad": optax.adagrad, "sgd": optax.sgd}
ROW_OPTIMIZERS: dict[str, Callable] = {
    "rowwise_adagrad": rowwise_adagrad, "adagrad": adagrad, "sgd": sgd, "momentum_sgd": momentum_sgd,
    "lazy_adam": lazy_adam, "rowwise_adam": rowwise_adam, "ftrl": ftrl,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LearningFlags(Flags):
    """The model, and how its dense parameters and its rows learn."""

    model: Literal["dlrm", "dcnv2", "lr", "fm", "dnn", "wide_deep", "deepfm", "finalmlp", "din", "small_dlrm"] = "dlrm"
    embedding_width: int = 16
    optimizer: Literal["adam", "adagrad", "sgd"] = "adam"
    """Of the dense parameters."""
    learning_rate: float = 1e-3
    row_optimizer: Literal["rowwise_adagrad", "adagrad", "sgd", "momentum_sgd", "lazy_adam", "rowwise_adam", "ftrl"] = (
        "rowwise_adagrad"
    )
    """Of the embedding rows."""
    row_learning_rate: float = 0.02
    row_weight_decay: float = 0.0
    """L2 penalty of the rows that a batch touches."""
    row_clip_norm: float | None = None
    """Clip the gradient of each row to this norm."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Of both learning rates, behind the warm-up: as they are, or falling to 0 at the end of the run."""
    warmup_steps: int = 0
    """Over so many steps both learning rates rise from 0, in a straight line."""


def optimizers(config: LearningFlags, steps: int) -> tuple[optax.GradientTransformation, RowOptimizer]:
    """The optimizer of the dense parameters and that of the rows, at one schedule.

    Args:
      config: the flags.
      steps: of the run, of all epochs, at whose end a schedule ends. A trainer that runs freely
        counts its own steps alone: give what one of them takes.

    Raises:
      ValueError: the warm-up takes the whole run.
    """
    rate, row_rate = (_scheduled(peak, config, steps) for peak in (config.learning_rate, config.row_learning_rate))
    rows = ROW_OPTIMIZERS[config.row_optimizer](row_rate)
    if config.row_weight_decay:
        rows = with_weight_decay(rows, config.row_weight_decay)
    if config.row_clip_norm is not None:  # around the decay, so that data alone is clipped
        rows = with_clipping(rows, config.row_clip_norm)
    return OPTIMIZERS[config.optimizer](rate), rows


def _scheduled(peak: float, config: LearningFlags, steps: int) -> float | optax.Schedule:
    """A rate at a schedule; a constant one stays a float, and its program what it is."""
    warmup = config.warmup_steps
    if not 0 <= warmup < steps:
        raise ValueError(f"--warmup-steps {warmup} must be less than the {steps} steps of the run: give fewer.")
    if config.schedule == "constant" and not warmup:
        return peak
    behind = {
        "constant": optax.constant_schedule(peak),
        "cosine": optax.cosine_decay_schedule(peak, steps - warmup),
        "linear": optax.linear_schedule(peak, 0.0, steps - warmup),
    }[config.schedule]
    if not warmup:
        return behind
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), behind], [warmup])
