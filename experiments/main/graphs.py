"""Link prediction of one's own or a generated graph: flags, the job that they describe, and its filtered ranks."""

import dataclasses
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
from tqdm import tqdm

from jaxrec.callbacks import StepInfo
from jaxrec.data.neighbours import BAG, Neighbours, SubgraphBatches, stacked
from jaxrec.data.triple_files import load_triples
from jaxrec.data.triples import (
    KnownTails,
    TripleBatches,
    Triples,
    both_directions,
    generate_power_law,
    generate_triples,
)
from jaxrec.embedding import EmbeddingSpec, Lookup, Table, adagrad, embedding_matrix
from jaxrec.embedding.tables import initial_rows
from jaxrec.engine import Engine
from jaxrec.models.graph_sage import encode, init_encoder, make_link_loss
from jaxrec.models.link_prediction import (
    COMPLEX,
    DISTMULT,
    ROTATE,
    TRANSE,
    Model,
    filtered_ranks,
    make_loss,
    ranking_metrics,
)
from jaxrec.step import make_eval_step
from jaxrec.task import Task
from jaxrec.types import Batch, TrainState
from main.cli import Flags, Run, refuse, say, unread

ModelName = Literal["distmult", "complex", "transe", "rotate"]
MODELS: dict[ModelName, Model] = {"distmult": DISTMULT, "complex": COMPLEX, "transe": TRANSE, "rotate": ROTATE}
_ENCODED_AT_ONCE = 1 << 14


@dataclasses.dataclass(frozen=True)
class GraphFlags(Flags):
    """Flags of link prediction; unset flags follow from the preset."""

    path: Path | None = None
    """Triples: a directory of OpenKE's {train,valid,test}2id.txt, or of tables {train,valid,test}.{tsv,txt,parquet} of
    head, relation and tail; or one such table. By default a small graph of clusters is generated."""
    entities: int | None = None
    """Generate a graph of this many entities whose degrees follow a power law, and which teach nothing: to
    measure speeds."""
    model: ModelName = "complex"
    encoder: Literal["none", "graph_sage"] = "none"
    """What scores are made of: a row for each entity, or the vectors of a graph network over these rows."""
    layers: int = 1
    """Layers of the graph network."""
    fanout: int | None = None
    """Neighbours drawn for each node and layer of the graph network; by default all."""
    rank: int | None = None
    """Coordinates of an entity; a complex one (complex, rotate) takes two floats."""
    batch_size: int | None = None
    """Queries; each triple gives two, one for its tail and one for its head."""
    negatives: int | None = None
    """Entities drawn for each group of a batch."""
    groups: int = 1
    """Groups of a batch, which share their negatives."""
    by_degree: float = 0.0
    """Share of the negatives that are drawn by their degree, not uniformly."""
    epochs: int | None = None
    learning_rate: float = 0.1
    """Of Adagrad, for rows and parameters."""
    decay: bool = True
    """Lower the learning rate linearly to 0."""
    n3: float | None = None
    """Weight of the N3 penalty: by default 0.05, and 0 with a graph network, whose vectors it draws to 0."""
    initial_scale: float = 0.01
    """Initial embeddings are uniform between minus and plus this."""
    initial_relation: float = 0.0
    """Added to the initial embeddings of relations."""
    shards: int = 8
    valid_triples: int = 2000
    """Number of validation triples ranked after each epoch."""


class Size(NamedTuple):
    """Sizes that a preset sets."""

    rank: int
    batch_size: int
    negatives: int
    epochs: int
    generated: dict[str, int]  # arguments of `generate_triples`, used without --path


SIZES = {
    "smoke": Size(32, 256, 128, 20, {"entities": 400, "relations": 8, "clusters": 40, "tails": 5}),
    "default": Size(128, 1024, 1024, 10, {"entities": 4000, "relations": 16, "clusters": 400, "tails": 5}),
    "paper": Size(1000, 1024, 4096, 50, {"entities": 4000, "relations": 16, "clusters": 400, "tails": 5}),
}


def size_of(config: GraphFlags) -> Size:
    """Return the sizes of the preset, overridden by flags that were given."""
    given = {name: getattr(config, name) for name in ("rank", "batch_size", "negatives", "epochs")}
    return SIZES[config.preset]._replace(**{name: value for name, value in given.items() if value is not None})


def triples_of(config: GraphFlags) -> Triples:
    """Read or generate the graph, and say what it holds."""
    triples = _read(config)
    say("\n".join(described(triples)))
    return triples


def described(triples: Triples) -> list[str]:
    """Return lines on the sizes of a graph, and on what makes ranks of its test triples say little.

    >>> trained, tested = np.array([[0, 0, 1], [2, 0, 0]]), np.array([[0, 0, 1], [0, 0, 2], [3, 0, 1]])
    >>> for line in described(Triples(trained, tested[:1], tested, 4, 1)): print(line)
    2 training triples, 1 for validation, 3 for the test; 4 entities, 1 relations
    note: in no training triple, so without vectors of their own: 1 entities and 0 relations
    warning: of the test triples 33.3 % are in training too, and 33.3 % as their reverse by the same relation
    """
    train, valid, test = triples[:3]
    lines = [
        f"{len(train)} training triples, {len(valid)} for validation, {len(test)} for the test; {triples.entities} "
        f"entities, {triples.relations} relations"
    ]
    left = [_unused(n, train[:, ids]) for n, ids in ((triples.entities, [0, 2]), (triples.relations, [1]))]
    if any(left):
        lines.append(
            f"note: in no training triple, so without vectors of their own: {left[0]} entities and {left[1]} relations"
        )
    shares = [100 * _share_of(rows, train) for rows in (test, test[test[:, 0] != test[:, 2], ::-1])]
    if any(shares):
        lines.append(
            f"warning: of the test triples {shares[0]:.1f} % are in training too, and {shares[1]:.1f} % as their "
            "reverse by the same relation"
        )
    return lines


def _unused(number, ids):
    unused = np.ones(number, bool)
    unused[ids] = False
    return int(unused.sum())


def _share_of(rows, others):
    """Return the share of rows i32[n, 3] that are among others."""
    some = others[np.isin(others[:, 0], rows[:, 0]) & np.isin(others[:, 2], rows[:, 2])]  # of large graphs few
    number = np.unique(np.concatenate([rows, some]), axis=0, return_inverse=True)[1].reshape(-1)
    return float(np.isin(number[: len(rows)], number[len(rows) :]).mean()) if len(rows) else 0.0


def check_same_graph(run: Run, config: GraphFlags, triples: Triples) -> None:
    """Refuse to go on with a run whose rows stand for other entities: its files have changed since it began."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (*triples[:3], np.array([triples.entities, triples.relations])):
        digest.update(np.ascontiguousarray(part))
    for names in triples.names:
        digest.update(names.tobytes())
    before, now = run.read_json("graph.json"), {"digest": digest.hexdigest()}
    earlier = not before and config.path is not None and config.path.is_file()  # which split tables otherwise
    if run.resumed and (earlier or before not in ({}, now)):
        raise ValueError(
            f"{run.directory} was begun {'by an earlier version, ' * earlier}with another graph than its files have "
            "now: bring that one back, or begin anew in another --workdir."
        )
    run.write_json("graph.json", now)


def _read(config):
    refuse({"--path and --entities name two graphs: give one of them.": None not in (config.path, config.entities)})
    if config.entities is not None:
        return generate_power_law(config.entities, 16, 10 * config.entities, seed=config.seed)
    if config.path is None:
        return generate_triples(**size_of(config).generated, seed=config.seed)
    return load_triples(config.path, config.seed)


def settled(config: Any) -> Any:
    """Return the flags with the N3 penalty that they mean."""
    return dataclasses.replace(config, n3=_n3_of(config))


def _n3_of(config):
    if config.n3 is not None:
        return config.n3
    return 0.0 if config.encoder == "graph_sage" else 0.05


class LinkJob(NamedTuple):
    """The parts of a run."""

    task: Task
    model: Model
    batches: TripleBatches | SubgraphBatches
    batch_size: int
    batches_per_epoch: int
    steps: int
    params: dict
    entities: Callable[[TrainState], np.ndarray]  # vectors of all entities, f32[N, D]
    triples: Triples
    known: KnownTails

    def ranks(self, state: TrainState, triples: np.ndarray) -> dict[str, float]:
        """Return filtered MRR and Hits@k of triples i32[n, 3], in both directions."""
        queries, relations = both_directions(triples, self.triples.relations), state.dense.params["relation"][0]
        ranks = filtered_ranks(self.model, self.entities(state), relations, queries, self.known.pairs, chunk=256)
        return ranking_metrics(ranks)


def make_link_job(config: GraphFlags, triples: Triples) -> LinkJob:
    """Build task, batches and initial parameters from the flags."""
    size, model = size_of(config), MODELS[config.model]
    is_complex, networked = model in (COMPLEX, ROTATE), config.encoder == "graph_sage"
    width = size.rank * (2 if is_complex else 1)
    refuse(
        {f"--groups {config.groups} must divide --batch-size {size.batch_size}.": bool(size.batch_size % config.groups)}
        | unread(config, {"--encoder graph_sage": (networked, ("layers", "fanout"))})
    )
    names = ("node",) if networked else ("head", "tail", "negative")
    lookups = {name: Lookup("entity") for name in names}
    lookups |= {"neighbour": Lookup("entity", hots=BAG)} if networked else {}
    table = Table(triples.entities, width, config.initial_scale)
    spec = EmbeddingSpec({"entity": table}, lookups, shards=config.shards, seed=config.seed)
    batches = TripleBatches(
        both_directions(triples.train, triples.relations), triples.entities, size.batch_size, size.negatives,
        config.groups, config.seed, config.by_degree,
    )  # fmt: skip
    steps = size.epochs * batches.batches_per_epoch
    rate = optax.linear_schedule(config.learning_rate, 0.0, steps) if config.decay else config.learning_rate
    # Adagrad with an initial accumulator of 0, as for the rows; optax.adagrad's default is 0.1.
    optimizer = optax.chain(optax.scale_by_rss(0.0, eps=1e-16), optax.scale_by_learning_rate(rate))
    relations, seed = np.arange(2 * triples.relations), config.seed ^ 0x5EED
    phases = model is ROTATE
    start = initial_rows(relations, size.rank if phases else width, np.pi if phases else config.initial_scale, seed)
    params: dict = {"relation": start + np.float32(config.initial_relation)}
    loss, entities = make_loss(model, _n3_of(config)), lambda state: embedding_matrix(state.tables, "entity")
    stream: TripleBatches | SubgraphBatches = batches
    if networked:
        params["encoder"] = init_encoder(jax.random.key(config.seed), [width] * (config.layers + 1))
        neighbours = Neighbours.of(triples.train[:, 0], triples.train[:, 2], triples.entities)
        fanouts = (config.fanout,) * config.layers
        loss, stream = make_link_loss(loss), SubgraphBatches(batches, neighbours, fanouts)
        entities = encoder_of(spec, neighbours, fanouts)
    task = Task(spec, loss, optimizer, adagrad(rate))
    counts = batches.batch_size, batches.batches_per_epoch, steps
    return LinkJob(task, model, stream, *counts, params, entities, triples, KnownTails.of(triples))


def encoder_of(
    spec: EmbeddingSpec, neighbours: Neighbours, fanouts: tuple[int | None, ...]
) -> Callable[[TrainState], np.ndarray]:
    """Return the vectors f32[N, D] of all entities by a graph network, each from the same sample of its neighbours."""
    step = make_eval_step(spec, lambda params, *given: encode(params["encoder"], *given))
    nodes = len(neighbours.starts) - 1

    def encoded(state):
        found = []
        for first in range(0, nodes, _ENCODED_AT_ONCE):
            targets = np.arange(first, min(first + _ENCODED_AT_ONCE, nodes), dtype=np.int32)
            ids, layers = stacked([neighbours.sample(targets, fanouts)])
            vectors = step(state, Batch(ids, {"layers": layers}, weight=np.ones(1, np.float32)))
            found.append(np.asarray(vectors)[0, : len(targets)])
        return np.concatenate(found)

    return encoded


class LinkRecorder:
    """Callbacks of a run: progress, and an epoch's rates and validation ranks, which are logged.

    Args:
      job: the run.
      valid_triples: number of validation triples ranked.
      engine: Engine, whose rows are at rest when they are ranked.
      log: takes each epoch's row.
      name: of the run, in the progress bar and in each row as `mode`; none if empty.
      past: what `so_far` of the run that goes on has given; at the start of an epoch its `seconds` are enough.
    """

    def __init__(
        self, job: LinkJob, valid_triples: int, engine: Engine, log: Callable[[dict], None], name: str = "",
        past: dict[str, Any] | None = None,
    ):  # fmt: skip
        self.job, self.engine, self.log, self.name = job, engine, log, name
        # A fixed seed: the same triples in every run.
        self.valid = np.random.default_rng(0).permutation(job.triples.valid)[:valid_triples]
        done = engine.step * job.batch_size
        self.bar = tqdm(
            total=job.steps * job.batch_size, initial=done, unit="ex", unit_scale=True, disable=None, desc=name or None
        )
        none: dict[str, Any] = {"losses": [], "ranked_step": engine.step, "seconds": 0.0, "seconds_of_epoch": 0.0}
        past = none | (past or {})
        self.losses: list = list(past["losses"])
        self.seen_step, self.ranked_step = engine.step, past["ranked_step"]
        self.seconds, self.since = past["seconds"], time.perf_counter() - past["seconds_of_epoch"]

    def so_far(self) -> dict[str, Any]:
        """Return what a run in the middle of an epoch has to save to go on, as JSON values."""
        seconds, losses = time.perf_counter() - self.since, [float(loss) for loss in self.losses]
        return {
            "losses": losses, "ranked_step": self.ranked_step, "seconds": self.seconds, "seconds_of_epoch": seconds
        }  # fmt: skip

    def show(self, info: StepInfo) -> None:
        """Advance the bar after a step; reads the loss only every 20 steps, so that the device can run ahead."""
        self.bar.update((info.step - self.seen_step) * self.job.batch_size)
        self.seen_step = info.step
        self.losses.append(info.metrics["loss"])
        if info.step % 20 == 0:
            self.bar.set_postfix(loss=f"{float(self.losses[-1]):.3f}", refresh=False)

    def rank(self, info: StepInfo) -> None:
        """Rank validation triples after an epoch; not counted as training time."""
        jax.block_until_ready(info.metrics)
        self.engine.at_rest(lambda tables: self._rank(info, tables))

    def _rank(self, info, tables):
        seconds = time.perf_counter() - self.since
        self.seconds += seconds
        epoch = info.step // self.job.batches_per_epoch
        row: dict = {"mode": self.name} if self.name else {}
        row |= {"epoch": epoch, "step": info.step, "train_seconds": self.seconds}
        row |= {"examples_per_s": (info.step - self.ranked_step) * self.job.batch_size / seconds}
        row |= {"train_loss": float(np.mean(jax.device_get(self.losses)))}
        found = self.job.ranks(info.state._replace(tables=tables), self.valid)
        row |= {f"valid_{key}": value for key, value in found.items()}
        self.log(row)
        say(
            f"{self.name + ', ' if self.name else ''}epoch {epoch}: loss {row['train_loss']:.3f}, "
            f"valid MRR {row['valid_mrr']:.4f}"
        )
        self.losses, self.ranked_step, self.since = [], info.step, time.perf_counter()
