"""Building blocks of `train.py`, shared by all experiments: flags, runs, signals, data, tables, plots."""
