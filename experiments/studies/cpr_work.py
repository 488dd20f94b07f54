"""The click job on 8 embedding nodes with failures that cpr_overhead.py trains, one arm after another."""

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import optax
from main.cli import Flags, refuse, unread
from main.click_data import Data, click_job, criteo_of_seeds, synthetic_clicks
from main.model import make_model

from jaxrec.cpr import Recovery, mfu, random_rows, scar, ssu
from jaxrec.data.synthetic import scaled_cardinalities
from jaxrec.embedding import HostTables, rowwise_adagrad
from jaxrec.engine import Serial
from jaxrec.loop import evaluate, keep_memory
from jaxrec.prefetch import planned

SCHEMES: dict[str, Callable[[int], Any]] = {  # of the seed of a run
    "vanilla": lambda seed: None, "scar": lambda seed: scar(), "mfu": lambda seed: mfu(), "ssu": lambda seed: ssu(),
    "random": random_rows,
}  # fmt: skip
NODES = 8


@dataclasses.dataclass(frozen=True)
class JobConfig(Flags):
    """Flags of the trained job; defaults follow from the preset."""

    resume: bool = False
    seeds: int | None = None
    data: Literal["synthetic", "criteo"] = "synthetic"
    path: tuple[Path, ...] | None = None
    """Directories of prepared Criteo rows, which seeds take in turn."""
    examples: int | None = None
    rows: int | None = None
    """Total rows of all synthetic tables; default: 0.74 per example, as in Criteo Kaggle (33.8M and 45.8M)."""
    batch_size: int | None = None
    fraction: float = 0.125
    watched: int = 26
    """Number of tables that the schemes track, largest first; others are saved whole at regular saves. Paper, as we
    recall: 7."""
    learning_rate: float = 1e-3
    row_learning_rate: float = 0.02
    width: int = 16


def make_data(config: JobConfig, examples: int) -> Callable[[int], Data]:
    """Return seed -> its data: synthetic clicks of that seed, or prepared Criteo rows in file order."""
    criteo = config.data == "criteo"
    refuse(
        unread(config, {"--data criteo": (criteo, ("path",)), "--data synthetic": (not criteo, ("rows",))})
        | {"--data criteo needs --path: directories made by prepare.py.": criteo and not config.path}
    )
    if config.path is None:
        cardinalities = scaled_cardinalities(config.rows or 74 * examples // 100)
        batch_size = config.batch_size or 1024
        steps = examples // batch_size
        tested = max(5, min(100, steps // 10))
        return lambda seed: synthetic_clicks(cardinalities, batch_size, steps, config.seed + seed, tested)
    return criteo_of_seeds(config.path, config.seed, config.batch_size or 128, examples=config.examples, padded=False)


class CprJob:
    """The model and its compiled programs, shared by all runs; each run starts with fresh tables and dense state."""

    def __init__(self, config: JobConfig, data: Callable[[int], Data]):
        keep_memory()
        self.config, self.data = config, data
        # One shard per node.
        self.clicks = click_job(
            data(0).cardinalities, make_model("small_dlrm", config.width), optax.adam(config.learning_rate),
            rowwise_adagrad(config.row_learning_rate), config.width, shards=NODES,
        )  # fmt: skip
        self.eval_step = self.clicks.eval_step()
        tables = self.clicks.spec.tables
        self.whole = sorted(tables, key=lambda name: -tables[name].rows)[config.watched :]
        self.batches = functools.lru_cache(maxsize=1)(self._batches)

    def steps(self, seed: int) -> int:
        """Training steps of a seed."""
        return len(self.batches(seed)[0])

    def _batches(self, seed: int) -> tuple[list, list]:
        """Training batches and planned test batches, shared by all arms of a seed."""
        data = self.data(seed)
        return list(data.train(0)), list(planned(self.clicks.spec, data.test()))

    def run(
        self, scheme: str | None, seed: int, save_every_steps: float, failures: dict[int, list[int]]
    ) -> dict[str, Any]:
        """Train one arm with failures {step: shards}, or without any if `scheme` is None, and evaluate it."""
        seed_of_rows = self.config.seed + seed
        spec = dataclasses.replace(self.clicks.spec, seed=seed_of_rows)
        state = self.clicks.state(HostTables.create(spec, self.clicks.task.row_optimizer), seed_of_rows)
        batches, test = self.batches(seed)
        row: dict[str, Any] = {"scheme": scheme or "no_failure", "seed": seed, "realized_pls": 0.0}
        if scheme is None:
            state = Serial(self.clicks.task, state).train(batches)
        else:
            state, figures = self._recovered(state, batches, SCHEMES[scheme](seed_of_rows), save_every_steps, failures)
            row |= figures
        found = evaluate(state, test, self.eval_step)
        return row | {f"test_{key}": found[key] for key in ("auc", "normalized_entropy", "log_loss")}

    def _recovered(self, state, batches, scheme, save_every_steps, failures):
        """Train with real saves, losses and restores."""
        whole = () if scheme is None or scheme.name == "scar" else self.whole  # SCAR compares all rows
        with tempfile.TemporaryDirectory() as directory:
            recovery = Recovery(
                directory, save_every_steps, len(batches), scheme=scheme, whole=whole,
                fraction=self.config.fraction, failures=failures,
                pick_ahead_steps=0,  # a step stands for minutes of the job, a pick takes one second
                save_at_end=False,
            )  # fmt: skip
            with Serial(self.clicks.task, state, [recovery]) as engine:
                state = engine.train(batches)
        figures = {"realized_pls": recovery.pls, "saves": recovery.saves, "rows_saved": recovery.rows_saved}
        return state, figures | {"shards_failed": recovery.failed, "stall_seconds": recovery.stall_seconds}


def failures_in_steps(failures, steps: int) -> dict[int, list[int]]:
    """Map failure times in hours to {step: shards} of a job of `steps` steps."""
    found: dict[int, list[int]] = {}
    for hour, node in zip(failures.hours, failures.node, strict=True):
        step = min(max(1, round(hour / failures.span_hours * steps)), steps)
        if node not in found.setdefault(step, []):
            found[step].append(int(node))
    return found
