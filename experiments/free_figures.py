"""What free trainers have done, in a stretch and in all."""

from typing import Any

import jax
import numpy as np

from jaxrec.shadowsync import Figures


def metrics_of(seen: list[dict], figures: Figures, lost: int) -> dict[str, Any]:
    """What hooks are told of a stretch, from the metrics of its steps."""
    found = jax.device_get([(metrics["loss"], metrics["weight"]) for metrics in seen])
    losses, weights = np.array(found, np.float64).reshape(-1, 2).T
    rounds = sum(figures.rounds)
    return {
        "loss": float(np.average(losses, weights=weights if weights.any() else None)) if seen else float("nan"),
        "examples": figures.examples,
        "rounds": rounds,
        "average_sync_gap": sum(figures.steps) / rounds if rounds else float("inf"),
        "replica_spread": figures.replica_spread,
        "seconds": figures.seconds,
        "batches_lost": lost,
    }


class Sums:
    """The figures of all stretches."""

    def __init__(self, trainers, past):
        zeros = {name: [0] * trainers for name in ("steps", "rounds", "bytes")}
        past = past or {}
        self._lists = {name: list(past.get(name, zero)) for name, zero in zeros.items()}
        wrong = [name for name, values in self._lists.items() if len(values) != trainers]
        if wrong:
            raise ValueError(f"past has {wrong} of another number of trainers than {trainers}.")
        self._spread, self._lost = past.get("replica_spread"), past.get("batches_lost", 0)
        self._dropped = list(past.get("dropped", []))

    def add(self, figures: Figures, lost: int) -> None:
        """Counts a stretch."""
        for name, sums in self._lists.items():
            self._lists[name] = [a + b for a, b in zip(sums, getattr(figures, name), strict=True)]
        self._spread, self._lost = figures.replica_spread, self._lost + lost
        self._dropped += [f"trainer {i}: {type(error).__name__}: {error}" for i, error in figures.failures.items()]

    def as_json(self) -> dict[str, Any]:
        """As JSON values."""
        steps, rounds = (sum(self._lists[name]) for name in ("steps", "rounds"))
        return self._lists | {
            "average_sync_gap": steps / rounds if rounds else None,
            "replica_spread": self._spread,
            "batches_lost": self._lost,
            "dropped": self._dropped,
        }
