"""Pipelines of several modes in turns over the same batches, and how their rates compare: for the links of
oac_throughput.py, emulated and real."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from jaxrec.oac import Pipeline
from studies.oac_work import Work, turn
from studies.reference import ratio


class PipelineWay(NamedTuple):
    """A mode of oac_work.py, and its window where it has one."""

    mode: str
    window: int | None = None

    @property
    def name(self) -> str:
        """For example oac_window_8; the mode alone for the window of --window."""
        return self.mode if self.window is None else f"{self.mode}_window_{self.window}"

    def of(self, mode: str) -> str:
        """The name of another mode with this window."""
        return PipelineWay(mode, self.window).name


def compiled(work: Work, ways: list[PipelineWay], **options) -> dict[str, Pipeline]:
    """A pipeline for each way over the tables of the work, which has compiled its programs.

    Args:
      work: with W + 4 batches or more.
      ways: what to make.
      options: of all pipelines.

    Returns:
      {name of the way: pipeline}.
    """
    pipelines: dict[str, Pipeline] = {}
    for way in ways:
        window: dict[str, Any] = {} if way.window is None else {"window": way.window}
        pipelines[way.name] = pipeline = work.pipeline(way.mode, **window, **options)
        turn(pipeline, work.batches[: pipeline.window + 4], pipeline.window + 2)
    return pipelines


def in_turns(
    pipelines: dict[str, Pipeline],
    batches: list,
    rounds: int,
    counted: int,
    words: str,
    between: Callable[[], object] = lambda: None,
) -> dict[str, np.ndarray]:
    """All pipelines in turns, round by round.

    Args:
      pipelines: by name.
      batches: W + 3 + counted of them or more.
      rounds: turns of each.
      counted: batches of a turn whose time counts; the W + 2 before them fill the pipeline.
      words: for the bar that shows how far it is.
      between: called behind each round.

    Returns:
      {name: seconds per batch f64[rounds]}.
    """
    turns: dict[str, list[float]] = {name: [] for name in pipelines}
    for _ in tqdm(range(rounds), desc=words, unit="round", disable=None):
        for name, pipeline in pipelines.items():
            skip = pipeline.window + 2
            turns[name].append(turn(pipeline, batches[: skip + 1 + counted], skip))
        between()
    return {name: np.array(times) for name, times in turns.items()}


def compare(times: dict[str, np.ndarray], ways: list[PipelineWay], batch_size: int) -> dict[str, Any]:
    """Rates, and the ratios of rates within a round: over sync, of all oac's over async and of its
    kinds over oac.

    Args:
      times: seconds per batch f64[rounds] of each way, by its name.
      ways: those that were timed, sync and async or not.
      batch_size: examples in a batch.

    Returns:
      Flat results, as `ratio` makes them.

    >>> times = {"sync": np.array([2.0, 3.0]), "oac": np.array([1.0, 2.0])}
    >>> found = compare(times, [PipelineWay("sync"), PipelineWay("oac")], 6)
    >>> found["examples_per_s_sync"], found["oac_over_sync"], "oac_over_async" in found
    (2.5, 1.75, False)
    """
    results: dict[str, Any] = {}
    for way in ways:
        mine, name = times[way.name], way.name
        results |= ratio(f"examples_per_s_{name}", batch_size / mine)
        others = ["sync"] if way.mode != "sync" else []
        if way.mode.startswith("oac"):
            others += [way.of("async")] + ([way.of("oac")] if way.mode != "oac" else [])
        for other in others:
            if other in times:
                results |= ratio(f"{name}_over_{other}", times[other] / mine)
    return results
