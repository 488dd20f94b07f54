"""Saving whole images while training goes on; and what both savers share: one job at a time in a
thread, one owner.

A directory has one saver of images and one of row deltas at a time, held by a lock that the kernel
frees when its process dies, and its images are of one run.
"""

import json
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from jaxrec.bounds import whole_number
from jaxrec.checkpoint.format import (
    DamagedImage,
    Image,
    Snapshot,
    deltas,
    images,
    is_whole,
    needed,
    number_of,
    read_manifest,
    remove_partial,
    set_aside,
    write_image,
)
from jaxrec.checkpoint.state import snapshot
from jaxrec.files import Lock, local_path, make_directory, new_run_id, remove_directory, write_json
from jaxrec.types import TrainState

_RUN = "run.json"  # the run of the savers of a directory, before there is an image that says so


class Saver:
    """One job at a time in a thread, in a directory with no other writer.

    A save that fails with an OSError (a full disk, say) is warned of and counted, and training goes
    on: the next one tries again. Any other error is raised by the next call. Leaving the `with`
    block raises what the last save failed with, or adds it as a note to the exception that is on
    its way out.

    Attributes:
      run: id of the run, which stands in every manifest.
      stall_seconds: how long training has waited for saves, in all.
      thread_seconds: CPU time of the saving thread, in all.
      bytes_written: of committed images, in all.
      failures: what went wrong, a line for each failed save.
    """

    def __init__(self, directory: str | Path, kind: str, run: str | None):
        self.directory = local_path(directory)
        make_directory(self.directory)
        self._lock = Lock(self.directory / f"{kind}.lock", f"saving {kind} in it (leave its `with` block, or close it)")
        try:
            self.run = run or _run_of(self.directory)
            refuse_other_runs(self.directory, self.run)
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
        """Waits until what is being written is committed; raises what went wrong with it."""
        # No `join` and no `Event.wait`: Ctrl-C in the one makes Python before 3.13 take a thread at
        # work for ended, and in the other can leave its lock held. A save takes much longer than
        # this pause.
        while not self._idle.is_set():
            time.sleep(0.001)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def done(self) -> bool:
        """Whether nothing is being written; raises what went wrong."""
        if not self._idle.is_set():
            return False
        self.wait()
        return True

    def close(self) -> None:
        """Waits as `wait` does, and gives the directory back; a job that is still at work then does
        so when it ends."""
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
        """Waits for the last save; whether it is committed. A full disk is warned of, other errors
        are raised."""
        try:
            self.wait()
        except OSError as error:
            warnings.warn(f"a save failed, and the next one tries again: {error}", stacklevel=2)
            return False
        return True

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ValueError(f"the saver of {self.directory} is closed: save within its `with` block.")

    def _begin(self, job: Callable[..., Image], *args) -> None:
        """Does a job in the thread."""
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
            self.bytes_written += job(*args).nbytes
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
            # The error on its way out is told, and this with it.
            error.add_note(f"And a save failed: {failed}")


def _run_of(directory):
    """The run that a directory without images belongs to: that of the saver beside this one, or a
    new one."""
    if images(directory) or deltas(directory) or not (directory / _RUN).exists():
        return new_run_id()
    return json.loads((directory / _RUN).read_text())["run"]


def refuse_other_runs(directory: Path, run: str) -> None:
    """Raises ValueError if a directory holds an image of another run; one that is damaged or has no
    id belongs to none."""
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


class Checkpointer(Saver):
    """Saves images of a run while training goes on; one at a time, in a thread.

        with Checkpointer(directory) as checkpointer:                         # image.run to go on with a run
            state = fit(state, batches, step, hooks=[every(1000, lambda s, *_: checkpointer.save(s) and s)])

    Args:
      directory: where the images go, as step_N; made if it does not exist.
      keep: how many images to keep; older ones are removed after a newer one is committed, but for
        those that row deltas need.
      run: id of the run, as `restore` gives it (`image.run`); a new one if None.
      copy: 'whole' makes training wait for a copy of the state in memory, which is written while
        training goes on; 'shards' makes it wait for the write, with no more than about one shard of
        extra memory.

    Raises:
      ValueError: the directory holds images of another run, or another saver has it.
      OSError: the directory cannot be made or written.
    """

    def __init__(
        self,
        directory: str | Path,
        keep: int = 2,
        run: str | None = None,
        copy: Literal["whole", "shards"] = "whole",
    ):
        whole_number("keep", keep)
        if copy not in ("whole", "shards"):
            raise ValueError(f"copy={copy!r} must be 'whole' or 'shards'.")
        super().__init__(directory, "images", run)
        self._keep, self._copy = keep, copy
        remove_partial(self.directory, "step_")

    def save(self, state: TrainState, extra: Mapping[str, Any] | None = None) -> float:
        """Copies the state and begins to write it; returns the seconds that training waited.

        A whole image of the same step is left as it is; one that is damaged, or split into other
        shards, is replaced.

        Args:
          state: TrainState.
          extra: JSON values to save along, such as the data position.

        Raises:
          ValueError: there is a whole image of a later step, which would pass for newer.
        """
        start = time.perf_counter()
        self._refuse_closed()
        self.settle()
        step = int(state.dense.step)
        self.refuse_newer(step)
        path = self.path_of(step)
        if not is_whole(path) or read_manifest(path).spec != state.tables.spec.digest:
            image = snapshot(state, extra, self.run, copy=self._copy == "whole")
            if self._copy == "whole":
                self._begin(self._write, path, image)
            else:  # training waits, as rows may not change until they are written
                self._do(self._write, path, image)
                if not isinstance(self._error, OSError):
                    self.wait()  # raises it now, such as Ctrl-C, or lost shards, which come back for the next try
        stall = time.perf_counter() - start
        self.stall_seconds += stall
        return stall

    def path_of(self, step: int) -> Path:
        """Where the image of a step is, or will be."""
        return self.directory / f"step_{step:08d}"

    def refuse_newer(self, step: int) -> None:
        """Refuses whole images of later steps, which are of a past that this run has left; damaged
        ones are renamed.

        Raises:
          ValueError: there is a whole image of a later step.
        """
        for path in images(self.directory):
            if number_of(path) > step:
                if is_whole(path):
                    raise ValueError(
                        f"{path} is whole and of a later step than {step}: it would pass for newer than what is to be "
                        "saved. Go on from it, or remove it, or give another directory."
                    )
                set_aside(path)

    def _write(self, path: Path, image: Snapshot) -> Image:
        written = write_image(path, image, replace=True)
        needs = needed(self.directory)
        for old in images(self.directory)[self._keep :]:
            if old.name not in needs:
                remove_directory(old)
        return written
