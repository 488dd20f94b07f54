"""Measure the costs of saves and recoveries of a job, on its own machine, tables and directory.

The equations of `schedule.py` take these costs as given (Maeng et al., CPR, MLSys 2021, arXiv 2011.02999).
"""

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax

from jaxrec.bounds import whole_number
from jaxrec.checkpoint import Checkpointer, restore, restore_each
from jaxrec.cpr.schedule import Costs, check_costs
from jaxrec.embedding import HostedTables
from jaxrec.files import local_path
from jaxrec.types import TrainState


def measure_costs(
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
    """Save and restore a state, and return the measured costs for `plan_recovery`; call it before training.

    Each round saves a whole image, restores all of it, and restores alone as many shards as a failure takes; a cost is
    its median over the rounds. A shard is a node in the terms of CPR. The files of a round are flushed, dropped from
    the page cache as far as the system permits, and removed.

    The frequency of failures, the length of the job and the time to replace a node cannot be measured here and remain
    arguments. Row deltas of a scheme are not measured either: they write the same bytes per T_save, and restoring a
    shard from their chain reads up to 16 / r more files.

    Args:
      state: TrainState of the size to be trained. It is returned with the same values: host tables are filled in place,
        device tables are donated.
      directory: directory of the run's images, or its parent, on the same disk. It need not exist, and is not created.
      mtbf_hours: T_fail, of the whole job.
      total_hours: T_total, without overhead.
      reschedule_hours: O_res, of one recovery; 0 if there is a spare node.
      failed_nodes: m, number of shards lost in a failure.
      copy: as for `Recovery`. O_save is the time that training waits: for a copy in memory with 'whole', whose write
        continues in the background, or for the write itself with 'shards'.
      rounds: number of rounds.

    Returns:
      The state, and Costs with measured save_hours, load_hours (all shards) and partial_load_hours (the failed ones),
      and as many nodes as the tables have shards.

    Raises:
      ValueError: a number is out of range; raised before anything is saved.
      OSError: the disk is full, or the directory cannot be written; no file remains. Host tables have the same values;
        device tables may have been donated by a round before: create them anew.

    >>> import optax, tempfile
    >>> from jaxrec import EmbeddingSpec, Lookup, Table, Task, adagrad
    >>> from jaxrec.cpr import measure_costs, plan_recovery
    >>> spec = EmbeddingSpec({'item': Table(9000, 8)}, {'item': Lookup('item')})
    >>> loss = lambda params, activations, batch: (activations['item'].sum(-1) + params - batch.label) ** 2
    >>> state = Task(spec, loss, optax.adam(1e-3), adagrad(0.1)).init(0.0)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     state, costs = measure_costs(state, directory, mtbf_hours=28, total_hours=56, reschedule_hours=0.1)
    >>> plan = plan_recovery(costs, target_pls=0.1)
    >>> plan.mode, plan.in_steps(seconds_per_step=0.1)['total_steps'], costs.nodes
    ('partial', 2016000, 8)
    """
    given = Costs(1.0, 0.0, reschedule_hours, mtbf_hours, total_hours, state.tables.spec.shards, failed_nodes)
    whole_number("rounds", rounds)
    check_costs(given)
    found = []
    # The directory need not exist, so use its closest existing parent: it is on the same disk.
    directory = local_path(directory)
    existing_parent = next(path for path in (directory, *directory.parents) if path.exists())
    own = tempfile.TemporaryDirectory(prefix="cpr_measure_", dir=existing_parent)
    with own as place, _keeping_put_counts(state.tables.hosted):
        for number in range(rounds):
            state, seconds = _round(state, Path(place) / f"round_{number}", failed_nodes, copy)
            found.append(seconds)
    hours = [statistics.median(one) / 3600 for one in zip(*found, strict=True)]
    measured = dict(zip(("save_hours", "load_hours", "partial_load_hours"), hours, strict=True))
    return state, given._replace(**measured)


@contextlib.contextmanager
def _keeping_put_counts(tables: HostedTables | None) -> Iterator[None]:
    """Restore the put counts of tables, as the puts write values that they already hold."""
    before = None if tables is None else tables.puts.copy()
    try:
        yield
    finally:
        if tables is not None:
            tables.puts[:] = before


def _round(state, directory, failed_nodes, copy) -> tuple[TrainState, tuple[float, float, float]]:
    """Return the state, and the seconds that training waits for a save, of a full and of a partial load."""
    with Checkpointer(directory, copy=copy) as saver:
        save = saver.save(state)
        saver.wait()
        image = saver.path_of(int(state.dense.step))
        _drop_from_cache(image)
        load, (state, _) = _timed(lambda: restore(image, state))
        _drop_from_cache(image)
        partial_load, tables = _timed(lambda: restore_each([image], state.tables, range(failed_nodes))[0])
    shutil.rmtree(directory)
    return state._replace(tables=tables), (save, load, partial_load)


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    found = jax.block_until_ready(function())
    return time.perf_counter() - start, found


def _drop_from_cache(image: Path) -> None:
    """Drop the files of an image from the page cache: a replacement node has never read them."""
    for file in image.rglob("*"):
        if file.is_file() and hasattr(os, "posix_fadvise"):
            with open(file, "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
