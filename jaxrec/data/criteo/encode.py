"""Categories to ids, by hashing into a table of fixed size or by a vocabulary with a minimum count; 0 is "missing".

Legend: n rows, F = 26 fields.
"""

from collections.abc import Callable, Iterable

import numba
import numpy as np

from jaxrec.embedding.tables import mix

MISSING, OUT_OF_VOCABULARY = 0, 1
PENDING_ROWS = 1 << 20  # counted at once, which bounds the memory of counting


def hash_ids(category, present, cap: int) -> np.ndarray:
    """Hash category u32[n, F] into a table of `cap` rows per field: i32[n, F], 0 where present bool[n, F] is False.

    Other ids are 1 + mix(value, field) % (cap - 1).
    """
    field = np.arange(1, category.shape[1] + 1, dtype=np.uint32) * np.uint32(0x9E3779B9)
    h = mix(category ^ field[None, :])
    return np.where(present, 1 + h % np.uint32(cap - 1), MISSING).astype(np.int32)


def count_values(chunks: Iterable[tuple[np.ndarray, np.ndarray]], fields: int):
    """Count the values of each field in chunks of (category u32[n, F], present bool[n, F]).

    Returns:
      (values u32[v] ascending, counts i64[v]) of each field, in 12 bytes of memory per distinct value.
    """
    totals = [(np.zeros(0, np.uint32), np.zeros(0, np.int64)) for _ in range(fields)]
    pending: list[tuple[np.ndarray, np.ndarray]] = []

    def merge():
        for field in range(fields):
            new = np.concatenate([category[:, field][present[:, field]] for category, present in pending])
            totals[field] = _add_counts(totals[field], np.unique(new, return_counts=True))
        pending.clear()

    rows = 0
    for chunk in chunks:
        pending.append(chunk)
        rows += len(chunk[0])
        if rows >= PENDING_ROWS:
            merge()
            rows = 0
    if pending:
        merge()
    return totals


def _add_counts(a, b):
    values = np.empty(len(a[0]) + len(b[0]), np.uint32)
    counts = np.empty(len(values), np.int64)
    used = _merge_sorted(a[0], a[1], b[0], b[1], values, counts)
    return values[:used].copy(), counts[:used].copy()


@numba.njit(cache=True, nogil=True)
def _merge_sorted(a, count_a, b, count_b, values, counts):
    i, j, used = 0, 0, 0
    while i < len(a) or j < len(b):
        from_a = j == len(b) or (i < len(a) and a[i] <= b[j])
        from_b = i == len(a) or (j < len(b) and b[j] <= a[i])
        values[used] = a[i] if from_a else b[j]
        counts[used] = (count_a[i] if from_a else 0) + (count_b[j] if from_b else 0)
        i, j, used = i + from_a, j + from_b, used + 1
    return used


def vocabulary(counts, min_count: int) -> list[np.ndarray]:
    """Select the values u32[v] of each field that get their own row, most frequent first: value i has id 2 + i."""
    kept = []
    for values, count in counts:
        often = count >= min_count
        values, count = values[often], count[often]
        kept.append(values[np.argsort(-count, kind="stable")])
    return kept


def vocabulary_encoder(kept: list[np.ndarray]) -> Callable:
    """Make (category u32[n, F], present bool[n, F]) -> ids i32[n, F] from a vocabulary."""
    tables = [(np.sort(values), np.argsort(values, kind="stable").astype(np.int32)) for values in kept]

    def encode(category, present):
        ids = np.full(category.shape, MISSING, np.int32)
        for field, (values, order) in enumerate(tables):
            column = category[:, field]
            place = np.minimum(np.searchsorted(values, column), max(0, len(values) - 1))
            known = values[place] == column if len(values) else np.zeros(len(column), bool)
            found = order[place] + 2 if len(values) else OUT_OF_VOCABULARY
            ids[:, field] = np.where(present[:, field], np.where(known, found, OUT_OF_VOCABULARY), MISSING)
        return ids

    return encode
