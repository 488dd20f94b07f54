"""Scripts written from README, `help` and docstrings alone run unchanged, learn, and are short.

The third script, a ShadowSync group around a Flax NNX classifier, is in test_group.py.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
THE_WORK = """
import jax.numpy as jnp, numpy as np, optax, jaxrec
from jaxrec.embedding import rowwise_adagrad
from jaxrec.oac import Pipeline

spec = jaxrec.EmbeddingSpec(
    {"user": jaxrec.Table(300, 8), "item": jaxrec.Table(200, 8)}, {"pair": jaxrec.Lookup(("user", "item"))}
)
taste = np.random.default_rng(0).normal(size=(500, 2))

def batch(number):
    ids = np.random.default_rng(number).integers(0, [300, 200], (256, 2))
    label = (taste[ids[:, 0]] * taste[300 + ids[:, 1]]).sum(1) > 0
    return jaxrec.Batch({"pair": ids}, label)

def predict(params, activations, batch):
    return activations["pair"].prod(1).sum(-1) + params["bias"]

def loss(params, activations, batch):  # a hinge
    return jnp.maximum(0, 1 - (2 * batch.label - 1) * predict(params, activations, batch))

task = jaxrec.Task(spec, loss, optax.adam(1e-2), rowwise_adagrad(0.1))
state = task.init({"bias": jnp.zeros(())}, "host")
"""

UNDER_OAC = """
from jaxrec import evaluate, every, planned
held_out, predictions = [batch(1000 + n) for n in range(4)], jaxrec.make_eval_step(spec, predict)
def report(info):
    pipeline.drain()
    print(info.metrics["loss"], evaluate(info.state, planned(spec, held_out), predictions)["auc"])
with Pipeline(task, state, [every(100, report)], window=4) as pipeline:
    pipeline.train(map(batch, range(300)))
"""

WITH_CPR = """
from jaxrec.cpr import Recovery, measure_costs, mfu, plan_recovery
state, costs = measure_costs(state, "run", mtbf_hours=0.5, total_hours=1, reschedule_hours=0.01)
saves = plan_recovery(costs, target_pls=0.1).in_steps(seconds_per_step=12)
recovery = Recovery("run", **saves, scheme=mfu(), failures={200: [2, 5]})
with Pipeline(task, state, [recovery], window=4) as pipeline:
    losses = [metrics["loss"] for _, metrics in pipeline.run(map(batch, range(300)))]
print(*losses[-20:])
print(recovery.failed, recovery.pls, recovery.saves)
"""

UNTRAINED = ("optax.adam(1e-2), rowwise_adagrad(0.1)", "optax.adam(0.0), rowwise_adagrad(0.0)")


def run(directory, text):
    """Runs a script as a user's file in a new process; returns the numbers it prints, line by line."""
    (directory / "mine.py").write_text(text)
    done = subprocess.run([sys.executable, "mine.py"], cwd=directory, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    return [[float(word) for word in line.split()] for line in done.stdout.splitlines()]


def lines(text):
    return [line for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("technique", [UNDER_OAC, WITH_CPR])
def test_each_script_has_less_than_thirty_lines(technique):
    assert len(lines(THE_WORK + technique)) < 30


@pytest.mark.process
def test_a_loss_of_ones_own_is_trained_under_oac_and_evaluated_in_the_middle(tmp_path):
    evaluations = run(tmp_path, THE_WORK + UNDER_OAC)
    assert len(evaluations) == 3 and evaluations[-1][0] < 0.3 and evaluations[-1][1] > 0.97
    assert evaluations[0][1] < evaluations[-1][1]
    control = run(tmp_path, (THE_WORK + UNDER_OAC).replace(*UNTRAINED).replace("range(300)", "range(100)"))
    assert all(value > 0.9 and auc < 0.6 for value, auc in control)


@pytest.mark.process
def test_the_same_with_cpr_around_it_survives_a_failure_of_two_shards(tmp_path):
    losses, (failed, pls, saves) = run(tmp_path, THE_WORK + WITH_CPR)
    assert max(losses) < 0.3 and failed == 2 and 0 < pls < 0.2 and saves >= 4
    # All rows were saved at the end.
    assert [path.name for path in (tmp_path / "run").iterdir() if path.is_dir()] == ["step_00000300"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("there", "given", "wanted"),
    [
        (["3.13", "3.12", "3.11"], {}, "3.13"),
        (["3.12", "3.11"], {}, "3.12"),  # python3.13 is a shim of pyenv that runs nothing
        (["3.13", "3.11"], {"PYTHON": "python3.11"}, "3.11"),
        ([], {}, ""),
    ],
)
def test_make_takes_the_newest_python_that_runs_and_names_it_in_its_first_line(tmp_path, there, given, wanted):
    for version in ("3.13", "3.12", "3.11"):
        # As Python answers `-c` with a program that exits by whether this is the version, or prints it.
        says = f"case $2 in *exit*) echo $2 | grep -q {version};; *) echo {version};; esac"
        shim = tmp_path / f"python{version}"
        shim.write_text(f"#!/bin/sh\n{says if version in there else 'exit 127'}\n")
        shim.chmod(0o755)
    (tmp_path / "python3").symlink_to("python3.11")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYENV_ROOT": str(tmp_path), "HOME": str(tmp_path)} | given
    done = subprocess.run(["make", "-n", "setup"], cwd=ROOT, env=environment, capture_output=True, text=True)
    first = done.stdout.splitlines()[0]
    assert first == (f"Python: python{wanted} {wanted}" if wanted else "Python: none that runs as ''")
