"""How a run survives: periodic saves of its whole state, or CPR, which restores lost shards. `--cpr` chooses one.

full rolls everything back; the others restore the lost shards alone, from saves of everything (vanilla) or of the rows
that a scheme picks (mfu, ssu, scar).
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import numpy as np

from jaxrec.checkpoint import Checkpointer
from jaxrec.cpr import Recovery, draw_failures, measure_costs, mfu, plan_recovery, scar, ssu
from jaxrec.cpr.schedule import SETTING_A, Mode, full_interval, partial_interval
from main.cli import belongs, refuse, say
from main.homes import Placed
from main.run_dir import Run
from main.saving import PeriodicSaves, RecoverySaves

CPRKind = Literal["none", "full", "vanilla", "mfu", "ssu", "scar"]
SCHEMES: dict[str, Callable[[], Any]] = {"mfu": mfu, "ssu": ssu, "scar": scar}
MEASURED_STEPS = 12  # to measure costs by, before the run


@dataclasses.dataclass(frozen=True)
class Unprotected:
    """Nothing is saved by these flags: trainers in processes save by themselves."""

    cpr: CPRKind = "none"
    """Recovery that restores lost shards: full rolls everything back; the others restore the lost shards alone, from
    saves of everything (vanilla) or of the rows that a scheme picks."""

    def check(self, shards: int) -> None:
        """Raise ValueError if the flags contradict each other; S `shards` can be lost."""


@dataclasses.dataclass(frozen=True)
class Saving(Unprotected):
    """Saves by the process that trains."""

    read_by: ClassVar = "trainers in one process, as with --tables host or a --pipeline (others save by themselves)"
    save_every_steps: int | None = None
    """Save the state every k steps, 0 for never. By default saving costs at most 1 % of the time, and with --cpr the
    interval follows from --target-pls. The state is saved at the end and on Ctrl-C, SIGTERM and SIGHUP anyway."""

    def enter(
        self, engine, run: Run, home: Placed, steps: int, seed: int, image: Any, past: dict,
        extra: Callable[[int], dict], first_steps: Callable[[int], Iterator],
    ) -> Any:  # fmt: skip
        """Enter what saves a run into its engine, and return it.

        Args:
          steps: of the run.
          seed: of failures that are drawn.
          image: image from which the run resumes, or None.
          past: values saved with it.
          extra: step -> JSON values to save with a state.
          first_steps: number -> iterator that trains that many steps, to measure costs.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Periodic(Saving):
    """Saves of the whole state."""

    read_by: ClassVar = "saves of the whole state, without --cpr"
    keep_period: int | None = None
    """Keep the first save of every k steps too, beside the last two: evaluate.py --state STEP takes it."""

    def enter(
        self, engine, run: Run, home: Placed, steps: int, seed: int, image: Any, past: dict,
        extra: Callable[[int], dict], first_steps: Callable[[int], Iterator],
    ) -> PeriodicSaves:  # fmt: skip
        checkpointer = engine.enter(
            Checkpointer(run.directory / "checkpoints", run=run.id, copy=home.copy, keep_period=self.keep_period)
        )
        return engine.enter(PeriodicSaves(checkpointer, self.save_every_steps, extra, past.get("saving")))


@dataclasses.dataclass(frozen=True)
class Recovering(Saving):
    """CPR: saves from which lost shards are restored, and emulated failures."""

    read_by: ClassVar = "--cpr mfu, say"
    cpr: CPRKind = "mfu"
    target_pls: float = 0.1
    """Portion of lost samples (PLS) that the model tolerates; it sets the interval between saves, unless
    --save-every-steps is given."""
    recovery_costs: Literal["assumed", "measured"] = "assumed"
    """Costs used for --target-pls: those of setting A, solved from the abstract's percentages, with the steps of this
    run for its 56 hours; or those of a save, a restore and a step here, measured at the start of the run."""
    fail: tuple[str, ...] = ()
    """Emulated failures, as step:shards (1500:3 2200:1,5); or the word gamma, to draw them."""
    mtbf_steps: float | None = None
    """Mean steps between failures; default half of the run, as we recall the paper."""
    fail_shape: float = 1.0
    """Shape of the gamma law: 1 is the exponential law; below 1, failures come in bursts."""

    def check(self, shards: int) -> None:
        given_failures(self.fail, shards)
        partial_interval(SETTING_A, self.target_pls)
        given = self.save_every_steps
        refuse(
            {
                "--save-every-steps 0 saves nothing that --cpr could restore: leave one of them out.": given == 0,
                belongs("recovery_costs", self.recovery_costs, "--cpr without --save-every-steps"): (
                    given is not None and self.recovery_costs != "assumed"
                ),
                belongs("fail_shape", self.fail_shape, "--fail gamma"): (
                    self.fail_shape != 1 and self.fail != ("gamma",)
                ),
            }
        )

    def enter(
        self, engine, run: Run, home: Placed, steps: int, seed: int, image: Any, past: dict,
        extra: Callable[[int], dict], first_steps: Callable[[int], Iterator],
    ) -> RecoverySaves:  # fmt: skip
        every = self.saves_every(engine, run, steps, first_steps)
        first = 1 if image else engine.step + 1  # steps that measured the costs are trained already
        recovery = engine.enter(
            self.recovery(run.directory / "checkpoints", steps, every, engine.tables.spec.shards, seed, first,
                          image=image, run=run.id, extra=extra, copy=home.copy)
        )  # fmt: skip
        if image is None:
            recovery.save_whole()  # so that the run can resume from its first step
        return RecoverySaves(recovery, past.get("saving"))

    def recovery(
        self, directory: Path, steps: int, every: float, shards: int, seed: int, first: int = 1, **options: Any
    ) -> Recovery:
        """Build the recovery, which saves every so many steps; the caller enters it. `first` is as for `failures`."""
        return Recovery(
            directory, every, steps, mode=self._mode, scheme=SCHEMES[self.cpr]() if self.cpr in SCHEMES else None,
            failures=self.failures(steps, shards, seed, first),
            save_at_end=False,  # a run saves at its end in any case, and reports a failure
            **options,
        )  # fmt: skip

    def saves_every(self, engine, run: Run | None, steps: int, first_steps: Callable[[int], Iterator]) -> float:
        """Return the interval between saves, in steps.

        Measured costs are written to recovery.json, so that a resumed run keeps its interval.

        Args:
          run: run; to measure costs, its directory must be on the disk to save to.
          first_steps: number -> iterator that trains that many steps, to measure costs.
        """
        if self.save_every_steps is not None:
            return self.save_every_steps
        mtbf, hours = self.mtbf_steps or steps / 2, SETTING_A.total_hours / steps
        if self.recovery_costs == "assumed" or run is None:
            return self._planned(SETTING_A._replace(mtbf_hours=mtbf * hours, nodes=engine.tables.spec.shards), hours)
        if not (known := run.read_json("recovery.json")):
            hours = _step_seconds(first_steps) / 3600
            state, costs = measure_costs(
                engine.state, run.directory, mtbf_hours=mtbf * hours, total_hours=steps * hours, reschedule_hours=0.0
            )
            engine.reset(state)
            known = {"save_every_steps": self._planned(costs, hours), "step_hours": hours, **costs._asdict()}
            run.write_json("recovery.json", known)
            say(
                f"measured: a step {3.6e6 * hours:.3g} ms, a save {3600 * costs.save_hours:.3g} s, a restore "
                f"{3600 * costs.load_hours:.3g} s, of one shard {3600 * (costs.partial_load_hours or 0):.3g} s"
            )
        return known["save_every_steps"]

    def failures(self, steps: int, shards: int, seed: int, first: int = 1) -> dict[int, list[int]]:
        """Return {step: shards} of the failures in a run of so many steps; of those drawn, none before step `first`."""
        if self.fail == ("gamma",):
            drawn = draw_failures(self.mtbf_steps or steps / 2, steps, shards, seed, self.fail_shape)
            at: dict[int, set[int]] = {}
            for hours, shard in zip(drawn.hours, drawn.node, strict=True):
                at.setdefault(min(steps, max(first, 1 + int(hours))), set()).add(int(shard))
            return {step: sorted(lost) for step, lost in at.items()}
        for step in (found := given_failures(self.fail, shards)):
            if not 1 <= step <= steps:
                raise ValueError(f"--fail {step}: the run has steps 1 to {steps}: give one of these.")
        return found

    @property
    def _mode(self) -> Mode:
        return "full" if self.cpr == "full" else "partial"

    def _planned(self, costs, step_hours):
        """Return the planned interval of the requested mode, even if the other mode is cheaper."""
        plan = plan_recovery(costs, self.target_pls)
        hours = full_interval(costs) if self._mode == "full" else partial_interval(costs, self.target_pls)
        every = max(1.0, min(hours, costs.total_hours) / step_hours)
        also = "" if plan.mode == self._mode else f"; {plan.mode} recovery would be cheaper by these costs"
        say(f"--cpr {self.cpr} saves everything once in {every:.1f} steps, by {self.recovery_costs} costs{also}")
        return every


def given_failures(words: tuple[str, ...], shards: int) -> dict[int, list[int]]:
    """Return {step: shards} of the failures that are given explicitly; none if they are to be drawn."""
    found: dict[int, list[int]] = {}
    for word in words if words != ("gamma",) else ():
        step, _, lost_there = word.partition(":")
        try:
            at, lost = int(step), sorted({int(shard) for shard in lost_there.split(",")})
        except ValueError:
            raise ValueError(f"--fail {word}: give step:shards, such as 1500:3 or 2200:1,5; or gamma alone.") from None
        if at in found:
            raise ValueError(
                f"--fail {word}: step {at} has failures already; give its shards in one word, as 2200:1,5."
            )
        wrong = [shard for shard in lost if not 0 <= shard < shards]
        if wrong:
            raise ValueError(f"--fail {word}: shards {wrong} are not among the {shards}, from 0.")
        found[at] = lost
    return found


def _step_seconds(first_steps) -> float:
    """Return the median time of a step, over the second half of the first steps."""
    times = []
    for _, metrics in first_steps(MEASURED_STEPS):
        jax.block_until_ready(metrics)
        times.append(time.perf_counter())
    if len(times) < MEASURED_STEPS:
        raise ValueError(f"{len(times)} steps are too few to measure costs by: {MEASURED_STEPS} are needed.")
    return float(np.median(np.diff(times[MEASURED_STEPS // 2 :])))
