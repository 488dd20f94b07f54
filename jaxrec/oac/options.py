"""Options of a pipeline: consistency checks of its arguments, and its memory use.

Legend: W window, S shards, U padded unique rows per shard, E embedding width, K slot width.
"""

from typing import NamedTuple

import jax

from jaxrec import validate
from jaxrec.bounds import whole_number
from jaxrec.sharding import AXES, as_mesh, mesh_of
from jaxrec.task import Task
from jaxrec.types import TrainState

MODES = ("sync", "async", "semisync", "oac")
VALIDATIONS = ("planned", "device")


def nbytes(tree) -> int:
    """Return the total bytes of all arrays in a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def memory_bytes(
    window: int,
    rows: int,
    row_floats: int,
    *,
    mode: str = "oac",
    validation: str = "planned",
    input_bytes: int = 0,
    unread_bytes: int = 0,
    table_rows: int = 0,
    loaders: int = 2,
    ahead: int = 2,
) -> dict[str, int]:
    """Return the peak memory of a pipeline, without tables, dense state and the update's scratch memory.

    At most W + 1 batches are gathered and not yet written. The device holds one copy of the rows of each, gathered or
    updated; of the batch being committed it holds both, and a repaired copy in modes that repair. It also holds the
    inputs of these batches, and of one more batch for each loader waiting for admission. With R = rows and
    F = row_floats, oac holds at most

        device: 4 R (W F                   the ring
                   + (W + 3) F             rows of batches; W + 2 in the other modes, which have no ring
                   + W + 1)                ring positions of the rows; if the device validates, the row numbers of
                                           the ring and the ring positions of one batch
                + (W + 1 + min(loaders, ahead)) (input_bytes - unread_bytes)
        host:   4 R (W + 1) F              rows in transfer; twice that in async and semisync, which keep the gathered
                                           rows
                + (2 W + 2 + ahead) (input_bytes + 4 R)      batches planned and not yet written; without 4 R if the
                                                             host does not plan sources: other modes, or 'device'
                + 8 table_rows             the last writer of every row; nothing in those cases

    On a CPU both are the same memory, and fetched rows are views of those on the device. The ring is widened
    when a batch has more unique rows than any before it; meanwhile the old ring exists too.

    Args:
      window: W.
      rows: R = S U of one stack.
      row_floats: F = E + K of that stack, half of E where rows are float16.
      mode: mode of the pipeline; `sync` requires W = 0, `semisync` W = 1.
      validation: 'planned' or 'device'.
      input_bytes: bytes of one batch and its plans; with several stacks, 0 for all but one.
      unread_bytes: the part of input_bytes that the step does not read and that stays on the host: ids, unless the loss
        uses them, and row numbers, unless the device validates.
      table_rows: V, rows of the stack.
      loaders, ahead: as for `Pipeline`.

    Returns:
      {'device': bytes, 'host': bytes} for one stack.

    Raises:
      ValueError: an unknown mode or validation; a window that does not fit the mode.

    >>> memory_bytes(4, 1000, 17, input_bytes=50_000, table_rows=1_000_000)
    {'device': 1118000, 'host': 8988000}
    """
    options = check_options(mode, window, validation)
    in_flight = window + 1
    device = (in_flight + 1 + options.repairs) * row_floats
    if options.repairs:
        device += window * row_floats + window + 1
    host = in_flight * row_floats * (2 if options.adds else 1)
    items, planned = 2 * in_flight + ahead, options.plans_sources
    return {
        "device": 4 * rows * device + (in_flight + min(loaders, ahead)) * (input_bytes - unread_bytes),
        "host": 4 * rows * (host + items * planned) + items * input_bytes + 8 * table_rows * planned,
    }


class PipelineOptions(NamedTuple):
    """Checked options of a pipeline."""

    mode: str
    window: int  # W
    validation: str
    # Number of threads of each kind, and of batches planned beyond the window.
    loaders: int = 1
    fetchers: int = 1
    writers: int = 1
    ahead: int = 1

    @property
    def repairs(self) -> bool:
        """Whether stale rows are replaced from the ring."""
        return self.mode == "oac" and self.window > 0

    @property
    def plans_sources(self) -> bool:
        """Whether the host finds stale rows during planning."""
        return self.repairs and self.validation == "planned"

    @property
    def adds(self) -> bool:
        """Whether changes are added to rows instead of overwriting them, as other batches may have written since."""
        return self.mode in ("async", "semisync")

    @property
    def depth(self) -> int:
        """Number of slots in the ring."""
        return max(1, self.window)


def check_options(mode: str, window: int | None, validation: str, **threads: int) -> PipelineOptions:
    """Return the options for the arguments of a pipeline; refuse unknown ones, and those that do not fit each other."""
    for name, given, known in [("mode", mode, MODES), ("validation", validation, VALIDATIONS)]:
        if given not in known:
            raise ValueError(f"{name}={given!r} must be one of {known}.")
    fixed = {"sync": 0, "semisync": 1}.get(mode)
    if fixed is not None and window not in (None, fixed):
        raise ValueError(f"window={window} does not fit mode={mode!r}, whose window is {fixed}: leave it out.")
    default = 8 if fixed is None else fixed
    window = whole_number("window", default if window is None else window, 0, why=" (0 is one batch after the other)")
    threads = {name: whole_number(name, count) for name, count in threads.items()}
    return PipelineOptions(mode, window, validation, **threads)


def with_unguarded_tables(state) -> TrainState:
    """Return a state with its tables unguarded; refuse tables on the device and lagging ones."""
    validate.check_not_donated(state)
    if (tables := state.tables.hosted) is None:
        raise ValueError("Pipeline is for HostTables or RemoteTables; those on the device need none: use `Serial`.")
    return state._replace(tables=tables)


def checked_mesh(task: Task, state: TrainState) -> jax.sharding.Mesh:
    """Return the mesh of a task, on which the dense state must lie, with tables of its spec."""
    mesh, theirs = as_mesh(task.mesh), mesh_of(state.dense)
    if theirs != mesh:
        raise ValueError(
            f"the task is for a mesh of {mesh.size} devices in {mesh.shape[AXES[0]]} replicas, but the state lies on "
            f"{theirs.size} in {theirs.shape[AXES[0]]}: make the state by `task.init`."
        )
    validate.check_spec(task.spec, state.tables.spec)
    return mesh
