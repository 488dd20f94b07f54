"""Validation of numeric arguments; errors give the argument's name, its value and the rule."""

import math
import numbers
import operator
from collections.abc import Callable
from typing import Any

import numpy as np


def whole_number(name: str, value: Any, least: int = 1, most: float = math.inf, why: str = "") -> int:
    """Check that an argument is an integer from `least` to `most`, and return it as a Python int.

    Numpy integers are accepted, booleans and floats are not. `why` is appended to the rule in the error.

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
    """Check that an argument is a real number that satisfies a rule, and return it unchanged.

    Booleans, strings and NaN are refused: `fits` uses comparisons only, so that NaN fails. `rule` puts it into words.

    >>> real_number("eta", 0.5, "above 0 and finite", is_positive)
    0.5
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real) or not fits(value):
        raise ValueError(f"{name}={value!r:.80} must be {rule}.")
    return value


def is_positive(value: float) -> bool:
    """Return whether a number is above 0 and finite."""
    return 0 < value < math.inf


def is_not_negative(value: float) -> bool:
    """Return whether a number is 0 or more, and finite."""
    return 0 <= value < math.inf


def is_portion(value: float) -> bool:
    """Return whether a number is above 0 and at most 1."""
    return 0 < value <= 1
