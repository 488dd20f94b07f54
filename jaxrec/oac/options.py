"""Options of a pipeline, and consistency checks of its arguments."""

from typing import NamedTuple

import jax

from jaxrec import validate
from jaxrec.bounds import whole_number
from jaxrec.sharding import AXES, as_mesh, mesh_of
from jaxrec.task import Task
from jaxrec.types import TrainState

MODES = ("sync", "async", "semisync", "oac")


def nbytes(tree) -> int:
    """Return the total bytes of all arrays in a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


class PipelineOptions(NamedTuple):
    """Checked options of a pipeline."""

    mode: str
    window: int  # W
    # Number of threads of each kind, and of batches planned beyond the window.
    loaders: int = 1
    fetchers: int = 1
    ahead: int = 1

    @property
    def repairs(self) -> bool:
        """Whether stale rows are replaced from the ring."""
        return self.mode == "oac" and self.window > 0

    @property
    def adds(self) -> bool:
        """Whether changes are added to rows instead of overwriting them, as other batches may have written since."""
        return self.mode in ("async", "semisync")


def check_options(mode: str, window: int | None, **threads: int) -> PipelineOptions:
    """Return the options for the arguments of a pipeline; refuse unknown ones, and those that do not fit each other."""
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} must be one of {MODES}.")
    fixed = {"sync": 0, "semisync": 1}.get(mode)
    if fixed is not None and window not in (None, fixed):
        raise ValueError(f"window={window} does not fit mode={mode!r}, whose window is {fixed}: leave it out.")
    default = 8 if fixed is None else fixed
    window = whole_number("window", default if window is None else window, 0, why=" (0 is one batch after the other)")
    threads = {name: whole_number(name, count) for name, count in threads.items()}
    return PipelineOptions(mode, window, **threads)


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
