"""Flags of data and learning that do not fit each other, the data, or what was prepared."""

import numpy as np
import optax
import train
from click_data import criteo_clicks, synthetic_clicks
from data_flags import data_of
from learning import LearningFlags, optimizers
from parts import set_apart

from abuse import situation
from abuse.data import SMALL, raw
from abuse.runs import parsed
from jaxrec.data.criteo import prepare
from jaxrec.data.synthetic import SyntheticClicks
from jaxrec.embedding import adagrad, rowwise_adagrad, sgd


def flags_that(words, match, *flags):
    """Enters flags that train.py refuses."""

    @situation(words, ValueError, match)
    def _(directory):
        parsed(*flags)


def of_criteo(words, match, *flags):
    """Enters flags that it refuses beside raw Criteo files."""
    flags_that(words, match, "--data", "criteo", "--path", "train.txt", *flags)


def of_prepared(words, match, *flags):
    """Enters flags that it refuses beside a prepared directory."""

    @situation(words, ValueError, match)
    def _(directory):
        parsed("--data", "criteo", "--path", str(directory), *flags)


# Data.

flags_that("no epochs", "--epochs 0 must be a number of at least 1", "--epochs", "0")
flags_that("negative epochs", "--epochs -2 must be", "--epochs", "-2")
GIVEN = {"min-count": "3", "hash-cap": "100", "split": "random", "train-fraction": "0.5", "max-bad-rows": "1"}
for name, value in GIVEN.items():
    flag = f"--{name}"
    flags_that(f"{flag} for synthetic data", f"{flag} {value} prepares Criteo files, and", flag, value)
    of_prepared(f"{flag} for a prepared directory", f"{flag} {value} was to be decided when .*raw files", flag, value)
of_prepared("the split that a directory may have, said again", "--split time was to be decided", "--split", "time")
of_prepared("no bad rows in a prepared directory", "--max-bad-rows 0 was to be decided", "--max-bad-rows", "0")
flags_that(
    "a validation taken from synthetic data", "--validation-fraction 0.1 is for --data criteo", "--validation-fraction",
    "0.1",
)  # fmt: skip
for share in ("1.0", "1.5", "-0.1", "nan", "inf"):
    of_criteo(
        f"a validation of {share}", f"--validation-fraction {share} must be a share", "--validation-fraction", share
    )
for share in ("0", "1", "nan", "-1"):
    of_criteo(f"a training share of {share}", "--train-fraction .* must be a share", "--train-fraction", share)
of_criteo("a vocabulary of nothing", "--min-count 0 must be a number of at least 1", "--min-count", "0")
of_criteo("hashing into one row", "--hash-cap 1 must be a number of at least 2", "--hash-cap", "1")
of_criteo("fewer bad rows than none", "--max-bad-rows -1 must be", "--max-bad-rows", "-1")
of_criteo(
    "a vocabulary and hashing", "--min-count 3 .* and --hash-cap 9 .* exclude each other", "--min-count", "3",
    "--hash-cap", "9",
)  # fmt: skip


@situation("a split that there is not", SystemExit, "2")
def _(directory):
    parsed("--data", "criteo", "--path", "train.txt", "--split", "stratified")


@situation(
    "hashing into more rows than a stack can have", ValueError, r"hash_cap \(--hash-cap\)=99999999 must be at most"
)
def _(directory):
    path = raw(directory)
    try:
        data_of(parsed("--data", "criteo", "--path", str(path), "--hash-cap", "99999999"))
    finally:
        assert sorted(directory.iterdir()) == [path]


@situation("a file that is not there", ValueError, "train.txt is no file: give raw Criteo files")
def _(directory):
    data_of(parsed("--data", "criteo", "--path", str(directory / "train.txt")))


@situation("a directory that nobody prepared", ValueError, "is no complete dataset: run the preparation")
def _(directory):
    data_of(parsed("--data", "criteo", "--path", str(directory)))


def prepared(directory):
    """100 rows to train on, 20 to test on."""
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


@situation("a validation that leaves no batch to train", ValueError, "not examples enough for one batch of 64")
def _(directory):
    criteo_clicks(prepared(directory), 64, validation_fraction=0.9, padded=False)


@situation("passes without a number", ValueError, "epochs=None must be a whole number")
def _(directory):
    synthetic_clicks((5, 5), 4, 3, 0, 1, epochs=None)


@situation("half a pass", ValueError, "epochs=0.5 must be a whole number")
def _(directory):
    criteo_clicks(prepared(directory), 10, epochs=0.5)


@situation("a seed of the order below 0", ValueError, "shuffle_seed=-1 must be a whole number from 0")
def _(directory):
    next(criteo_clicks(prepared(directory), 10, shuffle_seed=-1).train(0))


@situation("a batch of two streams", ValueError, "test=True and validation=True name two streams")
def _(directory):
    next(SyntheticClicks((5, 5)).stream(4, test=True, validation=True))


@situation("more rows set apart than there are", ValueError, "rows=4 must be a whole number from 0 to 3, as many as")
def _(directory):
    class Three:
        rows = (3,)

    set_apart(Three(), 4)


# Learning.

flags_that("a negative warm-up", "--warmup-steps -1 must be a number of at least 0", "--warmup-steps", "-1")


@situation("a warm-up as long as the run", ValueError, "--warmup-steps 100 must be less than the 100 steps of the run")
def _(directory):
    optimizers(parsed("--preset", "smoke", "--warmup-steps", "100"), 100)


@situation("a warm-up that train.py sees to be too long, before it builds tables", ValueError, "--warmup-steps 7 must")
def _(directory):
    train.main(parsed("--steps", "6", "--rows", "100", "--warmup-steps", "7", "--workdir", str(directory / "run")))


@situation("a schedule that there is not", SystemExit, "2")
def _(directory):
    parsed("--schedule", "exponential")


@situation("a model that there is not", SystemExit, "2")
def _(directory):
    parsed("--model", "deepfm")


@situation("a schedule of one step, which is nothing but its first rate")
def _(directory):
    dense, _ = optimizers(LearningFlags(schedule="cosine", optimizer="sgd"), 1)
    ones = np.ones(1, np.float32)
    change, _ = dense.update(ones, dense.init(ones))
    assert np.isclose(change[0], -1e-3)


for make in (sgd, adagrad, rowwise_adagrad):

    @situation(f"a learning rate as text for {make.__name__}", ValueError, "learning_rate='0.1' must be 0 or more")
    def _(directory, make=make):
        make("0.1")

    @situation(f"an optimizer of optax as the rate of {make.__name__}", ValueError, "learning_rate=Gradient.* must be")
    def _(directory, make=make):
        make(optax.sgd(0.1))

    @situation(f"a rate that rises below 0 for {make.__name__}", ValueError, "learning_rate=-0.1 must be 0 or more")
    def _(directory, make=make):
        make(-0.1)
