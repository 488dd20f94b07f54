"""Layers relu(x W + b) that keep activations feature-major, f32[features, B], for speed on CPUs.

XLA:CPU (jaxlib 0.10) uses its fast matrix kernels only if the left operand is contracted over its last axis. The weight
gradient x^T g of an example-major layer does not have this form; all three products of a feature-major layer do.
Transposing weights is cheap, transposing activations is not. On other platforms both layouts perform alike.

On a GPU, tensor cores take only sizes that are multiples of 4 or 8 at full speed, and x_0 of a DCNv2 has 13 features
beside its embeddings: the products of such sizes are padded (`aligned`).

Legend: B batch, I and O sizes of a layer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class WithTowers(nn.Module, kw_only=True):
    """Base class of models with towers: what their layers have in common.

    Called with `train=True`, a model drops values, for which it needs `rngs={'dropout': key}`, and normalises by the
    batch, whose statistics are variables 'batch_stats'. `counts` bool[B] says which examples count in these; all if
    None.

    Attributes:
      activation: after every layer of a tower.
      dropout: portion of the values of each layer that is dropped in training.
      batch_norm: whether layers are normalised before the activation (Ioffe and Szegedy, arXiv 1502.03167).
    """

    activation: Callable[[jax.Array], jax.Array] = nn.relu
    dropout: float = 0.0
    batch_norm: bool = False

    @property
    def layers(self) -> dict[str, Any]:
        """The attributes of this class."""
        return {"activation": self.activation, "dropout": self.dropout, "batch_norm": self.batch_norm}


class Tower(WithTowers):
    """Dense layers: x f32[B, I] -> f32[O, B], feature-major; parameters have the shapes of `nn.Dense`.

    Each layer is dense, batch norm, activation, dropout. With ReLU and without batch norm, layers are fused.

    Attributes:
      sizes: O of each layer, at least one.
      kernel_init: initializer of the kernels f32[I, O].
      bias_deviation: the initial biases have standard deviation bias_deviation / O^1/2.
    """

    sizes: Sequence[int]
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    bias_deviation: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False, counts: jax.Array | None = None) -> jax.Array:
        fused = self.activation is nn.relu and not self.batch_norm
        for number, size in enumerate(self.sizes):
            fan_in = x.shape[1] if number == 0 else x.shape[0]
            kernel = self.param(f"kernel_{number}", self.kernel_init, (fan_in, size))
            bias = self.param(f"bias_{number}", nn.initializers.normal(self.bias_deviation * size**-0.5), (size,))
            if fused:
                x = layer(x, kernel, bias) if number else first_layer(aligned(x, 1), aligned(kernel, 0), bias)
            else:
                x = kernel.T @ (x if number else x.T) + bias[:, None]
                if self.batch_norm:
                    norm = nn.BatchNorm(not train, momentum=0.9, axis=0, name=f"norm_{number}")
                    x = norm(x, mask=None if counts is None else counts[None])
                x = self.activation(x)
            if self.dropout:
                x = nn.Dropout(self.dropout)(x, deterministic=not train)
        return x


ALIGNED = 8


def aligned(array: jax.Array, *axes: int) -> jax.Array:
    """Pad the axes with zeros to a multiple of ALIGNED if JAX computes on a GPU; elsewhere return the array itself."""
    if jax.default_backend() != "gpu":
        return array
    return jnp.pad(array, [(0, -size % ALIGNED if axis in axes else 0) for axis, size in enumerate(array.shape)])


def aligned_product(x: jax.Array, kernel: jax.Array, dimensions, **options) -> jax.Array:
    """Compute x W, f32[B, I] and f32[I, O] -> f32[B, O], with aligned I and O: a `dot_general` for `nn.Dense`."""
    product = jax.lax.dot_general(aligned(x, 1), aligned(kernel, 0, 1), dimensions, **options)
    return product[:, : kernel.shape[1]]


@jax.custom_vjp
def layer(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """Compute relu(W^T x + b), f32[O, B], of x f32[I, B], W f32[I, O] and b f32[O]."""
    return _layer_forward(x, kernel, bias)[0]


def _layer_forward(x, kernel, bias):
    # Without the barrier XLA fuses the transpose into the product, which then has no fast kernel.
    y = jnp.maximum(jax.lax.optimization_barrier(kernel.T) @ x + bias[:, None], 0)
    return y, (x, kernel, y)


def _layer_backward(saved, gradient):
    x, kernel, y = saved
    gradient = jnp.where(y > 0, gradient, 0)
    by_kernel, gradient = _in_turn(_contract_last(x, gradient), gradient)
    return kernel @ gradient, by_kernel, _row_sums(gradient)


layer.defvjp(_layer_forward, _layer_backward)


@jax.custom_vjp
def first_layer(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """Compute relu(W^T x^T + b), feature-major f32[O, B], of example-major x f32[B, I]."""
    return _first_forward(x, kernel, bias)[0]


def _first_forward(x, kernel, bias):
    y = jnp.maximum(_contract_last(jax.lax.optimization_barrier(kernel.T), x) + bias[:, None], 0)
    return y, (x, kernel, y)


def _first_backward(saved, gradient):
    x, kernel, y = saved
    gradient = jnp.where(y > 0, gradient, 0)
    # Without the barrier of `_in_turn` XLA rewrites (g x)^T as x^T g^T, which has no fast kernel.
    by_kernel, gradient = _in_turn(gradient @ x, gradient)
    by_x = _contract_last(jax.lax.optimization_barrier(gradient.T), kernel)
    return by_x, by_kernel.T, _row_sums(gradient)


first_layer.defvjp(_first_forward, _first_backward)


def _contract_last(a, b):
    """Compute a b^T, f32[m, k] and f32[n, k] -> f32[m, n]."""
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())))


def _in_turn(first, operand):
    """Make users of the operand wait for `first`: two products at once evict each other from the caches."""
    return jax.lax.optimization_barrier((first, operand))


def _row_sums(gradient):
    return gradient @ jnp.ones(gradient.shape[1], gradient.dtype)
