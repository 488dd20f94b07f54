"""Record of a training run, kept by callbacks: clock, progress bar, losses and evaluations."""

import contextlib
import itertools
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from jaxrec.callbacks import Callback, StepInfo
from jaxrec.checkpoint import Image, deltas, images, restore
from jaxrec.checkpoint.row_deltas import is_delta
from jaxrec.embedding import EmbeddingSpec, capacity_of
from jaxrec.files import make_directory
from jaxrec.prefetch import planned
from jaxrec.shadowsync import with_mean_replica
from jaxrec.types import TrainState
from main.cli import Run, say
from main.click_data import Data
from main.saving import Best
from main.signals import Asked, Stopped
from main.subsets import fields_of, gauc
from main.targets import evaluate, told

LOSSES = 50  # averaged in a row of metrics
_KEPT = 400  # steps of losses to keep, as a save beside training may be of an earlier step
_TOLD = {"auc": "AUC", "log_loss": "log loss", "rmse": "RMSE", "mae": "MAE"}
_NOT_OF_RESULTS = ("step", "train_loss", "failures")  # in rows only
_SHORT = {
    "stale_share": "stale", "sync_gap_steps": "gap", "replica_spread": "spread", "pls": "pls", "rows_saved": "rows",
}  # fmt: skip


class Past(NamedTuple):
    """Past of a resumed run."""

    history: list[dict]  # rows of metrics
    extra: dict  # JSON values saved with the state


def resumed(
    run: Run, state: TrainState, data: Data
) -> tuple[TrainState, Image | None, Past]:  # fmt: skip
    """Return the newest state of the run, its image and its past; the given state if nothing is saved."""
    directory, history = run.directory / "checkpoints", run.metrics()
    if not images(directory) and not deltas(directory):
        if history:
            raise ValueError(
                f"{run.directory} has metrics up to step {history[-1]['step']}, but no image to go on from: bring "
                "its checkpoints back, or begin anew in another --workdir."
            )
        if run.resumed:
            say(f"{run.directory} has not saved anything yet: this run begins at step 0")
        run.grown()
        return state, None, Past([], {})
    # Rows of categories that came up after the image have their initial values.
    state, image = restore(directory, state, grow=data.before is not None)
    if image.run != run.id:
        raise ValueError(f"{image.path} is of run {image.run}, not of this one ({run.id}): give another --workdir.")
    check_mapping(run, image.extra, data)
    run.grown()
    # Rows after the image are logged again when their steps are trained again.
    kept = [row for row in history if row["step"] <= image.step]
    again = f"; {len(history) - len(kept)} rows of metrics after it are made again" if kept != history else ""
    run.rewrite_metrics(kept)
    say(f"going on from {image.path}, step {image.step}{again}")
    if is_delta(image.path.name):
        # Also at a regular save, which counts no lost steps: a scheme has not picked every row until then.
        lost = image.step - image.extra["cpr"]["regular"]
        say(
            "rows that no scheme has picked since they changed are older than the image, which counts as "
            f"{lost} lost steps: not bit for bit"
        )
    return state, image, Past(kept, image.extra)


def mapping_of(data: Data) -> dict[str, Any]:
    """Return what the rows and outputs of a run stand for, as JSON values to save with its states."""
    return {
        "vocabulary_digest": data.vocabulary_digest, "division": data.division, "targets": told(data.targets),
    }  # fmt: skip


def check_mapping(run: Run, saved: Mapping[str, Any], data: Data) -> None:
    """Refuse to go on with rows or outputs that stand for something else in the data: silently, they would be wrong."""
    now = mapping_of(data)
    if saved.get("targets", now["targets"]) != now["targets"]:
        raise ValueError(
            f"{run.directory} predicts {saved['targets']} (label, weight, mean and deviation), and its data now has "
            f"{now['targets']}: prepare the same sources again, or begin anew in another --workdir."
        )
    every = [data, *_earlier(data)]
    for name, what in (("vocabulary_digest", "vocabulary"), ("division", "division into training and test rows")):
        if saved.get(name) not in (None, *(getattr(each, name) for each in every)):
            raise ValueError(
                f"{run.directory} was trained with another {what} than that of its data now: prepare the same sources "
                "with the same options again, or begin anew in another --workdir."
            )


def _earlier(data: Data) -> list[Data]:
    """Return the data of before, whose rows the run trains on first."""
    return [] if data.before is None else [data.before, *_earlier(data.before)]


def check_seeds(run: Run, seeds: int) -> None:
    """Refuse the directory of a run of one seed for several seeds, and vice versa."""
    if seeds == 1 and any(run.directory.glob("seed_*")):
        raise ValueError(f"{run.directory} holds runs of several seeds: say of how many, with --seeds.")
    if seeds > 1 and (run.directory / "checkpoints").exists():
        raise ValueError(f"{run.directory} holds a run of one seed: leave out --seeds, or give another --workdir.")


class Failures(Callback):
    """Records which shards an engine has lost, and when; list it before the recovery, and only together with one.

    Args:
      examples_after: step -> examples.
      past: failures recorded before this process.
      note: called with each failure, before anything is recovered.
    """

    def __init__(
        self, examples_after: Callable[[int], int], past: Sequence[dict] = (),
        note: Callable[[dict], None] = lambda failure: None,
    ):  # fmt: skip
        self._examples_after, self.seen, self._note = examples_after, [*past], note

    def begin(self, engine: Any) -> None:
        """See `Callback`."""
        self._engine = engine

    def recover(self, shards: Sequence[int]) -> None:
        """Record lost shards; the recovery restores them."""
        step = self._engine.step
        self.seen.append({"step": step, "examples": self._examples_after(step), "shards": [*shards]})
        self._note(self.seen[-1])


def _without(failures, known):
    """Return the failures minus the known ones, as multisets."""
    rest = [*failures]
    for each in known:
        if each in rest:
            rest.remove(each)
    return rest


@contextlib.contextmanager
def tensorboard(directory: Path | None, rows: Sequence[dict]) -> Iterator[Callable[[dict], None]]:
    """Open a new file for TensorBoard in place of an earlier one, with the given rows of metrics.

    Args:
      directory: of the file; None for none.

    Yields:
      What adds a row.
    """
    if directory is None:
        yield lambda row: None
        return
    # Not SummaryWriter: its thread ends, and then its callers wait for ever, if the disk is full.
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary

    shutil.rmtree(directory, ignore_errors=True)
    make_directory(directory)
    writer = EventsWriter(str(directory / "events"))
    # A TensorBoard that has read the earlier file forgets its points.
    writer.write_event(Event(step=0, session_log=SessionLog(status=SessionLog.START)))

    def write(row):
        found = {name: x for name, x in row.items() if name != "step" and isinstance(x, int | float)}
        values = [Summary.Value(tag=name, simple_value=x) for name, x in found.items()]
        try:
            writer.write_event(Event(wall_time=time.time(), step=row["step"], summary=Summary(value=values)))
            writer.flush()
        except OSError as error:
            say(f"{error}: from step {row['step']} on TensorBoard has nothing until the run resumes", sys.stderr)

    for row in rows:
        write(row)
    try:
        yield write
    finally:
        with contextlib.suppress(OSError):
            writer.close()


class Recorder:
    """Losses, evaluations, failures and training time of a run so far.

    Args:
      first: step at which the run begins or resumes.
      past: record of the run before that step.
      asked: whether to stop; an evaluation then breaks off.
      evaluations: number of evaluations, evenly over the run.
      group: field or key within which AUCs are averaged too (GAUC).
      scalars: called with each row of metrics.
      figures: (state, metrics of the step) -> figures of the active techniques.
    """

    def __init__(
        self, run: Run, data: Data, spec: EmbeddingSpec, eval_step: Callable, first: int, past: Past, asked: Asked,
        evaluations: int, group: str | None = None,
        scalars: Callable[[dict], object] = lambda row: None,
        figures: Callable[[Any, dict], dict] = lambda state, metrics: {},
    ):  # fmt: skip
        self.run, self.data, self.asked, self.history, self.group = run, data, asked, past.history, group
        self.spec, self.eval_step, self.scalars, self.figures = spec, eval_step, scalars, figures
        self.every_steps = -(-data.steps // evaluations)
        # During training the validation set is evaluated, if there is one.
        self.watched = "validation" if data.validation else "test"
        before = past.extra.get("train_losses", ())
        self._losses: dict[int, Any] = {first - len(before) + 1 + i: loss for i, loss in enumerate(before)}
        self._capacity: dict[int, Any] = {first: past.extra.get("capacity")}
        self._kept_keys: dict[str, np.ndarray] = {}  # of the validation or the test, numbered
        self._failures: Failures | None = None
        self._failed_before = [*past.extra.get("failures", ())]
        self.bar = tqdm(
            total=data.examples, initial=data.examples_after(first), unit="ex", unit_scale=True, disable=None
        )
        self.seconds, self.since = past.extra.get("train_seconds", 0.0), time.perf_counter()

    def watch_failures(self, engine, are_real: Callable[[], bool] = lambda: False) -> int:
        """Record the shards that an engine loses; call it before the recovery is entered.

        Args:
          are_real: whether the shards lost now are really lost. Retrained steps repeat emulated failures; real ones are
            in no image until the next save, so failures.json keeps them.

        Returns:
          Number of shards really lost in an earlier process that the image does not record.
        """
        real = self.run.read_json("failures.json").get("failures", [])

        def note(failure):
            if are_real():
                real.append(failure)
                self.run.write_json("failures.json", {"failures": real})

        unsaved = _without(real, self._failed_before)
        self._failed_before = [*self._failed_before, *unsaved]
        self._failures = engine.enter(Failures(self.data.examples_after, self._failed_before, note))
        return sum(len(failure["shards"]) for failure in unsaved)

    @property
    def failures(self) -> list[dict]:
        """Step, examples and shards of each failure so far."""
        return [*self._failures.seen] if self._failures else []

    def latest_losses(self, step: int) -> np.ndarray:
        """Return the losses of the last 50 steps up to `step`, f32, also across a resume."""
        known = sorted(at for at in [*self._losses] if at <= step)[-LOSSES:]
        return np.array(jax.device_get([self._losses[at] for at in known]), np.float32)

    def extra(self, step: int) -> dict[str, Any]:
        """Return what to save with the state of a step, so that a resumed run logs what an undisturbed one does.

        Raises:
          FloatingPointError: a loss is not finite: such a state must not replace a good one.
        """
        losses = self.latest_losses(step)
        if not np.isfinite(losses).all():
            raise FloatingPointError(
                "the loss is not finite: this state is not saved, the images before it stay. Lower the learning rates, "
                "or look at the data."
            )
        known = max((at for at in [*self._capacity] if at <= step), default=None)
        new = self.failures[len(self._failed_before) :]
        return {
            "capacity": None if known is None else self._capacity[known],
            "train_losses": losses.tolist(),
            **mapping_of(self.data),
            "train_seconds": self.seconds + time.perf_counter() - self.since,
            # A save of a step precedes a failure at that step. Later failures are repeated, or are in failures.json.
            "failures": [*self._failed_before, *(each for each in new if each["step"] <= step)],
        }

    def show(self, info: StepInfo) -> None:
        """Advance the bar and keep the loss, after every step or stretch."""
        step, step_metrics = info.step, info.metrics
        self.bar.update(self.data.examples_after(step) - self.bar.n)  # negative after a rollback
        self._losses[step] = step_metrics["loss"]
        while (oldest := next(iter(self._losses))) <= step - _KEPT:  # in the order of steps
            del self._losses[oldest]
        if info.plans:
            capacity = capacity_of(info.plans)
            if capacity != next(reversed(self._capacity.values())):
                self._capacity[step] = capacity
        # Reading a loss waits for its step, and the device should run ahead: only every 20 steps.
        if step % 20 == 0 and not self.bar.disable:
            short = {_SHORT.get(name, name): f"{x:.3g}" for name, x in self.figures(info.state, step_metrics).items()}
            self.bar.set_postfix(loss=f"{float(step_metrics['loss']):.4f}", **short, refresh=False)

    def due(self, step: int) -> bool:
        """Whether an evaluation is due and has not been made."""
        # Compared with the last row, as free-running trainers call this after many steps only.
        last = max((row["step"] for row in self.history), default=0)
        evenly = step // self.every_steps > last // self.every_steps
        return step > last and (evenly or step == self.data.steps)

    def look(self, state, step: int, step_metrics: dict | None = None, best: Best | None = None) -> None:
        """Evaluate a state at rest, outside training time, save it if it is the best one, and log a row.

        If asked to stop, nothing is saved and no row logged.
        """
        losses = self.latest_losses(step)  # before the clock is read: this waits for the step
        self.seconds, self.since = self.seconds + time.perf_counter() - self.since, time.perf_counter()
        row = {"step": step, "examples": self.data.examples_after(step), "train_seconds": self.seconds}
        row |= {"train_loss": float(losses.mean())}
        if self._failures:
            told = list(itertools.chain.from_iterable(row.get("failures", ()) for row in self.history))
            row |= {"failures": [failure for failure in self.failures if failure not in told]}
        row |= {name: x for name, x in self.figures(state, step_metrics or {}).items() if math.isfinite(x)}
        try:
            with contextlib.suppress(Stopped):
                row |= self.evaluated(state, self.watched)
                if best is not None:
                    # Before the row is logged: a run that is killed in between evaluates again when it resumes.
                    best.offer(state, row)
                self.history.append(row)
                self.run.log(row)
                self.scalars(row)
                shown = {word: row.get(f"{self.watched}_{name}") for name, word in _TOLD.items()}
                words = [f"{word} {value:.4f}" for word, value in shown.items() if value is not None]
                say(f"step {step}: {self.watched} {', '.join(words)}")
        finally:  # also if lost shards end the evaluation, which is then repeated
            self.since = time.perf_counter()

    def evaluated(self, state, which: str) -> dict[str, float]:
        """Return metrics of a state on validation or test; several replicas are evaluated as their mean.

        Raises:
          Stopped: a signal arrived.
        """
        state = with_mean_replica(state)
        batches = (self.data.validation if which == "validation" else None) or self.data.test
        seen: list[tuple[np.ndarray, ...]] = []  # logit, label, weight, and the group if it is a field
        table = self.data.table
        of_key = table is not None and self.group in table.get("keys", ())

        def predict(state, batch, plans):
            logit = np.asarray(self.eval_step(state, batch, plans))
            if self.group is not None:
                group = [] if of_key else [fields_of(self.spec, batch, [self.group], table)[self.group]]
                main = (np.asarray(array).reshape(len(logit), -1)[:, 0] for array in (logit, batch.label))
                seen.append((*main, np.asarray(batch.weight), *group))
            return logit

        with contextlib.closing(planned(self.spec, batches())) as pairs:
            found = evaluate(state, self.asked.each(pairs), predict, self.data.targets)
        if self.group is not None:
            logit, label, weight, *fields = map(np.concatenate, zip(*seen, strict=True))
            group = fields[0] if fields else self._keys(which, len(logit))
            found["gauc"] = gauc(logit, label, group, weight, self.group, table if fields else None)["gauc"]
        return {f"{which}_{key}": value for key, value in found.items()}

    def _keys(self, which: str, rows: int) -> np.ndarray:
        """Return the key by which AUCs are grouped, of all rows in order and of those that pad the last batch."""
        assert self.data.keys is not None and self.group is not None
        if which not in self._kept_keys:
            _, self._kept_keys[which] = np.unique(self.data.keys(self.group, which), return_inverse=True)
        return np.pad(self._kept_keys[which], (0, rows - len(self._kept_keys[which])))

    def results(self, best: Best | None = None) -> dict[str, Any]:
        """Return the part of results.json about training; figures of the validation are those of the best state."""
        last = self.history[-1]
        results = {"steps": last["step"], "batch_size": self.data.batch_size} | {
            key: last[key] for key in last if key not in _NOT_OF_RESULTS
        }
        if len(self.data.targets) > 1:
            results["labels"] = [target.name for target in self.data.targets]
        if best is not None:
            results |= best.results() | {"stopped_early": last["step"] < self.data.steps}
        return results | self.data.best | {"examples_per_s": last["examples"] / max(last["train_seconds"], 1e-9)}
