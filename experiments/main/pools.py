"""Training by a pool: trainers in processes of their own over rows at servers, for `train.py --tables remote`.

Dead processes are replaced (`jaxrec.cluster.pool`), and images are saved meanwhile. Trainers are never at rest, so the
model is tested once, at the end, as the mean of its replicas.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxrec.checkpoint import Checkpointer, images, restore
from jaxrec.checkpoint.format import number_of
from jaxrec.cluster import Cluster, Supervisor
from jaxrec.cluster.pool import PoolStats, TrainerPool
from jaxrec.cluster.trainers import TrainerWork
from jaxrec.loop import evaluate, planned
from jaxrec.shadowsync import with_mean_replica
from jaxrec.sharding import make_mesh
from jaxrec.types import Batch, DenseState, TrainState
from main.cli import Run, say
from main.click_data import ClickJob, Data
from main.flags import absolute, data_of
from main.run_dir import go_on_with
from main.signals import Asked, Stopped
from main.techniques import SERVER_TIMEOUT_S, rule_of, sync_options

SAVE_EVERY_S, TIMEOUT_S = 60.0, 120.0


@dataclasses.dataclass(frozen=True)
class Shared:
    """Batch factory of a pool whose n trainers share a stream: trainer i has its batches i, i + n, i + 2 n, ...

    Attributes:
      make: opens the stream in a trainer's process; (first, every) -> batches first, first + every, ... of it.
      batches: length of the stream; those that are left over after equal shares are dropped.
    """

    make: Callable[[], Callable[[int, int], Iterable[Batch]]]
    batches: int

    def __call__(self, trainer: int, trainers: int) -> Callable[[int], Iterator[Batch]]:
        stream, steps = self.make(), self.batches // trainers

        def of(start):
            mine = iter(stream(trainer + start * trainers, trainers))
            return (batch for batch, _ in zip(mine, range(steps - start), strict=False))

        return of


def train_pool(config, run: Run, cluster: Cluster, data: Data, job: ClickJob, asked: Asked) -> dict[str, Any]:
    """Train to the end, save and test; return the contents of results.json.

    Args:
      config: flags of train.py.
      run: run whose directory gets the images.
      cluster: the entered cluster.
      data: data of the flags.
      job: model, loss and optimizers, with schedules of a trainer's steps.
      asked: whether to stop.

    Raises:
      ValueError: there are fewer batches than trainers; the images are of another run or model.
      Stopped: a signal arrived.
      OSError: servers or trainers died too often.
    """
    trainers, directory = config.replicas, run.directory / "checkpoints"
    if data.steps < trainers:
        raise ValueError(f"{data.steps} batches cannot be shared by {trainers} trainers: give fewer, or more data.")
    servers = Supervisor(
        cluster, job.spec, job.row_optimizer, config.number_of_servers, directory=run.directory,
        timeout_s=SERVER_TIMEOUT_S, client=run.id,
    )  # fmt: skip
    with contextlib.closing(servers):
        params, extra = begun(directory, job.init(config.seed), servers)
        work = TrainerWork(
            job.spec, job.loss, job.optimizer, job.row_optimizer, params,
            Shared(functools.partial(stream_of, absolute(config)), data.steps), rule_of(config),
            workers=config.workers, **sync_options(config),
        )  # fmt: skip
        watch = Watch(run, data, asked, extra.get("positions", [0] * trainers))
        with asked.held(), TrainerPool(
            cluster, servers, work, trainers, directory=directory, run=run.id, save_every_seconds=SAVE_EVERY_S,
            positions=extra.get("positions"), timeout_s=TIMEOUT_S,
        ) as pool:  # fmt: skip
            replicas, stats = pool.run(watch)
            positions = [one.position for one in pool.progress]
        watch.bar.close()
        stacked = jax.tree.map(lambda *leaves: np.concatenate(leaves), *replicas)
        dense = DenseState(np.int32(0), jax.tree.map(jnp.asarray, stacked), ())
        state = with_mean_replica(TrainState(dense, servers.tables))
        with Checkpointer(directory, copy="shards", run=run.id) as checkpointer:
            step = 1 + max(map(number_of, images(directory)), default=0)
            last = state._replace(dense=state.dense._replace(step=np.int32(step)))
            checkpointer.save(last, {"positions": positions, "vocabulary_digest": data.vocabulary_digest})
        pairs = planned(job.spec, data.test())
        with contextlib.closing(pairs), asked.held():
            found = evaluate(state, asked.each(pairs), job.eval_step(make_mesh(devices=jax.devices()[:1])))
    tested = {f"test_{name}": value for name, value in found.items()}
    return results_of(stats) | data.best | tested | {"last_state_saved": True}


def begun(directory: Path, params: Any, servers: Supervisor) -> tuple[Any, dict[str, Any]]:
    """Return parameters of one replica, and what was saved beside them; the servers get the rows of the newest image.

    Args:
      directory: images of the run.
      params: initial parameters, returned with {} if nothing is saved.
      servers: new servers.
    """
    if not images(directory):
        return params, {}
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], params)
    state, image = restore(directory, TrainState(DenseState(jnp.int32(0), one, ()), servers.tables))
    say(f"going on from {image.path}, with fresh optimizer states of the dense parameters: not bit for bit")
    return jax.tree.map(lambda leaf: leaf[0], state.dense.params), image.extra


def stream_of(config) -> Callable[[int, int], Iterator[Batch]]:
    """Return (first, every) -> batches, in the process of a trainer."""
    return data_of(config).train


class Watch:
    """Hook of `TrainerPool.run`: shows progress, logs deaths, and saves and leaves the pool if asked to stop.

    Args:
      run: run whose metrics.jsonl gets a row for each death.
      data: training data.
      asked: whether to stop.
      positions: first batch of each trainer.
    """

    def __init__(self, run: Run, data: Data, asked: Asked, positions: Sequence[int]):
        self._run, self._asked, self._told = run, asked, 0
        self.bar = tqdm(total=data.steps, initial=sum(positions), unit="batch", disable=None)

    def __call__(self, pool: TrainerPool) -> None:
        """Called some times a second."""
        self.bar.update(sum(one.position for one in pool.progress) - self.bar.n)
        for failure in pool.failures[self._told :]:
            self._told += 1
            self._run.log(failure._asdict())
        if self._asked:
            pool.save()
            raise Stopped(self._asked.signal or 0, f"stopped and saved; {go_on_with(self._run)}")


def results_of(stats: PoolStats) -> dict[str, Any]:
    """Return the part of results.json about training, of this process."""
    return {
        "steps": sum(stats.steps), "examples": stats.examples, "examples_lost": stats.examples_lost,
        "train_seconds": stats.seconds, "examples_per_s": stats.examples_per_s,
        "sync_gap_steps": float(np.mean(stats.average_sync_gap)), "replica_spread": stats.replica_spread,
        "processes_replaced": len(stats.failures), "rows_lost": stats.rows_lost,
    }  # fmt: skip
