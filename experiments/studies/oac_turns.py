"""Interleaved timing of pipeline modes over the same batches, for the links of oac_throughput.py.

The link is emulated (`oac_work.py`), or real: table servers in other processes, of this machine or others, on Ray.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from main.homes import with_initial_rows

from jaxrec.cluster import Supervisor
from jaxrec.embedding import Tables
from jaxrec.oac import Pipeline
from jaxrec.types import TrainState
from studies.oac_work import Work, turn
from studies.reference import Job, ratio
from studies.turns import in_turns

COMPARED = 12  # batches after which two runs must be bitwise equal


class PipelineWay(NamedTuple):
    """A mode of oac_work.py, with its window where it has one."""

    mode: str
    window: int | None = None

    @property
    def name(self) -> str:
        """Key in results, such as oac_window_8; the mode alone if `window` is None (the window of --window)."""
        return self.mode if self.window is None else f"{self.mode}_window_{self.window}"

    def of(self, mode: str) -> str:
        """Key of another mode with this window."""
        return PipelineWay(mode, self.window).name


def compiled(work: Work, ways: list[PipelineWay], **options) -> dict[str, Pipeline]:
    """Create one pipeline per way over the tables of `work`, and compile its programs.

    Args:
      work: with at least W + 4 batches.

    Returns:
      {name of the way: pipeline}.
    """
    pipelines: dict[str, Pipeline] = {}
    for way in ways:
        window: dict[str, Any] = {} if way.window is None else {"window": way.window}
        pipelines[way.name] = pipeline = work.pipeline(way.mode, **window, **options)
        turn(pipeline, work.batches[: pipeline.window + 4], pipeline.window + 2)
    return pipelines


def turns_of(pipelines: dict[str, Pipeline], batches: list, counted: int) -> dict[str, Callable[[], float]]:
    """Return {name: times a run, in seconds per batch}, for `in_turns`.

    Args:
      batches: at least W + 3 + counted batches.
      counted: timed batches of a run; the W + 2 before them fill the pipeline.
    """
    skip = {name: pipeline.window + 2 for name, pipeline in pipelines.items()}
    return {
        name: functools.partial(turn, pipeline, batches[: skip[name] + 1 + counted], skip[name])
        for name, pipeline in pipelines.items()
    }


def compare(times: Mapping[str, Any], ways: list[PipelineWay], batch_size: int) -> dict[str, Any]:
    """Rates, and their ratios within a round: every way over sync, OAC over async, and variants of OAC over plain OAC.

    Args:
      times: {name of the way: seconds per batch f64[rounds]}.

    Returns:
      Flat results, formatted by `ratio`.

    >>> found = compare({"sync": [2.0, 3.0], "oac": [1.0, 2.0]}, [PipelineWay("sync"), PipelineWay("oac")], 6)
    >>> found["examples_per_s_sync"], found["oac_over_sync"], "oac_over_async" in found
    (2.5, 1.75, False)
    """
    results: dict[str, Any] = {}
    for way in ways:
        mine, name = np.array(times[way.name]), way.name
        results |= ratio(f"examples_per_s_{name}", batch_size / mine)
        others = ["sync"] if way.mode != "sync" else []
        if way.mode.startswith("oac"):
            others += [way.of("async")] + ([way.of("oac")] if way.mode != "oac" else [])
        for other in others:
            if other in times:
                results |= ratio(f"{name}_over_{other}", np.array(times[other]) / mine)
    return results


def at_servers(
    job: Job, number: int, window: int, start: Callable[..., Supervisor], opened: contextlib.ExitStack
) -> Work:
    """Create the workload with its rows at the servers of start(spec, row_optimizer), closed with `opened`."""

    def create(spec, row_optimizer) -> Tables:
        return opened.enter_context(contextlib.closing(start(spec, row_optimizer))).tables

    return Work(job, number, window, create)


def ways_at_servers(ways: list[PipelineWay]) -> list[PipelineWay]:
    """Ways that are also timed over tables in this process: sync, and OAC that moves all rows."""
    return [way for way in ways if way.mode in ("sync", "oac")]


def measure_remote(remote: Work, local: Work, ways: list[PipelineWay], rounds: int, counted: int) -> dict[str, Any]:
    """Time all ways over servers, and some over tables in this process, in interleaved rounds.

    Args:
      remote, local: the same job, at servers and in this process.

    Returns:
      Flat results with keys ending in `_remote` or `_local`; `remote_oac_over_local_oac` is a ratio of rates.
    """
    beside, size = ways_at_servers(ways), remote.job.batch_size
    pipelines = {f"remote {name}": pipeline for name, pipeline in compiled(remote, ways).items()}
    pipelines |= {f"local {name}": pipeline for name, pipeline in compiled(local, beside).items()}
    ways_in_turns = turns_of(pipelines, remote.batches, counted) | {"stages": lambda: remote.stages_ms(6)}
    times = in_turns(ways_in_turns, rounds, "remote link")
    stages = times.pop("stages")
    results: dict[str, Any] = {"rounds_remote": rounds, "counted_batches_remote": counted}
    for home, each in (("remote", ways), ("local", beside)):
        found = compare({way.name: times[f"{home} {way.name}"] for way in each}, each, size)
        results |= {f"{key}_{home}": value for key, value in found.items()}
    for way in beside:
        key = f"remote_{way.name}_over_local_{way.name}"
        results |= ratio(key, np.divide(times[f"local {way.name}"], times[f"remote {way.name}"]))
    for stage in stages[0]:
        results[f"stage_ms_{stage}_remote"] = float(np.median([each[stage] for each in stages]))
    return results


def trained(work: Work, mode: str, number: int) -> list[np.ndarray]:
    """Train `number` batches in a mode, from initial rows; return all losses, then dense state and rows."""
    pipeline = work.pipeline(mode, tables=with_initial_rows(work.tables))
    batches = itertools.islice(itertools.cycle(work.batches), number)
    losses = [np.asarray(metrics["loss"]) for _, metrics in pipeline.run(batches)]
    found = [*losses, *bits_of(pipeline.state)]
    pipeline.close()
    return found


def bits_of(state: TrainState) -> list[np.ndarray]:
    """All arrays of a state: dense leaves, then rows shard by shard."""
    tables = state.tables
    rows = [shard for stack in tables.spec.stacks for part in tables.parts(stack).values() for shard in part]
    return [*map(np.asarray, jax.tree.leaves(state.dense)), *map(np.asarray, rows)]


def equal(remote: Work, local: Work, number: int = COMPARED) -> dict[str, bool]:
    """Check that OAC over servers is bitwise equal to sequential training over tables in this process.

    Returns:
      `bitwise_equal_remote`, and the control `bitwise_equal_async_remote`, which is false where batches share rows.
    """
    wanted = trained(local, "sync", number)
    same = lambda found: len(found) == len(wanted) and all(map(np.array_equal, found, wanted))
    modes = {"bitwise_equal_remote": "oac", "bitwise_equal_async_remote": "async"}
    return {key: same(trained(remote, mode, number)) for key, mode in modes.items()}
