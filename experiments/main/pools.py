"""Training by a pool of trainers in processes of their own: `--tables host --shadowsync easgd --where processes`.

Dead processes are replaced (`jaxrec.cluster.pool`), and images are saved meanwhile. Trainers are never at rest, so the
model is tested once, at the end, as the mean of its replicas.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxrec.checkpoint import Checkpointer, DamagedImage, images, read_manifest, restore
from jaxrec.cluster.pool import PoolStats, TrainerPool, image_of
from jaxrec.cluster.trainers import TrainerWork
from jaxrec.embedding import HostTables, Tables
from jaxrec.prefetch import planned
from jaxrec.sharding import mean_replica
from jaxrec.types import Batch, ShardsLost
from main.cli import Run, say
from main.click_data import Data
from main.config import Config
from main.homes import Host, Servers
from main.recorder import check_mapping, mapping_of
from main.run_dir import go_on_with
from main.signals import Asked, Stopped
from main.targets import evaluate
from main.trainers import Processes

SAVE_EVERY_S, TIMEOUT_S = 60.0, 120.0


@dataclasses.dataclass(frozen=True)
class SharedStream:
    """Batch factory of a pool whose n trainers share a stream: they take k batches in a row, in turns.

    Attributes:
      make: opens the stream in a trainer's process; first -> its batches from that one on.
      batches: length of the stream; those that are left over after equal shares are dropped.
      in_a_row: k; fewer in the last turn, in which all have as many. Where rows are read in windows, every trainer
        reads all of them if k is 1.
    """

    make: Callable[[], Callable[[int], Iterable[Batch]]]
    batches: int
    in_a_row: int = 1

    def __call__(self, trainer: int, trainers: int) -> Callable[[int], Iterator[Batch]]:
        stream, steps = self.make(), self.batches // trainers

        def of(start):
            while start < steps:
                done = start // self.in_a_row * self.in_a_row  # batches of each trainer before this turn
                size = min(self.in_a_row, steps - done)
                first = done * trainers + trainer * size + start - done
                end = done + size
                yield from itertools.islice(stream(first), end - start)
                start = end

        return of


def work_of(config: Config, params: Any, pace: Mapping[str, Any]) -> TrainerWork:
    """Build the work of the trainers, in this process and in theirs, where a trainer may have one core of its own."""
    how, data = config.trainers, config.source.for_training(config.seed)
    assert isinstance(how, Processes)
    stream = SharedStream(lambda: data.train, data.steps, data.batches_in_a_row)
    return TrainerWork(config.job(data).task, params, stream, how.rule, workers=how.workers, **pace)


def train_pool(config: Config, run: Run, data: Data, asked: Asked) -> dict[str, Any]:
    """Train to the end, save and test; return the contents of results.json.

    Raises:
      ValueError: there are fewer batches than trainers; the images are of another run or model.
      Stopped: a signal arrived.
      OSError: servers or trainers died too often, or a trainer failed by itself.
    """
    job, home, how, directory = config.job(data), config.home, config.trainers, run.directory / "checkpoints"
    assert isinstance(home, Host | Servers) and isinstance(how, Processes)
    trainers = how.trainers
    if data.steps < trainers:
        raise ValueError(f"{data.steps} batches cannot be shared by {trainers} trainers: give fewer --trainers.")
    resumes = has_image(directory)
    with home.shared(run, job.task) as (cluster, servers), asked.held():
        here = isinstance(servers, HostTables)
        tables: Any = servers if isinstance(servers, HostTables) else servers.tables
        try:
            params, past = job.init(config.seed), dict[str, Any]()
            if resumes:
                params, past = restored(directory, params, tables)
                check_mapping(run, past, data)
            of_process = dataclasses.replace(config, source=config.source.from_anywhere())
            work = functools.partial(work_of, of_process, params, how.pace(trainers))
            extra: dict[str, Any] = {**mapping_of(data), "examples_before": examples_of(past)}
            watch = Watch(run, data.steps // trainers * trainers, asked)
            with contextlib.closing(watch.bar), TrainerPool(
                cluster, servers, work, trainers, directory=directory, run=run.id, save_every_seconds=SAVE_EVERY_S,
                extra=extra, positions=past.get("positions"), timeout_s=TIMEOUT_S, cores=how.cores if here else None,
            ) as pool:  # fmt: skip
                replicas, stats = pool.run(watch)
                extra["positions"] = [one.position for one in pool.progress]
            mean = jax.tree.map(lambda *leaves: mean_replica(np.concatenate(leaves)), *replicas)
            last = image_of(directory, mean, tables)
            with Checkpointer(directory, copy="whole" if here else "shards", run=run.id) as checkpointer:
                checkpointer.save(last, extra | {"examples": stats.examples})
            with contextlib.closing(planned(job.spec, data.test())) as pairs:
                found = evaluate(last, asked.each(pairs), job.eval_step(), job.targets)
        except (ShardsLost, RuntimeError) as error:  # of a server at rest; of a trainer that has failed
            raise OSError(f"{error}; {go_on_with(run)}") from error
        except Stopped as stopped:
            raise Stopped(stopped.signal, f"stopped and saved; {go_on_with(run)}") from None
    whole = {"steps": sum(extra["positions"]), "examples": examples_of(past) + stats.examples}
    results = results_of(stats) | whole | {"batch_size": data.batch_size}
    return results | data.best | {f"test_{name}": value for name, value in found.items()} | {"last_state_saved": True}


def has_image(directory: Path) -> bool:
    """Whether a directory holds an image of a pool."""
    saved = images(directory)
    for path in saved:
        with contextlib.suppress(DamagedImage):
            if "positions" not in read_manifest(path).extra:
                raise ValueError(
                    f"{path} is of a run in lock step, which trainers in processes cannot go on with: give another "
                    "--workdir, or a --pipeline to train in lock step."
                )
    return bool(saved)


def examples_of(extra: Mapping[str, Any]) -> int:
    """Return the examples trained before an image, over all processes of its run."""
    return extra.get("examples", 0) + extra.get("examples_before", 0)


def restored(directory: Path, params: Any, tables: Tables) -> tuple[Any, dict[str, Any]]:
    """Return the parameters of the newest intact image, and the values saved with it; the tables get its rows."""
    state, image = restore(directory, image_of(directory, params, tables))
    say(f"going on from {image.path}, with fresh optimizer states of the dense parameters: not bit for bit")
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[0], state.dense.params), image.extra


class Watch:
    """Hook of `TrainerPool.run`: shows progress, logs deaths, and saves and leaves the pool if asked to stop."""

    def __init__(self, run: Run, steps: int, asked: Asked):
        self._run, self._asked, self._logged = run, asked, 0
        self.bar = tqdm(total=steps, unit="batch", disable=None)

    def __call__(self, pool: TrainerPool) -> None:
        """Called several times a second."""
        self.bar.update(sum(one.position for one in pool.progress) - self.bar.n)
        for failure in pool.failures[self._logged :]:
            self._logged += 1
            self._run.log(failure._asdict())
        if self._asked:
            pool.save()
            self._asked.check()


def results_of(stats: PoolStats) -> dict[str, Any]:
    """Return the part of results.json about training; since the last resume."""
    gap = stats.average_sync_gap
    return {
        "examples_lost": stats.examples_lost, "train_seconds": stats.seconds, "examples_per_s": stats.examples_per_s,
        "replica_spread": stats.replica_spread, "processes_replaced": len(stats.failures), "rows_lost": stats.rows_lost,
        **({"sync_gap_steps": gap} if math.isfinite(gap) else {}),
    }  # fmt: skip
