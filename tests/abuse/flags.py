"""Flags of data and learning that contradict each other, the data, or the preparation."""

import numpy as np
import train
from main.cli import Run
from main.click_data import criteo_clicks, set_apart, synthetic_clicks
from main.flags import LearningFlags, optimizers
from main.recorder import check_seeds
from main.techniques import failures_of

from abuse import situation
from abuse.data import SMALL, raw
from abuse.runs import flags_that, parsed
from jaxrec.data.criteo import prepare
from jaxrec.data.synthetic import SyntheticClicks


def of_criteo(words, match, *flags):
    """Register flags that are refused together with raw Criteo files."""
    flags_that(words, match, "--data", "criteo", "--path", "train.txt", *flags)


def of_prepared(words, match, *flags):
    """Register flags that are refused together with a prepared directory."""

    @situation(words, ValueError, match)
    def _(directory):
        parsed("--data", "criteo", "--path", str(directory), *flags)


# Data.

GIVEN = {"min-count": "3", "hash-cap": "100", "split": "random", "train-fraction": "0.5", "max-bad-rows": "1"}
for name, value in GIVEN.items():
    flag = f"--{name}"
    flags_that(f"{flag} for synthetic data", f"{flag} {value} is for raw Criteo files", flag, value)
of_prepared(
    "the split that a directory may have, said again", "--split time is for raw .* before they", "--split", "time"
)
of_prepared("no bad rows in a prepared directory", "--max-bad-rows 0 is for raw", "--max-bad-rows", "0")
flags_that(
    "a validation taken from synthetic data", "--validation-fraction 0.1 is for --data criteo or",
    "--validation-fraction", "0.1",
)  # fmt: skip
for share in ("1.0", "nan"):
    of_criteo(
        f"a validation of {share}", f"--validation-fraction {share} must be a share", "--validation-fraction", share
    )
for share in ("0", "nan"):
    of_criteo(f"a training share of {share}", "--train-fraction .* must be a share", "--train-fraction", share)
of_criteo(
    "a vocabulary and hashing", "--min-count 3 .* and --hash-cap 9 .* exclude each other", "--min-count", "3",
    "--hash-cap", "9",
)  # fmt: skip


def prepared(directory):
    """Prepare 100 training rows and 20 test rows."""
    prepare([raw(directory)], directory / "out", **SMALL)
    return directory / "out"


@situation(
    "a validation of less than one row", ValueError, "validation_fraction=0.001 of the 100 training rows is 0 rows"
)
def _(directory):
    criteo_clicks(prepared(directory), 10, validation_fraction=0.001)


@situation("a validation of more rows than there are", ValueError, "validation_fraction=1.5 of the 100 training rows")
def _(directory):
    criteo_clicks(prepared(directory), 10, validation_fraction=1.5)


@situation("passes without a number", ValueError, "epochs=None must be a whole number")
def _(directory):
    synthetic_clicks((5, 5), 4, 3, 0, 1, epochs=None)


@situation("half a pass", ValueError, "epochs=0.5 must be a whole number")
def _(directory):
    criteo_clicks(prepared(directory), 10, epochs=0.5)


@situation("a batch of two streams", ValueError, "test=True and validation=True name two streams")
def _(directory):
    next(SyntheticClicks((5, 5)).stream(4, test=True, validation=True))


@situation("more rows set apart than there are", ValueError, "rows=4 must be a whole number from 0 to 3, as many as")
def _(directory):
    class Three:
        rows = (3,)

    set_apart(Three(), 4)


# Learning.


@situation("a schedule of one step, which is nothing but its first rate")
def _(directory):
    dense, _ = optimizers(LearningFlags(schedule="cosine", optimizer="sgd"), 1)
    ones = np.ones(1, np.float32)
    change, _ = dense.update(ones, dense.init(ones))
    assert np.isclose(change[0], -1e-3)


# Techniques.

HOST = ("--tables", "host")
OAC = (*HOST, "--pipeline", "oac")
SHADOW = ("--shadowsync", "easgd")
MFU = ("--cpr", "mfu")

flags_that("a pipeline over tables on the device", "--pipeline oac is for --tables host", "--pipeline", "oac")
flags_that("a window without a pipeline", "--window 4 is for --pipeline oac or async", *HOST, "--window", "4")
flags_that("a window of one in flight", "--window 4 is for", *HOST, "--pipeline", "semisync", "--window", "4")
flags_that("stale rows without oac", "--stale-rows device is for --pipeline oac", *HOST, "--stale-rows", "device")
flags_that("savings without oac", "--savings is for --pipeline oac", *HOST, "--pipeline", "sync", "--savings")
for flag, value in {"trainers": "2", "sync-form": "lerp", "sync-pace-seconds": "0.5", "sync-every-steps": "5"}.items():
    flags_that(f"--{flag} without a rule", f"--{flag} {value} is for --shadowsync", f"--{flag}", value)
flags_that(
    "rounds in the background and in the foreground", "give one of them", *SHADOW, "--sync-pace-seconds", "1",
    "--sync-every-steps", "5",
)  # fmt: skip
flags_that("workers in lock step", "--workers 2 is for trainers that run freely", *SHADOW, "--workers", "2")
flags_that("workers of nobody", "--workers 2 is for trainers that run freely", *HOST, "--workers", "2")
flags_that("a form of model averaging for EASGD", "--sync-form lerp is none of", *SHADOW, "--sync-form", "lerp")
flags_that("a form that no rule has", "give delta or lerp", "--shadowsync", "ma", "--sync-form", "symmetric")

flags_that("failures without a recovery", "--fail 5:3 is for --cpr mfu, say: add that", "--fail", "5:3")
for words in ("5", "five:3", "5:1,,2"):
    flags_that(f"a failure written as {words}", f"--fail {words}: give step:shards", *MFU, "--fail", words)
flags_that("drawn failures beside others", "or gamma alone", *MFU, "--fail", "gamma", "5:3")
flags_that("two failures at a step", "--fail 5:2: step 5 has failures already", *MFU, "--fail", "5:1", "5:2")
flags_that("a shard below 0", r"shards \[-1\] are not among", *MFU, "--fail", "5:-1")
flags_that("a time between failures of nobody", "--mtbf-steps 9.0 is for --cpr", "--mtbf-steps", "9")
flags_that("a shape of failures that are given", "--fail-shape 2.0 is for --fail gamma", *MFU, "--fail-shape", "2")
for portion in ("0", "nan"):
    flags_that(f"a lost portion of {portion}", "--target-pls .* must be", *MFU, "--target-pls", portion)
flags_that("a lost portion without a recovery", "--target-pls 0.2 is for --cpr", "--target-pls", "0.2")
flags_that("a recovery without saves", "--save-every-steps 0 saves nothing", *MFU, "--save-every-steps", "0")

flags_that("patience for more than there is", "never ends 4 evaluations early", "--evaluations", "4", "--patience", "4")
of_criteo("patience without a validation", "--patience 2 is for a run with a validation", "--patience", "2")
flags_that(
    "tables of one place for several seeds", "--table-directory d is for a single seed", *HOST, "--table-directory",
    "d", "--seeds", "2",
)  # fmt: skip


def train_that(words, error, match, *flags):
    """Register flags that are refused before a run begins, so that the directory stays usable."""

    @situation(words, error, match)
    def _(directory):
        try:
            train.main(parsed("--steps", "6", "--rows", "100", "--workdir", str(directory / "run"), *flags))
        finally:
            assert not (directory / "run").exists()


train_that("more trainers than devices", ValueError, "--trainers 64 want a device each", *SHADOW, "--trainers", "64")
train_that(
    "shards that trainers cannot share",
    ValueError,
    "--shards 8 cannot .* or other --trainers",
    *SHADOW,
    "--trainers",
    "3",
)
train_that(
    "batches that trainers cannot share", ValueError, "--batch-size 65 cannot be split over 2 devices: give a multiple",
    *SHADOW, "--batch-size", "65",
)  # fmt: skip


@situation("a failure after the end", ValueError, "--fail 7: the run has steps 1 to 6")
def _(directory):
    failures_of(parsed(*MFU, "--fail", "7:1"), 6, 3.0)


@situation("failures in every step are drawn, each shard once a step")
def _(directory):
    found = failures_of(parsed(*MFU, "--fail", "gamma", "--mtbf-steps", "1", "--fail-shape", "0.01"), 50, 1.0)
    assert found and all(1 <= step <= 50 and shards == sorted({*shards}) for step, shards in found.items())


@situation("a run of one seed, gone on with as one of several", ValueError, "holds a run of one seed")
def _(directory):
    (directory / "checkpoints").mkdir()
    with Run("train", train.Config(), directory / "other") as run:
        run.directory = directory
        check_seeds(run, 3)


@situation("a run of several seeds, gone on with as one", ValueError, "holds runs of several seeds")
def _(directory):
    with Run("train", train.Config(), directory) as run:
        (directory / "seed_0").mkdir()
        check_seeds(run, 1)


flags_that(
    "measured costs without a recovery", "--recovery-costs measured is for --cpr", "--recovery-costs", "measured"
)
flags_that(
    "measured costs beside an interval", "is for --cpr without --save-every-steps", "--recovery-costs", "measured",
    "--cpr", "mfu", "--save-every-steps", "9",
)  # fmt: skip
flags_that("alpha without a rule", "--sync-alpha 0.1 is for --shadowsync", "--sync-alpha", "0.1")
for alpha in ("0", "nan"):
    words = ("--shadowsync", "ma", "--sync-alpha", alpha)
    flags_that(f"an alpha of {alpha}", "--sync-alpha .* must be above 0 and at most 1", *words)
