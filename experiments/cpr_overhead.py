"""What failures cost a job of 56 hours, and what partial recovery does to accuracy: CPR's main table.

    python experiments/cpr_overhead.py                                                 synthetic clicks, 1M examples
    python experiments/cpr_overhead.py --preset paper --batch-size 2048 --seeds 16     5M examples
    python experiments/cpr_overhead.py --data criteo --path train.prepared --seeds 10  made by prepare.py

The paper's emulation (arXiv 2011.02999, section 6): 8 embedding nodes, a target PLS of 0.1, r = 0.125, two failures of
one node each at random hours of the job. **The overhead is emulated, the accuracy is measured.**

Overhead: settings A and B (see SETTING_A of jaxrec/cpr/schedule.py), split into save, load, lost work and reschedule,
by the equations (`modelled`) and event by event over drawn failures (`emulated`). All schemes with priority write as
many bytes as CPR-vanilla in the same time, so they share its overhead; what tracking costs is in cpr_real_cost.py.

Accuracy: real training whose steps stand for the job's 56 hours, real saves and restores of jaxrec.cpr.Recovery over
host tables of 8 shards. Arms: no_failure; vanilla, scar, mfu, ssu. Full recovery trains the lost steps again to the
same bits as no_failure (tests/test_recovery.py); its accuracy is that, and is not trained again here. Arms of a seed
share data, initial values and failures. `test_auc_loss` is paired, with its 95 % interval; `non_inferior_SCHEME`: the
interval of the loss lies below 0.0005 (true) or above (false); absent while seeds are too few to say.

Seen, AUC lost in units of 0.00001:

| | vanilla | SCAR | MFU | SSU |
|---|---|---|---|---|
| Criteo sample, 110,000 examples, 25 seeds | 32 +- 26 | 27 +- 18 | -5 +- 16 | 20 +- 14 |
| the same, --watched 7, as in the paper | 32 +- 26 | 39 +- 15 | 17 +- 21 | 35 +- 20 |
| synthetic, 5M examples, 3.7M rows, 16 seeds | 25 +- 19 | 29 +- 10 | 14 +- 9 | 16 +- 10 |
| the same with 200,000 rows, 12 seeds | 15 +- 37 | 70 +- 22 | 33 +- 11 | 46 +- 14 |

The realised PLS was 0.079 on Criteo, 0.064 and 0.069 on synthetic clicks, not the target of 0.1: a job of 56 hours that
saves once, at hour 44.8, is expected to lose 0.085 (cpr_scalability.py). Seeds were added until the intervals were
narrow; those of the Criteo sample share one test set. Rows of small tables are the most used; with --watched 7 they are
saved at regular saves only. In the last line a row is used 650 times on average: there rows behind the most used eighth
matter too, hardly any scheme ever saves them, and all three lose more than vanilla. An arm takes 3 seconds on Criteo
and 45 to 60 on 5M examples, on one core.
"""

import dataclasses
import functools
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from contract import Flags, Run, command_line, paired_interval, stacked_bars
from cpr_scalability import SETTINGS, modelled
from tqdm import tqdm

from jaxrec.cpr import Recovery, draw_failures, mfu, place_failures, plan_recovery, scar, schedule, ssu
from jaxrec.cpr.emulate import replay_in_useful_time
from jaxrec.data.synthetic import SyntheticClicks, scaled_cardinalities
from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, rowwise_adagrad
from jaxrec.loop import evaluate, fit, keep_memory, planned
from jaxrec.models.dlrm import DLRM
from jaxrec.step import init_state, make_eval_step, make_train_step
from jaxrec.types import Batch

SCHEMES: dict[str, Callable[[], Any]] = {"vanilla": lambda: None, "scar": scar, "mfu": mfu, "ssu": ssu}
MARGIN, NODES = 0.0005, 8


@dataclasses.dataclass(frozen=True)
class JobConfig(Flags):
    """Flags of the job that is trained; what is not given follows from the preset."""

    resume: bool = False
    seeds: int | None = None
    data: Literal["synthetic", "criteo"] = "synthetic"
    path: Path | None = None
    """Prepared Criteo rows, a directory."""
    examples: int | None = None
    rows: int | None = None
    """Of all synthetic tables together; 0.74 an example by default, as Criteo Kaggle has: 33.8M and 45.8M."""
    batch_size: int | None = None
    fraction: float = 0.125
    watched: int = 26
    """Tables that schemes watch, the largest first; others are saved whole at regular saves. 7 in the paper."""
    learning_rate: float = 1e-3
    row_learning_rate: float = 0.02
    width: int = 16


@dataclasses.dataclass(frozen=True)
class Config(JobConfig):
    """Flags of the experiment."""

    target_pls: float = 0.1
    failures: int = 2
    setting: Literal["a", "b"] = "a"
    """Of the schedule of saves; both settings have the same."""


class Size(NamedTuple):
    """What a preset decides."""

    examples: int
    seeds: int
    horizons: int


SIZES = {"smoke": Size(60_000, 2, 20), "default": Size(1_000_000, 3, 200), "paper": Size(5_000_000, 10, 1000)}


class Data(NamedTuple):
    """What is trained and tested on."""

    cardinalities: tuple[int, ...]
    train: Callable[[int, int], Iterable[Batch]]  # by seed, from a step
    test: Callable[[int], Iterable[Batch]]
    steps: int


def make_data(config: JobConfig, examples: int) -> Data:
    """Synthetic clicks, or prepared Criteo rows in their order."""
    if config.data == "synthetic":
        batch_size, cardinalities = config.batch_size or 1024, scaled_cardinalities(config.rows or 74 * examples // 100)
        steps = examples // batch_size
        clicks = lambda seed: SyntheticClicks(cardinalities, seed=config.seed + seed)
        test = lambda seed: clicks(seed).stream(2048, batches=max(5, min(100, steps // 10)), test=True)
        return Data(cardinalities, lambda seed, step: clicks(seed).stream(batch_size, step, steps), test, steps)
    from jaxrec.data.criteo import open_split
    from jaxrec.data.loader import Loader

    if config.path is None:
        raise ValueError("--data criteo needs --path: a directory made by prepare.py.")
    train, tested = open_split(config.path, "train"), open_split(config.path, "test")
    batch_size = config.batch_size or 128
    steps = min(sum(train.rows), config.examples or sys.maxsize) // batch_size

    def stream(seed, step):
        loader = Loader(train, batch_size)
        loader.seek(step)
        return itertools.islice(loader, steps - step)

    return Data(tuple(train.metadata["cardinalities"]), stream, lambda seed: Loader(tested, 2048), steps)


class Job:
    """The model and its programs, compiled once; tables and dense state are fresh in each run."""

    def __init__(self, config: JobConfig, data: Data):
        keep_memory()
        self.config, self.data = config, data
        self.fields = [f"C{i}" for i in range(len(data.cardinalities))]
        self.model = DLRM((64, config.width), (64, 1))
        self.optimizer, self.rows = optax.adam(config.learning_rate), rowwise_adagrad(config.row_learning_rate)
        self.step = make_train_step(self.spec(0), self.loss, self.optimizer, self.rows)
        self.eval_step = make_eval_step(self.spec(0), self.predict)
        by_size = sorted(range(len(self.fields)), key=lambda i: -data.cardinalities[i])
        self.whole = [self.fields[i] for i in by_size[config.watched :]]
        self.batches = functools.lru_cache(maxsize=1)(self._batches)

    def _batches(self, seed: int) -> tuple[list, list]:
        """Planned batches of training and test, made once for all arms of a seed: 300 bytes an example."""
        spec = self.spec(seed)
        return list(planned(spec, self.data.train(seed, 0))), list(planned(spec, self.data.test(seed)))

    def spec(self, seed: int) -> EmbeddingSpec:
        """One shard a node; the seed decides initial rows only."""
        tables = {
            name: Table(n, self.config.width) for name, n in zip(self.fields, self.data.cardinalities, strict=True)
        }
        return EmbeddingSpec(tables, {"sparse": Lookup(tuple(self.fields))}, shards=NODES, seed=seed)

    def predict(self, params, activations, batch):
        """Logits f32[B]."""
        return self.model.apply(params, batch.dense, activations["sparse"])

    def loss(self, params, activations, batch):
        """f32[B]."""
        return optax.sigmoid_binary_cross_entropy(self.predict(params, activations, batch), batch.label)

    def run(
        self, scheme: str | None, seed: int, save_every_steps: float, failures: dict[int, list[int]]
    ) -> dict[str, Any]:
        """Trains one arm with failures {step: shards}, or none at all, and evaluates it."""
        spec = self.spec(self.config.seed + seed)
        example = jnp.zeros((1, 13)), jnp.zeros((1, len(self.fields), self.config.width))
        params = self.model.init(jax.random.key(self.config.seed + seed), *example)
        state = init_state(params, self.optimizer, HostTables.create(spec, self.rows))
        batches, test = self.batches(seed)
        row: dict[str, Any] = {"scheme": scheme or "no_failure", "seed": seed, "realized_pls": 0.0}
        if scheme is None:
            state = fit(state, batches, self.step)
        else:
            with (
                tempfile.TemporaryDirectory() as directory,
                Recovery(
                    directory, spec, save_every_steps, self.data.steps, scheme=SCHEMES[scheme](),
                    fraction=self.config.fraction, failures=failures,
                    whole=self.whole if scheme in ("mfu", "ssu") else (),  # SCAR compares all rows
                    pick_ahead_steps=0,  # a step stands for minutes of the job, a pick takes a second
                ) as recovery,
            ):  # fmt: skip
                state = fit(recovery.begin(state), batches, self.step, [recovery.hook])
            row |= {"realized_pls": recovery.pls, "saves": recovery.saves, "rows_saved": recovery.rows_saved}
            row |= {"shards_failed": recovery.failed, "stall_seconds": recovery.stall_seconds}
        found = evaluate(state, test, self.eval_step)
        return row | {f"test_{key}": found[key] for key in ("auc", "normalized_entropy", "log_loss")}


def failures_in_steps(failures, steps: int) -> dict[int, list[int]]:
    """{step: shards} of failures in the hours of a job that takes so many steps."""
    found: dict[int, list[int]] = {}
    for hour, node in zip(failures.hours, failures.node, strict=True):
        step = min(max(1, round(hour / failures.span_hours * steps)), steps)
        if node not in found.setdefault(step, []):
            found[step].append(int(node))
    return found


def overheads(config: Config, horizons: int) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """What results.json holds of overhead, and the bars of the picture."""
    results: dict[str, Any] = {"overhead_is": "modelled (equations) and emulated (events), never measured"}
    bars: dict[str, dict[str, float]] = {}
    for name, costs in SETTINGS.items():
        plan = plan_recovery(costs, config.target_pls)
        ways: dict[str, tuple[schedule.Mode, float]] = {
            "full": ("full", schedule.full_interval(costs)),
            "partial_naive": ("partial", schedule.full_interval(costs)),
            "cpr": (plan.mode, plan.save_every_hours),
        }
        print(
            f"setting {name}: {plan.mode} recovery, a regular save every {plan.save_every_hours:.1f} h, expected "
            f"overhead {100 * plan.expected_overhead.total:.2f} %, expected PLS {plan.expected_pls:.3f}"
        )
        long = costs._replace(total_hours=100 * costs.total_hours)
        drawn = [
            draw_failures(long.mtbf_hours, long.total_hours, NODES, config.seed + i).hours for i in range(horizons)
        ]
        for way, (mode, every) in ways.items():
            law = modelled(costs, mode, every)
            replays = [replay_in_useful_time(long, mode, every, hours).overhead for hours in drawn]
            key = f"setting_{name}_{way}"
            results[f"{key}_percent_modelled"] = 100 * law.total
            results[f"{key}_percent_emulated"] = 100 * float(np.mean([overhead.total for overhead in replays]))
            bars[f"{name.upper()}: {way}"] = {part: 100 * value for part, value in law._asdict().items()}
            results |= {f"{key}_{part}_percent_modelled": 100 * value for part, value in law._asdict().items()}
    of = lambda way: results[f"setting_{config.setting}_{way}_percent_emulated"]
    results["full_overhead_percent"] = of("full")
    for scheme in SCHEMES:
        results[f"cpr_{scheme}_overhead_percent"] = of("cpr")
    return results, bars


def accuracies(rows: list[dict]) -> dict[str, Any]:
    """What results.json holds of accuracy, from the seeds that have all arms."""
    found = {(row["scheme"], row["seed"]): row for row in rows}
    arms = ["no_failure", *SCHEMES]
    seeds = [seed for seed in sorted({seed for _, seed in found}) if all((arm, seed) in found for arm in arms)]
    results: dict[str, Any] = {"accuracy_is": "measured", "seeds": len(seeds)}
    auc = {arm: np.array([found[arm, seed]["test_auc"] for seed in seeds]) for arm in arms}
    for arm in arms:
        key = arm if arm == "no_failure" else f"cpr_{arm}"
        results[f"{key}_test_auc_mean"] = float(auc[arm].mean())
        results[f"{key}_test_auc_sem"] = float(auc[arm].std(ddof=1) / len(seeds) ** 0.5) if len(seeds) > 1 else None
        if arm != "no_failure":
            results[f"{key}_realized_pls"] = float(np.mean([found[arm, seed]["realized_pls"] for seed in seeds]))
            loss, half = paired_interval(auc["no_failure"] - auc[arm])
            results[f"{key}_test_auc_loss"], results[f"{key}_test_auc_loss_half_interval"] = loss, half
            if half is not None and (loss + half < MARGIN or loss - half > MARGIN):
                results[f"non_inferior_{arm}"] = loss + half < MARGIN
    results["full_test_auc_mean"] = results["no_failure_test_auc_mean"]
    return results


def main(config: Config) -> dict:
    """Overheads, then what accuracies are missing, arm by arm; returns what results.json holds."""
    size = SIZES[config.preset]
    run = Run("cpr_overhead", config, config.workdir, config.resume)
    results, bars = overheads(config, size.horizons)
    job = Job(config, make_data(config, config.examples or size.examples))
    costs, steps = SETTINGS[config.setting], job.data.steps
    hours = min(schedule.partial_interval(costs, config.target_pls), costs.total_hours)
    done = {(row["scheme"], row["seed"]) for row in run.metrics()}
    arms = list(itertools.product(range(config.seeds or size.seeds), (None, *SCHEMES)))
    for seed, scheme in tqdm(arms, unit="arm", disable=None):
        if (scheme or "no_failure", seed) not in done:
            failures = place_failures(config.failures, costs.total_hours, NODES, config.seed + seed)
            run.log(job.run(scheme, seed, hours / costs.total_hours * steps, failures_in_steps(failures, steps)))
    results |= accuracies(run.metrics())
    stacked_bars(run.directory / "overhead.png", bars, "modelled overhead, % of useful time")
    run.close(results)
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
