"""Initial rows as an integer hash of (seed, row, column), so that a row can always be made
again."""

import numpy as np

_GOLDEN = 0x9E3779B9


def _mix(h):
    """Scrambles u32 by xor-shift-multiply rounds ("lowbias32", Wellons 2018)."""
    h = h ^ (h >> 16)
    h = h * np.uint32(0x7FEB352D)
    h = h ^ (h >> 15)
    h = h * np.uint32(0x846CA68B)
    return h ^ (h >> 16)


def initial_rows(row, width, scale, seed, xp=np):
    """Draws the initial embedding rows, uniform in [-scale, scale), from (seed, row, column) alone.

    Written once for numpy and jax.numpy: all steps are exact in f32 except the last product, so
    that both give the same bits.

    Args:
      row: i32[n] row numbers within the stack.
      width: number of columns E.
      scale: f32[n] or a float, half the width of each row's distribution.
      seed: non-negative integer below 2**32.
      xp: `numpy` or `jax.numpy`.

    Returns:
      f32[n, E].

    >>> initial_rows(np.array([0, 1]), 2, 1.0, seed=0).shape
    (2, 2)
    """
    key = _mix(xp.asarray([(seed * _GOLDEN + 1) & 0xFFFFFFFF], dtype=np.uint32))
    row_key = _mix(row.astype(np.uint32) ^ key)  # [n]
    column = xp.arange(1, width + 1, dtype=np.uint32) * np.uint32(_GOLDEN)
    h = _mix(row_key[:, None] + column[None, :])
    unit = (h >> 8).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)  # exact, in [-1, 1)
    return unit * xp.asarray(scale, dtype=np.float32).reshape(-1, 1)
