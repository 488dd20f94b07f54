"""Free-running trainers under stress and failures: no torn value, no lost update, no thread left, no other error.

    python tests/soak/shadowsync_soak.py --minutes 10  what `make soak` runs

8 trainers with 2 Hogwild workers each, parameters donated at every step, every rule in turn with a fresh set of
trainers, in shadows and in the foreground, random delays in the batches and in every round. The loss is linear with
equal coefficients: all elements of a tensor are equal at all times, so a value read during a write, or a result merged
twice or from two rounds, shows as two different elements in one tensor; and the sums that the rules conserve can be
checked. Regime: free-running.

In most sets one trainer fails, at a random instant, under both policies: its stream raises, its hook raises, a round of
its transport raises or stalls past its time-out, it leaves in the middle of a round, its hook raises KeyboardInterrupt.
After each: the raised error is the injected one (or `PeerLeft` with the trainer's name, where nothing was raised);
under 'drop' none is raised, all others have finished, and the dropped one is named; no thread is left. `wrong` counts
the violations, and metrics.jsonl names them.
"""

import collections
import dataclasses
import itertools
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from main.cli import Flags, Run, command_line
from tqdm import tqdm

from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, sgd
from jaxrec.shadowsync import (
    Foreground,
    PeerLeft,
    Shadow,
    SyncGroup,
    bmuf,
    easgd,
    model_averaging,
    train_freely,
)
from jaxrec.task import Task
from jaxrec.types import Batch

SPEC = EmbeddingSpec({"item": Table(1000, 8)}, {"item": Lookup("item")})
RULES = {
    "easgd": easgd(0.3),
    "ma_lerp": model_averaging(0.5, "lerp"),
    "ma_delta": model_averaging(1.0, "delta"),
    "bmuf": bmuf(0.5, momentum=0.3),
}
FAILURES = ("stream_raises", "hook_raises", "meet_raises", "meet_stalls", "leaves_in_a_round", "interrupt")
CASES = [("none", "raise"), *itertools.product(FAILURES, ("raise", "drop"))]
RATE = 2.0**-10  # every sum of such steps is exact in float32


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the stress."""

    minutes: float = 1.0
    trainers: int = 8
    workers: int = 2
    parameters: int = 200_000
    seconds_each: float = 15.0
    """Seconds that a set of trainers runs if none fails; other sets run a fifth of it."""
    timeout_s: float = 5.0
    """Time-out of transports that stall, in seconds."""


class Case(NamedTuple):
    """One set of trainers with its failure."""

    rule: str
    kind: type[Shadow] | type[Foreground]
    failure: str
    policy: str
    victim: int  # the trainer that fails
    at: int  # number of the batch, step or round of the failure
    seed: int


class Injected(RuntimeError):
    """The injected error."""


class Injection:
    """Raises the failure of a case, once."""

    def __init__(self, case: Case, timeout_s: float):
        self.case, self.timeout_s, self.done = case, timeout_s, case.failure == "none"
        self.error = KeyboardInterrupt("injected") if case.failure == "interrupt" else Injected(case.failure)

    def is_time(self, failure: str, trainer: int, number: int) -> bool:
        """Whether to fail now: at or after the chosen instant, as two workers may pass it at once."""
        case = self.case
        if self.done or failure != case.failure or trainer != case.victim or number < case.at:
            return False
        self.done = True
        return True

    def hook(self, trainer, step, metrics):
        """Hook for `train_freely`."""
        if self.is_time("hook_raises", trainer, step) or self.is_time("interrupt", trainer, step):
            raise self.error


class Checked:
    """A transport that delays every round at random, checks for torn values, and injects failures."""

    def __init__(self, transport, injection: Injection, seed: int):
        self.transport, self.rng, self.lock = transport, np.random.default_rng(seed), threading.Lock()
        self.torn, self.rounds, self.injection = 0, collections.Counter[int](), injection
        self.ended: dict[int, float] = {}  # a parameter of each trainer after its last round

    def __getattr__(self, name):
        return getattr(self.transport, name)

    def sync_round(self, trainer, before, done):
        """Check and delay, then join the round."""
        with self.lock:
            delay = self.rng.choice([0.0, 0.001, 0.02]) * self.rng.random()
            self.rounds[trainer] += 1
            self.torn += not whole(before)
            if done:
                self.ended[trainer] = float(before[-1].flat[0])
        time.sleep(delay)
        self._fail(trainer, self.rounds[trainer])
        return self.transport.sync_round(trainer, before, done)

    def _fail(self, trainer, number):
        if self.injection.is_time("meet_raises", trainer, number):
            raise self.injection.error
        if self.injection.is_time("meet_stalls", trainer, number):
            time.sleep(2 * self.injection.timeout_s)
        if self.injection.is_time("leaves_in_a_round", trainer, number):
            self.transport.leave(trainer)

    def leave(self, trainer, error=None):
        """Leave at once."""
        self.transport.leave(trainer, error)


def whole(params) -> bool:
    """Whether all elements of each tensor are equal; tensors may differ, as a centre takes them one by one."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
    return all((leaf == leaf.flat[0]).all() for leaf in leaves)


def stream(injection: Injection, trainer: int, until: float, finished: set[int]):
    """Batches with random pauses until `until`, which differs by trainer; the victim continues until it has failed."""
    rng = np.random.default_rng([injection.case.seed, trainer])
    until -= rng.random()
    for number in itertools.count():
        if time.perf_counter() > until and (injection.done or trainer != injection.case.victim):
            break
        time.sleep(rng.choice([0.0, 0.0, 0.002]) * rng.random())
        if injection.is_time("stream_raises", trainer, number):
            raise injection.error
        ids = rng.integers(0, 1000, 16).astype(np.int32)
        yield Batch({"item": ids}, np.zeros(16, np.float32))
    finished.add(trainer)


def linear(params, activations, batch):
    """Loss f32[B], whose gradient with respect to every dense parameter is -1."""
    dense = sum(leaf.sum() for leaf in jax.tree.leaves(params))
    return -activations["item"].sum(-1) - dense


TASK = Task(SPEC, linear, optax.sgd(RATE), sgd(RATE))


def one_set(config: Config, case: Case) -> dict[str, Any]:
    """Run one set of trainers; return its figures and violations."""
    rule, half, n = RULES[case.rule], config.parameters // 2, config.trainers
    params = {"w": jnp.ones(half), "b": jnp.ones((half // 8, 8))}
    injection, finished = Injection(case, config.timeout_s), set[int]()
    timeout_s = config.timeout_s if case.failure == "meet_stalls" else 60.0
    group = SyncGroup(rule, params, n, timeout_s=timeout_s, on_failure=case.policy)
    transport: Any = Checked(group.transport, injection, case.seed)
    until = time.perf_counter() + config.seconds_each / (1 if case.failure == "none" else 5)
    every = {"every_steps": 5} if case.kind is Foreground else {}
    dense: list[Any] = []
    figures, error, start = None, None, time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # warns of a dropped trainer
            dense, figures = train_freely(
                TASK,
                params,
                HostTables.create(SPEC, sgd(RATE)),
                [stream(injection, i, until, finished) for i in range(n)],
                lambda i: case.kind(transport, i, **every),
                config.workers,
                hook=injection.hook,
            )
    except BaseException as raised:
        if isinstance(raised, KeyboardInterrupt) and raised is not injection.error:
            raise  # a user's Ctrl-C
        error = raised
    row: dict[str, Any] = case._asdict() | {"kind": case.kind.__name__, "seconds": time.perf_counter() - start}
    row |= {"steps": sum(figures.steps) if figures else 0, "rounds": transport.rounds.total()}
    row["torn"] = transport.torn + sum(not whole(state.params) for state in dense)
    row["threads_left"] = [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith(("trainer", "shadow", "synchronisation"))
    ]
    # Conserved: sum of replicas and centre = initial values + steps.
    if rule.has_centre and case.failure == "none" and figures:
        total = sum(transport.ended.values()) + float(transport.parameters["w"][0])
        wanted = n + 1 + RATE * sum(figures.steps)
        row["conserved_sum_error"] = abs(total - wanted) / wanted
    row["wrong"] = what_is_wrong(case, row, injection, error, figures, finished, n)
    return row


def what_is_wrong(case, row, injection, error, figures, finished, trainers) -> list[str]:
    """One sentence for each invariant that a set violated."""
    # These failures raise nothing where they happen.
    silent = case.failure in ("meet_stalls", "leaves_in_a_round")
    named = isinstance(error, PeerLeft) and f"trainer {case.victim} " in str(error)
    stops_all = case.failure != "none" and (case.policy == "raise" or case.failure == "interrupt")
    others = set(range(trainers)) - {case.victim}
    broken = {
        f"{row['torn']} torn values": row["torn"],
        f"threads left: {row['threads_left']}": row["threads_left"],
        f"the sum was not kept: {row.get('conserved_sum_error')}": row.get("conserved_sum_error", 0.0) > 1e-5,
        "the failure was never injected": not injection.done,
        f"came out: {error!r}": (error is not injection.error and not (silent and named)) if stops_all else error,
    }
    if not stops_all and figures:
        dropped = [] if case.failure == "none" else [case.victim]
        broken |= {
            f"dropped: {figures.failures!r}": list(figures.failures) != dropped,
            f"finished: {sorted(finished)}": not finished >= others,
        }
    return [sentence for sentence, is_broken in broken.items() if is_broken]


def cases_of_soak(config: Config):
    """Yield, without end, rules, failures and policies in turn, at random instants."""
    rng = np.random.default_rng(config.seed)
    for number in itertools.count():
        failure, policy = CASES[number % len(CASES)]
        victim, at = int(rng.integers(config.trainers)), int(rng.integers(1, 40))
        at = 1 + at % 8 if failure in ("meet_raises", "meet_stalls", "leaves_in_a_round") else at
        kind = (Shadow, Foreground)[number // len(RULES) % 2]
        yield Case(list(RULES)[number % len(RULES)], kind, failure, policy, victim, at, config.seed + number)


def main(config: Config) -> dict:
    """Run sets until the time is up, each case at least once, and return the contents of results.json."""
    run = Run("shadowsync_soak", config, config.workdir)
    if config.preset == "smoke":
        config = dataclasses.replace(
            config, minutes=0.0, seconds_each=1.5, parameters=20_000, trainers=4, timeout_s=2.0
        )
    rows: list[dict[str, Any]] = []
    end = time.perf_counter() + 60 * config.minutes
    with tqdm(unit="set", disable=None) as bar:
        for case in cases_of_soak(config):
            if time.perf_counter() > end and len(rows) >= len(CASES):
                break
            rows.append(one_set(config, case))
            run.log(rows[-1])
            bar.update()
    total = lambda key: sum(row[key] for row in rows)
    results = {
        "regime": "free-running",
        "minutes": config.minutes,
        "trainers": config.trainers,
        "workers": config.workers,
        "sets": len(rows),
        "steps": total("steps"),
        "rounds": total("rounds"),
        "torn_values": total("torn"),
        "threads_left": sum(len(row["threads_left"]) for row in rows),
        "conserved_sum_error_max": max(row.get("conserved_sum_error", 0.0) for row in rows),
        "wrong": sum(len(row["wrong"]) for row in rows),
    }
    counts = collections.Counter(f"sets_{row['failure']}_{row['policy']}" for row in rows)
    results |= {name: counts[name] for name in sorted(counts)}
    run.close(results)
    if results["wrong"]:
        found = [f"{row['failure']}, {row['policy']}, {row['rule']}: {row['wrong']}" for row in rows if row["wrong"]]
        raise ValueError(f"the stress has found something; see metrics.jsonl. {'; '.join(found)}")
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
