"""Guarantees of every engine under misuse: nothing fails silently, nothing hangs, no state is lost."""

import _thread
import os
import signal
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from mortal import MortalTables
from test_engine import (
    DENSE,
    ROWS,
    STEP,
    UPDATE,
    Watcher,
    batch_at,
    bits,
    each,
    emptied,
    fresh,
    plain,
    same,
    stream_from,
)
from world import ctrl_c as ctrl_c  # a fixture

import jaxrec
from jaxrec.cpr import Recovery
from jaxrec.embedding import DeviceTables, EmbeddingSpec, HostTables, Lookup, Table
from jaxrec.loop import Serial, train
from jaxrec.oac import Pipeline
from jaxrec.types import ShardsLost


def failing_at(step, act=lambda: None):
    def fail(state, number, plans, metrics):
        if number == step:
            act()
            raise KeyError("of the hook")
        return state

    return fail


@each
def test_the_cut_of_a_step_is_saved_though_a_hook_of_it_failed(make):
    saved, stream = [], stream_from(0)
    with make() as engine:
        engine.snapshot_at(3, lambda state: saved.append(bits(state)))
        with pytest.raises(KeyError, match="of the hook"):
            list(engine.run(stream, [failing_at(3)]))
        assert len(saved) == 1 and same(saved[0], plain(3)[0])
        list(engine.run(stream))
    assert same(bits(engine.state), plain(12)[0])


@each
def test_a_loss_that_is_not_finite_is_told_though_the_run_was_left(make):
    bad = batch_at(1)
    bad.label[2] = np.nan
    with pytest.raises(FloatingPointError, match="at step 2"), make() as engine:
        for _ in engine.run([batch_at(0), bad, batch_at(2), batch_at(3)]):
            if engine.step == 3:
                break


@each
def test_what_the_stream_raised_is_told_though_the_run_was_left_before_it(make):
    reached = threading.Event()

    def stream():
        yield from stream_from(0, 4)
        reached.set()
        raise KeyError("of the stream")

    batches = stream()
    with pytest.raises(KeyError, match="of the stream"), make() as engine:
        for _ in engine.run(batches):
            if engine.step == 2:
                assert reached.wait(60)
                break
        list(engine.run(batches))
    assert engine.step in (2, 4)


@each
def test_leaving_a_run_does_not_wait_for_a_stream_that_blocks(make):
    inside, more = threading.Event(), threading.Event()

    def stream():
        yield from stream_from(0, 3)
        inside.set()
        assert more.wait(60)
        yield from stream_from(3)

    batches = stream()
    with make() as engine:
        for _ in engine.run(batches):
            if engine.step == 3:
                assert inside.wait(60)
                break
        assert not more.is_set()
        more.set()
        list(engine.run(batches))
    assert engine.step == 12 and same(bits(engine.state), plain(12)[0])


@each
@pytest.mark.parametrize("wakes", [True, False])
def test_ctrl_c_ends_the_wait_for_a_stream_that_blocks_and_nothing_of_it_is_lost(make, wakes, ctrl_c):
    """Also where the signal ends no blocking call, as one that comes just before the call begins."""
    more = threading.Event()

    def stream():
        yield from stream_from(0, 3)
        if wakes:
            os.kill(os.getpid(), signal.SIGINT)  # while the main thread waits or trains
        else:
            assert not more.wait(0.2)
            _thread.interrupt_main()
        assert more.wait(60)
        yield from stream_from(3)

    batches = stream()
    with make() as engine:
        with pytest.raises(KeyboardInterrupt):
            list(engine.run(batches))
        assert engine.step <= 3 and same(bits(engine.state), plain(engine.step)[0])
        more.set()
        list(engine.run(batches))
    assert engine.step == 12 and same(bits(engine.state), plain(12)[0])


@each
def test_a_change_that_raises_returns_no_tables_or_lies_within_another_is_refused_and_loses_nothing(make):
    wrong = [
        (lambda tables: None, ValueError, "returned a NoneType"),
        (lambda tables: engine.exclusive(lambda same: same), ValueError, "within `exclusive`"),
        (lambda tables: 1 / 0, ZeroDivisionError, "division"),
    ]
    with make() as engine:
        if isinstance(engine, Pipeline):  # its tables stay where they are
            wrong.append((lambda tables: fresh("host").tables, ValueError, "return those that it was given"))
        for _ in engine.run(stream_from(0)):
            for change, error, words in wrong if engine.step == 2 else ():
                with pytest.raises(error, match=words):
                    engine.exclusive(change)
    assert same(bits(engine.state), plain(12)[0])


@each
def test_shards_that_are_none_are_not_lost(make):
    stream = stream_from(0)
    with make() as engine:
        engine.enter(Watcher(engine, []))
        with pytest.raises(ValueError, match="nothing runs"):
            engine.lose([1])
        with pytest.raises(ValueError, match="shard=4 must be"):
            list(engine.run(stream, [lambda state, *_: engine.lose([1, 4])]))
        list(engine.run(stream))
    assert same(bits(engine.state), plain(12)[0])


@each
def test_what_a_hook_has_lost_comes_back_before_the_next_step_though_a_hook_behind_it_failed(make):
    events, stream = [], stream_from(0, 5)
    with make() as engine:
        engine.enter(Watcher(engine, events))
        with pytest.raises(KeyError, match="of the hook"):
            list(engine.run(stream, [failing_at(3, lambda: engine.lose([1]))]))
        list(engine.run(stream))
    assert ("recover", 3, [1]) in events
    act = lambda state, step: state._replace(tables=emptied(state.tables)) if step == 3 else state
    assert same(bits(engine.state), plain(5, act=act)[0])


@each
def test_watchers_are_entered_within_a_block_whose_end_leaves_them_once_whatever_it_finds(make):
    engine, events = make(), []
    with pytest.raises(ValueError, match="within `with"):
        engine.enter(Watcher(engine, events))
    with engine:
        engine.enter(Watcher(engine, events))
        with engine:  # an inner block leaves no watcher
            pass
        assert events == ["enter"]
    assert events == ["enter", ("exit", None, False)]
    with engine:  # a second block has its own watchers
        watcher = engine.enter(Watcher(engine, events))
        list(engine.run(stream_from(0, 4), [watcher.hook]))
    assert [event[0] for event in events if event[0] == "recover"] == ["recover"]
    del events[:]
    with pytest.raises(UserWarning, match="not taken"), engine:  # warnings are errors here
        engine.enter(Watcher(engine, events))
        engine.snapshot_at(40, print)
    assert events == ["enter", ("exit", UserWarning, False)]


@each
def test_a_watcher_may_swallow_the_error_that_ends_the_block(make):
    class Swallows(Watcher):
        def __exit__(self, *error):
            return True

    with make() as engine:
        engine.enter(Swallows(engine, []))
        raise KeyError("of the body")


@each
def test_only_a_state_over_tables_of_the_same_spec_takes_the_place_of_another(make):
    other = EmbeddingSpec({"item": Table(44, 4)}, {"item": Lookup("item")}, shards=4)
    with make() as engine:
        list(engine.run(stream_from(0, 3)))
        home = HostTables if engine.tables.in_place else DeviceTables
        wrong = jaxrec.init_state({"w": jnp.ones(4)}, DENSE, home.create(other, ROWS))
        with pytest.raises(ValueError, match="another spec"):
            engine.reset(wrong)
        list(engine.run(stream_from(3)))
    assert same(bits(engine.state), plain(12)[0])


@each
def test_reset_forgets_the_cuts_to_come_and_says_so(make):
    with make() as engine:
        list(engine.run(stream_from(0, 3)))
        engine.snapshot_at(5, print)
        kept = make().state
        with pytest.warns(UserWarning, match=r"steps \[5\] were not taken.* at step 3") as warned:
            engine.reset(kept)
        assert "stay announced" not in str(warned[0].message)
        list(engine.run(stream_from(0)))
    assert same(bits(engine.state), plain(12)[0])


def mortal(kind, number):
    """A state whose tables lose shard 1 at a chosen call."""
    state = fresh("host")
    return state._replace(tables=MortalTables.of(state.tables, [(kind, number, 1)]))


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize(
    "engine_of", [lambda state: Serial(state, STEP), lambda state: Pipeline(state, UPDATE, window=3)]
)
def test_shards_that_their_home_has_lost_come_back_and_no_step_is_lost(engine_of, kind):
    events, saved = [], []
    with engine_of(mortal(kind, 5)) as engine:
        engine.enter(Watcher(engine, events))
        engine.snapshot_at(6, lambda state: saved.append(int(state.dense.step)))
        losses = [float(metrics["loss"]) for _, metrics in engine.run(stream_from(0))]
    ((at, shards),) = [event[1:] for event in events if event[0] == "recover"]
    act = lambda state, step: state._replace(tables=emptied(state.tables)) if step == at else state
    wanted, wanted_losses = plain(12, act=act)
    assert shards == [1] and losses == wanted_losses and same(bits(engine.state), wanted) and len(saved) == 1


def test_shards_that_never_come_back_end_a_serial_run_and_the_batch_comes_again():
    stream = stream_from(0)
    with Serial(mortal("read", 5), STEP) as engine:
        with pytest.raises(ShardsLost, match="no watcher restores them: engine.enter"):
            list(engine.run(stream))
        assert engine.step == 5
        engine.exclusive(emptied)
        watcher = engine.enter(Watcher(engine, []))
        engine.tables.kill(1)
        watcher.recover = lambda shards: None
        with pytest.raises(ShardsLost, match="again, after 8 recoveries at step 5"):
            list(engine.run(stream))
        engine.exclusive(emptied)
        list(engine.run(stream))
    assert engine.step == 12


def test_a_failure_that_comes_again_at_the_same_step_ends_training_and_does_not_go_round_for_ever(tmp_path):
    with Serial(fresh("host"), STEP) as engine:
        recovery = engine.enter(Recovery(engine, tmp_path, 4, 12, mode="full"))
        lose = lambda state, step, *_: (engine.lose([1]) if step == 6 else None, state)[1]
        with pytest.raises(ShardsLost, match="again, after 8 recoveries at step 6"):
            train(engine, stream_from, [recovery.hook, lose])
    assert recovery.lost_steps == 8 * 2


class Stumbles:
    """An iterator that raises once, in place of its third batch, and then continues."""

    def __init__(self):
        self.calls = iter(range(13))

    def __iter__(self):
        return self

    def __next__(self):
        call = next(self.calls)
        if call == 2:
            raise KeyError("of the stream")
        return batch_at(call - (call > 2))


@each
def test_an_error_of_a_stream_comes_once_and_a_batch_that_is_refused_does_not_come_again(make):
    stream = Stumbles()
    with make() as engine:
        with pytest.raises(KeyError, match="of the stream"):
            list(engine.run(stream))
        list(engine.run(stream))
        assert engine.step == 12 and same(bits(engine.state), plain(12)[0])
        bad = batch_at(1)
        bad.weight[2] = -1
        stream = iter([batch_at(0), bad, batch_at(2)])
        with pytest.raises(ValueError, match=r"weight\[2\] is -1"):
            list(engine.run(stream))
        list(engine.run(stream))
    assert engine.step == 14


@each
def test_a_watcher_may_refuse_another_state_and_what_was_lost_is_forgotten_with_the_one_before(make):
    class Refuses(Watcher):
        def restarted(self, state):
            if self.refuses:
                raise ValueError("not that one")

    with make() as engine:
        watcher = engine.enter(Refuses(engine, []))
        with pytest.raises(KeyError):
            list(engine.run(stream_from(0), [failing_at(3, lambda: engine.lose([1]))]))
        watcher.refuses, before = True, bits(engine.state)
        with pytest.raises(ValueError, match="not that one"):
            engine.reset(make().state)
        assert engine.step == 3 and same(bits(engine.state), before)
        watcher.refuses = False
        engine.reset(make().state)
        list(engine.run(stream_from(0)))
    assert ("recover", 0, [1]) not in watcher.events and same(bits(engine.state), plain(12)[0])


def test_a_serial_run_begins_with_shards_that_the_one_before_has_lost():
    """Their server was restarted empty in the meantime and reports no loss."""
    events, stream = [], stream_from(0)
    with Serial(mortal("write", 5), STEP) as engine:
        with pytest.raises(ShardsLost):
            list(engine.run(stream))
        engine.tables.dead.clear()
        engine.enter(Watcher(engine, events))
        list(engine.run(stream))
    assert ("recover", 6, [1]) in events
    act = lambda state, step: state._replace(tables=emptied(state.tables)) if step == 6 else state
    assert same(bits(engine.state), plain(12, act=act)[0])
