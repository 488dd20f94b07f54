"""Several errors told as one: the first, with a note for each other."""

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
    """Lets an error tell of failures of the engine beside it: a note each, and the failures in
    its context."""
    for failure in failures:
        if _among(failure, _behind(error)):
            continue
        said = " ".join([f"{type(failure).__name__}: {failure!s:.300}", *getattr(failure, "__notes__", [])])
        error.add_note(f"the engine had a failure of its own: {said}")
        if not _among(error, _behind(failure)):
            last, seen = error, [error]
            while last.__context__ is not None and not _among(last.__context__, seen):
                last = last.__context__
                seen.append(last)
            last.__context__ = failure


def _behind(error):
    """An error, and all causes and contexts behind it."""
    found = [error]
    for known in found:  # it grows
        more = [other for other in (known.__cause__, known.__context__) if other is not None]
        found += [other for other in more if not _among(other, found)]
    return found


def _among(error, errors):
    return any(other is error for other in errors)
