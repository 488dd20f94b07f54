"""The pipeline: batches over host tables in flight in parallel, committed in order, results of one after the other.

    plan -> send inputs -> admit -> gather -> send rows -> COMMIT -> fetch -> write back        one batch, left to right
    planner  `---------------- loaders ----------------'   caller   fetchers  writers            who does it

The planner numbers the rows of each batch and knows their last writers (`stale`). Loaders gather when all but the last
W batches are written (`flow`, the only throttle). The caller's thread commits in batch order: replay what is stale,
update, append to the ring (`ring`). Writers put final rows in batch order, each its own shards.

Legend: W window, S shards, U padded unique rows a shard, C rows that travel, E embedding width, K slot width.
"""

import atexit
import collections
import contextlib
import dataclasses
import functools
import os
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec import boundary
from jaxrec.embedding import HostTables, capacity_of, plan
from jaxrec.embedding.planning import without_gaps
from jaxrec.interrupts import raise_again, uninterrupted
from jaxrec.oac import ring as rings
from jaxrec.oac import turns
from jaxrec.oac.arguments import check_update, check_window, mesh_for, state_itself, whole_number
from jaxrec.oac.failures import caught, first, note
from jaxrec.oac.flow import Flow
from jaxrec.oac.sizes import VALIDATIONS, Travelling, nbytes
from jaxrec.oac.stale import LastWriters, found, mark_rewritten, newest_rows, written_since
from jaxrec.oac.view import LaggingTables, Standing
from jaxrec.sharding import BATCH, EVERYWHERE, SPLIT, plan_specs, shardings
from jaxrec.step import check_finite, run_hooks
from jaxrec.stream import END, Stream, Streams
from jaxrec.types import Batch, Plan, TrainState


@dataclasses.dataclass
class _Item:
    """One batch on its way; each stage fills what the next one reads."""

    number: int
    batch: Any
    plan: dict[str, Plan]
    source: dict[str, np.ndarray]  # where the ring holds each row, -1 where the gather will be right
    keep: dict[str, np.ndarray]  # bool[S, U], the rows to write back
    inputs: Any = None  # (plan, batch) on the device
    read: Any = None  # what the gather read, on the host, for `add`
    rows: Any = None  # (rows, source, place of each row among those sent) on the device
    watermark: int = 0  # when the gather began
    stale: Any = 0  # rows whose last writer was not written by then
    patched: Any = 0  # rows that the ring gives; on the device if they are found there
    back: Any = None  # (plans, rows) to write: on the device, then on the host


class Pipeline:
    """Trains over `HostTables` with up to W batches in flight.

    with Pipeline(state, update, mode="oac", window=8) as pipeline:
        for state, metrics in pipeline.run(batches):
            ...
    state = pipeline.state

    Modes: `sync` gathers a batch when the one before it is written; only rows wait, plans and inputs go ahead. `oac`
    gives bitwise the same results with W batches in flight. `async` repairs nothing and writes with `add`, as Marius
    (OSDI 2021): rows are up to W batches old. `semisync` is exactly one batch stale and repeatable, as TorchRec's
    SemiSync: batch t sees rows after batch t - 2, and its change is added in order. All modes run the same compiled
    update.

    Between batches the tables lag behind `state.dense` by up to W + 1 batches: `state.tables` refuses to be read until
    `drain`, and from then to the next batch it can be read. `pipeline.tables` are the tables themselves, unguarded.

    Leaving a run in any way (its end, `break`, an error, Ctrl-C, `close`, dropping its iterator) ends its threads and
    writes what is committed. It never waits for the stream: a planner that is blocked in there is left behind. A
    failure is raised; where the body of the loop or a hook raises something else, that goes on, with a note:

      ahead of the commit (stream, plan, send, gather): nothing is lost. All batches before the one that failed are
        trained and written, then the error is raised, and `run` may be called again. Given the same iterator again it
        begins with the batches that were taken and not trained; one that could not be planned is left out.
      behind the commit (fetch, write back): rows are lost, and the pipeline is broken. From then on it raises
        BrokenPipeline, which says at which steps the dense state and each shard stand.
      the save of a cut: no further batch is committed, the tables are whole, and `run` may be called again.

    A step that is committed keeps what belongs to it: a Ctrl-C (or a SIGTERM whose handler raises) that comes in the
    commit waits for the hooks of the step, in which a second one is not put off, and the cut of the step is saved
    though a hook raised or was interrupted. What leaving by `break` without `with` has found is printed, and raised by
    the next call. A process that ends within a run writes what is committed.

    A `send` or `fetch` that never returns keeps the run from being left: after 10 seconds a warning says which threads
    are awaited, at which batch. From then on Ctrl-C gives up those that are in `send` or `fetch`, which breaks the
    pipeline. The save of a cut is never given up.

    Args:
      state: TrainState with HostTables; its dense half is donated.
      update: (dense, rows, plan, batch) -> dense', rows', metrics, as from `make_update`; not jitted.
      mode: 'sync', 'async', 'semisync' or 'oac'.
      window: W, how many batches before it may be unwritten when a batch is gathered; fixed in sync (0) and semisync
        (1).
      mesh: from `make_mesh`; that of the state's dense half if None.
      send: (tree of arrays, tree of shardings) -> tree on the device, in a loader's thread; `jax.device_put` if None.
      fetch: (tree on the device) -> tree of numpy arrays, in a fetcher's thread; starts a copy and waits if None.
      loaders, fetchers, writers: threads of each kind; a writer has its own shards.
      ahead: how many batches are planned, and their inputs sent, before they are admitted.
      validation: 'planned' finds stale rows on the host, where plans are made; 'device' compares row numbers and
        versions on the device, as the paper says. Same values.
      skip_stale_reads: do not gather and send rows that the ring will patch.
      skip_rewritten: do not fetch and write rows that a batch within the window, planned already, will write again.
        A batch is committed when W more are planned or the stream has ended or failed: while a stream blocks, the last
        W batches taken from it wait.

    Memory: see `memory_bytes`.

    Attributes:
      counters: of all runs: `batches` fetched, their `rows`, `stale_rows` and `patched_rows`; `bytes_sent` and
        `bytes_fetched`, all that was handed to `send` and `fetch`; `bytes_without_savings`, what that would have been
        with both savings off.

    Raises:
      ValueError: tables that are not HostTables; an unknown mode, a window or number of threads out of range; state,
        update and mesh that do not fit each other.
    """

    flow_type = Flow
    patience_seconds = 10.0  # how long leaving waits before it says what it waits for, and `run` for an iterator in use

    def __init__(
        self,
        state: TrainState,
        update: Callable,
        *,
        mode: str = "oac",
        window: int | None = None,
        mesh=None,
        send: Callable | None = None,
        fetch: Callable | None = None,
        loaders: int = 2,
        fetchers: int = 1,
        writers: int = 1,
        ahead: int = 2,
        validation: str = "planned",
        skip_stale_reads: bool = False,
        skip_rewritten: bool = False,
    ):
        state = state_itself(state)
        check_update(update)
        self.mode, self.window = mode, check_window(mode, window)
        counts = {"loaders": loaders, "fetchers": fetchers, "writers": writers, "ahead": ahead}
        loaders, fetchers, writers, ahead = (whole_number(name, count, 1) for name, count in counts.items())
        if writers > state.tables.spec.shards:
            raise ValueError(f"writers={writers} must not be more than the shards, {state.tables.spec.shards}.")
        if validation not in VALIDATIONS:
            raise ValueError(f"validation={validation!r} must be 'planned' or 'device'.")
        self._repairs = mode == "oac" and self.window > 0
        if (skip_stale_reads or skip_rewritten) and (validation == "device" or not self._repairs):
            raise ValueError("skip_stale_reads and skip_rewritten need mode='oac', window > 0, validation='planned'.")
        self.state, self.tables = state, state.tables
        self.counters: collections.Counter = collections.Counter()
        self._skip_reads, self._skip_writes = skip_stale_reads, skip_rewritten
        self._send, self._fetch = send or jax.device_put, fetch or _fetch
        self._loaders, self._fetchers, self._writers, self._ahead = loaders, fetchers, writers, ahead
        # A write may be skipped only when the batches up to W later are known.
        self._lookahead = self.window if skip_rewritten else 0
        self._depth = max(1, self.window)
        planned = self._repairs and validation == "planned"
        self._last = LastWriters(self.tables.spec, self.window, self._depth) if planned else None
        mesh = self._mesh = mesh_for(mesh, state, update)
        self._placement = shardings({"inputs": (plan_specs(self.tables.spec.stacks), BATCH), "rows": SPLIT}, mesh)
        self._update, self._pure_update = jax.jit(update, donate_argnums=0), update
        self._replay, self._append, self._validate, self._take, self._new_ring, self._widen = _programs(
            mesh, tuple(self.tables.spec.stacks)
        )
        self.compilations = 0  # how many programs its runs have compiled: some more whenever a capacity grows
        self._ring: rings.Ring | None = None
        self._capacity: dict[str, int] | None = None
        self._travelling: dict = collections.defaultdict(Travelling)  # (direction, stack) -> C
        self._checked: set = set()
        self._cuts: dict[int, tuple[Callable, str]] = {}  # step -> (save, what to do if it is never reached)
        self._running: Callable = lambda: None  # weak: who drops the iterator of a run has left it
        self._within = 0  # how many `with` blocks and `close` will raise what leaving a run has found
        self._untold: list[BaseException] = []
        self._interrupted: list[int] = []  # signals that came while a finalizer left the run
        self._iterating: threading.Thread | None = None  # who takes the batches of the run
        self._streams, self._stream = Streams(), Stream(iter(()))
        self._threads: list[threading.Thread] = []
        self._at: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # thread -> the batch it is at
        adds = mode in ("async", "semisync")
        self._standing = Standing(self.tables, exact=not adds and not skip_rewritten, whole=not skip_rewritten)
        self._flow: Any = None
        self._begin_flow()
        self._left, self._process = True, os.getpid()

    def _begin_flow(self):
        # Numbers go on behind everything planned before, so that no row of an earlier run counts as in flight.
        first = 0 if self._flow is None else self._flow.planned + self.window + 1
        one_stale, ahead = self.mode == "semisync", self._ahead + self._lookahead
        self._flow = self.flow_type(self.window, ahead, self._writers, first, one_stale)
        self._items: dict[int, _Item] = {}
        self._losses: list = []  # (step, loss), not looked at yet
        self._standing.begin(self._flow, int(self.state.dense.step))

    def _programs_compiled(self):
        jitted: Any = (self._update, self._replay, self._append, self._validate, self._take)
        return sum(f._cache_size() for f in jitted if hasattr(f, "_cache_size"))

    @property
    def step(self) -> int:
        """How many steps the state has seen."""
        return self._standing.step

    def run(
        self, batches: Iterable, hooks: Sequence[Callable] = (), check_every_steps: int = 100
    ) -> Generator[tuple[TrainState, dict], None, None]:
        """Trains on all batches.

        Args:
          batches: Batch after Batch, of one size; consumed by the planner's thread, ahead of what is committed, and
            copied. An iterator that an earlier run has left begins with what was taken from it and not trained; what
            was taken from one that cannot be watched (`map`, `zip`) is kept as long as the pipeline.
          hooks: (state, step, plan, metrics) -> state, run in batch order by the thread that iterates; they may change
            the values of the dense state.
          check_every_steps: how often the losses are fetched and checked; they are, too, at the end of a run.

        Yields:
          (TrainState, metrics) after every batch. The dense half is donated to the next step. Metrics are those of
          the update, and where rows are repaired 'stale_rows', whose last writer was not written when the gather
          began, and 'patched_rows', which were taken from the ring.

        Raises:
          BrokenPipeline: rows were lost before.
          FloatingPointError: a loss is not finite; names the step.
          ValueError: a run goes on, of this or of another pipeline over the same tables; a batch that does not fit.
            Whatever else a stage raised; all with a note that names stage and batch.
        """
        if self.running:
            raise ValueError("this pipeline is running: close it, or exhaust the iterator of the run before.")
        check_every_steps = whole_number("check_every_steps", check_every_steps, 1)
        once = (None,) if callable(hooks) or not isinstance(hooks, Iterable) else tuple(hooks)
        if not all(map(callable, once)):
            raise ValueError("hooks must be a list of functions (state, step, plan, metrics) -> state: hooks=[hook].")
        self._refuse()
        generator = self._iterate(self._streams.of(batches, self.patience_seconds), once, check_every_steps)
        self._running = weakref.ref(generator)
        return generator

    def _iterate(self, stream, hooks, check_every_steps):
        try:
            self._begin_run(stream)
            while (number := self._flow.wait_to_commit(self._lookahead)) is not None:
                metrics = self._train(number, hooks, check_every_steps)
                yield self.state, metrics
            self._check_losses()
        except GeneratorExit:  # perhaps from a finalizer, where Python prints what is raised, and drops it
            self._leave(postpone=self._within > 0)
            if self._untold and not self._within:  # else `with` or `close` will tell
                raise first(self._untold) from None  # and it stays untold for the next call
            return
        except BaseException as error:
            self._leave()
            note(error, self._take_untold())
            raise
        self._leave()
        if failures := self._take_untold():
            raise first(failures)
        self._warn_of_cuts()

    def _begin_run(self, stream):
        with uninterrupted():
            self._refuse()
            compiled, self._left, self._process = self._programs_compiled(), False, os.getpid()
            self._begin_flow()
            self._stream, self._compiled_before = stream, compiled
            self._threads, self._iterating = [], threading.current_thread()
            stream.free.clear()
            self._standing.turn = turns.begin(self.tables, self._flow, self)
            self._start("plan", self._plan_all, stream)
            for _ in range(self._loaders):
                self._start("load", self._load_all)
            for _ in range(self._fetchers):
                self._start("fetch", self._fetch_all)
            for writer in range(self._writers):
                self._start("write back", self._write_all, writer)

    def _train(self, number, hooks, check_every_steps):
        if self._flow.paused:
            raise ValueError("`exclusive` is not left yet: take the next batch after its block.")
        item, self._iterating = self._items[number], threading.current_thread()
        try:
            with uninterrupted(again=False) as asked:
                metrics = self._commit(item)
                if "loss" in metrics:
                    self._losses.append((self.step, metrics["loss"]))
            try:  # a Ctrl-C in the commit waits for the hooks of its step, in which another one is not put off
                self._run_hooks(hooks, item.plan, metrics)
                self._begin_cut()
            finally:
                raise_again(asked)
        except Exception as error:
            error.add_note(self._where("commit", number))
            raise
        if len(self._losses) >= check_every_steps:
            self._check_losses()
        return metrics

    def _run_hooks(self, hooks, plans, metrics):
        state = run_hooks(hooks, self.state, self.step, plans, metrics)
        if not isinstance(state, TrainState) or state.tables not in (self.state.tables, self.tables):
            raise ValueError("a hook returned a state with other tables: change rows in pipeline.exclusive().")
        if state.dense is not self.state.dense and _shapes(state.dense) != _shapes(self.state.dense):
            raise ValueError(
                f"a hook returned a dense state of other shapes: {_shapes(state.dense)} in place of "
                f"{_shapes(self.state.dense)}. A hook may change its values alone."
            )
        self.state = state._replace(tables=self.state.tables)

    def _check_losses(self):
        losses, self._losses = self._losses, []
        if losses:
            check_finite([loss for _, loss in losses], losses[-1][0])

    def _leave(self, postpone: bool = False) -> None:
        """Ends the threads of a run, writes what is committed, and keeps what went wrong. Once more is no harm."""
        flow = self._flow
        with uninterrupted() as asked:
            if self._left or self._process != os.getpid():  # a fork has the run without its threads
                return
            if threading.current_thread() in self._threads:
                flow.finish()
                return  # the collector has dropped the run in here: the next call waits for the threads
            failed = caught(self._begin_cut)  # of the last step, if its hooks raised or were interrupted
            flow.finish()
            self._wait_for_threads(asked)
            for thread in self._threads:
                behind = flow.given_up and thread.name in ("oac-load", "oac-fetch")
                if not behind and not (flow.alive["plan"] and thread is self._threads[0]):
                    thread.join()
            self._keep_untrained()
            if not flow.broken:
                self._write_all_rest()
            elif not flow.given_up:
                flow.dense_gone |= isinstance(caught(lambda: jax.block_until_ready(self.state.dense)), BaseException)
            turns.end(flow)
            self.compilations += self._programs_compiled() - self._compiled_before
            self._threads, self._left = [], True
            failures = (flow.lost, flow.unsaved, flow.failure, failed)
            self._untold += [failure for failure in failures if failure is not None]
            try:
                self._check_losses()
            except FloatingPointError as error:
                self._untold.append(error)
            if postpone and asked:
                self._interrupted = [*asked]
                asked.clear()

    def _wait_for_threads(self, asked):
        flow, late = self._flow, time.monotonic() + self.patience_seconds
        flow.wait_for_threads(lambda: time.monotonic() > late)
        if flow.over():
            return
        alive = [thread for thread in self._threads if thread.is_alive()]
        awaited = ", ".join(f"{thread.name} at batch {self._at[thread][0] - flow.first}" for thread in alive)
        with contextlib.suppress(UserWarning):  # where warnings are errors the run is to be left all the same
            warnings.warn(
                f"leaving the run waits for threads that have not ended yet: {awaited}. Ctrl-C gives up what hangs in "
                "`send` or `fetch`, and breaks the pipeline.",
                stacklevel=4,
            )
        before = len(asked)  # who saves or writes has the tables in hand, and is never given up
        flow.wait_for_threads(lambda: len(asked) > before and flow.alive["load"] + flow.alive["fetch"] > 0)
        if not flow.over():
            flow.give_up(InterruptedError(f"Ctrl-C gave up what did not end: {awaited}"))
            flow.wait_for_threads()

    def _keep_untrained(self):
        """What was planned and not committed comes first if the iterator comes again."""
        flow, stream = self._flow, self._stream
        left = [self._items[number].batch for number in range(flow.committed, flow.planned)]
        stream.waiting.extendleft(reversed(left))
        if not self._threads:  # no thread could be started, so none will say so
            stream.free.set()
        stream.rest()
        self._stream, self._items = Stream(iter(())), {}

    def _take_untold(self):
        failures, self._untold = self._untold, []
        return failures

    def _write_all_rest(self):
        try:
            self._write_rest(self._ring)
        except Exception as error:
            error.add_note("in the last write of a run of the pipeline")
            self._flow.fail_behind(self._flow.committed, error)
        else:
            self._standing.settle()
            self.state = self.state._replace(tables=self.tables)

    def _refuse(self):
        """Raises what speaks against any use: rows that were lost, what nobody was told, tables in other hands."""
        if threading.current_thread() in self._threads:
            raise ValueError("a thread of the pipeline cannot wait for it: call this on the thread that iterates.")
        if not self.running:
            self._leave()
        self._standing.refuse_broken()
        if failures := self._take_untold():
            raise first(failures)
        turns.refuse(self.tables, self._flow)

    @property
    def running(self) -> bool:
        """Whether a run has begun and not ended."""
        generator = self._running()
        return generator is not None and generator.gi_frame is not None

    def close(self) -> None:
        """Ends a run: what is committed is written, what is not comes first when the same iterator is given to `run`.

        Raises:
          ValueError: in a hook, which leaves a run by an exception; in another thread than the one that iterates.
          Whatever a stage raised, unless it was raised before.
        """
        if failures := self._end():
            raise first(failures)
        self._warn_of_cuts()

    def _end(self):
        generator, self._within = self._running(), self._within + 1
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

    def leave_at_exit(self) -> None:
        """Leaves a run that the end of the process has come upon; unlike `close`, whoever it belongs to.

        Raises:
          As `close`.
        """
        self._leave()
        if failures := self._take_untold():
            raise first(failures)

    def _refuse_close(self, generator):
        here, iterating = threading.current_thread(), self._iterating
        if here in self._threads:
            raise ValueError("close was called by a thread of the pipeline (a cut's save, send, fetch): raise there.")
        if iterating is not None and iterating is not here and iterating.is_alive() and not self._left:
            raise ValueError(
                f"close was called in another thread than {iterating.name!r}, which iterates over the run: leave the "
                "loop there."
            )
        if generator.gi_running:
            raise ValueError("close was called within the run, by a hook: raise an exception to leave it.")

    def __enter__(self) -> "Pipeline":
        self._within += 1
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._within -= 1
        try:
            failures = self._end()
        except KeyboardInterrupt as interrupt:
            note(interrupt, self._take_untold())
            raise
        if error is not None:
            note(error, failures)
        elif failures:
            raise first(failures)
        else:
            self._warn_of_cuts()

    def drain(self) -> HostTables:
        """Waits until all committed batches are written, and returns the tables, now those of `state.dense`.

        Call it on the committing thread, for example in a hook that evaluates. Batches gathered already stay valid. In
        semisync it waits until the next batch has come and was gathered, as that one must not see the rows of this one.

        Raises:
          BrokenPipeline: rows are lost.
          Whatever the save of a cut has raised.
        """
        self._refuse()
        self._flow.drain()
        self._standing.refuse_broken()
        self._refuse_unsaved()
        if self._skip_writes:
            self._flow.wait_for_cut()  # which writes the same rest
            self._refuse_unsaved()
        with uninterrupted():
            if not self._left:  # else it was written, and others may have trained over the tables since
                self._write_rest(self._ring)
            self._standing.settle()
        return self.tables

    def _refuse_unsaved(self):
        if not self._left and self._flow.unsaved is not None:
            raise self._flow.unsaved

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[HostTables]:
        """Gives the tables to the caller alone, to change them: drains, and afterwards gathers anew what was ahead.

        For the committing thread. What the ring and the last-writer table say of earlier batches is forgotten.

        Raises:
          As `drain`.
        """
        if self._flow.paused:
            raise ValueError("`exclusive` within `exclusive`: the tables are yours already.")
        self.drain()
        self._flow.wait_for_cut()  # it may still be saving
        self._refuse_unsaved()
        try:
            self._flow.pause()
            self._standing.refuse_broken()
            yield self.tables
        finally:
            with uninterrupted():
                self._standing.settle()
                self._flow.restart(self._void)

    def _void(self):
        for item in self._items.values():
            item.rows = None
            item.source = written_since(item.source, item.number, self.window, self._flow.floor)

    def cut(self, step: int, save: Callable[[TrainState], Any], unreached: Literal["warn", "ignore"] = "warn") -> None:
        """Announces a consistent state after a step, to be saved while training goes on.

        When the step is committed its dense state is copied; when its rows are written, `save` runs in a thread of
        its own, with tables that stand exactly after that step. Until it returns, later batches are not written, and
        compute goes on until the window is full.

        Args:
          step: a step that is not committed yet.
          save: (TrainState) -> anything, for example `Checkpointer.save`.
          unreached: whether leaving a run warns that the step was not reached; it stays announced for the next run.

        Raises:
          ValueError: the step lies behind, or has a cut already.
          BrokenPipeline: rows are lost.
          Whatever the save of an earlier cut has raised.
        """
        self._refuse()
        self._refuse_unsaved()
        if not isinstance(step, int | np.integer) or not callable(save):
            raise ValueError(f"cut(step={step!r:.80}, save={save!r:.80}) wants a whole number and a function.")
        if unreached not in ("warn", "ignore"):
            raise ValueError(f"unreached={unreached!r} must be 'warn' or 'ignore'.")
        if step <= self.step:
            raise ValueError(f"step={step} is committed already ({self.step} are).")
        if step in self._cuts:
            raise ValueError(f"a cut of step {step} is announced already: let one function save all that is wanted.")
        self._cuts[step] = save, unreached

    def _begin_cut(self):
        if self.step not in self._cuts:
            return
        self._flow.wait_for_release()
        with uninterrupted():  # whoever holds the writes has a thread that lets them go
            number = self._flow.hold_writes()
            try:
                copy = jax.tree.map(jnp.copy, (self.state.dense, self._ring if self._skip_writes else None))
                self._threads = [*self._threads[:1], *(t for t in self._threads[1:] if t.is_alive())]
                self._start("cut", self._save_cut, number, *copy, self._cuts.pop(self.step)[0])
            except BaseException:
                self._flow.release_writes()
                raise

    def _save_cut(self, at, number, dense, ring, save):
        at[0] = number - 1
        try:
            if self._flow.wait_for_hold():
                self._write_rest(ring)
                save(TrainState(dense, self.tables))
        finally:
            self._flow.release_writes()

    def _warn_of_cuts(self):
        steps = [step for step, (_, unreached) in self._cuts.items() if unreached == "warn"]
        self._cuts = {step: (save, "ignore") for step, (save, _) in self._cuts.items() if step > self.step}  # said once
        if steps:
            warnings.warn(
                f"cuts announced for steps {sorted(steps)} were not taken: the run was left at step {self.step}. Those "
                "of later steps stay announced for the next run.",
                stacklevel=3,
            )

    # The stages. Each is the body of a thread but for the commit; at[0] is the batch in work.

    def _plan_all(self, at, stream):
        flow = self._flow
        try:
            while flow.wait_to_plan():
                at[0] = flow.planned
                taken = caught(stream.take)
                if not flow.leave_stream():  # who was blocked in there may wake up in the middle of another run
                    stream.give_back(taken)
                    return
                if isinstance(taken, BaseException):
                    raise taken
                if taken is END:
                    flow.end_stream()
                    return
                self._plan(taken, at[0])
        finally:
            stream.free.set()

    def _plan(self, batch, number):
        flow = self._flow
        if not isinstance(batch, Batch):
            raise ValueError(
                f"`run` makes the plans itself from Batch after Batch, but got a {type(batch).__name__}: give it "
                "jaxrec.Batch(ids, dense, label, weight), not the pairs of `planned`."
            )
        plans = plan(self.tables.spec, batch.ids, self._capacity)
        boundary.check_batch(self.tables.spec, plans, batch, self._mesh.size)
        self._capacity = capacity_of(plans)
        source = self._last.sources(plans, number) if self._last else {}
        with flow.changed:
            if number - self.window < flow.floor:
                source = written_since(source, number, self.window, flow.floor)
            keep = {}
            if self._skip_writes:
                keep = {name: _used(p) for name, p in plans.items()}
                mark_rewritten(self._keep_of, source, number, self.window)
            self._items[number] = _Item(number, batch, plans, source, keep)
            flow.planned += 1
            flow.changed.notify_all()

    def _keep_of(self, number):
        return self._items[number].keep if number >= self._flow.committed and number in self._items else None

    def _load_all(self, at):
        while (claim := self._flow.claim()) is not None:
            at[0], epoch = claim
            item = self._items.get(at[0])  # None if the claim was void, and the batch is written by now
            try:
                if item is not None:
                    self._load(item, at[0], epoch)
            except BaseException as error:  # the thread goes on: batches before this one are still to be loaded
                self._fail(self._flow, "load", at[0], error, epoch)
            del item  # while this thread waits for its next batch this one's rows must not wait with it

    def _load(self, item, number, epoch):
        if item.inputs is None:
            item.inputs = self._send_counted((item.plan, item.batch), "inputs")
        watermark = self._flow.admit(number, epoch)
        if watermark is None:
            return
        try:
            rows = [self._gather(item)]
            since = max(watermark, self._flow.floor)
            stale = found(written_since(item.source, number, self.window, since))
        except BaseException:
            self._flow.tell_not_loaded()
            raise

        def store():
            item.rows, item.watermark = rows.pop(), watermark  # the batch may be committed before this call ends
            item.stale, item.patched = stale, found(item.source)

        self._flow.tell_loaded(number, epoch, store)

    def _gather(self, item):
        plans, place, floor = item.plan, {}, self._flow.floor
        if self._skip_reads and item.number - self.window >= floor:  # before that, little is in the ring
            fresh = {name: where < 0 for name, where in item.source.items()}
            if (some := self._without_gaps("sent", plans, fresh)) is not None:
                plans, _, place = some
        read = self.tables.read(plans)
        self._flow.tell_gathered(item.number)
        if self.mode in ("async", "semisync"):
            item.read = read
        whole = self._rows_bytes(item.plan) + nbytes(item.source)
        return self._send_counted((read, item.source, place), "rows", whole)

    def _commit(self, item):
        """The step of one batch, whole or not at all: the caller puts signals off."""
        self._check_shapes(item)
        # By a call, so that nothing here holds the batch any more when another one may take its place.
        dense, new, metrics = self._computed(item)
        self.state = TrainState(dense, LaggingTables(self._standing, self.step + 1))
        item.back, item.rows, item.inputs = (item.plan, new), None, None
        del new
        with self._flow.changed:
            self._flow.loaded.discard(item.number)
            self._flow.committed += 1
            self._flow.changed.notify_all()
        return metrics

    def _computed(self, item):
        """Validate, replay, update, append: as `ring.commit`, with the update a program of its own in all modes."""
        (rows, source, place), (plans, batch) = item.rows, item.inputs
        if self._repairs:
            if place:
                rows = self._take(rows, place)
            self._fit_ring(item, rows)
            rows, source = self._repair(item, rows, source)
        dense, new, metrics = self._updated(item, rows, plans, batch)
        try:
            if self._repairs:
                unique = {name: p.unique for name, p in plans.items()}
                self._ring = self._append(self._ring, unique, new, np.int32(item.number))
                if self._last is None:  # the device has found what the gather could not see, and no more
                    item.stale = item.patched = found(source)
                metrics = {**metrics, "stale_rows": item.stale, "patched_rows": item.patched}
        except BaseException as error:  # the old dense state is gone, and the rows of the new one are
            self.state = self.state._replace(dense=dense)
            self._flow.committed += 1
            self._flow.fail_behind(item.number, error)
            raise
        return dense, new, metrics

    def _updated(self, item, rows, plans, batch):
        try:
            return self._update(self.state.dense, rows, plans, batch)
        except BaseException as error:
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state.dense) if isinstance(leaf, jax.Array)):
                self._flow.dense_gone = True
                self._flow.fail_behind(item.number, error)
            raise

    def _repair(self, item, rows, source):
        if self._last is None:
            written = max(item.watermark, self._flow.floor) - 1
            source = self._validate(self._ring, item.inputs[0], np.int32(written))
        return self._replay(self._ring, rows, source), source

    def _fit_ring(self, item, rows):
        """Makes the ring with the first batch, and widens it when a capacity has grown."""
        capacity = capacity_of(item.plan)
        if self._ring is None:
            self._ring = self._new_ring(rows, self._depth)
        elif any(leaf.shape[2] != capacity[name] for name, leaf in self._ring.unique.items()):
            self._ring = self._widen(self._ring, tuple(capacity.items()))

    def _fetch_all(self, at):
        while (number := self._flow.claim_fetch()) is not None:
            at[0] = number
            self._fetch_back(self._items[number])

    def _fetch_back(self, item):
        plans, rows = item.back
        whole = self._rows_bytes(plans)
        # What nobody is known to rewrite: behind the last batches of a run none is planned.
        if self._skip_writes and (self._flow.end is None or item.number + self.window < self._flow.end):
            if (some := self._without_gaps("fetched", plans, item.keep)) is not None:
                plans, index, _ = some
                rows = self._take(rows, self._send_counted(index, "rows", 0))
        self._count_bytes("bytes_fetched", nbytes(rows), whole)
        rows = self._fetch(rows)
        self._count(item)
        with self._flow.changed:
            item.back = plans, rows
            del rows
            self._flow.fetched.add(item.number)
            self._flow.changed.notify_all()

    def _write_all(self, at, writer):
        shards = range(writer, self.tables.spec.shards, self._writers)
        while (number := self._flow.wait_to_write(writer)) is not None:
            at[0] = number
            try:
                self._write(self._items[number], shards)
            except BaseException:
                if not self._standing.exact:  # `add` does not count: nobody knows how far it came
                    self._standing.half.update(shards)
                raise
            with self._flow.changed:
                self._standing.mark(shards)
                self._flow.mark_written(writer, number)
                if min(self._flow.written) > number:
                    done = self._items.pop(number)
                    done.back = done.read = None  # a thread that has it still in hand holds no rows
                self._flow.changed.notify_all()

    def _write(self, item, shards):
        plans, rows = item.back
        if self.mode in ("async", "semisync"):
            self.tables.add(plans, rows, item.read, shards)
        else:
            self.tables.put(plans, rows, shards)

    def _write_rest(self, ring):
        """Writes what was not written back because a later batch would."""
        if self._skip_writes and ring is not None:
            with self.tables.overwriting(step=self.tables.step):  # it is no step of its own
                self.tables.put(*newest_rows(ring, self.tables.spec, self._flow.floor))

    def _without_gaps(self, direction, plans, keep):
        """`without_gaps` of every stack, in sizes C of few; None if that would save nothing."""
        masks, size = {name: keep[name] & _used(p) for name, p in plans.items()}, {}
        for name, p in plans.items():
            needed = int(masks[name].sum(axis=1).max(initial=1))
            with self._flow.changed:
                size[name] = min(self._travelling[direction, name].fit(needed), p.unique.shape[1])
        if size == capacity_of(plans):
            return None
        parts: tuple[dict, dict, dict] = {}, {}, {}
        for name, p in plans.items():
            made = without_gaps(p, masks[name], size[name], self.tables.spec.stacks[name].rows)
            for tree, part in zip(parts, made, strict=True):
                tree[name] = part
        return parts

    def _rows_bytes(self, plans):
        """The bytes of all rows of some plans, with padding and slots."""
        widths = {name: sum(a.shape[1] for a in shards[0].values()) for name, shards in self.tables.shards.items()}
        return sum(4 * p.unique.size * widths[name] for name, p in plans.items())

    def _send_counted(self, tree, kind, whole=None):
        self._count_bytes("bytes_sent", nbytes(tree), whole)
        return self._send(tree, self._placement[kind])

    def _count_bytes(self, direction, number, whole=None):
        """Counts what is handed over in one direction, and what it would be with both savings off."""
        with self._flow.changed:
            self.counters[direction] += number
            self.counters["bytes_without_savings"] += number if whole is None else whole

    def _count(self, item):
        rows = sum(int(p.count.sum()) for p in item.plan.values())
        stale, patched = int(item.stale), int(item.patched)  # before the lock: they may be on the device
        with self._flow.changed:
            self.counters.update(rows=rows, stale_rows=stale, patched_rows=patched, batches=1)

    def _check_shapes(self, item):
        """Refuses an update that returns other shapes than it was given, before anything is donated to it."""
        capacity = capacity_of(item.plan)
        batch = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(item.inputs[1]))
        if (key := (*sorted(capacity.items()), *batch)) in self._checked:
            return
        whole = lambda name: lambda leaf: jax.ShapeDtypeStruct((len(leaf), capacity[name], leaf.shape[2]), leaf.dtype)
        rows = {name: jax.tree.map(whole(name), stack_rows) for name, stack_rows in item.rows[0].items()}
        dense, new, metrics = jax.eval_shape(self._pure_update, self.state.dense, rows, *item.inputs)
        if not isinstance(metrics, dict):
            raise ValueError(
                f"the update returns metrics that are a {type(metrics).__name__}: a dict {{name: array}} is wanted."
            )
        for what, before, after in [("dense state", self.state.dense, dense), ("rows", rows, new)]:
            shapes = [_shapes(tree) for tree in (before, after)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"the update changes the shapes of the {what}: from {shapes[0]} to {shapes[1]}. A step must return "
                    "what it was given, in shape and dtype."
                )
        self._checked.add(key)

    def _start(self, stage, body, *args):
        flow = self._flow

        at = [flow.first]

        def guarded():
            try:
                body(at, *args)
            except BaseException as error:
                self._fail(flow, stage, at[0], error)
            finally:
                flow.leave(stage)

        thread = threading.Thread(target=guarded, name=f"oac-{stage}", daemon=True)
        self._at[thread] = at
        self._threads.append(thread)  # before it can ask whether it is one of them
        try:
            flow.start(stage, thread)
        except BaseException:
            self._threads.remove(thread)
            raise

    def _fail(self, flow, stage, number, error, epoch=None):
        error.add_note(self._where(stage, number))
        if stage in ("plan", "load"):
            flow.fail_ahead(number, error, epoch)
        elif stage == "cut":
            flow.fail_cut(error)
        else:
            flow.fail_behind(number, error)

    def _where(self, stage, number):
        return f"in stage '{stage}' of the pipeline, batch {number - self._flow.first} of this run"


@atexit.register
def _leave_all():
    """Interpreters end in the middle of threads: what is committed is written first, and what went wrong is said."""
    for pipeline in turns.pipelines():
        try:
            pipeline.leave_at_exit()
        except Exception:
            traceback.print_exc()


@functools.lru_cache
def _programs(mesh, stacks):
    """The ring's functions, compiled once a mesh, however many pipelines there are."""
    plans, split = plan_specs(stacks), shardings(SPLIT, mesh)
    on_mesh = lambda function, *inputs: jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=SPLIT)
    return (
        jax.jit(on_mesh(rings.replay, SPLIT, SPLIT, SPLIT)),
        jax.jit(on_mesh(rings.append, SPLIT, SPLIT, SPLIT, EVERYWHERE), donate_argnums=0),
        jax.jit(on_mesh(rings.validate, SPLIT, plans, EVERYWHERE)),
        jax.jit(on_mesh(rings.spread, SPLIT, SPLIT)),
        # Made where it stays: no device ever holds the rings of all shards.
        jax.jit(rings.init, static_argnums=1, out_shardings=split),
        jax.jit(lambda ring, capacity: rings.resize(ring, dict(capacity)), static_argnums=1, out_shardings=split),
    )


def _fetch(tree):
    for leaf in jax.tree.leaves(tree):
        leaf.copy_to_host_async()
    return jax.tree.map(np.asarray, tree)


def _shapes(tree):
    """The shape and dtype of every leaf."""
    return jax.tree.map(lambda leaf: (np.shape(leaf), str(getattr(leaf, "dtype", type(leaf)))), tree)


def _used(p: Plan) -> np.ndarray:
    return np.arange(p.unique.shape[1]) < np.asarray(p.count)[:, None]
