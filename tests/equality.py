"""Trees of arrays that are equal bit for bit."""

import jax
import numpy as np


def same(one, other):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, one, other)))


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)
