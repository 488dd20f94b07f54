"""One stream for several trainers."""

import threading
from collections.abc import Iterator

from jaxrec.prefetch import END, Stream
from jaxrec.types import Batch


class Deal:
    """The batches of one stream for the trainers of a stretch: whoever is free takes the next one.

    Args:
      stream: asked by one trainer at a time.
      steps: at most so many batches.

    Attributes:
      taken: how many batches were given out.
      over: whether the stream has ended, or failed.
      error: what the stream has raised. Nobody fails by it: all end as at its end, and are at rest.
    """

    def __init__(self, stream: Stream, steps: int):
        self._stream, self._steps = stream, steps
        self._asking = threading.Lock()  # held as long as the stream blocks
        self._counting = threading.Lock()
        self.taken, self.over, self.closed = 0, False, False
        self.error: BaseException | None = None

    def hand(self) -> Iterator[Batch]:
        """The batches of one trainer."""
        while (batch := self._take()) is not None:
            yield batch

    def close(self) -> None:
        """From now on nothing is given out or counted; what the stream gives too late comes first in its next run."""
        with self._counting:
            self.closed = True

    def _take(self):
        with self._asking:
            if self.over or self.closed or self.taken == self._steps:
                return None
            self._stream.free.clear()  # who comes with the same iterator again must wait
            try:
                return self._counted(self._asked())
            finally:
                self._stream.free.set()

    def _asked(self):
        try:
            batch = self._stream.take()
        except BaseException as error:
            return error
        if batch is END or isinstance(batch, Batch):
            return batch
        return ValueError(f"the stream has given a {type(batch).__name__}, where a Batch is wanted.")

    def _counted(self, batch):
        with self._counting:
            if self.closed:  # the stretch was left meanwhile: it comes first in the next one
                self._stream.give_back(batch)
                return None
            self.over = batch is END or isinstance(batch, BaseException)
            if self.over:
                self.error = batch if batch is not END else None
                return None
            self.taken += 1
            return batch
