"""Where batches come from: a synthetic click log, Criteo's files, knowledge graphs, and a loader
that resumes.

Read `synthetic` first, which needs no file; `loader` makes batches from blocks of rows, such as
those of `criteo`.
"""
