"""Options of a pipeline, and consistency checks of its arguments."""

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


class PipelineOptions(NamedTuple):
    """Checked options of a pipeline."""

    mode: str
    window: int  # W
    validation: str
    # Number of threads of each kind, and of batches planned beyond the window.
    loaders: int = 1
    fetchers: int = 1
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
