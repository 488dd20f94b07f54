"""Losses that take or return something a step cannot use: keys, metrics and variables."""

import jax
import jax.numpy as jnp
import numpy as np
from click_model import pair_batch, pair_loss, pair_predict

import jaxrec
from abuse import refused, situation
from abuse.objects import DENSE, PARAMS, ROWS, SPEC, train
from jaxrec.embedding import HostTables
from jaxrec.shadowsync import train_freely


def _makes(seed=None, made=pair_loss):
    return jaxrec.Task(SPEC, made, DENSE, ROWS, seed=seed)


def _keyed(params, activations, batch, *, rng):
    return pair_loss(params, activations, batch) * jax.random.uniform(rng)


def _returns(*more):
    """Take one step with a loss that returns additional values; the state must stay unchanged."""
    made = lambda params, activations, batch: (
        pair_loss(params, activations, batch),
        *[each(params) if callable(each) else each for each in more],
    )
    train(task=_makes(made=made))


@situation("a misspelt lookup", KeyError, "iten")
def _(directory):
    try:
        train(task=_makes(made=lambda params, activations, batch: activations["iten"][:, 0, 0] + params["bias"]))
    except KeyError as error:
        assert "the activations have the lookups ['pair']" in error.__notes__
        raise


# ---- keys


KEYS = {
    "wants a key, `rng`, and gets none: give the Task a seed=0": lambda _: _makes(made=_keyed),
    r"takes no key: write it as loss\(params, activations, batch, \*": lambda _: _makes(seed=0),
    "(?s)seed=.* must be a whole number from 0 to .*the step makes the key itself": lambda _: _makes(
        jax.random.key(0), _keyed
    ),
    "seed=4294967296 must be": lambda _: _makes(2**32, _keyed),
    "Predictions and free trainers draw nothing": lambda _: jaxrec.make_eval_step(
        SPEC, lambda params, activations, batch, rng: pair_predict(params, activations, batch)
    ),
    r"returned variables \['bias'\], but free trainers apply gradients alone: train with": lambda _: _freely(
        _keeps_statistics
    ),
}
refused(KEYS)


@situation("the greatest seed, of numpy")
def _(directory):
    _step(_makes(np.uint32(2**32 - 1), _keyed))


def _step(task):
    return task.step(task.init(PARAMS, "host"), pair_batch())


@situation("a key that is there already: rng=None without a seed draws nothing")
def _(directory):
    _step(
        _makes(
            made=lambda params, activations, batch, rng=None: (
                pair_loss(params, activations, batch) + (0 if rng is None else 1)
            )
        )
    )


def _freely(made, seed=None, batches=2):
    """Train freely over tables that must stay unchanged; set _freely.left to the number of batches not taken."""
    tables, stream = HostTables.create(SPEC, ROWS), iter([pair_batch() for _ in range(batches)])
    before = [array.copy() for shards in tables.shards.values() for parts in shards for array in parts.values()]
    try:
        train_freely(_makes(seed, made), PARAMS, tables, [stream])
    finally:
        after = [array for shards in tables.shards.values() for parts in shards for array in parts.values()]
        assert all(map(np.array_equal, before, after))
        _freely.left = len(list(stream))


def _keeps_statistics(params, *args):
    return pair_loss(params, *args), {}, {"bias": params["bias"]}


@situation(
    "free trainers of a loss that draws, whose streams are not begun", ValueError,
    "seed=0: free trainers give a loss no key, for dropout, say, as they apply gradients in any order; make a Task ",
)  # fmt: skip
def _(directory):
    try:
        _freely(_keyed, seed=0)
    finally:
        assert _freely.left == 2


@situation("free trainers of a loss with dropout that can do without")
def _(directory):
    made = lambda params, activations, batch, rng=None: (
        pair_loss(params, activations, batch) + (0 if rng is None else 1)
    )
    tables = HostTables.create(SPEC, ROWS)
    (dense,), figures = train_freely(_makes(made=made), PARAMS, tables, [[pair_batch()]])
    assert figures.steps == [1] and int(dense.step) == 1


# ---- figures


FIGURES = {
    "loss returned a list for 8 examples.* with a dict of figures": lambda _: train(
        task=_makes(made=lambda *args: [pair_loss(*args), {}])
    ),
    r"figures named \['loss', 'weight'\], which are the step's own": lambda _: _returns({"loss": 1.0, "weight": 2.0}),
    r"named \['stale_rows', 'patched_rows'\], which are the step's own": lambda _: _returns(
        {"patched_rows": 1.0, "stale_rows": 2.0}
    ),
    r"beside its numbers: a dict of figures is expected there": lambda _: _returns(jnp.zeros(8)),
    r"figure 'tasks' has shape \(8, 3\).*give each column a name of its own": lambda _: _returns(
        {"tasks": jnp.zeros((8, 3))}
    ),
}
refused(FIGURES)


# ---- variables


VARIABLES = {
    r"returned float32\[3\] as 'bias', but the parameters have float32\[\]": lambda _: _returns(
        {}, {"bias": jnp.zeros(3)}
    ),
    r"returned bfloat16\[\] as 'bias'": lambda _: _returns({}, {"bias": jnp.zeros((), jnp.bfloat16)}),
    r"returned {} as 'bias', but the parameters have float32": lambda _: _returns({}, {"bias": {}}),
}
refused(VARIABLES)
