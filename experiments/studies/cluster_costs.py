"""Measures what rows at servers cost on this machine, per message and per row, for cpr_scalability.py --plan."""

import contextlib
import dataclasses
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

from jaxrec.checkpoint import Checkpointer, restore
from jaxrec.cluster import Cluster, Supervisor
from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, Tables, plan, rowwise_adagrad
from jaxrec.sharding import make_mesh
from jaxrec.step import init_dense
from jaxrec.types import TrainState

SHARDS, TIMEOUT_S = 8, 120.0
ROWS = rowwise_adagrad(0.1)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of rows at servers; the defaults were measured on two cores under other load."""

    read_base_ms: float = 0.0
    """Time of a read that depends neither on servers nor on rows."""
    read_message_ms: float = 1.43
    """Time of a read per server."""
    read_row_us: float = 1.59
    """Time of a read per row."""
    put_base_ms: float = 0.56
    """Time of a put that depends neither on servers nor on rows."""
    put_message_ms: float = 1.07
    """Time of a put per server."""
    put_row_us: float = 1.44
    """Time of a put per row."""
    server_row_us: float = 0.25
    """Time in which a server gathers and scatters one row."""
    save_mb_per_s: float = 103.0
    """Rate at which one server writes its image."""
    restore_mb_per_s: float = 321.0
    """Rate at which one server restores its rows."""
    initial_rows_per_s: float = 331_000.0
    """Rate at which one server draws initial rows."""
    start_s: float = 4.4
    """Start of a server process, without its rows."""


class Size(NamedTuple):
    """Size of the measurement."""

    table_rows: int
    rows: tuple[int, ...]  # rows per message
    servers: tuple[int, ...]
    rounds: int  # repetitions, of which the median counts


class Timed(NamedTuple):
    """Median time of a verb."""

    servers: int
    rows: int
    ms: float


def fitted(times: Sequence[Timed]) -> tuple[float, float, float]:
    """Fit base in ms, ms per server and us per row by least squares of relative errors, with no term below 0.

    >>> times = [Timed(p, n, 1.0 + 0.5 * p + 2e-3 * n) for p in (1, 2) for n in (100, 1000)]
    >>> [round(term, 6) for term in fitted(times)]
    [1.0, 0.5, 2.0]
    """
    terms = np.array([[1.0, one.servers, one.rows / 1e3] for one in times])
    ms = np.array([one.ms for one in times])
    base, message, row = scipy.optimize.nnls(terms / ms[:, None], np.ones(len(times)))[0]
    return float(base), float(message), float(row)


def measure(width: int, size: Size, seed: int) -> tuple[Costs, list[dict[str, float]]]:
    """Measure the costs on this machine; return them and the times that they are fitted to."""
    spec = EmbeddingSpec({"item": Table(size.table_rows, width)}, {"item": Lookup("item")}, shards=SHARDS)
    began = time.monotonic()
    host = HostTables.create(spec, ROWS)
    initial = size.table_rows / (time.monotonic() - began)
    reads, puts = list[Timed](), list[Timed]()
    local = [sum(verbs_ms(host, rows, size.rounds, seed)) for rows in size.rows]
    server_us = fitted([Timed(0, rows, ms) for rows, ms in zip(size.rows, local, strict=True)])[2]
    starts, files = list[float](), list[tuple[float, float]]()
    with Cluster() as cluster, tempfile.TemporaryDirectory() as above:
        for servers in sorted(size.servers, reverse=True):  # fewest last, as the first ones pay one-time costs
            began = time.monotonic()
            with at_servers(cluster, spec, servers, Path(above) / str(servers)) as tables:
                starts.append(time.monotonic() - began)
                for rows in size.rows:
                    read, put = verbs_ms(tables, rows, size.rounds, seed)
                    reads.append(Timed(servers, rows, read))
                    puts.append(Timed(servers, rows, put))
                files.append(of_files(tables, Path(above) / str(servers)))
    mb = size.table_rows * (width + 1) * 4 / 1e6
    # Of the fewest servers: the plan itself accounts for how many write at once.
    save, restored = files[-1]
    costs = Costs(*fitted(reads), *fitted(puts), server_us, mb / save, mb / restored, initial, starts[-1])
    return costs, [_row("read", one) for one in reads] + [_row("put", one) for one in puts]


def _row(verb, timed):
    return {"verb": verb, "ms_measured": timed.ms} | {"servers": timed.servers, "rows": timed.rows}


@contextlib.contextmanager
def at_servers(cluster: Cluster, spec: EmbeddingSpec, servers: int, directory: Path) -> Iterator[Tables]:
    """Start servers for a `with` block; yields their tables."""
    with contextlib.closing(
        Supervisor(cluster, spec, ROWS, servers, directory=directory, timeout_s=TIMEOUT_S)
    ) as started:
        yield started.tables


def verbs_ms(tables: Tables, rows: int, rounds: int, seed: int) -> tuple[float, float]:
    """Return the median ms of a read and of a put of `rows` rows, drawn anew in each round."""
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
    """Call a function; return its time in ms and its result."""
    began = time.perf_counter()
    found = act()
    return 1e3 * (time.perf_counter() - began), found


def of_files(tables: Tables, directory: Path) -> tuple[float, float]:
    """Return the seconds in which the servers write a whole image, and restore it."""
    state = TrainState(init_dense({"w": jnp.zeros(1)}, optax.sgd(0.1), make_mesh()), tables)

    def save():
        with Checkpointer(directory, copy="shards") as checkpointer:
            checkpointer.save(state)

    save_ms, _ = timed_ms(save)
    restore_ms, _ = timed_ms(lambda: restore(directory, state))
    return save_ms / 1e3, restore_ms / 1e3
