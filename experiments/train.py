"""Train a click model and evaluate it, with any of the three techniques: the main job.

    python experiments/train.py                                   synthetic clicks, DLRM; 1.5 minutes on two cores
    python experiments/train.py --data criteo --path train.txt    Criteo Kaggle or 1TB files, prepared on the way
    python experiments/train.py --data tabular --path DIR         a table of one's own, see prepare.py --schema
    python experiments/train.py --tables host --pipeline oac      tables in host memory, batches in flight
    python experiments/train.py --shadowsync easgd --trainers 2   replicas that are synchronised in the background
    python experiments/train.py --cpr mfu --fail 300:3 700:1,5    lost shards come back alone
    python experiments/train.py --workdir DIR --resume            goes on with a run that was stopped or killed
    python experiments/train.py --workdir DIR --resume --epochs 2 trains on, for another epoch; or on newer files
    python experiments/train.py --config runs/x/config.json       trains with the flags of another run

docs/running.md has more. The test set is evaluated once, at the end, or, where there is no validation set, during
training too, without selecting anything; beside it the teacher that drew synthetic labels, the best that is possible.
Result: results/two_cores_cpu/train.json.
"""

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable

from main.cli import Run, command_line, paired_interval, refuse, say
from main.click_data import Data
from main.config import Config, Evaluations, parse
from main.homes import Placed
from main.model import keep_copy
from main.plots import draw, table
from main.pools import train_pool
from main.recorder import Recorder, check_seeds, resumed, tensorboard
from main.recovering import Recovering, Saving
from main.report import QUALITY
from main.run_dir import go_on_with
from main.saving import Best, without_gain
from main.signals import Asked, Stopped, stop_on_signals
from main.sources import Tabular
from main.subsets import refusals
from main.trainers import Processes

from jaxrec.callbacks import StepInfo
from jaxrec.cpr import RolledBack
from jaxrec.loop import keep_memory
from jaxrec.types import TrainState


class Over(Exception):
    """Raised to end training between two steps."""


class Plateau(Exception):
    """Raised between two steps if an evaluation is no better, to go on from there with lower learning rates.

    Args:
      saving: what saving has cost so far.
    """

    def __init__(self, saving: dict[str, float] | None = None):
        super().__init__()
        self.saving = saving


def data_of(config: Config) -> Data:
    """Open the data that the flags select, and say what to expect."""
    data = config.source.open(config.seed)
    devices = config.trainers.devices
    where = f"{len(devices)} x {devices[0].device_kind}" if len(devices) > 1 else devices[0].device_kind
    metric = data.targets[0].metric.upper()
    say(f"batches of {data.batch_size} on {where}; test {metric} to expect: {data.expectation}")
    return data


def train_to_the_end(
    config: Config, run: Run, data: Data, asked: Asked, home: Placed, saving_so_far: dict[str, float] | None = None
) -> dict:
    """Train to the end, or until asked to stop; return the contents of results.json.

    Args:
      saving_so_far: what saving has cost before a plateau.
    """
    looks, trainers, saving = config.looks, config.trainers, config.saves
    assert isinstance(looks, Evaluations) and isinstance(saving, Saving)  # as all but trainers in processes
    job = config.job(data).on(trainers.mesh())
    refuse(refusals(job.spec, looks.group, (), data.table))
    monitored = looks.monitored(data.targets[0])
    initial = trainers.initial(job.task, job.state(home.tables(job.task), config.seed))
    state, image, past = resumed(run, initial, data)
    if saving_so_far is not None:
        past = past._replace(extra=past.extra | {"saving": saving_so_far})
    factor, metric = looks.reduce_on_plateau, f"validation_{monitored}"
    plateaus = None if factor is None else without_gain(past.history, metric)
    if factor is not None and plateaus:
        learning = config.learning.slower(factor**plateaus)
        say(f"learning rates are {learning.learning_rate:.3g} and, of rows, {learning.row_learning_rate:.3g}")
        job = dataclasses.replace(config, learning=learning).job(data).on(trainers.mesh())
    stretch = max(1, min(100, data.steps // looks.evaluations))
    with (
        trainers.engine(config.engine, job.task, state, past.extra, stretch) as engine,
        tensorboard(run.directory / "tensorboard" if looks.tensorboard else None, past.history) as scalars,
        asked.held(),
    ):
        recorder = Recorder(
            run, data, job.spec, job.eval_step(), engine.step, past, asked, looks.evaluations, looks.group, scalars
        )
        engine.enter(recorder.show)
        sync = trainers.enter(engine)
        lost_before = recorder.watch_failures(engine, lambda: bool(home.lost)) if saving.cpr != "none" else 0
        home.watch(engine)
        extra = lambda step: recorder.extra(step) | {"techniques": trainers.extra(engine)}
        first = lambda number: engine.run(itertools.islice(data.train(0), number))
        saves = saving.enter(engine, run, home, data.steps, config.seed, image, past.extra, extra, first)
        if lost_before:
            saves.count_failed(lost_before)
        recorder.figures = lambda state, step_metrics: (
            config.engine.figures(engine) | trainers.figures(engine, sync, state, step_metrics) | saves.figures()
        )
        best = Best(run, metric, extra) if monitored else None
        no_better = None if plateaus is None else lambda: without_gain(recorder.history, metric) > plateaus
        last = last_callbacks(looks.patience, no_better, engine, recorder, saves, best, asked)
        for callback in last:
            engine.enter(callback)
        while True:
            try:
                with contextlib.suppress(Over):
                    # An evaluation due at this step that a stop or a kill has prevented.
                    for callback in last:
                        callback(StepInfo(engine.state, engine.step, {}, {}))
                    engine.train(data.train)
                unsaved = saves.last(engine.state)
                with contextlib.suppress(Stopped):
                    asked.check()
                    tested = at_rest(
                        engine, lambda state: recorder.evaluated(best.restored(state) if best else state, "test")
                    )
                break
            except Plateau:
                recorder.bar.close()
                if unsaved := saves.last(engine.state):
                    raise OSError(f"the state of step {engine.step} could not be saved: {unsaved}") from None
                raise Plateau(saves.totals()) from None
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

    engine.at_rest(lambda tables: found.update(look(engine.state._replace(tables=tables))))
    return found


def last_callbacks(
    patience: int | None, no_better: Callable[[], bool] | None, engine, recorder: Recorder, saves, best: Best | None,
    asked: Asked,
):  # fmt: skip
    """Return the last two callbacks: one evaluates the state at rest, the other ends training between two steps.

    Args:
      no_better: whether an evaluation since the engine began is no better, for a run that then lowers its rates.
    """

    def look(info: StepInfo) -> None:
        def at_rest(tables):
            rested = info.state._replace(tables=tables)
            saves.ensure_image(rested)
            recorder.look(rested, info.step, info.metrics, best)

        if recorder.due(info.step) and not asked:
            engine.at_rest(at_rest)

    def stop(info: StepInfo) -> None:
        if asked or (best is not None and patience and best.evaluations_since(recorder.history) >= patience):
            raise Over
        if no_better is not None and info.step < recorder.data.steps and no_better():
            raise Plateau

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
    config.check()
    keep_memory()  # before JAX starts its threads
    config.trainers.claim_devices(config.home.shards, config.source.batch_size)
    with stop_on_signals() as asked:
        return one(config, asked) if config.seeds == 1 else each_seed(config, asked)


def may_grow(config: Config) -> set[str]:
    """Return the flags by which a run that is resumed may be made longer, if its steps do not depend on its length."""
    saves, looks = config.saves, config.looks
    # Failures are drawn, and saves for them planned, over the length of the run; rates follow from its evaluations.
    planned = isinstance(saves, Recovering) and (
        saves.fail == ("gamma",) or (saves.fail != () and saves.save_every_steps is None)
    )
    reduced = getattr(looks, "reduce_on_plateau", None) is not None
    if config.learning.schedule != "constant" or isinstance(config.trainers, Processes) or planned or reduced:
        return set()
    if config.source.data == "synthetic":
        return {"epochs"}
    if isinstance(config.source, Tabular) and len(config.source.path) > 1:
        # Saves of shards and mapped files are of one table size, the best state of one validation; and with more
        # epochs, rows that were appended would no longer be the last.
        of_one_size = saves.cpr != "none" or getattr(config.home, "table_directory", None) is not None
        return set() if of_one_size or getattr(looks, "keeps_best", False) else {"path"}
    return {"epochs", "steps"}


def one(config: Config, asked: Asked) -> dict:
    """Run one training job."""
    opened = Run("train", config, config.workdir, config.resume, may_grow(config))
    with opened as run, asked.saying(f"stopped; {go_on_with(run)}"):
        results = run.read_json("results.json")
        check_seeds(run, 1)
        keep_copy(config.learning.model, run.directory)
        # What is trained is what the run has kept, though the file may change meanwhile.
        config = dataclasses.replace(config, learning=config.learning.of_run(run.directory))
        if run.grows or not results.get("last_state_saved"):
            data = data_of(config)
            if isinstance(config.trainers, Processes):
                results = train_pool(config, run, data, asked)
                run.close(results, table(results))
                return results
            saving = None
            while True:
                try:
                    with config.home.opened(run) as home:
                        return train_to_the_end(config, run, data, asked, home, saving)
                except Plateau as plateau:
                    saving = plateau.saving
        say(f"{run.directory} is complete, nothing is left to do:")
        say(table(results))
        return results


def each_seed(config: Config, asked: Asked) -> dict:
    """Run one job per seed, each in its own subdirectory; return the means of their results."""
    opened = Run("train", config, config.workdir, config.resume, may_grow(config))
    with opened as run, asked.saying(f"stopped; {go_on_with(run)}"):
        check_seeds(run, config.seeds)
        found = []
        for seed in range(config.seed, config.seed + config.seeds):
            keep_copy(config.learning.model, run.directory)  # refuses a file that has changed since the first seed
            workdir = run.directory / f"seed_{seed}"
            try:
                found.append(one(dataclasses.replace(config, seed=seed, seeds=1, workdir=workdir, resume=True), asked))
            except Stopped as its:
                raise Stopped(its.signal, f"stopped in seed {seed}; {go_on_with(run)}") from its
        results: dict = {"seeds": config.seeds}
        names = [key for key in found[0] if key.startswith("test_") and key.endswith(tuple(QUALITY))]
        for name in (*names, "examples_per_s"):
            results[name], results[f"{name}_half_width"] = paired_interval([its[name] for its in found])
        run.grown()
        run.close(results)
        return results


if __name__ == "__main__":
    command_line(main, Config, __doc__, parse)
