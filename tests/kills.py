"""Processes that send themselves SIGKILL at a chosen call that changes the disk."""

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

_PRELOADED = ["jax", "optax", "orbax.checkpoint", "jaxrec.checkpoint"]


def kill_at_call(number: int) -> None:
    """Kills this process right before the number-th call from now on, from 1, that changes the disk."""
    count = 0

    def counted(function):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    os.rename, os.replace, os.fsync = counted(os.rename), counted(os.replace), counted(os.fsync)
    shutil.rmtree = counted(shutil.rmtree)
    Path.write_text, Path.mkdir = counted(Path.write_text), counted(Path.mkdir)


def was_killed(target: Callable, *args) -> bool:
    """Runs a function in a new process; returns whether it was killed. Any other failure fails the test."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    child = context.Process(target=target, args=args)
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL), child.exitcode
    return child.exitcode == -signal.SIGKILL
