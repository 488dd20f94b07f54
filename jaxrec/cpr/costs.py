"""What a job pays for saves and recoveries, measured on the machine, the tables and the directory that it will have.

The equations of `schedule.py` take these costs as given (Maeng et al., CPR, MLSys 2021, arXiv 2011.02999, section 3).
"""

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from jaxrec.bounds import whole_number
from jaxrec.checkpoint import Checkpointer, restore, restore_shards, shard_source
from jaxrec.checkpoint.row_deltas import Verified
from jaxrec.cpr.schedule import Costs, check_costs
from jaxrec.embedding import Tables
from jaxrec.files import local_path
from jaxrec.types import TrainState


class _Seconds(NamedTuple):
    save: float  # that training waits
    load: float
    partial_load: float


def measure(
    state: TrainState,
    directory: str | Path,
    *,
    mtbf_hours: float,
    total_hours: float,
    reschedule_hours: float,
    failed_nodes: int = 1,
    copy: Literal["whole", "shards"] = "whole",
    rounds: int = 3,
) -> tuple[TrainState, Costs]:
    """Really saves and restores a state, and returns its costs for `plan_recovery`; call it before training.

    Each round saves a whole image, restores all of it, and restores as many shards alone as a failure takes; a cost is
    its median over the rounds. A shard is what CPR calls a node. The files of a round are flushed, dropped from the
    system's cache as far as it does so, and removed.

    What cannot be measured here remains an argument: how often nodes fail, how long the job is, and how long a
    scheduler takes to replace a node. A scheme's row deltas are not in it either: they write the same bytes per
    T_save, and a shard that comes back from a chain of them is read from up to 16 / r files more.

    Args:
      state: TrainState, of the size that will be trained. It comes back with the same values: host tables are filled
        in place, those of devices are donated.
      directory: where the run will save, or its parent, on the same disk. It need not exist, and is not made.
      mtbf_hours: T_fail, of the whole job.
      total_hours: T_total, without any overhead.
      reschedule_hours: O_res, of one recovery; 0 if a spare node waits.
      failed_nodes: m, how many shards a failure takes.
      copy: as for `Recovery`. O_save is what training waits for: a copy in memory with 'whole', which is written
        beside training, or the write itself with 'shards'.
      rounds: how often everything is done.

    Returns:
      The state, and Costs whose save_hours, load_hours (all shards) and partial_load_hours (the failed ones) are
      measured, with as many nodes as the tables have shards.

    Raises:
      ValueError: a number outside its range, before anything is saved.
      OSError: the disk is full, or the directory cannot be written; the state is as it was, and no file stays.

    >>> import jax.numpy as jnp, optax, tempfile, jaxrec
    >>> from jaxrec.cpr import measure, plan_recovery
    >>> from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, adagrad
    >>> spec = EmbeddingSpec({'item': Table(9000, 8)}, {'item': Lookup('item')})
    >>> state = jaxrec.init_state({'bias': jnp.zeros(())}, optax.adam(1e-3), HostTables.create(spec, adagrad(0.1)))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     state, costs = measure(state, directory, mtbf_hours=28, total_hours=56, reschedule_hours=0.1)
    >>> plan = plan_recovery(costs, target_pls=0.1)
    >>> plan.mode, plan.in_steps(seconds_per_step=0.1)['total_steps'], costs.nodes
    ('partial', 2016000, 8)
    """
    given = Costs(1.0, 0.0, reschedule_hours, mtbf_hours, total_hours, state.tables.spec.shards, failed_nodes)
    whole_number("rounds", rounds)
    check_costs(given)
    found = []
    # On the same disk as the directory, which need not exist.
    directory = local_path(directory)
    above = next(path for path in (directory, *directory.parents) if path.exists())
    own = tempfile.TemporaryDirectory(prefix="cpr_measure_", dir=above)
    with own as place, _standing_kept(state.tables):
        for number in range(rounds):
            state, seconds = _round(state, Path(place) / f"round_{number}", failed_nodes, copy)
            found.append(seconds)
    hours = [statistics.median(one) / 3600 for one in zip(*found, strict=True)]
    measured = dict(zip(("save_hours", "load_hours", "partial_load_hours"), hours, strict=True))
    return state, given._replace(**measured)


@contextlib.contextmanager
def _standing_kept(tables: Tables) -> Iterator[None]:
    """Tables that count puts stand afterwards where they stood: what is written into them is what they hold."""
    steps = getattr(tables, "steps", None)
    before = None if steps is None else steps.copy()
    try:
        yield
    finally:
        if steps is not None:
            steps[:] = before


def _round(state, directory, failed_nodes, copy) -> tuple[TrainState, _Seconds]:
    with Checkpointer(directory, copy=copy) as saver:
        save = saver.save(state)
        saver.wait()
        image = saver.path_of(int(state.dense.step))
        _forget(image)
        load, (state, _) = _timed(lambda: restore(image, state))
        _forget(image)
        partial_load, tables = _timed(lambda: _load_shards(image, state.tables, range(failed_nodes)))
    shutil.rmtree(directory)
    return state._replace(tables=tables), _Seconds(save, load, partial_load)


def _load_shards(image: Path, tables: Tables, shards) -> Tables:
    """Restores shards as `Recovery` does: all are verified before the first row changes."""
    known: Verified = {}
    for shard in shards:
        shard_source([image], shard, known)
    return restore_shards(image, tables, shards)[0]


def _timed(act: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    found = jax.block_until_ready(act())
    return time.perf_counter() - start, found


def _forget(image: Path) -> None:
    """Drops the files of an image from the system's cache: a replacement node has never read them."""
    for file in image.rglob("*"):
        if file.is_file() and hasattr(os, "posix_fadvise"):
            with open(file, "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
