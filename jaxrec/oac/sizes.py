"""How many bytes a pipeline holds and moves, and in how many padded rows they travel.

Legend: W window, S shards, U padded unique rows per shard, C rows that travel, E embedding width, K
slot width.
"""

import dataclasses

import jax

from jaxrec.bounds import whole_number
from jaxrec.embedding import bucket

MODES = ("sync", "async", "semisync", "oac")
VALIDATIONS = ("planned", "device")


def nbytes(tree) -> int:
    """The bytes of all arrays in a tree.

    >>> import numpy as np
    >>> nbytes({"a": np.zeros((2, 3), np.float32), "b": np.int32(1)})
    28
    """
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def memory_bytes(
    window: int,
    rows: int,
    row_floats: int,
    *,
    mode: str = "oac",
    validation: str = "planned",
    input_bytes: int = 0,
    table_rows: int = 0,
    loaders: int = 2,
    ahead: int = 2,
) -> dict[str, int]:
    """How much memory a pipeline needs at most beside tables, dense state and the update's own
    scratch memory.

    At most W + 1 batches are gathered and not yet written, and each is on the device once: as it
    was gathered, or as the update left it. The one that is being committed is there as both, and
    where rows are repaired also as repaired. The inputs of those batches, and of one more for each
    loader that waits for admission, are on the device too. With R = rows and F = row_floats, oac
    holds at most

        device: 4 R (W (F + 1)             the ring and its row numbers
                   + (W + 3) F             rows of batches; W + 2 in the other modes, which have no ring
                   + W + 1)                where the ring holds each row; 1 instead of W + 1 if the device validates
                + (W + 1 + min(loaders, ahead)) input_bytes
        host:   4 R (W + 1) F              rows on their way; twice that in async and semisync, which keep what was read
                + (2 W + 2 + ahead) (input_bytes + 4 R)      planned and not yet written; without 4 R if nothing is
                                                             planned about staleness: other modes, or 'device'
                + 8 table_rows             the last writer of every row; nothing in those cases

    On a CPU both are the same memory, and what was fetched is a view of what is on the device.
    `skip_stale_reads` needs at most one more batch of rows on the device, `skip_rewritten` W more
    batches of inputs on the host. While the ring is widened, because a batch has more unique rows
    than any before it, the old ring is there too.

    Args:
      window: W.
      rows: R = S U of one stack.
      row_floats: F = E + K of that stack.
      mode: of the pipeline; `sync` has W = 0, `semisync` W = 1.
      validation: 'planned' or 'device'.
      input_bytes: of one batch and its plans; 0 leaves them out, as for all stacks but one.
      table_rows: V, rows of the stack.
      loaders, ahead: of the pipeline.

    Returns:
      {'device': bytes, 'host': bytes} of one stack.

    Raises:
      ValueError: an unknown mode or validation; a negative number.

    >>> memory_bytes(4, 1000, 17, input_bytes=50_000, table_rows=1_000_000)
    {'device': 1134000, 'host': 8988000}
    """
    numbers = {"window": window, "rows": rows, "row_floats": row_floats, "input_bytes": input_bytes}
    for name, number in (numbers | {"table_rows": table_rows, "loaders": loaders, "ahead": ahead}).items():
        whole_number(name, number, 0)
    for name, given, known in [("mode", mode, MODES), ("validation", validation, VALIDATIONS)]:
        if given not in known:
            raise ValueError(f"{name}={given!r} must be one of {known}.")
    repairs = mode == "oac" and window > 0
    planned = repairs and validation == "planned"
    in_flight = window + 1
    device = (in_flight + 1 + repairs) * row_floats
    if repairs:
        device += window * (row_floats + 1) + (in_flight if planned else 1)
    host = in_flight * row_floats * (2 if mode in ("async", "semisync") else 1)
    items = 2 * in_flight + ahead
    return {
        "device": 4 * rows * device + (in_flight + min(loaders, ahead)) * input_bytes,
        "host": 4 * rows * (host + items * planned) + items * input_bytes + 8 * table_rows * planned,
    }


@dataclasses.dataclass
class Travelling:
    """C: the most rows per shard that recent batches needed, rounded up to a size of few.

    It grows when a batch needs more, and is reviewed every `review_every` batches: one odd batch
    does not decide for ever. Sizes come from `bucket`, so that going back and forth compiles
    nothing anew.
    """

    review_every: int = 256
    size: int = 0
    most: int = 0  # since the last review
    batches: int = 0

    def fit(self, needed: int) -> int:
        """C for a batch that needs so many rows in its fullest shard.

        >>> travelling = Travelling(review_every=3)
        >>> [travelling.fit(needed) for needed in (100, 500, 90, 100, 90, 90, 90)]
        [104, 512, 512, 512, 512, 104, 104]
        """
        self.most, self.batches = max(self.most, needed), self.batches + 1
        self.size = max(self.size, bucket(needed))
        if self.batches == self.review_every:
            self.size, self.most, self.batches = bucket(self.most), needed, 0
        return self.size
