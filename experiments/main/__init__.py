"""Building blocks of `train.py`, shared by all experiments: flags, runs, signals, data, tables, plots."""

from main.signals import end_at_once

end_at_once()  # before any other import
