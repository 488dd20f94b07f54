"""Trains through a pipeline under random signals; prints how often it was interrupted.

python train_under_sigint.py SEED ROUNDS
"""

import contextlib
import gc
import json
import os
import random
import signal
import sys
import threading
import time
import warnings

from oac_equivalence import same
from oac_task import SPEC, make_batches, make_state, states_of, task_of
from threads import no_threads_left

from jaxrec.oac import Pipeline

BATCHES = make_batches(20)
OPTIONS = [
    {"window": 3},
    {"window": 3, "loaders": 3},
    {"mode": "sync"},
    {"window": 1},
]


def shoot(delays):
    """Sends a signal to this process after each delay."""
    for delay in delays:
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGINT)


def train(pipeline, stream):
    """Trains all remaining batches, with drains, exclusive access and a snapshot in between."""

    def look(info):
        if info.step % 5 == 0:
            pipeline.drain()
        if info.step % 7 == 0:
            pipeline.exclusive(lambda tables: tables)

    with pipeline:
        pipeline.enter(look)
        if pipeline.step < 12:
            with contextlib.suppress(ValueError):  # already announced before the signal
                pipeline.snapshot_at(12, lambda state: None)
        for _ in pipeline.run(stream):
            pass


def on_signal(number, frame):
    """Raises KeyboardInterrupt only inside `train`: the script's own code is not under test."""
    while frame is not None:
        if frame.f_code is train.__code__:
            raise KeyboardInterrupt
        frame = frame.f_back


def interrupted(pipeline, stream, delays):
    """Trains while signals are sent; returns whether one interrupted the training."""
    shooter = threading.Thread(target=shoot, args=(delays,))
    shooter.start()
    try:
        train(pipeline, stream)
    except KeyboardInterrupt:
        return True
    finally:
        shooter.join()
    return False


def main(seed: int, rounds: int) -> None:
    """Prints {"rounds", "interrupted", "wrong"}."""
    rng, states = random.Random(seed), states_of(BATCHES)
    counts = {"rounds": rounds, "interrupted": 0, "wrong": 0}
    train(Pipeline(task_of(SPEC), make_state(), window=3), iter(BATCHES))  # compiles
    start = time.perf_counter()
    train(Pipeline(task_of(SPEC), make_state(), window=3), iter(BATCHES))
    longest = time.perf_counter() - start
    signal.signal(signal.SIGINT, on_signal)
    for number in range(rounds):
        pipeline = Pipeline(task_of(SPEC), make_state(), **OPTIONS[number % len(OPTIONS)])
        stream = iter(BATCHES)
        delays = [rng.uniform(0, longest)] + [rng.choice([0, 1e-4, 3e-3]) for _ in range(rng.choice([0, 0, 1, 3]))]
        counts["interrupted"] += interrupted(pipeline, stream, delays)
        gc.collect()
        step = pipeline.step
        right = no_threads_left() and same((pipeline.state, []), (states[step], []))
        with contextlib.suppress(Exception):
            train(pipeline, stream)  # resumes
            right = right and same((pipeline.state, []), (states[len(BATCHES)], []))
        if not right or pipeline.step != len(BATCHES):
            counts["wrong"] += 1
            print("wrong:", number, step, pipeline.step, delays, threading.enumerate(), file=sys.stderr)
    print(json.dumps(counts))


if __name__ == "__main__":
    warnings.simplefilter("error")
    # A cache entry that is still being written, or whose writer was killed, is compiled again.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
    main(int(sys.argv[1]), int(sys.argv[2]))
