"""Save images while training continues; and `BackgroundSaver`, the base of both savers: one background job at a time.

A directory has at most one saver of images and one of row deltas, each enforced by a lock that the kernel frees when
the process dies. All images of a directory are of one run.
"""

import functools
import json
import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from jaxrec.bounds import whole_number
from jaxrec.callbacks import Callback, StepInfo
from jaxrec.checkpoint.format import (
    DamagedImage,
    Image,
    Snapshot,
    deltas,
    images,
    is_intact,
    mark_damaged,
    needed,
    number_of,
    read_manifest,
    remove_partial,
    write_image,
)
from jaxrec.checkpoint.state import snapshot
from jaxrec.files import Lock, local_path, make_directory, new_run_id, remove_directory, write_json
from jaxrec.types import ShardsLost, TrainState

_RUN = "run.json"  # the run id of a directory's savers, until an image records it


class BackgroundSaver:
    """Base of the savers: one job at a time in a background thread, with exclusive access to a directory.

    If a save fails with an OSError (such as a full disk), or because a server died while it wrote rows, training
    continues with a warning and the next save tries again. Any other error is raised by the next call. Leaving the
    `with` block raises the error of the last save, or adds it as a note to the exception in flight.

    Attributes:
      run: id of the run, recorded in every manifest.
      stall_seconds: total time that training has waited for saves.
      thread_seconds: total CPU time of the saving thread.
      bytes_written: total size of committed images.
      failures: error messages, one per failed save.
    """

    def __init__(self, directory: str | Path, kind: str, run: str | None):
        self.directory = local_path(directory)
        make_directory(self.directory)
        self._lock = Lock(self.directory / f"{kind}.lock", f"saving {kind} in it (leave its `with` block, or close it)")
        try:
            self.run = run or _run_of(self.directory)
            check_same_run(self.directory, self.run)
            write_json(self.directory / _RUN, {"run": self.run})
        except BaseException:
            self._lock.release()
            raise
        self._idle, self._closed, self._guard = threading.Event(), False, threading.Lock()
        self._idle.set()
        self._error: BaseException | None = None
        self.stall_seconds = self.thread_seconds = 0.0
        self.bytes_written = 0
        self.failures: list[str] = []

    def wait(self) -> None:
        """Wait until the running save is committed; raise its error if it failed."""
        # Polls, since Ctrl-C in `join` makes Python before 3.13 treat a running thread as ended, and in `Event.wait`
        # can leave its lock held. A save takes much longer than this pause.
        while not self._idle.is_set():
            time.sleep(0.001)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def done(self) -> bool:
        """Return whether no save is running; raise the error of the last one if it failed."""
        if not self._idle.is_set():
            return False
        self.wait()
        return True

    def close(self) -> None:
        """Wait as `wait` does, and release the directory; if interrupted, the running save releases it when it ends."""
        self._closed = True
        try:
            self.wait()
        finally:
            self._release_if_idle()

    def _release_if_idle(self):
        with self._guard:
            if self._idle.is_set() and self._closed:
                self._lock.release()

    def settle(self) -> bool:
        """Wait for the last save; return whether it succeeded.

        A disk error or a dead server gives a warning, as the next save tries again; other errors are raised.
        """
        try:
            self.wait()
        except (OSError, ShardsLost) as error:
            warnings.warn(f"a save failed, and the next one tries again: {error}", stacklevel=2)
            return False
        return True

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ValueError(f"the saver of {self.directory} is closed: save within its `with` block.")

    def _begin(self, job: Callable[..., Image], *args) -> None:
        """Start a job in the background thread."""
        self._idle.clear()
        thread = threading.Thread(target=self._do, args=(job, *args), name="checkpoint")
        try:
            thread.start()
        except BaseException:
            if thread.ident is None:  # it never ran
                self._idle.set()
            raise

    def _do(self, job, *args):
        start = time.thread_time()
        try:
            self._idle.clear()
            written = job(*args)  # before the sum is read, to which the job may add
            self.bytes_written += written.nbytes
        except BaseException as error:
            self._error = error
            self.failures.append(str(error) or type(error).__name__)
        finally:
            self.thread_seconds += time.thread_time() - start
            self._idle.set()
            self._release_if_idle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            self.close()
        except BaseException as failed:
            if error is None:
                raise
            # The exception in flight propagates.
            error.add_note(f"And a save failed: {failed}")


def _run_of(directory):
    """Return the run id for a directory without images: that of its other saver, else a new one."""
    if images(directory) or deltas(directory) or not (directory / _RUN).exists():
        return new_run_id()
    try:
        return json.loads((directory / _RUN).read_text())["run"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{directory / _RUN} is damaged, or of another version ({error}): remove it, as there is no image."
        ) from error


def check_same_run(directory: Path, run: str) -> None:
    """Raise ValueError if a directory holds an image of another run; ignores images that are damaged or have no id."""
    for path in [*images(directory), *deltas(directory)]:
        try:
            other = read_manifest(path).run
        except DamagedImage:
            continue
        if other and other != run:
            raise ValueError(
                f"{directory} holds {path.name} of run {other}, and this is run {run}: go on with "
                f"that one (`state, image = restore(...)`, then run=image.run), or give another directory."
            )


class Checkpointer(BackgroundSaver, Callback):
    """Background saver of images of a run, one at a time while training continues.

        saves = Checkpointer(directory, every_steps=1000)                     # run=image.run to continue a run
        with Serial(task, state, [saves]) as engine:
            state = engine.train(batches)

    Args:
      directory: directory of the images step_N; created if missing.
      keep: number of images to keep; older ones are removed after a commit, except those that row deltas need.
      keep_period: the first image of every so many steps, from that step on, is kept too; None for no others.
      run: run id, as returned by `restore` (`image.run`); a new one if None.
      copy: 'whole' blocks training while the state is copied in memory, and writes the copy in the background; 'shards'
        blocks training until the image is written, with about one shard of extra memory.
      every_steps: interval at which a callback saves, at snapshots of its engine and in place of an image of the same
        step; None to only `save` by hand.

    Beside a `Recovery` with mode="full" use its images: after going back, `save` refuses while this directory has
    images of later steps.

    Raises:
      ValueError: the directory holds images of another run, or another saver uses it.
      OSError: the directory cannot be created or written.
    """

    def __init__(
        self,
        directory: str | Path,
        keep: int = 2,
        run: str | None = None,
        copy: Literal["whole", "shards"] = "whole",
        every_steps: int | None = None,
        keep_period: int | None = None,
    ):
        whole_number("keep", keep)
        self._keep_period = None if keep_period is None else whole_number("keep_period", keep_period)
        self._every_steps = None if every_steps is None else whole_number("every_steps", every_steps)
        if copy not in ("whole", "shards"):
            raise ValueError(f"copy={copy!r} must be 'whole' or 'shards'.")
        super().__init__(directory, "images", run)
        self._keep, self._copy = keep, copy
        remove_partial(self.directory, "step_")

    def begin(self, engine: Any) -> None:
        """Count the steps of an engine."""
        self._engine, self._seen_step = engine, engine.step

    def after_step(self, info: StepInfo) -> None:
        """Have the engine take a snapshot if one became due, be it at a step at which a callback before has failed."""
        every = self._every_steps or math.inf
        if info.step // every > self._seen_step // every:
            # Replaced, as an image of this step may be of before a `reset`, or of before this run went on from an older
            # image.
            self._engine.snapshot_at(info.step, functools.partial(self.save, replace=True))
        self._seen_step = info.step

    def restarted(self, state: TrainState) -> None:
        """Count the steps from that state."""
        self._seen_step = int(state.dense.step)

    def end(self, error: BaseException | None) -> None:
        """Wait for the last save, as on leaving the `with` block."""
        del self._engine  # a cycle would keep the tables in memory
        self.__exit__(None, error, None)

    def save(self, state: TrainState, extra: Mapping[str, Any] | None = None, replace: bool = False) -> float:
        """Copy the state and start writing it; return the seconds that training waited.

        An intact image of the same step and spec is kept; one that is damaged or of another spec is replaced.

        Args:
          state: TrainState.
          extra: further JSON values to save, such as the data position.
          replace: also replace an intact image, as of a state that was changed between two steps.

        Raises:
          ValueError: the saver is closed; the directory holds an intact image of a later step, which would be restored
            instead.
        """
        start = time.perf_counter()
        self._refuse_closed()
        self.settle()
        step = int(state.dense.step)
        self.check_no_newer_image(step)
        path = self.path_of(step)
        if replace or not is_intact(path) or read_manifest(path).spec != state.tables.spec.digest:
            image = snapshot(state, extra, self.run, copy=self._copy == "whole")
            if self._copy == "whole":
                self._begin(self._write, path, image)
            else:  # blocking, as rows must not change until they are written
                self._do(self._write, path, image)
                if not isinstance(self._error, OSError):
                    self.wait()  # raises the error now: Ctrl-C, or lost shards, which are restored for the next try
        stall = time.perf_counter() - start
        self.stall_seconds += stall
        return stall

    def path_of(self, step: int) -> Path:
        """Return the path of the image of a step, which need not exist."""
        return self.directory / f"step_{step:08d}"

    def check_no_newer_image(self, step: int) -> None:
        """Raise if the directory holds an intact image of a later step, from before a rollback; rename damaged ones.

        Raises:
          ValueError: there is an intact image of a later step.
        """
        for path in images(self.directory):
            if number_of(path) > step:
                if is_intact(path):
                    raise ValueError(
                        f"{path} is whole and of a later step than {step}: `restore` would take it for newer than "
                        "what is to be saved. Go on from it, or remove it, or give another directory."
                    )
                mark_damaged(path)

    def _write(self, path: Path, image: Snapshot) -> Image:
        written = write_image(path, image, replace=True)
        try:
            self._prune()
        except OSError as error:
            warnings.warn(f"older images could not be removed, and the next save tries again: {error}", stacklevel=2)
        return written

    def _prune(self) -> None:
        stay, found = set(needed(self.directory)), images(self.directory)
        if self._keep_period is not None:
            first = {number_of(image) // self._keep_period: image.name for image in found}  # the newest come first
            stay |= {name for period, name in first.items() if period}
        for old in found[self._keep :]:
            if old.name not in stay:
                remove_directory(old)
