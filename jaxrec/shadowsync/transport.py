"""Where the trainers of one process meet: in rounds of all, or at a centre, each when it likes.

Legend: R replicas of a trainer, n trainers.
"""

import functools
import threading
import time
from typing import Any

import jax
import numpy as np

from jaxrec.bounds import real_number, whole_number
from jaxrec.interrupts import uninterrupted, wait
from jaxrec.shadowsync.leaves import floating, replicas_in, with_floating
from jaxrec.shadowsync.meeting import Meeting
from jaxrec.shadowsync.rules import Rule, check_same, mean_of, wide
from jaxrec.types import PyTree


class AllToAll(Meeting):
    """Rounds of all trainers of one process, for rules that combine the mean over all replicas.

    Args:
      rule: model averaging or BMUF; what it shares is kept here once, being the same for all.
      parameters: the initial ones of one replica, without a replica axis; BMUF begins from them.
      trainers: n; a round waits for all of them, as long as not all are done.
      timeout_s: how long a round waits for a trainer that is not heard of: more than the longest
        time between two of its calls of `exchange`, compilation included. Rounds may be rarer.
      on_failure: what becomes of the others when a trainer leaves early or is overdue: 'raise',
        'drop', or 'replace' if successors take the places of the lost.
      last_round: whether trainers that are done make a last round, which brings them together.
      memory: of an earlier transport, whose rounds go on here; of the initial parameters if None.

    Raises:
      ValueError: a rule with a centre; another argument out of range; parameters that cannot be
        synchronised; a memory of another rule or of other parameters.
    """

    def __init__(
        self,
        rule: Rule,
        parameters: PyTree,
        trainers: int = 1,
        *,
        timeout_s: float = 60.0,
        on_failure: str = "raise",
        last_round: bool = True,
        memory: PyTree | None = None,
    ):
        super().__init__(rule, parameters, trainers, timeout_s, on_failure, last_round)
        if rule.has_centre:
            raise ValueError(f"AllToAll needs a rule without a centre, got {rule.describe()}: use Centre.")
        self._shared: Any = _remembered(rule.init(self._initial), memory, rule)
        self._brought: dict[int, tuple[list, bool]] = {}  # to the round that has not ended
        self._round = 0
        self._target: list[np.ndarray] = []  # of the round before, until all have fetched it
        self._last = False

    @property
    def memory(self) -> PyTree:
        """What rounds have left for later ones, as numpy arrays; BMUF has a global model and a
        momentum."""
        with uninterrupted(), self._changed:
            return jax.tree.map(np.array, self._shared)

    @property
    def parameters(self) -> list[np.ndarray]:
        """The floating leaves of the newest target, in the dtypes of the initial parameters; those before any round."""
        with uninterrupted(), self._changed:
            newest = self._target or self._initial
        return [x.astype(initial.dtype) for x, initial in zip(newest, self._initial, strict=True)]

    def meet(self, trainer: int, before: PyTree, done: bool) -> tuple[PyTree, bool]:
        """One round: waits for all others; every replica gets the same target, in float32 or wider.

        Raises:
          ValueError: the parameters do not fit; this trainer has not joined.
          Left: another trainer has left or is overdue, or this one has been dropped.
        """
        leaves, rows = _brought(self.template, before, trainer)
        round_ = self._round  # without the lock, as no round ends without this trainer
        missing = lambda: set(self._awaited()) - set(self._brought)
        try:
            with uninterrupted(), self._changed:
                self._present(trainer)
                self._raise_failure(trainer)
                # Checked and brought under one lock: a trainer that is dropped in between brings
                # nothing.
                self._brought[trainer] = leaves, done
                self._settle()
            self._wait(trainer, time.monotonic(), lambda: self._round > round_, missing)
        finally:
            with uninterrupted(), self._changed:
                # Taken before the next round can end, which needs this trainer.
                target, last = self._target, self._last
                # An error or an interrupt: what it has brought goes with it.
                if self._round == round_:
                    self._brought.pop(trainer, None)
        self._count(trainer)
        return with_floating(before, [np.broadcast_to(x, (rows, *x.shape)) for x in target]), last

    def _settle(self):
        """Combines what was brought if it is all that is needed."""
        # By the number of the trainer, not in the order of arrival, on which a sum's bits depend.
        brought = [self._brought[i] for i in self._awaited() if i in self._brought]
        if not brought or len(brought) < len(self._awaited()) or self._failure:
            return
        # The end waits for successors; rounds do not.
        if all(done for _, done in brought) and any(map(self._lacks, self._members)):
            return
        replicas = [[leaf[r] for leaf in leaves] for leaves, _ in brought for r in range(len(leaves[0]))]
        last = all(done for _, done in brought)
        # Nothing is kept before this line, so that a combine that raises leaves all as it was.
        if last and not self.last_round:
            shared, target = self._shared, replicas[0]  # which nobody uses
        else:
            shared, target = self.rule.combine(self._shared, mean_of(replicas))
        self._shared, self._target, self._last = shared, target, last
        for i in self._awaited() if self._last else ():
            self._members[i].state = "finished"
        self._brought = {}
        self._round += 1
        self._changed.notify_all()


class Centre(Meeting):
    """Synchronisation parameter servers in this process, for EASGD: each trainer comes when it
    likes.

    The tensors are bin-packed over the servers by size. A server's bandwidth is emulated: transfers
    to and from it take turns, and their time is waited for.

    Args:
      rule: with a centre.
      parameters: the initial ones of one replica, without a replica axis.
      trainers: n; a trainer that is done waits for all of them.
      servers: how many.
      bytes_per_s: of each server, both directions together; None for no limit.
      timeout_s: how long a trainer that is done waits for one that is not heard of: more than the
        longest time between two of its calls of `exchange`. Rounds and transfers may take longer.
      on_failure: what becomes of the others when a trainer leaves early or is overdue: 'raise',
        'drop', or 'replace' if successors take the places of the lost.
      last_round: whether trainers that are done go to the centre once more, and get its parameters.
      memory: of an earlier transport, whose centre goes on here; of the initial parameters if None.

    Raises:
      ValueError: a rule without a centre; another argument out of range; parameters that cannot be
        synchronised; a memory of another rule or of other parameters.
    """

    def __init__(
        self,
        rule: Rule,
        parameters: PyTree,
        trainers: int = 1,
        *,
        servers: int = 1,
        bytes_per_s: float | None = None,
        timeout_s: float = 60.0,
        on_failure: str = "raise",
        last_round: bool = True,
        memory: PyTree | None = None,
    ):
        super().__init__(rule, parameters, trainers, timeout_s, on_failure, last_round)
        if not rule.has_centre:
            raise ValueError(f"Centre needs a rule with a centre, got {rule.describe()}: use AllToAll.")
        whole_number("servers", servers)
        if bytes_per_s is not None:
            real_number("bytes_per_s", bytes_per_s, "above 0, or None", lambda x: x > 0)
        self._tree = with_floating(_on_host(parameters), self._initial)
        self._told_to_ask_again: set[int] = set()
        self._centre = _remembered([rule.init(leaf) for leaf in self._initial], memory, rule)
        self._turn = threading.Lock()  # of those who move the centre
        self._bytes_per_s, self._free_at = bytes_per_s, [0.0] * servers
        sizes = [2 * leaf.nbytes for leaf in self._initial]  # to and fro
        places = pack(sizes, servers)
        self._bytes_of = [sum(s for s, at in zip(sizes, places, strict=True) if at == n) for n in range(servers)]

    @property
    def memory(self) -> PyTree:
        """The centre as numpy arrays, in float32 or wider, in the order of the template."""
        return self._now()

    @property
    def parameters(self) -> PyTree:
        """The centre as it is, in the dtypes of the initial parameters, with their other leaves."""
        pairs = zip(self._now(), self._initial, strict=True)
        return with_floating(self._tree, [x.astype(initial.dtype) for x, initial in pairs])

    def meet(self, trainer: int, before: PyTree, done: bool) -> tuple[PyTree, bool]:
        """Moves the centre towards every replica brought, one after the other: all of it, or
        nothing.

        Raises:
          ValueError: the parameters do not fit; this trainer has not joined.
          Left: another trainer has left or is overdue, or this one has been dropped.
        """
        leaves, rows = _brought(self.template, before, trainer)
        with uninterrupted(), self._changed:
            # The others may have come to their end after it was told to ask again, and before it
            # did.
            last = done and trainer in self._told_to_ask_again and self._member(trainer).state == "finished"
            self._told_to_ask_again.discard(trainer)
            if not last:
                self._present(trainer)
                self._raise_failure(trainer)
        if done:
            last = last or self._wait_for_the_others(trainer)
            return with_floating(before, [np.stack([leaf] * rows) for leaf in self._now()]), last
        # First the way to the servers: who is dropped meanwhile must not move the centre.
        for _ in range(rows):
            self._transfer(trainer)
        targets = self._move(trainer, leaves, rows)
        self._count(trainer)
        return with_floating(before, [np.stack(target) for target in zip(*targets, strict=True)]), False

    def _move(self, trainer, leaves, rows):
        """The targets of each replica; the centre moves when all is computed, by one who takes
        part."""
        # A lock of its own: rules compute for long, and the others must be heard of meanwhile.
        with uninterrupted(), self._turn:
            centre, targets = self._centre, []
            for replica in range(rows):
                pairs = [self.rule.combine(c, leaf[replica]) for c, leaf in zip(centre, leaves, strict=True)]
                centre = [moved for moved, _ in pairs]
                targets.append([target for _, target in pairs])
            with self._changed:
                self._present(trainer)
                self._raise_failure(trainer)
                # One assignment of new arrays: who reads the centre without the lock sees one
                # version.
                self._centre = centre
        return targets

    def _now(self):
        return [np.array(leaf) for leaf in self._centre]

    def _wait_for_the_others(self, trainer):
        """Whether all are done; waits at most `timeout_s`, so that a caller hears that it goes
        on."""
        with uninterrupted(), self._changed:
            member, now = self._present(trainer), time.monotonic()
            if member.state == "here":  # the first time that it says so
                member.state, member.seen = "done", now
                self._settle()
            since = member.seen
        over = lambda: member.state == "finished" or time.monotonic() >= now + self.timeout_s
        self._wait(trainer, since, over, self._awaited)
        with uninterrupted(), self._changed:
            if member.state != "finished":
                self._told_to_ask_again.add(trainer)
            return member.state == "finished"

    def _settle(self):
        if not self._awaited() and not self._failure and not any(map(self._lacks, self._members)):
            for member in self._members:
                member.state = "finished" if member.state == "done" else member.state
        self._changed.notify_all()

    def _transfer(self, trainer):
        """Waits until the slowest server has got and sent its tensors, behind what it had to do."""
        if self._bytes_per_s is None:
            return
        with uninterrupted(), self._changed:
            self._free_at = queued(self._free_at, self._bytes_of, self._bytes_per_s, time.monotonic())
            # The slowest server decides, as a round needs all tensors.
            until = max(self._free_at)
        while (left := until - time.monotonic()) > 0:
            wait(self._changed, functools.partial(self._is_hindered, trainer), min(left, self._nap))

    def _is_hindered(self, trainer):
        """Raises what a trainer in a transfer must hear; it may leave meanwhile."""
        self._present(trainer)
        self._raise_failure(trainer)
        self._members[trainer].seen = time.monotonic()
        return False


def _remembered(fresh, memory, rule):
    """What a rule shares at the beginning: the memory, which must be alike, or the fresh one."""
    if memory is None:
        return fresh
    try:
        check_same(fresh, memory, "the memory")
    except ValueError as error:
        raise ValueError(
            f"{error} Give {rule.describe()} what a transport of the same rule and parameters had as its memory."
        ) from None
    bad = [name for name, leaf in jax.tree_util.tree_leaves_with_path(memory) if not np.isfinite(leaf).all()]
    if bad:
        raise ValueError(f"the memory holds nan or inf at {jax.tree_util.keystr(bad[0])}: begin without it.")
    return jax.tree.unflatten(jax.tree.structure(fresh), [np.array(leaf) for leaf in jax.tree.leaves(memory)])


def _on_host(tree):
    """A tree that keeps no array on a device but keys, whom a step could donate."""
    is_key = lambda leaf: jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    copied = lambda leaf: np.array(leaf) if isinstance(leaf, jax.Array) and not is_key(leaf) else leaf
    return jax.tree.map(copied, tree)


def queued(free_at: list[float], sizes: list[int], bytes_per_s: float, now: float) -> list[float]:
    """When each server will be free that gets so many bytes now, behind what it has to do already.

    >>> queued([0.0, 5.0], [10, 10], bytes_per_s=10.0, now=3.0)
    [4.0, 6.0]
    """
    return [max(now, at) + size / bytes_per_s for at, size in zip(free_at, sizes, strict=True)]


def pack(sizes: list[int], bins: int) -> list[int]:
    """Spreads things over bins: the largest first, each to the bin that is emptiest so far.

    >>> pack([1, 5, 3, 3], 2)
    [0, 0, 1, 1]
    """
    load, place = [0] * bins, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        place[number] = load.index(min(load))
        # The largest first: what is left for the end is small, and fills up what is uneven.
        load[place[number]] += sizes[number]
    return place


def _brought(template, before, trainer):
    """The leaves and R of what a trainer brings."""
    rows = replicas_in(template, before, f"what trainer {trainer} brings")
    if rows is None:
        raise ValueError(f"what trainer {trainer} brings has no replica axis: bring leaves [R, ...].")
    return [leaf.astype(wide(leaf.dtype), copy=False) for leaf in floating(before)], rows
