"""How a recovery begins: with the trackers of the image that it goes on from, and with a base."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrec.checkpoint import Image, images
from jaxrec.cpr.schedule import Mode
from jaxrec.cpr.watch import Watch
from jaxrec.embedding import Tables
from jaxrec.embedding.tables import is_initial


def begin_watch(watch: Watch | None, tables: Tables, image: Image | None, scheme: str | None) -> Mapping[str, Any]:
    """Begins to track rows, with what an image remembers; returns that.

    Trackers of another scheme, or of tables that are split otherwise, begin anew.
    """
    known = image.extra.get("cpr", {}) if image else {}
    same = image is not None and (image.spec, known.get("scheme")) == (tables.spec.digest, scheme)
    if watch:
        watch.begin(tables, known.get("trackers", {}) if same else {})
    return known


def wants_base(directory: Path, image: Image | None, tables: Tables, step: int, mode: Mode, deltas: bool) -> bool:
    """Whether a run has to save all rows before it begins.

    Args:
      directory: of the run's images.
      image: that it goes on from.
      tables: to begin with; initial rows can be made again.
      step: to begin with.
      mode: with full recovery dense parameters need an image to go back to.
      deltas: whether rows are saved over a base.
    """
    if image is None:
        return mode == "full" or step > 0 or not is_initial(tables)
    # A base is one of all rows, split as they are now; or the chain of one goes on.
    return image.spec != tables.spec.digest or not (deltas or image.path in images(directory))
