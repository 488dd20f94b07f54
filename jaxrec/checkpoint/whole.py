"""Saving whole images while training goes on; and what both savers share: one job at a time in a thread, one owner.

A directory has one saver of images and one of row deltas at a time, held by a lock that the kernel frees when its
process dies, and its images are of one run.
"""

import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from jaxrec.checkpoint.image import (
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
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.files import Lock, local_path, make_directory, new_run_id, remove_directory
from jaxrec.types import TrainState


class Saver:
    """One job at a time in a thread, in a directory that nobody else writes to.

    A save that fails with an OSError (a full disk, say) is warned of and counted, and training goes on: the next one
    tries again. Any other error is raised by the next call. Leaving the `with` block raises what the last save failed
    with, or adds it as a note to the exception that is on its way out.

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
            self.run = run or new_run_id()
            refuse_other_runs(self.directory, self.run)
        except BaseException:
            self._lock.release()
            raise
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.stall_seconds = self.thread_seconds = 0.0
        self.bytes_written = 0
        self.failures: list[str] = []

    def wait(self) -> None:
        """Waits until what is being written is committed; raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def done(self) -> bool:
        """Whether nothing is being written; raises what went wrong."""
        if self._thread is not None and self._thread.is_alive():
            return False
        self.wait()
        return True

    def close(self) -> None:
        """Waits as `wait` does, and gives the directory back."""
        try:
            self.wait()
        finally:
            self._lock.release()

    def settle(self) -> bool:
        """Waits for the last save; whether it is committed. A full disk is warned of, other errors are raised."""
        try:
            self.wait()
        except OSError as error:
            warnings.warn(f"a save failed, and the next one tries again: {error}", stacklevel=2)
            return False
        return True

    def _begin(self, job: Callable[..., Image], *args) -> None:
        def run():
            start = time.thread_time()
            try:
                self.bytes_written += job(*args).nbytes
            except BaseException as error:
                self._error = error
                self.failures.append(str(error))
            self.thread_seconds += time.thread_time() - start

        self._thread = threading.Thread(target=run, name="checkpoint")
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            self.close()
        except BaseException as failed:
            if error is None:
                raise
            error.add_note(f"And a save failed: {failed}")  # the error on its way out is told, and this with it


def refuse_other_runs(directory: Path, run: str) -> None:
    """Raises ValueError if a directory holds an image of another run; one that is damaged or has no id is nobody's."""
    for path in [*images(directory), *deltas(directory)]:
        try:
            other = read_manifest(path, str).run
        except DamagedImage:
            continue
        if other and other != run:
            raise ValueError(
                f"{directory} holds {path.name} of run {other}, and this is run {run}: go on with "
                f"that one (`state, image = restore(...)`, then run=image.run), or give another directory."
            )


class Checkpointer(Saver):
    """Saves images of a run while training goes on; one at a time, in a thread.

        with Checkpointer(directory, spec) as checkpointer:                   # image.run to go on with a run
            state = fit(state, batches, step, hooks=[every(1000, lambda s, *_: checkpointer.save(s) and s)])

    Args:
      directory: where the images go, as step_N; made if it does not exist.
      spec: the tables.
      keep: how many images to keep; older ones are removed after a newer one is committed, but for those that row
        deltas need.
      run: id of the run, as `restore` gives it (`image.run`); a new one if None.
      copy: 'whole' makes training wait for a copy of the state in memory, which is written while training goes on;
        'shards' makes it wait for the write, with no more than about one shard of extra memory.

    Raises:
      ValueError: the directory holds images of another run, or somebody else saves images there.
    """

    def __init__(
        self,
        directory: str | Path,
        spec: EmbeddingSpec,
        keep: int = 2,
        run: str | None = None,
        copy: Literal["whole", "shards"] = "whole",
    ):
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1.")
        if copy not in ("whole", "shards"):
            raise ValueError(f"copy={copy!r} must be 'whole' or 'shards'.")
        super().__init__(directory, "images", run)
        self._spec, self._keep, self._copy = spec, keep, copy
        remove_partial(self.directory, "step_")

    def save(self, state: TrainState, extra: Mapping[str, Any] | None = None) -> float:
        """Copies the state and begins to write it; returns the seconds that training waited.

        A whole image of the same step is left as it is; a damaged one is replaced.

        Args:
          state: TrainState.
          extra: JSON values to save along, such as the data position.

        Raises:
          ValueError: there is a whole image of a later step, which would pass for newer.
        """
        start = time.perf_counter()
        self.settle()
        step = int(state.dense.step)
        self._refuse_newer(step)
        path = self.path_of(step)
        if not is_whole(path):
            whole = self._copy == "whole"
            self._begin(self._write, path, snapshot(state, self._spec, extra, self.run, copy=whole))
            if not whole and self._thread is not None:
                self._thread.join()  # its rows may not change until they are written
        stall = time.perf_counter() - start
        self.stall_seconds += stall
        return stall

    def path_of(self, step: int) -> Path:
        """Where the image of a step is, or will be."""
        return self.directory / f"step_{step:08d}"

    def _refuse_newer(self, step):
        """Images of later steps are of a past that this run has left; damaged ones stay, under another name."""
        for path in images(self.directory):
            if number_of(path) > step:
                if is_whole(path):
                    raise ValueError(
                        f"{path} is whole and of a later step than {step}: it would pass for newer than what is to be "
                        "saved. Go on from it, or remove it, or give another directory."
                    )
                set_aside(path)

    def _write(self, path, image: Snapshot) -> Image:
        written = write_image(path, image)
        needs = needed(self.directory)
        for old in images(self.directory)[self._keep :]:
            if old.name not in needs:
                remove_directory(old)
        return written
