"""Time to accuracy of the four modes: does asynchrony hurt, and what does it cost to have neither stale nor slow?

    python experiments/oac_time_to_accuracy.py                      3 minutes
    python experiments/oac_time_to_accuracy.py --preset paper       more steps and seeds; goes on arm by arm

Small skewed tables, where rows are written again within a few batches, trained by a small DLRM over host tables behind
an EMULATED full-duplex link (its time is slept), each way as slow as the compute of a batch. Arms: sync, semisync (one
batch stale), async and oac with several windows, several skews of the ids; at least 5 seeds, paired: one seed has the
same data and initial values in all arms. The clock stops while the test set is evaluated. `seconds_to_target_MODE` is
the mean time at which an arm first reaches the target of its seed, 99.5 % of the way from one half to sync's last AUC,
for the largest skew and window; null if some seed never does. `auc_loss` is the paired difference to sync with its 95 %
interval. Equal AUC of sync and oac is no luck: their results are the same to the last bit (oac_equivalence.py).
"""

import dataclasses
import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from contract import Flags, Run, command_line, paired_interval, plot
from oac_throughput import EmulatedLink
from tqdm import tqdm

from jaxrec.data.synthetic import SyntheticClicks
from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, adagrad, plan
from jaxrec.loop import evaluate, keep_memory
from jaxrec.models.dlrm import DLRM
from jaxrec.oac import Pipeline
from jaxrec.step import init_state, make_eval_step, make_update

CARDINALITIES = (2000, 1000, 500, 200, 100, 50, 20, 10)
WIDTH = 8


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the experiment."""

    batch_size: int = 256
    row_learning_rate: float = 0.1
    learning_rate: float = 0.01
    resume: bool = False
    """Go on with the arms that a run in --workdir has not finished."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to train."""

    mode: str
    window: int
    exponent: float

    @property
    def name(self) -> str:
        """The mode, and its window where it can be chosen."""
        return f"{self.mode}_window_{self.window}" if self.mode in ("async", "oac") else self.mode


class Job:
    """The model and its programs, compiled once for all arms; tables and dense state are fresh in each run."""

    def __init__(self, config: Config, steps: int, evaluations: int):
        keep_memory()
        self.config, self.steps, self.every = config, steps, max(1, steps // evaluations)
        fields = [f"C{i}" for i in range(len(CARDINALITIES))]
        tables = {name: Table(n, WIDTH) for name, n in zip(fields, CARDINALITIES, strict=True)}
        self.spec = EmbeddingSpec(tables, {"sparse": Lookup(tuple(fields))}, shards=4, seed=config.seed)
        self.model = DLRM((64, WIDTH), (64, 1))
        self.optimizer = optax.adam(config.learning_rate)
        self.row_optimizer = adagrad(config.row_learning_rate)

        def predict(params, activations, batch):
            return self.model.apply(params, batch.dense, activations["sparse"])

        def loss(params, activations, batch):
            return optax.sigmoid_binary_cross_entropy(predict(params, activations, batch), batch.label)

        self.update = make_update(self.spec, loss, self.optimizer, self.row_optimizer)
        self.eval_step = make_eval_step(self.spec, predict)

    def fresh_state(self, seed: int):
        """Tables and parameters; the parameters are the seed's."""
        example = jnp.zeros((1, 13)), jnp.zeros((1, len(CARDINALITIES), WIDTH))
        params = self.model.init(jax.random.key(seed), *example)
        return init_state(params, self.optimizer, HostTables.create(self.spec, self.row_optimizer))

    def clicks(self, exponent: float, seed: int) -> SyntheticClicks:
        """The data of a seed."""
        return SyntheticClicks(CARDINALITIES, exponent=exponent, seed=self.config.seed + seed)

    def link(self) -> EmulatedLink:
        """As slow, each way, as the update of a batch."""
        state, times = self.fresh_state(0), []
        update, dense = jax.jit(self.update, donate_argnums=0), state.dense
        batch = next(iter(self.clicks(1.05, 0).stream(self.config.batch_size, batches=1)))
        plans = plan(self.spec, batch.ids)
        rows = state.tables.read(plans)
        for _ in range(30):
            start = time.perf_counter()
            dense, _, _ = jax.block_until_ready(update(dense, rows, plans, batch))
            times.append(time.perf_counter() - start)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves((rows, plans, batch)))
        return EmulatedLink(size / float(np.median(times[5:])), 5e-5)

    def train(self, arm: Arm, seed: int, link: EmulatedLink) -> list[dict]:
        """One run: the test AUC along the way."""
        clicks = self.clicks(arm.exponent, seed)
        rows: list[dict] = []
        test = list(clicks.stream(2048, batches=10, test=True))
        pairs = [(batch, plan(self.spec, batch.ids)) for batch in test]
        seconds, since = 0.0, 0.0

        def measure(state, step, plans, metrics):
            nonlocal seconds, since
            if step == 1:  # what was compiled is not counted
                since = time.perf_counter()
            if step % self.every == 0:
                jax.block_until_ready(metrics)
                seconds += time.perf_counter() - since
                pipeline.drain()
                found = evaluate(state, pairs, self.eval_step)
                rows.append({"step": step, "seconds": seconds, "test_auc": found["auc"]})
                since = time.perf_counter()
            return state

        window: dict[str, Any] = {"window": arm.window} if arm.mode in ("async", "oac") else {}
        state = self.fresh_state(seed)
        pipeline = Pipeline(
            state, self.update, mode=arm.mode, send=link.send, fetch=link.fetch, loaders=3, fetchers=2, **window
        )
        with pipeline:
            for _ in pipeline.run(clicks.stream(self.config.batch_size, batches=self.steps), [measure]):
                pass
        return rows


def arms(config: Config) -> list[Arm]:
    """All arms of a preset."""
    exponents, windows = {
        "smoke": ((1.05,), (4,)),
        "default": ((0.8, 1.2), (4, 16)),
        "paper": ((0.0, 0.8, 1.05, 1.2), (2, 4, 8, 16, 32)),
    }[config.preset]
    found = []
    for exponent in exponents:
        found += [Arm("sync", 0, exponent), Arm("semisync", 1, exponent)]
        found += [Arm(mode, window, exponent) for mode, window in itertools.product(("async", "oac"), windows)]
    return found


def seconds_to(curve: list[dict], target: float) -> float | None:
    """When a curve first reaches the target, linearly between two evaluations; None if it never does."""
    before = {"seconds": 0.0, "test_auc": 0.5}
    for row in curve:
        if row["test_auc"] >= target:
            part = (target - before["test_auc"]) / (row["test_auc"] - before["test_auc"])
            return before["seconds"] + part * (row["seconds"] - before["seconds"])
        before = row
    return None


def summarize(rows: list[dict], seeds: int) -> dict[str, Any]:
    """What results.json holds, from all curves."""
    curves: dict[tuple, list[dict]] = {}
    for row in rows:
        curves.setdefault((row["exponent"], row["arm"], row["seed"]), []).append(row)
    results: dict[str, Any] = {}
    for exponent in sorted({key[0] for key in curves}):
        last = {key[1:]: curve[-1]["test_auc"] for key, curve in curves.items() if key[0] == exponent}
        sync = np.array([last["sync", seed] for seed in range(seeds)])
        targets = 0.5 + 0.995 * (sync - 0.5)
        results[f"target_auc_exponent_{exponent}"] = float(targets.mean())
        for arm in dict.fromkeys(name for name, _ in last):
            loss = sync - np.array([last[arm, seed] for seed in range(seeds)])
            times = [seconds_to(curves[exponent, arm, seed], targets[seed]) for seed in range(seeds)]
            key = f"{arm}_exponent_{exponent}"
            results[f"test_auc_{key}"] = float(sync.mean() - loss.mean())
            results[f"auc_loss_{key}"], results[f"auc_loss_half_interval_{key}"] = paired_interval(loss)
            results[f"seconds_to_target_{key}"] = None if None in times else float(np.mean(times))  # type: ignore[arg-type]
            results[f"seeds_that_reach_target_{key}"] = sum(t is not None for t in times)
            mode = arm.split("_")[0]
            results[f"seconds_to_target_{mode}"] = results[f"seconds_to_target_{key}"]  # the last: largest skew, window
    return results


def draw(run: Run, rows: list[dict]) -> None:
    """Mean curves over wall time and over steps, for the largest skew."""
    exponent = max(row["exponent"] for row in rows)
    by_time: dict[str, tuple] = {}
    by_step: dict[str, tuple] = {}
    for arm in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == arm and row["exponent"] == exponent]
        steps = sorted({row["step"] for row in mine})
        mean = lambda key, mine=mine, steps=steps: [
            float(np.mean([row[key] for row in mine if row["step"] == s])) for s in steps
        ]
        by_time[arm], by_step[arm] = (mean("seconds"), mean("test_auc")), (steps, mean("test_auc"))
    plot(run.directory / "auc_over_seconds.png", {f"test AUC, exponent {exponent}": by_time}, "seconds (link emulated)")
    plot(run.directory / "auc_over_steps.png", {f"test AUC, exponent {exponent}": by_step}, "steps")


def main(config: Config) -> dict:
    """Runs all arms and seeds; returns what results.json holds."""
    run = Run("oac_time_to_accuracy", config, config.workdir, config.resume)
    steps, evaluations, seeds = {"smoke": (60, 3, 2), "default": (800, 16, 5), "paper": (5000, 50, 10)}[config.preset]
    job = Job(config, steps, evaluations)
    link = job.link()
    every = arms(config)
    job.train(every[0], 0, link)  # compiles
    done = {(row["exponent"], row["arm"], row["seed"]) for row in run.metrics()}
    for seed, arm in tqdm(list(itertools.product(range(seeds), every)), unit="run", disable=None):
        if (arm.exponent, arm.name, seed) not in done:
            for row in job.train(arm, seed, link):
                run.log({"arm": arm.name, "exponent": arm.exponent, "seed": seed} | row)
    rows = run.metrics()
    results = summarize(rows, seeds) | {"emulated_link": True, "seeds": seeds, "steps": steps}
    draw(run, rows)
    run.close(results)
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
