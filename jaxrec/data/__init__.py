"""Sources of batches: a synthetic click log, Criteo's files, any table, knowledge graphs, and a resumable loader.

Start with `synthetic`, which needs no file; `loader` makes batches from blocks of rows, such as those of `criteo`.
"""
