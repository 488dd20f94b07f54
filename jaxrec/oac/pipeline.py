"""The pipeline: batches over host tables in flight in parallel, committed in order, results of one
after the other.

    plan -> send inputs -> admit -> gather -> send rows -> COMMIT -> fetch -> write back        one batch, left to right
    planner  `---------------- loaders ----------------'   caller   fetchers  writers            who does it

The planner numbers the rows of each batch and knows their last writers (`stale`). Loaders gather
when all but the last W batches are written (`flow`, the only throttle). The caller's thread commits
in batch order: replay what is stale, update, append to the ring (`steps`). Writers put final rows
in batch order, each its own shards. `stages` say what is done to a batch, `threads` has the threads
that do it, and `leaving` is how a run ends.

Legend: W window.
"""

import collections
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax

from jaxrec.announced import Cut
from jaxrec.asked import check_hooks, checked_capacity, tell_restarted
from jaxrec.bounds import whole_number
from jaxrec.errors import first, note
from jaxrec.interrupts import uninterrupted
from jaxrec.oac.committing import Committing
from jaxrec.oac.flow import Flow
from jaxrec.oac.stages import Stages, fetch_whole
from jaxrec.oac.steps import Steps, check_same_shapes
from jaxrec.oac.threads import Cuts, Workers
from jaxrec.oac.view import Standing, begin_run, check_alone
from jaxrec.oac.ways import Threads, check_threads, check_update, check_way, mesh_for, state_itself
from jaxrec.sharding import BATCH, SPLIT, plan_specs, shardings
from jaxrec.stream import Stream, Streams
from jaxrec.types import ShardsLost, TrainState


class Pipeline(Committing):
    """Trains over `HostTables` or `RemoteTables` with up to W batches in flight.

        with Pipeline(state, update, mode="oac", window=8) as pipeline:
            for state, metrics in pipeline.run(batches):
                ...
        state = pipeline.state

    Modes: `sync` gathers a batch when the one before it is written; only rows wait, plans and
    inputs go ahead. `oac` gives bitwise the same results with W batches in flight. `async` repairs
    nothing and writes with `add`, as Marius (OSDI 2021): rows are up to W batches old. `semisync`
    is exactly one batch stale and repeatable, as TorchRec's SemiSync: batch t sees rows after batch
    t - 2, and its change is added in order. All modes run the same compiled update.

    Between batches the tables lag behind `state.dense` by up to W + 1 batches: `state.tables`
    refuses to be read until `drain`, and from then to the next batch it can be read.
    `pipeline.tables` are the tables themselves, unguarded.

    However a run is left, what is committed is written, and no failure is swallowed: see `leaving`.
    At a step come the commit, the hooks in their order, the cut, and then failures that are
    emulated; shards that their home has lost come back before the cut.

    Args:
      state: TrainState with tables of host memory or of servers; its dense half is donated.
      update: (dense, rows, plans, batch) -> dense', rows', metrics, as from `make_update`; not
        jitted.
      mode: 'sync', 'async', 'semisync' or 'oac'.
      window: W, how many batches before it may be unwritten when a batch is gathered; fixed in sync
        (0) and semisync (1).
      mesh: from `make_mesh`; that of the state's dense half if None.
      send: (tree of arrays, tree of shardings) -> tree on the device, in a loader's thread;
        `jax.device_put` if None.
      fetch: (tree on the device) -> tree of numpy arrays, in a fetcher's thread; starts a copy and
        waits if None.
      loaders, fetchers, writers: threads of each kind; a writer has its own shards.
      ahead: how many batches are planned, and their inputs sent, before they are admitted.
      validation: 'planned' finds stale rows on the host, where plans are made; 'device' compares
        row numbers and versions on the device, as the abstract says. Same values.
      skip_stale_reads: do not gather and send rows that the ring will patch.
      skip_rewritten: do not fetch and write rows that a batch within the window, planned already,
        will write again. A batch is committed when W more are planned or the stream has ended or
        failed: while a stream blocks, the last W batches taken from it wait.
      capacity: {stack: U} of the plans to begin with, as for `Serial`.

    Memory: see `memory_bytes`.

    Attributes:
      tables: those that are trained, unguarded. state: between two steps. step: committed steps.
      counters: of all runs: `batches` fetched, their `rows`, `stale_rows` and `patched_rows`;
        `bytes_sent` and `bytes_fetched`, all that was handed to `send` and `fetch`;
        `bytes_without_savings`, what that would have been with both savings off.
      compilations: how many programs its runs have compiled: some more whenever a capacity grows.
      flow: where the batches of the run are, to look at.

    Raises:
      ValueError: tables on the device; an unknown mode, a window or number of threads out
        of range; state, update and mesh that do not fit each other.
    """

    flow_type, steps_type = Flow, Steps

    def __init__(
        self, state: TrainState, update: Callable, *, mode: str = "oac", window: int | None = None,
        mesh: jax.sharding.Mesh | None = None, send: Callable | None = None, fetch: Callable | None = None,
        loaders: int = 2, fetchers: int = 1, writers: int = 1, ahead: int = 2, validation: str = "planned",
        skip_stale_reads: bool = False, skip_rewritten: bool = False, capacity: Mapping[str, int] | None = None,
    ):  # fmt: skip
        super().__init__()
        state = state_itself(state)
        check_update(update)
        way = check_way(mode, window, validation, skip_stale_reads, skip_rewritten)
        self.mode, self.window, self._way = way.mode, way.window, way
        self._threads = check_threads(Threads(loaders, fetchers, writers, ahead), state.tables.spec.shards)
        self.tables, spec = state.tables, state.tables.spec
        self._mesh = mesh = mesh_for(mesh, state, update)
        placement = shardings({"inputs": (plan_specs(spec.stacks), BATCH), "rows": SPLIT}, mesh)
        self._steps = self.steps_type(update, way, self.tables, mesh, state.dense)
        self._stages = Stages(
            self.tables,
            way,
            mesh.size,
            send or jax.device_put,
            fetch or fetch_whole,
            placement,
            self._steps.kept,
            self._steps.reads,
            None if capacity is None else checked_capacity(spec, capacity),
        )
        self.compilations, self._compiled_before = 0, 0
        self._cuts, self._streams = Cuts(self._stages, self._steps), Streams()
        self._standing, self._view = self._standing_of(self.tables), self.tables
        self._begin_flow(0, Stream(iter(())))

    def _standing_of(self, tables):
        whole = not self._way.skip_writes
        return Standing(tables, not self._way.adds and whole, whole)

    def _begin_flow(self, number, stream, gone=()):
        ahead = self._threads.ahead + self._way.lookahead
        self.flow = self.flow_type(self.window, ahead, self._threads.writers, number, self.mode == "semisync")
        self.flow.tell_lost(gone)
        self._standing.begin(self.flow, int(self._steps.dense.step))
        self._workers = Workers(self.flow, self._stages, stream, self._standing, self._threads)

    @property
    def counters(self) -> collections.Counter:
        """What has gone through, see above."""
        return self._stages.counters

    def run(
        self, batches: Iterable, hooks: Sequence[Callable] = (), check_every_steps: int = 100
    ) -> Generator[tuple[TrainState, dict], None, None]:
        """Trains on all batches.

        Args:
          batches: Batch after Batch, of one size; consumed by the planner's thread, ahead of what
            is committed, and copied. An iterator that an earlier run has left begins with what was
            taken from it and not trained; what was taken from one that cannot be watched (`map`,
            `zip`) is kept as long as the pipeline.
          hooks: (state, step, plans, metrics) -> state, run in batch order by the thread that
            iterates; they may change the values of the dense state.
          check_every_steps: how often the losses are fetched and checked; they are, too, at the end
            of a run.

        Yields:
          (TrainState, metrics) after every batch. The dense half is donated to the next step.
          Metrics are those of the update, and where rows are repaired 'stale_rows', whose last
          writer was not written when the gather began, and 'patched_rows', which were taken from
          the ring.

        Raises:
          BrokenPipeline: rows were lost before.
          FloatingPointError: a loss is not finite; names the step.
          ValueError: a run goes on, of this or of another pipeline over the same tables; a batch
            that does not fit. Whatever else a stage raised; all with a note that names stage and
            batch.
        """
        if self.running:
            raise ValueError("this pipeline is running: close it, or exhaust the iterator of the run before.")
        check_every_steps = whole_number("check_every_steps", check_every_steps)
        once = check_hooks(hooks)
        self._refuse()
        return self._hold(self._iterate(self._streams.of(batches, self.patience_seconds), once, check_every_steps))

    def _iterate(self, stream, hooks, check_every_steps):
        try:
            self._begin_run(stream)
            # What a hook has lost in a run that a hook behind it has ended.
            self._recover_emulated()
            while (number := self._next_number()) is not None:
                metrics = self._train(number, hooks)
                self._steps.losses.check(check_every_steps)
                yield self._state(), metrics
            self._steps.losses.check()
            self._leave(recovers=True)
            # The last rows may have met lost shards on their way back, when no thread was left to
            # gather anew.
            if not self._untold:
                self._recover_lost()
        except GeneratorExit:  # perhaps from a finalizer, where Python prints what is raised, and drops it
            self._leave(postpone=self._within > 0)
            if self._untold and not self._within:  # else `with` or `close` will tell
                raise first(self._untold) from None  # and it stays untold for the next call
            return
        except BaseException as error:
            self._leave(recovers=isinstance(error, ShardsLost))  # which has told of them
            note(error, self._take_untold())
            raise
        if failures := self._take_untold():
            raise first(failures)
        self._cuts.warn(self.step)

    def _begin_run(self, stream):
        with uninterrupted():
            self._refuse()
            self._left, self._iterating = False, threading.current_thread()
            self._compiled_before = self._steps.compiled()
            # Numbers go on behind everything planned before, so that no row of an earlier run
            # counts as in flight.
            self._begin_flow(self.flow.planned + self.window + 1, stream, self.flow.gone)
            self._standing.turn = begin_run(self.tables, self.flow, self)
            self._workers.start_all()

    def cut(self, step: int, save: Callable[[TrainState], Any], unreached: Literal["warn", "ignore"] = "warn") -> None:
        """Announces a consistent state after a step, to be saved while training goes on.

        When the step is committed its dense state is copied; when its rows are written, `save` runs
        in a thread of its own, with tables that stand exactly after that step. Until it returns,
        later batches are not written, and compute goes on until the window is full.

        Args:
          step: a step that is not committed yet.
          save: (TrainState) -> anything, for example `Checkpointer.save`.
          unreached: whether leaving a run warns that the step was not reached; it stays announced
            for the next run.

        Raises:
          ValueError: the step lies behind, or has a cut already.
          BrokenPipeline: rows are lost.
          Whatever the save of an earlier cut has raised.
        """
        self._refuse()
        self._refuse_unsaved()
        self._cuts.announce(step, self.step, Cut(save, unreached))

    def withdraw(self, step: int) -> None:
        """The cut of a step is not wanted any more; no harm if it was taken."""
        self._cuts.withdraw(step)

    def reset(self, state: TrainState) -> None:
        """Goes on from another state: an image that was restored, after an error or before the next
        run.

        What the ring and the last writers say of earlier batches is void. Cuts that are announced
        are forgotten, as are rows and shards that were lost. The data go back with the state: that
        is the caller's part.

        Args:
          state: TrainState of the same shapes; its step is that of the pipeline from then on.

        Raises:
          ValueError: within a run; a state of other shapes, or over tables of another spec.
          Whatever leaving a run has found and nobody was told.
        """
        if self.running:
            raise ValueError("reset within a run: leave the loop, or close the pipeline, first.")
        self._leave()
        if failures := self._take_untold():
            raise first(failures)
        state = state_itself(state)
        if state.tables.spec.digest != self.tables.spec.digest:
            raise ValueError("reset to tables of another spec: make a new Pipeline for them.")
        check_same_shapes(self._steps.dense, state.dense, "reset to a dense state of other shapes")
        mesh_for(self._mesh, state, self._steps.update)
        check_alone(state.tables, self.flow)
        tell_restarted(self._watchers, state)
        before, self._to_lose = self.step, set()
        self.tables, self._view = state.tables, state.tables
        self._steps.dense, self._stages.tables = state.dense, state.tables
        self._standing = self._standing_of(state.tables)
        self._begin_flow(self.flow.planned + self.window + 1, Stream(iter(())))
        self._cuts.forget(before)  # last, as it may warn
