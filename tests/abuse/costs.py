"""Plans in steps and measured costs: wrong numbers, wrong states, disks that are full or that cannot be written."""

import dataclasses
import errno
import math
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrec
from abuse import situation
from jaxrec.cpr import Costs, Recovery, measure, mfu, plan_recovery
from jaxrec.cpr.schedule import SETTING_A
from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, adagrad
from jaxrec.files import Lock
from jaxrec.loop import Serial

DECIDED = plan_recovery(SETTING_A, target_pls=0.1)
JOB = {"mtbf_hours": 28, "total_hours": 56, "reschedule_hours": 0.1, "rounds": 1}


def state_of(rows=40):
    spec = EmbeddingSpec({"item": Table(rows, 16)}, {"item": Lookup("item")}, shards=2)
    return jaxrec.init_state({"bias": jnp.zeros(())}, optax.sgd(0.1), HostTables.create(spec, adagrad(0.1)))


def nothing_was_left(directory, act):
    try:
        act()
    finally:
        assert not list(directory.rglob("*")), list(directory.rglob("*"))


for given in (0, -1, math.nan, math.inf, "0.05", None, True, np.ones(3)):

    @situation(f"seconds_per_step={given!r}", ValueError, "seconds_per_step=.* must be above 0 and finite")
    def _(directory, given=given):
        DECIDED.in_steps(given)


@situation("a plan that saves more often than once per step", ValueError, "0.5 steps of 2 s.* a higher target_pls")
def _(directory):
    DECIDED._replace(save_every_hours=1 / 3600).in_steps(2)


@situation("milliseconds for seconds per step, in a job shorter than a step", ValueError, "once per step at most")
def _(directory):
    DECIDED.in_steps(56 * 3600 * 1000)


@situation("so short a step that a job has no number of them", ValueError, "once in the job at least")
def _(directory):
    DECIDED.in_steps(1e-320)


@situation("a plan of no hours", ValueError, "save_every_hours=nan must be above 0")
def _(directory):
    DECIDED._replace(save_every_hours=math.nan).in_steps(1)


@situation("a scheme with a plan of full recovery", ValueError, "full recovery goes back to whole images: scheme='mfu'")
def _(directory):
    strict = plan_recovery(SETTING_A, target_pls=1e-6)
    Recovery(Serial(state_of(), lambda *_: None), directory, **strict.in_steps(0.1), scheme=mfu())


@situation("hours as text", ValueError, "mtbf_hours='28' must be above 0 and finite: give hours")
def _(directory):
    plan_recovery(Costs(1, 1, 0, "28", 56, 8), 0.1)


@situation("a partial load of a negative time", ValueError, "partial_load_hours=-1 must be 0 or more and finite")
def _(directory):
    plan_recovery(SETTING_A._replace(partial_load_hours=-1), 0.1)


WRONG = {
    "mtbf_hours": (0, "mtbf_hours=0 must be above 0"),
    "total_hours": (math.nan, "total_hours=nan must be above 0"),
    "reschedule_hours": (-0.1, "reschedule_hours=-0.1 must be 0 or more and finite"),
    "failed_nodes": (3, "failed_nodes=3 must be a whole number from 1 to 2, nodes"),
    "rounds": (0, "rounds=0 must be a whole number from 1"),
    "copy": ("half", "copy='half' must be 'whole' or 'shards'"),
}
for name, (value, words) in WRONG.items():

    @situation(f"measuring with {name}={value!r}", ValueError, words)
    def _(directory, name=name, value=value):
        nothing_was_left(directory, lambda: measure(state_of(), directory, **{**JOB, name: value}))


@situation("half a node that fails", ValueError, "failed_nodes=0.5 must be a whole number from 1")
def _(directory):
    measure(state_of(), directory, **JOB, failed_nodes=0.5)


@situation("measuring a state that was donated", ValueError, "was donated to an earlier step")
def _(directory):
    state = state_of()
    state.dense.step.delete()
    nothing_was_left(directory, lambda: measure(state, directory, **JOB))


@situation("measuring in an object store", ValueError, "object stores are not supported")
def _(directory):
    measure(state_of(), "s3://bucket/run", **JOB)


@situation("measuring below a file", NotADirectoryError, "Not a directory.*notes.txt")
def _(directory):
    (directory / "notes.txt").write_text("mine")
    try:
        measure(state_of(), directory / "notes.txt" / "run", **JOB)
    finally:
        assert [path.name for path in directory.rglob("*")] == ["notes.txt"]


@situation("two who measure in one directory", ValueError, "is locked: somebody else is measuring in it")
def _(directory):
    theirs = directory / "cpr_measure.partial"
    theirs.mkdir()
    (theirs / "round").mkdir()
    try:
        with Lock(theirs / "measure.lock", "measuring in it"):
            measure(state_of(), directory, **JOB)
    finally:
        assert (theirs / "round").exists()  # theirs


class Refusing(HostTables):
    """Tables of a disk that fails while they are restored."""

    def with_shard(self, stack, shard, parts):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "tables.0000")


@situation("a disk that fails while the state is restored", OSError, "Input/output error: 'tables.0000'")
def _(directory):
    state = state_of()
    tables = Refusing(*(getattr(state.tables, field.name) for field in dataclasses.fields(HostTables)))
    nothing_was_left(directory, lambda: measure(state._replace(tables=tables), directory, **JOB))


SMALL_DISK = 'mount -t tmpfs -o size=1m none "$DISK" && '


def measure_on_a_full_disk(directory):
    """Run by a process of its own, in a file system of 1 MB, with more rows than that."""
    state = state_of(rows=20_000)
    before = [parts["value"].copy() for parts in state.tables.shards["width_16"]]
    with pytest.raises(OSError, match=f"No space left on device.*{directory}") as raised:
        measure(state, directory, **JOB)
    assert raised.value.errno == errno.ENOSPC and not list(Path(directory).rglob("*"))
    assert all(map(np.array_equal, before, (parts["value"] for parts in state.tables.shards["width_16"])))


@situation("measuring on a disk that is really full", marks="process")
def _(directory):
    inside, here = ["unshare", "-Urm", "sh", "-c"], os.environ | {"DISK": str(directory)}
    if subprocess.run([*inside, SMALL_DISK + "true"], env=here, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    act = f"import abuse.costs; abuse.costs.measure_on_a_full_disk({str(directory)!r})"
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(jaxrec.__file__).parents[1])])
    command = [*inside, SMALL_DISK + 'exec "$@"', "sh", sys.executable, "-c", act]
    done = subprocess.run(command, env=here | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
