"""What rows at servers cost on this machine, for each message and each row: cluster_plan.py plans with it."""

import contextlib
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import scipy.optimize

import jaxrec
from jaxrec.checkpoint import Checkpointer, restore
from jaxrec.cluster import Cluster, Supervisor
from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, Tables, plan, rowwise_adagrad
from jaxrec.types import TrainState

SHARDS, TIMEOUT_S = 8, 120.0
ROWS = rowwise_adagrad(0.1)
_OPTIMIZER = optax.sgd(0.1)


class Costs(NamedTuple):
    """What is measured; `cluster_plan.Config` says of the same names what they are."""

    read_base_ms: float
    read_message_ms: float
    read_row_us: float
    put_base_ms: float
    put_message_ms: float
    put_row_us: float
    server_row_us: float
    save_mb_per_s: float
    restore_mb_per_s: float
    initial_rows_per_s: float
    start_s: float


class Size(NamedTuple):
    """Of the measurement."""

    table_rows: int
    rows: tuple[int, ...]  # of messages
    servers: tuple[int, ...]
    rounds: int


class Timed(NamedTuple):
    """A verb's median time."""

    servers: int
    rows: int
    ms: float


def fitted(times: Sequence[Timed]) -> tuple[float, float, float]:
    """Base in ms, ms for each server and us for each row: least squares of relative errors, no term below 0.

    >>> times = [Timed(p, n, 1.0 + 0.5 * p + 2e-3 * n) for p in (1, 2) for n in (100, 1000)]
    >>> [round(term, 6) for term in fitted(times)]
    [1.0, 0.5, 2.0]
    """
    terms = np.array([[1.0, one.servers, one.rows / 1e3] for one in times])
    ms = np.array([one.ms for one in times])
    base, message, row = scipy.optimize.nnls(terms / ms[:, None], np.ones(len(times)))[0]
    return float(base), float(message), float(row)


def measure(width: int, size: Size, seed: int) -> tuple[Costs, list[dict[str, float]]]:
    """Costs on this machine, and the times that they are fitted to.

    Args:
      width: of a row, in floats.
      size: of the measurement.
      seed: of the rows that are read.
    """
    spec = EmbeddingSpec({"item": Table(size.table_rows, width)}, {"item": Lookup("item")}, shards=SHARDS)
    began = time.monotonic()
    host = HostTables.create(spec, ROWS)
    initial = size.table_rows / (time.monotonic() - began)
    reads, puts = list[Timed](), list[Timed]()
    own = [sum(verbs_ms(host, rows, size.rounds, seed)) for rows in size.rows]
    server_us = fitted([Timed(0, rows, ms) for rows, ms in zip(size.rows, own, strict=True)])[2]
    starts, files = list[float](), list[tuple[float, float]]()
    with Cluster() as cluster, tempfile.TemporaryDirectory() as above:
        for servers in sorted(size.servers, reverse=True):  # what only the first one pays is not for the fewest
            began = time.monotonic()
            with at_servers(cluster, spec, servers, Path(above) / str(servers)) as tables:
                starts.append(time.monotonic() - began)
                for rows in size.rows:
                    read, put = verbs_ms(tables, rows, size.rounds, seed)
                    reads.append(Timed(servers, rows, read))
                    puts.append(Timed(servers, rows, put))
                files.append(of_files(tables, Path(above) / str(servers)))
    mb = size.table_rows * (width + 1) * 4 / 1e6
    # Of the fewest servers: how many write at once is the plan's.
    save, bring = files[-1]
    costs = Costs(*fitted(reads), *fitted(puts), server_us, mb / save, mb / bring, initial, starts[-1])
    return costs, [_row("read", one) for one in reads] + [_row("put", one) for one in puts]


def _row(verb, timed):
    return {"verb": verb, "ms_measured": timed.ms} | {"servers": timed.servers, "rows": timed.rows}


@contextlib.contextmanager
def at_servers(cluster: Cluster, spec: EmbeddingSpec, servers: int, directory: Path) -> Iterator[Tables]:
    """Tables at servers of their own, which end with the block."""
    with contextlib.closing(
        Supervisor(cluster, spec, ROWS, servers, directory=directory, timeout_s=TIMEOUT_S)
    ) as started:
        yield started.tables


def verbs_ms(tables: Tables, rows: int, rounds: int, seed: int) -> tuple[float, float]:
    """Median ms of a read and of a put of so many rows, other ones in each round."""
    rng = np.random.default_rng(seed)
    number = next(iter(tables.spec.tables.values())).rows
    reads, puts = list[float](), list[float]()
    for _ in range(rounds + 1):
        plans = plan(tables.spec, {"item": rng.choice(number, rows, replace=False).astype(np.int32)})
        read, got = timed_ms(functools.partial(tables.read, plans))
        put, _ = timed_ms(functools.partial(tables.put, plans, got))
        reads.append(read)
        puts.append(put)
    return statistics.median(reads[1:]), statistics.median(puts[1:])  # the first round compiles


def timed_ms(act: Callable[[], Any]) -> tuple[float, Any]:
    """How long a call takes, and what it returns."""
    began = time.perf_counter()
    found = act()
    return 1e3 * (time.perf_counter() - began), found


def of_files(tables: Tables, directory: Path) -> tuple[float, float]:
    """Seconds of a whole image that the servers write, and of bringing it back."""
    state: TrainState = jaxrec.init_state({"w": jnp.zeros(1)}, _OPTIMIZER, tables)

    def save():
        with Checkpointer(directory, copy="shards") as checkpointer:
            checkpointer.save(state)

    save_ms, _ = timed_ms(save)
    restore_ms, _ = timed_ms(lambda: restore(directory, state))
    return save_ms / 1e3, restore_ms / 1e3
