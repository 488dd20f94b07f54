"""Flags of data and learning that contradict each other, the data, or the preparation."""

import importlib.util

import numpy as np
import train
from main.cli import Run
from main.click_data import criteo_clicks, set_apart, synthetic_clicks
from main.config import config_of
from main.learning import Learning
from main.recorder import check_seeds

from abuse import refused, situation
from abuse.data import SMALL, raw
from abuse.runs import parsed
from jaxrec.data.criteo import prepare
from jaxrec.data.synthetic import SyntheticClicks

# Flags that train.py refuses before any work, and why.
REFUSED = {
    # Numbers.
    "--steps 0": "--steps 0 must be a number of at least",
    "--seed -1": "--seed -1 must be a number of at least",
    "--cpr mfu --fail gamma --fail-shape 1e-09": "--fail-shape 1e-09 must be a number of at least",
    "--learning-rate nan": "--learning-rate nan must be a number",
    "--weight-decay -1": "--weight-decay -1.0 must be a number",
    "--clip-norm 0": "--clip-norm 0.0 must be a number",
    "--row-learning-rate inf": "--row-learning-rate inf must be a number",
    "--rows 10": "rows=10 must be a whole number from 78",
    "--data criteo --path x --validation-fraction 1.0": "--validation-fraction 1.0 must be a share",
    "--data criteo --path x --validation-fraction nan": "--validation-fraction nan must be a share",
    "--cpr mfu --target-pls 0": "target_pls=0.0 must be above 0 and at most 1",
    "--cpr mfu --target-pls nan": "--target-pls nan must be",
    "--shadowsync ma --sync-alpha 0": "alpha=0.0 must be above 0 and at most 1",
    "--shadowsync ma --sync-alpha nan": "alpha=nan must be above 0 and at most 1",
    # Data.
    "--data criteo": "--data criteo needs --path",
    "--path train.txt": "--path train.txt is for --data criteo or tabular: add",
    "--data criteo --path x --rows 1000": "--rows 1000 is for --data synthetic",
    "--data criteo --path x --preset smoke": "--preset smoke is for --data synthetic",
    "--data criteo --path x --patience 2": "--patience 2 is for a run with a validation",
    "--data criteo --path x --monitor auc": "--monitor auc is for a run with a validation",
    "--validation-fraction 0.1": "--validation-fraction 0.1 is for --data criteo or",
    "--min-count 3": "--min-count 3 is for raw Criteo files",
    "--hash-cap 100": "--hash-cap 100 is for raw Criteo files",
    "--split random": "--split random is for raw Criteo files",
    "--train-fraction 0.5": "--train-fraction 0.5 is for raw Criteo files",
    "--max-bad-rows 1": "--max-bad-rows 1 is for raw Criteo files",
    # A run.
    "--requeue": "--requeue is for .*, with --workdir and --resume",
    "--evaluations 4 --patience 4": "never ends 4 evaluations early",
    "--monitor gauc": "--monitor gauc is the mean AUC within groups: give --group FIELD too",
    "--tables host --table-directory d --seeds 2": "--table-directory d is for a single seed",
    "--table-directory d": "--table-directory d is for --tables host",
    "--tables remote --table-directory d": "--table-directory d is for --tables host",
    # Servers.
    "--servers 2": "--servers 2 is for --tables remote: add that",
    "--server-resource rows": "--server-resource rows is for --tables remote: add that",
    "--tables remote --server-resource rows": "--server-resource rows is for --ray-address: add that",
    "--tables remote --spares 1": "--spares 1 is for --tables remote with --cpr",
    "--tables remote --servers 9": "--servers 9 are more than the 8 shards",
    # OAC.
    "--pipeline oac": "--pipeline oac is for --tables host",
    "--tables host --window 4": "--window 4 is for --pipeline oac or async",
    "--tables host --pipeline semisync --window 4": "--window 4 is for",
    # ShadowSync.
    "--trainers 2": "--trainers 2 is for --shadowsync",
    "--sync-form lerp": "--sync-form lerp is for --shadowsync",
    "--sync-alpha 0.1": "--sync-alpha 0.1 is for --shadowsync",
    "--sync-pace-seconds 0.5": "--sync-pace-seconds 0.5 is for --shadowsync",
    "--sync-every-steps 5": "--sync-every-steps 5 is for --shadowsync",
    "--shadowsync easgd --sync-pace-seconds 1 --sync-every-steps 5": "give one of them",
    "--shadowsync easgd --tables remote --evaluations 4": "--evaluations 4 is for trainers in one process",
    "--shadowsync easgd --tables remote --patience 2": "--patience 2 is for trainers in one process",
    "--shadowsync easgd --tables remote --monitor auc": "--monitor auc is for trainers in one process",
    "--shadowsync easgd --tables remote --group C1": "--group C1 is for trainers in one process",
    "--shadowsync easgd --tables remote --save-every-steps 5": "--save-every-steps 5 is for trainers in one process",
    "--shadowsync easgd --tables remote --data criteo --path x --validation-fraction 0.1": "0.1 is for trainers in one",
    "--shadowsync easgd --tables remote --spares 1": "--spares 1 is for --tables remote with --cpr",
    "--shadowsync easgd --workers 2": "--workers 2 is for trainers that run freely",
    "--tables host --workers 2": "--workers 2 is for trainers that run freely",
    "--shadowsync easgd --sync-form lerp": "form='lerp' must be 'symmetric' or 'sequential'",
    "--shadowsync ma --sync-form symmetric": "form='symmetric' must be 'lerp' or 'delta'",
    # CPR.
    "--fail 5:3": "--fail 5:3 is for --cpr mfu, say: add that",
    "--cpr mfu --fail 5": "--fail 5: give step:shards",
    "--cpr mfu --fail five:3": "--fail five:3: give step:shards",
    "--cpr mfu --fail 5:1,,2": "--fail 5:1,,2: give step:shards",
    "--cpr mfu --fail gamma 5:3": "or gamma alone",
    "--cpr mfu --fail 5:1 5:2": "--fail 5:2: step 5 has failures already",
    "--cpr mfu --fail 5:-1": r"shards \[-1\] are not among",
    "--mtbf-steps 9": "--mtbf-steps 9 is for --cpr",
    "--cpr mfu --fail-shape 2": "--fail-shape 2.0 is for --fail gamma",
    "--target-pls 0.2": "--target-pls 0.2 is for --cpr",
    "--cpr mfu --save-every-steps 0": "--save-every-steps 0 saves nothing",
    "--recovery-costs measured": "--recovery-costs measured is for --cpr",
    "--cpr mfu --save-every-steps 9 --recovery-costs measured": "is for --cpr without --save-every-steps",
    # Combinations.
    "--where threads": "--where threads is for --shadowsync easgd, ma or bmuf",
    "--shadowsync ma --where threads": "--where threads is for --tables host without --pipeline and --cpr",
    "--shadowsync ma --where threads --tables host --cpr mfu": "--where threads is for --tables host without",
    "--shadowsync ma --where processes": "--where processes is for --tables host or remote without",
    "--shadowsync ma --where processes --tables host --pipeline oac": "--where processes is for --tables host or",
    "--shadowsync ma --where lockstep --tables host --workers 2": "--workers 2 is for trainers that run freely",
    "--tables pinned --pipeline sync": "--pipeline sync is for --tables host, remote or, with oac, pinned",
}
if importlib.util.find_spec("ray") is None:
    REFUSED["--tables remote"] = r"needs Ray, which is not installed: .*\[cluster\]"
for flags, match in REFUSED.items():
    situation(flags, ValueError, match)(lambda _, flags=flags: parsed(*flags.split()))

OF_PREPARED = {  # beside a prepared directory
    "--split time": "--split time is for raw .* before they",  # although the directory may have this split
    "--max-bad-rows 0": "--max-bad-rows 0 is for raw",
    "train.txt": "a prepared directory stands alone",
}
for flags, match in OF_PREPARED.items():
    situation(f"a prepared directory and {flags}", ValueError, match)(
        lambda directory, flags=flags: parsed("--data", "criteo", "--path", str(directory), *flags.split())
    )


def prepared(directory):
    """Prepare 100 training rows and 20 test rows."""
    prepare([raw(directory)], directory / "out", **SMALL)
    return directory / "out"


STREAMS = {
    "validation_fraction=0.001 of the 100 training rows is 0 rows": lambda directory: criteo_clicks(
        prepared(directory), 10, validation_fraction=0.001
    ),
    "validation_fraction=1.5 of the 100 training rows": lambda directory: criteo_clicks(
        prepared(directory), 10, validation_fraction=1.5
    ),
    "epochs=None must be a whole number": lambda _: synthetic_clicks((5, 5), 4, 3, 0, 1, epochs=None),
    "epochs=0.5 must be a whole number": lambda directory: criteo_clicks(prepared(directory), 10, epochs=0.5),
    "test=True and validation=True name two streams": lambda _: next(
        SyntheticClicks((5, 5)).stream(4, test=True, validation=True)
    ),
}
refused(STREAMS)


@situation("more rows set apart than there are", ValueError, "rows=4 must be a whole number from 0 to 3, as many as")
def _(directory):
    class Three:
        rows = (3,)

    set_apart(Three(), 4)


# Learning.


@situation("a schedule of one step, which is nothing but its first rate")
def _(directory):
    dense, _ = Learning(schedule="cosine", optimizer="sgd").optimizers(1)
    ones = np.ones(1, np.float32)
    change, _ = dense.update(ones, dense.init(ones))
    assert np.isclose(change[0], -1e-3)


# Techniques.


BEFORE_A_RUN = {
    "--shadowsync easgd --trainers 64": "--trainers 64 want a device each",
    "--shadowsync easgd --trainers 3": "--shards 8 cannot .* or other --trainers",
    "--shadowsync easgd --batch-size 65": "--batch-size 65 cannot be split over 2 devices: give a multiple",
}
for flags, match in BEFORE_A_RUN.items():

    @situation(f"{flags}, which leaves the directory usable", ValueError, match)
    def _(directory, flags=flags):
        try:
            train.main(parsed("--steps", "6", "--rows", "100", "--workdir", str(directory / "run"), *flags.split()))
        finally:
            assert not (directory / "run").exists()


@situation("a failure after the end", ValueError, "--fail 7: the run has steps 1 to 6")
def _(directory):
    config_of(cpr="mfu", fail=("7:1",)).saves.failures(6, 8, 0)


@situation("failures in every step are drawn, each shard once a step")
def _(directory):
    config = parsed(*"--cpr mfu --fail gamma --mtbf-steps 1 --fail-shape 0.01".split())
    for first in (1, 21):
        found = config.saves.failures(50, 8, 0, first)
        assert first <= min(found) and max(found) <= 50
        assert all(shards == sorted({*shards}) for shards in found.values())


@situation("a run of one seed, gone on with as one of several", ValueError, "holds a run of one seed")
def _(directory):
    (directory / "checkpoints").mkdir()
    with Run("train", config_of(), directory / "other") as run:
        run.directory = directory
        check_seeds(run, 3)


@situation("a run of several seeds, gone on with as one", ValueError, "holds runs of several seeds")
def _(directory):
    with Run("train", config_of(), directory) as run:
        (directory / "seed_0").mkdir()
        check_seeds(run, 1)
