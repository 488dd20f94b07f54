"""Small runs as train.py leaves them, for tests that use a trained run."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import optax
from criteo_files import criteo_lines, write_lines
from main.click_data import click_job, criteo_clicks, synthetic_clicks
from main.config import Config, Kinds, config_of
from main.model import make_model
from main.run_dir import flat
from main.sources import Tabular
from main.table_data import table_job
from main.table_summary import open_schema

from jaxrec import Serial
from jaxrec.checkpoint import Checkpointer
from jaxrec.data.criteo import open_encoder, prepare
from jaxrec.data.tabular import prepare as prepare_table
from jaxrec.embedding import adagrad


def changed(config: Config, **flags) -> Config:
    """The configuration with other flags, without those that its parts no longer have then."""
    before, kinds = flat(config), {field.name for field in dataclasses.fields(Kinds)}
    left = flat(config_of(**{name: value for name, value in (before | flags).items() if name in kinds}))
    return config_of(**{name: value for name, value in before.items() if name in left} | flags)


DENSE, ROWS = optax.adam(0.01), adagrad(0.1)
STEPS = 3


def without_labels(lines):
    return [line.partition("\t")[2] for line in lines]


def job_for(data, width=4, shards=3):
    return click_job(data.cardinalities, make_model("small_dlrm", width), DENSE, ROWS, width, shards, seed=0)


def train_run(directory: Path, data, flags, extra=None, trained=True, job=None):
    """Train a few steps, or none, and save the last state; return the job and the state."""
    job = job or job_for(data)
    state = job.state("host", seed=0)
    if trained:
        state = Serial(job.task, state).train(data.train(0))
    directory.mkdir()
    config = {"experiment": "train", "model": "small_dlrm", "seed": 0, "path": [], "run": "a" * 16}
    config |= {"embedding_width": 4, **flags}
    (directory / "config.json").write_text(json.dumps(config))
    with Checkpointer(directory / "checkpoints", run="a" * 16) as checkpointer:
        checkpointer.save(state, extra)
    return job, state


def criteo_run(directory: Path, rows=240, noted=True, trained=True, **options):
    """A run over prepared rows: (directory, lines, job, state)."""
    lines = criteo_lines(rows)
    prepared = directory / "prepared"
    prepare([write_lines(directory / "train.txt", lines)], prepared, **(options or {"min_count": 3}))
    data = criteo_clicks(prepared, batch_size=32, steps=STEPS)
    extra = {"vocabulary_digest": open_encoder(prepared).digest} if noted else {}
    job, state = train_run(directory / "run", data, {"data": "criteo", "path": [str(prepared)]}, extra, trained)
    return directory / "run", lines, job, state


def synthetic_run(directory: Path, trained=True):
    """A run over synthetic clicks with test examples in its log: (directory, job, state, data)."""
    log = {"curved": 0.3, "exponent": 0.7}
    data = synthetic_clicks((9,) * 26, batch_size=64, steps=STEPS, seed=0, test_batches=2, **log)
    job, state = train_run(directory / "run", data, {"data": "synthetic", **log}, trained=trained)
    (directory / "run" / "metrics.jsonl").write_text('{"step": 3, "test_examples": 4096}\n{"step": 4, "te')
    return directory / "run", job, state, data


SCHEMA = """
from jaxrec.data.tabular import *
schema = Schema(
    label="click", split=ByTime("hour", train=0.8),
    features=[Categorical("user"), Categorical("item"), Sequence("seen", last=3, share="item"),
              Dense("price", log=True, standardise=True), Dense("age", buckets=(18, 30)), MultiHot("tag", hash_cap=9)],
)
"""


def table_lines(rows, seed=0):
    """A CSV with ids of which some are rare, and missing values."""
    draw, maybe = np.random.default_rng(seed), lambda value: value if draw.random() < 0.9 else ""
    yield "click,user,item,seen,price,age,tag,hour"
    for row in range(rows):
        user, item, *seen = np.floor(draw.pareto(1.0, 5) * 3).astype(int).clip(0, 999)
        age, price = draw.integers(10, 50), draw.integers(1, 9)
        seen = "|".join(map(str, seen))
        fields = (
            int(draw.random() < 0.4),
            maybe(f"u{user}"),
            item,
            maybe(seen),
            maybe(price),
            maybe(age),
            maybe("a|b"),
            row,
        )
        yield ",".join(map(str, fields))


def tabular_run(directory: Path, model="lr", trained=True, rows=300, widths=None):
    """A run over a prepared table, of which the last fifth is for the test: (directory, job, features of the table)."""
    (directory / "schema.py").write_text(SCHEMA)
    prepared, schema = directory / "prepared", open_schema(str(directory / "schema.py"))
    metadata = prepare_table([write_lines(directory / "a.csv", table_lines(rows))], prepared, schema)
    data = Tabular(path=(prepared,), batch_size=64, steps=STEPS).open(seed=0)
    job = table_job(data.table, make_model(model, 4), DENSE, ROWS, 4, 3, widths=widths)
    config = {"data": "tabular", "path": [str(prepared)], "model": model}
    train_run(directory / "run", data, config, {"vocabulary_digest": data.vocabulary_digest}, trained, job)
    return directory / "run", job, metadata["table"]["features"]
