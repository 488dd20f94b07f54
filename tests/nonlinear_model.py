"""A model that is nonlinear in everything it reads, over tables of two widths."""

import jax.numpy as jnp
import numpy as np
from strategies import draw_ids

from jaxrec.embedding import EmbeddingSpec, Lookup, Table
from jaxrec.types import Batch

SPEC = EmbeddingSpec(
    {"a": Table(40, 4), "b": Table(9, 4), "w": Table(30, 1)},
    {"pair": Lookup(("a", "b")), "bag": Lookup("a", hots=3, pooling="mean"), "w": Lookup("w")},
)


def loss(params, activations, batch):
    """Nonlinear in everything it reads."""
    x = jnp.concatenate([activations["pair"].reshape(-1, 8), activations["bag"], activations["w"], batch.dense], axis=1)
    return (jnp.tanh(x @ params["kernel"] + params["bias"][None])[:, 0] - batch.label) ** 2


def params():
    rng = np.random.default_rng(0)
    return {"kernel": rng.standard_normal((16, 1), np.float32), "bias": np.zeros(1, np.float32)}


def batch_of(step, size=16, padding=0):
    """A random batch; the last `padding` examples have weight 0, but ids and labels like the others."""
    rng = np.random.default_rng(step)
    weight = np.concatenate([rng.random(size - padding), np.zeros(padding)]).astype(np.float32)
    dense, label = rng.standard_normal((size, 3), np.float32), rng.random(size).astype(np.float32)
    return Batch(draw_ids(SPEC, size, step), label, dense, weight)
