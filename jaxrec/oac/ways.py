"""What a pipeline is given: state, update, mesh and window fit each other, or an error names what
does not."""

import inspect
from typing import Any, NamedTuple

import jax

from jaxrec import boundary
from jaxrec.bounds import whole_number
from jaxrec.oac.sizes import MODES, VALIDATIONS
from jaxrec.oac.view import LaggingTables
from jaxrec.sharding import AXES, as_mesh, check_split
from jaxrec.types import TrainState


class Way(NamedTuple):
    """How a pipeline runs its batches."""

    mode: str
    window: int  # W
    validation: str
    skip_reads: bool  # rows that the ring will patch are neither gathered nor sent
    skip_writes: bool  # rows that a later batch will write are neither fetched nor written

    @property
    def repairs(self) -> bool:
        """Whether stale rows are replaced from the ring."""
        return self.mode == "oac" and self.window > 0

    @property
    def plans_sources(self) -> bool:
        """Whether the host finds what is stale."""
        return self.repairs and self.validation == "planned"

    @property
    def adds(self) -> bool:
        """Whether the change of a row is added to it, as others may have written it since."""
        return self.mode in ("async", "semisync")

    @property
    def depth(self) -> int:
        """Slots of the ring."""
        return max(1, self.window)

    @property
    def lookahead(self) -> int:
        """How many batches must be known before one is committed: only then it is known what they
        rewrite."""
        return self.window if self.skip_writes else 0


def check_way(mode: str, window: int | None, validation: str, skip_reads: bool, skip_writes: bool) -> Way:
    """The way that is meant by some arguments of a pipeline.

    Raises:
      ValueError: they are unknown, or do not fit each other.
    """
    way = Way(mode, check_window(mode, window), validation, skip_reads, skip_writes)
    if validation not in VALIDATIONS:
        raise ValueError(f"validation={validation!r} must be 'planned' or 'device'.")
    if (skip_reads or skip_writes) and not way.plans_sources:
        raise ValueError("skip_stale_reads and skip_rewritten need mode='oac', window > 0, validation='planned'.")
    return way


class Threads(NamedTuple):
    """How many threads of each kind there are, and how many batches beyond the window are
    planned."""

    loaders: int
    fetchers: int
    writers: int
    ahead: int


def check_threads(threads: Threads, shards: int) -> Threads:
    """The numbers as plain ones.

    Raises:
      ValueError: one is less than 1; a writer would have no shard.
    """
    checked = Threads(*(whole_number(name, count) for name, count in threads._asdict().items()))
    if checked.writers > shards:
        raise ValueError(f"writers={checked.writers} must not be more than the shards, {shards}.")
    return checked


def state_itself(state) -> TrainState:
    """A state whose tables can be read, with the tables themselves."""
    if not isinstance(state, TrainState):
        raise ValueError(f"state is a {type(state).__name__}, but a TrainState from `init_state` is wanted.")
    if not getattr(state.tables, "in_place", False):
        raise ValueError("Pipeline is for HostTables; tables on the device need none: use `make_train_step`.")
    boundary.check_not_donated(state)
    return state._replace(tables=state.tables.themselves()) if isinstance(state.tables, LaggingTables) else state


def check_update(update) -> None:
    """Refuses what cannot update rows and the dense state."""
    try:
        inspect.signature(update).bind(*["dense", "rows", "plans", "batch"])
    except (TypeError, ValueError):
        raise ValueError(
            f"update={update!r:.200} must take (dense, rows, plans, batch): make it with `make_update`; a step from "
            "`make_train_step` is for `fit`."
        ) from None


def mesh_for(mesh, state: TrainState, update) -> jax.sharding.Mesh:
    """The one mesh of state, update and pipeline."""
    placed: list[Any] = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(state.dense)]
    meshes = [place.mesh for place in placed if getattr(place, "mesh", None) is not None]
    mesh = as_mesh(meshes[0] if mesh is None and meshes else mesh)
    boundary.check_placement(state, mesh)
    check_split(state.tables.spec.shards, mesh)
    theirs = getattr(update, "mesh", mesh)
    if theirs != mesh:
        raise ValueError(
            f"the update was made for a mesh of {theirs.size} devices in {theirs.shape[AXES[0]]} replicas, but the "
            f"state lies on {mesh.size} in {mesh.shape[AXES[0]]}: give one mesh to `init_state` and `make_update`."
        )
    return mesh


def check_window(mode: str, window: int | None) -> int:
    """W of a mode."""
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} must be one of {MODES}.")
    fixed = {"sync": 0, "semisync": 1}
    if mode in fixed:
        if window not in (None, fixed[mode]):
            raise ValueError(
                f"window={window} does not fit mode={mode!r}, whose window is {fixed[mode]}: leave `window` out, or "
                "give it only where mode is 'oac' or 'async'."
            )
        return fixed[mode]
    return whole_number("window", 8 if window is None else window, 0, why=" (0 is one batch after the other)")
