"""What replicas cost in quality, and how much of it each rule of synchronisation recovers.

    python experiments/shadowsync_quality.py                                      8 replicas, synthetic clicks
    python experiments/shadowsync_quality.py --data criteo --path train.prepared  made by prepare.py
    python experiments/shadowsync_quality.py --preset paper --trainers 20 --workers 24    never run as a whole
    python experiments/shadowsync_quality.py --where processes                    4 trainers, really free-running
    python experiments/shadowsync_quality.py --factors 1 4 16 --decay             each arm with rates of its own

Claim (ShadowSync, arXiv 2003.03477): synchronised in the background, replicas lose no quality to the foreground. One
pass over the examples, shared by n trainers; regime: free-running, EMULATED by studies/emulation.py, where n x m
workers with batch B are an example-level parallelism (ELP) of B n m. Trainer 0 is evaluated after last rounds of all,
against one replica (`arms_of` has the arms, `results_of_arms` the keys). --resume goes on arm by arm.
Result: results/two_cores_cpu/shadowsync_quality*.json.
"""

import contextlib
import dataclasses
import functools
import itertools
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from main.cli import Flags, Run, bars, command_line, grid, paired_interval, plot, refuse, rule_of_ray, unread
from main.click_data import ClickJob, Data, click_job, criteo_of_seeds, synthetic_clicks
from main.model import make_model
from main.pools import SharedStream
from main.report import figures, number, scaled
from studies.emulation import ALL_REDUCE, Emulation, Script
from studies.pool_kills import trained_pool
from studies.server_kills import of_its_own
from studies.shadow_work import FORMS
from tqdm import tqdm

from jaxrec.cluster import Cluster
from jaxrec.cluster.trainers import TrainerWork
from jaxrec.data.synthetic import scaled_cardinalities
from jaxrec.embedding import DeviceTables, rowwise_adagrad
from jaxrec.loop import evaluate, keep_memory
from jaxrec.prefetch import planned
from jaxrec.shadowsync import Rule, bmuf, easgd, model_averaging, replica_spread
from jaxrec.types import Batch, TrainState

MARGIN = 0.0005  # of AUC
SHARDS = 4  # of rows at servers
TUNING_SEED = 1_000_000  # beyond those that are compared
KEYS = ("arm", "trainers", "workers", "seed")  # of a row of metrics


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the experiment; defaults follow from the preset."""

    resume: bool = False
    seeds: int | None = None
    data: Literal["synthetic", "criteo"] = "synthetic"
    path: tuple[Path, ...] | None = None
    """Directories of prepared Criteo rows, which seeds take in turn."""
    examples: int | None = None
    """Training examples in total, over all trainers."""
    rows: int = 100_000
    """Total rows of all synthetic tables."""
    curved: float = 0.0
    """Share of what decides a synthetic click that no sum over fields or pairs of them can express."""
    trainers: tuple[int, ...] | None = None
    workers: int = 1
    arms: tuple[str, ...] | None = None
    batch_size: int | None = None
    where: Literal["emulated", "processes"] = "emulated"
    """Whether trainers are emulated, or processes on Ray, which are compared with emulated ones."""
    pace_seconds: float = 0.0
    """Minimum seconds between rounds in the background, with --where processes."""
    shadow_steps: int = 5
    """Steps of a trainer during one round of its shadow, where it is emulated: the average sync gap."""
    last_rounds: bool = True
    """Whether trainers make last rounds before they are evaluated, as `finish` does."""
    block_momentum: float = 0.3
    learning_rate: float = 0.01
    row_learning_rate: float = 0.05
    warmup_steps: int = 0
    """Steps of a trainer over which both rates rise linearly; needed with many examples in flight."""
    decay: bool = False
    """Whether both rates fall linearly to zero at the end."""
    factors: tuple[float, ...] = ()
    """Factors of both rates, of which each arm takes the best with a seed of their own, on as many examples, as smaller
    ones are best on fewer."""
    width: int = 16


class Size(NamedTuple):
    """Sizes that a preset sets."""

    examples: int
    seeds: int
    trainers: tuple[int, ...]
    arms: tuple[str, ...]


def arms_of(*periods: int) -> tuple[str, ...]:
    """All arms: every rule in both forms, the foreground ones with each of these periods k.

    fr_RULE_k: in the foreground every k steps of a trainer; s_RULE: a shadow whose rounds take --shadow-steps steps,
    back to back; s_RULE_k: k steps. Forms: `lerp` moves to the mean from the current weights, and discards half of what
    was learned during the round; `delta` adds half of the step from where the round began, and keeps it; in the
    foreground they are the same. EASGD is `symmetric` where the difference is taken where the round began, `sequential`
    on live weights.
    """
    # The forms of the other rules differ only in a shadow.
    in_foreground = ("easgd-symmetric", "easgd-sequential", "ma", "bmuf")
    foreground = tuple(f"fr_{rule}_{k}" for rule, k in itertools.product(in_foreground, periods))
    return ("none", "all_reduce", *foreground, *(f"s_{rule}-{form}" for rule in FORMS for form in FORMS[rule]))


SIZES = {
    "smoke": Size(16_000, 2, (4,), ("none", "fr_ma_5", "s_ma-lerp", "s_ma-delta", "s_easgd")),
    "default": Size(200_000, 3, (8,), arms_of(5, 30)),
    "paper": Size(10_000_000, 5, (1, 5, 10, 15, 20), arms_of(5, 30, 100)),
}


def size_of(config: Config) -> Size:
    """Sizes of the preset, overridden by flags that were given."""
    given = {name: getattr(config, name) for name in Size._fields}
    if config.where == "processes":  # one all-reduce would be neither free-running nor emulated there
        given["trainers"] = given["trainers"] or (4,)
        given["arms"] = given["arms"] or tuple(arm for arm in SIZES[config.preset].arms if arm != "all_reduce")
    return SIZES[config.preset]._replace(**{name: value for name, value in given.items() if value is not None})


def script_of(arm: str, config: Config) -> Script | str | None:
    """How the replicas of an arm are synchronised."""
    if arm in ("none", "all_reduce"):
        return ALL_REDUCE if arm == "all_reduce" else None
    kind, _, rest = arm.partition("_")
    name, *period = rest.split("_")
    rule, _, form = name.partition("-")
    k = int(period[0]) if len(period) == 1 and period[0].isdigit() else 0
    known = rule in FORMS and form in ("", *FORMS[rule])
    if not known or not ((kind == "s" and not period) or (kind in ("s", "fr") and k > 0)):
        names = ", ".join(f"{rule}[-{'|'.join(forms)}]" for rule, forms in FORMS.items())
        raise ValueError(f"arm {arm!r} must be none, all_reduce, s_RULE, s_RULE_k or fr_RULE_k, RULE one of {names}.")
    with_momentum = functools.partial(bmuf, momentum=config.block_momentum)
    rules: dict[str, Callable[..., Rule]] = {"easgd": easgd, "ma": model_averaging, "bmuf": with_momentum}
    made = rules[rule](form=form) if form else rules[rule]()
    if kind == "fr":
        return Script(made, k)
    gap = k or config.shadow_steps
    return Script(made, gap, gap)


def make_quality_data(config: Config, size: Size) -> Callable[[int], Data]:
    """Return seed -> its data: synthetic clicks of that seed, or prepared Criteo rows in file order."""
    if config.data == "synthetic":
        batch_size, tested = config.batch_size or 200, max(4, min(100, size.examples // 10_000))
        sizes = scaled_cardinalities(config.rows), batch_size, size.examples // batch_size
        return lambda seed: synthetic_clicks(*sizes, config.seed + seed, tested, 2000, curved=config.curved)
    assert config.path is not None
    return criteo_of_seeds(config.path, config.seed, config.batch_size or 128, examples=config.examples, padded=False)


def make_stream(config: Config, size: Size, seed: int) -> Callable[..., Iterable[Batch]]:
    """The training batches of a seed, opened in another process."""
    return make_quality_data(config, size)(seed).train


class QualityJob:
    """The model with its compiled programs; each arm of each seed is a fresh emulation."""

    def __init__(self, config: Config, data: Callable[[int], Data]):
        keep_memory()
        self.config, self.data = config, data
        self._made: dict[int, list[Batch]] = {}  # {seed: its batches}, of the last seed
        self.job_of = functools.cache(self._make)

    def _make(self, steps: int | None, factor: float = 1.0, shards: int = 1) -> tuple[ClickJob, Callable]:
        """Return the job, with rates that fall to zero in so many steps if any are given, and its evaluation step."""
        config = self.config

        def scheduled(rate):
            rise = lambda step: rate * factor * jnp.minimum(1.0, (step + 1) / max(1, config.warmup_steps))
            return (lambda step: rise(step) * jnp.maximum(0.0, 1 - step / steps)) if steps else rise

        job = click_job(
            self.data(0).cardinalities, make_model("small_dlrm", config.width),
            optax.adagrad(scheduled(config.learning_rate), initial_accumulator_value=0.0),
            rowwise_adagrad(scheduled(config.row_learning_rate)), config.width, shards, config.seed,
        )  # fmt: skip
        return job, job.eval_step()

    def _batches(self, seed: int) -> Iterable[Batch]:
        """The batches of a seed; synthetic ones are made once for all arms, and have 164 bytes per example."""
        if self.config.data != "synthetic":
            return self.data(seed).train(0)
        if seed not in self._made:
            self._made = {}  # first, to hold those of one seed only
            self._made = {seed: list(self.data(seed).train(0))}
        return self._made[seed]

    def _test(self, state: TrainState, eval_step: Callable, seed: int) -> dict[str, float]:
        """Metrics of a state on the test data."""
        found = evaluate(state, planned(state.tables.spec, self.data(seed).test()), eval_step)
        return {f"test_{key}": found[key] for key in ("auc", "normalized_entropy", "log_loss")}

    def run(
        self, arm: str, trainers: int, workers: int, seed: int, factor: float = 1.0, gap: int | None = None
    ) -> dict[str, Any]:
        """Train and evaluate one arm of one seed; a shadow's rounds take `gap` steps, or --shadow-steps."""
        config = self.config if gap is None else dataclasses.replace(self.config, shadow_steps=gap)
        data, own = self.data(seed), self.config.seed + seed
        job, eval_step = self.job_of(data.steps // trainers if config.decay else None, factor)
        tables = DeviceTables.create(dataclasses.replace(job.spec, seed=own), job.task.row_optimizer)
        emulation = Emulation(job.task, job.init(own), trainers, workers, script_of(arm, config), own, tables)
        batches, start = self._batches(seed), time.perf_counter()
        losses = emulation.run(batches)
        if self.config.last_rounds:
            emulation.finish()
        replicas = [dense.params for dense in emulation.dense]
        return {
            "regime": "free-running, emulated",
            "train_loss": float(losses.mean()),
            "emulation_seconds": time.perf_counter() - start,
            "example_level_parallelism": emulation.example_level_parallelism,
            "average_sync_gap": finite(emulation.average_sync_gap),
            "spread": replica_spread(jax.tree.map(lambda *x: jnp.stack(x), *replicas)),
            **self._test(emulation.replica(0), eval_step, seed),
        }

    def run_in_processes(self, cluster: Cluster, arm: str, trainers: int, workers: int, seed: int) -> dict[str, Any]:
        """As `run`, with trainers in processes of their own."""
        script = script_of(arm, self.config)
        script = script if isinstance(script, Script) else None  # `check` has refused all_reduce
        in_background = script is not None and script.latency_ticks > 0
        (job, eval_step), own, data = self.job_of(None, shards=SHARDS), self.config.seed + seed, self.data(seed)
        stream = functools.partial(make_stream, self.config, size_of(self.config), seed)
        work = TrainerWork(
            dataclasses.replace(job.task, spec=dataclasses.replace(job.spec, seed=own)), job.init(own),
            SharedStream(stream, data.steps, data.batches_in_a_row),
            script.rule if script else None, None if in_background or not script else script.every_ticks,
            self.config.pace_seconds if in_background else 0.0, workers,
        )  # fmt: skip
        with trained_pool(cluster, work, trainers) as (state, stats, _):
            found = self._test(state, eval_step, seed)
        return {
            "regime": "free-running, measured",
            "seconds": stats.seconds,
            "example_level_parallelism": stats.examples // max(1, sum(stats.steps)) * trainers * workers,
            "average_sync_gap": finite(float(np.mean(stats.average_sync_gap))),
            "spread": stats.replica_spread,
            **found,
        }


def finite(number: float) -> float | None:
    """A number that JSON has, or None."""
    return number if np.isfinite(number) else None


def rule_of(arm: str) -> str:
    """The rule of an arm; '' if it has none.

    >>> rule_of("fr_easgd-symmetric_5"), rule_of("s_ma"), rule_of("none")
    ('easgd', 'ma', '')
    """
    return arm.split("_")[1].partition("-")[0] if arm.startswith(("s_", "fr_")) else ""


def results_of_arms(rows: list[dict], test_sets: int = 1) -> dict[str, Any]:
    """Contents of results.json, from the arms of all seeds; test sets as in `paired_interval`.

    `non_inferior_s_RULE`: the 95 % interval of the paired difference from the best foreground counterpart, of any form,
    lies above (true) or below (false) -0.0005 AUC; absent while there are too few seeds. `auc_over_twin_ARM`: trainers
    in processes minus their emulation, whose rounds take the measured average sync gap.
    """
    found = {(row["arm"], row["trainers"], row["seed"]): row for row in rows if row["seed"] != TUNING_SEED}
    seeds = sorted({row["seed"] for row in found.values() if ("one_replica", 1, row["seed"]) in found})
    results: dict[str, Any] = {
        "regime": max(row["regime"] for row in rows),
        "evaluated": "trainer 0",
        "seeds": len(seeds),
    }
    results["last_rounds"] = next(iter(found.values()))["last_rounds"]

    def values(arm: str, n: int, key: str) -> np.ndarray:
        return np.array([found[arm, n, seed][f"test_{key}"] for seed in seeds])

    interval = functools.partial(paired_interval, seeds=seeds, test_sets=test_sets)
    whole = [key for key in dict.fromkeys((a, n) for a, n, _ in found) if all((*key, seed) in found for seed in seeds)]
    for arm, n in whole:
        at = f"{arm}_trainers_{n}"
        auc, entropy = values(arm, n, "auc"), values(arm, n, "normalized_entropy")
        change, half = interval(auc - values("one_replica", 1, "auc"))
        base = values("one_replica", 1, "normalized_entropy")
        relative, relative_half = interval(100 * (entropy - base) / base)
        results |= {
            f"test_auc_{at}": float(auc.mean()),
            f"auc_change_{at}": change,
            f"auc_change_half_interval_{at}": half,
        }
        results |= {f"relative_ne_percent_{at}": relative, f"relative_ne_percent_half_interval_{at}": relative_half}
        for key in ("average_sync_gap", "example_level_parallelism"):
            results[f"{key}_{at}"] = found[arm, n, seeds[0]][key]
        if "factor" in found[arm, n, seeds[0]]:
            results[f"factor_{at}"] = found[arm, n, seeds[0]]["factor"]
        results[f"spread_{at}"] = float(np.mean([found[arm, n, seed]["spread"] for seed in seeds]))
    for arm, n in (key for key in whole if (f"emulated_{key[0]}", key[1]) in whole):
        change, half = interval(values(arm, n, "auc") - values(f"emulated_{arm}", n, "auc"))
        at = f"{arm}_trainers_{n}"
        results |= {f"auc_over_twin_{at}": change, f"auc_over_twin_half_interval_{at}": half}
    for arm, n in (key for key in whole if key[0].startswith("s_")):
        twins = [key for key in whole if key[0].startswith("fr_") and rule_of(key[0]) == rule_of(arm) and key[1] == n]
        if twins:
            best = max(twins, key=lambda key: values(key[0], key[1], "auc").mean())
            change, half = interval(values(arm, n, "auc") - values(best[0], best[1], "auc"))
            at = f"{arm}_trainers_{n}"
            results |= {f"best_foreground_of_{at}": best[0], f"auc_over_foreground_{at}": change}
            results[f"auc_over_foreground_half_interval_{at}"] = half
            if half is not None and (change - half > -MARGIN or change + half < -MARGIN):
                results[f"non_inferior_{at}"] = change - half > -MARGIN
    return results


def table(results: dict[str, Any]) -> str:
    """Format the results like the paper's table, as we recall its layout."""
    rows = {}
    for at in (key.removeprefix("test_auc_") for key in results if key.startswith("test_auc_")):
        arm, _, trainers = at.rpartition("_trainers_")
        rows[f"{arm}, n = {trainers}"] = at
    columns: dict[str, str | tuple[str, float]] = {"ELP": "example_level_parallelism_{}", "test AUC": "test_auc_{}"}
    columns |= {"change, 1e-4": ("auc_change_{}", 1e4), "NE change, %": "relative_ne_percent_{}"}
    return grid(results, "arm", rows, columns | {"gap": "average_sync_gap_{}", "spread": "spread_{}"})


def changes(results: Mapping[str, Any], what: str) -> dict[int, dict[str, Any]]:
    """{trainers: {arm: Figure}} of a figure such as auc_change, without the arm one_replica.

    >>> changes({"auc_change_none_trainers_8": -0.5, "auc_change_one_replica_trainers_1": 0.0}, "auc_change")
    {8: {'none': Figure(value=-0.5, low=None, high=None)}}
    """
    found: dict[int, dict[str, Any]] = {}
    for key, figure in figures(results).items():
        match = re.fullmatch(rf"{what}_(.+)_trainers_(\d+)", key)
        if match and match[1] != "one_replica":
            found.setdefault(int(match[2]), {})[match[1]] = figure
    return found


def finding(results: Mapping[str, Any]) -> str:
    """Title of the plots, for the largest number of trainers."""
    n, arms = max(changes(results, "auc_change").items())
    said = [f"without sync {number(arms['none'].value, 3)}"] if "none" in arms else []
    for words, beginning in (("shadow", "s_"), ("in the foreground", "fr_")):
        mine = {arm: figure.value for arm, figure in arms.items() if arm.startswith(beginning)}
        if mine:
            best = max(mine, key=mine.__getitem__)
            said.append(f"with {best}, the best {words}, {number(mine[best], 3)}")
    return f"{n} trainers, {results['seeds']} seeds, test AUC over that of one replica: {', '.join(said)}"


def draw(directory: Path, results: dict[str, Any]) -> None:
    """Plot the changes of AUC and normalised entropy of all arms; and per rule over several numbers of trainers."""
    auc, entropy = "change of test AUC, 1e-4", "relative change of NE, %"
    found = {auc: changes(results, "auc_change"), entropy: changes(results, "relative_ne_percent")}
    found[auc] = {n: {arm: scaled(each, 1e4) for arm, each in arms.items()} for n, arms in found[auc].items()}
    over = changes(results, "auc_over_foreground")
    title, most = finding(results), max(found[auc])
    panels = {label: {"": of[most]} for label, of in found.items()}
    levels = {auc: {"one replica": 0.0}, entropy: {"one replica": 0.0}}
    if over:
        label = "test AUC minus that of the best foreground of the rule, 1e-4"
        panels[label] = {"": {arm: scaled(each, 1e4) for arm, each in over[most].items()}}
        levels[label] = {"margin": -1e4 * MARGIN}
    bars(directory / "quality.png", panels, title, levels)
    if len(found[auc]) > 1:
        lines: dict[str, dict[str, tuple]] = {}
        for rule in FORMS:
            of_rule = lambda arm, rule=rule: arm in ("none", "all_reduce") or rule_of(arm) == rule
            arms = [arm for arm in found[auc][most] if of_rule(arm)]
            lines[f"{rule}: {auc}"] = {arm: curve(found[auc], arm) for arm in arms}
        levels = {label: {"one replica": 0.0} for label in lines}
        plot(directory / "quality_over_trainers.png", lines, "trainers", title, True, levels=levels)


def curve(found: Mapping[int, Mapping[str, Any]], arm: str) -> tuple[list, list]:
    """Figures of an arm over the number of trainers: (numbers, figures)."""
    numbers = [n for n in sorted(found) if arm in found[n]]
    return numbers, [found[n][arm] for n in numbers]


def check(config: Config, size: Size) -> None:
    """Refuse unknown arms and inconsistent flags."""
    for arm in size.arms:
        script_of(arm, config)
    processes, criteo = config.where == "processes", config.data == "criteo"
    refuse(unread(config, {
        "--where processes": (processes, ("pace_seconds",)),
        "--where emulated": (not processes, ("last_rounds", "shadow_steps", "decay", "factors")),
        "--data criteo": (criteo, ("path",)),
        "--data synthetic": (not criteo, ("rows", "curved", "factors")),  # there, no seed has data of its own
    }) | {
        "--data criteo needs --path: directories made by prepare.py.": criteo and not config.path,
        "rounds of a given gap, as of s_ma_5, are emulated: --where processes measures the gap.": (
            processes and any(re.fullmatch(r"s_.*_\d+", arm) for arm in size.arms)
        ),
        "the arm all_reduce waits in every step: --where processes has arms that run freely.": (
            processes and "all_reduce" in size.arms
        ),
    } | (rule_of_ray() if processes else {}))  # fmt: skip


def arms_to_run(config: Config, size: Size) -> list[tuple[str, int, int]]:
    """[(arm, trainers, workers)] of every seed, in order; an emulated twin comes after the arm whose gap it takes."""
    arms = [("one_replica", 1, 1)]
    for n, arm in itertools.product(size.trainers, size.arms):
        if arm == "all_reduce" and config.workers > 1:
            continue  # it synchronises all workers in every step, which excludes Hogwild
        arms.append((arm, n, config.workers))
        if config.where == "processes":
            arms.append((f"emulated_{arm}", n, config.workers))
    return arms


def tuned(run: Run, job: QualityJob, arm: tuple[str, int, int], factors: Iterable[float]) -> float:
    """Return the factor of both rates with the best AUC with the tuning seed; trains what is not logged."""
    key = dict(zip(KEYS, (*arm, TUNING_SEED), strict=True))
    auc = {row["factor"]: row["test_auc"] for row in run.metrics() if key.items() <= row.items()}
    for factor in factors:
        if factor not in auc:
            row = key | {"factor": factor} | run_arm(job, None, [], (*arm, TUNING_SEED), factor)
            run.log(row)
            auc[factor] = row["test_auc"]
    return max(auc, key=auc.__getitem__)


def run_arm(
    job: QualityJob, cluster: Cluster | None, rows: list[dict], key: tuple[str, int, int, int], factor: float = 1.0
) -> dict:
    """Train and evaluate one arm of one seed; `rows` are those of the arms before it."""
    arm, of = key[0], key[1:]
    if arm == "one_replica":
        return job.run("none", *of, factor)
    if cluster is None:
        return job.run(*key, factor)
    twin = arm.removeprefix("emulated_")
    if arm == twin:
        return job.run_in_processes(cluster, *key)
    gap = next(row["average_sync_gap"] for row in rows if [row[name] for name in KEYS] == [twin, *of])
    return job.run(twin, *of, gap=max(1, round(gap or 1)))


def main(config: Config) -> dict:
    """Train the missing arms and return the contents of results.json."""
    size = size_of(config)
    check(config, size)
    with contextlib.ExitStack() as opened:
        cluster = None
        if config.where == "processes":
            opened.enter_context(of_its_own())
            cluster = opened.enter_context(Cluster())
        run = Run("shadowsync_quality", config, config.workdir, config.resume)
        job = QualityJob(config, make_quality_data(config, size))
        done = {tuple(row[key] for key in KEYS) for row in run.metrics()}
        arms = arms_to_run(config, size)
        todo = [key for seed in range(size.seeds) for arm in arms if (key := (*arm, seed)) not in done]
        same = {"evaluated": "trainer 0", "last_rounds": config.last_rounds}
        factors = {}
        if config.factors:
            factors = {arm: tuned(run, job, arm, config.factors) for arm in tqdm(arms, "tuning", disable=None)}
        for key in tqdm(todo, unit="arm", disable=None):
            of = {"factor": factors[key[:3]]} if factors else {}
            row = run_arm(job, cluster, run.metrics(), key, **of)
            run.log(dict(zip(KEYS, key, strict=True)) | same | of | row)
    results = results_of_arms(run.metrics(), len(config.path or [0]))
    draw(run.directory, results)
    run.close(results, table(results))
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
