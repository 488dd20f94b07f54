"""Trains a click model in one pass and evaluates it: the main job.

    python experiments/train.py                                        synthetic clicks, DLRM
    python experiments/train.py --data criteo --path train.txt         Criteo Kaggle or 1TB files, prepared on the way
    python experiments/train.py --tables host --preset smoke           tables in host memory, under a minute
    python experiments/train.py --workdir DIR --resume                 goes on with a run that was stopped, bit for bit
    python experiments/train.py --workdir DIR --resume --requeue       in batch jobs: begins or goes on; 75 = not done

Expected on two cores: the default takes about 1.5 minutes and prints the AUC to expect before it starts; the teacher
that drew the synthetic labels is evaluated beside the model, as the best that any model can reach.
"""

import contextlib
import dataclasses
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from clicks import Data, criteo_data, rules, synthetic_data
from contract import Flags, Run, command_line, plot, refuse, say
from saving import Saves
from stopping import Asked, Stopped, stop_on_signals
from tqdm import tqdm

from jaxrec.checkpoint import Checkpointer, images, restore
from jaxrec.embedding import (
    DeviceTables,
    EmbeddingSpec,
    HostTables,
    Lookup,
    Table,
    adagrad,
    capacity_of,
    rowwise_adagrad,
    sgd,
)
from jaxrec.files import Lock, local_path, make_directory, write_text
from jaxrec.loop import evaluate, fit, keep_memory, planned
from jaxrec.models.dlrm import DLRM
from jaxrec.sharding import make_mesh
from jaxrec.step import init_state, make_eval_step, make_train_step, run_hooks
from jaxrec.types import TrainState

ROW_OPTIMIZERS = {"rowwise_adagrad": rowwise_adagrad, "adagrad": adagrad, "sgd": sgd}
DENSE_OPTIMIZERS = {"adam": optax.adam, "adagrad": optax.adagrad, "sgd": optax.sgd}


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the main job; what is not given follows from the data and the preset."""

    data: Literal["synthetic", "criteo"] = "synthetic"
    path: tuple[Path, ...] = ()
    """Criteo: raw files (plain or .gz), or one prepared directory."""
    tables: Literal["device", "host"] = "device"
    table_directory: Path | None = None
    """Host tables as mapped files here (best on tmpfs) instead of RAM."""
    embedding_width: int = 16
    rows: int | None = None
    """Synthetic: embedding rows in all; the Criteo Kaggle cardinalities, cut."""
    shards: int = 8
    batch_size: int | None = None
    steps: int | None = None
    """Synthetic: how many steps; Criteo: at most so many of the one pass."""
    row_optimizer: Literal["rowwise_adagrad", "adagrad", "sgd"] = "rowwise_adagrad"
    row_learning_rate: float = 0.02
    optimizer: Literal["adam", "adagrad", "sgd"] = "adam"
    learning_rate: float = 1e-3
    evaluations: int = 8
    """How often the test set is evaluated, evenly over the run."""
    save_every_steps: int | None = None
    """Save the state every so many steps, 0 for never; by default so often that it costs at most 1 % of the time. It is
    saved at the end and on Ctrl-C, SIGTERM and SIGHUP anyway."""
    resume: bool = False
    """Go on with the run in --workdir, bit for bit."""
    requeue: bool = False
    """When stopped by a signal, exit with 75, by which a scheduler knows that it should start this command again."""


class Past(NamedTuple):
    """What a run that goes on has behind it."""

    history: list[dict]  # rows of metrics
    extra: dict  # saved along with the state


class Job(NamedTuple):
    """The pure parts of a run, and its fresh state."""

    spec: EmbeddingSpec
    state: TrainState
    train_step: Callable
    eval_step: Callable


def make_job(config: Config, data: Data) -> Job:
    """Builds spec, model, optimizers, tables and steps from the flags."""
    mesh = make_mesh(devices=jax.devices())
    fields = [f"C{i + 1}" for i in range(len(data.cardinalities))]
    width = config.embedding_width
    spec = EmbeddingSpec(
        {name: Table(n, width) for name, n in zip(fields, data.cardinalities, strict=True)},
        {"sparse": Lookup(tuple(fields))},
        shards=config.shards,
        seed=config.seed,
    )
    model = DLRM(bottom=(512, 256, 64, width))
    row_optimizer = ROW_OPTIMIZERS[config.row_optimizer](config.row_learning_rate)
    optimizer = DENSE_OPTIMIZERS[config.optimizer](config.learning_rate)

    def predict(params, activations, batch):
        return model.apply(params, batch.dense, activations["sparse"])

    def loss(params, activations, batch):
        return optax.sigmoid_binary_cross_entropy(predict(params, activations, batch), batch.label)

    example = jnp.zeros((1, data.dense_features)), jnp.zeros((1, len(fields), width))
    params = model.init(jax.random.key(config.seed), *example)
    if config.tables == "host":
        tables: HostTables | DeviceTables = host_tables(config, spec, row_optimizer)
    else:
        tables = DeviceTables.create(spec, row_optimizer, mesh)
    return Job(
        spec,
        init_state(params, optimizer, tables, mesh),
        make_train_step(spec, loss, optimizer, row_optimizer, mesh),
        make_eval_step(spec, predict, mesh),
    )


def host_tables(config: Config, spec: EmbeddingSpec, row_optimizer) -> HostTables:
    """Fresh tables in host memory or in mapped files; files of a run that goes on are used again."""
    directory = config.table_directory
    if directory is None or not (directory / "tables.json").exists():
        return HostTables.create(spec, row_optimizer, directory)
    tables = HostTables.attach(spec, row_optimizer, directory, torn="accept")  # by a kill in the middle of a step
    with tables.overwriting(step=0):
        for name, stack in spec.stacks.items():
            for shard in range(stack.shards):
                tables.reset_shard(name, shard)
    return tables


@contextlib.contextmanager
def own(directory: Path | None, run: str) -> Iterator[None]:
    """Keeps other runs out of a directory of mapped tables, now and later."""
    if directory is None:
        yield
        return
    directory = local_path(directory)
    make_directory(directory)
    with Lock(directory / "run.lock", "training on these tables"):
        owner = directory / "run"
        if (directory / "tables.json").exists() and not (owner.exists() and owner.read_text() == run):
            raise ValueError(f"{directory} holds tables of another run: give another --table-directory, or remove it.")
        write_text(owner, run)
        yield


class Recorder:
    """The clock, the progress bar and the history of a run, as hooks."""

    def __init__(self, run: Run, data: Data, job: Job, past: Past, asked: Asked, evaluations: int):
        self.run, self.data, self.job, self.asked, self.history = run, data, job, asked, past.history
        self.every_steps = -(-data.steps // evaluations)
        self.losses: deque = deque(past.extra.get("train_losses", ()), maxlen=50)
        self.capacity = past.extra.get("capacity")
        done = self.examples(int(job.state.dense.step))
        self.bar = tqdm(total=data.examples, initial=done, unit="ex", unit_scale=True, disable=None)
        self.seconds, self.since = past.extra.get("train_seconds", 0.0), time.perf_counter()

    def examples(self, step: int) -> int:
        """Examples trained after some steps; the last batch of a pass is padded."""
        return min(step * self.data.batch_size, self.data.examples)

    def latest_losses(self) -> np.ndarray:
        """The losses of the last 50 steps, f32, across a resume too."""
        return np.array(jax.device_get(list(self.losses)), np.float32)

    def extra(self) -> dict:
        """What is saved along with the state, so that a resumed run logs what an undisturbed one does."""
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

    def show(self, state, step, plan, step_metrics):
        """Hook: moves the bar; looks at the loss only now and then, to let the device run ahead."""
        self.bar.update(self.examples(step) - self.examples(step - 1))
        self.losses.append(step_metrics["loss"])
        self.capacity = capacity_of(plan)
        if step % 20 == 0:
            self.bar.set_postfix(loss=f"{float(self.losses[-1]):.4f}", refresh=False)
        return state

    def due(self, step: int) -> bool:
        """Whether the test set is to be evaluated after this step, and has not been."""
        evenly = step > 0 and step % self.every_steps == 0
        return (evenly or step == self.data.steps) and all(row["step"] != step for row in self.history)

    def test(self, state, step, plan, step_metrics):
        """Hook: evaluates the test set if it is due, and leaves off if asked to stop; its time is no training time."""
        if not self.due(step):
            return state
        losses = self.latest_losses()
        self.seconds += time.perf_counter() - self.since
        row = {"step": step, "examples": self.examples(step), "train_seconds": self.seconds}
        row |= {"train_loss": float(losses.mean())}
        with contextlib.suppress(Stopped), contextlib.closing(planned(self.job.spec, self.data.test())) as pairs:
            found = evaluate(state, self.asked.each(pairs), self.job.eval_step)
            row |= {f"test_{key}": value for key, value in found.items()}
            self.history.append(row)
            self.run.log(row)
            say(f"step {step}: test AUC {row['test_auc']:.4f}, log loss {row['test_log_loss']:.4f}")
        self.since = time.perf_counter()
        return state

    def plot(self) -> None:
        """Draws the curves of the run."""
        examples = [row["examples"] for row in self.history]
        lines = {name: (examples, [row[name] for row in self.history]) for name in self.history[-1]}
        panels = {
            "log loss": {"train": lines["train_loss"], "test": lines["test_log_loss"]},
            "test AUC": {"model": lines["test_auc"]},
        }
        plot(self.run.directory / "curves.png", panels, "examples")

    def results(self) -> dict:
        """What results.json says of the training."""
        last = self.history[-1]
        results = {key: last[key] for key in last if key.startswith("test_")} | self.data.best
        results |= {key: last[key] for key in ("examples", "train_seconds")} | {"steps": last["step"]}
        return results | {"examples_per_s": last["examples"] / max(last["train_seconds"], 1e-9)}


def resumed(run: Run, job: Job) -> tuple[Job, Past]:
    """The job at its newest whole image, and what was logged up to it."""
    directory, history = run.directory / "checkpoints", run.metrics()
    if not images(directory):
        if history:
            raise ValueError(
                f"{run.directory} has metrics up to step {history[-1]['step']}, but no image to go on from: bring "
                "its checkpoints back, or begin anew in another --workdir."
            )
        if run.resumed:
            say(f"{run.directory} has not saved anything yet: this run begins at step 0")
        return job, Past([], {})
    state, image = restore(directory, job.state)
    if image.run != run.id:
        raise ValueError(f"{image.path} is of run {image.run}, not of this one ({run.id}): give another --workdir.")
    kept = [row for row in history if row["step"] <= image.step]
    again = f"; {len(history) - len(kept)} rows of metrics after it are made again" if kept != history else ""
    run.rewrite_metrics(kept)
    say(f"going on from {image.path}, step {image.step}{again}")
    return job._replace(state=state), Past(kept, image.extra)


def train(config: Config, run: Run, asked: Asked) -> dict:
    """Trains to the end, or until asked to stop; returns what results.json holds."""
    data = {"synthetic": synthetic_data, "criteo": criteo_data}[config.data](config)
    say(f"test AUC to expect: {data.expectation}")
    job, past = resumed(run, make_job(config, data))
    recorder, first = Recorder(run, data, job, past, asked, config.evaluations), int(job.state.dense.step)
    with Checkpointer(run.directory / "checkpoints", run=run.id) as checkpointer, asked.held():
        saves = Saves(checkpointer, config.save_every_steps, recorder.extra, past.extra.get("saving"))

        def test(state, step, plan, step_metrics):
            if recorder.due(step) and not asked:
                saves.ensure_image(state)
            return recorder.test(state, step, plan, step_metrics)

        def stop(state, step, plan, step_metrics):
            if asked:
                raise stopped(asked, step, saves.last(state), run)
            return state

        state = run_hooks([test, stop], job.state, first, None, None)  # what a stop or a kill has left undone
        # Capacities as they were: the order of a sum depends on the shapes of its program.
        batches = planned(job.spec, data.train(first), past.extra.get("capacity"))
        with contextlib.closing(batches):
            state = fit(state, batches, job.train_step, [recorder.show, test, stop, saves.hook])
        unsaved = saves.last(state)
        recorder.bar.close()
    recorder.plot()
    results = recorder.results() | saves.results() | {"last_state_saved": unsaved is None}
    if results["saves_failed"]:
        say(f"{results['saves_failed']} saves failed; the last state is {'NOT ' if unsaved else ''}saved", sys.stderr)
    run.close(results)
    if unsaved:
        raise OSError(f"the last state could not be saved: {unsaved}")
    return results


def stopped(asked: Asked, step: int, unsaved: str | None, run: Run) -> BaseException:
    """What ends a run that was asked to stop."""
    if unsaved:
        return OSError(f"stopped at step {step}, whose state could not be saved: {unsaved}")
    go_on = f"go on with the same flags and --workdir {run.directory} --resume"
    return Stopped(asked.signal or 0, f"stopped and saved at step {step}; {go_on}")


def main(config: Config) -> dict:
    """Runs one training job; returns what results.json holds."""
    refuse(rules(config))
    keep_memory()
    with stop_on_signals() as asked, Run("train", config, config.workdir, config.resume) as run:
        results = run.read_json("results.json")
        if not results.get("last_state_saved"):
            with own(config.table_directory, run.id):
                return train(config, run, asked)
        say(f"{run.directory} is complete, nothing is left to do:")
        run.show(results)
        return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
