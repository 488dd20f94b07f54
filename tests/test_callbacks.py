"""The laws of callbacks, for all engines: their order, what each sees, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from click_model import loss
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrec
from jaxrec import Batch, Callback, EmbeddingSpec, Lookup, Serial, Table, every, sgd
from jaxrec.cpr import RolledBack
from jaxrec.oac import Pipeline
from jaxrec.shadowsync import FreeTrainers
from jaxrec.types import ShardsLost

SPEC = EmbeddingSpec({"item": Table(40, 4)}, {"item": Lookup("item")}, shards=4)
TASK = jaxrec.Task(SPEC, loss, optax.sgd(0.1), sgd(0.1), jaxrec.make_mesh(devices=jax.devices()[:1]))
STEPS, LOST_AT = 4, 2
ENGINES = {
    "serial": lambda callbacks: Serial(TASK, fresh(), callbacks),
    "pipeline": lambda callbacks: Pipeline(TASK, fresh(), callbacks, window=2),
    "trainers": lambda callbacks: FreeTrainers(TASK, fresh(), callbacks=callbacks, stretch_steps=1),
}
each = pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)
that_recover = pytest.mark.parametrize("make", [ENGINES["serial"], ENGINES["pipeline"]], ids=["serial", "pipeline"])


def fresh():
    return TASK.init({"w": jnp.ones(4)}, "host")


def batches(start=0):
    for number in range(start, STEPS):
        yield Batch({"item": np.arange(8, dtype=np.int32) + number}, np.ones(8, np.float32))


def shifted(state, by):
    return state._replace(dense=state.dense._replace(params={"w": state.dense.params["w"] + by}))


class Noting(Callback):
    """Notes each call, and adds its number to the weights, so that the order of changes can be seen too."""

    def __init__(self, number, notes):
        self.number, self.notes = number, notes

    def begin(self, engine):
        self.engine = engine
        self.notes.append(("begin", self.number))

    def after_step(self, info):
        self.notes.append(("after_step", self.number, info.step))
        return shifted(info.state, self.number)

    def restarted(self, state):
        self.notes.append(("restarted", self.number))

    def end(self, error):
        self.notes.append(("end", self.number, type(error).__name__))
        return True  # which suppresses no error


class Recovering(Noting):
    def recover(self, shards):
        self.notes.append(("recover", self.number, shards))


def in_order(notes, what):
    return [note[1] for note in notes if note[0] == what]


@each
@given(kinds=st.lists(st.sampled_from(["object", "recovers", "function"]), max_size=5))
@settings(max_examples=8, deadline=None)
def test_callbacks_are_called_in_the_order_of_their_list_and_ended_in_reverse(make, kinds):
    notes = []
    kind_of = {"object": Noting, "recovers": Recovering, "function": lambda *args: Noting(*args).after_step}
    listed = [kind_of[kind](number, notes) for number, kind in enumerate(kinds)]
    objects = [number for number, kind in enumerate(kinds) if kind != "function"]
    recovering = [number for number, kind in enumerate(kinds) if kind == "recovers"]

    def lose(info):  # comes last, as `enter` appends
        if info.step == LOST_AT and recovering and make is not ENGINES["trainers"]:
            engine.lose([1, 3])

    with make(listed) as engine:
        assert notes == [("begin", number) for number in objects]
        engine.enter(lose)
        engine.train(batches())
        engine.reset(engine.state)
        assert in_order(notes, "end") == []
    assert in_order(notes, "after_step") == [*range(len(kinds))] * STEPS
    assert in_order(notes, "restarted") == objects
    assert in_order(notes, "end") == objects[::-1]
    if make is not ENGINES["trainers"]:
        assert in_order(notes, "recover") == recovering
        assert {note[2] for note in notes if note[0] == "recover"} <= {(1, 3)}
        if recovering:  # after all callbacks of the step, before the next
            recovered = notes.index(("recover", recovering[0], (1, 3)))
            assert [note[2] for note in notes[:recovered] if note[0] == "after_step"][-1] == LOST_AT
            assert [note[2] for note in notes[recovered:] if note[0] == "after_step"][:1] == [LOST_AT + 1]


def test_tables_that_a_callback_has_replaced_stay_though_it_returns_a_state_with_those_before():
    """Of device tables, which are new objects; other tables change in place."""

    def cleared(tables):
        rows = {name: np.zeros_like(part[0]) for name, part in tables.parts("width_4").items()}
        return tables.with_shard("width_4", 0, rows)

    def change(info):
        engine.exclusive(cleared)
        return shifted(info.state, 1)

    engine = Serial(TASK, TASK.init({"w": jnp.ones(4)}), [change])
    before = np.asarray(engine.state.tables.parts("width_4")["value"][0])
    state = engine.train([next(batches())])
    plain = Serial(TASK, TASK.init({"w": jnp.ones(4)})).train([next(batches())])
    assert before.any() and not np.asarray(state.tables.parts("width_4")["value"][0]).any()
    np.testing.assert_allclose(state.dense.params["w"], plain.dense.params["w"] + 1, rtol=1e-6)


@each
def test_each_sees_the_state_of_the_one_before_and_none_leaves_it(make):
    seen = []

    def note(info):
        seen.append(np.array(info.state.dense.params["w"]).copy())

    with make([note, lambda info: shifted(info.state, 2.0), note, lambda info: None, note]) as engine:
        for state, _ in engine.run(batches()):
            seen.append(np.array(state.dense.params["w"]))
            before, after, same, yielded = seen[-4:]
            np.testing.assert_allclose(after, before + 2.0, rtol=1e-6)
            assert (after == same).all() and (after == yielded).all()
    assert len(seen) == 4 * STEPS


@each
def test_a_failed_callback_keeps_the_changes_before_it_and_its_error_ends_all(make):
    notes = []

    def fail(info):
        raise KeyError("mine")

    first, last = Noting(1, notes), Noting(2, notes)
    with pytest.raises(KeyError, match="mine"), make([first, fail, last]) as engine:
        engine.train(batches())
    assert in_order(notes, "after_step") == [1]
    assert [note for note in notes if note[0] == "end"] == [("end", 2, "KeyError"), ("end", 1, "KeyError")]


@each
def test_a_callback_that_returns_something_else_is_named(make):
    def wrong(info):
        return 3.5

    with pytest.raises(ValueError, match="wrong at .* returned a float: return the state"), make([wrong]) as engine:
        engine.train(batches())


@each
def test_callbacks_that_began_before_one_that_cannot_are_ended(make):
    notes = []

    class Refusing(Noting):
        def begin(self, engine):
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"), make([Noting(1, notes), Refusing(2, notes), Noting(3, notes)]):
        pass
    assert notes == [("begin", 1), ("end", 1, "OSError")]


@each
def test_objects_want_a_block_and_functions_do_not(make):
    seen = []
    engine = make([lambda info: seen.append(info.step)])
    engine.train(batches())
    assert seen == [*range(1, STEPS + 1)]
    with pytest.raises(ValueError, match="run it within `with engine:`"):
        make([Noting(1, [])]).run(batches())
    with pytest.raises(ValueError, match="whose end will end it"):
        engine.enter(Noting(1, []))


@each
def test_entered_callbacks_come_last_and_end_with_the_block(make):
    notes = []
    with make([Noting(1, notes)]) as engine:
        assert engine.enter(second := Noting(2, notes)) is second
        engine.train(batches(STEPS - 1))
    assert in_order(notes, "after_step") == [1, 2] and in_order(notes, "end") == [2, 1]
    assert engine.callbacks == ()


@that_recover
def test_a_run_goes_back_inside_and_continues_with_the_batches_from_there(make):
    begun = fresh()
    kept = jax.tree.map(np.array, (begun.dense, begun.tables.parts("width_4")))

    class GoingBack(Callback):
        goes_back, times = True, 0

        def begin(self, engine):
            self.engine = engine

        def after_step(self, info):
            if info.step == 3 and not self.times:
                self.engine.lose([0])

        def recover(self, shards):
            raise RolledBack(self.go_back)

        def go_back(self):
            self.times += 1
            assert not self.engine.running
            self.engine.reset(fresh())

    asked, steps = [], []

    def stream(step):
        asked.append(step)
        return batches(step)

    with make([GoingBack(), lambda info: steps.append(info.step)]) as engine:
        with pytest.raises(ValueError, match="which an iterator cannot"):
            engine.train(batches())
        back = engine.train(stream)
    assert asked == [0, 0] and steps == [1, 2, 3, 1, 2, 3, 4]
    with make([]) as engine:
        plain = engine.train(batches())
    alike = jax.tree.map(np.array_equal, jax.device_get(back.dense), jax.device_get(plain.dense))
    assert all(jax.tree.leaves(alike))
    moved = jax.tree.map(np.array_equal, kept[0].params, jax.device_get(plain.dense.params))
    assert not any(jax.tree.leaves(moved))  # negative control: training changes what is compared


@that_recover
def test_without_a_callback_that_recovers_lost_shards_end_the_run(make):
    with pytest.raises(ShardsLost, match="no callback restores them"), make([Noting(1, [])]) as engine:
        engine.enter(lambda info: engine.lose([2]))
        engine.train(batches())


def test_every_calls_at_the_multiples_only_and_passes_the_result_on():
    changed = every(2, lambda info: shifted(info.state, 1.0))
    with Serial(TASK, fresh(), [changed]) as engine:
        found = engine.train(batches())
    with Serial(TASK, fresh(), [lambda info: shifted(info.state, 1.0) if info.step in (2, 4) else None]) as engine:
        wanted = engine.train(batches())
    np.testing.assert_array_equal(found.dense.params["w"], wanted.dense.params["w"])
    with pytest.raises(ValueError, match="steps=0"):
        every(0, lambda info: None)
