"""Comparisons of bits on a device, with XLA's default and its deterministic operations."""

import functools
import os
from collections.abc import Callable
from typing import Any, Literal

from studies.reference import Job
from studies.sides import Failed, Side

from accelerator.measure import Task, last_line, words

XLA_FLAGS = {"default": "", "deterministic": "--xla_gpu_deterministic_ops=true"}


def equality(
    task: Task, tables: Literal["host", "pinned"], make: Callable[[Job], Any], ask: Callable[[Side], dict]
) -> None:
    """Compare in a process of its own per setting of XLA.

    Args:
      task: where figures are recorded.
      tables: where the rows of the job are.
      make: makes what the process runs.
      ask: asks that process for figures.
    """
    job = Job(tables, 5_000 if task.smoke else 200_000, 64 if task.smoke else 4096)
    for setting, flags in XLA_FLAGS.items():
        point = {"equality": setting, "batch": job.batch_size}
        if task.left() < 60 and not task.smoke:
            task.leave_out(words(point), "no time was left")
            continue
        side = None
        try:
            side = Side(functools.partial(_under, flags, make, job))
            task.row(point, ask(side))
        except Failed as error:
            task.leave_out(words(point), last_line(error))
        finally:
            if side is not None:
                side.close()


def _under(xla_flags, make, job):
    # Before the first program.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {xla_flags}".strip()
    return make(job)
