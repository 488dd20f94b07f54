"""Failures of a pipeline's threads: what one error says of others."""

from collections.abc import Callable, Sequence


def caught(function: Callable):
    """What a function returns, or what it raised."""
    try:
        return function()
    except BaseException as error:
        return error


def first(failures: Sequence[BaseException]) -> BaseException:
    """The first of some failures, which tells of the others."""
    note(failures[0], failures[1:])
    return failures[0]


def note(error: BaseException, failures: Sequence[BaseException]) -> None:
    """Lets an error tell of failures of the pipeline beside it: a note each, and the failures in its context."""
    for failure in failures:
        if failure in (behind := _chain(error)):
            continue
        said = " ".join([f"{type(failure).__name__}: {failure!s:.300}", *getattr(failure, "__notes__", [])])
        error.add_note(f"the pipeline had a failure of its own: {said}")
        if error not in _chain(failure):
            behind[-1].__context__ = failure


def _chain(error):
    """An error, what it was raised from, and so on."""
    found = [error]
    while (cause := found[-1].__cause__ or found[-1].__context__) is not None and cause not in found:
        found.append(cause)
    return found
