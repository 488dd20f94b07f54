"""The model of a click job as pure functions: a built-in one by its name, or one's own as `FILE.py:NAME`.

    model = as_functions(make_model("deepfm", 16, dropout=0.2), examples)

A model takes dense features f32[B, N] and activations f32[B, F, E] and returns an output f32[B], such as a logit, or
f32[B, K] for K labels. It is a module of Linen, or a class of NNX, which is made of these sizes.
"""

import functools
import inspect
import itertools
import json
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import InvalidRngError

from jaxrec.files import write_text
from jaxrec.models import DIN, DLRM, DNN, FM, LR, DCNv2, DeepFM, FinalMLP, MMoE, SharedBottom, WideAndDeep

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": nn.relu, "leaky_relu": nn.leaky_relu, "gelu": nn.gelu, "silu": nn.silu, "tanh": nn.tanh,
}  # fmt: skip
OF_SEVERAL_LABELS = ("shared_bottom", "mmoe")
COPY = "model.py"  # in the directory of a run: the file of its model, as it was when the run began


class Model(NamedTuple):
    """A model as pure functions of variables, a dict of 'params' and other collections, and its inputs."""

    init: Callable[[int], Any]  # seed -> variables
    predict: Callable[..., jax.Array]  # (variables, *inputs) -> output f32[B] or f32[B, K]
    train: Callable[..., tuple]  # (variables, counts bool[B], rng, *inputs) -> (output, {collection: new value})
    random: bool  # whether `train` needs rng; else that is None
    changes: bool  # whether there are other collections than 'params'
    shape: tuple[int, ...]  # of the output of one example


def make_model(name: str, width: int, **flags: Any) -> Any:
    """Build a model of the usual size; 'small_dlrm' is for many short runs.

    'dcnv2_mlperf' at width 128 is that of MLPerf Training; its rank, 512 there, is 4 * width. In 'lr', 'fm',
    'wide_deep' and 'deepfm' the first number of a row, projected if its table has another width, is the weight of its
    category.

    Args:
      name: built-in model, or FILE.py:NAME.
      width: E.
      flags: `layers`, sizes of the tower (of DLRM, that after the interaction; of shared_bottom and mmoe, the common
        ones), or of each of two; `activation`, `dropout` and `batch_norm` of all layers of towers; `experts` of mmoe,
        and `labels`, K.

    Returns:
      A Linen module, or a class of NNX.
    """
    return _maker(name, width, **flags)()


def _maker(
    name: str,
    width: int,
    layers: Sequence[int] | None = None,
    activation: str = "relu",
    dropout: float = 0.0,
    batch_norm: bool = False,
    experts: int | None = None,
    labels: int = 1,
) -> Callable[[], Any]:
    """Return what builds a model, after a check of its name and flags."""
    own = is_own(name)
    sized = layers or ((64,) if name == "small_dlrm" else (200, 80) if name == "din" else (512, 256))
    how: dict[str, Any] = {"activation": ACTIVATIONS[activation], "dropout": dropout, "batch_norm": batch_norm}
    models: dict[str, Callable[[], nn.Module]] = {
        "dlrm": lambda: DLRM((512, 256, 64, width), (*sized, 1), **how),
        "dcnv2": lambda: DCNv2(cross_layers=3, tower=sized, **how),
        "dcnv2_mlperf": lambda: DCNv2(
            3, 4 * width, layers or (1024, 1024, 512, 256), parallel=False, bottom=(512, 256, width), **how
        ),
        "small_dlrm": lambda: DLRM((64, width), (*sized, 1), **how),
        "lr": LR,
        "fm": FM,
        "dnn": lambda: DNN(sized, **how),
        "wide_deep": lambda: WideAndDeep(sized, **how),
        "deepfm": lambda: DeepFM(sized, **how),
        "finalmlp": lambda: FinalMLP((sized, sized), **how),
        "din": lambda: DIN(sized, **how),
        "shared_bottom": lambda: SharedBottom(labels=labels, bottom=sized, **how),
        "mmoe": lambda: MMoE(labels=labels, experts=experts or 8, expert=sized, **how),
    }
    if name not in models and not own:
        raise ValueError(f"model={name!r} must be one of {', '.join(models)}, or FILE.py:NAME.")
    if experts and name != "mmoe":
        raise ValueError(f"model={name!r} has no experts: leave out --experts, or give --model mmoe.")
    if own or name in ("lr", "fm"):
        given = {"layers": layers, "activation": activation != "relu", "dropout": dropout, "batch_norm": batch_norm}
        for flag in (flag for flag, value in given.items() if value):
            why = "has its layers from its file" if own else "has no towers"
            raise ValueError(f"model={name!r} {why}: leave out --{flag.replace('_', '-')}.")
    return functools.partial(own_model, name) if own else models[name]


def model_of(flags: Mapping[str, Any], width: int, labels: int = 1) -> Any:
    """Build the model of the flags of a run for K labels; flags that an older run lacks have their defaults."""
    return _maker(flags["model"], width, labels=labels, **_given(flags))()


def check_model(flags: Mapping[str, Any], width: int) -> None:
    """Raise ValueError if there is no such model; a file is not run yet, as it may start JAX."""
    _maker(flags["model"], width, **_given(flags))
    if is_own(flags["model"]):
        _file_of(flags["model"])


def _given(flags):
    names = ("layers", "activation", "dropout", "batch_norm", "experts")
    return {name: flags[name] for name in names if name in flags}


def is_own(name: str) -> bool:
    """Whether a model is FILE.py:NAME."""
    return ".py:" in name


def _file_of(name: str) -> Path:
    path = Path(name.rpartition(":")[0])
    if not path.is_file():
        raise ValueError(f"--model {name}: there is no file {path}.")
    return path


def own_model(name: str) -> Any:
    """Return NAME of FILE.py: a Linen module, or what NAME makes of it without arguments; or a class of NNX."""
    path, word = _file_of(name), name.rpartition(":")[2]
    try:
        found = getattr(_module(path, path.read_text(), _beside(path)), word, None)
        if isinstance(found, type) and issubclass(found, nnx.Module):
            return found
        made = found() if callable(found) and not isinstance(found, nn.Module) else found
    except Exception as error:
        raise ValueError(f"--model {name}: {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"--model {name}: {word} is {'not there' if found is None else repr(made)[:80]}; it must be a flax.linen "
            "Module, a function that makes one, or a class of flax.nnx."
        )
    return made


@functools.cache
def _module(path: Path, text: str, beside: Path) -> Any:
    """Run a file, once for each text that it has had; `beside` is the directory of what it imports."""
    module = types.ModuleType(f"model_of_{path.stem}_{abs(hash((path, text))):x}")
    sys.modules[module.__name__] = module  # which dataclasses look up
    sys.path.insert(0, str(beside))
    try:
        exec(compile(text, path, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[module.__name__]
        raise
    finally:
        sys.path.remove(str(beside))
    return module


def _beside(path: Path) -> Path:
    """Return the directory of what a file imports; of the copy in a run, that of the file itself."""
    flags = path.with_name("config.json")
    if path.name != COPY or not flags.exists():
        return path.parent
    return Path(json.loads(flags.read_text())["model"].rpartition(":")[0]).parent


def keep_copy(name: str, directory: Path, copy: str = COPY) -> None:
    """Copy the file of one's own model to the directory of a run; once something is trained, refuse another one."""
    if not is_own(name):
        return
    kept, file = directory / copy, _file_of(name)
    if not kept.exists() or not ((directory / "metrics.jsonl").exists() or any(directory.glob("seed_*"))):
        write_text(kept, file.read_text())
    elif kept.read_text() != file.read_text():
        raise ValueError(
            f"{file} has changed since the run in {directory} began, which has kept it as {kept}: copy that back, or "
            "train in another --workdir."
        )


def of_run(name: str, directory: Path) -> str:
    """Return the name of the model of a run, with the file that the run has kept."""
    kept = directory / COPY
    return f"{kept.resolve()}:{name.rpartition(':')[2]}" if is_own(name) and kept.exists() else name


def as_functions(model: Any, examples: Sequence[jax.Array]) -> Model:
    """Return a Linen module or an NNX class as pure functions.

    Args:
      model: a Linen module, whose call may take `train` and `counts`, as `jaxrec.models.tower.WithTowers`; or a class
        of NNX, called as Net(dense_features=N, fields=F, width=E, rngs=rngs), whose call may take `counts`.
      examples: inputs of one example, to take their shapes from.
    """
    return _of_linen(model, examples) if isinstance(model, nn.Module) else _of_nnx(model, examples)


def _of_linen(module, examples):
    takes = inspect.signature(type(module).__call__).parameters
    given = lambda **how: {name: value for name, value in how.items() if name in takes}
    of_seed = lambda seed: module.init_with_output(jax.random.key(seed), *examples, **given(train=False, counts=None))
    init = lambda seed: module.init(jax.random.key(seed), *examples, **given(train=False, counts=None))
    output, variables = jax.eval_shape(of_seed, 0)
    mutable = [name for name in variables if name != "params"]

    def call(variables, train, counts, rng, *inputs):
        rngs = None if rng is None else {"dropout": rng}
        return module.apply(
            variables,
            *inputs,
            **given(train=train, counts=counts),
            rngs=rngs,
            mutable=mutable if train and mutable else False,
        )

    def train(variables, counts, rng, *inputs):
        found = call(variables, True, counts, rng, *inputs)
        return found if mutable else (found, {})

    predict = lambda variables, *inputs: call(variables, False, None, None, *inputs)
    try:
        jax.eval_shape(lambda variables: train(variables, jnp.ones(1, bool), None, *examples), variables)
        random = False
    except InvalidRngError:
        random = True
    return Model(init, predict, train, random, bool(mutable), output.shape[1:])


def _of_nnx(make, examples):
    takes = inspect.signature(make.__call__).parameters
    (_, dense), (_, fields, width) = (example.shape for example in examples[:2])
    made = lambda seed: make(dense_features=dense, fields=fields, width=width, rngs=nnx.Rngs(seed))

    def split(model) -> Any:
        return nnx.split(model, nnx.Param, nnx.RngState, ...)

    abstract = nnx.eval_shape(lambda: made(0))
    abstract.train()
    training, params, keys, state = split(abstract)
    abstract.eval()
    predicting, *_ = split(abstract)
    random, changes = bool(jax.tree.leaves(keys)), bool(jax.tree.leaves(state))

    def collections(params, state):
        found = {"params": nnx.to_pure_dict(params)}
        return found | {"state": nnx.to_pure_dict(state)} if changes else found

    def filled(kind, values):
        copy = jax.tree.map(lambda leaf: leaf, kind)
        nnx.replace_by_pure_dict(copy, values)
        return copy

    def call(graph, variables, counts, rng, *inputs):
        number = itertools.count()

        def drawn(variable):  # every stream begins anew, with a key of the step
            value = jax.random.fold_in(rng, next(number)) if isinstance(variable, nnx.RngKey) else jnp.uint32(0)
            return variable.replace(value)

        streams = jax.tree.map(drawn, keys, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        parts = filled(params, variables["params"]), streams, filled(state, variables.get("state", {}))
        model = nnx.merge(graph, *parts)
        return model(*inputs, **({"counts": counts} if "counts" in takes else {})), split(model)[3]

    def init(seed):
        _, params, _, state = split(made(seed))
        return collections(params, state)

    def train(variables, counts, rng, *inputs):
        logit, after = call(training, variables, counts, rng, *inputs)
        return logit, {"state": nnx.to_pure_dict(after)} if changes else {}

    predict = lambda variables, *inputs: call(predicting, variables, None, jax.random.key(0), *inputs)[0]
    shape = jax.eval_shape(lambda: predict(init(0), *examples)).shape[1:]
    return Model(init, predict, train, random, changes, shape)
