"""Trains a click model in one pass and evaluates it: the main job.

    python experiments/train.py                                        synthetic clicks, DLRM
    python experiments/train.py --data criteo --path train.txt         Criteo Kaggle or 1TB files, prepared on the way
    python experiments/train.py --tables host --preset smoke           tables in host memory, under a minute
    python experiments/train.py --workdir DIR --resume                 goes on with a run that was stopped, bit for bit

Expected on two cores: the default takes about 1.5 minutes and prints the AUC to expect before it starts; the teacher
that drew the synthetic labels is evaluated beside the model, as the best that any model can reach.
"""

import dataclasses
import itertools
import signal
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
from contract import Flags, Run, command_line, plot
from tqdm import tqdm

from jaxrec import metrics
from jaxrec.checkpoint import Checkpointer, images, restore
from jaxrec.data.synthetic import SyntheticClicks, scaled_cardinalities
from jaxrec.embedding import (
    DeviceTables,
    EmbeddingSpec,
    HostTables,
    Lookup,
    Table,
    adagrad,
    rowwise_adagrad,
    sgd,
)
from jaxrec.loop import evaluate, every, fit, keep_memory, planned
from jaxrec.models.dlrm import DLRM
from jaxrec.sharding import make_mesh
from jaxrec.step import init_state, make_eval_step, make_train_step
from jaxrec.types import Batch, TrainState

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
    save_every_steps: int = 0
    """Also save the state every so many steps; it is saved at the end and on Ctrl-C anyway."""
    resume: bool = False
    """Go on with the run in --workdir, bit for bit."""


class Data(NamedTuple):
    """What a run reads: all its numbers and two ways to iterate."""

    cardinalities: tuple[int, ...]
    dense_features: int
    batch_size: int
    steps: int
    examples: int
    train: Callable[[int], Iterator[Batch]]  # from which step on -> batches
    test: Callable[[], Iterator[Batch]]
    expectation: str
    best: dict[str, float]  # metrics of the teacher, if there is one


def synthetic_data(config: Config) -> Data:
    """The synthetic click log, sized by the preset."""
    rows, steps, test_batches = {
        "smoke": (20_000, 100, 8),
        "default": (200_000, 1_000, 50),
        "paper": (33_762_577, 20_000, 500),
    }[config.preset]
    batch_size, steps = config.batch_size or 2048, config.steps or steps
    clicks = SyntheticClicks(scaled_cardinalities(config.rows or rows), seed=config.seed)

    def test():
        return clicks.stream(batch_size, batches=test_batches, test=True)

    teacher = metrics.empty_evaluation()
    for batch in test():
        logit = clicks.teacher_logit(batch)
        teacher = metrics.merge(teacher, metrics.evaluate_batch(logit, batch.label, batch.weight))
    best = metrics.summarize(teacher)
    return Data(
        clicks.cardinalities,
        clicks.dense_features,
        batch_size,
        steps,
        steps * batch_size,
        lambda start: clicks.stream(batch_size, start, steps),
        test,
        f"the teacher that drew the labels reaches {best['auc']:.4f}; the default run reaches about 0.745",
        {"teacher_auc": best["auc"], "teacher_normalized_entropy": best["normalized_entropy"]},
    )


def criteo_data(config: Config) -> Data:
    """Criteo rows, prepared in the current directory if they are not yet."""
    from jaxrec.data.criteo import open_split, prepare
    from jaxrec.data.loader import Loader

    if not config.path:
        raise ValueError("--data criteo needs --path: raw Criteo files, or a directory made by prepare.py.")
    directory = config.path[0]
    if not directory.is_dir():
        directory = Path(directory.name.split(".")[0] + ".prepared")  # here: raw data may be read-only
        print(f"preparing {', '.join(map(str, config.path))} in {directory}")
        prepare(config.path, directory)
    train, test = open_split(directory, "train"), open_split(directory, "test")
    examples = sum(train.rows)
    # One pass over few rows wants many small steps: 2,048 reached 0.69-0.75 where 128 reaches 0.756.
    batch_size = config.batch_size or (128 if examples < 1_000_000 else 2048)
    steps = min(config.steps or sys.maxsize, -(-examples // batch_size))

    def batches(start):
        loader = Loader(train, batch_size)
        loader.seek(start)
        return itertools.islice(loader, steps - start)

    return Data(
        tuple(train.metadata["cardinalities"]),
        13,
        batch_size,
        steps,
        min(examples, steps * batch_size),
        batches,
        lambda: iter(Loader(test, 2048)),
        "about 0.761 on a sample of 110,000 rows of Criteo Kaggle, about 0.80 on the whole set",
        {},
    )


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
        tables: HostTables | DeviceTables = HostTables.create(spec, row_optimizer, config.table_directory)
    else:
        tables = DeviceTables.create(spec, row_optimizer, mesh)
    return Job(
        spec,
        init_state(params, optimizer, tables, mesh),
        make_train_step(spec, loss, optimizer, row_optimizer, mesh),
        make_eval_step(spec, predict, mesh),
    )


class Recorder:
    """The clock, the progress bar and the history of a run, as hooks."""

    def __init__(self, run: Run, data: Data, job: Job, step: int, history: list[dict]):
        self.run, self.data, self.job, self.history = run, data, job, history
        self.losses: deque = deque(maxlen=50)
        self.bar = tqdm(total=data.examples, initial=self.examples(step), unit="ex", unit_scale=True, disable=None)
        self.first_step, self.seconds = step, history[-1]["train_seconds"] if history else 0.0
        self.since = time.perf_counter()

    def examples(self, step: int) -> int:
        """Examples trained after some steps; the last batch of a pass is padded."""
        return min(step * self.data.batch_size, self.data.examples)

    def show(self, state, step, plan, step_metrics):
        """Hook: moves the bar; looks at the loss only now and then, to let the device run ahead."""
        self.bar.update(self.examples(step) - self.examples(step - 1))
        self.losses.append(step_metrics["loss"])
        if step % 20 == 0:
            self.bar.set_postfix(loss=f"{float(self.losses[-1]):.4f}", refresh=False)
        return state

    def test(self, state, step, plan, step_metrics):
        """Hook: evaluates the test set; its time does not count as training."""
        jax.block_until_ready(step_metrics)
        self.seconds += time.perf_counter() - self.since
        pairs = planned(self.job.spec, self.data.test())
        row = {"step": step, "examples": self.examples(step), "train_seconds": self.seconds}
        row |= {"train_loss": float(np.mean(jax.device_get(list(self.losses))))}
        row |= {f"test_{key}": value for key, value in evaluate(state, pairs, self.job.eval_step).items()}
        self.history.append(row)
        self.run.log(row)
        tqdm.write(f"step {step}: test AUC {row['test_auc']:.4f}, log loss {row['test_log_loss']:.4f}", file=sys.stdout)
        sys.stdout.flush()
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


class Interrupt:
    """Ctrl-C as a request: the running step ends, its state is saved, then the run stops. A second one kills."""

    def __init__(self):
        self.asked = False
        signal.signal(signal.SIGINT, self._ask)

    def _ask(self, number, frame):
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def hook(self, checkpointer: Checkpointer) -> Callable:
        """Saves and stops, if asked."""

        def run(state, step, plan, step_metrics):
            if self.asked:
                checkpointer.save(state)
                raise KeyboardInterrupt
            return state

        return run


def resumed(config: Config, run: Run, job: Job) -> tuple[Job, list[dict]]:
    """The job at its newest image, and the metrics logged up to it."""
    found = images(run.directory / "checkpoints")
    if not config.resume or not found:
        run.rewrite_metrics([])
        return job, []
    state, image = restore(found[0], job.state, job.spec)
    history = [row for row in run.metrics() if row["step"] <= image.step]
    run.rewrite_metrics(history)
    print(f"going on from {found[0]}, step {image.step}")
    return job._replace(state=state), history


def main(config: Config) -> dict:
    """Runs one training job; returns what results.json holds."""
    if config.resume and config.workdir is None:
        raise ValueError("--resume needs --workdir: the directory of the run to go on with.")
    keep_memory()
    run = Run("train", config, config.workdir, config.resume)
    data = {"synthetic": synthetic_data, "criteo": criteo_data}[config.data](config)
    print(f"test AUC to expect: {data.expectation}")
    job, history = resumed(config, run, make_job(config, data))
    first = int(job.state.dense.step)
    recorder, interrupt = Recorder(run, data, job, first, history), Interrupt()
    test_every_steps = -(-data.steps // max(1, config.evaluations))
    with Checkpointer(run.directory / "checkpoints", job.spec) as checkpointer:

        def save(state, step, plan, step_metrics):
            checkpointer.save(state)
            return state

        hooks = [recorder.show, every(test_every_steps, recorder.test), interrupt.hook(checkpointer)]
        if config.save_every_steps:
            hooks.append(every(config.save_every_steps, save))
        try:
            state = fit(job.state, planned(job.spec, data.train(first)), job.train_step, hooks)
        except KeyboardInterrupt:
            checkpointer.wait()
            sys.exit(f"stopped and saved; go on with the same flags and --workdir {run.directory} --resume")
        if not history or history[-1]["step"] != data.steps:
            recorder.test(state, data.steps, None, state.dense)
        checkpointer.save(state)
    recorder.bar.close()
    recorder.plot()
    last = history[-1]
    results = {key: last[key] for key in last if key.startswith("test_")} | data.best
    results |= {key: last[key] for key in ("examples", "train_seconds")} | {"steps": last["step"]}
    results["examples_per_s"] = last["examples"] / last["train_seconds"]
    results["checkpoint_stall_s"] = checkpointer.stall_seconds
    run.close(results)
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
