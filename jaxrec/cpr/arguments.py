"""What a recovery is given: an error names what does not fit."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxrec.bounds import is_positive, real_number, whole_number
from jaxrec.checkpoint import Image, newest_first
from jaxrec.cpr.priority import Priority, budget_rows
from jaxrec.embedding import EmbeddingSpec


def spec_of(engine) -> EmbeddingSpec:
    """The spec of an engine's tables; refuses what is no engine."""
    missing = [name for name in ("cut", "withdraw", "exclusive", "lose", "enter") if not hasattr(engine, name)]
    if missing:
        raise ValueError(
            f"the engine is a {type(engine).__name__}, which has no {missing}: give a Serial or a Pipeline, "
            "Recovery(engine, directory, ...)."
        )
    return engine.tables.spec


def check_image(directory: Path, image: Image | None, step: int) -> None:
    """Refuses a directory whose images are not those that a run goes on from.

    Args:
      directory: of the run's images.
      image: what `restore` returned; None for a run that begins.
      step: of the engine.
    """
    found = newest_first(directory)
    if image is None and found:
        raise ValueError(
            f"{directory} holds {found[0].name} (and {len(found) - 1} more), which would pass for rows of "
            "this run: go on with that one (state, image = restore(directory, state), then Recovery(..., "
            "image=image)), or give another directory."
        )
    if image is not None and not isinstance(image, Image):
        raise ValueError(f"image is a {type(image).__name__}: give what `restore` returned beside the state.")
    if image is not None and (image.path.resolve() not in [p.resolve() for p in found] or image.step != step):
        raise ValueError(
            f"image {image.path} of step {image.step} must lie in {directory}, and the engine's state, of "
            f"step {step}, must be what `restore` returned with it."
        )


def warn_missed(first: int, last: int) -> None:
    """Says that steps were trained which a recovery's hook has not seen."""
    warnings.warn(
        f"steps {first} to {last} were trained without recovery.hook: hooks=[recovery.hook] has what they changed "
        "saved.",
        stacklevel=5,
    )


def check_shards(spec, shards):
    """Refuses what is no list of distinct shards."""
    if not isinstance(shards, Sequence | np.ndarray) or not len(shards):
        raise ValueError(f"shards={shards!r} must be a list of one shard or several.")
    if any(not 0 <= shard < spec.shards for shard in shards) or len(set(shards)) < len(shards):
        raise ValueError(f"shards={list(shards)} must be distinct and lie between 0 and {spec.shards - 1}.")


def checked_failures(spec, failures):
    """{step: shards} of failures, each looked at."""
    for step, shards in failures.items():
        whole_number("failures: step", step)
        check_shards(spec, shards)
    return dict(failures)


def check_numbers(save_every_steps, total_steps, most_deltas, pick_ahead_steps):
    """Refuses numbers of a schedule that are out of range."""
    real_number("save_every_steps", save_every_steps, "above 0 and finite", is_positive)
    whole_number("total_steps", total_steps)
    if most_deltas is not None:
        whole_number("most_deltas", most_deltas)
    whole_number("pick_ahead_steps", pick_ahead_steps, 0)


def check_scheme(spec, mode, scheme, fraction, whole):
    """Refuses a scheme that does not fit mode, fraction or tables."""
    if not isinstance(scheme, Priority | None):
        raise ValueError(f"scheme={scheme!r:.80} must be one of mfu(), ssu(), ... or None.")
    if mode not in ("partial", "full"):
        raise ValueError(f"mode={mode!r} must be 'partial' or 'full'.")
    if scheme and mode == "full":
        raise ValueError(f"full recovery goes back to whole images: scheme={scheme.name!r} must be None.")
    if whole and scheme and not scheme.by_tracker:
        raise ValueError(f"scheme={scheme.name!r} compares all rows: leave whole empty, not {list(whole)}.")
    unknown = sorted(set(whole) - set(spec.tables))
    if unknown:
        raise ValueError(f"whole names unknown tables {unknown}; known: {list(spec.tables)}.")
    budget_rows(1, fraction)


def check_alone(other) -> None:
    """Refuses a second recovery of an engine, beside one that is not closed."""
    if other is not None and not other.closed:
        raise ValueError(f"this engine has a recovery already, which saves in {other.directory}: leave it first.")


def check_step(step: int, engines: int, seen: int) -> None:
    """Refuses a step that is not the engine's, or was seen before."""
    if step != engines:
        raise ValueError(f"step {step} is not that of this recovery's engine, {engines}: train with it.")
    if step <= seen:
        raise ValueError(f"step {step} was seen before (up to {seen}): give the hook once, to this recovery's engine.")
