"""Models of the click job as pure functions: Linen and NNX, built-in ones and one's own from a file."""

import dataclasses
import itertools

import evaluate
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import train
from equality import same
from flax import nnx
from main.click_data import click_job, synthetic_clicks
from main.config import config_of
from main.model import as_functions, keep_copy, make_model, own_model

from jaxrec import Serial, adagrad
from jaxrec.models import DNN
from jaxrec.oac import Pipeline

CARDINALITIES, WIDTH = (40, 9, 7), 4
OF_FILE = """
import flax.linen as nn
import jax.numpy as jnp
from beside import nnx

def joined(dense, activations):
    return jnp.concatenate([dense, activations.reshape(len(dense), -1)], axis=1)

class Normed(nnx.Module):
    def __init__(self, dense_features, fields, width, *, rngs):
        size = dense_features + fields * width
        self.norm = nnx.BatchNorm(size, momentum=0.9, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(size, 16, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)])

    def __call__(self, dense, activations):
        return self.layers[1](nnx.relu(self.layers[0](self.norm(joined(dense, activations)))))[:, 0]

class Net(Normed):
    def __init__(self, dense_features, fields, width, *, rngs):
        super().__init__(dense_features, fields, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, dense, activations):
        return self.layers[1](self.dropout(nnx.relu(self.layers[0](self.norm(joined(dense, activations))))))[:, 0]

class Counted(Normed):
    def __call__(self, dense, activations, counts=None):
        x = self.norm(joined(dense, activations), mask=None if counts is None else counts[:, None])
        return self.layers[1](nnx.relu(self.layers[0](x)))[:, 0]

class Clicks(nn.Module):
    size: int = 16

    @nn.compact
    def __call__(self, dense, activations, train=False, counts=None):
        mask = None if counts is None else counts[:, None]
        x = nn.BatchNorm(not train, momentum=0.9)(joined(dense, activations), mask=mask)
        x = nn.Dropout(0.5, deterministic=not train)(nn.relu(nn.Dense(self.size)(x)))
        return nn.Dense(1)(x)[:, 0]

class Bare(nn.Module):
    @nn.compact
    def __call__(self, dense, activations):
        return nn.Dense(1)(nn.relu(nn.Dense(16)(joined(dense, activations))))[:, 0]

class Strict(nn.Module):
    @nn.compact
    def __call__(self, dense, activations, train, counts):
        return nn.Dense(1)(nn.Dropout(0.5, deterministic=not train)(joined(dense, activations)))[:, 0]

class Needs(nn.Module):
    size: int

wider = Clicks(32)

def made():
    return Clicks(8)

three = 3
"""
EXAMPLES = jnp.zeros((1, 13)), jnp.zeros((1, len(CARDINALITIES), WIDTH))
DATA = synthetic_clicks(CARDINALITIES, 64, 40, seed=0, test_batches=1)


@pytest.fixture
def file(tmp_path):
    (tmp_path / "beside.py").write_text("from flax import nnx\n")
    (tmp_path / "mine.py").write_text(OF_FILE)
    return tmp_path / "mine.py"


def job_of(model):
    return click_job(CARDINALITIES, model, optax.adam(0.01), adagrad(0.1), WIDTH, shards=2)


def inputs(seed, size=32):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(2, 3, (size, 13)).astype(np.float32),
        rng.standard_normal((size, len(CARDINALITIES), WIDTH), np.float32),
    )


@pytest.mark.parametrize("word", ["Net", "Normed", "Counted", "Clicks", "Strict", "Bare", "wider", "made"])
def test_a_model_of_ones_own_learns_and_predicts_without_chance(file, word):
    model = own_model(f"{file}:{word}")
    job, given = job_of(model), as_functions(model, EXAMPLES)
    assert given.random == (word not in ("Normed", "Counted", "Bare")) and given.changes == (
        word not in ("Strict", "Bare")
    )
    assert (job.task.seed is not None) == given.random
    with Serial(job.task, job.state("host", 0)) as engine:
        losses = [float(metrics["loss"]) for _, metrics in engine.run(DATA.train(0))]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.02
    batch, predict = next(DATA.test()), job.eval_step()
    assert same(predict(engine.state, batch), predict(engine.state, batch))
    first, last = job.init(0), jax.tree.map(lambda leaf: leaf[0], engine.state.dense.params)
    moved = jax.tree.map(lambda a, b: bool((np.asarray(a) != np.asarray(b)).any()), first, last)
    assert all(jax.tree.leaves(moved))  # statistics too


def test_an_nnx_class_as_functions_is_what_nnx_itself_computes(file):
    """In training with the statistics that it leaves behind, and in prediction."""
    make = own_model(f"{file}:Normed")
    model = make(13, len(CARDINALITIES), WIDTH, rngs=nnx.Rngs(5))
    given = as_functions(make, EXAMPLES)
    variables = given.init(5)
    model.train()
    for seed in range(3):
        wanted = model(*inputs(seed))
        logit, new = given.train(variables, None, None, *inputs(seed))
        np.testing.assert_allclose(logit, wanted, rtol=1e-5, atol=1e-6)
        variables |= new
    model.eval()
    np.testing.assert_allclose(given.predict(variables, *inputs(9)), model(*inputs(9)), rtol=1e-5, atol=1e-6)
    before = given.predict(given.init(5), *inputs(9))  # negative control: the statistics count
    assert not np.allclose(before, model(*inputs(9)), atol=1e-2)


@pytest.mark.parametrize("word", ["Net", "Clicks"])
def test_numbers_are_drawn_by_the_key_alone(file, word):
    given = as_functions(own_model(f"{file}:{word}"), EXAMPLES)
    variables, counts = given.init(0), np.ones(32, bool)
    draw = lambda seed: np.asarray(given.train(variables, counts, jax.random.key(seed), *inputs(0))[0])
    assert same(draw(1), draw(1)) and not np.allclose(draw(1), draw(2))


@pytest.mark.parametrize("word", ["Net", "Clicks"])
def test_under_oac_the_bits_are_those_of_one_batch_at_a_time(file, word):
    job = job_of(own_model(f"{file}:{word}"))
    found = []
    for engine_of in (Serial, lambda *given: Pipeline(*given, window=3)):
        with engine_of(job.task, job.state("host", 0)) as engine:
            engine.train(itertools.islice(DATA.train(0), 12))
            found.append(jax.tree.map(np.asarray, engine.state.dense))
    assert same(*found)


@pytest.mark.parametrize(("word", "statistics"), [("Clicks", "batch_stats"), ("Counted", "state")])
def test_padding_leaves_the_statistics_as_they_are(file, word, statistics):
    job, batch = job_of(own_model(f"{file}:{word}")), next(DATA.train(0))
    weight = (np.arange(64) < 48).astype(np.float32)
    other = batch._replace(weight=weight, dense=np.where(weight[:, None] > 0, batch.dense, 50).astype(np.float32))
    one, two = (
        job.task.step(job.state("host", 0), each)[0].dense.params[statistics]
        for each in (batch._replace(weight=weight), other)
    )
    assert same(jax.device_get(one), jax.device_get(two))
    full, _ = job.task.step(job.state("host", 0), batch)  # negative control
    assert not same(jax.device_get(one), jax.device_get(full.dense.params[statistics]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine.py:Nothing", "Nothing is not there; it must be a flax.linen Module"),
        ("mine.py:three", "three is 3; it must be"),
        ("mine.py:joined", "mine.py:joined: TypeError: .* missing 2 required positional arguments"),
        ("mine.py:Needs", "mine.py:Needs: TypeError: .* missing 1 required positional argument: 'size'"),
        ("lost.py:Net", "lost.py:Net: ModuleNotFoundError: No module named 'nowhere'"),
        ("wrong.py:Net", "wrong.py:Net: SyntaxError: invalid syntax"),
        ("other.py:Net", "there is no file .*other.py"),
    ],
)
def test_what_is_no_model_is_refused(file, name, message):
    file.with_name("lost.py").write_text("import nowhere")
    file.with_name("wrong.py").write_text("class Net: pass pass")
    with pytest.raises(ValueError, match=message):
        own_model(str(file.parent / name))


@pytest.mark.parametrize(
    ("name", "flags", "flag"),
    [
        ("lr", {"dropout": 0.1}, "dropout"),
        ("fm", {"layers": (3,)}, "layers"),
        ("lr", {"batch_norm": True}, "batch-norm"),
        ("mine.py:Net", {"activation": "gelu"}, "activation"),
    ],
)
def test_flags_of_layers_are_refused_where_nothing_reads_them(name, flags, flag):
    with pytest.raises(ValueError, match=f"leave out --{flag}"):
        make_model(name, 4, **flags)


def test_flags_of_layers_reach_the_model():
    found = make_model("deepfm", 4, layers=(8, 3), activation="tanh", dropout=0.2, batch_norm=True)
    assert (found.tower, found.dropout, found.batch_norm, found.activation) == ((8, 3), 0.2, True, nn.tanh)
    assert make_model("dlrm", 4, layers=(8,)).top == (8, 1) and make_model("dnn", 4) == DNN((512, 256))
    assert make_model("finalmlp", 4, layers=(16,)).towers == ((16,), (16,))


@pytest.mark.parametrize(
    "flags", [{"dropout": 1.0}, {"dropout": -0.1}, {"layers": (8, 0)}, {"layers": ()}, {"model": "dcn"}]
)
def test_flags_out_of_range_are_refused_before_a_run_begins(flags):
    with pytest.raises(ValueError, match="dropout|layers|model='dcn' must be one of"):
        config_of(**flags).check()


@pytest.mark.parametrize("flags", [{"dropout": 0.1}, {"batch_norm": True}])
def test_free_running_trainers_refuse_what_they_cannot_train(flags):
    free = {"tables": "host", "shadowsync": "ma", **flags}
    with pytest.raises(ValueError, match=f"--{next(iter(flags)).replace('_', '-')} .*is for one trainer"):
        config_of(**free).check()
    config_of(**free, where="lockstep").check()


@pytest.mark.parametrize("word", ["Net", "Normed"])
def test_free_running_trainers_refuse_a_model_that_draws_or_has_statistics_before_they_begin(file, word):
    config = config_of(preset="smoke", rows=500, tables="host", shadowsync="ma", model=f"{file}:{word}").check()
    with pytest.raises(ValueError, match=f"mine.py:{word} has dropout or batch norm, which free-running trainers"):
        config.job(DATA)
    config_of(preset="smoke", rows=500, tables="host", shadowsync="ma", model=f"{file}:Bare").job(DATA)


def test_a_check_of_the_flags_runs_no_file(file):
    """It may start JAX, before the run has claimed its devices."""
    file.write_text("raise SystemExit('ran')")
    config_of(model=f"{file}:Net").check()


def test_a_file_may_change_until_something_is_trained(file, tmp_path):
    keep_copy(f"{file}:Net", tmp_path)
    file.write_text("x = 1")
    keep_copy(f"{file}:Net", tmp_path)
    assert (tmp_path / "model.py").read_text() == "x = 1"
    (tmp_path / "metrics.jsonl").write_text("{}")
    file.write_text("x = 2")
    with pytest.raises(
        ValueError, match=r"mine.py has changed since the run in .* began, which has kept it as .*model.py"
    ):
        keep_copy(f"{file}:Net", tmp_path)


def test_a_driver_of_more_trainers_than_devices_opens_its_data():
    """Its trainers have devices of their own, in their processes."""
    flags = {"tables": "host", "shadowsync": "ma", "where": "processes", "trainers": 9}
    assert train.data_of(config_of(preset="smoke", rows=500, **flags)).steps > 0


def test_the_main_job_trains_and_evaluates_a_model_of_ones_own_as_it_was(file, tmp_path, monkeypatch):
    flags = {"preset": "smoke", "rows": 500, "batch_size": 64, "steps": 12, "evaluations": 2, "embedding_width": 4}
    monkeypatch.chdir(file.parent)
    config, opened = config_of(**flags, tables="host", model="mine.py:Net", workdir=tmp_path / "run"), train.data_of
    monkeypatch.chdir(tmp_path.parent)

    def changed_meanwhile(config):
        file.write_text("this is no Python any more")
        return opened(config)

    monkeypatch.setattr(train, "data_of", changed_meanwhile)
    trained = train.main(config)
    look = evaluate.Config(tmp_path / "run", workdir=tmp_path / "look")
    assert evaluate.main(look)["auc"] == pytest.approx(trained["test_auc"], abs=1e-6)
    with pytest.raises(ValueError, match="mine.py has changed since the run in .* began"):
        train.main(dataclasses.replace(config, resume=True))
    file.write_text((tmp_path / "run" / "model.py").read_text())
    train.main(dataclasses.replace(config, resume=True))  # complete: nothing is left to do
