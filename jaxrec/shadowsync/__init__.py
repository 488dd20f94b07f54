"""ShadowSync: replicas of the dense parameters synchronised in the background, and their foreground counterparts."""

from jaxrec.shadowsync.emulate import ALL_REDUCE, Emulation, Script
from jaxrec.shadowsync.rules import Rule, bmuf, easgd, mean_of, model_averaging
from jaxrec.shadowsync.shadow import Foreground, Shadow, spread
from jaxrec.shadowsync.trainers import Figures, train_freely
from jaxrec.shadowsync.transport import AllToAll, Centre, Left, Transport

__all__ = [
    "ALL_REDUCE", "AllToAll", "Centre", "Emulation", "Figures", "Foreground", "Left", "Rule", "Script", "Shadow",
    "Transport",
    "bmuf", "easgd", "mean_of", "model_averaging", "spread", "train_freely",
]  # fmt: skip
