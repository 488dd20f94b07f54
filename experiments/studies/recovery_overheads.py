"""The picture of what recoveries cost, arm by arm, from the results of tests/soak/cluster_failures.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from main.cli import stacked_bars
from main.report import number

ARMS = ("none", "full", "vanilla", "mfu", "ssu")
PARTS = ("noticing", "starting", "restoring", "resuming", "repeating")


def finding_overheads(results: Mapping[str, Any]) -> str:
    """Return the caption of the picture of all arms."""
    percent = {arm: results[f"{arm}_overhead_percent"] for arm in ARMS if arm != "none"}
    each = ", ".join(f"{arm} {number(value, 3)} %" for arm, value in sorted(percent.items(), key=lambda one: one[1]))
    return f"Measured overhead, kills in each arm: {results['full_kills']}. {each}"


def draw_overheads(path: Path, results: Mapping[str, Any]) -> None:
    """Draw the parts of the overhead of each arm."""
    parts = {
        f"{arm}: {number(results[f'{arm}_overhead_percent'], 3)} % in all": {
            part: results[f"{arm}_{part}_percent"] for part in (*PARTS, "saving")
        }
        for arm in ARMS if arm != "none"
    }  # fmt: skip
    stacked_bars(path, parts, "parts, % of the time of none", finding_overheads(results))
