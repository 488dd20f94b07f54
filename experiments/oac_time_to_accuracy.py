"""Time to accuracy of the four modes: does asynchrony hurt, and what does avoiding both staleness and waiting cost?

    python experiments/oac_time_to_accuracy.py                 7 minutes
    python experiments/oac_time_to_accuracy.py --seeds 24      half an hour
    python experiments/oac_time_to_accuracy.py --preset paper  more steps, arms and seeds; goes on arm by arm

Claim: OAC is the fastest to the accuracy of synchronous training. A small DLRM over small skewed host tables, whose
rows are rewritten within a few batches; all arms of a seed share data and initial values. Steps to a target AUC
(`target_of`, `quality_of`) and step times over an EMULATED link as slow as the compute are measured apart; their
product, `seconds_to_target_modelled`, is modelled. The link does not change the curves of sync, semisync and oac; async
is trained over it. Result: results/two_cores_cpu/oac_time_to_accuracy.json.
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from main.cli import Flags, Run, command_line, grid, paired_interval, plot
from main.report import number
from studies.oac_turns import turns_of
from studies.oac_work import EmulatedLink, turn
from studies.reference import ratio
from studies.turns import in_turns
from tqdm import tqdm

from jaxrec.callbacks import every
from jaxrec.data.synthetic import SyntheticClicks
from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, adagrad, plan
from jaxrec.loop import evaluate, keep_memory
from jaxrec.models.dlrm import DLRM
from jaxrec.oac import Pipeline
from jaxrec.oac.options import nbytes
from jaxrec.step import make_eval_step
from jaxrec.task import Task

CARDINALITIES = (2000, 1000, 500, 200, 100, 50, 20, 10)
WIDTH = 8
LINK_LATENCY_S = 5e-5
MOST = 5  # limit of the steps to the target, as a multiple of the steps of sync


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the experiment."""

    batch_size: int = 256
    row_learning_rate: float = 0.1
    learning_rate: float = 0.01
    seeds: int | None = None
    """Number of seeds; that of the preset by default."""
    resume: bool = False
    """Continue with the unfinished arms of the run in --workdir."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """One mode with its window and skew."""

    mode: str
    window: int
    exponent: float

    @property
    def name(self) -> str:
        """The mode, with the window where it can be chosen."""
        return f"{self.mode}_window_{self.window}" if self.mode in ("async", "oac") else self.mode


class SkewJob:
    """The model and its compiled programs, shared by all arms; each run starts with fresh tables and dense state."""

    def __init__(self, config: Config, steps: int, every_steps: int):
        self.config, self.steps, self.every_steps = config, steps, every_steps
        fields = [f"C{i}" for i in range(len(CARDINALITIES))]
        tables = {name: Table(n, WIDTH) for name, n in zip(fields, CARDINALITIES, strict=True)}
        self.spec = EmbeddingSpec(tables, {"sparse": Lookup(tuple(fields))}, shards=4, seed=config.seed)
        self.model = DLRM((64, WIDTH), (64, 1))

        def predict(params, activations, batch):
            return self.model.apply(params, batch.dense, activations["sparse"])

        def loss(params, activations, batch):
            return optax.sigmoid_binary_cross_entropy(predict(params, activations, batch), batch.label)

        self.task = Task(self.spec, loss, optax.adam(config.learning_rate), adagrad(config.row_learning_rate))
        self.eval_step = make_eval_step(self.spec, predict)

    def fresh_state(self, seed: int):
        """Initial tables and parameters of a seed."""
        seed += self.config.seed
        example = jnp.zeros((1, 13)), jnp.zeros((1, len(CARDINALITIES), WIDTH))
        params = self.model.init(jax.random.key(seed), *example)
        tables = HostTables.create(dataclasses.replace(self.spec, seed=seed), self.task.row_optimizer)
        return self.task.init(params, tables)

    def clicks(self, exponent: float, seed: int) -> SyntheticClicks:
        """Data of a seed."""
        return SyntheticClicks(CARDINALITIES, exponent=exponent, seed=self.config.seed + seed)

    def calibration(self, exponent: float) -> Callable[[EmulatedLink], None]:
        """Return a function that gives a link the bandwidth at which sending a batch takes as long as its update.

        A batch of less skewed ids has more rows, so each skew is sent over a link of its own speed.
        """
        state = self.fresh_state(0)
        update, dense = jax.jit(self.task.checked_update, donate_argnums=0), state.dense
        batch = next(iter(self.clicks(exponent, 0).stream(self.config.batch_size, batches=1)))
        plans = plan(self.spec, batch.ids)
        rows = state.tables.read(plans)

        def calibrate(link: EmulatedLink) -> None:
            nonlocal dense
            times = []
            for _ in range(30):
                start = time.perf_counter()
                dense, _, _ = jax.block_until_ready(update(dense, rows, plans, batch))
                times.append(time.perf_counter() - start)
            link.bytes_per_s = nbytes((rows, plans, batch)) / float(np.median(times[5:]))

        return calibrate

    def pipeline(self, arm: Arm, seed: int, link: EmulatedLink | None) -> Pipeline:
        """A pipeline with its own tables and dense state."""
        options: dict[str, Any] = {"window": arm.window} if arm.mode in ("async", "oac") else {}
        options |= {"send": link.send, "fetch": link.fetch} if link else {}
        return Pipeline(self.task, self.fresh_state(seed), mode=arm.mode, loaders=3, fetchers=2, **options)

    def train(self, arm: Arm, seed: int, link: EmulatedLink, target: float | None) -> list[dict]:
        """Train one arm for `steps` steps, and on to the target if there is one; return the curve of test AUC."""
        clicks = self.clicks(arm.exponent, seed)
        test = [(batch, plan(self.spec, batch.ids)) for batch in clicks.stream(2048, batches=10, test=True)]
        rows: list[dict] = []

        def measure(info):
            pipeline.drain()
            rows.append({"step": info.step, "test_auc": evaluate(info.state, test, self.eval_step)["auc"]})

        with self.pipeline(arm, seed, link if arm.mode == "async" else None) as pipeline:
            batches = clicks.stream(self.config.batch_size, batches=MOST * self.steps)
            pipeline.enter(every(self.every_steps, measure))
            for _ in pipeline.run(batches):
                if pipeline.step >= self.steps and (target is None or rows[-1]["test_auc"] >= target):
                    break
        return rows

    def step_seconds(self, arms: list[Arm], rounds: int, counted: int) -> dict[str, list[float]]:
        """Step time in seconds of each arm of a skew, one per round, over a link that each round calibrates."""
        link, calibrate = EmulatedLink(math.inf, LINK_LATENCY_S), self.calibration(arms[0].exponent)
        longest = counted + 3 + max(arm.window for arm in arms)
        batches = list(self.clicks(arms[0].exponent, 0).stream(self.config.batch_size, batches=longest))
        pipelines = {arm.name: self.pipeline(arm, 0, link) for arm in arms}
        for pipeline in pipelines.values():
            turn(pipeline, batches, pipeline.window + 2)  # compiles
        turns = turns_of(pipelines, batches, counted)
        return in_turns(turns, rounds, "step times in turns", functools.partial(calibrate, link))


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


def steps_to(curve: list[dict], target: float) -> float | None:
    """Step at which a curve first reaches the target, linearly interpolated between evaluations; None if it never does.

    >>> curve = [{"step": 100, "test_auc": 0.6}, {"step": 200, "test_auc": 0.7}, {"step": 300, "test_auc": 0.65}]
    >>> round(steps_to(curve, 0.65), 6), round(steps_to(curve, 0.55), 6), steps_to(curve, 0.8)
    (150.0, 50.0, None)
    """
    before = {"step": 0, "test_auc": 0.5}
    for row in curve:
        if row["test_auc"] >= target:
            part = (target - before["test_auc"]) / (row["test_auc"] - before["test_auc"])
            return before["step"] + part * (row["step"] - before["step"])
        before = row
    return None


def target_of(curve: list[dict]) -> float:
    """Target AUC: 99.5 % of the way from 0.5 to that of sync after its steps; others train up to five times as many."""
    return 0.5 + 0.995 * (curve[-1]["test_auc"] - 0.5)


def curves_of(rows: list[dict]) -> dict[tuple, list[dict]]:
    """Curves of completed runs, {(exponent, arm, seed): rows}.

    >>> row = {"exponent": 0.8, "arm": "sync", "seed": 0, "step": 100, "test_auc": 0.6, "ended": False}
    >>> cut_off = [row, row | {"step": 200}]  # by a kill, and then trained anew
    >>> curves_of(cut_off), [row["step"] for row in curves_of([*cut_off, row | {"ended": True}])[0.8, "sync", 0]]
    ({}, [100])
    """
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        if "seed" in row:
            key = (row["exponent"], row["arm"], row["seed"])
            so_far = found.get(key, [])
            found[key] = [*so_far, row] if so_far and so_far[-1]["step"] < row["step"] else [row]
    return {key: curve for key, curve in found.items() if curve[-1]["ended"]}


def steps_of(curves: dict[tuple, list[dict]], seeds: int, exponent: float) -> dict[str, list[float | None]]:
    """{arm: steps of each seed to the target of its sync}, of one skew."""
    targets = [target_of(curves[exponent, "sync", seed]) for seed in range(seeds)]
    arms = dict.fromkeys(arm for skew, arm, _ in curves if skew == exponent)
    return {arm: [steps_to(curves[exponent, arm, seed], targets[seed]) for seed in range(seeds)] for arm in arms}


def quality_of(curves: dict[tuple, list[dict]], seeds: int) -> dict[str, Any]:
    """AUC lost at the last step of sync, paired, and mean steps to the target, null where a seed never reaches it."""
    results: dict[str, Any] = {}
    for exponent, arm in dict.fromkeys(key[:2] for key in curves):
        pairs = [(curves[exponent, "sync", seed], curves[exponent, arm, seed]) for seed in range(seeds)]
        targets = [target_of(sync) for sync, _ in pairs]
        steps = steps_of(curves, seeds, exponent)[arm]
        aucs = np.array([(sync[-1]["test_auc"], curve[len(sync) - 1]["test_auc"]) for sync, curve in pairs])
        key = f"{arm}_exponent_{exponent}"
        results[f"target_auc_exponent_{exponent}"] = float(np.mean(targets))
        results[f"test_auc_{key}"] = float(aucs[:, 1].mean())
        results[f"auc_loss_{key}"], results[f"auc_loss_half_interval_{key}"] = paired_interval(aucs[:, 0] - aucs[:, 1])
        results[f"seeds_that_reach_target_{key}"] = sum(step is not None for step in steps)
        mean, half = (None, None) if None in steps else paired_interval(steps)
        results |= {f"steps_to_target_{key}": mean, f"steps_to_target_half_interval_{key}": half}
    return results


def seconds_over(
    step_s: Mapping[str, list[float]], steps: Mapping[str, list], arm: str, other: str
) -> dict[str, float]:
    """Modelled seconds to the target of an arm over those of another, with a 95 % bootstrap interval.

    Seconds are the mean of the seeds' steps times the median step time. Seeds and rounds are drawn independently, the
    same ones for both arms.

    >>> steps = {"sync": [100.0, 120.0], "oac": [100.0, 120.0]}
    >>> seconds_over({"sync": [0.25, 0.5], "oac": [0.125, 0.25]}, steps, "sync", "oac")
    {'': 2.0, '_low': 2.0, '_high': 2.0}
    """
    rng, drawn = np.random.default_rng(0), 10_000
    rounds, seeds = len(step_s[arm]), len(steps[arm])
    # The first row is what was measured.
    rows_of = lambda number: np.vstack([np.arange(number), rng.integers(number, size=(drawn, number))])
    of_rounds, of_seeds = rows_of(rounds), rows_of(seeds)
    seconds = lambda name: np.median(np.array(step_s[name])[of_rounds], 1) * np.array(steps[name])[of_seeds].mean(1)
    ratios = seconds(arm) / seconds(other)
    low, high = np.quantile(ratios[1:], [0.025, 0.975])
    return {"": float(ratios[0]), "_low": float(low), "_high": float(high)}


def times(step_s: dict[str, list[float]], steps: Mapping[str, list], exponent: float) -> dict[str, Any]:
    """Step times, and the modelled seconds to the target of one skew, None for an arm that does not reach it.

    Args:
      steps: {arm: steps of each seed}.
    """
    results: dict[str, Any] = {}
    reach = [arm for arm in step_s if None not in steps[arm]]
    for arm, each in step_s.items():
        results |= ratio(f"step_ms_{arm}", 1e3 * np.array(each))
        results |= ratio(f"{arm}_rate_over_sync", np.array(step_s["sync"]) / each) if arm != "sync" else {}
        seconds = 1e-3 * float(np.mean(steps[arm])) * results[f"step_ms_{arm}"] if arm in reach else None
        results[f"seconds_to_target_modelled_{arm}_exponent_{exponent}"] = seconds
    for arm, other in itertools.product(reach, reach):
        if other.startswith("oac") and not arm.startswith("oac"):
            found = seconds_over(step_s, steps, arm, other)
            results |= {f"{arm}_seconds_over_{other}_modelled{end}": value for end, value in found.items()}
    return results


def finding(results: Mapping[str, Any], arms: Sequence[str], exponent: float, what: str) -> str:
    """Title of the plots: steps or seconds to the target of each arm.

    >>> found = {"steps_to_target_sync_exponent_1.2": 380.0, "steps_to_target_async_exponent_1.2": None}
    >>> finding(found, ["sync", "async"], 1.2, "steps_to_target")
    "Zipf exponent 1.2, steps to sync's target: sync 380, async never in some seed"
    """
    each = {arm: results[f"{what}_{arm}_exponent_{exponent}"] for arm in arms}
    show = lambda figure: "never in some seed" if figure is None else number(figure, 3)
    said = ", ".join(f"{arm} {show(figure)}" for arm, figure in each.items())
    return f"Zipf exponent {exponent}, {what.partition('_')[0]} to sync's target: {said}"


def draw(run: Run, curves: dict[tuple, list[dict]], results: dict[str, Any], exponent: float) -> None:
    """Plot the curves of a skew over steps and modelled seconds: means over the seeds, up to where all have data."""
    by_time: dict[str, tuple] = {}
    by_step: dict[str, tuple] = {}
    for arm in dict.fromkeys(key[1] for key in curves):
        mine = [curve for key, curve in curves.items() if key[:2] == (exponent, arm)]
        points = [[(row["step"], row["test_auc"]) for row in rows] for rows in zip(*mine, strict=False)]
        steps, auc = zip(*np.mean(points, axis=1).tolist(), strict=True)
        by_time[arm] = [1e-3 * results[f"step_ms_{arm}"] * step for step in steps], auc
        by_step[arm] = steps, auc
    in_seconds, in_steps = (
        finding(results, list(by_step), exponent, what) for what in ("seconds_to_target_modelled", "steps_to_target")
    )
    for name, lines, x_label, title in (
        ("seconds", by_time, "seconds, modelled (link emulated)", in_seconds), ("steps", by_step, "steps", in_steps),
    ):  # fmt: skip
        levels = {"test AUC": {"target": results[f"target_auc_exponent_{exponent}"]}}
        plot(run.directory / f"auc_over_{name}.png", {"test AUC": lines}, x_label, title, levels=levels)


def train_all(run: Run, job: SkewJob, every_arm: list[Arm], seeds: int) -> None:
    """Train and log the arms missing in the run; sync first, as it sets the target of its seed."""
    links = {arm.exponent: EmulatedLink(math.inf, LINK_LATENCY_S) for arm in every_arm}
    for exponent, link in links.items():
        job.calibration(exponent)(link)
    for seed, arm in tqdm(list(itertools.product(range(seeds), every_arm)), unit="run", disable=None):
        curves = curves_of(run.metrics())
        if (arm.exponent, arm.name, seed) in curves:
            continue
        target = None if arm.mode == "sync" else target_of(curves[arm.exponent, "sync", seed])
        rows = job.train(arm, seed, links[arm.exponent], target)
        for row in rows:
            run.log({"arm": arm.name, "exponent": arm.exponent, "seed": seed} | row | {"ended": row is rows[-1]})


def main(config: Config) -> dict:
    """Measure step times, run all arms and seeds, and return the contents of results.json."""
    keep_memory()  # before JAX starts its threads
    run = Run("oac_time_to_accuracy", config, config.workdir, config.resume)
    sizes = {"smoke": (40, 20, 2), "default": (800, 100, 8), "paper": (2000, 100, 10)}
    steps, every_steps, of_preset = sizes[config.preset]
    seeds = config.seeds or of_preset
    rounds, counted = {"smoke": (2, 20), "default": (24, 150), "paper": (96, 150)}[config.preset]
    job, every_arm = SkewJob(config, steps, every_steps), arms(config)
    exponent = max(arm.exponent for arm in every_arm)
    if not any("step_s" in row for row in run.metrics()):
        compared = [arm for arm in every_arm if arm.exponent == exponent]
        run.log({"step_s": job.step_seconds(compared, rounds, counted)})
    train_all(run, job, every_arm, seeds)
    step_s = next(row["step_s"] for row in run.metrics() if "step_s" in row)
    curves = curves_of(run.metrics())
    results = quality_of(curves, seeds)
    results |= times(step_s, steps_of(curves, seeds, exponent), exponent) | {
        "emulated_link": True,
        "seeds": seeds,
        "steps": steps,
    }
    draw(run, curves, results, exponent)
    end = f"_{{}}_exponent_{exponent}"
    columns = {"AUC lost": f"auc_loss{end}", "steps to target": f"steps_to_target{end}", "step, ms": "step_ms_{}"}
    columns["seconds, modelled"] = f"seconds_to_target_modelled{end}"
    run.close(results, grid(results, "arm", list(step_s), columns))
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
