"""What surrounds a pool of trainers: what it resumes from, how it is stopped, and how its pauses are told apart."""

import dataclasses
import signal
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fleets import Fleet
from main.flags import DataFlags, absolute, prepared_directory
from main.pools import Watch, begun
from main.signals import Asked, Stopped
from studies.pauses import Timed, longest_by_state
from test_trainers import OWN, SPEC

from jaxrec.checkpoint import Checkpointer
from jaxrec.cluster.trainers import Progress
from jaxrec.types import DenseState, TrainState

PARAMS = {"weights": np.arange(3, dtype=np.float32), "bias": np.float32(0.5)}


def rows_of(tables):
    return [
        np.asarray(rows[s]) for name in SPEC.stacks for rows in tables.parts(name).values() for s in range(SPEC.shards)
    ]


def test_a_pool_resumes_with_the_rows_the_parameters_and_the_positions_of_its_newest_image(tmp_path, capsys):
    with Fleet(SPEC, OWN[1]) as fleet, Checkpointer(tmp_path, copy="shards") as checkpointer:
        assert begun(tmp_path, PARAMS, fleet) == (PARAMS, {})
        for step, positions in ((1, [2, 3]), (2, [8, 7])):
            one = jax.tree.map(lambda leaf, by=step: jnp.asarray(leaf + by)[None], PARAMS)
            for name, shard in ((name, shard) for name in SPEC.stacks for shard in range(SPEC.shards)):
                mine = {part: np.asarray(rows[shard]) + step for part, rows in fleet.tables.parts(name).items()}
                fleet.tables.with_shard(name, shard, mine)
            state = TrainState(DenseState(jnp.int32(step), one, ()), fleet.tables)
            checkpointer.save(state, {"positions": positions})
        saved = rows_of(fleet.tables)
    with Fleet(SPEC, OWN[1], servers=1) as fleet:
        params, extra = begun(tmp_path, PARAMS, fleet)
        jax.tree.map(np.testing.assert_array_equal, params, jax.tree.map(lambda leaf: leaf + 2, PARAMS))
        jax.tree.map(np.testing.assert_array_equal, rows_of(fleet.tables), saved)
    assert extra["positions"] == [8, 7] and "step_00000002" in capsys.readouterr().out


def test_a_stop_saves_and_each_death_is_logged_once():
    logged, saved, asked = [], [], Asked()
    run = types.SimpleNamespace(log=logged.append, directory=Path("d"))
    watch = Watch(run, types.SimpleNamespace(steps=20), asked, [3, 4])
    death = types.SimpleNamespace(_asdict=lambda: {"kind": "trainer"})
    progress = [Progress(position=5), Progress(position=9)]
    pool = types.SimpleNamespace(progress=progress, failures=[death], save=lambda: saved.append(1))
    watch(pool)
    watch(pool)
    assert logged == [{"kind": "trainer"}] and not saved
    asked.signal = signal.SIGTERM
    with pytest.raises(Stopped, match="SIGTERM: stopped and saved; go on with"):
        watch(pool)
    assert saved == [1]


def test_trainers_find_the_data_from_any_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw = DataFlags(data="criteo", path=(Path("train.txt"),), min_count=3)
    Path("prepared").mkdir()
    assert absolute(raw).path == (tmp_path / prepared_directory(raw.path, {"min_count": 3}),)
    assert absolute(dataclasses.replace(raw, path=(Path("prepared"),))).path == (tmp_path / "prepared",)
    assert absolute(DataFlags()) == DataFlags()


def test_pauses_are_told_apart_by_what_went_on_meanwhile(tmp_path, monkeypatch):
    instants = [0.0, 1.0, 2.0, 3.0, 6.0, 7.0, 9.0, 10.0, 11.0]  # the first two compile
    monkeypatch.setattr("studies.pauses.time.monotonic", iter(instants).__next__)
    assert list(Timed(lambda trainer, trainers: lambda start: iter(range(start, 9)), tmp_path)(0, 1)(0)) == [*range(9)]
    samples = [(at / 2, "calm") for at in range(30)]
    samples[7] = (3.5, "stopped")  # within the step of 3 s
    samples[17] = (8.5, "starting")  # within that of 2 s
    samples[18] = (9.0, "stopped")  # the same, and before the next one
    assert longest_by_state(tmp_path, samples) == {
        "steps_calm": 3, "steps_stopped": 2, "steps_starting": 1, "steps_rows_away": 0,
        "longest_step_over_median_calm": 1.0, "longest_step_over_median_stopped": 3.0,
        "longest_step_over_median_starting": 2.0,
    }  # fmt: skip
