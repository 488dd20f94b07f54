"""ShadowSync's protocol without a model: trainers that sleep, and trainers in simulated time.

shadowsync_scaling.py uses it for more trainers than there are cores.
"""

import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import simpy

from jaxrec.cluster.sync_servers import pack
from jaxrec.shadowsync import AllToAll, Centre, Foreground, PeerLeft, Rule, Shadow, easgd, model_averaging
from jaxrec.shadowsync.synchroniser import Synchroniser
from jaxrec.types import PyTree

SCALE = 1000  # ratio of real parameters to those of a sleeping trainer
ROUND_S = 0.006  # time allowed per trainer in an all-to-all round


class SyncWay(NamedTuple):
    """How trainers synchronise."""

    rule: Rule
    every: int  # steps between foreground rounds; 0 is a shadow


EASGD, MA = easgd(), model_averaging()
WAYS = {
    "s_easgd": SyncWay(EASGD, 0),
    "fr_easgd_5": SyncWay(EASGD, 5),
    "fr_easgd_30": SyncWay(EASGD, 30),
    "s_ma": SyncWay(MA, 0),
}


class Point(NamedTuple):
    """One synchronisation method with one number of trainers."""

    way: str
    trainers: int
    servers: int
    step_s: float
    jitter: float  # a step takes 1 - jitter to 1 + jitter times step_s
    seed: int
    sizes: tuple[int, ...]  # bytes of each tensor
    bytes_per_s: float  # of each server, and of each link of a ring

    @property
    def label(self) -> str:
        """Suffix of its keys in the results."""
        return f"{self.way}_trainers_{self.trainers}" + (f"_servers_{self.servers}" if self.servers else "")

    @property
    def server_s(self) -> list[float]:
        """Seconds for which one round occupies each server."""
        load = [0.0] * self.servers
        for size, server in zip(self.sizes, pack(list(self.sizes), self.servers), strict=True):
            load[server] += 2 * size / self.bytes_per_s
        return load

    @property
    def ring_s(self) -> float:
        """Seconds of a ring all-reduce: each link carries 2 (n - 1) / n of the parameters."""
        return 2 * (self.trainers - 1) / self.trainers * sum(self.sizes) / self.bytes_per_s

    @property
    def warm_up(self) -> int:
        """Steps until every trainer has completed its first round."""
        return 2 * max(10, WAYS[self.way].every)

    def step_seconds(self, trainer: int) -> Iterator[float]:
        """Yield, without end, a pause of up to the first period, then the time of every step."""
        random = np.random.default_rng((self.seed, trainer))
        yield self.step_s * random.uniform(0, max(1, WAYS[self.way].every))
        while True:
            yield self.step_s * random.uniform(1 - self.jitter, 1 + self.jitter)


class RingOfTrainers(AllToAll):
    """All-to-all transport that takes the time of an all-reduce."""

    def __init__(self, rule: Rule, params: PyTree, trainers: int, seconds: float):
        super().__init__(rule, params, trainers)
        self.seconds = seconds

    def sync_round(self, trainer: int, before: PyTree, done: bool) -> tuple[PyTree, bool]:
        """Join the round, then sleep for the time of the all-reduce."""
        result = super().sync_round(trainer, before, done)
        time.sleep(self.seconds)
        return result


class CentreAtServers(Centre):
    """Centre whose tensors lie at servers of limited bandwidth, each of which makes one transfer at a time.

    Args:
      rule, params, trainers: as for `Centre`.
      seconds: time for which a round occupies each server.
    """

    def __init__(self, rule: Rule, params: PyTree, trainers: int, seconds: list[float]):
        super().__init__(rule, params, trainers)
        self.seconds, self.free_at, self.queue = seconds, [0.0] * len(seconds), threading.Lock()

    def sync_round(self, trainer: int, before: PyTree, done: bool) -> tuple[PyTree, bool]:
        """Sleep until the last server has made its transfer, after those queued before; then move the centre."""
        with self.queue:
            now = time.monotonic()
            self.free_at = [max(now, at) + took for at, took in zip(self.free_at, self.seconds, strict=True)]
            left = max(self.free_at) - now
        time.sleep(left)
        return super().sync_round(trainer, before, done)


def emulate(point: Point, window: int) -> dict[str, float]:
    """Run sleeping trainers over the real protocol; return total steps and rounds per second."""
    slower = 1.0 if WAYS[point.way].rule.has_centre else max(1.0, ROUND_S * point.trainers / point.step_s)
    point = point._replace(step_s=slower * point.step_s, bytes_per_s=point.bytes_per_s / slower)
    sleepers = Sleepers(point)
    time.sleep(point.warm_up * point.step_s)
    start = sleepers.counts()
    time.sleep(window * point.step_s)
    steps, rounds, busy, seconds = (sleepers.counts() - start).tolist()
    sleepers.stop()
    found = {"steps_per_s": slower * steps / seconds, "rounds_per_s": slower * rounds / seconds}
    return found | {"slow_motion": slower, "busy_cores": busy / seconds}


class Sleepers:
    """The trainers of a point, each a thread that sleeps for a step and then exchanges."""

    def __init__(self, point: Point):
        self.point = point
        self.params = {
            f"{i:03d}": np.zeros(max(1, size // (4 * SCALE)), np.float32) for i, size in enumerate(point.sizes)
        }
        self.synchronisers = self._synchronisers()
        self.over, self.failures = threading.Event(), list[BaseException]()
        self.threads = [
            threading.Thread(target=self._train, args=(sync, point.step_seconds(i)), daemon=True)
            for i, sync in enumerate(self.synchronisers)
        ]
        for thread in self.threads:
            thread.start()

    def counts(self) -> np.ndarray:
        """Total steps and rounds so far, CPU seconds of the process, and the current time."""
        of_all = [sum(sync.steps for sync in self.synchronisers), sum(sync.rounds for sync in self.synchronisers)]
        return np.array([*of_all, time.process_time(), time.perf_counter()])

    def stop(self) -> None:
        """Wait for all trainers; raise the first error of any."""
        self.over.set()
        for thread in self.threads:
            thread.join()
        if self.failures:
            raise self.failures[0]

    def _synchronisers(self) -> list[Synchroniser]:
        point, (rule, every) = self.point, WAYS[self.point.way]
        if not rule.has_centre:
            ring = RingOfTrainers(rule, self.params, point.trainers, point.ring_s)
            return [Shadow(ring, i) for i in range(point.trainers)]
        centre = CentreAtServers(rule, self.params, point.trainers, point.server_s)
        if every:
            return [Foreground(centre, i, every_steps=every) for i in range(point.trainers)]
        return [Shadow(centre, i) for i in range(point.trainers)]

    def _train(self, sync, times):
        params = jax.tree.map(jnp.array, self.params)
        try:
            with sync:
                time.sleep(next(times))
                while not self.over.is_set():
                    time.sleep(next(times))
                    params = sync.exchange(params)
        except BaseException as error:
            # At the end trainers leave one by one, so PeerLeft is expected.
            if not (isinstance(error, PeerLeft) and self.over.is_set()):
                self.failures.append(error)


def simulate(point: Point, window: int) -> dict[str, float]:
    """Run the same protocol as discrete events; return total steps and rounds per second."""
    found = Simulated(point)
    found.world.run(until=point.warm_up * point.step_s)
    steps, rounds, seconds = found.steps, found.rounds, window * point.step_s
    found.world.run(until=found.world.now + seconds)
    return {"steps_per_s": (found.steps - steps) / seconds, "rounds_per_s": (found.rounds - rounds) / seconds}


class Simulated:
    """The trainers of a point in simulated time."""

    def __init__(self, point: Point):
        self.point, self.world = point, simpy.Environment()
        self.servers = [simpy.Resource(self.world) for _ in range(point.servers)]
        self.arrived: list[simpy.Event] = []
        self.steps = self.rounds = 0
        rule, self.every = WAYS[point.way]
        self.sync_round = self._meet_centre if rule.has_centre else self._meet_all
        train = self._foreground if self.every else self._shadow
        for trainer in range(point.trainers):
            self.world.process(train(point.step_seconds(trainer)))

    def _use(self, server, seconds):
        with server.request() as turn:
            yield turn
            yield self.world.timeout(seconds)

    def _meet_centre(self):
        pairs = zip(self.servers, self.point.server_s, strict=True)
        yield simpy.AllOf(self.world, [self.world.process(self._use(*pair)) for pair in pairs])

    def _meet_all(self):
        self.arrived.append(self.world.event())
        mine = self.arrived[-1]
        if len(self.arrived) == self.point.trainers:
            for event in self.arrived:
                event.succeed()
            self.arrived.clear()
        yield mine
        yield self.world.timeout(self.point.ring_s)

    def _foreground(self, times):
        yield self.world.timeout(next(times))
        while True:
            for _ in range(self.every):
                yield self.world.timeout(next(times))
                self.steps += 1
            yield from self.sync_round()
            self.rounds += 1

    def _shadow(self, times):
        in_flight = None
        yield self.world.timeout(next(times))
        while True:
            yield self.world.timeout(next(times))
            self.steps += 1
            if in_flight is not None and in_flight.triggered:  # the round is merged
                self.rounds, in_flight = self.rounds + 1, None
            if in_flight is None:  # the next round starts
                in_flight = self.world.process(self.sync_round())
