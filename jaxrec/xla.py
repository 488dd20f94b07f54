"""Two faults of XLA on CPUs that `import jaxrec` steers around, and the look at whether it has.

From jaxlib 0.11.0 on, and in 0.10.2, XLA:CPU fuses a product and the sum over it in its YNNPACK path, and the fused
program reads memory that was never written: `((E @ W) * E).sum()` with E f32[512, 8, 32] is NaN or 1e30, another value
in each run, without a word. The flag keeps that one fusion off, and fast products on.

A collective over virtual devices holds a thread of XLA's pool for each device until the last has come. The pool has no
more threads than there are cores or devices: where another program holds one of them, the last device never comes, and
XLA ends the process.
"""

import functools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np

_NAME = "xla_cpu_experimental_ynn_fusion_type"
FLAG = f"--{_NAME}=-reduce"
# XLA ends a process whose flags it does not know: these know it, and later ones have not been tried.
_KNOWN_FROM, _KNOWN_BELOW = (0, 10), (0, 13)
_BATCH, _FEATURES, _WIDTH = 512, 8, 32


def with_flag(flags: str, version: tuple[int, ...]) -> str:
    """What XLA_FLAGS has to say: what it said, and the flag, unless that was set before or is not known.

    >>> with_flag("--xla_dump_to=here", (0, 12, 0))
    '--xla_dump_to=here --xla_cpu_experimental_ynn_fusion_type=-reduce'
    >>> with_flag("--xla_cpu_experimental_ynn_fusion_type=+reduce", (0, 12, 0)), with_flag("", (0, 13, 0))
    ('--xla_cpu_experimental_ynn_fusion_type=+reduce', '')
    """
    if _NAME in flags or not _KNOWN_FROM <= version[:2] < _KNOWN_BELOW:
        return flags
    return f"{flags} {FLAG}".strip()


def avoid_faults() -> None:
    """Sets the flag and the threads for this process, if JAX has computed nothing yet, and for those that it starts."""
    os.environ["XLA_FLAGS"] = with_flag(os.environ.get("XLA_FLAGS", ""), jax.__version_info__)
    enough_threads(virtual_devices(os.environ["XLA_FLAGS"]))


def enough_threads(devices: int) -> None:
    """Asks XLA for a pool that collectives over so many virtual devices leave room in, unless one was asked for before.

    Args:
      devices: virtual devices of the CPU, as JAX will be asked for before it computes anything.
    """
    if devices > 1:
        os.environ.setdefault("PJRT_NPROC", str(max(os.cpu_count() or 1, 2 * devices + 2)))


def virtual_devices(flags: str) -> int:
    """How many devices of the CPU XLA_FLAGS asks for.

    >>> virtual_devices("--xla_a=1 --xla_force_host_platform_device_count=8"), virtual_devices("")
    (8, 1)
    """
    asked = re.findall(r"--xla_force_host_platform_device_count=(\d+)", flags)
    return int(asked[-1]) if asked else 1


@functools.cache
def check_fusion(platform: str) -> None:
    """Runs the faulty pattern once in this process, in about 50 ms.

    Args:
      platform: of the devices of a step, as "cpu"; others have no such fusion.

    Raises:
      RuntimeError: XLA computes it wrongly; names the flag.
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
