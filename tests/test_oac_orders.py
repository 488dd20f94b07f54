"""Properties of the pipeline that only a certain order of events could break; each order is forced."""

import threading

import numpy as np
import pytest
from oac_equivalence import HeldBack, Numbered, same
from test_oac import (
    SPEC,
    copied,
    frozen,
    make_batches,
    make_state,
    plain_loop,
    reset,
    states_of,
    train,
    update_of,
    watched,
)
from world import is_inside, until, workers

from jaxrec.interrupts import wait
from jaxrec.oac import Pipeline
from jaxrec.oac.scheduler import BatchScheduler
from jaxrec.types import TrainState

BOTH = {"skip_stale_reads": True, "skip_rewritten": True}


def reset_at(step):
    return lambda now, state: now == step and reset(state.tables)


def losses_of(pipeline, batches, hooks=()):
    with pipeline:
        return [np.asarray(metrics["loss"]) for _, metrics in pipeline.run(batches, hooks)]


@pytest.mark.parametrize("leave_there", [False, True])
def test_a_drain_right_after_exclusive_writes_nothing_of_before(leave_there):
    """`drain` writes the ring's unwritten rows, but not over rows changed since."""
    batches, seen = make_batches(20), []
    plain, expected = plain_loop(batches, after=reset_at(9)), plain_loop(batches[:9], after=reset_at(9))

    def change(state, step, plan, metrics):
        if step == 9:
            pipeline.exclusive(reset)
            seen.append(copied(pipeline.drain()))
        return state

    pipeline = Pipeline(make_state(), update_of(SPEC), window=5, **BOTH)
    if leave_there:
        with pipeline:
            next(run for run in pipeline.run(batches, [change]) if pipeline.step == 9)
        assert same((pipeline.state, []), (expected[0], []))
    else:
        losses = losses_of(pipeline, batches, [change])
        assert same((pipeline.state, losses), plain)
    assert same((TrainState((), seen[0]), []), (TrainState((), expected[0].tables), []))


@pytest.mark.parametrize("options", [{}, {"skip_stale_reads": True}, {"validation": "device"}])
def test_batches_planned_after_exclusive_take_nothing_of_before_from_the_ring(options):
    """The stream is late: batches in the window after the change are planned once it has been made."""
    batches, changed = make_batches(16), threading.Event()

    def stream():
        yield from batches[:7]
        assert changed.wait(60)
        yield from batches[7:]

    def change(state, step, plan, metrics):
        if step == 7:
            pipeline.exclusive(reset)
            changed.set()
        return state

    pipeline = Pipeline(make_state(), update_of(SPEC), window=5, **options)
    losses = losses_of(pipeline, stream(), [change])
    assert same((pipeline.state, losses), plain_loop(batches, after=reset_at(7)))


@pytest.mark.parametrize(("mode", "window", "delay"), [("async", 3, 3), ("semisync", None, 1)])
def test_of_two_writers_each_adds_its_own_shards(mode, window, delay):
    batches = make_batches(16)
    options = {"window": window} if window else {}
    _, found = train(batches, mode=mode, writers=2, **options)
    assert same(found, plain_loop(batches, delay=delay))


@pytest.mark.parametrize("skips", [{}, BOTH])
def test_exclusive_waits_for_a_cut_that_is_being_saved(skips):
    """Between the commits of the snapshot's step and of the next one nothing else blocks `exclusive`."""
    batches, snapshots, inside = make_batches(12), [], threading.Event()

    def save(state):
        # An `exclusive` that does not wait would run before the snapshot is taken.
        until(lambda: inside.is_set() or (is_inside(BatchScheduler.wait_for_snapshot) and is_inside(wait)))
        snapshots.append(frozen(state))

    def change(tables):
        inside.set()
        assert len(snapshots) == 1
        return reset(tables)

    with Pipeline(make_state(), update_of(SPEC), window=3, **skips) as pipeline:
        pipeline.snapshot_at(7, save)
        for _ in pipeline.run(batches):
            if pipeline.step == 7:
                pipeline.exclusive(change)
    assert same((snapshots[0], []), (states_of(batches)[7], []))


class Looked(set):
    """A set that records which of its members have been looked up."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __contains__(self, member):
        found = super().__contains__(member)
        self.found |= {member} if found else set()
        return found


class Looking(Numbered):
    """Records the fetched batches that its writer has found, written or not."""

    def __init__(self, *args):
        super().__init__(*args)
        self.fetched = Looked()


def test_semisync_is_one_batch_stale_after_exclusive_too():
    """A batch gathered before the change is gathered again, and its predecessor's write waits for this."""
    batches, at = make_batches(16), 7

    def wait():
        scheduler, number = pipeline.scheduler, Numbered.mine.batch
        if changed and number == at + 1:  # lets a write that does not wait come first
            (writer,) = workers("oac-write back")
            until(
                lambda: scheduler.first + at in scheduler.fetched.found and is_inside(threading.Condition.wait, writer)
            )

    def change(state, step, plan, metrics):
        if step == at:
            pipeline.drain()
            scheduler = pipeline.scheduler
            until(lambda: scheduler.last_gathered >= scheduler.committed + 1)
            changed.append(step)
            pipeline.exclusive(reset)
        return state

    changed: list = []
    pipeline = Pipeline(watched(make_state(), before_read=wait), update_of(SPEC), mode="semisync", loaders=1)
    pipeline.scheduler_type = Looking
    losses = losses_of(pipeline, batches, [change])
    assert same((pipeline.state, losses), plain_loop(batches, delay=1, after=reset_at(at)))


@pytest.mark.parametrize("validation", ["planned", "device"])
def test_write_backs_that_end_during_a_gather_are_not_taken_for_seen(validation):
    """The rows were read before the write; it ends before the gather does."""
    batches, window = make_batches(16), 2
    held = HeldBack(window, len(batches))

    def send(tree, placement):
        sent = held.send(tree, placement)  # `held` then releases the write of the window's oldest batch
        if len(tree) == 3:  # rows
            scheduler, oldest = pipeline.scheduler, pipeline.scheduler.first + Numbered.mine.batch - window
            until(lambda: oldest < scheduler.first or scheduler.watermark() > oldest)
        return sent

    options = {"window": window, "loaders": 1, "validation": validation}
    pipeline = Pipeline(make_state(), update_of(SPEC), send=send, fetch=held.fetch, **options)
    pipeline.scheduler_type = Numbered
    losses = losses_of(pipeline, batches)
    assert same((pipeline.state, losses), plain_loop(batches))
    # All rows in the ring were stale when each gather began, including those of the window's oldest batch.
    assert pipeline.counters["stale_rows"] == pipeline.counters["patched_rows"] > 16
