"""Trains a click model in one pass and evaluates it: the main job.

    python experiments/train.py                                   synthetic clicks, DLRM
    python experiments/train.py --data criteo --path train.txt    Criteo Kaggle or 1TB files, prepared on the way
    python experiments/train.py --model dcnv2                     DCNv2 instead of DLRM
    python experiments/train.py --tables host --preset smoke      tables in host memory, under a minute
    python experiments/train.py --workdir DIR --resume            goes on with a run that was stopped, bit for bit
    python experiments/train.py --workdir DIR --resume --requeue  in batch jobs: begins or goes on; 75 = not done

Expected on two cores: the default takes about 1.5 minutes and prints the AUC to expect before it
starts; the teacher that drew the synthetic labels is evaluated beside the model, as the best that
any model can reach.
"""

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Literal

import jax
from click_data import Data
from clicks import ClickJob, click_job, make_model
from contract import Run, command_line, listing, refuse, say
from data_flags import DataFlags, criteo_data, synthetic_data
from data_flags import rules as rules_of_data
from learning import LearningFlags, optimizers
from recording import Past, Recorder
from saving import PeriodicSaves
from stopping import Asked, Stopped, stop_on_signals
from table_files import host_tables, own

from jaxrec.checkpoint import Checkpointer, images, restore
from jaxrec.embedding import DeviceTables
from jaxrec.loop import fit, keep_memory, planned
from jaxrec.sharding import make_mesh
from jaxrec.step import run_hooks
from jaxrec.types import TrainState

TABLE = {
    "Test set": ["test_", "teacher"],
    "Training": ["steps", "examples", "train"],
    "Saving": ["saves", "checkpoint", "last"],
}


@dataclasses.dataclass(frozen=True)
class Config(LearningFlags, DataFlags):
    """Flags of the main job; what is not given follows from the data and the preset."""

    tables: Literal["device", "host"] = "device"
    table_directory: Path | None = None
    """Host tables as mapped files here (best on tmpfs) instead of RAM."""
    shards: int = 8
    evaluations: int = 8
    """How often the test set is evaluated, evenly over the run."""
    save_every_steps: int | None = None
    """Save the state every so many steps, 0 for never; by default so often that it costs at most 1 % of the time. It is
    saved at the end and on Ctrl-C, SIGTERM and SIGHUP anyway."""
    resume: bool = False
    """Go on with the run in --workdir, bit for bit."""
    requeue: bool = False
    """When stopped by a signal, exit with 75, by which a scheduler knows that it should start this
    command again."""


def rules(config: Config) -> dict[str, object]:
    """{what is wrong, and the remedy: whether it is} of flags that do not fit each other."""
    return rules_of_data(config) | {
        f"--table-directory {config.table_directory} is for --tables host: add it, or leave the directory out.": (
            config.table_directory is not None and config.tables != "host"
        ),
        "--requeue needs --workdir and --resume: the same command must go on when it is started again.": (
            config.requeue and not (config.workdir and config.resume)
        ),
    }


def make_job(config: Config, data: Data) -> ClickJob:
    """The model and its optimizers, from the flags."""
    return click_job(
        data.cardinalities,
        make_model(config.model, config.embedding_width),
        *optimizers(config, data.steps),
        width=config.embedding_width,
        shards=config.shards,
        seed=config.seed,
    )


def initial_state(config: Config, job: ClickJob, mesh) -> TrainState:
    """Step 0, with the rows in their home."""
    if config.tables == "host":
        return job.state(host_tables(job.spec, job.row_optimizer, config.table_directory), config.seed, mesh)
    return job.state(DeviceTables.create(job.spec, job.row_optimizer, mesh), config.seed, mesh)


def resumed(run: Run, state: TrainState) -> tuple[TrainState, Past]:
    """The newest whole image of the run, and what was logged up to it; the given state if nothing
    is saved."""
    directory, history = run.directory / "checkpoints", run.metrics()
    if not images(directory):
        if history:
            raise ValueError(
                f"{run.directory} has metrics up to step {history[-1]['step']}, but no image to go on from: bring "
                "its checkpoints back, or begin anew in another --workdir."
            )
        if run.resumed:
            say(f"{run.directory} has not saved anything yet: this run begins at step 0")
        return state, Past([], {})
    state, image = restore(directory, state)
    if image.run != run.id:
        raise ValueError(f"{image.path} is of run {image.run}, not of this one ({run.id}): give another --workdir.")
    # Rows behind the image would be logged a second time when their steps are trained again.
    kept = [row for row in history if row["step"] <= image.step]
    again = f"; {len(history) - len(kept)} rows of metrics after it are made again" if kept != history else ""
    run.rewrite_metrics(kept)
    say(f"going on from {image.path}, step {image.step}{again}")
    return state, Past(kept, image.extra)


def train_to_the_end(config: Config, run: Run, asked: Asked) -> dict:
    """Trains to the end, or until asked to stop; returns what results.json holds."""
    data = {"synthetic": synthetic_data, "criteo": criteo_data}[config.data](config)
    say(f"test AUC to expect: {data.expectation}")
    mesh = make_mesh(devices=jax.devices())
    job = make_job(config, data)
    state, past = resumed(run, initial_state(config, job, mesh))
    first = int(state.dense.step)
    recorder = Recorder(run, data, job.spec, job.eval_step(mesh), first, past, asked, config.evaluations)
    with Checkpointer(run.directory / "checkpoints", run=run.id) as checkpointer, asked.held():
        saves = PeriodicSaves(checkpointer, config.save_every_steps, recorder.extra, past.extra.get("saving"))

        def test(state, step, plans, step_metrics):
            if recorder.due(step) and not asked:
                saves.ensure_image(state)
            return recorder.test(state, step, plans, step_metrics)

        def stop(state, step, plans, step_metrics):
            if asked:
                raise stopped(asked, step, saves.last(state), run)
            return state

        # What a stop or a kill has left undone: an evaluation that was due at this step.
        state = run_hooks([test, stop], state, first, None, None)
        # Capacities as they were: the order of a sum depends on the shapes of its program.
        with contextlib.closing(planned(job.spec, data.train(first), past.extra.get("capacity"))) as batches:
            # Saving comes last: an image is of a step whose evaluation is logged.
            state = fit(state, batches, job.train_step(mesh), [recorder.show, test, stop, saves.hook])
        unsaved = saves.last(state)
        recorder.bar.close()
    return finish(run, recorder, saves, unsaved)


def finish(run: Run, recorder: Recorder, saves: PeriodicSaves, unsaved: str | None) -> dict:
    """Writes and shows the results; fails behind that, if the last state is not saved."""
    recorder.plot()
    results = recorder.results() | saves.results() | {"last_state_saved": unsaved is None}
    if results["saves_failed"]:
        say(f"{results['saves_failed']} saves failed; the last state is {'NOT ' if unsaved else ''}saved", sys.stderr)
    run.close(results, listing(results, TABLE))
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
                return train_to_the_end(config, run, asked)
        say(f"{run.directory} is complete, nothing is left to do:")
        say(listing(results, TABLE))
        return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
