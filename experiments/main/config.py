"""The configuration of the main job: a tree of parts, each with its own flags; a few flags choose the parts.

    source     --data                    what to train on                   sources.py
    learning                             model and optimizers               learning.py
    home       --tables                  where the rows are                 homes.py
    engine     --pipeline                how batches follow each other      engines.py
    trainers   --shadowsync, --where     replicas and their synchronising   trainers.py
    saves      --cpr                     what survives a failure            recovering.py
    looks                                evaluations during training

A combination that cannot run has no tree, and a flag that no chosen part reads is refused by name. Flags are flat on
the command line and in config.json: `parse` and `config_of` build the tree, `run_dir.flat` takes it apart.
"""

import dataclasses
import functools
import importlib.util
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import tyro

from main.cli import belongs, refuse, refuse_small
from main.click_data import ClickJob, Data
from main.engines import OAC, Asynchronous, InTurn, Overlapped, PipelineKind, Synchronous, engines_over
from main.homes import Devices, HomeKind, Host, ReplacedServers, Servers
from main.learning import Learning
from main.model import OF_SEVERAL_LABELS, is_own
from main.recovering import CPRKind, Periodic, Recovering, Unprotected
from main.sources import SOURCES, Criteo, DataKind, Synthetic, Tabular
from main.targets import Target
from main.trainers import LockStep, One, Processes, Replicas, ShadowKind, Threads, Where
from main.widths import widths_of


@dataclasses.dataclass(frozen=True)
class AtTheEnd:
    """The test set alone, once training is over."""

    @property
    def keeps_best(self) -> bool:
        """Whether the best state is kept."""
        return False

    def monitored(self, main: Target) -> str | None:
        """Return the figure of the main label in the validation by which the best state is kept; None to keep none.

        Raises:
          ValueError: the label has no such figure.
        """
        return None

    def check(self) -> None:
        """Raise ValueError if the flags contradict each other."""


@dataclasses.dataclass(frozen=True)
class Evaluations(AtTheEnd):
    """Evaluations during training, and what follows from them."""

    read_by: ClassVar = (
        "trainers in one process, as with --tables host or a --pipeline (others are tested at the end alone)"
    )
    evaluations: int = 8
    """Number of evaluations of the validation set (without one, of the test set), evenly over the run."""
    patience: int | None = None
    """Stop after this many evaluations without a better one (by --monitor; by the AUC, or the RMSE of a regression,
    unless it is given), and keep and test the best state."""
    monitor: Literal["auc", "log_loss", "gauc", "rmse", "mae"] | None = None
    """Keep and test the state that is the best by this figure of the validation, also without --patience."""
    reduce_on_plateau: float | None = None
    """Multiply both learning rates by this after each evaluation without a better one (by --monitor), such as 0.1; the
    best state is kept and tested."""
    group: str | None = None
    """A field or a key of the schema, such as the user: evaluations also give the mean AUC within it (GAUC), to which
    rows without a value are one group."""
    tensorboard: bool = False
    """Write what metrics.jsonl has as scalars for TensorBoard too, in tensorboard/ of the run's directory."""

    @property
    def keeps_best(self) -> bool:
        return not self.monitor is self.patience is self.reduce_on_plateau is None

    def monitored(self, main: Target) -> str | None:
        known = ["rmse", "mae"] if main.moments else ["auc", "log_loss", "gauc"]
        refuse(
            {
                f"--monitor {self.monitor} is no figure of {main.name!r}: give one of {', '.join(known)}.": (
                    self.monitor is not None and self.monitor not in known
                ),
                f"--group {self.group} is for labels of 0 and 1, and {main.name!r} is a regression: leave it out.": (
                    self.group is not None and main.moments is not None
                ),
            }
        )
        return self.monitor or (main.metric if self.keeps_best else None)

    def check(self) -> None:
        refuse(
            {
                "--monitor gauc is the mean AUC within groups: give --group FIELD too, such as the user.": (
                    self.monitor == "gauc" and self.group is None
                ),
                f"--patience {self.patience} never ends {self.evaluations} evaluations early: give more of them.": (
                    self.patience is not None and self.patience >= self.evaluations
                ),
                f"--reduce-on-plateau {self.reduce_on_plateau} must lie between 0 and 1, such as 0.1.": (
                    self.reduce_on_plateau is not None and not 0 < self.reduce_on_plateau < 1
                ),
                "--tensorboard needs tensorboardX, which is not installed: pip install 'jaxrec[tensorboard]'.": (
                    self.tensorboard and importlib.util.find_spec("tensorboardX") is None
                ),
            }
        )


@dataclasses.dataclass(frozen=True)
class Config:
    """Flags of the main job; unset flags follow from the data and the preset."""

    source: Synthetic | Criteo | Tabular
    learning: Learning
    home: Devices | Host | Servers | ReplacedServers
    engine: InTurn | Overlapped | Synchronous | Asynchronous | OAC
    trainers: One | LockStep | Threads | Processes
    saves: Unprotected | Periodic | Recovering
    looks: AtTheEnd | Evaluations
    workdir: Path | None = None
    seed: int = 0
    seeds: int = 1
    """Train this many times, each with its own seed, and report the mean with its interval."""
    resume: bool = False
    """Resume the run in --workdir: bit for bit, unless trainers run freely or CPR restores rows of several steps."""
    requeue: bool = False
    """When stopped by a signal, exit with 75, for a scheduler configured to restart such a job (Slurm: RequeueExit=75,
    or scontrol requeue)."""

    def job(self, data: Data) -> ClickJob:
        """Build the model, its loss and its optimizers."""
        steps = self.trainers.steps_of_one(data.steps)
        job = self.learning.job(data, steps, self.home.shards, self.seed)
        if isinstance(self.trainers, Threads | Processes) and (job.task.seed is not None or job.stateful):
            raise ValueError(
                f"--model {self.learning.model} has dropout or batch norm, which free-running trainers cannot train, "
                "as they apply gradients in any order: give --where lockstep, or leave these out."
            )
        return job._replace(task=self.trainers.task(job.task))

    def check(self) -> "Config":
        """Return the configuration; raise ValueError for values that the library would refuse once a run has begun."""
        refuse_small(self)
        source, looks, directory = self.source, self.looks, getattr(self.home, "table_directory", None)
        for part in (source, self.learning, looks, self.trainers):
            part.check()
        self.saves.check(self.home.shards)
        if self.learning.widths:
            widths_of(self.learning.widths, source.tables())
        targets = source.targets()
        looks.monitored(targets[0])
        one_label = not is_own(self.learning.model) and self.learning.model not in OF_SEVERAL_LABELS
        refuse(
            {
                f"--model {self.learning.model} predicts one label, and --labels names {len(targets)}: give "
                f"{' or '.join(OF_SEVERAL_LABELS)}, or a model of your own.": one_label and len(targets) > 1,
                "--model din weighs a history by a candidate: give --data tabular with a history, or another model.": (
                    self.learning.model == "din" and not isinstance(source, Tabular)
                ),
                belongs("requeue", self.requeue, "the same command started again, with --workdir and --resume"): (
                    self.requeue and not (self.workdir is not None and self.resume)
                ),
                belongs("table_directory", directory, "a single seed"): (directory is not None and self.seeds > 1),
            }
        )
        if isinstance(looks, Evaluations) and looks.keeps_best and not source.has_validation():
            name = next(name for name in ("patience", "reduce_on_plateau", "monitor") if getattr(looks, name))
            reader = "a run with a validation, of --validation-fraction 0.1, say, or of the schema's split"
            raise ValueError(belongs(name, getattr(looks, name), reader))
        share = getattr(source, "validation_fraction", 0.0)
        if isinstance(self.trainers, Processes) and share:
            raise ValueError(belongs("validation_fraction", share, Evaluations.read_by))
        if isinstance(self.trainers, Threads | Processes):
            for name in ("dropout", "batch_norm"):
                if value := getattr(self.learning, name):
                    raise ValueError(belongs(name, value, "one trainer, or trainers in lock step (--where lockstep)"))
        self.home.check()
        return self


@dataclasses.dataclass(frozen=True)
class Kinds:
    """The flags that choose the parts."""

    data: DataKind = "synthetic"
    tables: HomeKind = None
    pipeline: PipelineKind = "none"
    shadowsync: ShadowKind = "none"
    where: Where = None
    cpr: CPRKind = "none"

    @property
    def free(self) -> Literal["threads", "processes"] | None:
        """How trainers run freely; None if they do not."""
        if self.shadowsync == "none" or self.where == "lockstep":
            return None
        of_home: Mapping[HomeKind, Sequence[Literal["threads", "processes"]]]
        of_home = {"host": ("threads", "processes"), "remote": ("processes",)}
        possible = of_home.get(self.tables, ()) if self.pipeline == self.cpr == "none" else ()
        if self.where is not None and self.where not in possible:
            homes = {"threads": "host", "processes": "host or remote"}[self.where]
            raise ValueError(belongs("where", self.where, f"--tables {homes} without --pipeline and --cpr"))
        return self.where or next(iter(possible), None)

    def parts(self) -> dict[str, Any]:
        """Return the parts that they choose, with their defaults."""
        engines, free = engines_over(self.tables), self.free
        refuse(
            {
                belongs("pipeline", self.pipeline, "--tables host, remote or, with oac, pinned"): (
                    self.pipeline not in engines
                ),
                belongs("where", self.where, Replicas.read_by): (self.where is not None and self.shadowsync == "none"),
            }
        )
        home: type[Devices] = {"host": Host, "remote": Servers}.get(self.tables or "", Devices)
        if home is Servers and self.cpr != "none":
            home = ReplacedServers
        replicas = {"threads": Threads, "processes": Processes, None: LockStep}[free]
        trainers = One() if self.shadowsync == "none" else replicas(self.shadowsync, self.where)
        in_one = free != "processes"
        return {
            "source": SOURCES[self.data](self.data),
            "learning": Learning(),
            "home": home(self.tables),
            "engine": engines[self.pipeline](self.pipeline),
            "trainers": trainers,
            "saves": Recovering(self.cpr) if self.cpr != "none" else Periodic() if in_one else Unprotected(),
            "looks": Evaluations() if in_one else AtTheEnd(),
        }


PARTS = (
    *SOURCES.values(), Learning, Devices, Host, Servers, ReplacedServers, InTurn, Overlapped, Synchronous, Asynchronous,
    OAC, One, LockStep, Threads, Processes, Unprotected, Periodic, Recovering, AtTheEnd, Evaluations,
)  # fmt: skip


def readers() -> dict[str, str]:
    """Return {flag that some parts read: what these are, in words}."""
    found: dict[str, str] = {}
    for part in PARTS:
        for its in map(vars, part.__mro__):
            if "read_by" in its:
                found |= dict.fromkeys(its["__annotations__"], its["read_by"])
    return found


def unread(name: str, value: Any) -> ValueError:
    """Return the error for a flag, name_of_it, that no chosen part reads."""
    if name in (known := readers()):
        return ValueError(belongs(name, value, known[name]))
    return ValueError(f"--{name.replace('_', '-')} {value}: train.py has no such flag, see --help.")


def config_of(**flags: Any) -> Config:
    """Return the configuration of flat flags, as config.json has them; the caller checks it.

    Raises:
      ValueError: there is no such combination, or a flag that nothing reads.

    >>> config = config_of(tables="host", pipeline="oac", window=4)
    >>> config.engine
    OAC(pipeline='oac', window=4)
    >>> config_of(tables="host", window=4)
    Traceback (most recent call last):
    ValueError: --window 4 is for --pipeline oac or async: add that, or leave it out.
    """
    names = {field.name for field in dataclasses.fields(Kinds)}
    chosen = Config(**Kinds(**{name: value for name, value in flags.items() if name in names}).parts())
    read: dict[str, Any] = {}
    for field in dataclasses.fields(Config):
        part = getattr(chosen, field.name)
        if dataclasses.is_dataclass(part):
            mine = {own.name: flags[own.name] for own in dataclasses.fields(part) if own.name in flags}
            read[field.name] = dataclasses.replace(part, **mine)  # type: ignore[type-var]
            names |= mine.keys()
        elif field.name in flags:
            read[field.name] = flags[field.name]
            names.add(field.name)
    for name in flags.keys() - names:
        raise unread(name, flags[name])
    return dataclasses.replace(chosen, **read)


_NOT_TO_REPEAT = {"experiment", "run", "workdir", "resume", "requeue", "table_directory"}


def words_of(file: Path) -> list[str]:
    """Return the flags of a run in its config.json as words of a command line, without those of its place.

    Raises:
      ValueError: there is no such file, or it holds no flags.
    """
    try:
        flags = dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"--config {file} cannot be read ({error}): give the config.json of a run.") from error
    words: list[str] = []
    for name, value in flags.items():
        if value is None or name in _NOT_TO_REPEAT:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value != []:
            words += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
    return words


def parse(
    config: type[Config], args: Sequence[str] | None = None, description: str | None = None, prog: str | None = None
) -> Config:
    """Return the checked configuration of a command line; --help shows the flags of the parts that it chooses.

    `--config FILE` stands for the flags in a config.json, and flags beside it change them.
    """
    args = list(sys.argv[1:] if args is None else args)
    if "--config" in args:
        place = args.index("--config")
        file, args[place : place + 2] = args[place + 1 : place + 2], []
        args = [*(words_of(Path(*file)) if file else []), *args]
    without_help = [word for word in args if word not in ("-h", "--help")]
    kinds, _ = tyro.cli(Kinds, prog=prog, args=without_help, return_unknown_args=True)
    read = functools.partial(
        tyro.cli, config, prog=prog, description=description, args=args, default=config(**kinds.parts()),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.AvoidSubcommands),
    )  # fmt: skip
    found, (*rest,) = read(return_unknown_args=True)
    for place, word in enumerate(rest):
        if (name := word.removeprefix("--").removeprefix("no-").replace("-", "_")) in readers():
            values = itertools.takewhile(lambda word: not word.startswith("--"), rest[place + 1 :])
            raise unread(name, tuple(values))
    return (read() if rest else found).check()  # which says what else a misspelt flag may mean
