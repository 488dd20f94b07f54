"""The flags of the three techniques, and what goes together.

Two regimes of ShadowSync follow from the other flags. In lock step trainers are replicas on a mesh,
each on a device of its own, that share every batch: over device tables, under a pipeline, with CPR.
Free-running trainers are threads over shared host tables, each with batches of its own.
"""

import dataclasses
import hashlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import optax

from jaxrec import metrics
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
from jaxrec.types import RowOptimizer
from main.cli import Flags, say
from main.click_data import Data, criteo_clicks, synthetic_clicks

OPTIMIZERS: dict[str, Callable] = {"adam": optax.adam, "adagrad": optax.adagrad, "sgd": optax.sgd}
ROW_OPTIMIZERS: dict[str, Callable] = {
    "rowwise_adagrad": rowwise_adagrad, "adagrad": adagrad, "sgd": sgd, "momentum_sgd": momentum_sgd,
    "lazy_adam": lazy_adam, "rowwise_adam": rowwise_adam, "ftrl": ftrl,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LearningFlags(Flags):
    """The model, and how its dense parameters and its rows learn."""

    model: Literal["dlrm", "dcnv2", "lr", "fm", "dnn", "wide_deep", "deepfm", "finalmlp", "din", "small_dlrm"] = "dlrm"
    embedding_width: int = 16
    optimizer: Literal["adam", "adagrad", "sgd"] = "adam"
    """Of the dense parameters."""
    learning_rate: float = 1e-3
    row_optimizer: Literal["rowwise_adagrad", "adagrad", "sgd", "momentum_sgd", "lazy_adam", "rowwise_adam", "ftrl"] = (
        "rowwise_adagrad"
    )
    """Of the embedding rows."""
    row_learning_rate: float = 0.02
    row_weight_decay: float = 0.0
    """L2 penalty of the rows that a batch touches."""
    row_clip_norm: float | None = None
    """Clip the gradient of each row to this norm."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Of both learning rates, behind the warm-up: as they are, or falling to 0 at the end of the run."""
    warmup_steps: int = 0
    """Over so many steps both learning rates rise from 0, in a straight line."""


def optimizers(config: LearningFlags, steps: int) -> tuple[optax.GradientTransformation, RowOptimizer]:
    """The optimizer of the dense parameters and that of the rows, at one schedule.

    Args:
      config: the flags.
      steps: of the run, of all epochs, at whose end a schedule ends. A trainer that runs freely
        counts its own steps alone: give what one of them takes.

    Raises:
      ValueError: the warm-up takes the whole run.
    """
    rate, row_rate = (_scheduled(peak, config, steps) for peak in (config.learning_rate, config.row_learning_rate))
    rows = ROW_OPTIMIZERS[config.row_optimizer](row_rate)
    if config.row_weight_decay:
        rows = with_weight_decay(rows, config.row_weight_decay)
    if config.row_clip_norm is not None:  # around the decay, so that data alone is clipped
        rows = with_clipping(rows, config.row_clip_norm)
    return OPTIMIZERS[config.optimizer](rate), rows


def _scheduled(peak: float, config: LearningFlags, steps: int) -> float | optax.Schedule:
    """A rate at a schedule; a constant one stays a float, and its program what it is."""
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


EXPECTED_AUC = {"smoke": 0.716, "default": 0.744}  # of DLRM, measured with seed 0
# Of `prepare`, where a flag is not given. A directory made with these bears the name of its files
# alone.
PREPARATION: dict[str, Any] = {
    "min_count": 6, "hash_cap": None, "split": "time", "train_fraction": 5 / 6, "max_bad_rows": 0,
}  # fmt: skip
# Flags that say where and how a run is made, and not what comes out of it.
_SAME_RESULTS = {
    "workdir", "resume", "requeue", "save_every_steps", "evaluations", "tables", "table_directory", "preset",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DataFlags(Flags):
    """Which data a run reads, in which order; what is not given follows from the data and the
    preset."""

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
    """Criteo: this share of the training rows does not train but validates, such as 0.1: the last ones
    in time; or random ones, if the preparation split at random. The synthetic log has a validation of
    its own."""
    min_count: int | None = None
    """Raw Criteo files: rarer categories share one row (6 unless hashing)."""
    hash_cap: int | None = None
    """Raw Criteo files: hash each field into so many rows instead."""
    split: Literal["time", "random"] | None = None
    """Raw Criteo files: the first lines train and the last ones test (time, unless given), or random
    ones, the same for every --seed."""
    train_fraction: float | None = None
    """Raw Criteo files: share of the lines that trains; 5/6 unless given."""
    max_bad_rows: int | None = None
    """Raw Criteo files: how many malformed lines to leave out before giving up; 0 unless given."""


def data_of(config: DataFlags) -> Data:
    """What the flags name.

    Raises:
      ValueError: as `synthetic_clicks`, `criteo_clicks`, `tabular_data` and `prepare`.
    """
    if config.data == "tabular":
        from main.table_data import tabular_data

        return tabular_data(config)
    return synthetic_data(config) if config.data == "synthetic" else criteo_data(config)


def synthetic_data(config) -> Data:
    """The synthetic click log, sized by the preset, with what its teacher reaches."""
    rows, steps, test_batches = {
        "smoke": (20_000, 100, 8),
        "default": (200_000, 1_000, 50),
        "paper": (33_762_577, 20_000, 500),
    }[config.preset]
    cardinalities = scaled_cardinalities(config.rows or rows)
    data = synthetic_clicks(
        cardinalities, config.batch_size or 2048, config.steps or steps, config.seed, test_batches,
        epochs=config.epochs, shuffle=config.shuffle, curved=config.curved,
    )  # fmt: skip
    clicks, teacher = SyntheticClicks(cardinalities, seed=config.seed, curved=config.curved), metrics.empty_evaluation()
    for batch in data.test():
        found = metrics.evaluate_batch(clicks.teacher_logit(batch), batch.label, batch.weight)
        teacher = metrics.merge(teacher, found)
    best = metrics.summarize(teacher)
    return data._replace(
        expectation=f"the teacher that drew the labels reaches {best['auc']:.4f}" + expected_auc(config),
        best={"teacher_auc": best["auc"], "teacher_normalized_entropy": best["normalized_entropy"]},
    )


def expected_auc(config) -> str:
    """What was measured with a preset, for a run that changes nothing that matters."""
    known = EXPECTED_AUC.get(config.preset)
    return f"; this preset reaches about {known}" if known and _is_usual(config) else ""


def _is_usual(config, *but: str) -> bool:
    """Whether all flags that matter for the result are the defaults, but for some."""
    fields = {field.name for field in dataclasses.fields(config)} - _SAME_RESULTS - {*but}
    return all(getattr(config, name) == getattr(type(config)(), name) for name in fields)


def criteo_data(config) -> Data:
    """Criteo rows, prepared in the current directory if they are not yet."""
    directory, options = config.path[0], preparation(config)
    if not directory.is_dir():
        directory = prepared_directory(config.path, options)
        _prepare(config.path, directory, options)
    reached = "about 0.761 in one pass over a sample of 110,000 rows of Criteo Kaggle"
    data = criteo_clicks(
        directory, config.batch_size, config.steps, epochs=config.epochs,
        shuffle_seed=config.seed if config.shuffle else None, validation_fraction=config.validation_fraction,
    )  # fmt: skip
    usual = _is_usual(config, "data", "path", "seed")
    return data._replace(expectation=reached if usual else f"with the defaults, DLRM reaches {reached}")


def _prepare(paths, directory, options):
    from jaxrec.data.criteo import prepare

    say(f"preparing {', '.join(map(str, paths))} in {directory}")
    prepare(paths, directory, **options)


def preparation(config) -> dict[str, Any]:
    """The flags of the preparation that are given, and are not what it does anyway."""
    given = {name: getattr(config, name) for name in PREPARATION}
    return {name: value for name, value in given.items() if value is not None and value != PREPARATION[name]}


def prepared_directory(sources: tuple[Path, ...], options: Mapping[str, Any] | None = None) -> Path:
    """Where raw files are prepared: here, as they may be read-only.

    Two files of one name in two folders are two, and so is one file that is prepared in two ways.

    Args:
      sources: raw files.
      options: of the preparation, those that are not the defaults.
    """
    words = [str(local_path(source)) for source in sources]
    words += [f"{name}={value!r}" for name, value in sorted((options or {}).items())]
    digest = hashlib.sha256("\n".join(words).encode()).hexdigest()
    return Path(f"{sources[0].name.split('.')[0]}.{digest[:8]}.prepared")


def rules_of_data(config) -> dict[str, object]:
    """{what is wrong, and the remedy: whether it is} of flags of the data that do not fit each
    other."""
    synthetic, paths = config.data == "synthetic", ", ".join(map(str, config.path))
    directories = [path for path in config.path if path.is_dir()]
    share, trains = config.validation_fraction, config.train_fraction
    return {
        f"--path {paths} is not read by --data synthetic: add --data criteo or --data tabular, or leave it out.": (
            synthetic and paths
        ),
        "--data criteo needs --path: raw Criteo files, or a directory made by prepare.py.": (
            config.data == "criteo" and not paths
        ),
        "--data tabular needs --path: the directory that prepare.py --schema has made.": (
            config.data == "tabular" and len(directories) != 1
        ),
        f"--path {paths}: a prepared directory stands alone, without other files.": directories and config.path[1:],
        f"--rows {config.rows} is for --data synthetic: all other tables follow from their data.": (
            not synthetic and config.rows is not None
        ),
        f"--curved {config.curved} is for --data synthetic: leave it out.": not synthetic and config.curved,
        f"--preset {config.preset} is a size of --data synthetic: limit other data by --steps.": (
            not synthetic and config.preset != "default"
        ),
        f"--rows {config.rows} must be at least 78, three for each of the 26 fields.": (
            config.rows is not None and config.rows < 78
        ),
        f"--validation-fraction {share} must be a share from 0 to below 1, such as 0.1.": not 0 <= share < 1,
        f"--validation-fraction {share} is for --data criteo: the synthetic log draws its validation apart, and takes "
        "nothing from training. Leave it out.": synthetic and share,
        f"--train-fraction {trains} must be a share between 0 and 1, such as 0.8.": (
            trains is not None and not 0 < trains < 1
        ),
        f"--min-count {config.min_count} (a vocabulary) and --hash-cap {config.hash_cap} (hashing) exclude each other: "
        "give one.": config.min_count is not None and config.hash_cap is not None,
    } | _rules_of_preparation(config, synthetic, directories)


def _rules_of_preparation(config, synthetic, directories):
    """Each flag of the preparation is refused where nothing is prepared."""
    broken = {}
    for name in PREPARATION:
        flag, given = f"--{name.replace('_', '-')} {getattr(config, name)}", getattr(config, name) is not None
        broken[f"{flag} prepares Criteo files, and --data synthetic has none: leave it out."] = given and synthetic
        decided = f"{flag} was to be decided when {', '.join(map(str, directories))} was prepared"
        broken[f"{decided}: leave it out, or give the raw files as --path."] = given and directories
    return broken


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


def rules_of_techniques(config: TechniqueFlags) -> dict[str, object]:
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
