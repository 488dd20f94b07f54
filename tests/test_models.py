"""All models under one harness: shapes, gradients everywhere, learning of a planted product, clear errors."""

import functools

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.errors import InvalidRngError

from jaxrec.models import (
    DIN,
    DLRM,
    DNN,
    FM,
    LR,
    DCNv2,
    DeepFM,
    FinalMLP,
    MMoE,
    SharedBottom,
    Side,
    WideAndDeep,
    dlrm,
    in_batch_softmax,
    tower,
)
from jaxrec.models.dcnv2 import Cross

B, N, F, E = 64, 5, 4, 8
MODELS = {
    "dlrm": DLRM((16, E), (16, 1)),
    "dcnv2": DCNv2(2, None, (16,)),
    "dcnv2_low_rank": DCNv2(2, 3, (16,)),
    "dcnv2_stacked": DCNv2(2, None, (16,), parallel=False),
    "dcnv2_mlperf": DCNv2(2, 3, (16,), parallel=False, bottom=(16, E)),
    "lr": LR(),
    "fm": FM(),
    "dnn": DNN((32, 16)),
    "wide_deep": WideAndDeep((32, 16)),
    "deepfm": DeepFM((32, 16)),
    "finalmlp": FinalMLP(((16,), (16,)), gate=8, heads=4),
}
OF_SEVERAL = {
    "shared_bottom": SharedBottom(labels=3, bottom=(32, 16), tower=(8,)),
    "mmoe": MMoE(labels=3, experts=4, expert=(32, 16), tower=(8,)),
}
T = 6


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


@pytest.mark.parametrize("name", OF_SEVERAL)
def test_an_output_for_each_label_of_an_example_whatever_the_others_are(name):
    model, (dense, activations) = OF_SEVERAL[name], inputs()
    params = model.init(jax.random.key(0), dense, activations)
    found = model.apply(params, dense, activations)
    assert found.shape == (B, 3) and found.dtype == jnp.float32
    alone = [model.apply(params, dense[i : i + 1], activations[i : i + 1])[0] for i in range(3)]
    np.testing.assert_allclose(alone, found[:3], rtol=1e-4, atol=1e-5)


def test_a_mixture_of_experts_is_what_its_equations_say():
    model, (dense, activations) = OF_SEVERAL["mmoe"], inputs(1)
    of = jax.tree.map(np.asarray, model.init(jax.random.key(1), dense, activations)["params"])
    x = np.concatenate([dense, activations.reshape(B, -1)], axis=1).astype(np.float64)

    def tower(name, x):
        for number in range(len(of[name]) // 2):
            x = np.maximum(x @ of[name][f"kernel_{number}"] + of[name][f"bias_{number}"], 0)
        return x

    experts = np.stack([tower(f"expert_{i}", x) for i in range(4)], axis=1)
    for k in range(3):
        gate = np.exp(x @ of[f"gate_{k}"]["kernel"])
        mixed = (gate[:, :, None] * experts).sum(axis=1) / gate.sum(axis=1, keepdims=True)
        output = tower(f"tower_{k}", mixed) @ of[f"output_{k}"]["kernel"] + of[f"output_{k}"]["bias"]
        found = model.apply({"params": of}, dense, activations)[:, k]
        np.testing.assert_allclose(found, output[:, 0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", [*MODELS, *OF_SEVERAL, "din", "side"])
def test_models_are_exported_for_batches_of_any_size(name):
    model, (dense, activations) = (
        (MODELS | OF_SEVERAL | {"din": DIN((16,), (8,)), "side": Side((16, 4))})[name],
        inputs(),
    )
    args = {"din": (dense, activations, *history()), "side": (activations, dense)}.get(name, (dense, activations))
    params = model.init(jax.random.key(0), *args)
    (batch,) = jax.export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct((batch, *array.shape[1:]), array.dtype) for array in args]
    exported = jax.export.export(jax.jit(model.apply))(params, *shapes)
    for size in (1, B):
        some = [array[:size] for array in args]
        np.testing.assert_allclose(exported.call(params, *some), model.apply(params, *some), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [*MODELS, *OF_SEVERAL])
def test_gradients_reach_every_parameter_and_every_embedding(name):
    model, (dense, activations) = (MODELS | OF_SEVERAL)[name], inputs()
    params = model.init(jax.random.key(0), dense, activations)
    loss = lambda p, a: jnp.sum(model.apply(p, dense, a) ** 2)
    by_params, by_activations = jax.grad(loss, argnums=(0, 1))(params, activations)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(by_params))
    assert (np.abs(by_activations).max(axis=(0, 2)) > 0).all()
    direction = by_activations / np.linalg.norm(by_activations)  # the slope along the gradient is its norm
    slope = (loss(params, activations + 1e-2 * direction) - loss(params, activations - 1e-2 * direction)) / 2e-2
    np.testing.assert_allclose(np.linalg.norm(by_activations), slope, rtol=2e-2)


def mean_squares_after_training(model):
    """Mean squared errors for a sum of products: after 400 training steps, and of the best linear fit."""
    optimizer = optax.adam(3e-3)
    dense, activations = inputs(batch=2048)
    target = activations[:, 0, 2] * activations[:, 1, 2] + activations[:, 0, 1] * activations[:, 1, 1]
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
    return value, linear[1][0] / len(dense)


@pytest.mark.parametrize("name", [
    name if name in ("dlrm", "dcnv2") else pytest.param(name, marks=pytest.mark.more)
    for name in MODELS if name not in ("lr", "fm", "deepfm")
])  # fmt: skip
def test_a_product_of_two_embeddings_is_learned(name):
    """A linear model cannot express it; FMs are left out, as their products combine all vectors."""
    left, linear = mean_squares_after_training(MODELS[name])
    assert left < 0.75 * linear


def test_logistic_regression_learns_no_product():
    """Negative control."""
    left, linear = mean_squares_after_training(MODELS["lr"])
    assert left > 0.95 * linear


def test_the_small_models_are_the_papers_equations():
    """Compared with loops over features that read the parameters by name."""
    dense, activations = inputs(batch=3)
    params = FM().init(jax.random.key(0), dense, activations)
    draw = lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape)
    params = jax.tree.map(draw, params)
    linear, factors = params["params"]["first_order"]["Dense_0"], params["params"]["dense_factors"]
    for example, logit in enumerate(FM().apply(params, dense, activations)):
        x = np.concatenate([np.ones(F), dense[example]])
        weights = np.concatenate([activations[example, :, 0], linear["kernel"][:, 0]])
        vectors = np.concatenate([activations[example, :, 1:], factors])
        wanted = linear["bias"][0] + weights @ x
        np.testing.assert_allclose(
            LR().apply({"params": {"Dense_0": linear}}, dense, activations)[example], wanted, rtol=1e-4
        )
        pairs = [vectors[i] @ vectors[j] * x[i] * x[j] for i in range(F + N) for j in range(i)]
        np.testing.assert_allclose(logit, wanted + sum(pairs), rtol=1e-4)


def plain_tower(params, x):
    for n in range(len(params) // 2):
        x = jax.nn.relu(x @ params[f"kernel_{n}"] + params[f"bias_{n}"][None])
    return x


@pytest.mark.parametrize("name", ["dnn", "wide_deep", "deepfm"])
def test_deep_models_are_a_tower_beside_what_is_linear(name):
    model, (dense, activations) = MODELS[name], inputs(batch=4)
    params = model.init(jax.random.key(0), dense, activations)["params"]
    deep, seen = (params, activations) if name == "dnn" else (params["deep"], activations[:, :, 1:])
    x = plain_tower(deep["Tower_0"], jnp.concatenate([dense, seen.reshape(4, -1)], axis=1))
    wanted = (x @ deep["Dense_0"]["kernel"] + deep["Dense_0"]["bias"][None])[:, 0]
    beside = {"wide_deep": ("wide", LR()), "deepfm": ("fm", FM())}
    if name in beside:
        key, part = beside[name]
        wanted = wanted + part.apply({"params": params[key]}, dense, activations)
    np.testing.assert_allclose(model.apply({"params": params}, dense, activations), wanted, rtol=1e-4, atol=1e-5)


def test_finalmlp_is_the_papers_equation():
    model, (dense, activations) = MODELS["finalmlp"], inputs(batch=3)
    params = model.init(jax.random.key(0), dense, activations)["params"]
    layer = lambda name, x: x @ params[name]["kernel"] + params[name].get("bias", jnp.zeros(1))[None]
    x, streams = np.concatenate([dense, activations.reshape(3, -1)], axis=1), []
    for s in (0, 1):
        gate = 2 * jax.nn.sigmoid(layer(f"gate_{s}", jax.nn.relu(layer(f"gate_hidden_{s}", params[f"context_{s}"]))))
        streams.append(plain_tower(params[f"tower_{s}"], gate * x))
    wanted = (layer("first", streams[0]) + layer("second", streams[1]))[:, 0]
    for head in range(4):
        mine = [stream[:, 4 * head : 4 * head + 4] for stream in streams]
        wanted = wanted + np.sum((mine[0] @ params["bilinear"][head]) * mine[1], axis=1)
    np.testing.assert_allclose(model.apply({"params": params}, dense, activations), wanted, rtol=1e-4, atol=1e-5)


def history(seed=0, batch=B):
    """(candidate, history, present), half of each history missing."""
    rng = np.random.default_rng(seed)
    present = rng.random((batch, T)) < 0.5
    return rng.standard_normal((batch, E), np.float32), rng.standard_normal((batch, T, E), np.float32), present


def test_din_weighs_a_history_by_the_candidate_and_sees_nothing_that_is_missing():
    model, (dense, activations), (candidate, steps, present) = DIN((16,), (8,)), inputs(), history()
    params = model.init(jax.random.key(0), dense, activations, candidate, steps, present)
    logit = model.apply(params, dense, activations, candidate, steps, present)
    other = np.where(present[..., None], steps, 99.0)
    np.testing.assert_array_equal(model.apply(params, dense, activations, candidate, other, present), logit)
    shuffled = model.apply(params, dense, activations, candidate, steps[:, ::-1], present[:, ::-1])
    np.testing.assert_allclose(shuffled, logit, rtol=1e-4, atol=1e-5)
    by_steps = jax.grad(lambda s: model.apply(params, dense, activations, candidate, s, present).sum())(steps)
    assert (np.abs(by_steps).max(-1) > 0).sum() == present.sum()
    twice = model.apply(params, dense, activations, candidate, steps, present | True)
    assert (twice != logit).any()  # negative control: the mask matters
    one = params["params"]
    pair = np.concatenate(
        [steps[0], np.tile(candidate[0], (T, 1)), steps[0] - candidate[0], steps[0] * candidate[0]], 1
    )
    weight = plain_tower(one["unit"], pair) @ one["weight"]["kernel"] + one["weight"]["bias"][None]
    interest = np.sum(np.where(present[0][:, None], weight, 0) * steps[0], axis=0)
    x = plain_tower(one["Tower_0"], np.concatenate([dense[0], activations[0].ravel(), candidate[0], interest])[None])
    np.testing.assert_allclose((x[0] @ one["Dense_0"]["kernel"] + one["Dense_0"]["bias"])[0], logit[0], rtol=1e-4)


@pytest.mark.parametrize(
    "change",
    [lambda c, h, p: (c, h[:, :2], p), lambda c, h, p: (c, h, p[:, :2]), lambda c, h, p: (c, h, p.T)],
)
def test_din_refuses_a_history_that_does_not_fit(change):
    with pytest.raises(ValueError, match="DIN wants a history"):
        DIN().init(jax.random.key(0), *inputs(), *change(*history()))


def test_the_in_batch_softmax_is_its_sum():
    rng = np.random.default_rng(0)
    query, item = (one / np.linalg.norm(one, axis=1, keepdims=True) for one in rng.standard_normal((2, 6, 4)))
    weight, share = np.array([1, 1, 0, 1, 1, 1.0]), np.log(np.array([0.5, 0.1, 0.1, 0.1, 0.5, 0.1]))
    ids = np.array([7, 8, 9, 8, 7, 6])
    found = in_batch_softmax(query, item, weight, share, ids, temperature=0.5)
    for i in range(6):
        score = query[i] @ item.T / 0.5 - share
        rivals = [j for j in range(6) if j == i or (weight[j] > 0 and ids[j] != ids[i])]
        np.testing.assert_allclose(found[i], -np.log(np.exp(score[i]) / np.exp(score[rivals]).sum()), rtol=1e-4)
    assert (in_batch_softmax(query, item) != in_batch_softmax(query, item, item_id=ids)).any()


@pytest.mark.parametrize("corrected", [True, False])
def test_the_correction_undoes_popularity(corrected):
    """All items are liked equally; item 0 is in half of the examples. Free scores are optimised by gradient descent."""
    items = np.random.default_rng(0).choice(4, 512, p=[0.5, 0.2, 0.2, 0.1])
    share = jnp.log(jnp.bincount(items) / len(items))[items] if corrected else None

    def loss(angles):
        sides = jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)[items]
        query = jnp.tile(jnp.array([[1.0, 0.0]]), (len(items), 1))
        return in_batch_softmax(query, sides, log_share=share, temperature=0.5).mean()

    angles, step = jnp.full(4, 0.8), jax.jit(lambda angles: angles - 0.5 * jax.grad(loss)(angles))
    for _ in range(300):
        angles = step(angles)
    scores = np.cos(angles)
    # With the correction the optimal scores are log p, the log of each item's share, as they should be for equal
    # liking; without it the scores do not learn p.
    assert (scores[0] - scores[3] > 0.3) == corrected


def test_a_side_is_of_length_one_and_refuses_what_does_not_fit():
    dense, activations = inputs()
    params = Side((16, 4)).init(jax.random.key(0), activations, dense)
    np.testing.assert_allclose(np.linalg.norm(Side((16, 4)).apply(params, activations, dense), axis=1), 1, rtol=1e-4)
    with pytest.raises(ValueError, match="weight has shape"):
        in_batch_softmax(jnp.ones((2, 3)), jnp.ones((2, 3)), jnp.ones(3))
    with pytest.raises(ValueError, match=r"temperature=0.0 must"):
        in_batch_softmax(jnp.ones((2, 3)), jnp.ones((2, 3)), temperature=0.0)


def test_rows_too_narrow_for_a_weight_and_factors_are_refused():
    dense, activations = inputs()
    for model in (FM(), WideAndDeep(), DeepFM()):
        with pytest.raises(ValueError, match="width of at least 2"):
            model.init(jax.random.key(0), dense, activations[:, :, :1])
    LR().init(jax.random.key(0), dense, activations[:, :, :1])


def plain_interaction(bottom, activations):
    x = jnp.concatenate([bottom[:, None], activations], axis=1)
    i, j = np.tril_indices(x.shape[1], -1)
    return jnp.einsum("bie,bje->bij", x, x)[:, i, j]


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("shape", [(3, 1, 1), (5, 2, 7), (4, 9, 32), (2, 26, 128)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.more) for seed in (1, 2))])
def test_the_interaction_and_its_written_gradient_are_those_of_one_plain_product(shape, seed, pieces, monkeypatch):
    if pieces:  # the last piece is smaller, or the only one
        monkeypatch.setattr(dlrm, "NUMBERS_AT_ONCE", 0)
        monkeypatch.setattr(dlrm, "EXAMPLES_IN_A_PIECE", 2)
    rng = np.random.default_rng(seed)
    batch, fields, width = shape
    bottom, activations = (rng.standard_normal(of, np.float32) for of in ((batch, width), shape))
    weight = rng.standard_normal((batch, fields * (fields + 1) // 2), np.float32)
    found, wanted = (f(bottom, activations) for f in (dlrm.dot_interaction, plain_interaction))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    slope = lambda f: jax.grad(lambda *x: jnp.sum(f(*x) * weight), argnums=(0, 1))(bottom, activations)
    for mine, theirs in zip(slope(dlrm.dot_interaction), slope(plain_interaction), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


def test_dlrm_and_its_gradient_are_those_of_the_plain_formulation():
    """Feature-major towers and hand-written gradients change the order of sums only."""

    def plain(params, dense, activations):
        params = params["params"]
        bottom = plain_tower(params["bottom_tower"], dense)
        pairs = plain_interaction(bottom, activations)
        x = plain_tower(params["top_tower"], jnp.concatenate([bottom, pairs], axis=1))
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


@pytest.mark.parametrize("name", ["dlrm", "dcnv2", "dcnv2_low_rank", "dcnv2_mlperf"])
def test_products_padded_for_a_gpu_give_the_same(name, monkeypatch):
    model, (dense, activations) = MODELS[name], inputs()
    params = model.init(jax.random.key(0), dense, activations)

    def made():
        value = jax.value_and_grad(lambda p, a: jnp.sum(model.apply(p, dense, a) ** 2), argnums=(0, 1))
        return value(params, activations), str(jax.make_jaxpr(value)(params, activations))

    plain, before = made()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    found, after = made()
    assert before != after
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, found)
    again = model.init(jax.random.key(0), dense, activations)
    assert jax.tree.map(jnp.shape, again) == jax.tree.map(jnp.shape, params)


@pytest.mark.parametrize("size, wide", [(13, 16), (16, 16), (1, 8)])
def test_what_is_padded_for_a_gpu_is_a_multiple_of_8(size, wide, monkeypatch):
    array = jnp.ones((3, size))
    assert tower.aligned(array, 1) is array
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    found = tower.aligned(array, 1)
    assert found.shape == (3, wide) and float(found.sum()) == 3 * size


# ---- layers of towers

TOWERS = {name: model for name, model in MODELS.items() if name not in ("lr", "fm")}


def test_a_layer_of_a_tower_is_dense_norm_activation_dropout():
    """Each part against Flax' own, with the same parameters."""
    x = np.random.default_rng(0).standard_normal((B, N), np.float32)
    for activation in (nn.relu, nn.gelu, nn.tanh):
        mine = tower.Tower((7, 3), activation=activation)
        params = mine.init(jax.random.key(0), x)
        wanted = x
        for number in range(2):
            weights = {"kernel": params["params"][f"kernel_{number}"], "bias": params["params"][f"bias_{number}"]}
            wanted = activation(nn.Dense(weights["kernel"].shape[1]).apply({"params": weights}, wanted))
        np.testing.assert_allclose(mine.apply(params, x).T, wanted, rtol=2e-5, atol=1e-6)


def test_batch_norm_normalises_by_the_examples_that_count_and_keeps_their_statistics():
    rng, counts = np.random.default_rng(1), np.arange(B) < 40
    x = rng.normal(3, 2, (B, N)).astype(np.float32)
    mine = tower.Tower((6,), activation=lambda x: x, batch_norm=True)
    variables = mine.init(jax.random.key(0), x)
    found, kept = mine.apply(variables, x, True, counts, mutable=["batch_stats"])
    np.testing.assert_allclose(found.T[counts].mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(found.T[counts].var(axis=0), 1, rtol=1e-3)
    other = np.where(counts[:, None], x, 100).astype(np.float32)
    again, same = mine.apply(variables, other, True, counts, mutable=["batch_stats"])
    np.testing.assert_array_equal(again.T[counts], found.T[counts])
    jax.tree.map(np.testing.assert_array_equal, kept, same)
    linear = x @ np.asarray(variables["params"]["kernel_0"])  # the bias begins at 0
    stats = kept["batch_stats"]["norm_0"]
    np.testing.assert_allclose(stats["mean"], 0.1 * linear[counts].mean(axis=0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(stats["var"], 0.9 + 0.1 * linear[counts].var(axis=0), rtol=1e-4)
    alone = [mine.apply(variables, x[i : i + 1])[:, 0] for i in range(3)]  # by what is kept, in prediction
    np.testing.assert_allclose(alone, mine.apply(variables, x).T[:3], rtol=1e-4, atol=1e-5)


def test_dropout_keeps_a_value_with_its_probability_and_the_mean():
    x = np.ones((200, N), np.float32)
    mine = tower.Tower((50,), dropout=0.3, kernel_init=nn.initializers.ones)
    params = mine.init(jax.random.key(0), x)
    np.testing.assert_allclose(mine.apply(params, x), N, rtol=1e-6)
    found = np.asarray(mine.apply(params, x, True, rngs={"dropout": jax.random.key(1)}))
    assert abs((found == 0).mean() - 0.3) < 0.02  # 10,000 draws: more than four deviations
    np.testing.assert_allclose(found[found != 0], N / 0.7, rtol=1e-5)
    with pytest.raises(InvalidRngError):
        mine.apply(params, x, True)


@pytest.mark.parametrize("name", TOWERS)
def test_every_model_with_towers_has_these_layers_in_all_of_them(name):
    dense, activations = inputs()
    plain, model = TOWERS[name], TOWERS[name].clone(activation=nn.gelu, dropout=0.5, batch_norm=True)
    variables = model.init(jax.random.key(0), dense, activations)
    towers = sum(path[-1].key.startswith("kernel_") for path, _ in jax.tree_util.tree_leaves_with_path(variables))
    norms = jax.tree_util.tree_leaves_with_path(variables["batch_stats"])
    assert len(norms) == 2 * towers > 0  # a mean and a variance of each layer
    train = functools.partial(model.apply, variables, dense, activations, True, mutable=["batch_stats"])
    one, kept = train(rngs={"dropout": jax.random.key(0)})
    other, _ = train(rngs={"dropout": jax.random.key(1)})
    assert one.shape == (B,) and not np.allclose(one, other)
    changed = lambda before, after: bool((before != after).all())
    assert all(jax.tree.leaves(jax.tree.map(changed, variables["batch_stats"], kept["batch_stats"])))
    params = plain.init(jax.random.key(0), dense, activations)
    assert list(params) == ["params"]  # without them there are parameters alone, and training computes the same
    in_training = plain.apply(params, dense, activations, True)
    np.testing.assert_array_equal(in_training, plain.apply(params, dense, activations))
