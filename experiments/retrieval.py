"""Train two towers with an in-batch softmax; rank all items, beside popularity, chance and the best possible.

    python experiments/retrieval.py                            3 seeds of three ways, about five minutes
    python experiments/retrieval.py --preset smoke             a minute
    python experiments/retrieval.py --workdir DIR --resume     goes on; what is complete is not trained again

Claim: the correction for how often an item is a negative, log Q (Yi et al., RecSys 2019), ranks better, and OAC gives
the same bits. `corrected` trains with it, `plain` without; `plain_with_share` adds log p of the item when ranking;
`oac` is `corrected` with batches in flight; `teacher` ranks by the true probabilities of the synthetic log. The item of
every test click is ranked among all items, those clicked before included; differences are within seeds, with 95 %
intervals. Result: results/two_cores_cpu/retrieval.json.
"""

from main.signals import Asked, Stopped, stop_on_signals  # isort: skip  first: the imports below take seconds

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats
from main.cli import Figure, Flags, Run, bars, command_line, grid, paired_interval, refuse, say
from main.report import figures, said, scaled
from tqdm import tqdm

from jaxrec.data.synthetic import SyntheticClicks
from jaxrec.embedding import EmbeddingSpec, Lookup, Table, adagrad, embedding_matrix
from jaxrec.loop import keep_memory
from jaxrec.models import Side, in_batch_softmax
from jaxrec.oac import Pipeline
from jaxrec.ranking import gain_of_places, places_of
from jaxrec.task import Task
from jaxrec.types import Batch, TrainState

Way = Literal["corrected", "plain", "oac"]
USER, ITEM, PLACE = range(3)  # columns of the log; the item is in the middle, as the teacher pairs neighbours
WITH_SHARE = "plain_with_share"
BESIDE = ("teacher", "popularity", "chance")
ORDER = ("corrected", "oac", "plain", WITH_SHARE, *BESIDE)
METRICS = ("recall_at_10", "recall_at_100", "ndcg_at_10", "ndcg_at_100", "mrr")
_EXPONENT, _SIGNAL, _BIAS = 0.6, 4.0, -4.0
_QUERIES = 256  # ranked at once, which bounds the memory of the scores


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of retrieval; unset flags follow from the preset."""

    ways: tuple[Way, ...] = ("corrected", "plain", "oac")
    seeds: int | None = None
    examples: int | None = None
    """Clicks of the training set."""
    epochs: int | None = None
    batch_size: int | None = None
    embedding_width: int = 16
    learning_rate: float = 1e-3
    """Learning rate of Adam, for the towers."""
    row_learning_rate: float = 0.1
    """Learning rate of Adagrad, for the rows."""
    temperature: float = 0.1
    window: int = 8
    """Batches in flight, for oac."""
    resume: bool = False
    """Resume the run in --workdir."""


class Size(NamedTuple):
    """Sizes set by a preset."""

    users: int
    items: int
    places: int
    examples: int
    test_clicks: int
    batch_size: int
    epochs: int
    seeds: int


SIZES = {
    "smoke": Size(200, 500, 10, 20_000, 1000, 256, 3, 2),
    "default": Size(2000, 2000, 20, 400_000, 4000, 512, 5, 3),
    "paper": Size(20_000, 20_000, 100, 4_000_000, 4000, 2048, 5, 5),
}


def size_of(config: Config) -> Size:
    """Return the sizes of the preset, overridden by the given flags."""
    given = {name: getattr(config, name) for name in ("seeds", "examples", "epochs", "batch_size")}
    return SIZES[config.preset]._replace(**{name: value for name, value in given.items() if value is not None})


class Clicks(NamedTuple):
    """Log of a seed, and its training and test clicks: i32[n, 3] each, of USER, ITEM and PLACE."""

    log: SyntheticClicks
    train: np.ndarray
    test: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """Clicks on each item in the training set, i64[items]."""
        return np.bincount(self.train[:, ITEM], minlength=self.log.cardinalities[ITEM])

    @property
    def log_share(self) -> np.ndarray:
        """log p of each item, f32[items]; an item without clicks counts as half a click."""
        counts = np.maximum(self.counts, 0.5)
        return np.log(counts / counts.sum()).astype(np.float32)


def clicks_of(size: Size, seed: int) -> Clicks:
    """Draw the clicks of a seed: the first ones of the training and test streams."""
    fields = (size.users, size.items, size.places)
    log = SyntheticClicks(fields, dense_features=0, exponent=_EXPONENT, seed=seed, signal=_SIGNAL, bias=_BIAS)
    return Clicks(log, clicked(log, size.examples), clicked(log, size.test_clicks, test=True))


def clicked(log: SyntheticClicks, n: int, test: bool = False) -> np.ndarray:
    """Return the first n clicks of a log, i32[n, F].

    >>> log = SyntheticClicks((9, 9), 0)
    >>> found = clicked(log, 500)
    >>> found.shape, bool((found[:100] == clicked(log, 100)).all()), bool((found == clicked(log, 500, test=True)).all())
    ((500, 2), True, False)
    """
    found: list[np.ndarray] = []
    for batch in log.stream(8192, test=test):
        found.append(batch.ids[log.lookup][batch.label > 0])
        if sum(map(len, found)) >= n:
            break
    return np.concatenate(found)[:n]


def in_batches(clicks: Clicks, size: int, epochs: int, seed: int) -> Iterator[Batch]:
    """Yield full batches of the training set, reshuffled in each epoch; the dense feature is the item's log p."""
    share, rng = clicks.log_share, np.random.default_rng([seed, 4])
    ones = np.ones(size, np.float32)
    for _ in range(epochs):
        order = rng.permutation(len(clicks.train))
        for first in range(0, len(order) - size + 1, size):
            mine = clicks.train[order[first : first + size]]
            ids = {"query": mine[:, [USER, PLACE]], "item": mine[:, [ITEM]]}
            yield Batch(ids, ones, share[mine[:, [ITEM]]])


class Towers(NamedTuple):
    """Task and tower of a run."""

    task: Task
    side: Side
    config: Config

    def fresh(self, seed: int) -> TrainState:
        """Return the initial state, the same for all ways of a seed."""
        width, keys = self.config.embedding_width, jax.random.split(jax.random.key(seed))
        params = {
            name: self.side.init(key, jnp.zeros((1, fields, width)))
            for (name, fields), key in zip((("query", 2), ("item", 1)), keys, strict=True)
        }
        return self.task.init(params, "host")


def towers_of(config: Config, size: Size, seed: int, corrected: bool) -> Towers:
    """Build spec, towers and loss; without the correction, the loss ignores the items' shares."""
    tables = {name: Table(getattr(size, f"{name}s"), config.embedding_width) for name in ("user", "item", "place")}
    spec = EmbeddingSpec(tables, {"query": Lookup(("user", "place")), "item": Lookup(("item",))}, shards=4, seed=seed)
    side = Side((64, 32))

    def loss(params, activations, batch):
        query: Any = side.apply(params["query"], activations["query"])
        item: Any = side.apply(params["item"], activations["item"])
        share = batch.dense[:, 0] if corrected else None
        return in_batch_softmax(query, item, batch.weight, share, batch.ids["item"][:, 0], config.temperature)

    task = Task(spec, loss, optax.adam(config.learning_rate), adagrad(config.row_learning_rate))
    return Towers(task, side, config)


class Trained(NamedTuple):
    """Result of a training run."""

    state: TrainState
    losses: list  # one per step
    patched_share: float  # share of rows that oac took from a batch in flight, as the fetched ones may be stale


def train(towers: Towers, clicks: Clicks, way: Way, size: Size, seed: int, asked: Asked) -> Trained:
    """Train one way.

    Raises:
      Stopped: a signal arrived.
    """
    options: dict[str, Any] = {"mode": "oac", "window": towers.config.window} if way == "oac" else {"mode": "sync"}
    losses, batches = [], in_batches(clicks, size.batch_size, size.epochs, seed)
    with asked.held(), Pipeline(towers.task, towers.fresh(seed), **options) as pipeline:
        for _, metrics in asked.each(pipeline.run(batches)):
            losses.append(metrics["loss"])
    counted = pipeline.counters
    return Trained(pipeline.state, jax.device_get(losses), counted["patched_rows"] / max(1, counted["rows"]))


def digest(state: TrainState, losses: Sequence) -> str:
    """Return a digest of all rows and slots, dense parameters, optimizer state, and the loss of every step."""
    found = hashlib.sha256(np.asarray(losses, np.float32).tobytes())
    rows = [list(part) for stack in state.tables.spec.stacks for part in state.tables.parts(stack).values()]
    for leaf in jax.tree.leaves((rows, jax.device_get(state.dense))):
        found.update(np.ascontiguousarray(leaf).tobytes())
    return found.hexdigest()


def vectors(towers: Towers, state: TrainState, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return unit vectors: f32[n, D] of queries i32[n, 3], and f32[items, D] of all items."""
    user, place = (
        embedding_matrix(state.tables, *of) for of in (("user", queries[:, USER]), ("place", queries[:, PLACE]))
    )
    apply, params = jax.jit(towers.side.apply), jax.tree.map(lambda leaf: leaf[0], state.dense.params)  # replica 0
    query = apply(params["query"], np.stack([user, place], axis=1))
    return np.asarray(query), np.asarray(apply(params["item"], embedding_matrix(state.tables, "item")[:, None]))


def best_possible(log: SyntheticClicks, queries: np.ndarray) -> np.ndarray:
    """Return log of the probability that an item is shown and clicked, up to a constant: f64[n, items].

    An id is floor(x) - 1, with x drawn from 1 to items + 1 at a density of x^-exponent.
    """
    items, rest = log.cardinalities[ITEM], 1 - log.exponent
    ends = np.arange(1, items + 2) ** rest
    ids = np.repeat(queries[:, None], items, axis=1)
    ids[:, :, ITEM] = np.arange(items)
    ids = ids.reshape(-1, 3)
    none = np.zeros(len(ids), np.float32)
    logit = log.teacher_logit(Batch({log.lookup: ids}, none, weight=none))
    return np.log(np.diff(ends) / (ends[-1] - ends[0])) - np.logaddexp(0, -logit.reshape(-1, items).astype(np.float64))


def ranked(clicks: Clicks, score: Callable[[slice], np.ndarray]) -> dict[str, float]:
    """Return the metrics of the test set, given `score`: slice of the test set -> scores f[n, items]."""
    n = len(clicks.test)
    parts = [slice(first, min(first + _QUERIES, n)) for first in range(0, n, _QUERIES)]
    place = np.concatenate([places_of(score(part), clicks.test[part, ITEM]) for part in parts])
    return dict(gain_of_places(place, at=(10, 100)))


def beside(name: str, clicks: Clicks, seed: int) -> dict[str, float]:
    """Return the metrics of a ranking that is not trained: teacher, popularity or chance."""
    rng, items, test = np.random.default_rng([seed, 5]), clicks.log.cardinalities[ITEM], clicks.test
    scores: dict[str, Callable[[slice], np.ndarray]] = {
        "teacher": lambda part: best_possible(clicks.log, test[part]),
        "popularity": lambda part: np.broadcast_to(clicks.counts, (len(test[part]), items)),
        "chance": lambda part: rng.random((len(test[part]), items)),
    }
    return ranked(clicks, scores[name])


def of_one(config: Config, size: Size, way: Way, clicks: Clicks, seed: int, asked: Asked) -> dict[str, dict[str, Any]]:
    """Train one way of a seed and rank: {way: its row}, the way itself last."""
    towers = towers_of(config, size, seed, corrected=way != "plain")
    state, losses, patched = train(towers, clicks, way, size, seed, asked)
    query, item = vectors(towers, state, clicks.test)
    more = {"last_loss": float(np.mean(losses[-max(1, len(losses) // 10) :])), "digest": digest(state, losses)}
    more |= {"patched_share": patched} if way == "oac" else {}
    score = lambda part: query[part] @ item.T / config.temperature
    found = {WITH_SHARE: ranked(clicks, lambda part: score(part) + clicks.log_share)} if way == "plain" else {}
    return found | {way: ranked(clicks, score) | more}


def summary(rows: list[dict]) -> dict[str, Any]:
    """Return means and deviations over seeds, and differences within seeds.

    >>> alike = {"digest": "a", "patched_share": 0.1}
    >>> rows = [{"seed": s, "way": w} | alike | dict.fromkeys(METRICS, s + 2 * (w == "oac"))
    ...         for s in (0, 1) for w in ("corrected", "oac", "popularity")]
    >>> found = summary(rows)
    >>> found["oac_mrr"], found["oac_minus_popularity_mrr"], found["oac_equals_corrected"], found["seeds"]
    (2.5, 2.0, True, 2)
    """
    of: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        of.setdefault(row["way"], {})[row["seed"]] = row
    seeds = sorted(of["popularity"])
    values = lambda way, metric: np.array([of[way][seed][metric] for seed in seeds])
    results: dict[str, Any] = {"seeds": len(seeds)}
    for way, metric in itertools.product(of, METRICS):
        results[f"{way}_{metric}"] = float(values(way, metric).mean())
        deviation = float(values(way, metric).std(ddof=1)) if len(seeds) > 1 else None
        results[f"{way}_deviation_{metric}"] = deviation
    pairs = [(way, "popularity") for way in of if way not in BESIDE]
    pairs += [("corrected", way) for way in ("plain", WITH_SHARE) if {"corrected", way} <= set(of)]
    for (way, other), metric in itertools.product(pairs, METRICS):
        key = f"{way}_minus_{other}"
        mean, half = paired_interval(values(way, metric) - values(other, metric))
        results |= {f"{key}_{metric}": mean, f"{key}_half_interval_{metric}": half}
    if "oac" in of:
        results["oac_patched_share"] = float(np.mean([of["oac"][seed]["patched_share"] for seed in seeds]))
    if {"corrected", "oac"} <= set(of):
        same = [of["oac"][seed]["digest"] == of["corrected"][seed]["digest"] for seed in seeds]
        results["oac_equals_corrected"] = all(same)
    return results


def table(results: Mapping[str, Any]) -> str:
    """Format all ways as a table."""
    names = {"recall_at_10": "recall@10", "recall_at_100": "recall@100", "ndcg_at_10": "NDCG@10", "mrr": "MRR"}
    columns = {name: f"{{}}_{metric}" for metric, name in names.items()}
    columns |= {"its deviation": "{}_deviation_mrr", "minus popularity": "{}_minus_popularity_mrr"}
    ways = [way for way in ORDER if f"{way}_mrr" in results]
    lines = [f"Means over {results['seeds']} seeds; ranked among all items", grid(results, "way", ways, columns)]
    if "oac_equals_corrected" in results:
        share = f"it took {results['oac_patched_share']:.1%} of its rows from batches in flight"
        lines.append(
            f"oac equals corrected, bit for bit: {'yes' if results['oac_equals_corrected'] else 'NO'}; {share}"
        )
    return "\n".join(lines)


def finding(results: Mapping[str, Any]) -> str:
    """Return the title of the plot: the first trained way beside the best possible and popularity."""
    way = next(way for way in ORDER if f"{way}_mrr" in results)
    recall = lambda name: results[f"{name}_recall_at_10"]
    more = said(scaled(figures(results)[f"{way}_minus_popularity_recall_at_10"], 100))
    return (
        f"{way} ranks {recall(way):.1%} of the clicked items among its first 10, {recall(way) / recall('teacher'):.2f} "
        f"of what is best possible, and {more} points more than popularity (paired). Seeds: {results['seeds']}"
    )


def draw(run: Run, results: Mapping[str, Any]) -> None:
    """Plot recall and MRR of all ways, beside the best possible."""
    ways = [way for way in ORDER if f"{way}_mrr" in results]
    labels = {"recall@10": "recall_at_10", "recall@100": "recall_at_100", "MRR": "mrr"}
    panels = {
        label: {"": {way.replace("_", " "): over_seeds(results, way, metric) for way in ways}}
        for label, metric in labels.items()
    }
    levels = {label: {"best possible": results[f"teacher_{metric}"]} for label, metric in labels.items()}
    bars(run.directory / "retrieval.png", panels, finding(results), levels)


def over_seeds(results: Mapping[str, Any], way: str, metric: str) -> Figure:
    """Return a mean over seeds with its 95 % interval; a single seed has none.

    >>> over_seeds({"seeds": 4, "oac_mrr": 0.5, "oac_deviation_mrr": 0.02}, "oac", "mrr").high.round(4)
    np.float64(0.5318)
    """
    mean, deviation, n = results[f"{way}_{metric}"], results[f"{way}_deviation_{metric}"], results["seeds"]
    if deviation is None:
        return Figure(mean)
    half = scipy.stats.t.ppf(0.975, n - 1) * deviation / n**0.5
    return Figure(mean, mean - half, mean + half)


def run_missing(config: Config, run: Run, size: Size, asked: Asked) -> None:
    """Train and log what the run does not hold yet."""
    done = {(row["seed"], row["way"]) for row in run.metrics()}
    for seed in tqdm(range(config.seed, config.seed + size.seeds), unit="seed", disable=None):
        ways = [way for way in config.ways if (seed, way) not in done]
        others = [way for way in BESIDE if (seed, way) not in done]
        if not ways and not others:
            continue
        clicks = clicks_of(size, seed)
        for name in others:
            run.log({"seed": seed, "way": name} | beside(name, clicks, seed))
        for way in ways:
            for name, row in of_one(config, size, way, clicks, seed, asked).items():
                run.log({"seed": seed, "way": name} | row)
                say(f"seed {seed}, {name}: recall@10 {row['recall_at_10']:.3f}, MRR {row['mrr']:.3f}")


def main(config: Config) -> dict:
    """Train and rank what is missing; return the contents of results.json."""
    size = size_of(config)
    refuse(
        {
            f"--batch-size {size.batch_size} must be at least 2: the other examples are the negatives.": (
                size.batch_size < 2
            ),
            f"--examples {size.examples} must fill a batch, of {size.batch_size}.": size.examples < size.batch_size,
            f"--temperature {config.temperature} must be above 0, such as 0.1.": not 0 < config.temperature < np.inf,
        }
    )
    keep_memory()
    with Run("retrieval", config, config.workdir, config.resume) as run, stop_on_signals() as asked:
        try:
            run_missing(config, run, size, asked)
        except Stopped as stopped:
            again = f"what is complete is logged; go on with --workdir {run.directory} and --resume"
            raise Stopped(stopped.signal, again) from None
        seeds = range(config.seed, config.seed + size.seeds)
        results = summary([row for row in run.metrics() if row["seed"] in seeds])  # the run may hold more seeds
        draw(run, results)
        run.close(results, table(results))
        return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
