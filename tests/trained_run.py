"""Small runs as train.py leaves them, for tests that use a trained run."""

import json
from pathlib import Path

import numpy as np
import optax
from main.click_data import click_job, criteo_clicks, make_model, synthetic_clicks

from jaxrec.checkpoint import Checkpointer
from jaxrec.data.criteo import open_encoder, prepare
from jaxrec.embedding import HostTables, adagrad
from jaxrec.loop import fit, planned

DENSE, ROWS = optax.adam(0.01), adagrad(0.1)
STEPS = 3


def criteo_lines(rows, seed=0):
    """Well-formed lines with few categories and some empty fields."""
    draw = np.random.default_rng(seed)
    for _ in range(rows):
        dense = [str(x) if x else "" for x in draw.integers(-3, 50, 13)]
        category = [f"{x * 7919:08x}" if x else "" for x in draw.integers(0, 9, 26)]
        yield "\t".join([str(int(draw.random() < 0.3)), *dense, *category])


def write_lines(path, lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def without_labels(lines):
    return [line.partition("\t")[2] for line in lines]


def job_for(data, width=4, shards=3):
    return click_job(data.cardinalities, make_model("small_dlrm", width), DENSE, ROWS, width, shards, seed=0)


def train_run(directory: Path, data, flags, extra=None, trained=True):
    """Train a few steps, or none, and save the last state; return the job and the state."""
    job = job_for(data)
    state = job.state(HostTables.create(job.spec, job.row_optimizer), seed=0)
    if trained:
        state = fit(state, planned(job.spec, data.train(0)), job.train_step())
    directory.mkdir()
    config = {"experiment": "train", "model": "small_dlrm", "seed": 0, "path": [], "run": "a" * 16, **flags}
    (directory / "config.json").write_text(json.dumps(config))
    with Checkpointer(directory / "checkpoints", run="a" * 16) as checkpointer:
        checkpointer.save(state, extra)
    return job, state


def criteo_run(directory: Path, rows=240, noted=True, trained=True, **options):
    """A run over prepared rows: (directory, lines, job, state)."""
    lines = list(criteo_lines(rows))
    prepared = directory / "prepared"
    prepare([write_lines(directory / "train.txt", lines)], prepared, **(options or {"min_count": 3}))
    data = criteo_clicks(prepared, batch_size=32, steps=STEPS)
    extra = {"vocabulary_digest": open_encoder(prepared).digest} if noted else {}
    job, state = train_run(directory / "run", data, {"data": "criteo", "path": [str(prepared)]}, extra, trained)
    return directory / "run", lines, job, state


def synthetic_run(directory: Path, trained=True):
    """A run over synthetic clicks with test examples in its log: (directory, job, state, data)."""
    data = synthetic_clicks((9,) * 26, batch_size=64, steps=STEPS, seed=0, test_batches=2)
    job, state = train_run(directory / "run", data, {"data": "synthetic"}, trained=trained)
    (directory / "run" / "metrics.jsonl").write_text('{"step": 3, "test_examples": 4096}\n{"step": 4, "te')
    return directory / "run", job, state, data
