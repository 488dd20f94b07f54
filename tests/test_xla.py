"""Sums that XLA miscomputes on CPUs are right if jaxrec is imported first, and refused if it was imported too late.

Virtual devices get enough threads to wait for each other.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from click_model import loss

import jaxrec
from jaxrec import Batch
from jaxrec.embedding import sgd
from jaxrec.xla import FLAG

ROOT = Path(__file__).parent.parent
SPEC = jaxrec.EmbeddingSpec({"item": jaxrec.Table(50, 4)}, {"item": jaxrec.Lookup("item")}, shards=2)

# Whether a sum over a product, and the sum of JAX's issue 39103, are right.
PATTERNS = """
import jax, jax.numpy as jnp, numpy as np
x, rows = np.ones((512, 8, 32), np.float32), np.arange(32_769, dtype=np.float32)[:, None] * [1, 0, 0]
products = jax.jit(lambda x, w: ((x @ jnp.full((512, 32, 32), w)) * x).sum())(x, 0.5)
squares = jax.jit(jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2)))(rows.astype(np.float32))[-1]
found = abs(float(products) / 2**21 - 1) < 1e-5, abs(float(squares) / 2**30 - 1) < 1e-5
print(jax.__version__, *found)
"""
LATE = """
import jax.numpy as jnp
jnp.ones(3).block_until_ready()
import optax, jaxrec
from jaxrec.embedding import sgd
spec = jaxrec.EmbeddingSpec({"item": jaxrec.Table(9, 2)}, {"item": jaxrec.Lookup("item")})
task = jaxrec.Task(spec, lambda *given: given[2].label, optax.sgd(0.1), sgd(0.1))
batch = jaxrec.Batch({"item": jnp.array([3])}, jnp.ones(1))
try:
    task.step(task.init({}), batch)
except RuntimeError as error:
    print(error)
"""


# Number of threads in XLA's pool, and number of devices.
POOL = """
import jax, pathlib
devices = len(jax.devices())
names = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
print(names.count("tf_XLAEigen"), devices)
"""


def printed(program, flags=""):
    """Output of a process that starts with these XLA flags."""
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.process
def test_sums_over_products_are_right_after_the_import_alone():
    version, *right = printed(PATTERNS).split()
    assert right[0] == "False", f"jax {version} is right without the flag: leave it out where it is not needed"
    assert printed("import jaxrec" + PATTERNS).split()[1:] == ["True", "True"]
    own = "--xla_cpu_experimental_ynn_fusion_type=-reduce,-dot"  # the user's value is kept
    assert printed("import jaxrec, os" + PATTERNS + "print(os.environ['XLA_FLAGS'])", own).split()[-1] == own


@pytest.mark.process
@pytest.mark.gate
def test_a_step_is_refused_where_jax_had_begun_without_the_flag():
    assert "computes sums over products wrongly" in (said := printed(LATE)) and FLAG in said
    assert printed(LATE, FLAG) == ""


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the names of threads are in /proc")
def test_virtual_devices_come_with_threads_enough_to_wait_for_each_other(monkeypatch):
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    flags, cores = "--xla_force_host_platform_device_count=4", os.cpu_count() or 1
    assert printed(POOL, flags) == f"{max(cores, 4)} 4\n", "XLA makes more threads by itself: leave ours out"
    assert printed("import jaxrec" + POOL, flags) == f"{max(cores, 10)} 4\n"
    assert printed("import jaxrec" + POOL) == f"{cores} 1\n"
    monkeypatch.setenv("PJRT_NPROC", "5")  # the user's value is kept
    assert printed("import jaxrec" + POOL, flags) == "5 4\n"


def test_they_are_right_in_this_process_and_in_those_that_it_starts():
    found = jax.jit(lambda x: ((x @ jnp.full((512, 32, 32), 0.5)) * x).sum())(np.ones((512, 8, 32), np.float32))
    assert found == 2**21 and FLAG in os.environ["XLA_FLAGS"]


class Own(jaxrec.Task):
    """A task with an update of its own, as in docs/recipes.md."""

    def update(self, *given):
        return super().update(*given)


def step_of(home, loss=loss, kind=jaxrec.Task):
    task = kind(SPEC, loss, optax.sgd(0.1), sgd(0.1))
    batch = Batch({"item": np.arange(8, dtype=np.int32) % 5}, np.ones(8, np.float32))
    return task, task.init({"w": jnp.ones(4)}, home), batch


@pytest.mark.parametrize("kind", [jaxrec.Task, Own])
@pytest.mark.parametrize("home", ["host", "device"])
def test_a_step_is_checked_against_itself_without_compilation(home, kind):
    task, state, batch = step_of(home, kind=kind)
    before = jax.tree.map(np.array, state.dense)
    assert jaxrec.check_step(task, state, batch) < 1e-5
    jax.tree.map(np.testing.assert_array_equal, before, state.dense)


def test_a_loss_that_computes_something_else_when_it_is_compiled_is_found():
    wrong = lambda params, activations, batch: (
        loss(params, activations, batch)
        * (1.01 if isinstance(params["w"], jax.core.Tracer) and not jax.config.jax_disable_jit else 1.0)
    )
    with pytest.raises(ArithmeticError, match=r"the compiled step differs from the plain one by .*e-0[123] of"):
        jaxrec.check_step(*step_of("host", wrong))
