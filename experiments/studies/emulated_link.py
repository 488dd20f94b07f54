"""A link between host and device that is EMULATED, and what a pipeline moves over it.

Legend: W window.
"""

import itertools
import threading
import time

import jax
import numpy as np

from jaxrec.oac.options import nbytes
from studies.oac_work import Work


class EmulatedLink:
    """A full-duplex channel between host and device: its time is slept, its bytes are those of the
    arrays.

    `passed` counts the bytes that went through, {"send": ..., "fetch": ...}.
    """

    def __init__(self, bytes_per_s: float, latency_s: float):
        self.bytes_per_s, self.latency_s = bytes_per_s, latency_s
        self.lock, self.free_at = threading.Lock(), {"send": 0.0, "fetch": 0.0}
        self.passed = {"send": 0, "fetch": 0}

    def pass_time(self, direction: str, tree) -> None:
        """Waits until these bytes would be through, behind all that went this way before."""
        size = nbytes(tree)
        with self.lock:
            self.passed[direction] += size
            start = max(time.perf_counter(), self.free_at[direction])
            self.free_at[direction] = start + size / self.bytes_per_s
            until = self.free_at[direction] + self.latency_s
        time.sleep(max(0.0, until - time.perf_counter()))

    def send(self, tree, placement):
        """To the device."""
        self.pass_time("send", tree)
        return jax.device_put(tree, placement)

    def fetch(self, tree):
        """To the host, when the device has made it."""
        jax.block_until_ready(tree)
        self.pass_time("fetch", tree)
        return jax.tree.map(np.asarray, tree)


def bytes_a_batch(work: Work, mode: str, number: int, **options) -> dict[str, float]:
    """What a mode hands to `send` and `fetch` per batch: rows with their padding, what comes with a
    batch, and the lists that say which rows travel.

    Args:
      work: its first `number` batches, each once.
      mode: of oac_work.py.
      number: how many batches; the first and the last W of them travel whole.
      options: of the pipeline.

    Returns:
      {'send': bytes, 'fetch': bytes}.
    """
    meter = EmulatedLink(float("inf"), 0.0)
    with work.pipeline(mode, send=meter.send, fetch=meter.fetch, **options) as pipeline:
        for _ in pipeline.run(itertools.islice(work.batches, number)):
            pass
    return {way: size / number for way, size in meter.passed.items()}
