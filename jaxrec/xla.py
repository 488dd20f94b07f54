"""Workarounds for two faults of XLA on CPUs, applied by `import jaxrec`, and a check that the first is effective.

In jaxlib 0.10.2 and from 0.11.0 on, the YNNPACK path of XLA:CPU fuses a product with a sum over it, and the fused
program reads uninitialised memory: `((E @ W) * E).sum()` with E f32[512, 8, 32] is silently NaN or 1e30, with another
value in each run. The flag disables this fusion only; matrix products stay fast.

A collective over virtual devices blocks one thread of XLA's pool per device until all devices have joined. The pool has
only as many threads as there are cores or devices: if another program holds one of them, the last device never joins,
and XLA aborts the process.
"""

import functools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np

_NAME = "xla_cpu_experimental_ynn_fusion_type"
FLAG = f"--{_NAME}=-reduce"
# XLA aborts the process on an unknown flag: these versions know it, later ones have not been tried.
_KNOWN_FROM, _KNOWN_BELOW = (0, 10), (0, 13)
_BATCH, _FEATURES, _WIDTH = 512, 8, 32


def with_flag(flags: str, version: tuple[int, ...]) -> str:
    """Return XLA_FLAGS with the flag appended, unless it is set already or this jaxlib version does not know it.

    >>> with_flag("--xla_dump_to=here", (0, 12, 0))
    '--xla_dump_to=here --xla_cpu_experimental_ynn_fusion_type=-reduce'
    >>> with_flag("--xla_cpu_experimental_ynn_fusion_type=+reduce", (0, 12, 0)), with_flag("", (0, 13, 0))
    ('--xla_cpu_experimental_ynn_fusion_type=+reduce', '')
    """
    if _NAME in flags or not _KNOWN_FROM <= version[:2] < _KNOWN_BELOW:
        return flags
    return f"{flags} {FLAG}".strip()


def avoid_faults() -> None:
    """Set the flag and the thread pool size for child processes, and for this one if JAX has computed nothing yet."""
    os.environ["XLA_FLAGS"] = with_flag(os.environ.get("XLA_FLAGS", ""), jax.__version_info__)
    enough_threads(virtual_devices(os.environ["XLA_FLAGS"]))


def enough_threads(devices: int) -> None:
    """Set XLA's thread pool size so that collectives over virtual devices leave threads free; keep one set before.

    Args:
      devices: number of virtual CPU devices that JAX will be configured with.
    """
    if devices > 1:
        os.environ.setdefault("PJRT_NPROC", str(max(os.cpu_count() or 1, 2 * devices + 2)))


def virtual_devices(flags: str) -> int:
    """Return the number of CPU devices that XLA_FLAGS requests.

    >>> virtual_devices("--xla_a=1 --xla_force_host_platform_device_count=8"), virtual_devices("")
    (8, 1)
    """
    asked = re.findall(r"--xla_force_host_platform_device_count=(\d+)", flags)
    return int(asked[-1]) if asked else 1


@functools.cache
def check_fusion(platform: str) -> None:
    """Test the faulty pattern, once per process, in about 50 ms.

    Args:
      platform: platform of the step's devices; only "cpu" is affected.

    Raises:
      RuntimeError: XLA computes it wrongly; the error names the flag.
    """
    if platform != "cpu":
        return
    wanted = _BATCH * _FEATURES * _WIDTH * _WIDTH * 0.5
    with jax.ensure_compile_time_eval(), jax.default_device(jax.devices("cpu")[0]):
        found = float(_products(np.ones((_BATCH, _FEATURES, _WIDTH), np.float32), np.float32(0.5)))
    if found != wanted:
        raise RuntimeError(
            f"XLA computes sums over products wrongly here: {found:g} in place of {wanted:g}. `import jaxrec` before "
            f"anything is computed, or start with XLA_FLAGS={FLAG}."
        )


@jax.jit
def _products(x, weight):
    return ((x @ jnp.full((_BATCH, _WIDTH, _WIDTH), weight)) * x).sum()
