"""Versions, commit, device, processor and load: what a figure depends on beside its configuration."""

import contextlib
import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

_VERSIONS = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "numba", "torch", "fbgemm-gpu-cpu")


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
        "cpu": _cpu(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "date": datetime.date.today().isoformat(),
    }


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu():
    """The model of the processor; what Python knows of it where there is no /proc."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


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
