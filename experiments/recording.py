"""The record of a training run, kept by its hooks: the clock, the progress bar, the losses and the
evaluations."""

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from click_data import Data
from contract import Run, plot, say
from stopping import Asked, Stopped
from tqdm import tqdm

from jaxrec.embedding import EmbeddingSpec, capacity_of
from jaxrec.loop import evaluate, planned


class Past(NamedTuple):
    """What a run that goes on has behind it."""

    history: list[dict]  # rows of metrics
    extra: dict  # what was saved along with the state


class Recorder:
    """What a run has seen so far.

    Args:
      run: where rows of metrics go.
      data: what is trained and tested on.
      spec: of the tables.
      eval_step: as from `make_eval_step`.
      first: the step that the run begins at, or goes on from.
      past: what was before that step.
      asked: whether the run shall stop; an evaluation then leaves off.
      evaluations: how many of them, evenly over the run.
    """

    def __init__(
        self, run: Run, data: Data, spec: EmbeddingSpec, eval_step: Callable, first: int, past: Past, asked: Asked,
        evaluations: int,
    ):  # fmt: skip
        self.run, self.data, self.asked, self.history = run, data, asked, past.history
        self.spec, self.eval_step = spec, eval_step
        self.every_steps = -(-data.steps // evaluations)
        self.losses: deque = deque(past.extra.get("train_losses", ()), maxlen=50)
        self.capacity = past.extra.get("capacity")
        self.bar = tqdm(total=data.examples, initial=self.examples(first), unit="ex", unit_scale=True, disable=None)
        self.seconds, self.since = past.extra.get("train_seconds", 0.0), time.perf_counter()

    def examples(self, step: int) -> int:
        """Examples trained after some steps; the last batch of a pass is padded."""
        return self.data.examples_after(step)

    def latest_losses(self) -> np.ndarray:
        """The losses of the last 50 steps, f32, across a resume too."""
        return np.array(jax.device_get(list(self.losses)), np.float32)

    def extra(self) -> dict[str, Any]:
        """What is saved along with the state, so that a resumed run logs what an undisturbed one
        does.

        Raises:
          FloatingPointError: a loss is not finite: such a state must not take the place of a good
            one.
        """
        losses = self.latest_losses()
        if not np.isfinite(losses).all():
            raise FloatingPointError(
                "the loss is not finite: this state is not saved, the images before it stay. Lower the learning rates, "
                "or look at the data."
            )
        return {
            "capacity": self.capacity,
            "train_losses": losses.tolist(),
            "train_seconds": self.seconds + time.perf_counter() - self.since,
        }

    def show(self, state, step, plans, step_metrics):
        """Hook: moves the bar."""
        self.bar.update(self.examples(step) - self.examples(step - 1))
        self.losses.append(step_metrics["loss"])
        self.capacity = capacity_of(plans)
        # To look at a loss is to wait for its step, and the device should run ahead: so only now
        # and then.
        if step % 20 == 0:
            self.bar.set_postfix(loss=f"{float(self.losses[-1]):.4f}", refresh=False)
        return state

    def due(self, step: int) -> bool:
        """Whether the test set is to be evaluated after this step, and has not been."""
        evenly = step > 0 and step % self.every_steps == 0
        return (evenly or step == self.data.steps) and all(row["step"] != step for row in self.history)

    def test(self, state, step, plans, step_metrics):
        """Hook: evaluates the test set if it is due, and leaves off if asked to stop; its time is
        no training time."""
        if not self.due(step):
            return state
        losses = self.latest_losses()  # before the clock is read: this waits for the step
        self.seconds += time.perf_counter() - self.since
        row = {"step": step, "examples": self.examples(step), "train_seconds": self.seconds}
        row |= {"train_loss": float(losses.mean())}
        with contextlib.suppress(Stopped), contextlib.closing(planned(self.spec, self.data.test())) as pairs:
            found = evaluate(state, self.asked.each(pairs), self.eval_step)
            row |= {f"test_{key}": value for key, value in found.items()}
            self.history.append(row)
            self.run.log(row)
            say(f"step {step}: test AUC {row['test_auc']:.4f}, log loss {row['test_log_loss']:.4f}")
        self.since = time.perf_counter()
        return state

    def plot(self) -> None:
        """Draws the curves of the run."""
        last, best = self.history[-1], self.data.best.get("teacher_auc")
        examples = [row["examples"] for row in self.history]
        line = lambda name: (examples, [row[name] for row in self.history])
        reached = f"Test AUC {last['test_auc']:.4f} after {last['examples']:,} examples"
        auc = {"model": line("test_auc")} | ({"teacher": (examples, [best] * len(examples))} if best else {})
        panels = {"log loss": {"train": line("train_loss"), "test": line("test_log_loss")}, "test AUC": auc}
        title = reached + (f", where the teacher of the data has {best:.4f}" if best else "")
        plot(self.run.directory / "curves.png", panels, "examples", title)

    def results(self) -> dict[str, Any]:
        """What results.json says of the training."""
        last = self.history[-1]
        results = {key: last[key] for key in last if key.startswith("test_")} | self.data.best
        results |= {key: last[key] for key in ("examples", "train_seconds")} | {"steps": last["step"]}
        return results | {"examples_per_s": last["examples"] / max(last["train_seconds"], 1e-9)}
