"""What is kept and said when a pipeline is interrupted, left, shared or looked at too late."""

import functools
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hooks import at_step
from studies.oac_failures import equal
from test_oac import ROWS, SPEC, Broken, frozen, make_batches, make_state, pipeline_with, update_of
from test_oac import ctrl_c as ctrl_c  # a fixture
from test_oac_exits import Blocking, Failing, all_notes, chain, states_of, to_host
from world import interrupt_when, no_threads_left, workers

import jaxrec
from jaxrec.embedding import HostTables
from jaxrec.oac import BrokenPipeline, Pipeline
from jaxrec.oac.scheduler import BatchScheduler

WINDOW = 3


def pipeline_of(state=None, update=None, kind=Pipeline, **options):
    return kind(state or make_state(), update or update_of(SPEC), **({"window": WINDOW} | options))


def interrupt(state):
    signal.raise_signal(signal.SIGINT)


# ---- views


def test_a_view_that_was_drained_refuses_from_the_next_batch_on():
    kept, asked, batches = [], [], make_batches(12)
    pipeline = pipeline_of()

    def keep(state):
        pipeline.drain()
        state.tables.read({})
        kept.append(state)

    def ask(state):
        with pytest.raises(ValueError, match="stood at step 5, and the pipeline is at step 9"):
            kept[0].tables.read({})
        asked.append(state)

    with pipeline:
        for _ in pipeline.run(batches, [at_step(5, keep), at_step(9, ask)]):
            pass
    assert asked
    with pytest.raises(ValueError, match="stood at step 5, and the pipeline is at step 12"):
        kept[0].tables.read({})


@pytest.mark.parametrize("mode", ["oac", "async"])
def test_the_last_state_of_a_run_refuses_when_others_have_begun_to_train_over_its_tables(mode):
    first, batches = pipeline_of(mode=mode), make_batches(6)
    *_, (last, _) = first.run(batches)
    last.tables.read({})
    second = pipeline_of(make_state()._replace(tables=first.tables), mode=mode)
    for number, _ in enumerate(second.run(batches), 1):
        if number == 3:
            with pytest.raises(ValueError, match="another run has begun over these tables"):
                last.tables.read({})
    with pytest.raises(ValueError, match="another run has begun over these tables"):
        last.tables.read({})
    *_, (last, _) = first.run(batches)
    last.tables.read({})


def test_the_last_state_refuses_when_a_later_step_was_put_by_hand():
    pipeline, batches = pipeline_of(), make_batches(3)
    *_, (last, _) = pipeline.run(batches)
    plans = jaxrec.plan(SPEC, batches[0].ids)
    pipeline.tables.put(plans, pipeline.tables.read(plans))
    with pytest.raises(ValueError, match="were changed since"):
        last.tables.read({})


# ---- iterators that come again


def test_an_iterator_whose_planner_is_on_its_way_out_is_waited_for():
    blocking, left = Blocking(make_batches(12), 7), threading.Event()

    class Patient(Pipeline):
        @property
        def patience_seconds(self):  # asked for when a run is left, and when the iterator comes again
            if left.is_set():
                blocking.let_go.set()
            return 60

    pipeline = Patient(make_state(), update_of(SPEC))
    running = pipeline.run(blocking)
    for _ in range(4):
        next(running)
    assert blocking.blocked.wait(60)
    running.close()
    left.set()
    assert len(list(pipeline.run(blocking))) == 8


# ---- one run at a time


def test_one_directory_attached_twice_is_in_one_pipeline_at_a_time(tmp_path):
    state = make_state()._replace(tables=HostTables.create(SPEC, ROWS, tmp_path / "tables"))
    (tmp_path / "link").symlink_to(tmp_path / "tables")
    other = make_state()._replace(tables=HostTables.attach(SPEC, ROWS, tmp_path / "link"))
    first, second, batches = pipeline_of(state), pipeline_of(other), make_batches(6)
    running = first.run(batches)
    next(running)
    with pytest.raises(ValueError, match="another pipeline is running over these tables"):
        next(second.run(batches))
    running.close()
    assert len(list(second.run(batches))) == 6


def test_a_pipeline_that_was_collected_by_its_own_planner_leaves_the_tables_free():
    state, batches, go, done = make_state(), make_batches(12), threading.Event(), threading.Event()

    def stream():
        yield from batches[:6]
        assert go.wait(60)
        gc.collect()
        done.set()
        yield batches[6]

    def drop():
        pipeline = pipeline_of(state, window=2)
        running = pipeline.run(stream())
        cycle = [pipeline, running]
        cycle.append(cycle)
        for _ in range(6):
            next(running)

    gc.disable()
    try:
        drop()
        planner = workers("oac-")
        go.set()
        assert done.wait(60)
        for thread in planner:
            thread.join(60)
    finally:
        gc.enable()
    again = pipeline_of(make_state()._replace(tables=state.tables))
    assert len(list(again.run(batches[:3]))) == 3


# ---- losses, hooks and cuts when something comes between


@pytest.mark.parametrize("way", ["hook", "ctrl-c"])
def test_a_loss_that_is_not_finite_is_told_with_its_step_beside_another_end(way, ctrl_c):
    def leave(state):
        if way == "ctrl-c":
            interrupt(state)
        raise Broken

    batches, wanted = make_batches(12), {"hook": Broken, "ctrl-c": KeyboardInterrupt}[way]
    batches[4].label[0] = np.nan
    with pytest.raises(wanted) as raised, pipeline_of() as pipeline:
        for _ in pipeline.run(batches, [at_step(5, leave)]):
            pass
    assert "at step 5" in all_notes(raised.value)


@pytest.mark.parametrize("way", ["commit", "hook interrupted", "hook raises"])
def test_the_cut_of_a_step_is_saved_though_its_hooks_are_interrupted(way, ctrl_c):
    def update(dense, rows, plan, batch):
        return update_of(SPEC)(dense, rows, plan, batch)

    batches, saved, hooked = make_batches(12), [], []

    def hook(state, step, plan, metrics):
        if step == 5 and way == "hook interrupted":
            interrupt(state)
        if step == 5 and way == "hook raises":
            raise Broken
        hooked.append(step)
        return state

    kind = interrupted_in_the_commit(5) if way == "commit" else Pipeline
    pipeline, stream = pipeline_of(update=update, kind=kind), iter(batches)
    pipeline.cut(5, lambda state: saved.append((int(state.dense.step), equal(state, states_of(batches)[5]))))
    with pytest.raises((KeyboardInterrupt, Broken)), pipeline:
        for _ in pipeline.run(stream, [hook]):
            pass
    assert pipeline.step == 5 and saved == [(5, True)] and no_threads_left()
    assert hooked == list(range(1, 6 if way == "commit" else 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(pipeline.run(stream))
    assert equal(pipeline.state, states_of(batches)[12])


def interrupted_in_the_commit(step, number=signal.SIGINT):
    """A kind of pipeline to which a real signal comes while the compiled update of a step is called."""
    calls = itertools.count(1)

    def signalled(compiled, *args):
        found = compiled(*args)
        if next(calls) == step:
            signal.raise_signal(number)
        return found

    return pipeline_with(lambda compiled: functools.partial(signalled, compiled))


def test_a_hook_that_blocks_after_an_interrupted_commit_can_be_interrupted(ctrl_c):
    pipeline = pipeline_of(kind=interrupted_in_the_commit(5))
    with pytest.raises(KeyboardInterrupt), pipeline:
        for _ in pipeline.run(make_batches(12), [at_step(5, interrupt), at_step(5, pytest.fail)]):
            pass
    assert pipeline.step == 5


def test_sigterm_with_a_handler_that_exits_tears_no_batch():
    before = signal.signal(signal.SIGTERM, lambda *args: sys.exit(143))
    try:
        batches, pipeline = make_batches(12), pipeline_of(kind=interrupted_in_the_commit(5, signal.SIGTERM))
        with pytest.raises(SystemExit), pipeline:
            for _ in pipeline.run(batches):
                pass
        assert equal(pipeline.state, states_of(batches)[5]) and no_threads_left()
        assert callable(signal.getsignal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("ask", ["close", "run", "drain", "with"])
def test_what_leaving_by_break_has_found_is_raised_by_the_next_call(ask):
    batches, failed, pipeline = make_batches(12), threading.Event(), pipeline_of()

    def save(state):
        failed.set()
        raise Broken

    pipeline.cut(4, save)
    for number, _ in enumerate(pipeline.run(batches), 1):
        if number == 4:
            assert failed.wait(60)
            break
    with pytest.raises(Broken):
        if ask == "with":
            with pipeline:
                pass
        else:
            getattr(pipeline, ask)(*[batches] * (ask == "run"))
    pipeline.close()
    assert len(list(pipeline.run(batches))) == 12


def test_drain_waits_for_a_cut_that_writes_the_same_rest_and_steps_count_batches():
    batches, pipeline, seen = make_batches(16), pipeline_of(skip_rewritten=True), []
    saving, drained, go = threading.Event(), threading.Event(), threading.Event()

    class Telling(BatchScheduler):
        def wait_for_cut(self):
            go.set()
            super().wait_for_cut()

    def save(state):
        saving.set()
        assert go.wait(60)
        seen.append((state.tables.step, drained.is_set()))

    pipeline.scheduler_type = Telling
    pipeline.cut(6, save)
    with pipeline:
        for number, _ in enumerate(pipeline.run(batches), 1):
            if number == 6:
                assert saving.wait(60)
                pipeline.drain()
                drained.set()
                go.set()
    assert seen == [(6, False)] and pipeline.tables.step == 16
    assert equal(pipeline.state, states_of(batches)[16])


# ---- arguments and calls


def test_hooks_may_be_any_iterable():
    seen, pipeline = [], pipeline_of()
    list(pipeline.run(make_batches(5), iter([lambda state, step, *_: seen.append(step) or state])))
    assert seen == [1, 2, 3, 4, 5]


def test_whole_numbers_of_numpy_are_whole_numbers():
    pipeline = pipeline_of(window=np.int64(2), loaders=np.int32(1), ahead=np.int8(2), writers=np.uint8(2))
    assert type(pipeline.window) is int
    assert len(list(pipeline.run(make_batches(4), check_every_steps=np.int64(2)))) == 4


def test_close_in_another_thread_is_refused_and_harms_nothing():
    batches, said, pipeline = make_batches(6), [], pipeline_of()

    def close():
        try:
            pipeline.close()
        except ValueError as error:
            said.append(str(error))

    with pipeline:
        for number, _ in enumerate(pipeline.run(batches, [at_step(4, lambda state: remote_rows(close))]), 1):
            if number == 2:
                remote_rows(close)
    assert len(said) == 2 and all("another thread" in text for text in said)
    assert equal(pipeline.state, states_of(batches)[6])


def remote_rows(act):
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(60)


def test_cuts_are_warned_of_once_and_those_that_lie_behind_are_forgotten():
    pipeline = pipeline_of()
    pipeline.cut(50, print)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pipeline:
            list(pipeline.run(make_batches(4)))
        pipeline.close()
        list(pipeline.run(make_batches(4)))
    assert len([w for w in caught if "cuts announced for steps [50]" in str(w.message)]) == 1


# ---- updates


def test_an_update_whose_metrics_are_no_dict_is_refused_before_anything_is_donated():
    def update(*args):
        dense, rows, metrics = update_of(SPEC)(*args)
        return dense, rows, metrics["loss"]

    pipeline = pipeline_of(update=update)
    with pytest.raises(ValueError, match="metrics.*dict"), pipeline:
        list(pipeline.run(make_batches(3)))
    assert int(pipeline.state.dense.step) == 0 == pipeline.tables.step
    with pytest.raises(ValueError, match="metrics.*dict"):
        list(pipeline.run(make_batches(3)))


def test_an_update_that_returns_another_dtype_for_another_batch_size_is_refused_and_breaks_nothing():
    def update(dense, rows, plan, batch):
        new, rows, metrics = update_of(SPEC)(dense, rows, plan, batch)
        if len(batch.label) == 4:
            new = new._replace(params=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), new.params))
        return new, rows, metrics

    half = jax.tree.map(lambda leaf: leaf[:4], make_batches(1)[0])  # of no more rows: the plan keeps its capacity
    pipeline = pipeline_of(update=update)
    with pytest.raises(ValueError, match="changes the shapes of the dense state"), pipeline:
        list(pipeline.run([*make_batches(3), half]))
    assert int(pipeline.state.dense.step) == 3 == pipeline.tables.step


def test_a_hook_that_changes_the_dtype_of_the_dense_state_is_refused():
    def change(state, step, plan, metrics):
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state.dense.params)
        return state._replace(dense=state.dense._replace(params=params)) if step == 2 else state

    with pytest.raises(ValueError, match="a hook returned a dense state of other shapes"), pipeline_of() as pipeline:
        list(pipeline.run(make_batches(6), [change]))
    assert int(pipeline.state.dense.step) == 2 == pipeline.tables.step


def test_a_dense_state_that_died_with_its_update_is_said_to_be_gone():
    def refuse(step):
        if step > 3:
            raise Broken
        return step

    def update(*args):
        dense, rows, metrics = update_of(SPEC)(*args)
        step = jax.pure_callback(refuse, jax.ShapeDtypeStruct((), jnp.int32), dense.step)
        return dense._replace(step=step), rows, metrics

    pipeline = pipeline_of(update=update, window=0)
    with pytest.raises(Exception, match="Broken"), pipeline:  # jax's own error, whose text has it
        list(pipeline.run(make_batches(6)))
    with pytest.raises(BrokenPipeline, match="The dense state is gone") as raised:
        pipeline.drain()
    assert raised.value.dense_step is None


def test_the_failure_is_in_the_context_of_a_body_s_error_that_has_a_cause():
    fetch, cause = Failing(2, to_host, may=threading.Event()), OSError("the cause")
    with pytest.raises(KeyError) as raised, pipeline_of(fetch=fetch) as pipeline:
        for number, _ in enumerate(pipeline.run(make_batches(12)), 1):
            if number == 5:
                fetch.may.set()
                assert fetch.failed.wait(60)
                raise KeyError("the body's") from cause
    found = chain(raised.value)
    assert any(isinstance(error, Broken) for error in found) and cause in found


# ---- the end of the process


SCRIPT = """
import os, sys, time, warnings
import numpy as np, jax
from test_oac import ROWS, SPEC, make_batches, make_state, update_of
from jaxrec.embedding import HostTables
from jaxrec.oac import Pipeline

def fetch(tree):
    time.sleep(0.02)
    if sys.argv[2] == "fails" and pipeline.step == 6:
        raise OSError("the link is down")
    return jax.tree.map(np.asarray, tree)

state = make_state()._replace(tables=HostTables.create(SPEC, ROWS, sys.argv[1]))
pipeline = Pipeline(state, update_of(SPEC), window=3, fetch=fetch)
running = pipeline.run(make_batches(12))
for _ in range(6):
    next(running)
kept = [running, pipeline]
kept.append(kept)
sys.kept = kept  # nothing of it is ever collected
if sys.argv[2] == "exits":
    sys.exit(3)
if sys.argv[2] == "forks":
    warnings.simplefilter("ignore")
    child = os.fork()
    if child == 0:
        pipeline.leave_at_exit()  # not the whole exit, in which others may wait for threads that a fork lacks
        os._exit(0)
    else:
        for _ in range(3000):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.01)
        else:
            os.kill(child, 9)
        assert done and status == 0, status
"""


@pytest.mark.process
@pytest.mark.parametrize("way", [pytest.param("ends", marks=pytest.mark.gate), "exits", "fails", "forks"])
def test_a_process_that_ends_within_a_run_writes_what_it_has_committed(way, tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "tables"), way]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == (3 if way == "exits" else 0), done.stderr
    tables = HostTables.attach(SPEC, ROWS, tmp_path / "tables")
    if way == "fails":
        assert "the link is down" in done.stderr
    else:
        assert tables.step == 6 and done.stderr == ""
        jax.tree.map(np.testing.assert_array_equal, tables.shards, states_of(make_batches(12))[6].tables.shards)


# ---- what hangs


class Hanging:
    """A transfer that hangs at its tenth call until it may go on."""

    def __init__(self):
        self.calls, self.hangs, self.go = itertools.count(), threading.Event(), threading.Event()

    def __call__(self, tree, *placement):
        if next(self.calls) == 9:
            self.hangs.set()
            assert self.go.wait(60)
        return jax.device_put(tree, *placement) if placement else to_host(tree)


class Said(BatchScheduler):
    """Sends a real Ctrl-C when the threads are waited for once more, after the warning."""

    waits = 0

    def wait_for_threads(self, enough=lambda: False):
        self.waits += 1
        if self.waits == 2:
            interrupt_when(lambda: True)
        super().wait_for_threads(enough)


@pytest.mark.parametrize("stage", ["send", "fetch"])
def test_ctrl_c_gives_up_what_hangs_once_it_was_said(stage, ctrl_c):
    """Two real signals: one leaves the loop, the other, after the warning, what hangs."""
    transfer = Hanging()
    pipeline = pipeline_of(**{stage: transfer})
    pipeline.scheduler_type, pipeline.patience_seconds = Said, 0.05
    try:
        with pytest.warns(UserWarning, match=f"oac-{'load' if stage == 'send' else stage} at batch"):
            with pytest.raises(KeyboardInterrupt), pipeline:
                for _ in pipeline.run(make_batches(12)):
                    if transfer.hangs.is_set():
                        interrupt(None)
        with pytest.raises(BrokenPipeline, match="gave up what did not end"):
            pipeline.drain()
        assert pipeline.tables.step is not None
        held = frozen(jaxrec.TrainState((), pipeline.tables))
    finally:
        left = workers("oac-")
        transfer.go.set()
        for thread in left:
            thread.join(60)
    assert len(left) == 1 and no_threads_left()
    assert equal(jaxrec.TrainState((), pipeline.tables), held)  # who woke up touched nothing
