"""Do ShadowSync's defaults help a plain user? Four threads train a Flax classifier, each on its own shard of the data.

    python experiments/shadowsync_classifier.py  6 minutes

Nothing here is about recommendation: no tables, no TrainState; parameters are the pytrees of a Flax Linen or Flax NNX
module. In every step each trainer draws `--batch-size` of its `--examples`, in its own order. 20 classes from a planted
network with noise, so that accuracy stays far from 1. Arms: none; s_easgd, s_ma and s_bmuf with the library's defaults;
and the other form of each rule. Regime: free-running, threads of one process.

Every trainer is tested after `finish`, and figures are means over the trainers. The number of steps is the same in all
arms. Intervals are 95 % of paired differences over seeds; `above_none_*`: mean accuracy is higher, or mean loss lower,
than without synchronisation.
"""

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from main.cli import Flags, Run, command_line, grid, paired_interval
from tqdm import tqdm

from jaxrec.shadowsync import Rule, SyncGroup, bmuf, easgd, model_averaging

FEATURES, CLASSES, WIDTH = 32, 20, 64
DEFAULTS: dict[str, Callable[[], Rule]] = {"s_easgd": easgd, "s_ma": model_averaging, "s_bmuf": bmuf}
OTHERS: dict[str, Callable[[], Rule]] = {
    "s_easgd-sequential": lambda: easgd(form="sequential"),
    "s_ma-lerp": lambda: model_averaging(form="lerp"),
    "s_bmuf-lerp": lambda: bmuf(form="lerp"),
}


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the experiment."""

    seeds: int = 3
    steps: int = 1500
    """Steps of each trainer."""
    trainers: int = 4
    examples: int = 20_000
    """Examples in the shard of each trainer."""
    batch_size: int = 64
    learning_rate: float = 1e-3


class Trained(NamedTuple):
    """A classifier as pure functions."""

    init: Callable[[int], Any]  # seed -> parameters
    apply: Callable[[Any, Any], Any]  # parameters, f32[B, FEATURES] -> logits f32[B, CLASSES]


def linen_model() -> Trained:
    """A multi-layer perceptron of Flax Linen."""

    class Classifier(linen.Module):
        @linen.compact
        def __call__(self, x):
            for width in (WIDTH, WIDTH):
                x = linen.relu(linen.Dense(width)(x))
            return linen.Dense(CLASSES)(x)

    model = Classifier()
    init = lambda seed: model.init(jax.random.key(seed), jnp.zeros((1, FEATURES)))
    return Trained(init, lambda params, x: model.apply(params, x))


def nnx_model() -> Trained:
    """The same multi-layer perceptron of Flax NNX."""

    class Classifier(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first = nnx.Linear(FEATURES, WIDTH, rngs=rngs)
            self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.last = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

        def __call__(self, x):
            return self.last(nnx.relu(self.second(nnx.relu(self.first(x)))))

    graph = nnx.graphdef(Classifier(nnx.Rngs(0)))
    params = lambda seed: nnx.state(Classifier(nnx.Rngs(seed)))
    return Trained(params, lambda params, x: nnx.merge(graph, params)(x))


MODELS = {"linen": linen_model, "nnx": nnx_model}


def draw(seed, examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw examples from the planted network: (f32[n, FEATURES], classes i32[n])."""
    planted, rng = np.random.default_rng(99), np.random.default_rng(seed)
    first, last = planted.normal(size=(FEATURES, 48)), planted.normal(size=(48, CLASSES))
    x = rng.normal(size=(examples, FEATURES)).astype(np.float32)
    logits = 4 * np.maximum(x @ first / FEATURES**0.5, 0) @ last / 48**0.5
    return x, (logits + 0.5 * rng.gumbel(size=logits.shape)).argmax(axis=1).astype(np.int32)


class ClassifierJob:
    """Compiled programs and test data, shared by all arms of a model."""

    def __init__(self, config: Config, model: Trained):
        self.config, self.model, self.optimizer = config, model, optax.adam(config.learning_rate)
        x, label = draw([config.seed, 1_000_000], 20_000)

        def loss(params, x, label):
            return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), label).mean()

        def step(params, opt_state, x, label):
            updates, opt_state = self.optimizer.update(jax.grad(loss)(params, x, label), opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        self.step = jax.jit(step)
        self.test = jax.jit(lambda params: ((model.apply(params, x).argmax(1) == label).mean(), loss(params, x, label)))

    def batches(self, seed: int, trainer: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Batches of one trainer, from its own shard."""
        x, label = draw([self.config.seed, seed, trainer], self.config.examples)
        order = np.random.default_rng([self.config.seed, seed, trainer, 1])
        for _ in range(self.config.steps):
            some = order.integers(0, len(x), self.config.batch_size)
            yield x[some], label[some]

    def train(self, params, batches, sync=None) -> Any:
        """A plain user's loop: one call of `exchange` after each step, and `finish` after the last."""
        opt_state = self.optimizer.init(params)
        for x, label in batches:
            params, opt_state = self.step(params, opt_state, x, label)
            if sync is not None:
                params = sync.exchange(params)
        return params if sync is None else sync.finish(params)

    def run(self, rule: Rule | None, seed: int) -> dict[str, Any]:
        """Run one arm of one seed, its trainers as threads."""
        config, initial = self.config, self.model.init(seed)
        shards = [self.batches(seed, trainer) for trainer in range(config.trainers)]
        # Compiles.
        jax.block_until_ready(self.test(self.train(initial, itertools.islice(self.batches(seed, 0), 1))))
        group = SyncGroup(rule, initial, config.trainers) if rule else None
        rounds, together = [0] * config.trainers, threading.Barrier(config.trainers)

        def trainer(number):
            together.wait(60)
            if group is None:
                return self.train(initial, shards[number])
            with group.trainer(number) as sync:
                params = self.train(initial, shards[number], sync)
            rounds[number] = sync.rounds
            return params

        start = time.perf_counter()
        with ThreadPoolExecutor(config.trainers) as pool:
            trained = list(pool.map(trainer, range(config.trainers)))
        seconds = time.perf_counter() - start
        accuracy, loss = np.array([jax.device_get(self.test(params)) for params in trained]).mean(axis=0)
        return {
            "seed": seed,
            "test_accuracy": float(accuracy),
            "test_loss": float(loss),
            "rounds": min(rounds),
            "train_seconds": seconds,
        }


def results_of_models(rows: list[dict]) -> dict[str, Any]:
    """Contents of results.json, from the arms of all seeds."""
    results: dict[str, Any] = {"regime": "free-running", "seeds": 1 + max(row["seed"] for row in rows)}
    of = lambda model, arm, key: np.array([row[key] for row in rows if (row["model"], row["arm"]) == (model, arm)])
    for model, arm in dict.fromkeys((row["model"], row["arm"]) for row in rows):
        at = f"{model}_{arm}"
        for key in ("test_accuracy", "test_loss", "train_seconds"):
            results[f"{key}_{at}"] = float(of(model, arm, key).mean())
        if arm == "none":
            continue
        results[f"rounds_least_{at}"] = int(of(model, arm, "rounds").min())
        for key in ("test_accuracy", "test_loss"):
            change, half = paired_interval(of(model, arm, key) - of(model, "none", key))
            results |= {f"{key}_change_{at}": change, f"{key}_change_half_interval_{at}": half}
        gained = results[f"test_accuracy_change_{at}"] > 0 or results[f"test_loss_change_{at}"] < 0
        results[f"above_none_{at}"] = gained
    return results


def table(results: dict[str, Any]) -> str:
    """Format all arms."""
    beginning = "test_accuracy_"
    arms = [key.removeprefix(beginning) for key in results if key.startswith(beginning) and "change" not in key]
    columns = {"accuracy": "test_accuracy_{}", "loss": "test_loss_{}", "change of accuracy": "test_accuracy_change_{}"}
    columns |= {"rounds at least": "rounds_least_{}", "seconds": "train_seconds_{}"}
    return grid(results, "arm", arms, columns)


def main(config: Config) -> dict:
    """Run all arms of both models, seed by seed, and return the contents of results.json."""
    if config.preset == "smoke":
        config = dataclasses.replace(config, seeds=1, steps=150, examples=2000)
    run = Run("shadowsync_classifier", config, config.workdir)
    rules = {"none": None} | DEFAULTS | ({} if config.preset == "smoke" else OTHERS)
    jobs = {name: ClassifierJob(config, make()) for name, make in MODELS.items()}
    todo = list(itertools.product(range(config.seeds), jobs, rules))
    for seed, model, arm in tqdm(todo, unit="arm", disable=None):
        make = rules[arm]
        run.log({"model": model, "arm": arm} | jobs[model].run(make() if make else None, seed))
    results = results_of_models(run.metrics())
    run.close(results, table(results))
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
