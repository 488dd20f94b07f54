"""One harness over all models: shapes, gradients everywhere, learning of a planted product, clear errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrec.models.dcnv2 import Cross, DCNv2
from jaxrec.models.dlrm import DLRM, dot_interaction

B, N, F, E = 64, 5, 4, 8
MODELS = {
    "dlrm": DLRM((16, E), (16, 1)),
    "dcnv2": DCNv2(2, None, (16,)),
    "dcnv2_low_rank": DCNv2(2, 3, (16,)),
    "dcnv2_stacked": DCNv2(2, None, (16,), parallel=False),
}


def inputs(seed=0, batch=B):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((batch, N), np.float32), rng.standard_normal((batch, F, E), np.float32)


@pytest.mark.parametrize("name", MODELS)
def test_one_logit_an_example_whatever_the_others_are(name):
    model, (dense, activations) = MODELS[name], inputs()
    params = model.init(jax.random.key(0), dense, activations)
    logit = model.apply(params, dense, activations)
    assert logit.shape == (B,) and logit.dtype == jnp.float32
    alone = [model.apply(params, dense[i : i + 1], activations[i : i + 1])[0] for i in range(3)]
    np.testing.assert_allclose(alone, logit[:3], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_every_parameter_and_every_embedding(name):
    model, (dense, activations) = MODELS[name], inputs()
    params = model.init(jax.random.key(0), dense, activations)
    loss = lambda p, a: jnp.sum(model.apply(p, dense, a) ** 2)
    by_params, by_activations = jax.grad(loss, argnums=(0, 1))(params, activations)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(by_params))
    assert (np.abs(by_activations).max(axis=(0, 2)) > 0).all()
    direction = by_activations / np.linalg.norm(by_activations)  # along the gradient the slope is its length
    slope = (loss(params, activations + 1e-2 * direction) - loss(params, activations - 1e-2 * direction)) / 2e-2
    np.testing.assert_allclose(np.linalg.norm(by_activations), slope, rtol=2e-2)


@pytest.mark.parametrize("name", MODELS)
def test_a_product_of_two_embeddings_is_learned(name):
    """What a sum of features cannot express."""
    model, optimizer = MODELS[name], optax.adam(3e-3)
    dense, activations = inputs(batch=2048)
    target = activations[:, 0, 0] * activations[:, 1, 0] + activations[:, 0, 1] * activations[:, 1, 1]
    params = model.init(jax.random.key(0), dense, activations)

    @jax.jit
    def step(params, state):
        loss = lambda p: jnp.mean((model.apply(p, dense, activations) - target) ** 2)
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    state = optimizer.init(params)
    for _ in range(400):
        params, state, value = step(params, state)
    features = np.concatenate([dense, activations.reshape(len(dense), -1)], axis=1)
    linear = np.linalg.lstsq(features, target, rcond=None)
    assert value < 0.75 * linear[1][0] / len(dense)


def test_the_written_gradient_of_the_interaction_is_that_of_autodiff():
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((3, 7, 4), np.float32)
    weight = rng.standard_normal((3, 21), np.float32)

    def plain(x):
        i, j = np.tril_indices(7, -1)
        return jnp.einsum("bie,bje->bij", x, x)[:, i, j]

    np.testing.assert_allclose(dot_interaction(vectors), plain(vectors), rtol=1e-5)
    gradients = [jax.grad(lambda x, f=f: jnp.sum(f(x) * weight))(vectors) for f in (plain, dot_interaction)]
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-5)


def test_dlrm_and_its_gradient_are_those_of_the_plain_formulation():
    """Feature-major towers and written gradients change the order of sums, nothing else."""

    def plain(params, dense, activations):
        def mlp(x, tower):
            for n in range(len(tower) // 2):
                x = jax.nn.relu(x @ tower[f"kernel_{n}"] + tower[f"bias_{n}"][None])
            return x

        params = params["params"]
        bottom = mlp(dense, params["bottom_tower"])
        vectors = jnp.concatenate([bottom[:, None], activations], axis=1)
        i, j = np.tril_indices(F + 1, -1)
        pairs = jnp.einsum("bie,bje->bij", vectors, vectors)[:, i, j]
        x = mlp(jnp.concatenate([bottom, pairs], axis=1), params["top_tower"])
        return (x @ params["kernel"] + params["bias"][None])[:, 0]

    model, (dense, activations) = DLRM((32, 16, E), (32, 16, 1)), inputs()
    params = model.init(jax.random.key(0), dense, activations)
    results = [
        jax.value_and_grad(lambda *x, f=f: jnp.sum(jnp.sin(f(*x))), argnums=(0, 1, 2))(params, dense, activations)
        for f in (model.apply, plain)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *results)


def test_a_cross_layer_is_the_papers_equation():
    x0, x = inputs()[0], inputs(1)[0]
    params = Cross().init(jax.random.key(0), x0, x)
    kernel, bias = params["params"]["Dense_0"]["kernel"], params["params"]["Dense_0"]["bias"]
    np.testing.assert_allclose(Cross().apply(params, x0, x), x0 * (x @ kernel + bias[None]) + x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_wrong_shapes_are_refused(name):
    dense, activations = inputs()
    with pytest.raises(ValueError, match="wants dense"):
        MODELS[name].init(jax.random.key(0), dense, activations.reshape(B, -1))
    with pytest.raises(ValueError, match="rank=0"):
        DCNv2(rank=0).init(jax.random.key(0), dense, activations)
