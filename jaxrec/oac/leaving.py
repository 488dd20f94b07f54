"""How a run of a pipeline is left, at whatever line, and who is told what leaving has found.

Leaving a run in any way (its end, `break`, an error, Ctrl-C, `close`, dropping its iterator) ends
its threads and writes what is committed. It never waits for the stream: a planner that is blocked
in there is left behind. A failure is raised; where the body of the loop or a hook raises something
else, that goes on, with a note:

  ahead of the commit (stream, plan, send, gather): nothing is lost. All batches before the one that
    failed are trained and written, then the error is raised, and `run` may be called again. Given
    the same iterator again it begins with the batches that were taken and not trained; one that
    could not be planned is left out.
  behind the commit (fetch, write back): rows are lost, and the pipeline is broken. From then on it
    raises BrokenPipeline, which says at which steps the dense state and each shard stand.
  the save of a cut: no further batch is committed, the tables are whole, and `run` may be called
    again.
  shards that are lost while a run is left other than by its end: nobody brings them back, and
    ShardsLost says so. The next run begins with that.

A step that is committed keeps what belongs to it: a Ctrl-C (or a SIGTERM whose handler raises) that
comes in the commit waits for the hooks of the step, in which a second one is not put off, and the
cut of the step is saved though a hook raised or was interrupted. What leaving by `break` without
`with` has found is printed, and raised by the next call. A process that ends within a run writes
what is committed.

A `send` or `fetch` that never returns keeps the run from being left: after 10 seconds a warning
says which threads are awaited, at which batch. From then on Ctrl-C gives up those that are in
`send` or `fetch`, which breaks the pipeline. The save of a cut is never given up.
"""

import atexit
import os
import threading
import traceback

import jax

from jaxrec.embedding import HostTables
from jaxrec.errors import caught, first
from jaxrec.interrupts import uninterrupted
from jaxrec.oac.flow import Flow
from jaxrec.oac.stages import Stages
from jaxrec.oac.steps import Steps
from jaxrec.oac.threads import Cuts, Workers
from jaxrec.oac.view import Standing, check_alone, end_run, pipelines_in_a_run
from jaxrec.types import ShardsLost, TrainState
from jaxrec.watched import Watched

REMEDY = "bring them back in `exclusive`, or go on from an image with `reset`"


class Leaving(Watched):
    """The ends of a pipeline's runs. `Pipeline` is the one that has this; its parts are listed
    here."""

    _name = "pipeline"
    # How long leaving waits before it says what it waits for, and `run` for an iterator in use.
    patience_seconds = 10.0

    tables: HostTables
    flow: Flow
    compilations: int
    _stages: Stages
    _steps: Steps
    _standing: Standing
    _cuts: Cuts
    _workers: Workers
    _compiled_before: int
    _view: HostTables  # the tables of the state: they refuse while they lag

    def __init__(self):
        super().__init__()
        self._interrupted: list[int] = []  # signals that came while a finalizer left the run
        self._iterating: threading.Thread | None = None  # who takes the batches of the run
        self._left, self._in_hooks = True, False

    def _leave(self, postpone: bool = False, recovers: bool = False) -> None:
        """Ends the threads of a run, writes what is committed, and keeps what went wrong. Once more
        is no harm.

        Args:
          postpone: whether a signal that comes meanwhile is raised by `close` or by the end of the
            `with` block.
          recovers: whether the caller brings lost shards back, so that they are no failure.
        """
        flow, workers = self.flow, self._workers
        with uninterrupted() as asked:
            # A fork has the run without its threads.
            if self._left or workers.process != os.getpid():
                return
            if threading.current_thread() in workers.threads:
                flow.finish()
                # The collector has dropped the run in here: the next call waits for the threads.
                return
            # Before the threads are told that no more will come: of the last step, if its hooks
            # were interrupted.
            failed = caught(lambda: self._cuts.begin(self.step, workers))
            workers.end(asked, self.patience_seconds)
            if not flow.broken:
                # Behind the threads, so that nothing older comes after it.
                self._write_rest()
            elif not flow.given_up:
                if isinstance(caught(lambda: jax.block_until_ready(self._steps.dense)), BaseException):
                    flow.tell_dense_gone()
            # The tables are free for others only when all is written.
            end_run(flow)
            self.compilations += self._steps.compiled() - self._compiled_before
            self._left = True
            unrecovered = ShardsLost(flow.gone, REMEDY) if flow.gone and not recovers else None
            failures = (flow.lost, flow.unsaved, flow.failure, failed, caught(self._steps.losses.check), unrecovered)
            self._untold += [failure for failure in failures if failure is not None]
            if postpone and asked:
                self._interrupted = [*asked]
                asked.clear()

    def _write_rest(self):
        try:
            self._stages.write_rest(self._steps.whole_ring(), self.flow)
        except Exception as error:
            error.add_note("in the last write of a run of the pipeline")
            self.flow.fail_behind(self.flow.committed, error)
        else:
            self._standing.settle()
            self._view = self.tables

    def _refuse(self):
        """Raises what speaks against any use: rows that were lost, what nobody was told, tables in
        other hands."""
        if threading.current_thread() in self._workers.threads:
            raise ValueError("a thread of the pipeline cannot wait for it: call this on the thread that iterates.")
        if not self.running:
            self._leave()
        self._standing.refuse_broken()
        if failures := self._take_untold():
            raise first(failures)
        check_alone(self.tables, self.flow)

    def close(self) -> None:
        """Ends a run: what is committed is written, what is not comes first when the same iterator
        is given to `run`.

        Raises:
          ValueError: in a hook, which leaves a run by an exception; in another thread than the one
            that iterates.
          Whatever a stage raised, unless it was raised before.
        """
        super().close()

    def _end(self):
        generator, self._within = self._generator(), self._within + 1
        try:
            with uninterrupted() as asked:
                if self.running:
                    self._refuse_close(generator)
                if generator is not None:
                    generator.close()
                self._leave()
                asked += self._interrupted
                self._interrupted = []
        finally:
            self._within -= 1
        return self._take_untold()

    def _refuse_close(self, generator):
        here, iterating = threading.current_thread(), self._iterating
        if here in self._workers.threads:
            raise ValueError("close was called by a thread of the pipeline (a cut's save, send, fetch): raise there.")
        if iterating is not None and iterating is not here and iterating.is_alive() and not self._left:
            raise ValueError(
                f"close was called in another thread than {iterating.name!r}, which iterates over the run: leave the "
                "loop there."
            )
        if generator.gi_running:
            raise ValueError("close was called within the run, by a hook: raise an exception to leave it.")

    def leave_at_exit(self) -> None:
        """Leaves a run that the end of the process has come upon; unlike `close`, whoever it
        belongs to.

        Raises:
          As `close`.
        """
        self._leave()
        if failures := self._take_untold():
            raise first(failures)

    @property
    def state(self) -> TrainState:
        """The state after the last step; for who calls between two steps.

        Raises:
          ValueError: in a hook or in the save of a cut, which have one of their own.
        """
        if self._in_hooks or threading.current_thread() in self._workers.threads:
            raise ValueError(
                "pipeline.state was read in a hook or in the save of a cut: take the state that it was given, as this "
                "one is behind what earlier hooks have made of it, or ahead."
            )
        return self._state()

    def _state(self):
        return TrainState(self._steps.dense, self._view)

    @property
    def step(self) -> int:  # type: ignore[override]
        """How many steps the state has seen."""
        return self._standing.step


@atexit.register
def _leave_all():
    """Interpreters end in the middle of threads: what is committed is written first, and what went
    wrong is said."""
    for pipeline in pipelines_in_a_run():
        try:
            pipeline.leave_at_exit()
        except Exception:
            traceback.print_exc()
