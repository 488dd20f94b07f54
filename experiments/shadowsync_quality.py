"""What replication costs in quality, and how much of it each method of synchronisation recovers.

    python experiments/shadowsync_quality.py                                      8 replicas, synthetic clicks
    python experiments/shadowsync_quality.py --data criteo --path train.prepared  made by prepare.py
    python experiments/shadowsync_quality.py --preset paper --trainers 20 --workers 24

One pass over a fixed number of examples, shared by n trainers: ShadowSync's one-pass setting (Zheng et al., arXiv
2003.03477). Regime: free-running, EMULATED by jaxrec.shadowsync.Emulation, which runs n x m Hogwild workers in a seeded
order; 20 x 24 with batch 200 is an example-level parallelism (ELP) of 96,000. Arms: none; all_reduce every step;
fr_RULE_k, in the foreground every k steps of a trainer; s_RULE, a shadow whose rounds take --shadow-steps steps each,
back to back. All with alpha 0.5; BMUF with eta 1 and --block-momentum. All arms train with the same rates.

Every rule is tested in both of its forms. Model averaging and BMUF: `lerp` moves halfway to the mean from the trainer's
current weights, and so discards half of what it learned during the round; `delta` adds half of the step from where the
round began to the mean, and keeps what was learned. In the foreground nothing is learned during a round, the two are
the same, and fr_ma and fr_bmuf have no form. EASGD: `symmetric` adds a difference taken where the round began,
`sequential` one on live weights, against the centre that it has just moved. A rule without a form (s_ma) uses the
library's default.

At the end every trainer joins the last rounds, as `finish` does, so that the evaluated model is what a user gets;
--no-last-rounds omits them. Trainer 0 is evaluated, as in the paper's patent (the last local version of one trainer),
against one replica with one worker on the same data: change of test AUC, relative change of normalised entropy. Arms of
a seed share data and initial values; intervals are of the paired differences, 95 %. `non_inferior_s_RULE`: the interval
of s_RULE minus its best foreground counterpart, of any form, lies above (true) or below (false) -0.0005 AUC; absent
while there are too few seeds to decide. --resume continues a run arm by arm. `--preset paper` has never run as a whole:
docs/measured.md says which parts did.
"""

import dataclasses
import functools
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from main.cli import Flags, Run, bars, command_line, command_of, grid, paired_interval, plot
from main.report import figures, number, scaled
from studies.shadow_work import FORMS
from tqdm import tqdm

from jaxrec.data.synthetic import SyntheticClicks, scaled_cardinalities
from jaxrec.embedding import EmbeddingSpec, Lookup, Table, rowwise_adagrad
from jaxrec.loop import evaluate, keep_memory, planned
from jaxrec.models.dlrm import DLRM
from jaxrec.shadowsync import ALL_REDUCE, Emulation, Rule, Script, bmuf, easgd, model_averaging, replica_spread
from jaxrec.shadowsync.emulation import make_events
from jaxrec.step import make_eval_step
from jaxrec.types import Batch

MARGIN = 0.0005  # of AUC


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the experiment; defaults follow from the preset."""

    resume: bool = False
    seeds: int | None = None
    data: Literal["synthetic", "criteo"] = "synthetic"
    path: Path | None = None
    """Directory of prepared Criteo rows."""
    examples: int | None = None
    """Training examples in total, over all trainers."""
    rows: int = 100_000
    """Total rows of all synthetic tables."""
    trainers: tuple[int, ...] | None = None
    workers: int = 1
    arms: tuple[str, ...] | None = None
    batch_size: int | None = None
    shadow_steps: int = 5
    """Steps of a trainer during one round of its shadow: the average sync gap."""
    last_rounds: bool = True
    """Whether trainers make last rounds before they are evaluated, as `finish` does."""
    block_momentum: float = 0.3
    learning_rate: float = 0.01
    row_learning_rate: float = 0.05
    warmup_steps: int = 0
    """Steps of a trainer over which both rates rise linearly; needed with many examples in flight."""
    width: int = 16


class Size(NamedTuple):
    """Sizes that a preset sets."""

    examples: int
    seeds: int
    trainers: tuple[int, ...]
    arms: tuple[str, ...]


def arms_of(*periods: int) -> tuple[str, ...]:
    """All arms: every rule in both forms, the foreground ones with each of these periods k."""
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
    return SIZES[config.preset]._replace(**{name: value for name, value in given.items() if value is not None})


def script_of(arm: str, config: Config) -> Script | str | None:
    """How the replicas of an arm are synchronised.

    Raises:
      ValueError: unknown arm.
    """
    if arm in ("none", "all_reduce"):
        return ALL_REDUCE if arm == "all_reduce" else None
    kind, _, rest = arm.partition("_")
    name, *period = rest.split("_")
    rule, _, form = name.partition("-")
    k = int(period[0]) if len(period) == 1 and period[0].isdigit() else 0
    known = rule in FORMS and form in ("", *FORMS[rule])
    if not known or not ((kind == "s" and not period) or (kind == "fr" and k > 0)):
        names = ", ".join(f"{rule}[-{'|'.join(forms)}]" for rule, forms in FORMS.items())
        raise ValueError(f"arm {arm!r} must be none, all_reduce, s_RULE or fr_RULE_k, RULE one of {names}.")
    with_momentum = functools.partial(bmuf, momentum=config.block_momentum)
    rules: dict[str, Callable[..., Rule]] = {"easgd": easgd, "ma": model_averaging, "bmuf": with_momentum}
    made = rules[rule](form=form) if form else rules[rule]()
    return Script(made, config.shadow_steps, config.shadow_steps) if kind == "s" else Script(made, k)


class QualityData(NamedTuple):
    """Training and test data."""

    cardinalities: tuple[int, ...]
    train: Callable[[int], Iterable[Batch]]  # by seed
    test: Callable[[int], Iterable[Batch]]
    batches: int


def make_quality_data(config: Config, size: Size) -> QualityData:
    """Synthetic clicks, or prepared Criteo rows in file order."""
    if config.data == "synthetic":
        batch_size = config.batch_size or 200
        cardinalities, batches = scaled_cardinalities(config.rows), size.examples // batch_size
        clicks = lambda seed: SyntheticClicks(cardinalities, seed=config.seed + seed)
        test = lambda seed: clicks(seed).stream(2000, batches=max(4, min(100, size.examples // 10_000)), test=True)
        return QualityData(cardinalities, lambda seed: clicks(seed).stream(batch_size, batches=batches), test, batches)
    from jaxrec.data.criteo import open_split
    from jaxrec.data.loader import Loader

    if config.path is None:
        raise ValueError("--data criteo needs --path: a directory made by prepare.py.")
    train, tested = open_split(config.path, "train"), open_split(config.path, "test")
    batch_size = config.batch_size or 128
    batches = min(sum(train.rows), config.examples or sys.maxsize) // batch_size
    stream = lambda seed: itertools.islice(Loader(train, batch_size), batches)
    return QualityData(tuple(train.metadata["cardinalities"]), stream, lambda seed: Loader(tested, 2048), batches)


class QualityJob:
    """The model with its compiled programs; each arm of each seed is a fresh emulation."""

    def __init__(self, config: Config, data: QualityData):
        keep_memory()
        self.config, self.data = config, data
        fields = [f"C{i}" for i in range(len(data.cardinalities))]
        tables = {name: Table(n, config.width) for name, n in zip(fields, data.cardinalities, strict=True)}
        self.spec = EmbeddingSpec(tables, {"sparse": Lookup(tuple(fields))}, shards=1, seed=config.seed)
        self.model = DLRM((64, config.width), (64, 1))
        rise = lambda rate: lambda step: rate * jnp.minimum(1.0, (step + 1) / max(1, config.warmup_steps))
        self.optimizer = optax.adagrad(rise(config.learning_rate), initial_accumulator_value=0.0)
        self.row_optimizer = rowwise_adagrad(rise(config.row_learning_rate))
        self.eval_step = make_eval_step(self.spec, self.predict)
        self.programs = make_events(self.spec, self.loss, self.optimizer, self.row_optimizer)

    def predict(self, params, activations, batch):
        """Logits f32[B]."""
        return self.model.apply(params, batch.dense, activations["sparse"])

    def loss(self, params, activations, batch):
        """Losses f32[B]."""
        return optax.sigmoid_binary_cross_entropy(self.predict(params, activations, batch), batch.label)

    def run(self, arm: str, trainers: int, workers: int, seed: int) -> dict[str, Any]:
        """Train and evaluate one arm of one seed."""
        example = jnp.zeros((1, 13)), jnp.zeros((1, len(self.data.cardinalities), self.config.width))
        spec = dataclasses.replace(self.spec, seed=self.config.seed + seed)
        emulation = Emulation(
            spec,
            self.loss,
            self.optimizer,
            self.row_optimizer,
            self.model.init(jax.random.key(seed), *example),
            trainers,
            workers,
            script_of(arm, self.config),
            seed,
            self.programs,
        )
        start = time.perf_counter()
        losses = emulation.run(self.data.train(seed))
        if self.config.last_rounds:
            emulation.finish()
        seconds = time.perf_counter() - start
        test = planned(self.spec, self.data.test(seed))
        found = evaluate(emulation.replica(0), test, self.eval_step)
        gap, replicas = emulation.average_sync_gap, [dense.params for dense in emulation.dense]
        return {
            "arm": arm,
            "trainers": trainers,
            "workers": workers,
            "seed": seed,
            "evaluated": "trainer 0",
            "last_rounds": self.config.last_rounds,
            "regime": "free-running, emulated",
            "train_loss": float(losses.mean()),
            "emulation_seconds": seconds,
            "example_level_parallelism": emulation.example_level_parallelism,
            "average_sync_gap": gap if np.isfinite(gap) else None,
            "spread": replica_spread(jax.tree.map(lambda *x: jnp.stack(x), *replicas)),
            **{f"test_{key}": found[key] for key in ("auc", "normalized_entropy", "log_loss")},
        }


def rule_of(arm: str) -> str:
    """The rule of an arm; '' if it has none.

    >>> rule_of("fr_easgd-symmetric_5"), rule_of("s_ma"), rule_of("none")
    ('easgd', 'ma', '')
    """
    return arm.split("_")[1].partition("-")[0] if arm.startswith(("s_", "fr_")) else ""


def results_of_arms(rows: list[dict]) -> dict[str, Any]:
    """Contents of results.json, from the arms of all seeds."""
    found = {(row["arm"], row["trainers"], row["seed"]): row for row in rows}
    seeds = sorted({row["seed"] for row in rows if ("one_replica", 1, row["seed"]) in found})
    results: dict[str, Any] = {"regime": "free-running, emulated", "evaluated": "trainer 0", "seeds": len(seeds)}
    results["last_rounds"] = rows[0]["last_rounds"]

    def values(arm: str, n: int, key: str) -> np.ndarray:
        return np.array([found[arm, n, seed][f"test_{key}"] for seed in seeds])

    whole = [key for key in dict.fromkeys((a, n) for a, n, _ in found) if all((*key, seed) in found for seed in seeds)]
    for arm, n in whole:
        at = f"{arm}_trainers_{n}"
        auc, entropy = values(arm, n, "auc"), values(arm, n, "normalized_entropy")
        change, half = paired_interval(auc - values("one_replica", 1, "auc"))
        base = values("one_replica", 1, "normalized_entropy")
        relative, relative_half = paired_interval(100 * (entropy - base) / base)
        results |= {
            f"test_auc_{at}": float(auc.mean()),
            f"auc_change_{at}": change,
            f"auc_change_half_interval_{at}": half,
        }
        results |= {f"relative_ne_percent_{at}": relative, f"relative_ne_percent_half_interval_{at}": relative_half}
        for key in ("average_sync_gap", "example_level_parallelism"):
            results[f"{key}_{at}"] = found[arm, n, seeds[0]][key]
        results[f"spread_{at}"] = float(np.mean([found[arm, n, seed]["spread"] for seed in seeds]))
    for arm, n in (key for key in whole if key[0].startswith("s_")):
        twins = [key for key in whole if key[0].startswith("fr_") and rule_of(key[0]) == rule_of(arm) and key[1] == n]
        if twins:
            best = max(twins, key=lambda key: values(key[0], key[1], "auc").mean())
            change, half = paired_interval(values(arm, n, "auc") - values(best[0], best[1], "auc"))
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


def draw(run: Run, results: dict[str, Any]) -> None:
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
    bars(run.directory / "quality.png", panels, title, levels)
    if len(found[auc]) > 1:
        lines: dict[str, dict[str, tuple]] = {}
        for rule in FORMS:
            of_rule = lambda arm, rule=rule: arm in ("none", "all_reduce") or rule_of(arm) == rule
            arms = [arm for arm in found[auc][most] if of_rule(arm)]
            lines[f"{rule}: {auc}"] = {arm: curve(found[auc], arm) for arm in arms}
        levels = {label: {"one replica": 0.0} for label in lines}
        plot(run.directory / "quality_over_trainers.png", lines, "trainers", title, True, levels=levels)


def curve(found: Mapping[int, Mapping[str, Any]], arm: str) -> tuple[list, list]:
    """Figures of an arm over the number of trainers: (numbers, figures)."""
    numbers = [n for n in sorted(found) if arm in found[n]]
    return numbers, [found[n][arm] for n in numbers]


def main(config: Config) -> dict:
    """Train the missing arms and return the contents of results.json."""
    size = size_of(config)
    for arm in size.arms:
        script_of(arm, config)
    run = Run("shadowsync_quality", config, config.workdir, config.resume)
    job = QualityJob(config, make_quality_data(config, size))
    arms = [("one_replica", 1, 1)]
    for n, arm in itertools.product(size.trainers, size.arms):
        if arm == "all_reduce" and config.workers > 1:
            continue  # it synchronises all workers in every step, which excludes Hogwild
        arms.append((arm, n, config.workers))
    done = {(row["arm"], row["trainers"], row["workers"], row["seed"]) for row in run.metrics()}
    todo = [(*arm, seed) for seed in range(size.seeds) for arm in arms if (*arm, seed) not in done]
    for arm, n, workers, seed in tqdm(todo, unit="arm", disable=None):
        run.log(job.run("none" if arm == "one_replica" else arm, n, workers, seed) | {"arm": arm})
    results = {"command": command_of("shadowsync_quality", config)} | results_of_arms(run.metrics())
    draw(run, results)
    run.close(results, table(results))
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
