"""How a run learns: its model, and the optimizers of the dense parameters and of the rows, on one schedule."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import optax

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
from main.cli import refuse
from main.click_data import ClickJob, Data, click_job, fields_of
from main.model import check_model, is_own, model_of, of_run
from main.table_data import table_job, tables_by_field
from main.widths import widths_of

OPTIMIZERS: dict[str, Callable] = {"adam": optax.adam, "adagrad": optax.adagrad, "sgd": optax.sgd}
ROW_OPTIMIZERS: dict[str, Callable] = {
    "rowwise_adagrad": rowwise_adagrad, "adagrad": adagrad, "sgd": sgd, "momentum_sgd": momentum_sgd,
    "lazy_adam": lazy_adam, "rowwise_adam": rowwise_adam, "ftrl": ftrl,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Learning:
    """Model, and optimizers of its dense parameters and rows."""

    model: str = "dlrm"
    """dlrm, dcnv2, dcnv2_mlperf (at width 128 that of MLPerf Training), lr, fm, dnn, wide_deep, deepfm, finalmlp, din
    or small_dlrm; for several labels shared_bottom or mmoe; or one's own, as FILE.py:NAME, see docs/your_model.md."""
    embedding_width: int = 16
    widths: tuple[str, ...] = ()
    """FIELD=WIDTH: fields with tables of another width, such as weekday=4 tag=8; a learned matrix projects their rows
    to --embedding-width."""
    row_dtype: Literal["float32", "float16"] = "float32"
    """In which the embedding rows are stored: float16 take half the memory, and updates are rounded stochastically."""
    layers: tuple[int, ...] | None = None
    """Sizes of the layers of the model's tower, of DLRM those after the interaction; of FinalMLP of each tower; of
    shared_bottom and mmoe those that the labels share."""
    activation: Literal["relu", "leaky_relu", "gelu", "silu", "tanh"] = "relu"
    """Activation of these layers, and of those of DLRM before the interaction."""
    dropout: float = 0.0
    """Portion of the values of each of these layers that is dropped in training."""
    batch_norm: bool = False
    """Normalise each of these layers by the batch, before its activation."""
    experts: int | None = None
    """Number of experts of mmoe; default 8."""
    optimizer: Literal["adam", "adagrad", "sgd"] = "adam"
    """Optimizer of the dense parameters."""
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    """L2 penalty of the dense parameters."""
    clip_norm: float | None = None
    """Clip the gradient of the dense parameters to this norm, of all of them together."""
    row_optimizer: Literal["rowwise_adagrad", "adagrad", "sgd", "momentum_sgd", "lazy_adam", "rowwise_adam", "ftrl"] = (
        "rowwise_adagrad"
    )
    """Optimizer of the embedding rows."""
    row_learning_rate: float = 0.02
    row_weight_decay: float = 0.0
    """L2 penalty of the rows that a batch touches."""
    row_clip_norm: float | None = None
    """Clip the gradient of each row to this norm."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Schedule of both learning rates after the warm-up: constant, or decaying to 0 at the end of the run."""
    warmup_steps: int = 0
    """Steps over which both learning rates rise linearly from 0."""

    def __post_init__(self):
        if is_own(self.model):  # so that other processes, and what comes after the run, find it from their directories
            file, _, word = self.model.rpartition(":")
            object.__setattr__(self, "model", f"{Path(file).resolve()}:{word}")

    def check(self) -> None:
        """Raise ValueError if there is no such model, or no such layers."""
        refuse(
            {
                f"--dropout {self.dropout} must be less than 1: give the portion that is dropped.": self.dropout >= 1,
                "--layers has no sizes: give some, or leave it out.": self.layers == (),
            }
        )
        check_model(dataclasses.asdict(self), self.embedding_width)

    def job(self, data: Data, steps: int, shards: int, seed: int) -> ClickJob:
        """Build the job: the model over the tables of the data.

        Args:
          steps: see `optimizers`.
          shards: S, of every table.
          seed: of the initial rows.
        """
        model = model_of(dataclasses.asdict(self), self.embedding_width, len(data.targets))
        how = *self.optimizers(steps), self.embedding_width, shards, seed
        if data.table is not None:
            widths = widths_of(self.widths, tables_by_field(data.table))
            return table_job(data.table, model, *how, widths, self.row_dtype, data.targets)
        tables = {field: field for field in fields_of(len(data.cardinalities))}
        return click_job(data.cardinalities, model, *how, widths_of(self.widths, tables), self.row_dtype)

    def slower(self, factor: float) -> "Learning":
        """Return the same with both learning rates multiplied by a factor."""
        dense, rows = factor * self.learning_rate, factor * self.row_learning_rate
        return dataclasses.replace(self, learning_rate=dense, row_learning_rate=rows)

    def of_run(self, directory: Path) -> "Learning":
        """Return the flags with the file of the model that a run has kept."""
        return dataclasses.replace(self, model=of_run(self.model, directory))

    def optimizers(self, steps: int) -> tuple[optax.GradientTransformation, RowOptimizer]:
        """Build the optimizers of the dense parameters and of the rows.

        Args:
          steps: length of the schedule: steps of the run, over all epochs; of free-running trainers those of one.
        """
        rate, row_rate = self._scheduled(self.learning_rate, steps), self._scheduled(self.row_learning_rate, steps)
        rows = ROW_OPTIMIZERS[self.row_optimizer](row_rate)
        if self.row_weight_decay:
            rows = with_weight_decay(rows, self.row_weight_decay)
        if self.row_clip_norm is not None:  # around the decay, so that only gradients of the data are clipped
            rows = with_clipping(rows, self.row_clip_norm)
        dense = [OPTIMIZERS[self.optimizer](rate)]
        if self.weight_decay:
            dense.insert(0, optax.add_decayed_weights(self.weight_decay))
        if self.clip_norm is not None:  # before the decay, as for rows
            dense.insert(0, optax.clip_by_global_norm(self.clip_norm))
        return optax.chain(*dense) if len(dense) > 1 else dense[0], rows

    def _scheduled(self, peak: float, steps: int) -> float | optax.Schedule:
        """Return a learning rate with its schedule; a constant one stays a float, which keeps its program unchanged."""
        warmup = self.warmup_steps
        if not 0 <= warmup < steps:
            raise ValueError(f"--warmup-steps {warmup} must be less than the {steps} steps of the run: give fewer.")
        if self.schedule == "constant" and not warmup:
            return peak
        behind = {
            "constant": optax.constant_schedule(peak),
            "cosine": optax.cosine_decay_schedule(peak, steps - warmup),
            "linear": optax.linear_schedule(peak, 0.0, steps - warmup),
        }[self.schedule]
        if not warmup:
            return behind
        return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), behind], [warmup])
