"""Plans in steps and measured costs: wrong numbers, wrong states, full and read-only disks."""

import dataclasses
import errno
import math
import os

import jax.numpy as jnp
import optax
from click_model import loss

import jaxrec
from abuse import refused, situation
from jaxrec.cpr import measure_costs, plan_recovery
from jaxrec.cpr.schedule import SETTING_A
from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, adagrad

DECIDED = plan_recovery(SETTING_A, target_pls=0.1)
JOB = {"mtbf_hours": 28, "total_hours": 56, "reschedule_hours": 0.1, "rounds": 1}


def state_of(rows=40):
    spec = EmbeddingSpec({"item": Table(rows, 16)}, {"item": Lookup("item")}, shards=2)
    return jaxrec.Task(spec, loss, optax.sgd(0.1), adagrad(0.1)).init({"w": jnp.ones(16)}, "host")


def nothing_was_left(directory, act):
    try:
        act()
    finally:
        assert not list(directory.rglob("*")), list(directory.rglob("*"))


PLANS = {
    "seconds_per_step=nan must be above 0 and finite": lambda _: DECIDED.in_steps(math.nan),
    "0.5 steps of 2 s.* a higher target_pls": lambda _: DECIDED._replace(save_every_hours=1 / 3600).in_steps(2),
    "once per step at most": lambda _: DECIDED.in_steps(1e-320),
    "partial_load_hours=-1 must be 0 or more and finite": lambda _: plan_recovery(
        SETTING_A._replace(partial_load_hours=-1), 0.1
    ),
}
refused(PLANS)


WRONG = {
    "mtbf_hours": (0, "mtbf_hours=0 must be above 0"),
    "failed_nodes": (3, "failed_nodes=3 must be a whole number from 1 to 2, nodes"),
    "rounds": (0, "rounds=0 must be a whole number from 1"),
}
for name, (value, words) in WRONG.items():

    @situation(f"measuring with {name}={value!r}", ValueError, words)
    def _(directory, name=name, value=value):
        nothing_was_left(directory, lambda: measure_costs(state_of(), directory, **{**JOB, name: value}))


@situation("measuring in an object store", ValueError, "object stores are not supported")
def _(directory):
    measure_costs(state_of(), "s3://bucket/run", **JOB)


@situation("measuring below a file", NotADirectoryError, "Not a directory.*notes.txt")
def _(directory):
    (directory / "notes.txt").write_text("mine")
    try:
        measure_costs(state_of(), directory / "notes.txt" / "run", **JOB)
    finally:
        assert [path.name for path in directory.rglob("*")] == ["notes.txt"]


class Refusing(HostTables):
    """Tables on a disk that fails during a restore."""

    def with_shard(self, stack, shard, parts):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "tables.0000")


@situation("a disk that fails while the state is restored", OSError, "Input/output error: 'tables.0000'")
def _(directory):
    state = state_of()
    tables = Refusing(*(getattr(state.tables, field.name) for field in dataclasses.fields(HostTables)))
    nothing_was_left(directory, lambda: measure_costs(state._replace(tables=tables), directory, **JOB))
