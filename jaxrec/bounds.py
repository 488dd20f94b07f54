"""Numbers that are given as arguments: one that does not fit is refused by its name, with its value
and the rule."""

import math
import numbers
import operator
from collections.abc import Callable
from typing import Any

import numpy as np


def whole_number(name: str, value: Any, least: int = 1, most: float = math.inf, why: str = "") -> int:
    """A whole number within bounds, as an int of Python; numpy's are taken, truth values and floats
    are not.

    Args:
      name: of the argument.
      value: what was given.
      least, most: the bounds, both allowed.
      why: what the error says after the rule, with its own ", " or ": ".

    >>> whole_number("window", np.int64(3), least=0)
    3
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool | np.bool_) or not least <= number <= most:
        bounds = f"from {least}" if most == math.inf else f"from {least} to {most}"
        raise ValueError(f"{name}={value!r:.80} must be a whole number {bounds}{why}.")
    return number


def real_number(name: str, value: Any, rule: str, fits: Callable[[Any], bool]) -> Any:
    """A real number that fits a rule, as it was given; truth values and text are refused, and so is
    a NaN by any rule.

    Args:
      name: of the argument.
      value: what was given.
      rule: in words, and what it is for where that helps.
      fits: the rule as a function of the number; comparisons alone, so that a NaN does not fit.

    >>> real_number("eta", 0.5, "above 0 and finite", is_positive)
    0.5
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real) or not fits(value):
        raise ValueError(f"{name}={value!r:.80} must be {rule}.")
    return value


def is_positive(value: float) -> bool:
    """Above 0 and finite."""
    return 0 < value < math.inf


def is_not_negative(value: float) -> bool:
    """0 or more, and finite."""
    return 0 <= value < math.inf


def is_portion(value: float) -> bool:
    """Above 0 and at most 1."""
    return 0 < value <= 1
