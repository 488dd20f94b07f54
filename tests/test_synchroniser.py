"""Properties shared by shadow and foreground: dtypes, devices, other leaves, the order of calls."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from meetings import PARAMS, Steps, folded, in_threads, state_of, weights
from world import no_threads_left

import jaxrec
from jaxrec.embedding import DeviceTables, EmbeddingSpec, Lookup, Table, sgd
from jaxrec.shadowsync import AllToAll, Centre, Foreground, Shadow, bmuf, easgd, model_averaging
from jaxrec.types import DenseState, TrainState


def test_a_fold_and_finish_leave_optimizer_step_and_integers_alone():
    optimizer = optax.adam(0.1)
    params = {"w": jnp.ones((2, 3)), "n": jnp.array([1, 4], jnp.int32), "key": jax.random.split(jax.random.key(0), 2)}
    moments = optimizer.init({"w": params["w"]})
    moments = jax.tree.map(lambda x: x + 7, moments)
    state = TrainState(DenseState(jnp.int32(5), params, moments), "tables")
    params["w"] = params["w"].at[1].set(3.0)
    rule = model_averaging(1.0)
    initial = {"w": np.zeros(3, np.float32), "n": 0, "key": jax.random.key(1)}
    steps = Steps(AllToAll(rule, initial))
    with Shadow(steps) as shadow:
        found = shadow.exchange(state)
        steps.begin.release(10)
        found = folded(shadow, found)
        assert shadow.rounds == 1 and weights(found).tolist() == [2.0, 2.0]
        ended = shadow.finish(found)
    for after in (found, ended):
        assert after.dense.params["n"].tolist() == [1, 4] and after.dense.params["n"].dtype == jnp.int32
        assert after.dense.params["key"] is params["key"]
        jax.tree.map(np.testing.assert_array_equal, after.dense.opt_state, moments)
        assert int(after.dense.step) == 5 and after.tables == "tables"


DTYPES = ["bfloat16", "float16", "float32", "float64"]


@pytest.mark.parametrize("rule", [model_averaging(1.0), bmuf(1.0), easgd(0.5)], ids=lambda rule: rule.name)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((Foreground, dtype) for dtype in DTYPES),
        (Shadow, "bfloat16"),
        *(pytest.param(Shadow, dtype, marks=pytest.mark.more) for dtype in DTYPES[1:]),
    ],
)
def test_dtypes_are_kept_and_sums_do_not_overflow(rule, dtype, kind):
    with jax.enable_x64(dtype == "float64"):
        high = jnp.asarray([[60000.0, 1.0], [60000.0, 2.0]], dtype)
        initial = {"w": np.asarray(high[0])}
        transport = Steps((Centre if rule.has_centre else AllToAll)(rule, initial))
        with kind(transport, **({"every_steps": 1} if kind is Foreground else {})) as synchroniser:
            transport.begin.release(10)
            state = synchroniser.exchange({"w": high})
            if kind is Shadow:
                state = folded(synchroniser, state)
            assert synchroniser.rounds == 1
            ended = synchroniser.finish(state)
    for found in (state["w"], ended["w"]):
        assert found.dtype == dtype and bool(jnp.isfinite(found).all())
        assert float(found[0, 0]) == float(high[0, 0])
    if not rule.has_centre:
        assert float(state["w"][0, 1]) == float(state["w"][1, 1]) == 1.5
        assert transport.brought[0][0].dtype == dtype  # not widened in transit


def test_small_differences_add_up_in_the_centre_of_bfloat16():
    """A centre of 256 in bfloat16 would lose each move of at most 0.04; their sum must arrive."""
    rule = easgd(0.01)
    centre = Centre(rule, {"w": jnp.full(2, 256.0, jnp.bfloat16)})
    with Foreground(centre, every_steps=1) as foreground:
        for _ in range(100):
            foreground.exchange({"w": jnp.full(2, 260.0, jnp.bfloat16)})
    assert centre.parameters["w"].dtype == jnp.bfloat16 and float(centre.parameters["w"][0]) == 258.0


def linen_of(value):
    from flax import linen

    model = linen.Dense(2)
    params = model.init(jax.random.key(0), jnp.ones((1, 3)))
    return jax.tree.map(lambda x: jnp.full_like(x, value), params), lambda params: params["params"]["kernel"]


def nnx_of(value):
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.dropout = nnx.Linear(3, 2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    graph, state = nnx.split(Model(nnx.Rngs(int(value))))  # holds a typed key and a counter
    state = jax.tree.map(lambda x: jnp.full_like(x, value) if x.dtype == jnp.float32 else x, state)
    return state, lambda state: nnx.merge(graph, state).linear.kernel[...]


@pytest.mark.parametrize(("of", "kind"), [(linen_of, Foreground), (nnx_of, Shadow)])
def test_flax_states_are_synchronised_as_they_come(of, kind):
    """Two trainers, one thread each, of one replica without a replica axis."""
    rule, more = model_averaging(1.0), {"every_steps": 1} if kind is Foreground else {}
    transport = AllToAll(rule, of(0.0)[0], 2)

    def train(trainer):
        state, kernel = of(10.0 * trainer)
        with kind(transport, trainer, **more) as synchroniser:
            while synchroniser.rounds < 2:
                state = synchroniser.exchange(state)
            return kernel(synchroniser.finish(state)), state

    for ended, state in in_threads(lambda: train(0), lambda: train(1)):
        np.testing.assert_array_equal(ended, np.full((3, 2), 5.0))
        assert jax.tree.structure(state) == jax.tree.structure(of(0.0)[0])


def test_a_training_function_that_donates_reads_and_writes_nobody_elses_arrays():
    """Large aligned arrays, which a CPU device adopts without a copy."""
    rule, size = easgd(0.5), 1 << 16
    initial = {"w": jnp.zeros(size)}
    centre = Centre(rule, initial, 3)
    train = jax.jit(lambda params: {"w": params["w"] + 1.0}, donate_argnums=0)

    def run(trainer):
        params = {"w": initial["w"] + 0.0}
        with Shadow(centre, trainer) as shadow:
            while shadow.rounds < 10:
                params = shadow.exchange(train(params))
                whole = np.asarray(params["w"])
                assert (whole == whole[0]).all()
            params = shadow.finish(params)
        ended = np.array(params["w"])
        for _ in range(20):
            params = train(params)
        return ended, float(params["w"][0])

    for ended, later in in_threads(*[lambda i=i: run(i) for i in range(3)]):
        np.testing.assert_array_equal(ended, centre.parameters["w"])
        assert later == pytest.approx(ended[0] + 20, rel=1e-5)


def test_the_results_of_a_round_lie_where_the_parameters_lie():
    device = jax.devices()[3]
    rule = model_averaging()
    params = jax.device_put({"w": jnp.ones(3), "b": jnp.ones(2)}, device)
    with Shadow(AllToAll(rule, PARAMS)) as shadow:
        params = shadow.exchange(params)
        params = folded(shadow, params)
        assert shadow.rounds == 1 and {leaf.device for leaf in jax.tree.leaves(params)} == {device}
        ended = shadow.finish(jax.device_put(params, jax.devices()[2]))  # and on their current device
    assert {leaf.device for leaf in jax.tree.leaves(ended)} == {jax.devices()[2]}


@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_every_wrong_order_of_calls_is_refused_by_name(kind):
    rule = model_averaging()
    make = lambda: kind(AllToAll(rule, PARAMS), **({"every_steps": 1} if kind is Foreground else {}))
    state = state_of(1.0)
    calls = [lambda s: s.exchange(state), lambda s: s.hook(state, 1, None, None), lambda s: s.finish(state)]
    for call in calls:
        with pytest.raises(ValueError, match="inside of the `with` block"):
            call(make())
        with make() as synchroniser:
            synchroniser.finish(state)
            with pytest.raises(ValueError, match="before `finish`: .* has called `finish`"):
                call(synchroniser)
        with pytest.raises(ValueError, match="has left"):
            call(synchroniser)
    with pytest.raises(ValueError, match="has been entered before"):
        synchroniser.__enter__()
    assert no_threads_left()


def test_averaging_after_every_step_of_sgd_is_training_on_the_large_batch():
    """FR-MA-1, lock-step: four replicas of one batch each equal one of all four, to 1e-6; row gradients are summed."""
    spec = EmbeddingSpec({"item": Table(40, 4)}, {"item": Lookup("item")})
    loss = lambda params, act, batch: optax.sigmoid_binary_cross_entropy(act["item"] @ params["w"], batch.label)
    rng = np.random.default_rng(0)
    batches = [
        jaxrec.Batch({"item": rng.integers(0, 40, 32).astype(np.int32)}, np.zeros((32, 0)), rng.random(32), np.ones(32))
        for _ in range(20)
    ]

    def trained(replicas, synchroniser):
        mesh = jaxrec.make_mesh(replicas, jax.devices()[:4])
        rows = sgd(0.5 / replicas)
        step = jaxrec.make_train_step(spec, loss, optax.sgd(0.5), rows, mesh)
        tables = DeviceTables.create(spec, rows, mesh)
        state = jaxrec.init_state({"w": jnp.ones(4)}, optax.sgd(0.5), tables, mesh)
        for batch in batches:
            state, _ = step(state, jaxrec.plan(spec, batch.ids), batch)
            state = synchroniser.exchange(state) if synchroniser else state
        assert synchroniser is None or synchroniser.rounds == len(batches)
        return np.asarray(state.dense.params["w"]), np.asarray(state.tables.value["width_4"])

    rule = model_averaging(1.0)
    with Foreground(AllToAll(rule, {"w": np.ones(4)}), every_steps=1) as foreground:
        each, rows = trained(4, foreground)
    whole, wanted = trained(1, None)
    np.testing.assert_allclose(each, np.broadcast_to(whole, (4, 4)), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(rows, wanted, rtol=1e-6, atol=1e-6)
    alone, _ = trained(4, None)  # negative control
    assert np.abs(alone - whole).max() > 1e-3


def aligned(shape):
    """A NumPy array that JAX would adopt on a CPU without a copy."""
    whole = np.zeros(4 * int(np.prod(shape)) + 64, np.uint8)
    begin = -whole.ctypes.data % 64
    return whole[begin : begin + 4 * int(np.prod(shape))].view(np.float32).reshape(shape)


def test_numpy_parameters_may_be_changed_in_place_while_a_round_is_made():
    mine, seen = {"w": aligned((100,))}, []

    class Changed(AllToAll):
        def sync_round(self, trainer, before, done):
            mine["w"] += 1
            seen.append(float(before[0].max()))
            return super().sync_round(trainer, before, done)

    rule = model_averaging()
    with Foreground(Changed(rule, {"w": np.zeros(100, np.float32)}), every_steps=1) as foreground:
        assert isinstance(foreground.exchange(mine)["w"], jax.Array)
    assert seen == [0.0]
