"""The click job that cluster_failures.py and cluster_overhead.py train arm by arm, over servers that they kill."""

import contextlib
import dataclasses
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optax
from deaths import (
    DeltaWrites,
    Late,
    Log,
    Losses,
    NotingPipeline,
    NotingSerial,
    digest_rows,
    digests,
    of_losses,
)
from main.click_data import click_job, synthetic_clicks
from main.model import make_model

from jaxrec.callbacks import Callback, StepInfo
from jaxrec.cluster import Cluster, Supervisor
from jaxrec.cpr import Recovery, mfu, ssu
from jaxrec.data.synthetic import scaled_cardinalities
from jaxrec.embedding import HostTables, rowwise_adagrad
from jaxrec.loop import evaluate, keep_memory
from jaxrec.prefetch import planned
from jaxrec.types import TrainState

SCHEMES: dict[str, Callable[[], Any]] = {"vanilla": lambda: None, "mfu": mfu, "ssu": ssu}
WINDOW, SHARDS, TIMEOUT_S = 4, 8, 120.0
FRACTION = 0.125  # r of MFU and SSU


@dataclasses.dataclass
class Kill:
    """A kill and the instants of its recovery, in seconds of `time.monotonic`; None for those yet to come."""

    step: int
    server: int
    killed: float
    deaths_before: int
    noticed: float | None = None
    started: float | None = None  # the successor is in use
    restored: float | None = None
    next_step: float | None = None
    caught_up: float | None = None  # full recovery only: back at the step of the loss
    lost_at_step: int = 0
    checking_s: float = 0.0  # seconds spent on comparing the rows of survivors

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part of the recovery, and `to_next_step`; checks are excluded."""
        assert self.noticed and self.started and self.restored and self.next_step
        return {
            "noticing": self.noticed - self.killed,
            "starting": self.started - self.noticed,
            "restoring": self.restored - self.started - self.checking_s,
            "resuming": self.next_step - self.restored,
            "repeating": max(0.0, (self.caught_up or self.next_step) - self.next_step),
            "to_next_step": self.next_step - self.killed - self.checking_s,
        }


class Killer:
    """Kills servers when steps are committed, and records the instants of their recoveries.

    Args:
      plan: {step: server} of the kills; a kill that is due during the recovery from another waits for its end.

    Attributes:
      kills: kills so far.
      times: (seconds, step) of every committed step.
      survivors_changed: number of recoveries that changed rows of surviving servers.
    """

    def __init__(self, engine: Any, servers: Supervisor, plan: Mapping[int, int]):
        self.engine, self.servers, self.kills, self.survivors_changed = engine, servers, list[Kill](), 0
        self.times: list[tuple[float, int]] = []
        self._due, self._before = sorted(plan.items()), dict[Any, Any]()

    @property
    def _open(self) -> Kill | None:
        return self.kills[-1] if self.kills and self.kills[-1].next_step is None else None

    def after_step(self, info: StepInfo) -> None:
        """Record a step, and kill the server that the plan names."""
        step = info.step
        now = time.monotonic()
        self.times.append((now, step))
        last = self.kills[-1] if self.kills else None
        if last is not None and last.restored is not None:
            last.next_step = last.next_step or now
            if last.caught_up is None and step >= last.lost_at_step:
                last.caught_up = now
        if self._due and step >= self._due[0][0] and self._open is None:
            self._kill(step, self._due[0][1])

    def _kill(self, step, server):
        process = self.servers.processes[server]
        if process is None:  # a successor that is just starting: try again at the next step
            return
        deaths = len(self.servers.deaths)
        kill = Kill(step, server, time.monotonic(), deaths)
        os.kill(process, signal.SIGKILL)
        self.kills.append(kill)
        self._due.pop(0)

    def started(self, compare: bool) -> Callback:
        """Return a callback to be listed after the supervisor and before the recovery, whose survivors are compared."""
        return _Calling(lambda shards: self._record_started(shards, compare))

    def _record_started(self, shards, compare):
        now, kill = time.monotonic(), self._open
        if kill is None:
            return
        kill.noticed, kill.started = self.servers.deaths[kill.deaths_before].at, now
        kill.lost_at_step = self.engine.step
        if compare:
            self._before = self._survivors(shards)
            kill.checking_s += time.monotonic() - now

    def restored(self) -> Callback:
        """Return a callback to be listed after the recovery."""
        return _Calling(self._record_restored, self._record_restarted)

    def _record_restored(self, shards):
        now, kill = time.monotonic(), self._open
        if kill is not None:
            kill.restored = now
        if kill is not None and self._before:
            self.survivors_changed += self._survivors(shards) != self._before
            after = time.monotonic() - now
            kill.checking_s, kill.restored = kill.checking_s + after, now + after

    def _record_restarted(self, state):
        if (kill := self._open) is not None:
            kill.restored = time.monotonic()

    def _survivors(self, shards):
        found: dict[Any, Any] = {}

        self.engine.at_rest(lambda tables: found.update(tables.on_shards(digest_rows)))  # after pending writes
        return {place: digest for place, digest in found.items() if place[1] not in shards}


class _Calling(Callback):
    """Callback that calls the given functions."""

    def __init__(self, recover, restarted=lambda state: None):
        self._recover, self._restarted = recover, restarted

    def recover(self, shards: Sequence[int]) -> None:
        self._recover(shards)

    def restarted(self, state: TrainState) -> None:
        self._restarted(state)


def with_sizes(config: Any, sizes: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return flags of which those that are None have the values of the preset."""
    known = {name: value for name, value in sizes[config.preset].items() if getattr(config, name) is None}
    return dataclasses.replace(config, **known)


class ClusterJob:
    """The job with its compiled functions and data; servers, tables and dense state are new in each arm."""

    def __init__(
        self, rows: int, steps: int, batch_size: int, save_every_steps: float, servers: int, seed: int, spares: int = 0
    ):
        keep_memory()
        self.spares = spares
        self.steps, self.every, self.servers, self.seed = steps, save_every_steps, servers, seed
        cardinalities = scaled_cardinalities(rows)
        self.data = synthetic_clicks(cardinalities, batch_size, steps, seed, max(4, min(50, steps // 8)))
        self.job = click_job(
            cardinalities, make_model("dlrm", 16), optax.adam(1e-3), rowwise_adagrad(0.02), 16, SHARDS, seed
        )
        self.eval_step = self.job.eval_step()

    def recovery(self, arm: str, directory: Path, every: float | None = None, **more: Any) -> Recovery:
        """Return the recovery of an arm, which saves every so many steps, if they are not those of the job."""
        mode: dict[str, Any] = {"mode": "full"} if arm == "full" else {"scheme": SCHEMES[arm](), "fraction": FRACTION}
        return Recovery(directory, every or self.every, self.steps, copy="shards", **mode, **more)

    def run(
        self, arm: str, plan: Mapping[int, int], cluster: Cluster, above: Path, every: float | None = None,
        compare: bool = True,
    ) -> tuple[dict[str, Any], Killer, dict]:  # fmt: skip
        """Train an arm of ARMS; unless it is none, kill servers by the plan {step: server}.

        Args:
          every: steps between its saves, if they are not those of the job.
          compare: whether the rows of surviving servers are compared.

        Returns:
          Figures of the arm; the killer; losses, voided deltas and digests, which must equal those of `serially`.
        """
        with tempfile.TemporaryDirectory(dir=above) as directory, contextlib.ExitStack() as opened:
            servers = opened.enter_context(contextlib.closing(Supervisor(
                cluster, self.job.spec, self.job.task.row_optimizer, self.servers,
                directory=directory, timeout_s=TIMEOUT_S, most_deaths=2 * len(plan) + 8,
                spares=self.spares if arm != "none" else 0,
            )))  # fmt: skip
            servers.tables.on_shards(digest_rows)  # compiles it before the first kill
            _ = servers.spares  # waits until they have started
            state = self.job.state(servers.tables, self.seed)
            engine = opened.enter_context(NotingPipeline(self.job.task, state, window=WINDOW))
            killer = Killer(engine, servers, plan if arm != "none" else {})
            log, recovery = engine.enter(Log()), None
            if arm != "none":
                engine.enter(servers)
                engine.enter(killer.started(compare and arm != "full"))
                recovery = engine.enter(self.recovery(arm, Path(directory), every))
                engine.enter(Late())
                engine.enter(killer.restored())
            engine.enter(killer.after_step)
            state = engine.train(self.data.train)
            ended = time.monotonic()
            row = {"arm": arm, "seconds": ended - killer.times[0][0]} | self._figures(recovery, killer)
            test = evaluate(state, planned(self.job.spec, self.data.test()), self.eval_step)
            return row | {"test_auc": test["auc"]}, killer, {
                "losses": log.losses, "voided": log.voided, "digests": digests(state),
            }  # fmt: skip

    def _figures(self, recovery, killer):
        if recovery is None:
            return {}
        return {
            "kills": len(killer.kills), "shards_failed": recovery.failed, "lost_steps": recovery.lost_steps,
            "pls": recovery.pls, "saves": recovery.saves, "saving_s": recovery.stall_seconds,
            "rows_saved": recovery.rows_saved, "survivors_changed": killer.survivors_changed,
        }  # fmt: skip

    def serially(self, arm: str, losses: Losses, voided: Sequence[int], above: Path) -> dict[Any, Any]:
        """Return the digests of `Serial` over local tables that loses the same shards and deltas at the same steps."""
        tables, missed, failures = of_losses(losses, HostTables.create(self.job.spec, self.job.task.row_optimizer))
        with (
            tempfile.TemporaryDirectory(dir=above) as directory,
            DeltaWrites(failing=voided),
            NotingSerial(self.job.task, self.job.state(tables, self.seed)) as engine,
        ):
            engine.missed = missed
            engine.enter(self.recovery(arm, Path(directory), failures=failures))
            engine.enter(Late())
            found = digests(engine.train(self.data.train))
        return found
