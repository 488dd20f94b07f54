"""How lost shards come back: each from the newest image of it that is whole, all or none.

Legend: S shards.
"""

import warnings
from collections.abc import Collection, Sequence
from pathlib import Path

from jaxrec.checkpoint import Image, chain, restore, restore_shard, shard_source
from jaxrec.checkpoint.image import warn_skipped
from jaxrec.checkpoint.names import set_aside
from jaxrec.cpr.saves import Saves
from jaxrec.cpr.watch import Watch
from jaxrec.embedding import Tables
from jaxrec.types import ShardsLost, TrainState


def settle(saves: Saves, watch: Watch | None, step: int) -> None:
    """Ends what is being picked and saved; a save that failed does not keep a shard from coming
    back."""
    try:
        if watch:
            watch.drop_picks()  # rows of lost shards are no longer what was picked
            watch.touch(step)
        saves.settle()
    except Exception as error:
        warnings.warn(f"a save failed: {error}", stacklevel=6)


def restored_whole(engine, directory: Path, watcher) -> tuple[TrainState, Image, int]:
    """The newest whole image in the tables of an engine between two runs, however many servers die meanwhile.

    Args:
      engine: whose other watchers replace what is lost.
      directory: of the images.
      watcher: the recovery that restores.

    Returns:
      The state, its image, and how many shards were lost on the way.

    Raises:
      DamagedImage: no image is whole.
      ShardsLost: nobody replaces them, or they are lost again and again.
    """
    lost = 0
    while True:
        try:
            return (*restore(directory, engine.state), lost)
        except ShardsLost as gone:  # rows of some are those of the image already: all begin anew
            engine.replace_lost(gone.shards, watcher)
            lost += len(gone.shards)


def bring_back(
    saves: Saves, watch: Watch | None, state: TrainState, shards: Sequence[int], without: Collection[str], first: int
) -> tuple[Tables, list[int]]:
    """Restores lost shards from the newest images of each; nothing is picked or saved meanwhile.

    Args:
      saves, watch: of the recovery, settled.
      state: alone with its tables, at the step that is committed.
      shards: the lost ones.
      without: names of images to leave out.
      first: the step that the run began at, whose rows count where no image is left.

    Returns:
      The tables, and for each shard the step up to which it counts as saved.

    Raises:
      DamagedImage: no image is whole; nothing has changed.
    """
    known: dict = {}
    every, tables = saves.sources(without), state.tables
    # All is read and verified before the first row changes.
    sources = [shard_source(every, shard, known, without) if every else (None, []) for shard in shards]
    saved = [_saved_up_to(saves, source, bool(damaged or without), without, first) for source, damaged in sources]
    # Once, for the shard that had to go back furthest.
    warn_skipped(max((damaged for _, damaged in sources), key=len))
    for shard, (source, _) in zip(shards, sources, strict=True):
        tables, _ = restore_shard(source, tables, shard, without)
        if watch:
            watch.restored(tables, shard)
    skipped = {path for source, damaged in sources if source and damaged for path in every[: every.index(source)]}
    if (skipped or without) and watch:
        # Nothing more goes over a damaged chain.
        saves.save_base(state._replace(tables=tables))
    for path in () if watch else skipped:
        set_aside(path)  # it does not count among the images to keep
    return tables, saved


def _saved_up_to(saves, source, older, without, first):
    """The step of a shard's source; `older` if that is not the newest one."""
    found = chain(source, without) if older and source is not None else []
    if found:  # mini-saves do not move it
        return found[-1].extra.get("cpr", {}).get("regular", found[-1].step)
    return first if older else saves.regular
