"""Free-running trainers under stress: no error, no torn value, no update lost, no thread left.

    python experiments/shadowsync_soak.py --minutes 10          what `make soak` runs

8 trainers with 2 Hogwild workers each, parameters donated at every step, every rule in turns with a fresh set of
trainers, random delays in the batches and in every round. The loss is linear with equal coefficients: all elements of
a tensor are equal at all times, so a value read while it was being written, or a result merged in twice or from two
rounds, shows as two that differ in one tensor; and what the rules keep can be counted. Regime: free-running.
"""

import dataclasses
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from contract import Flags, Run, command_line
from tqdm import tqdm

from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, sgd
from jaxrec.shadowsync import AllToAll, Centre, Shadow, bmuf, easgd, model_averaging, train_freely
from jaxrec.types import Batch

SPEC = EmbeddingSpec({"item": Table(1000, 8)}, {"item": Lookup("item")})
RULES = {
    "s_easgd": easgd(0.3),
    "s_ma": model_averaging(0.5),
    "s_ma_delta": model_averaging(1.0, "delta"),
    "s_bmuf": bmuf(0.5, momentum=0.3),
}
RATE = 2.0**-10  # every sum of such steps is exact in float32


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the stress."""

    minutes: float = 1.0
    trainers: int = 8
    workers: int = 2
    parameters: int = 200_000
    seconds_each: float = 15.0
    """How long one set of trainers runs."""


class Checked:
    """A transport that delays every round at random and looks for torn values on the way."""

    def __init__(self, transport, seed: int):
        self.transport, self.rng, self.lock = transport, np.random.default_rng(seed), threading.Lock()
        self.torn = self.rounds = 0
        self.ended: dict[int, float] = {}  # a parameter of each trainer after its last round

    def __getattr__(self, name):
        return getattr(self.transport, name)

    def meet(self, trainer, before, done):
        """Later, and looked at."""
        with self.lock:
            delay = self.rng.choice([0.0, 0.001, 0.02]) * self.rng.random()
            self.rounds += 1
            self.torn += not whole(before)
            if done:
                self.ended[trainer] = float(before[-1].flat[0])
        time.sleep(delay)
        return self.transport.meet(trainer, before, done)

    def leave(self, trainer, error=None):
        """At once."""
        self.transport.leave(trainer, error)


def whole(params) -> bool:
    """Whether all elements of each tensor are equal; a centre takes tensors one by one, so they may differ."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
    return all((leaf == leaf.flat[0]).all() for leaf in leaves)


def stream(seed: int, until: float):
    """Batches with random pauses, until a time; uneven trainers."""
    rng = np.random.default_rng(seed)
    until -= rng.random()
    while time.perf_counter() < until:
        time.sleep(rng.choice([0.0, 0.0, 0.002]) * rng.random())
        ids = rng.integers(0, 1000, 16).astype(np.int32)
        yield Batch({"item": ids}, np.zeros((16, 0), np.float32), np.zeros(16, np.float32), np.ones(16, np.float32))


def linear(params, activations, batch):
    """f32[B]: its gradient by every dense parameter is -1."""
    dense = sum(leaf.sum() for leaf in jax.tree.leaves(params))
    return -activations["item"].sum(-1) - dense


def one_set(config: Config, name: str, seed: int) -> dict[str, Any]:
    """One set of trainers under one rule."""
    rule, half = RULES[name], config.parameters // 2
    params = {"w": jnp.ones(half), "b": jnp.ones((half // 8, 8))}
    n = config.trainers
    meeting = Centre(rule, params, n, servers=2) if rule.has_centre else AllToAll(rule, params, n)
    transport: Any = Checked(meeting, seed)
    until = time.perf_counter() + config.seconds_each
    dense, figures = train_freely(
        SPEC, linear, optax.sgd(RATE), sgd(RATE), params, HostTables.create(SPEC, sgd(RATE)),
        [stream(seed * 100 + i, until) for i in range(config.trainers)],
        lambda i: Shadow(rule, transport, i), config.workers,
    )  # fmt: skip
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith(("trainer", "shadow"))]
    torn = transport.torn + sum(not whole(state.params) for state in dense)
    row: dict[str, Any] = {
        "rule": name,
        "steps": sum(figures.steps),
        "rounds": transport.rounds,
        "torn": torn,
        "threads_left": left,
    }
    if rule.has_centre:  # what symmetric EASGD keeps: sum of replicas and centre = starts + steps
        total = sum(transport.ended.values()) + float(transport.parameters["w"][0])
        wanted = n + 1 + RATE * sum(figures.steps)
        row["conserved_sum_error"] = abs(total - wanted) / wanted
    return row


def main(config: Config) -> dict:
    """Sets of trainers, rule after rule, until the time is over; returns what results.json holds."""
    run = Run("shadowsync_soak", config, config.workdir)
    if config.preset == "smoke":
        config = dataclasses.replace(config, minutes=0.2, seconds_each=2.5, parameters=20_000)
    rows: list[dict[str, Any]] = []
    end = time.perf_counter() + 60 * config.minutes
    with tqdm(unit="set", disable=None) as bar:
        while time.perf_counter() < end or len(rows) < len(RULES):
            rows.append(one_set(config, list(RULES)[len(rows) % len(RULES)], config.seed + len(rows)))
            run.log(rows[-1])
            bar.update()
    total = lambda key: sum(row[key] for row in rows)
    results = {
        "regime": "free-running", "minutes": config.minutes, "trainers": config.trainers, "workers": config.workers,
        "sets": len(rows), "steps": total("steps"), "rounds": total("rounds"), "torn_values": total("torn"),
        "threads_left": sum(len(row["threads_left"]) for row in rows),
        "conserved_sum_error_max": max(row.get("conserved_sum_error", 0.0) for row in rows), "errors": 0,
    }  # fmt: skip
    run.close(results)
    if results["torn_values"] or results["threads_left"] or results["conserved_sum_error_max"] > 1e-5:
        raise ValueError("the stress has found something: see results.json and metrics.jsonl.")
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
