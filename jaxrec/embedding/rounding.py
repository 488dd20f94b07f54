"""Stochastic rounding of updated rows to float16, by random numbers that are a hash of (seed, step, row, column).

To the nearest float16, an update of less than half of its distance to the next would be lost, every time. Rounded up
with the probability of what is above, a value is right on average, and many small updates add up (Gupta et al., ICML
2015, section 3). FBGEMM's tables of 16-bit rows do the same, from a generator of its own.

Legend: S shards, U padded unique rows per shard, E embedding width.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.embedding.tables import hashes_of, keys_of_columns, mix

_MANTISSA_BITS, _LEAST_EXPONENT = 10, -14  # of float16; below, numbers are multiples of the least one


def to_float16(value: jax.Array, unique: jax.Array, step: jax.Array, seed: int) -> jax.Array:
    """Round stochastically, up with the probability (value - down) / (up - down), to neighbours down and up in float16.

    All steps are exact in f32, so that every device and program gives the same bits; only below 2**-14 the chance is
    itself rounded. A value that is a float16 stays, and one that is too large becomes infinite.

    Args:
      value: f32[S, U, E].
      unique: i32[S, U], numbers of the rows.
      step: i32[], of the dense parameters.
      seed: of the tables.

    Returns:
      f16[S, U, E].

    >>> rows = jnp.full((1, 65536, 1), 1 + 2**-12)  # a quarter of the way from 1 to the next float16
    >>> rounded = to_float16(rows, jnp.arange(65536)[None], 0, seed=0)
    >>> round(float((rounded > 1).mean()), 2)
    0.25
    """
    size = jnp.abs(value)
    exponent = jax.lax.bitcast_convert_type(size, jnp.int32) >> 23
    spacing_exponent = jnp.maximum(exponent, _LEAST_EXPONENT + 127) - _MANTISSA_BITS
    power = lambda exponent: jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
    # A product, as GPUs divide approximately. Below 2**11, so that the sum has room for the 13 bits of the number.
    spacings = size * power(254 - spacing_exponent)
    rounded = jnp.floor(spacings + _uniform(unique, value.shape[-1], step, seed)) * power(spacing_exponent)
    return jnp.copysign(rounded, value).astype(jnp.float16)


def _uniform(unique, width, step, seed):
    """Return f32[S, U, E] in [0, 1), multiples of 2**-13, by which an f32 is finer than a float16."""
    key = mix(mix(jnp.uint32(seed ^ 0x5BD1E995)) ^ jnp.asarray(step, jnp.uint32))
    h = hashes_of(unique.astype(jnp.uint32), key, keys_of_columns(width))
    return (h >> 19).astype(jnp.float32) * np.float32(2.0**-13)
