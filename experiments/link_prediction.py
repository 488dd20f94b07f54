"""Train vectors of a graph's nodes by link prediction, rank its held-out links, and export the vectors.

    python experiments/link_prediction.py                              a generated graph, a minute
    python experiments/link_prediction.py --path FB15k-237             ComplEx on a knowledge graph, six minutes
    python experiments/link_prediction.py --path edges.tsv             a table of head, relation and tail of one's own
    python experiments/link_prediction.py --encoder graph_sage --model distmult     a graph network
    python experiments/link_prediction.py --tables host --pipeline oac              rows in host memory
    python experiments/link_prediction.py --workers 4                               Hogwild
    python experiments/link_prediction.py --workdir DIR --resume       goes on with a run that was stopped or killed

docs/graphs.md has more. After each epoch validation triples are ranked among all entities, filtered; at the end the
test triples. vectors.npz of the run's directory has the vectors of entities and relations, and their names or ids.
"""

from main.signals import Stopped, stop_on_signals  # isort: skip  first: the imports below take seconds

import contextlib
import dataclasses
from typing import Any, Literal

import numpy as np
from main.cli import Run, belongs, command_line, plot, refuse
from main.engines import PipelineKind, engines_over
from main.graphs import GraphFlags, LinkJob, LinkRecorder, check_same_graph, make_link_job, settled, triples_of
from main.run_dir import go_on_with

from jaxrec.callbacks import StepInfo, every
from jaxrec.checkpoint import Checkpointer, images, restore
from jaxrec.engine import Engine
from jaxrec.files import atomic_write
from jaxrec.loop import keep_memory
from jaxrec.shadowsync import FreeTrainers
from jaxrec.types import TrainState


@dataclasses.dataclass(frozen=True)
class Config(GraphFlags):
    """Flags of link prediction."""

    tables: Literal["device", "pinned", "host"] = "host"
    """Where the rows are: device, pinned (in host memory, read and written by the GPU itself) or host."""
    pipeline: PipelineKind = "none"
    """Over --tables host: sync, semisync, async or oac; over pinned: oac. None trains one batch after the other."""
    window: int = 2
    """Batches in flight, of async and oac."""
    workers: int = 1
    """Hogwild threads, over --tables host without a pipeline: each adds its changes to the rows and to one network."""
    resume: bool = False
    """Resume the run in --workdir; bit for bit, unless it is async or has several workers."""


class Over(Exception):
    """Raised to end training between two steps."""


def engine_of(config: Config, job: LinkJob, state: TrainState) -> Engine:
    """Return the engine that the flags choose."""
    if config.workers > 1:
        return FreeTrainers(job.task, state, stretch_steps=job.batches_per_epoch, workers=config.workers)
    window: dict[str, Any] = {"window": config.window} if config.pipeline in ("async", "oac") else {}
    return engines_over(config.tables)[config.pipeline](config.pipeline, **window).engine(job.task, state)


def check(config: Config) -> None:
    """Refuse flags that contradict each other."""
    refuse(
        {
            belongs("pipeline", config.pipeline, "--tables host or, with oac, pinned"): (
                config.pipeline not in engines_over(config.tables)
            ),
            belongs("window", config.window, "--pipeline async or oac"): (
                config.window != 2 and config.pipeline not in ("async", "oac")
            ),
            belongs("workers", config.workers, "--tables host without --pipeline"): (
                config.workers > 1 and (config.tables, config.pipeline) != ("host", "none")
            ),
        }
    )


def saved(run: Run, state: TrainState) -> tuple[TrainState, dict[str, Any] | None]:
    """Return the newest state of the run, or the given one, and its recorder's past; drop later rows of metrics."""
    directory, step, past = run.directory / "checkpoints", 0, None
    if images(directory):
        state, image = restore(directory, state)
        step, past = image.step, image.extra.get("recorder")
        if image.run != run.id:
            raise ValueError(f"{image.path} is of another run, {image.run}: give another --workdir.")
    rows = [row for row in run.metrics() if row["step"] <= step]
    run.rewrite_metrics(rows)
    if rows and past is None:  # saved at the end of an epoch
        past = {"seconds": rows[-1]["train_seconds"]}
    return state, past


def train(config: Config, run: Run, job: LinkJob, asked) -> dict:
    """Train to the end, or until asked to stop; return the contents of results.json."""
    state = job.task.init(job.params, config.tables)
    if config.workers > 1:  # free trainers save more than a state
        state = engine_of(config, job, state).state
    state, past = saved(run, state)
    saves = Checkpointer(run.directory / "checkpoints", run=run.id, every_steps=job.batches_per_epoch)

    def stop(info: StepInfo) -> None:
        if asked:
            raise Over

    with engine_of(config, job, state) as engine, asked.held():
        recorder = LinkRecorder(job, config.valid_triples, engine, run.log, past=past)
        engine.enter(recorder.show)
        engine.enter(every(job.batches_per_epoch, recorder.rank))
        engine.enter(saves)
        engine.enter(stop)
        with contextlib.suppress(Over):
            engine.train(job.batches.stream(engine.step, job.steps))
        recorder.bar.close()
        if asked:
            saves.save(engine.state, {"recorder": recorder.so_far()})
            raise Stopped(asked.signal, f"stopped and saved at step {engine.step}; {go_on_with(run)}")
    tested = job.ranks(engine.state, job.triples.test)
    export(run, job, engine.state)
    history = run.metrics()
    results = {f"test_{key}": value for key, value in tested.items()}
    results |= {key: history[-1][key] for key in ("valid_mrr", "train_loss")}
    rates = [row["examples_per_s"] for row in history]
    return results | {"examples_per_s": float(np.median(rates)), "steps": job.steps}


def export(run: Run, job: LinkJob, state: TrainState) -> None:
    """Write vectors.npz: `entity` f32[N, D], `relation` and `reciprocal` f32[R, D], and their names, or else ids.

    A reciprocal leads from tail to head. Relations of RotatE are phases, f32[R, D / 2].
    """
    relation, reciprocal = np.split(np.asarray(state.dense.params["relation"][0]), 2)
    arrays: dict[str, Any] = {"entity": job.entities(state), "relation": relation, "reciprocal": reciprocal}
    for kind, names in zip(("entity", "relation"), job.triples.names, strict=True):
        arrays[f"{kind}_name"] = names if len(names) else np.arange(len(arrays[kind])).astype(str)
    with atomic_write(run.directory / "vectors.npz") as partial, open(partial, "wb") as file:
        np.savez(file, **arrays)


def main(config: Config) -> dict:
    """Train, rank and export; return the contents of results.json."""
    check(config)
    config = settled(config)
    keep_memory()
    with Run("link_prediction", config, config.workdir, config.resume) as run, stop_on_signals() as asked:
        results = run.read_json("results.json")
        if not results:
            triples = triples_of(config)
            check_same_graph(run, config, triples)
            with asked.saying(f"stopped; {go_on_with(run)}"):
                results = train(config, run, make_link_job(config, triples), asked)
            epochs, mrr = zip(*((row["epoch"], row["valid_mrr"]) for row in run.metrics()), strict=True)
            said = f"Filtered MRR {results['test_mrr']:.3f} on the test triples, of {triples.entities} entities"
            plot(run.directory / "mrr.png", {"valid MRR, filtered": {config.model: (epochs, mrr)}}, "epochs", said)
        run.close(results)
        return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
