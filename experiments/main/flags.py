"""Flags of train.py: data, learning and techniques; and which of them can be combined.

    DataFlags        -> data_of     what is trained, validated and tested on
    LearningFlags    -> optimizers  of the dense parameters and of the rows
    TechniqueFlags   -> main/techniques.py

Two regimes of ShadowSync follow from the other flags. In lock step, trainers are replicas on a mesh, one per device,
that share every batch: with device tables, a pipeline or CPR. Free-running trainers, each with its own batches, are
threads over shared host tables, or processes over tables at servers.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import optax

from jaxrec import metrics
from jaxrec.cpr.schedule import SETTING_A, partial_interval
from jaxrec.data.synthetic import SyntheticClicks, scaled_cardinalities
from jaxrec.embedding import (
    adagrad,
    ftrl,
    lazy_adam,
    momentum_sgd,
    rowwise_adagrad,
    rowwise_adam,
    sgd,
    with_clipping,
    with_weight_decay,
)
from jaxrec.files import local_path
from jaxrec.shadowsync import Rule, bmuf, easgd, model_averaging
from jaxrec.types import Batch, RowOptimizer
from main.cli import Flags, rule_of_ray, say, unread
from main.click_data import Data, criteo_clicks, synthetic_clicks

# AUC of DLRM with seed 0 and no other flags.
EXPECTED = {
    "smoke": "; with --preset smoke alone DLRM reaches about 0.716",
    "default": "; with the defaults DLRM reaches about 0.744",
    "paper": "",
}
# Defaults of `prepare`. The name of a directory prepared with these depends on its files alone.
PREPARATION: dict[str, Any] = {
    "min_count": 6, "hash_cap": None, "split": "time", "train_fraction": 5 / 6, "max_bad_rows": 0,
}  # fmt: skip
OPTIMIZERS: dict[str, Callable] = {"adam": optax.adam, "adagrad": optax.adagrad, "sgd": optax.sgd}
ROW_OPTIMIZERS: dict[str, Callable] = {
    "rowwise_adagrad": rowwise_adagrad, "adagrad": adagrad, "sgd": sgd, "momentum_sgd": momentum_sgd,
    "lazy_adam": lazy_adam, "rowwise_adam": rowwise_adam, "ftrl": ftrl,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DataFlags(Flags):
    """Data that a run reads, and their order; unset flags follow from the data and the preset."""

    data: Literal["synthetic", "criteo", "tabular"] = "synthetic"
    path: tuple[Path, ...] = ()
    """Criteo: raw files (plain or .gz) in time order, or one prepared directory. Tabular: the directory that prepare.py
    --schema has made."""
    rows: int | None = None
    """Synthetic: embedding rows in all; the Criteo Kaggle cardinalities, cut."""
    curved: float = 0.0
    """Synthetic: share of what decides a click that sums and products of two fields cannot express."""
    batch_size: int | None = None
    steps: int | None = None
    """Synthetic: batches of one epoch. Criteo: at most so many steps, of all epochs together."""
    epochs: int = 1
    """Passes over the training data. Synthetic: the same batches again."""
    shuffle: bool = False
    """Another order in every epoch, by --seed. Criteo: the blocks of 4,096 rows, then the rows within
    16 of them. Synthetic: the batches."""
    validation_fraction: float = 0.0
    """Criteo and tabular: share of the training rows held out for validation, such as 0.1: the last ones in time, or
    random ones if the preparation split at random. The synthetic log has its own validation set."""
    min_count: int | None = None
    """Raw Criteo files: rarer categories share one row (6 unless hashing)."""
    hash_cap: int | None = None
    """Raw Criteo files: hash each field into this many rows instead."""
    split: Literal["time", "random"] | None = None
    """Raw Criteo files: train on the first lines and test on the last ones (time, the default), or split at random,
    alike for every --seed."""
    train_fraction: float | None = None
    """Raw Criteo files: share of the lines to train on; default 5/6."""
    max_bad_rows: int | None = None
    """Raw Criteo files: number of malformed lines to skip before giving up; default 0."""


def data_of(config: DataFlags) -> Data:
    """Return the data that the flags select."""
    if config.data == "tabular":
        from main.table_data import tabular_data

        return tabular_data(config)
    return synthetic_data(config) if config.data == "synthetic" else criteo_data(config)


def with_absolute_paths(config: DataFlags) -> DataFlags:
    """Return the flags with an absolute path of prepared data, for a process with another working directory."""
    paths = (prepared_criteo(config),) if config.data == "criteo" else config.path
    return dataclasses.replace(config, path=tuple(local_path(path) for path in paths))


def training_stream(config: DataFlags) -> Callable[..., Iterator[Batch]]:
    """Return `Data.train` alone, for a process that evaluates nothing."""
    return (_synthetic_clicks(config) if config.data == "synthetic" else data_of(config)).train


def _synthetic_clicks(config):
    rows, steps, test_batches = {
        "smoke": (20_000, 100, 8),
        "default": (200_000, 1_000, 50),
        "paper": (33_762_577, 20_000, 500),
    }[config.preset]
    return synthetic_clicks(
        scaled_cardinalities(config.rows or rows), config.batch_size or 2048, config.steps or steps, config.seed,
        test_batches, epochs=config.epochs, shuffle=config.shuffle, curved=config.curved,
    )  # fmt: skip


def synthetic_data(config) -> Data:
    """Return the synthetic click log, sized by the preset, with the metrics of its teacher."""
    data, teacher = _synthetic_clicks(config), metrics.empty_evaluation()
    clicks = SyntheticClicks(data.cardinalities, seed=config.seed, curved=config.curved)
    for batch in data.test():
        found = metrics.evaluate_batch(clicks.teacher_logit(batch), batch.label, batch.weight)
        teacher = metrics.merge(teacher, found)
    best = metrics.summarize(teacher)
    return data._replace(
        expectation=f"the teacher that drew the labels reaches {best['auc']:.4f}" + EXPECTED[config.preset],
        best={"teacher_auc": best["auc"], "teacher_normalized_entropy": best["normalized_entropy"]},
    )


def prepared_criteo(config: DataFlags) -> Path:
    """Return the prepared directory that the flags give, or in which their raw files are to be prepared."""
    first = config.path[0]
    return first if first.is_dir() else prepared_directory(config.path, preparation(config))


def criteo_data(config) -> Data:
    """Return Criteo rows, preparing them in the current directory if necessary."""
    from jaxrec.data.criteo import prepare

    directory = prepared_criteo(config)
    if directory != config.path[0]:
        say(f"preparing {', '.join(map(str, config.path))} in {directory}")
        prepare(config.path, directory, **preparation(config))
    data = criteo_clicks(
        directory, config.batch_size, config.steps, epochs=config.epochs,
        shuffle_seed=config.seed if config.shuffle else None, validation_fraction=config.validation_fraction,
    )  # fmt: skip
    reached = "with the defaults DLRM reaches about 0.761 in one pass over a sample of 110,000 rows of Criteo Kaggle"
    return data._replace(expectation=reached)


def preparation(config) -> dict[str, Any]:
    """Return the given preparation flags that differ from the defaults."""
    given = {name: getattr(config, name) for name in PREPARATION}
    return {name: value for name, value in given.items() if value is not None and value != PREPARATION[name]}


def prepared_directory(sources: tuple[Path, ...], options: Mapping[str, Any] | None = None) -> Path:
    """Return where raw files are prepared: in the current directory, as theirs may be read-only.

    Files of one name in two directories get distinct names, and so does one file prepared with other options.
    """
    words = [str(local_path(source)) for source in sources]
    words += [f"{name}={value!r}" for name, value in sorted((options or {}).items())]
    digest = hashlib.sha256("\n".join(words).encode()).hexdigest()
    return Path(f"{sources[0].name.split('.')[0]}.{digest[:8]}.prepared")


@dataclasses.dataclass(frozen=True)
class LearningFlags(Flags):
    """Model, and optimizers of its dense parameters and rows."""

    model: Literal["dlrm", "dcnv2", "lr", "fm", "dnn", "wide_deep", "deepfm", "finalmlp", "din", "small_dlrm"] = "dlrm"
    embedding_width: int = 16
    optimizer: Literal["adam", "adagrad", "sgd"] = "adam"
    """Optimizer of the dense parameters."""
    learning_rate: float = 1e-3
    row_optimizer: Literal["rowwise_adagrad", "adagrad", "sgd", "momentum_sgd", "lazy_adam", "rowwise_adam", "ftrl"] = (
        "rowwise_adagrad"
    )
    """Optimizer of the embedding rows."""
    row_learning_rate: float = 0.02
    row_weight_decay: float = 0.0
    """L2 penalty of the rows that a batch touches."""
    row_clip_norm: float | None = None
    """Clip the gradient of each row to this norm."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Schedule of both learning rates after the warm-up: constant, or decaying to 0 at the end of the run."""
    warmup_steps: int = 0
    """Steps over which both learning rates rise linearly from 0."""


def optimizers(config: LearningFlags, steps: int) -> tuple[optax.GradientTransformation, RowOptimizer]:
    """Build the optimizers of the dense parameters and of the rows, on one schedule.

    Args:
      steps: length of the schedule: steps of the run, over all epochs. A free-running trainer counts its own steps
        only: pass the steps of one trainer.
    """
    rate, row_rate = (_scheduled(peak, config, steps) for peak in (config.learning_rate, config.row_learning_rate))
    rows = ROW_OPTIMIZERS[config.row_optimizer](row_rate)
    if config.row_weight_decay:
        rows = with_weight_decay(rows, config.row_weight_decay)
    if config.row_clip_norm is not None:  # around the decay, so that only gradients of the data are clipped
        rows = with_clipping(rows, config.row_clip_norm)
    return OPTIMIZERS[config.optimizer](rate), rows


def _scheduled(peak: float, config: LearningFlags, steps: int) -> float | optax.Schedule:
    """Return a learning rate with its schedule; a constant one stays a float, which keeps its program unchanged."""
    warmup = config.warmup_steps
    if not 0 <= warmup < steps:
        raise ValueError(f"--warmup-steps {warmup} must be less than the {steps} steps of the run: give fewer.")
    if config.schedule == "constant" and not warmup:
        return peak
    behind = {
        "constant": optax.constant_schedule(peak),
        "cosine": optax.cosine_decay_schedule(peak, steps - warmup),
        "linear": optax.linear_schedule(peak, 0.0, steps - warmup),
    }[config.schedule]
    if not warmup:
        return behind
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), behind], [warmup])


RULES: dict[str, Callable[..., Rule]] = {"easgd": easgd, "ma": model_averaging, "bmuf": bmuf}
TRAINERS = SERVERS = 2  # defaults


@dataclasses.dataclass(frozen=True)
class TechniqueFlags(Flags):
    """Placement of the rows, overlap of batches, synchronisation of replicas, and recovery from failures."""

    tables: Literal["device", "pinned", "host", "remote"] | None = None
    """On the devices; pinned in the memory of this process, where the devices read and write the rows themselves; in
    that memory, copied by the host; or at server processes, on Ray. By default on the devices, or pinned if these are
    GPUs and rows and slots take more than half of their memory."""
    servers: int | None = None
    """Remote tables: number of server processes; default 2."""
    spares: int = 0
    """Remote tables with --cpr: standby processes, each to replace a server that dies."""
    ray_address: str | None = None
    """Remote tables: address of a running Ray cluster, host:port or auto; by default Ray is started on this machine."""
    table_directory: Path | None = None
    """Host tables as mapped files here (best on tmpfs) instead of RAM."""
    shards: int = 8
    """Shards of every table; CPR's nodes."""
    pipeline: Literal["none", "sync", "semisync", "async", "oac"] = "none"
    """Over host or remote tables: oac overlaps batches, bitwise equal to sync; none trains one batch after the
    other. Over pinned tables oac overlaps transfers and programs of the device."""
    window: int | None = None
    """oac and async: batches in flight; default 8. Over pinned tables: batches in the ring; default 2."""
    stale_rows: Literal["planned", "device"] = "planned"
    """oac: where rows that arrive too old are found: in the host's plan, or on the device."""
    savings: bool = False
    """oac: skip transfers of rows that the device already has."""
    shadowsync: Literal["none", "easgd", "ma", "bmuf"] = "none"
    """Replicas of the dense network, synchronised in the background. With host tables alone, trainers are free-running
    threads; with remote tables alone, free-running processes; with a pipeline, device or pinned tables or CPR they are
    replicas in lock step."""
    trainers: int | None = None
    """Number of trainers; default 2. In lock step each trains a share of every batch."""
    workers: int = 1
    """Free-running: Hogwild workers per trainer."""
    sync_form: str | None = None
    """Form of the rule: delta or lerp; for easgd symmetric or sequential."""
    sync_alpha: float | None = None
    """How far a round moves the replicas; default 0.5. EASGD pulls back towards its centre what a step has moved, by
    half if a round follows each step: with back-to-back rounds over a small network, choose less, or set a pace."""
    sync_pace_seconds: float | None = None
    """Least time between two background rounds, 0 for back to back. By default rounds are so rare that they take an
    eightieth of this machine's cores."""
    sync_every_steps: int | None = None
    """Synchronise in the foreground instead: a round every k steps, which blocks training."""
    cpr: Literal["none", "full", "vanilla", "mfu", "ssu", "scar"] = "none"
    """Recovery that restores lost shards: full rolls everything back; the others restore the lost shards alone, from
    saves of everything (vanilla) or of the rows that a scheme picks."""
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

    @property
    def by_host(self) -> bool:
        """Whether the host reads and writes the rows."""
        return self.tables in ("host", "remote")

    @property
    def overlaps(self) -> bool:
        """Whether the devices move rows beside their programs."""
        return self.pipeline == "oac" and not self.by_host

    @property
    def number_of_servers(self) -> int:
        """Number of server processes of remote tables."""
        return SERVERS if self.servers is None else self.servers

    @property
    def replicas(self) -> int:
        """Number of replicas of the dense parameters."""
        return 1 if self.shadowsync == "none" else self.trainers or TRAINERS

    @property
    def free(self) -> bool:
        """Whether trainers are free-running."""
        return self.shadowsync != "none" and self.by_host and self.pipeline == self.cpr == "none"

    @property
    def in_processes(self) -> bool:
        """Whether trainers are processes."""
        return self.free and self.tables == "remote"

    @property
    def in_lock_step(self) -> bool:
        """Whether trainers are replicas that take each step together."""
        return self.shadowsync != "none" and not self.free


def rule_of(config: TechniqueFlags) -> Rule:
    """Return the synchronisation rule that the flags ask for."""
    given = {"form": config.sync_form, "alpha": config.sync_alpha}
    return RULES[config.shadowsync](**{name: value for name, value in given.items() if value is not None})


def given_failures(config) -> dict[int, list[int]]:
    """Return {step: shards} of the failures that are given explicitly; none if they are to be drawn."""
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


# Which flags can be combined.


def rules_of(config) -> dict[str, object]:
    """Return {problem and remedy: whether it applies} for the flags of data and techniques.

    Raises:
      ValueError: a value that the library refuses, which would otherwise do so once the run has begun.
    """
    given_failures(config)
    partial_interval(SETTING_A, config.target_pls)
    if config.rows is not None:
        scaled_cardinalities(config.rows)
    if config.shadowsync != "none":
        rule_of(config)
    return unread(config, readers(config)) | _rules_of_data(config) | _rules_of_techniques(config)


def readers(config) -> dict[str, tuple[bool, Sequence[str]]]:
    """Return which flags of data and techniques are read by what, for `unread`."""
    synthetic, remote, cpr = config.data == "synthetic", config.tables == "remote", config.cpr != "none"
    raw = config.data == "criteo" and not any(path.is_dir() for path in config.path)
    rounds = ("trainers", "sync_form", "sync_alpha", "sync_pace_seconds", "sync_every_steps")
    return {
        "--data synthetic": (synthetic, ("rows", "curved", "preset")),
        "--data criteo or tabular": (not synthetic, ("path", "validation_fraction")),
        "raw Criteo files, with --data criteo and before they are prepared": (raw, tuple(PREPARATION)),
        "--tables host, remote or, with oac, pinned": (
            config.by_host or (config.tables == "pinned" and config.pipeline == "oac"),
            ("pipeline",),
        ),
        "--tables host": (config.tables == "host", ("table_directory",)),
        "--tables remote": (remote, ("servers", "ray_address")),
        "--tables remote with --cpr": (remote and cpr, ("spares",)),
        "--pipeline oac or async": (config.pipeline in ("oac", "async"), ("window",)),
        "--pipeline oac over --tables host or remote": (
            config.pipeline == "oac" and config.by_host,
            ("stale_rows", "savings"),
        ),
        "--shadowsync easgd, ma or bmuf": (config.shadowsync != "none", rounds),
        "trainers that run freely, over --tables host or remote without --pipeline and --cpr": (
            config.free,
            ("workers",),
        ),
        "--cpr mfu, say": (cpr, ("fail", "mtbf_steps", "target_pls", "recovery_costs")),
        "--fail gamma": (config.fail == ("gamma",), ("fail_shape",)),
    }


def _rules_of_data(config):
    paths, share = ", ".join(map(str, config.path)), config.validation_fraction
    directories = [path for path in config.path if path.is_dir()]
    return {
        "--data criteo needs --path: raw Criteo files, or a directory made by prepare.py.": (
            config.data == "criteo" and not paths
        ),
        "--data tabular needs --path: the directory that prepare.py --schema has made.": (
            config.data == "tabular" and len(directories) != 1
        ),
        f"--path {paths}: a prepared directory stands alone, without other files.": directories and config.path[1:],
        f"--validation-fraction {share} must be a share from 0 to below 1, such as 0.1.": not 0 <= share < 1,
    }


def _rules_of_techniques(config):
    remote = config.tables == "remote"
    return {
        f"--servers {config.number_of_servers} are more than the {config.shards} shards, of which each has one or more:"
        " give fewer servers, or more --shards.": remote and config.number_of_servers > config.shards,
        "--sync-pace-seconds is of the background, --sync-every-steps of the foreground: give one of them.": (
            config.sync_pace_seconds is not None and config.sync_every_steps is not None
        ),
        # Last: a run that is refused anyway does not need Ray.
        **(rule_of_ray() if remote else {}),
    }
