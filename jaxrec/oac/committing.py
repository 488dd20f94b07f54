"""What the committing thread does: steps with their hooks, being alone with the tables, bringing
back lost shards.

The order at a step: the commit, its hooks in their order, shards that are really gone, the cut,
emulated failures.
"""

import threading
from collections.abc import Callable, Iterable

from jaxrec.asked import check_change, checked_shards
from jaxrec.embedding import HostTables
from jaxrec.interrupts import raise_again, uninterrupted
from jaxrec.oac.leaving import REMEDY, Leaving
from jaxrec.oac.steps import check_same_shapes
from jaxrec.oac.view import LaggingTables
from jaxrec.step import run_hooks
from jaxrec.types import ShardsLost, TrainState


class Committing(Leaving):
    """The steps of a pipeline, and what is done between two of them or in a hook."""

    def __init__(self):
        super().__init__()
        self._to_lose: set[int] = set()  # behind the cut of this step

    def _next_number(self):
        """The batch to commit, when it is loaded and its shards are there; None at the end."""
        lookahead = self._stages.way.lookahead
        while (number := self.flow.wait_to_commit(lookahead)) is None and self._some_to_recover():
            self._recover_lost()
        return number

    def _train(self, number, hooks):
        if self.flow.paused:
            raise ValueError("`exclusive` is at work: take the next batch when it has returned.")
        plans, self._iterating = self._stages.items[number].planned.plans, threading.current_thread()
        try:
            with uninterrupted(again=False) as asked:
                metrics = self._commit(number)
            # A Ctrl-C in the commit waits for the hooks of its step, in which another one is not
            # put off.
            try:
                self._run_hooks(hooks, plans, metrics)
                # Before the cut, which could not save rows that are really gone.
                self._recover_lost()
                # Behind the hooks: what they made of the dense state belongs to the step.
                self._cuts.begin(self.step, self._workers)
                # Behind the cut: an emulated failure finds what was saved at its step.
                self._recover_emulated()
            finally:
                raise_again(asked)
        except Exception as error:
            error.add_note(self._workers.where("commit", number))
            raise
        return metrics

    def _commit(self, number):
        """The step of one batch, whole or not at all: the caller puts signals off."""
        item, before = self._stages.items[number], self._steps.dense
        try:
            item.committed, metrics = self._steps.commit(item, self.flow.floor)
        except BaseException as error:
            if self._steps.dense is not before:  # the step is done, and its rows are gone
                self.flow.tell_committed(number)
                self.flow.fail_behind(number, error)
            elif self._steps.dense_is_gone():
                self.flow.tell_dense_gone()
                self.flow.fail_behind(number, error)
            raise
        # Dropped before another batch may take their place in memory.
        item.loaded = item.inputs = None
        self._view = LaggingTables(self._standing, self.step + 1)
        # Last: from here on a fetcher may have the rows, and the step counts.
        self.flow.tell_committed(number)
        self._steps.losses.note(self.step, metrics)
        return metrics

    def _run_hooks(self, hooks, plans, metrics):
        self._in_hooks = True
        try:
            for hook in hooks:
                before = self._state()
                state = run_hooks([hook], before, self.step, plans, metrics)
                if not isinstance(state, TrainState) or state.tables not in (self._view, self.tables):
                    raise ValueError("a hook returned a state with other tables: change rows in pipeline.exclusive().")
                check_same_shapes(before.dense, state.dense, "a hook returned a dense state of other shapes")
                # After each: the next one may raise, and an earlier state may be donated by then.
                self._steps.dense = state.dense
        finally:
            self._in_hooks = False

    def drain(self) -> HostTables:
        """Waits until all committed batches are written, and returns the tables, now those of
        `state.dense`.

        Call it on the committing thread, for example in a hook that evaluates. Batches gathered
        already stay valid. In semisync it waits until the next batch has come and was gathered, as
        that one must not see the rows of this one.

        Raises:
          BrokenPipeline: rows are lost.
          ValueError: another thread is in the middle of a step.
          Whatever the save of a cut has raised.
        """
        self._refuse()
        self._refuse_elsewhere()
        self.flow.drain()
        self._standing.refuse_broken()
        self._refuse_unsaved()
        if self._stages.way.skip_writes:
            self.flow.wait_for_cut()  # which writes the same rest
            self._refuse_unsaved()
        with uninterrupted():
            # Else it was written, and others may have trained over the tables since.
            if not self._left:
                self._stages.write_rest(self._steps.whole_ring(), self.flow)
            self._standing.settle()
        return self.tables

    def _refuse_unsaved(self):
        if not self._left and self.flow.unsaved is not None:
            raise self.flow.unsaved

    def _refuse_elsewhere(self):
        # A step in another thread may donate the dense state that this call would look at.
        generator, here = self._generator(), threading.current_thread()
        if generator is not None and generator.gi_running and self._iterating is not here:
            raise ValueError("another thread is in the middle of a step: call this on the thread that iterates.")

    def exclusive(self, change: Callable[[HostTables], HostTables]) -> None:
        """Changes the tables while nobody else reads or writes them: what was gathered ahead is
        gathered anew.

            pipeline.exclusive(lambda tables: restore_shard(path, tables, shard)[0])

        For the committing thread, between steps or in a hook; the state that later hooks get and
        that is yielded has the tables as they are then. Tables in host memory are changed in place.

        Args:
          change: (tables) -> tables, those that hold from then on; here the same ones. It is called again if it meets
            lost shards, when those who were entered have brought them back.

        Raises:
          ValueError: `change` is no function, or returns other tables; one is at work already.
          ShardsLost: shards were lost, and nobody who was entered can recover them.
          As `drain`, and whatever `change` raises: what was changed until then stays.
        """
        check_change(change)
        if self.flow.paused:
            raise ValueError("`exclusive` within `exclusive`: the tables are yours already.")
        changed = self._changed_when_whole(change)
        if not self.running:  # whoever changes them then answers for their shards
            self.flow.tell_recovered(self.flow.gone)
        if changed is not self.tables:
            raise ValueError(
                f"the change returned a {type(changed).__name__}: tables in host memory are changed in place, so "
                "return those that it was given."
            )

    def _changed(self, change):
        self.drain()
        self.flow.wait_for_cut()  # it may still be saving
        self._refuse_unsaved()
        try:
            self.flow.pause()
            self._standing.refuse_broken()
            return self._or_lost(change, self.tables)
        finally:
            with uninterrupted():
                # Before the restart: who gathers anew may look at the tables at once. What the ring
                # and the last writers say of earlier batches is forgotten, or a later batch would
                # undo the change.
                self._standing.settle()
                self.flow.restart(self._stages.void)

    def _recover_met(self, shards):
        self.flow.tell_lost(shards)
        in_hooks, self._in_hooks = self._in_hooks, False  # what recovers asks for the state
        try:
            self._recover(self.flow.gone, begin_cut=not in_hooks)
        finally:
            self._in_hooks = in_hooks

    def lose(self, shards: Iterable[int]) -> None:
        """Has lost shards brought back behind the cut of this step, by `recover(shards)` of all
        watchers that have it.

        For a hook that emulates a failure. A home whose shards are really lost says so by
        `ShardsLost`, and the same happens at the step that is committed when it is noticed: what
        was to be written to them by then is lost with them, what was gathered ahead is gathered
        anew. A cut that meets them is saved when they are back.

        Args:
          shards: their numbers.

        Raises:
          ValueError: there is no such shard; nothing runs.
          ShardsLost: by `run`, if no watcher recovers, or shards are lost again and again.
        """
        wanted = checked_shards(self.tables.spec, shards, self.running)
        self._refuse_elsewhere()
        self._to_lose |= wanted

    def _recover_lost(self):
        """Has watchers bring back what homes have lost, until nothing is."""
        while self._some_to_recover():
            self._recover(self.flow.gone)

    def _some_to_recover(self):
        # A run that has failed otherwise tells of that, and the next one begins with what is lost.
        return bool(self.flow.gone) and not self.flow.broken and self.flow.unsaved is None

    def _recover_emulated(self):
        """Has watchers bring back what hooks want lost."""
        # Taken off first: if bringing them back fails, the next step must not lose them once more.
        wanted, self._to_lose = self._to_lose, set()
        if wanted:
            self._recover(wanted)

    def _recover(self, shards, begin_cut=True):
        watchers = self._who_recovers(self.step, shards, REMEDY, f"; now {REMEDY}")
        # The cut of this step belongs before the failure: whoever recovers finds it saved.
        self.flow.wait_for_cut()
        # Behind the wait: a save tells of the loss before it says that it was missed.
        self._cuts.count_recovery(shards, REMEDY)
        before = self.flow.epoch
        try:
            with self._bringing_back():
                for watcher in watchers:
                    watcher.recover(tuple(sorted(shards)))
        except ShardsLost as lost:  # while they came back: all come back once more
            self.flow.tell_lost(lost.shards)
            self._recover({*shards, *lost.shards}, begin_cut)
            return
        # Nobody was alone with the tables: what was parked has to be gathered anew.
        if self.flow.epoch == before:
            self.exclusive(lambda tables: tables)
        # Behind the restart: until then, those who were gathering have told of the same loss.
        self.flow.tell_recovered(shards)
        if self._left:
            self._save_missed()
        elif begin_cut:  # in a hook others are still to come, whose changes belong to the step
            self._cuts.begin(self.step, self._workers)

    def _save_missed(self):
        """Saves, on this thread, what lost shards have kept from being saved, when a run has ended."""
        try:
            self._cuts.save_missed(self.state)
        except ShardsLost as lost:  # again: no worker is left to tell of them
            self.flow.tell_lost(lost.shards)
