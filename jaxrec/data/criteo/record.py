"""What a preparation notes of itself for the next run, and whether that run may go on with it or
take it as done.

`progress.json` holds options, fingerprints of the files, the shards written so far, each with the
place in the text up to which the files must stay as they were, and `texts`: the checksums of all
files, once they were read to the end.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxrec.data.criteo.dataset import METADATA, SPLITS, check_files, check_shard, layout_of, read_json, read_metadata
from jaxrec.data.criteo.source import Seen, read_chunks, same_head, same_stamps
from jaxrec.files import write_json

PROGRESS, VOCABULARY = "progress.json", "vocabulary.npz"


def begin_record(
    directory: Path, paths: Sequence[Path], wanted: dict[str, Any], read: Callable = read_chunks
) -> dict[str, Any]:
    """The notes of a preparation: new ones, or those of the run before.

    Args:
      directory: of the preparation.
      paths: of the raw files.
      wanted: 'options' and 'sources', the fingerprints of the files as they are now, and what else the notes hold.
      read: (paths, known) -> what reads the files, and raises a ValueError if they are not what was seen.

    Raises:
      ValueError: rows were written with other options or from other text; a note or a shard is
        damaged or missing.
    """
    path = directory / PROGRESS
    remedy = f"Delete {directory} and run the preparation again."
    state = read_json(path, ("options", "sources", "shards"), remedy) if path.exists() else None
    if state is not None:
        differ = _differences(state, wanted, paths, read)
        if not differ:
            _check_shards(directory, state)
            if state["sources"] != wanted["sources"]:
                # With the times of now: the files were looked into.
                state["sources"] = wanted["sources"]
                write_json(path, state)
            return state
        if state["shards"]:
            raise _other(directory, differ)
    # Of a run that wrote no shard: nothing to lose.
    (directory / VOCABULARY).unlink(missing_ok=True)
    state = {**wanted, "texts": [], "shards": [], "bad_rows": []}
    write_json(path, state)
    return state


def finished(
    directory: Path, paths: Sequence[Path], wanted: dict[str, Any], read: Callable = read_chunks
) -> dict[str, Any]:
    """The metadata of a complete preparation, if it is one of these files with these options.

    Raises:
      ValueError: as `begin_record`.
    """
    metadata = read_metadata(directory)
    if "texts" not in metadata:
        raise ValueError(
            f"{directory} was prepared by an earlier version of jaxrec, which kept no checksum of the files. Open it "
            "as it is (open_split, or give the directory itself), or prepare into another directory."
        )
    differ = _differences(metadata, wanted, paths, read)
    if differ:
        raise _other(directory, differ)
    check_files(directory, metadata)
    if metadata["sources"] != wanted["sources"]:
        # So that the next call need not read the files again.
        metadata["sources"] = wanted["sources"]
        write_json(directory / METADATA, metadata)
    return metadata


def known_texts(state: dict[str, Any], files: int) -> list[list[Seen]]:
    """What earlier readings saw of each file, the shortest first: up to each shard, and to the
    end."""
    known: list[list[Seen]] = [[] for _ in range(files)]
    for shard in state.get("shards", []):
        source, end, crc = shard["text"]
        known[source].append(Seen(end, crc, 0, False))
    for marks, (end, crc, lines) in zip(known, state["texts"], strict=False):
        marks.append(Seen(end, crc, lines, True))
    return [sorted(marks) for marks in known]


def _differences(kept, wanted, paths, read) -> list[str]:
    """Names of the options and files that are not those of the notes; reads files whose times have
    changed."""
    differ = [name for name, value in wanted["options"].items() if kept["options"].get(name) != value]
    if "texts" not in kept or len(kept["sources"]) != len(paths):
        return [*differ, f"sources ({', '.join(path.name for path in paths)})"]
    known = known_texts(kept, len(paths))
    for path, before, now, seen in zip(paths, kept["sources"], wanted["sources"], known, strict=True):
        if not same_head(before, now) or not (same_stamps(before, now) or _is_as_seen(path, seen, read)):
            differ.append(f"sources (text or name of {path.name})")
    return differ


def _is_as_seen(path: Path, seen: list[Seen], read: Callable) -> bool:
    if not seen:
        return True  # nothing was made from it
    try:
        for _ in read([path], [seen]):
            pass
    except ValueError:
        return False
    return True


def _other(directory, differ) -> ValueError:
    return ValueError(
        f"{directory} holds a preparation with other {', '.join(differ)}: use the same, or another directory, "
        "or delete it."
    )


def _check_shards(directory, state):
    count = dict.fromkeys(SPLITS, 0)
    for shard in state["shards"]:
        check_shard(directory, shard["split"], count[shard["split"]], shard["bytes"], layout_of(state))
        count[shard["split"]] += 1
