"""What `train.py` is made of, and what every experiment has from it: flags, runs, signals, data, tables, plots."""
