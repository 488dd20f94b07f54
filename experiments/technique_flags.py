"""The flags of the three techniques, and what goes together.

Two regimes of ShadowSync follow from the other flags. In lock step trainers are replicas on a mesh,
each on a device of its own, that share every batch: over device tables, under a pipeline, with CPR.
Free-running trainers are threads over shared host tables, each with batches of its own.
"""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Literal

from contract import Flags

FORMS = {"easgd": ("symmetric", "sequential"), "ma": ("delta", "lerp"), "bmuf": ("delta", "lerp")}
TRAINERS = SERVERS = 2  # unless given


@dataclasses.dataclass(frozen=True)
class TechniqueFlags(Flags):
    """Where the rows are, how batches overlap, who is synchronised, and what survives a failure."""

    tables: Literal["device", "host", "remote"] = "device"
    """On the devices, in the memory of this process, or at servers in other processes, on Ray."""
    servers: int | None = None
    """Of remote tables: how many processes have the rows, 2 unless given."""
    spares: int = 0
    """Of remote tables with --cpr: processes that wait to take the place of a server that dies."""
    ray_address: str | None = None
    """Of remote tables: a Ray cluster that runs, as host:port or auto; without it Ray is started on this machine."""
    table_directory: Path | None = None
    """Host tables as mapped files here (best on tmpfs) instead of RAM."""
    shards: int = 8
    """Of every table; CPR's nodes."""
    pipeline: Literal["none", "sync", "semisync", "async", "oac"] = "none"
    """Over host or remote tables: oac overlaps batches with the same bits; none trains one after the other."""
    window: int | None = None
    """Of oac and async: how many batches are in flight, 8 unless given."""
    stale_rows: Literal["planned", "device"] = "planned"
    """Of oac: who finds rows that arrive too old, the host that plans or the device."""
    savings: bool = False
    """Of oac: no row travels that the device has already, or that a batch in flight writes again."""
    shadowsync: Literal["none", "easgd", "ma", "bmuf"] = "none"
    """Replicas of the dense network, synchronised in the background. With host tables alone trainers run freely;
    with a pipeline, device tables or CPR they are replicas in lock step."""
    trainers: int | None = None
    """2 unless given. In lock step each has a share of every batch."""
    workers: int = 1
    """Free-running: Hogwild workers of each trainer."""
    sync_form: str | None = None
    """Of the rule: delta or lerp; of easgd symmetric or sequential."""
    sync_alpha: float | None = None
    """Of the rule: how far a round moves, 0.5 unless given. EASGD pulls back to its centre what a step has moved, by
    half where a round follows each step: rounds back to back over a small network want less, or a pace."""
    sync_pace_seconds: float | None = None
    """The least time from one round in the background to the next, 0 for back to back. Unless given, rounds are so rare
    that they take an eightieth of this machine's cores."""
    sync_every_steps: int | None = None
    """In the foreground instead: a round every so many steps, which training waits for."""
    cpr: Literal["none", "full", "vanilla", "mfu", "ssu", "scar"] = "none"
    """Saves through a recovery that brings lost shards back: full rolls all back, the others the lost ones alone, from
    saves of everything (vanilla) or of the rows that a scheme picks."""
    target_pls: float = 0.1
    """The portion of lost samples that the model can bear; it decides how often to save, unless --save-every-steps
    does."""
    recovery_costs: Literal["assumed", "measured"] = "assumed"
    """What --target-pls reckons with: the costs of setting A, solved from the abstract's percentages, with the steps of
    this run for its 56 hours; or those of a save, a restore and a step here, measured when the run begins."""
    fail: tuple[str, ...] = ()
    """Emulated failures, as step:shards: 1500:3 2200:1,5; or the word gamma, to draw them."""
    mtbf_steps: float | None = None
    """Mean steps between failures; half of the run unless given, as we recall the paper."""
    fail_shape: float = 1.0
    """Of the gamma law: 1 is the exponential law, below it failures come in bursts."""

    @property
    def number_of_servers(self) -> int:
        """How many processes have the rows of remote tables."""
        return SERVERS if self.servers is None else self.servers

    @property
    def replicas(self) -> int:
        """How many copies of the dense parameters there are."""
        return 1 if self.shadowsync == "none" else self.trainers or TRAINERS

    @property
    def free(self) -> bool:
        """Whether trainers run freely."""
        return self.shadowsync != "none" and (self.tables, self.pipeline, self.cpr) == ("host", "none", "none")

    @property
    def in_lock_step(self) -> bool:
        """Whether trainers are replicas that take each step together."""
        return self.shadowsync != "none" and not self.free


def rules(config: TechniqueFlags) -> dict[str, object]:
    """{what is wrong, and the remedy: whether it is} of flags that do not go together.

    Raises:
      ValueError: a word of --fail is no failure.
    """
    given_failures(config)
    return {
        f"--pipeline {config.pipeline} is for --tables host or remote: add it, or leave the pipeline out.": (
            config.pipeline != "none" and config.tables == "device"
        ),
        **_rules_of_servers(config),
        **_rules_of_pipelines(config),
        f"--table-directory {config.table_directory} is for --tables host: add it, or leave the directory out.": (
            config.table_directory is not None and config.tables != "host"
        ),
        **_rules_of_trainers(config),
        **_rules_of_recoveries(config),
        # Last: who installs it for a run that would be refused anyway has waited for nothing.
        "--tables remote needs Ray, which is not installed: pip install -e '.[cluster]'.": (
            config.tables == "remote" and importlib.util.find_spec("ray") is None
        ),
    }


def _rules_of_pipelines(config):
    windowed = config.pipeline in ("oac", "async")
    return {
        f"--window {config.window} is for --pipeline oac or async.": config.window is not None and not windowed,
        f"--stale-rows {config.stale_rows} is for --pipeline oac.": (
            config.stale_rows != "planned" and config.pipeline != "oac"
        ),
        "--savings is for --pipeline oac.": config.savings and config.pipeline != "oac",
    }


def _rules_of_trainers(config):
    shadow, forms = config.shadowsync != "none", FORMS.get(config.shadowsync, ())
    return {
        f"--trainers {config.trainers} is for --shadowsync easgd, ma or bmuf.": (
            config.trainers is not None and not shadow
        ),
        f"--sync-form {config.sync_form} is for --shadowsync easgd, ma or bmuf.": config.sync_form and not shadow,
        f"--sync-form {config.sync_form} is none of --shadowsync {config.shadowsync}: give {' or '.join(forms)}.": (
            config.sync_form and shadow and config.sync_form not in forms
        ),
        f"--sync-alpha {config.sync_alpha} is for --shadowsync easgd, ma or bmuf.": (
            config.sync_alpha is not None and not shadow
        ),
        f"--sync-alpha {config.sync_alpha} must be above 0 and at most 1.": (
            config.sync_alpha is not None and not 0 < config.sync_alpha <= 1
        ),
        f"--sync-pace-seconds {config.sync_pace_seconds} is for --shadowsync easgd, ma or bmuf.": (
            config.sync_pace_seconds is not None and not shadow
        ),
        f"--sync-every-steps {config.sync_every_steps} is for --shadowsync easgd, ma or bmuf.": (
            config.sync_every_steps is not None and not shadow
        ),
        "--sync-pace-seconds is of the background, --sync-every-steps of the foreground: give one of them.": (
            config.sync_pace_seconds is not None and config.sync_every_steps is not None
        ),
        f"--workers {config.workers} are of trainers that run freely: leave out --pipeline, --cpr and --tables device, "
        "or the workers.": config.workers > 1 and not config.free,
    }


def _rules_of_recoveries(config):
    return {
        f"--fail {' '.join(config.fail)} needs something that recovers: add --cpr mfu, say.": (
            config.fail and config.cpr == "none"
        ),
        f"--recovery-costs {config.recovery_costs} is of --cpr without --save-every-steps.": (
            config.recovery_costs != "assumed"
            and (config.cpr == "none" or getattr(config, "save_every_steps", None) is not None)
        ),
        f"--mtbf-steps {config.mtbf_steps} is of --cpr.": config.mtbf_steps is not None and config.cpr == "none",
        f"--target-pls {config.target_pls:g} is of --cpr.": config.target_pls != 0.1 and config.cpr == "none",
        f"--target-pls {config.target_pls:g} must be a portion of the samples, above 0 and at most 1.": (
            not 0 < config.target_pls <= 1
        ),
        f"--fail-shape {config.fail_shape:g} is of --fail gamma.": (
            config.fail_shape != 1.0 and config.fail != ("gamma",)
        ),
        "--save-every-steps 0 saves nothing that --cpr could bring back: leave one of them out.": (
            config.cpr != "none" and getattr(config, "save_every_steps", None) == 0
        ),
    }


def _rules_of_servers(config):
    remote = config.tables == "remote"
    return {
        f"--servers {config.servers} are of --tables remote: add it, or leave them out.": (
            config.servers is not None and not remote
        ),
        f"--spares {config.spares} are of --tables remote with --cpr: add them, or leave the spares out.": (
            config.spares > 0 and not (remote and config.cpr != "none")
        ),
        f"--ray-address {config.ray_address} is of --tables remote: add it, or leave it out.": (
            config.ray_address is not None and not remote
        ),
        f"--servers {config.number_of_servers} are more than the {config.shards} shards, of which each has one or more:"
        " give fewer servers, or more --shards.": remote and config.number_of_servers > config.shards,
    }


def given_failures(config) -> dict[int, list[int]]:
    """{step: shards} of the failures that are given as such; none if they are to be drawn.

    Raises:
      ValueError: a word that is none; a step that stands twice; a shard that there is not.
    """
    found: dict[int, list[int]] = {}
    for word in config.fail if config.fail != ("gamma",) else ():
        step, _, shards = word.partition(":")
        try:
            at, lost = int(step), sorted({int(shard) for shard in shards.split(",")})
        except ValueError:
            raise ValueError(f"--fail {word}: give step:shards, such as 1500:3 or 2200:1,5; or gamma alone.") from None
        if at in found:
            raise ValueError(
                f"--fail {word}: step {at} has failures already; give its shards in one word, as 2200:1,5."
            )
        wrong = [shard for shard in lost if not 0 <= shard < config.shards]
        if wrong:
            raise ValueError(f"--fail {word}: shards {wrong} are not among the {config.shards}, from 0.")
        found[at] = lost
    return found
