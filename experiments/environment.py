"""Versions, commit, device and cores: what a figure depends on beside its configuration."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

_VERSIONS = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "numba", "torch")


def read_environment() -> dict:
    """What this process runs on; `driver` is None where there is no NVIDIA driver, `commit` where
    there is no git."""
    import jax  # here, so that a process may choose its platform after it has imported this file

    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in _VERSIONS},
        "commit": _said("git", "describe", "--always", "--dirty"),
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "driver": _said("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
        "cores": cores(),
        "date": datetime.date.today().isoformat(),
    }


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _said(*command):
    """What a program prints; None if it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
