"""Rounds in which everything that is compared runs once, so that a slow minute of the machine hits all of it."""

from collections.abc import Callable, Mapping
from typing import Any

from tqdm import tqdm


def in_turns(
    ways: Mapping[Any, Callable[[], Any]], rounds: int, words: str, prepare: Callable[[], Any] = lambda: None
) -> dict[Any, list]:
    """Call `prepare` and then all ways once in each round, another one first; return {name: a result per round}."""
    found: dict[Any, list] = {name: [] for name in ways}
    names = list(ways)
    for number in tqdm(range(rounds), desc=words, unit="round", disable=None):
        prepare()
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(ways[name]())
    return found
