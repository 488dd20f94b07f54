"""The click job: a model over embedding tables, and the data it is trained, validated and tested on.

sources.py and learning.py choose them.

    data = synthetic_clicks(scaled_cardinalities(200_000), batch_size=2048, steps=1000, seed=0, test_batches=50)
    job = click_job(data.cardinalities, make_model("dlrm", 16), optax.adam(1e-3), rowwise_adagrad(0.02))
    for batch in data.train(200):  # goes on where a run has stopped after 200 steps
        ...

Steps are counted over all epochs, and a step's batch depends only on the flags, the seed and that count: `train(k)` is
the tail of `train(0)` for every k. The three sets share no row, and neither validation nor test depends on the run's
seed, epochs, shuffling or batch size (except that each seed has its own synthetic log).
"""

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from jaxrec.bounds import whole_number
from jaxrec.data.blocks import keys_of
from jaxrec.data.loader import BlockSource, Loader
from jaxrec.data.synthetic import SyntheticClicks
from jaxrec.embedding import EmbeddingSpec, Lookup, Place, Table, Tables
from jaxrec.task import Task
from jaxrec.types import Batch, RowOptimizer, TrainState
from main.model import Model, as_functions
from main.targets import CLICK, Target, Targets, losses, of_each
from main.widths import initial_projections, projected

DENSE_FEATURES = 13  # of Criteo's logs, and of the synthetic one
TEST_BATCH = 2048  # independent of the batch size: test and validation examples stay the same
_STORAGE = ("block_rows", "blocks_per_shard", "max_bad_rows", "format")  # options that do not divide rows into splits
_ORDER = 4  # random stream, distinct from those of the synthetic log
_WINDOWS_IN_A_ROW = 4  # of a loader, for one of which another trainer may read some rows too


def fields_of(number: int = 26) -> tuple[str, ...]:
    """Return the categorical fields of Criteo's logs, and of the synthetic one: C1, C2 and so on."""
    return tuple(f"C{i + 1}" for i in range(number))


class ClickJob(NamedTuple):
    """A model over embedding tables that predicts clicks or other labels: its task, initial parameters, predictions."""

    task: Task
    init: Callable[[int], Any]  # seed -> dense parameters
    # (params, activations {'sparse': f32[B, F, E]}, batch) -> f32[B], or f32[B, K] of K labels: see `Target.prediction`
    predict: Callable
    stateful: bool = False  # whether a step changes more than the parameters, such as statistics of batch norm
    targets: Targets = CLICK

    @property
    def spec(self) -> EmbeddingSpec:
        """Tables and lookups."""
        return self.task.spec

    def on(self, mesh) -> "ClickJob":
        """Return the job on the devices of a mesh."""
        return self._replace(task=dataclasses.replace(self.task, mesh=mesh))

    def state(self, tables: Tables | Place, seed: int) -> TrainState:
        """Return the initial state: the parameters of a seed over fresh tables, wherever they are placed."""
        return self.task.init(self.init(seed), tables)

    def eval_step(self) -> Callable:
        """As `make_eval_step`."""
        return self.task.eval_step(self.predict)


def click_job(
    cardinalities: Sequence[int],
    model: Any,
    optimizer: optax.GradientTransformation,
    row_optimizer: RowOptimizer,
    width: int = 16,
    shards: int = 8,
    seed: int = 0,
    widths: Mapping[str, int] | None = None,
    dtype: str = "float32",
) -> ClickJob:
    """Build the job of a model over one table per categorical field.

    Args:
      cardinalities: rows of each table: C1, C2 and so on.
      model: (dense f32[B, N], activations f32[B, F, E]) -> logit f32[B], see model.py.
      width: E, of all tables but those in `widths`.
      shards: S, of every table.
      seed: of the initial rows, and of a model that draws numbers.
      widths: {table: width}; rows of another width than E are projected to it, see widths.py.
      dtype: in which the rows are stored.
    """
    fields = fields_of(len(cardinalities))
    own = widths or {}
    tables = {name: Table(rows, own.get(name, width)) for name, rows in zip(fields, cardinalities, strict=True)}
    spec = EmbeddingSpec(tables, {"sparse": Lookup(fields)}, shards, seed, dtype)
    examples = jnp.zeros((1, DENSE_FEATURES)), jnp.zeros((1, len(fields), width))
    inputs = lambda activations, batch: (batch.dense, activations["sparse"])
    return job_of_model(as_functions(model, examples), inputs, spec, optimizer, row_optimizer, width)


def job_of_model(
    model: Model,
    inputs: Callable[[Any, Batch], tuple],
    spec: EmbeddingSpec,
    optimizer: optax.GradientTransformation,
    row_optimizer: RowOptimizer,
    width: int,
    targets: Targets = CLICK,
) -> ClickJob:
    """Build the job of a model whose inputs are a function of activations of width E and batch.

    Raises:
      ValueError: the model has not one output for each of the targets.
    """
    if model.shape != (len(targets),) and (model.shape or len(targets) > 1):
        raise ValueError(
            f"the model has outputs of shape {['B', *model.shape]} for {len(targets)} labels "
            f"({', '.join(one.name for one in targets)}): give --model shared_bottom or mmoe, or one of your own that "
            f"returns f32[B, {len(targets)}]."
        )

    def predict(params, activations, batch):
        outputs = model.predict(params, *inputs(projected(spec, params, activations), batch))
        return of_each(targets, outputs, Target.prediction)

    def loss_of(params, activations, batch, rng=None):
        # What pads a batch is left out of the statistics of a model; a batch of padding alone would have none.
        counts = (batch.weight > 0) | (batch.weight.sum() == 0) if model.changes else None
        outputs, variables = model.train(params, counts, rng, *inputs(projected(spec, params, activations), batch))
        found = losses(targets, outputs, batch.label)
        return (found, {}, variables) if model.changes else found

    def loss(params, activations, batch):
        return loss_of(params, activations, batch)

    def random_loss(params, activations, batch, *, rng):
        return loss_of(params, activations, batch, rng)

    if model.random:
        task = Task(spec, random_loss, optimizer, row_optimizer, seed=spec.seed)
    else:
        task = Task(spec, loss, optimizer, row_optimizer)
    init = lambda seed: model.init(seed) | initial_projections(spec, width, seed)
    return ClickJob(task, init, predict, model.changes, targets)


class Data(NamedTuple):
    """Data of a run: its sizes, and iterators over training, test and validation batches."""

    cardinalities: tuple[int, ...]  # rows of each table
    batch_size: int
    steps: int  # over all epochs
    epoch_steps: int
    epoch_examples: int
    train: Callable[[int], Iterator[Batch]]  # first step -> the batches from there on
    test: Callable[[], Iterator[Batch]]
    validation: Callable[[], Iterator[Batch]] | None = None  # if any rows are held out
    vocabulary_digest: str | None = None  # of the mapping from categories to rows
    division: Mapping[str, Any] | None = None  # what divides the rows of files into training and test, as JSON
    expectation: str = ""  # result to expect, in words
    table: Mapping[str, Any] | None = None  # metadata of a prepared table
    best: dict[str, float] = {}  # noqa: RUF012  metrics of the teacher, if there is one; never changed
    targets: Targets = CLICK
    # (column that the schema calls a key, 'test' or 'validation') -> its value in each row, S[n]
    keys: Callable[[str, str], np.ndarray] | None = None
    batches_in_a_row: int = 1  # that one of several trainers takes: enough that it seldom reads rows of another
    before: "Data | None" = None  # the data whose steps come first; those of `epoch_steps` come after them

    def examples_after(self, step: int) -> int:
        """Return the number of examples trained after `step` steps; the last batch of an epoch may be padded."""
        earlier = 0
        if self.before is not None:
            if step <= self.before.steps:
                return self.before.examples_after(step)
            step, earlier = step - self.before.steps, self.before.examples
        epochs, rest = divmod(step, self.epoch_steps)
        return earlier + epochs * self.epoch_examples + min(rest * self.batch_size, self.epoch_examples)

    def after(self, before: "Data") -> "Data":
        """Return these data with the steps of others before them; validation and test are of these alone."""
        steps = before.steps + self.steps

        def train(first):
            whole_number("first", first, 0, steps, ", the steps of the run")
            parts = [before.train(first)] if first < before.steps else []
            return itertools.chain(*parts, self.train(max(0, first - before.steps)))

        return self._replace(steps=steps, train=train, before=before)

    @property
    def examples(self) -> int:
        """Training examples of the whole run."""
        return self.examples_after(self.steps)


def synthetic_clicks(
    cardinalities: tuple[int, ...],
    batch_size: int,
    steps: int,
    seed: int,
    test_batches: int,
    test_batch_size: int = TEST_BATCH,
    epochs: int = 1,
    shuffle: bool = False,
    curved: float = 0.0,
    exponent: float = 1.05,
) -> Data:
    """Build training batches of the synthetic click log, and disjoint ones for validation and test.

    Args:
      steps: steps of one epoch.
      test_batches: number of test batches, and of validation batches.
      test_batch_size: batch size of both.
    """
    _check_steps(steps, batch_size)
    clicks = SyntheticClicks(cardinalities, exponent=exponent, seed=seed, curved=curved)
    epochs = whole_number("epochs", epochs)

    def batches(epoch, first):
        order = np.random.default_rng([seed, _ORDER, epoch]).permutation(steps) if shuffle else range(steps)
        return (clicks.batch(int(index), batch_size) for index in order[first:])

    return Data(
        clicks.cardinalities,
        batch_size,
        epochs * steps,
        steps,
        steps * batch_size,
        _over_epochs(steps, epochs * steps, batches),
        lambda: clicks.stream(test_batch_size, batches=test_batches, test=True),
        lambda: clicks.stream(test_batch_size, batches=test_batches, validation=True),
    )


def division_of(metadata: Mapping[str, Any]) -> tuple[list, dict[str, Any]]:
    """Return what divides the rows of a prepared directory, given its metadata: its texts in order, and its options."""
    options = {name: value for name, value in metadata["options"].items() if name not in _STORAGE}
    return metadata.get("texts", []), options


def division_told(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return `division_of` as JSON values to save: the texts, and a digest of the options.

    Of those of a schema only the split, and what makes rows valid: with other keys the rows are divided alike.
    """
    texts, options = division_of(metadata)
    if "schema" in options:
        options = {name: options["schema"].get(name) for name in ("split", "label", "weight", "missing")}
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:16]
    return {"texts": texts, "options": digest}


def criteo_clicks(directory: Path, *sizes: int | None, **how: Any) -> Data:
    """Build batches of prepared Criteo rows, as `data_of_blocks`; validation is held out as the test set was."""
    from jaxrec.data.criteo import open_split

    split, test = open_split(directory, "train"), open_split(directory, "test")
    data = data_of_blocks(split, test, None, *sizes, at_random=split.metadata["options"]["split"] == "random", **how)
    return data._replace(
        cardinalities=tuple(split.metadata["cardinalities"]), vocabulary_digest=_digest_of(directory),
        division=division_told(split.metadata),
    )  # fmt: skip


def criteo_of_seeds(paths: Sequence[Path], seed: int, *sizes: int | None, **how: Any) -> Callable[[int], Data]:
    """Return k -> the data of the k-th run of a study, which take several preparations in turn, from that of `seed` on.

    With `prepare.py --split random --seed 0`, 1 and so on, each has a test set of its own.

    Args:
      paths: directories of prepare.py with the same tables.
      sizes, how: as `criteo_clicks`.
    """
    each = [criteo_clicks(path, *sizes, **how) for path in paths]
    if len({data.cardinalities for data in each}) > 1:
        raise ValueError(
            "the directories of --path differ in their tables' rows: prepare all with the same --hash-cap."
        )
    return lambda number: each[(seed + number) % len(each)]


def data_of_blocks(
    split: BlockSource,
    test: BlockSource,
    validation: BlockSource | None,
    batch_size: int | None = None,
    steps: int | None = None,
    *,
    examples: int | None = None,
    padded: bool = True,
    epochs: int = 1,
    shuffle_seed: int | None = None,
    validation_fraction: float = 0.0,
    at_random: bool = False,
) -> Data:
    """Build batches of blocks of rows; the caller adds the cardinalities.

    Args:
      validation: validation rows; None to hold out training rows, or for none.
      batch_size: None to choose by the number of rows.
      steps: limit over all epochs.
      examples: limit per epoch; the first ones are kept.
      padded: whether to pad an incomplete last batch of an epoch, or to drop it.
      shuffle_seed: None for file order; else each epoch has its own order.
      validation_fraction: share of the training rows held out for validation: the last ones, or random ones.
      at_random: whether to hold out random rows.
    """
    # One pass over few rows needs many small steps: AUC 0.69-0.75 with 2,048, 0.756 with 128.
    batch_size = batch_size or (128 if sum(split.rows) < 1_000_000 else 2048)
    source: BlockSource = split
    if validation_fraction:
        source, validation = _validated(split, validation_fraction, at_random)
    if examples is not None and examples < sum(source.rows):
        source, _ = set_apart(source, sum(source.rows) - examples)
    rows = sum(source.rows)
    epoch_steps = -(-rows // batch_size) if padded else rows // batch_size
    total = min(epoch_steps * whole_number("epochs", epochs), steps or math.inf)
    _check_steps(total, batch_size)

    def loader():
        return Loader(source, batch_size, shuffle_seed=shuffle_seed, epochs=None)

    def batches(epoch, first):
        (opened := loader()).seek(epoch * opened.batches_per_epoch + first)
        return iter(opened)

    return Data(
        (),
        batch_size,
        int(total),
        epoch_steps,
        min(rows, epoch_steps * batch_size),
        _over_epochs(epoch_steps, int(total), batches),
        lambda: iter(Loader(test, TEST_BATCH)),
        None if validation is None else lambda: iter(Loader(validation, TEST_BATCH)),
        keys=lambda name, which: keys_of(validation if which == "validation" else test, name),
        batches_in_a_row=max(1, _WINDOWS_IN_A_ROW * loader().window_rows // batch_size),
    )


class Part:
    """Some rows of each block of a source.

    Args:
      source: all blocks.
      counts: number of rows to keep of each block; a block with none is skipped and never read.
      chosen: block number -> indices of the rows to keep.

    Attributes:
      rows: number of rows of each remaining block.
    """

    def __init__(self, source: BlockSource, counts: list[int], chosen: Callable[[int], np.ndarray]):
        self._source, self._chosen = source, chosen
        self._blocks = [block for block, rows in enumerate(counts) if rows]
        self.rows = [counts[block] for block in self._blocks]

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        block = self._blocks[index]
        rows = self._chosen(block)
        return {key: _chosen(column, rows) for key, column in self._source[block].items()}


def set_apart(source: BlockSource, rows: int, seed: int | None = None) -> tuple[Part, Part]:
    """Split a source into the remaining rows and `rows` held-out ones, both in the order of the source.

    Args:
      source: blocks whose columns are arrays.
      rows: number of rows to hold out, from 0 to all.
      seed: None to hold out the last ones; else random ones, an equal share of every block.

    >>> class TwoBlocks:
    ...     rows = [3, 2]
    ...     def __getitem__(self, index):
    ...         return {"label": np.array([[10, 11, 12], [13, 14]][index])}
    >>> most, last = set_apart(TwoBlocks(), 3)
    >>> most.rows, last.rows, last[0]["label"].tolist(), last[1]["label"].tolist()
    ([2], [1, 2], [12], [13, 14])
    """
    sizes = [int(size) for size in source.rows]
    total = sum(sizes)
    whole_number("rows", rows, 0, total, ", as many as the source has")
    taken, start = [], 0
    for size in sizes:
        end = start + size
        if seed is None:
            taken.append(min(max(end - (total - rows), 0), size))
        else:  # in integers, so that the shares sum to exactly `rows`
            taken.append(end * rows // max(total, 1) - start * rows // max(total, 1))
        start = end

    def order(block):
        return (
            np.arange(sizes[block]) if seed is None else np.random.default_rng([seed, block]).permutation(sizes[block])
        )

    left = [size - apart for size, apart in zip(sizes, taken, strict=True)]
    return (
        Part(source, left, lambda block: np.sort(order(block)[: left[block]])),
        Part(source, taken, lambda block: np.sort(order(block)[left[block] :])),
    )


def _digest_of(directory: Path) -> str | None:
    """Return the digest of a vocabulary; None if it is missing, as training does not need it."""
    from jaxrec.data.criteo import open_encoder

    try:
        return open_encoder(directory).digest
    except ValueError:
        return None


def _validated(split: BlockSource, fraction: float, at_random: bool) -> tuple[BlockSource, BlockSource]:
    """Split training rows into those to train on and those to validate on."""
    rows = sum(split.rows)
    apart = int(rows * fraction) if 0 < fraction < 1 else 0
    if not 0 < apart < rows:
        raise ValueError(
            f"validation_fraction={fraction} of the {rows} training rows is {apart} rows: it must leave some to train "
            "and some to validate, between 0 and 1."
        )
    # Held out as the preparation held out the test rows, so that validation predicts the test, and independent of the
    # run's seed. The vocabulary has counted these rows, which leaks a little.
    return set_apart(split, apart, seed=0 if at_random else None)


def _over_epochs(epoch_steps: int, steps: int, batches: Callable[[int, int], Iterator[Batch]]):
    """Build `Data.train` from `batches`: (epoch, its first step) -> the batches from there on."""

    def train(first: int) -> Iterator[Batch]:
        whole_number("first", first, 0, steps, ", the steps of the run")
        return generate(first)

    def generate(step):
        while step < steps:
            epoch, first = divmod(step, epoch_steps)
            count = min(epoch_steps - first, steps - step)
            yield from itertools.islice(batches(epoch, first), count)
            step += count

    return train


def _check_steps(steps, batch_size):
    if steps < 1:
        raise ValueError(f"there are not examples enough for one batch of {batch_size}: give more, or smaller batches.")


def _chosen(column, rows):
    """Return rows of a column, or of each column of a mapping, such as the ids of several lookups."""
    if isinstance(column, Mapping):
        return {key: each[rows] for key, each in column.items()}
    return column[rows]
