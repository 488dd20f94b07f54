"""Train a click model and evaluate it, with any of the three techniques: the main job.

    python experiments/train.py                                   synthetic clicks, DLRM; 1.5 minutes on two cores
    python experiments/train.py --data criteo --path train.txt    Criteo Kaggle or 1TB files, prepared on the way
    python experiments/train.py --data tabular --path DIR         a table of one's own, see prepare.py --schema
    python experiments/train.py --tables host --pipeline oac      tables in host memory, batches in flight
    python experiments/train.py --shadowsync easgd --trainers 2   replicas that are synchronised in the background
    python experiments/train.py --cpr mfu --fail 300:3 700:1,5    lost shards come back alone
    python experiments/train.py --workdir DIR --resume            goes on with a run that was stopped or killed

docs/running.md has more. The test set is evaluated once, at the end, or, where there is no validation set, during
training too, without selecting anything; beside it the teacher that drew synthetic labels, the best that is possible.
Result: results/two_cores_cpu/train.json.
"""

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable
from typing import Literal

from main.cli import Run, command_line, paired_interval, refuse, say, unread
from main.click_data import ClickJob, click_job, make_model
from main.flags import DataFlags, LearningFlags, TechniqueFlags, data_of, optimizers, rules_of
from main.plots import draw, table
from main.pools import train_pool
from main.recorder import Past, Recorder, check_seeds, resumed
from main.run_dir import go_on_with
from main.saving import Best, PeriodicSaves, RecoverySaves
from main.signals import Asked, Stopped, stop_on_signals
from main.subsets import refusals
from main.table_data import table_job
from main.techniques import (
    Home,
    Techniques,
    as_saved,
    claim_devices,
    home_of,
    job_of,
    make_engine,
    mesh_of,
    own,
    recovery_of,
    saves_every,
)

from jaxrec.callbacks import StepInfo
from jaxrec.checkpoint import Checkpointer
from jaxrec.cpr import RolledBack
from jaxrec.loop import keep_memory
from jaxrec.types import TrainState


@dataclasses.dataclass(frozen=True)
class Config(TechniqueFlags, LearningFlags, DataFlags):
    """Flags of the main job; unset flags follow from the data and the preset."""

    evaluations: int = 8
    """Number of evaluations of the validation set (without one, of the test set), evenly over the run."""
    patience: int | None = None
    """Stop after this many evaluations without a better one (by --monitor, the AUC unless it is given), and keep and
    test the best state."""
    monitor: Literal["auc", "log_loss", "gauc"] | None = None
    """Keep and test the state that is the best by this figure of the validation, also without --patience."""
    group: str | None = None
    """A categorical field, such as the user: evaluations also give the mean AUC within its categories (GAUC)."""
    seeds: int = 1
    """Train this many times, each with its own seed, and report the mean with its interval."""
    save_every_steps: int | None = None
    """Save the state every k steps, 0 for never. By default saving costs at most 1 % of the time, and with --cpr the
    interval follows from --target-pls. The state is saved at the end and on Ctrl-C, SIGTERM and SIGHUP anyway."""
    resume: bool = False
    """Resume the run in --workdir: bit for bit, unless trainers run freely or CPR restores rows of several steps."""
    requeue: bool = False
    """When stopped by a signal, exit with 75, for a scheduler configured to restart such a job (Slurm: RequeueExit=75,
    or scontrol requeue)."""

    @property
    def monitored(self) -> str | None:
        """Figure of the validation by which the best state is kept; None to keep none."""
        return self.monitor or (None if self.patience is None else "auc")


class Over(Exception):
    """Raised to end training between two steps."""


def make_job(config: Config, data) -> ClickJob:
    """Build the model, its loss and its optimizers from the flags."""
    model = make_model(config.model, config.embedding_width)
    steps = -(-data.steps // config.replicas) if config.free else data.steps  # steps of one trainer
    how = optimizers(config, steps)
    size = config.embedding_width, config.shards, config.seed
    if data.table is not None:
        return job_of(config, table_job(data.table, model, *how, *size))
    return job_of(config, click_job(data.cardinalities, model, *how, *size))


def train_to_the_end(config: Config, run: Run, asked: Asked, home: Home) -> dict:
    """Train to the end, or until asked to stop; return the contents of results.json."""
    data = data_of(config)
    say(f"batches of {data.batch_size}; test AUC to expect: {data.expectation}")
    job = make_job(config, data).on(mesh_of(config))
    refuse(refusals(job.spec, config.group, ()))
    initial = as_saved(config, job.task, job.state(home.tables(job.task), config.seed))
    state, image, past = resumed(run, initial, data.vocabulary_digest)
    stretch = max(1, min(100, data.steps // config.evaluations))
    with make_engine(config, job.task, state, past.extra, stretch) as engine, asked.held():
        recorder = Recorder(
            run, data, job.spec, job.eval_step(), engine.step, past, asked, config.evaluations, config.group
        )
        engine.enter(recorder.show)
        techniques = Techniques(config, engine)
        lost_before = recorder.watch_failures(engine, lambda: bool(home.lost)) if config.cpr != "none" else 0
        home.watch(engine)
        extra = lambda step: recorder.extra(step) | {"techniques": techniques.extra()}
        first = lambda number: engine.run(itertools.islice(data.train(0), number))
        saves = enter_saves(config, engine, run, home, data.steps, image, past, extra, first)
        if lost_before:
            saves.count_failed(lost_before)
        recorder.figures = lambda state, step_metrics: techniques.figures(state, step_metrics) | saves.figures()
        best = Best(run, f"{recorder.watched}_{config.monitored}", extra) if config.monitored else None
        look, stop = last_callbacks(config, engine, recorder, saves, best, asked)
        engine.enter(look)
        engine.enter(stop)
        while True:
            try:
                with contextlib.suppress(Over):
                    # An evaluation due at this step that a stop or a kill has prevented.
                    for callback in (look, stop):
                        callback(StepInfo(engine.state, engine.step, {}, {}))
                    engine.train(data.train)
                unsaved = saves.last(engine.state)
                with contextlib.suppress(Stopped):
                    asked.check()
                    tested = at_rest(
                        engine, lambda state: recorder.evaluated(best.restored(state) if best else state, "test")
                    )
                break
            except RolledBack as back:  # shards were lost after the last step: the whole run is rolled back
                back.go_back()
        recorder.bar.close()
        if asked:
            raise stopped(asked, engine.step, unsaved, run)
    return finish(run, recorder, saves, best, unsaved, tested)


def at_rest(engine, look: Callable[[TrainState], dict]) -> dict:
    """Evaluate the state at rest between two runs of the engine.

    If shards are lost meanwhile, the evaluation is repeated once they are restored.
    """
    found: dict = {}

    def rested(tables):
        found.update(look(engine.state._replace(tables=tables)))
        return tables

    engine.exclusive(rested)
    return found


def enter_saves(config: Config, engine, run: Run, home: Home, steps: int, image, past: Past, extra, first_steps):
    """Enter what saves the run: a recovery with --cpr, else periodic saves of the whole state."""
    directory = run.directory / "checkpoints"
    if config.cpr == "none":
        checkpointer = engine.enter(Checkpointer(directory, run=run.id, copy=home.copy))
        return engine.enter(PeriodicSaves(checkpointer, config.save_every_steps, extra, past.extra.get("saving")))
    every = saves_every(config, engine, run, steps, first_steps)
    recovery = engine.enter(recovery_of(config, directory, steps, every, image, run.id, extra, home.copy))
    if image is None:
        recovery.save_whole()  # so that the run can resume from its first step
    return RecoverySaves(recovery)


def last_callbacks(config: Config, engine, recorder: Recorder, saves, best: Best | None, asked: Asked):
    """Return the last two callbacks: one evaluates the state at rest, the other ends training between two steps."""

    def look(info: StepInfo) -> None:
        def at_rest(tables):
            rested = info.state._replace(tables=tables)
            saves.ensure_image(rested)
            recorder.look(rested, info.step, info.metrics, best)
            return tables

        if recorder.due(info.step) and not asked:
            engine.exclusive(at_rest)

    def stop(info: StepInfo) -> None:
        patience = config.patience
        if asked or (best is not None and patience and best.evaluations_since(recorder.history) >= patience):
            raise Over

    return look, stop


def finish(run: Run, recorder: Recorder, saves, best: Best | None, unsaved: str | None, tested: dict) -> dict:
    """Write and show the results, then fail if the last state is not saved."""
    results = recorder.results(best) | tested | saves.results() | {"last_state_saved": unsaved is None}
    draw(run.directory / "curves.png", recorder.history, results, recorder.watched, recorder.failures)
    if results["saves_failed"]:
        say(f"{results['saves_failed']} saves failed; the last state is {'NOT ' if unsaved else ''}saved", sys.stderr)
    run.close(results, table(results))
    if unsaved:
        raise OSError(f"the last state could not be saved: {unsaved}")
    return results


def stopped(asked: Asked, step: int, unsaved: str | None, run: Run) -> BaseException:
    """Return the exception that ends a run asked to stop."""
    if unsaved:
        return OSError(f"stopped at step {step}, whose state could not be saved: {unsaved}")
    return Stopped(asked.signal or 0, f"stopped and saved at step {step}; {go_on_with(run)}")


def main(config: Config) -> dict:
    """Run one training job, or one for each seed; return the contents of results.json."""
    refuse(rules(config))
    keep_memory()  # before JAX starts its threads
    claim_devices(config)
    with stop_on_signals() as asked:
        return one(config, asked) if config.seeds == 1 else each_seed(config, asked)


def one(config: Config, asked: Asked) -> dict:
    """Run one training job."""
    with Run("train", config, config.workdir, config.resume) as run, asked.saying(f"stopped; {go_on_with(run)}"):
        results = run.read_json("results.json")
        check_seeds(run, 1)
        if not results.get("last_state_saved"):
            if config.in_processes:
                return in_processes(config, run, asked)
            with own(config.table_directory, run.id), home_of(config, run) as home:
                return train_to_the_end(config, run, asked, home)
        say(f"{run.directory} is complete, nothing is left to do:")
        say(table(results))
        return results


def in_processes(config: Config, run: Run, asked: Asked) -> dict:
    """Run one training job by a pool of trainers."""
    data = data_of(config)
    say(f"batches of {data.batch_size}; test AUC to expect: {data.expectation}")
    results = train_pool(config, run, data, make_job(config, data), asked)
    run.close(results, table(results))
    return results


def each_seed(config: Config, asked: Asked) -> dict:
    """Run one job per seed, each in its own subdirectory; return the means of their results."""
    with Run("train", config, config.workdir, config.resume) as run, asked.saying(f"stopped; {go_on_with(run)}"):
        check_seeds(run, config.seeds)
        found = []
        for seed in range(config.seed, config.seed + config.seeds):
            workdir = run.directory / f"seed_{seed}"
            try:
                found.append(one(dataclasses.replace(config, seed=seed, seeds=1, workdir=workdir, resume=True), asked))
            except Stopped as its:
                raise Stopped(its.signal, f"stopped in seed {seed}; {go_on_with(run)}") from its
        results: dict = {"seeds": config.seeds}
        names = ["test_auc", *(["test_gauc"] if config.group else []), "test_log_loss", "test_normalized_entropy"]
        for name in (*names, "examples_per_s"):
            results[name], results[f"{name}_half_width"] = paired_interval([its[name] for its in found])
        run.close(results)
        return results


def rules(config: Config) -> dict[str, object]:
    """Return {problem and remedy: whether it applies} for all flags of this job."""
    watched = config.data != "criteo" or config.validation_fraction > 0
    read_by: dict[str, tuple[bool, tuple[str, ...]]] = {
        "the same command started again, with --workdir and --resume": (
            config.workdir is not None and config.resume,
            ("requeue",),
        ),
        "a run with a validation, of --validation-fraction 0.1, say": (watched, ("patience", "monitor")),
        "--cpr without --save-every-steps": (config.save_every_steps is None, ("recovery_costs",)),
        "trainers in one process, as with --tables host or a --pipeline (others are tested at the end alone)": (
            not config.in_processes,
            ("evaluations", "patience", "monitor", "group", "validation_fraction", "save_every_steps"),
        ),
        "a single seed": (config.seeds == 1, ("table_directory",)),
    }
    of_this_job = {
        "--model din weighs a history by a candidate: give --data tabular, with a Sequence, or another model.": (
            config.model == "din" and config.data != "tabular"
        ),
        "--monitor gauc is the mean AUC within groups: give --group FIELD too, such as the user.": (
            config.monitor == "gauc" and config.group is None
        ),
        f"--patience {config.patience} never ends {config.evaluations} evaluations early: give more --evaluations.": (
            config.patience is not None and config.patience >= config.evaluations
        ),
        "--save-every-steps 0 saves nothing that --cpr could restore: leave one of them out.": (
            config.cpr != "none" and config.save_every_steps == 0
        ),
    }
    return unread(config, read_by) | of_this_job | rules_of(config)  # which ends with that of Ray


if __name__ == "__main__":
    command_line(main, Config, __doc__)
