"""The record of a training run, kept by its hooks: the clock, the progress bar, the losses and the
evaluations."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from jaxrec.checkpoint import Image, deltas, images, restore
from jaxrec.checkpoint.row_deltas import is_delta
from jaxrec.embedding import EmbeddingSpec, capacity_of
from jaxrec.loop import evaluate, planned
from jaxrec.shadowsync import with_mean_replica
from jaxrec.types import TrainState
from main.cli import Run, say
from main.click_data import Data
from main.signals import Asked, Stopped

LOSSES = 50  # how many a row of metrics is the mean of
_KEPT = 400  # steps, as a save beside training may be of one that lies behind
_NOT_OF_RESULTS = ("step", "train_loss", "failures")  # but of a row
_SHORT = {
    "stale_share": "stale", "sync_gap_steps": "gap", "replica_spread": "spread", "pls": "pls", "rows_saved": "rows",
}  # fmt: skip


class Past(NamedTuple):
    """What a run that goes on has behind it."""

    history: list[dict]  # rows of metrics
    extra: dict  # what was saved along with the state


def resumed(run: Run, state: TrainState) -> tuple[TrainState, Image | None, Past]:
    """The newest state of the run, its image, and what was logged up to it; the given state if nothing
    is saved."""
    directory, history = run.directory / "checkpoints", run.metrics()
    if not images(directory) and not deltas(directory):
        if history:
            raise ValueError(
                f"{run.directory} has metrics up to step {history[-1]['step']}, but no image to go on from: bring "
                "its checkpoints back, or begin anew in another --workdir."
            )
        if run.resumed:
            say(f"{run.directory} has not saved anything yet: this run begins at step 0")
        return state, None, Past([], {})
    state, image = restore(directory, state)
    if image.run != run.id:
        raise ValueError(f"{image.path} is of run {image.run}, not of this one ({run.id}): give another --workdir.")
    # Rows after the image would be logged a second time when their steps are trained again.
    kept = [row for row in history if row["step"] <= image.step]
    again = f"; {len(history) - len(kept)} rows of metrics after it are made again" if kept != history else ""
    run.rewrite_metrics(kept)
    say(f"going on from {image.path}, step {image.step}{again}")
    if is_delta(image.path.name):
        # Also at a regular save, after which nothing counts as lost: a scheme has not picked every row until then.
        lost = image.step - image.extra["cpr"]["regular"]
        say(
            "rows that no scheme has picked since they changed are older than the image, which counts as "
            f"{lost} lost steps: not bit for bit"
        )
    return state, image, Past(kept, image.extra)


def check_seeds(run: Run, seeds: int) -> None:
    """Refuses the directory of a run of one seed for several, and the other way round."""
    if seeds == 1 and any(run.directory.glob("seed_*")):
        raise ValueError(f"{run.directory} holds runs of several seeds: say of how many, with --seeds.")
    if seeds > 1 and (run.directory / "checkpoints").exists():
        raise ValueError(f"{run.directory} holds a run of one seed: leave out --seeds, or give another --workdir.")


class Failures:
    """Watcher of an engine that notes which shards were lost, and when; what recovers is entered after it.

    Args:
      engine: that tells of them; only with a recovery, as an engine takes who is told for who recovers.
      examples_after: step -> examples.
      past: those that the run has seen before this process.
      note: is told of each one, before anything is recovered.
    """

    def __init__(
        self, engine, examples_after: Callable[[int], int], past: Sequence[dict] = (),
        note: Callable[[dict], None] = lambda failure: None,
    ):  # fmt: skip
        self._engine, self._examples_after, self.seen, self._note = engine, examples_after, [*past], note

    def __enter__(self) -> "Failures":
        return self

    def __exit__(self, kind, error, trace) -> None:
        """Nothing was opened."""

    def recover(self, shards: Sequence[int]) -> None:
        """Notes lost shards; others bring them back."""
        step = self._engine.step
        self.seen.append({"step": step, "examples": self._examples_after(step), "shards": [*shards]})
        self._note(self.seen[-1])


def _without(failures, known):
    """The failures that are not among the known ones, each of which stands for one."""
    rest = [*failures]
    for each in known:
        if each in rest:
            rest.remove(each)
    return rest


class Recorder:
    """What a run has seen so far.

    Args:
      run: where rows of metrics go.
      data: what is trained and evaluated on.
      spec: of the tables.
      eval_step: as from `make_eval_step`.
      first: the step that the run begins at, or goes on from.
      past: what was before that step.
      asked: whether the run shall stop; an evaluation then leaves off.
      evaluations: how many of them, evenly over the run.
      figures: (state, metrics of the step) -> a figure of each technique that is on.
    """

    def __init__(
        self, run: Run, data: Data, spec: EmbeddingSpec, eval_step: Callable, first: int, past: Past, asked: Asked,
        evaluations: int, figures: Callable[[Any, dict], dict] = lambda state, metrics: {},
    ):  # fmt: skip
        self.run, self.data, self.asked, self.history = run, data, asked, past.history
        self.spec, self.eval_step, self.figures = spec, eval_step, figures
        self.every_steps = -(-data.steps // evaluations)
        # In the middle the validation is looked at, if there is one.
        self.watched = "validation" if data.validation else "test"
        before = past.extra.get("train_losses", ())
        self._losses: dict[int, Any] = {first - len(before) + 1 + i: loss for i, loss in enumerate(before)}
        self._capacity: dict[int, Any] = {first: past.extra.get("capacity")}
        self._failures: Failures | None = None
        self._failed_before = [*past.extra.get("failures", ())]
        self.bar = tqdm(
            total=data.examples, initial=data.examples_after(first), unit="ex", unit_scale=True, disable=None
        )
        self.seconds, self.since = past.extra.get("train_seconds", 0.0), time.perf_counter()

    def watch_failures(self, engine, are_real: Callable[[], bool] = lambda: False) -> int:
        """Notes what shards an engine loses; before what recovers them is entered.

        Args:
          engine: that loses them.
          are_real: whether those that are lost now are, and not emulated: steps that are trained again lose emulated
            ones again, but real ones are in no image until the next save, and stand in failures.json.

        Returns:
          How many real ones an earlier process has lost that the image does not know of.
        """
        real = self.run.read_json("failures.json").get("failures", [])

        def note(failure):
            if are_real():
                real.append(failure)
                self.run.write_json("failures.json", {"failures": real})

        unsaved = _without(real, self._failed_before)
        self._failed_before = [*self._failed_before, *unsaved]
        self._failures = engine.enter(Failures(engine, self.data.examples_after, self._failed_before, note))
        return sum(len(failure["shards"]) for failure in unsaved)

    @property
    def failures(self) -> list[dict]:
        """Step, examples and shards of each failure so far."""
        return [*self._failures.seen] if self._failures else []

    def latest_losses(self, step: int) -> np.ndarray:
        """The losses of the last 50 steps up to one, f32, across a resume too."""
        known = sorted(at for at in [*self._losses] if at <= step)[-LOSSES:]
        return np.array(jax.device_get([self._losses[at] for at in known]), np.float32)

    def extra(self, step: int) -> dict[str, Any]:
        """What is saved along with the state of a step, so that a resumed run logs what an undisturbed
        one does.

        Raises:
          FloatingPointError: a loss is not finite: such a state must not take the place of a good
            one.
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
            "vocabulary_digest": self.data.vocabulary_digest,
            "train_seconds": self.seconds + time.perf_counter() - self.since,
            # A save of a step comes before a failure at that step; what was lost later happens again, or is noted.
            "failures": [*self._failed_before, *(each for each in new if each["step"] <= step)],
        }

    def show(self, state, step, plans, step_metrics):
        """Hook: moves the bar. Free trainers show a stretch."""
        self.bar.update(self.data.examples_after(step) - self.bar.n)  # back, too, when all is rolled back
        self._losses[step] = step_metrics["loss"]
        while (oldest := next(iter(self._losses))) <= step - _KEPT:  # they are in the order of steps
            del self._losses[oldest]
        if plans is not None:
            capacity = capacity_of(plans)
            if capacity != next(reversed(self._capacity.values())):
                self._capacity[step] = capacity
        # To look at a loss is to wait for its step, and the device should run ahead: so only now
        # and then.
        if step % 20 == 0 and not self.bar.disable:
            short = {_SHORT.get(name, name): f"{x:.3g}" for name, x in self.figures(state, step_metrics).items()}
            self.bar.set_postfix(loss=f"{float(step_metrics['loss']):.4f}", **short, refresh=False)
        return state

    def due(self, step: int) -> bool:
        """Whether it is time for an evaluation that has not been made."""
        # One has come up since the last row, as free trainers come by after many steps.
        last = max((row["step"] for row in self.history), default=0)
        evenly = step // self.every_steps > last // self.every_steps
        return step > last and (evenly or step == self.data.steps)

    def look(self, state, step: int, step_metrics: dict | None = None) -> bool:
        """Evaluates a state at rest, or leaves off if asked to stop: whether there is a row of it. Its time is no
        training time."""
        losses = self.latest_losses(step)  # before the clock is read: this waits for the step
        self.seconds += time.perf_counter() - self.since
        row = {"step": step, "examples": self.data.examples_after(step), "train_seconds": self.seconds}
        row |= {"train_loss": float(losses.mean())}
        if self._failures:
            told = list(itertools.chain.from_iterable(row.get("failures", ()) for row in self.history))
            row |= {"failures": [failure for failure in self.failures if failure not in told]}
        row |= {name: x for name, x in self.figures(state, step_metrics or {}).items() if math.isfinite(x)}
        try:
            with contextlib.suppress(Stopped):
                row |= self.evaluated(state, self.watched)
                self.history.append(row)
                self.run.log(row)
                auc, log_loss = (row[f"{self.watched}_{name}"] for name in ("auc", "log_loss"))
                say(f"step {step}: {self.watched} AUC {auc:.4f}, log loss {log_loss:.4f}")
        finally:  # also where it meets lost shards, and comes again
            self.since = time.perf_counter()
        return row in self.history[-1:]

    def evaluated(self, state, which: str) -> dict[str, float]:
        """Figures of a state on the validation or the test; of several replicas those of their mean, the model
        that they are together.

        Raises:
          Stopped: a signal has come.
        """
        state = with_mean_replica(state)
        batches = (self.data.validation if which == "validation" else None) or self.data.test
        with contextlib.closing(planned(self.spec, batches())) as pairs:
            found = evaluate(state, self.asked.each(pairs), self.eval_step)
        return {f"{which}_{key}": value for key, value in found.items()}

    def best(self) -> dict | None:
        """The row of the best validation so far, the earliest of equals."""
        return max(self.history, key=lambda row: (row[f"{self.watched}_auc"], -row["step"]), default=None)

    def is_best(self, step: int) -> bool:
        """Whether the best validation so far is that of a step."""
        best = self.best()
        return best is not None and best["step"] == step

    def has_no_patience(self, patience: int | None) -> bool:
        """Whether so many evaluations have passed since the best one."""
        if patience is None or (best := self.best()) is None:  # it is asked after every step
            return False
        return sum(row["step"] > best["step"] for row in self.history) >= patience

    def results(self) -> dict[str, Any]:
        """What results.json says of the training."""
        last = self.history[-1]
        results = {"steps": last["step"]} | {key: last[key] for key in last if key not in _NOT_OF_RESULTS}
        return results | self.data.best | {"examples_per_s": last["examples"] / max(last["train_seconds"], 1e-9)}
