"""Schemas of public click logs, split as is usual for each, or by time."""

from jaxrec.data.tabular.movielens import gather
from jaxrec.data.tabular.schema import Categorical, Dense, Feature, History, Label, MultiHot, Schema
from jaxrec.data.tabular.splits import ByFile, ByRows, ByTime

_NUMBERS = tuple(f"I{number}" for number in range(1, 14))
_CATEGORIES = tuple(f"C{number}" for number in range(1, 27))
_FILES = ByFile(("train.csv",), ("valid.csv",), ("test.csv",))

CRITEO = Schema(
    label="label",
    features=tuple([*(Dense(name, log=True) for name in _NUMBERS), *(Categorical(name, 6) for name in _CATEGORIES)]),
    split=ByRows(train=5 / 6),
    columns=("label", *_NUMBERS, *_CATEGORIES),
    separator="\t",
    quote=False,
)
"""Criteo's raw files, Kaggle's train.txt or day_N: tabs, no header. `jaxrec.data.criteo` reads them faster."""

CRITEO_X1 = Schema(
    label="label",
    features=tuple([*(Dense(name) for name in _NUMBERS), *(Categorical(name, 1) for name in _CATEGORIES)]),
    split=_FILES,
)
"""Criteo_x1 of the BARS benchmark: train.csv, valid.csv and test.csv, whose numbers are scaled already."""

CRITEO_X4 = Schema(
    label="Label",
    features=tuple([*(Dense(name, log=True) for name in _NUMBERS), *(Categorical(name, 10) for name in _CATEGORIES)]),
    split=_FILES,
)
"""Criteo_x4 of the BARS benchmark: train.csv, valid.csv and test.csv. BARS makes categories of the numbers; here they
stay numbers."""

_AVAZU = (
    "C1 banner_pos site_id site_domain site_category app_id app_domain app_category device_id device_ip device_model "
    "device_type device_conn_type C14 C15 C16 C17 C18 C19 C20 C21"
)

AVAZU = Schema(
    label="click",
    features=tuple(Categorical(name) for name in _AVAZU.split()),
    split=ByTime("hour", train=0.8, validation=0.1),
)
"""Kaggle's Avazu train.csv (plain or .gz): 21 categories; the hour, of ten days, divides it."""

_MOVIE: tuple[Feature, ...] = (Categorical("movie", 1), MultiHot("genres", at_most=6), Categorical("year", 1))
_USER = tuple(Categorical(name, 1) for name in ("user", "gender", "age", "occupation", "zip"))

MOVIELENS_1M = Schema(
    label=Label("rating", at_least=4),
    features=(*_USER, *_MOVIE, History("movie", by="user", last=20, column="history")),
    split=ByTime("time", train=0.8, validation=0.1),
    gather=gather,
)
"""MovieLens-1M: ratings.dat, users.dat and movies.dat in any order. A rating of 4 or 5 is a click; `history` holds the
movies that the user has rated before, the newest last."""
