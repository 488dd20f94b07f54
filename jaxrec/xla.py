"""A fault of XLA on CPUs that `import jaxrec` steers around, and the look at whether it has.

From jaxlib 0.11.0 on, and in 0.10.2, XLA:CPU fuses a product and the sum over it in its YNNPACK path, and the fused
program reads memory that nobody has written: `((E @ W) * E).sum()` with E f32[512, 8, 32] is NaN or 1e30, another value
in each run, without a word. The flag keeps that one fusion off, and fast products on.
"""

import functools
import os

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


def avoid_faulty_fusion() -> None:
    """Sets the flag for this process, if JAX has computed nothing yet, and for those that it starts."""
    os.environ["XLA_FLAGS"] = with_flag(os.environ.get("XLA_FLAGS", ""), jax.__version_info__)


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
