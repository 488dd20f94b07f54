"""A small model for free-running trainers, and configurations of their synchronisation."""

import jax.numpy as jnp
import numpy as np
import optax
from world import batch_of, loss

from jaxrec.embedding import EmbeddingSpec, Lookup, Table, sgd
from jaxrec.shadowsync import AllToAll, Centre, Foreground, Shadow, easgd, model_averaging, train_freely

SPEC = EmbeddingSpec({"item": Table(40, 4)}, {"item": Lookup("item")}, shards=2)
PARAMS = {"w": jnp.ones(4)}


def counting(params, activations, batch):
    """A loss whose gradient by w, and by row 0 if all examples look it up, is -1 at every step."""
    return -activations["item"].sum(-1) - params["w"].sum()


def stream(seed, batches, rows=40, size=8):
    rng = np.random.default_rng(seed)
    for _ in range(batches):
        ids, label = rng.integers(0, rows, size), rng.integers(0, 2, size)
        yield batch_of({"item": ids.astype(np.int32)}, label)


def freely(tables, streams, synchroniser=None, workers=1, **more):
    """Trains the small model over the given tables."""
    dense, rows = optax.sgd(0.1), sgd(0.1)
    return train_freely(SPEC, loss, dense, rows, PARAMS, tables, streams, synchroniser, workers, **more)


def synchronisers(kind, rule, trainers, of=None, on_failure="raise", timeout_s=60.0, **more):
    of = of or (Centre if rule.has_centre else AllToAll)
    transport = of(rule, PARAMS, trainers, on_failure=on_failure, timeout_s=timeout_s)
    return lambda number: kind(transport, number, **more)


WAYS = {
    "s-easgd": (Shadow, easgd(), {}),
    "s-ma-lerp": (Shadow, model_averaging(form="lerp"), {}),
    "s-ma-delta": (Shadow, model_averaging(alpha=1.0, form="delta"), {}),
    "fr-easgd-3": (Foreground, easgd(), {"every_steps": 3}),
    "fr-ma-3": (Foreground, model_averaging(), {"every_steps": 3}),
}


def raising(error):
    """Yields three batches, then raises the error."""
    yield from stream(0, 3)
    raise error


def every(steps, kind):
    return {"every_steps": steps} if kind is Foreground else {}


def lasting(number, batches, made):
    """At least `batches` batches for trainer `number`, and more until it has completed a round."""
    for count, batch in enumerate(stream(number, 20_000)):
        if count >= batches and made[number].rounds:
            return
        yield batch
