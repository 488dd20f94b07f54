"""The model of a click job as pure functions: a built-in one by its name, or one's own as `FILE.py:NAME`.

    model = as_functions(make_model("deepfm", 16, dropout=0.2), examples)

A model takes dense features f32[B, N] and activations f32[B, F, E] and returns a logit f32[B]. It is a module of Linen,
or a class of NNX, which is made of these sizes.
"""

import functools
import inspect
import itertools
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
from jaxrec.models import DIN, DLRM, DNN, FM, LR, DCNv2, DeepFM, FinalMLP, WideAndDeep

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": nn.relu, "leaky_relu": nn.leaky_relu, "gelu": nn.gelu, "silu": nn.silu, "tanh": nn.tanh,
}  # fmt: skip
COPY = "model.py"  # in the directory of a run: the file of its model, as it was when the run began


class Model(NamedTuple):
    """A model as pure functions of variables, a dict of 'params' and other collections, and its inputs."""

    init: Callable[[int], Any]  # seed -> variables
    predict: Callable[..., jax.Array]  # (variables, *inputs) -> logit f32[B]
    train: Callable[..., tuple]  # (variables, counts bool[B], rng, *inputs) -> (logit, {collection: new value})
    random: bool  # whether `train` needs rng; else that is None
    changes: bool  # whether there are other collections than 'params'


def make_model(
    name: str,
    width: int,
    layers: Sequence[int] | None = None,
    activation: str = "relu",
    dropout: float = 0.0,
    batch_norm: bool = False,
) -> Any:
    """Build a model of the usual size; 'small_dlrm' is for many short runs.

    'dcnv2_mlperf' at width 128 is that of MLPerf Training; its rank, 512 there, is 4 * width. In 'lr', 'fm',
    'wide_deep' and 'deepfm' the first number of a row is the weight of its category.

    Args:
      name: built-in model, or FILE.py:NAME.
      width: E.
      layers: sizes of the tower (of DLRM, that after the interaction), or of each of two; None for those of the model.
      activation, dropout, batch_norm: of all layers of towers.

    Returns:
      A Linen module, or a class of NNX.
    """
    own = ".py:" in name
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
    }
    if not own and name not in models:
        raise ValueError(f"model={name!r} must be one of {', '.join(models)}, or FILE.py:NAME.")
    if own or name in ("lr", "fm"):
        given = {"layers": layers, "activation": activation != "relu", "dropout": dropout, "batch_norm": batch_norm}
        for flag in (flag for flag, value in given.items() if value):
            why = "has its layers from its file" if own else "has no towers"
            raise ValueError(f"model={name!r} {why}: leave out --{flag.replace('_', '-')}.")
    return own_model(name) if own else models[name]()


def model_of(flags: Mapping[str, Any], width: int) -> Any:
    """Build the model of the flags of a run; those that an older run lacks have their defaults."""
    given = {name: flags[name] for name in ("layers", "activation", "dropout", "batch_norm") if name in flags}
    return make_model(flags["model"], width, **given)


def own_model(name: str) -> Any:
    """Return NAME of FILE.py: a Linen module, or what NAME makes of it without arguments; or a class of NNX."""
    file, _, word = name.rpartition(":")
    path = Path(file).resolve()
    if not path.is_file():
        raise ValueError(f"--model: there is no file {path}.")
    found = getattr(_module(path, path.read_text()), word, None)
    if isinstance(found, type) and issubclass(found, nnx.Module):
        return found
    made = found() if callable(found) and not isinstance(found, nn.Module) else found
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"--model {name}: {word} is {'not there' if found is None else repr(made)[:80]}; it must be a flax.linen "
            "Module, a function that makes one, or a class of flax.nnx."
        )
    return made


@functools.cache
def _module(path: Path, text: str) -> Any:
    """Run a file, once for each text that it has had."""
    module = types.ModuleType(f"model_of_{path.stem}_{abs(hash((path, text))):x}")
    sys.modules[module.__name__] = module  # which dataclasses look up
    sys.path.append(str(path.parent))  # for what the file imports
    exec(compile(text, path, "exec"), module.__dict__)
    return module


def keep_copy(name: str, directory: Path) -> None:
    """Copy the file of one's own model to the directory of a run; refuse to go on with another one."""
    if ".py:" not in name:
        return
    copy, file = directory / COPY, Path(name.rpartition(":")[0])
    if not copy.exists():
        write_text(copy, file.read_text())
    elif copy.read_text() != file.read_text():
        raise ValueError(
            f"{file} has changed since the run in {directory} began, which has kept it as {copy}: copy that back, or "
            "train in another --workdir."
        )


def of_run(name: str, directory: Path) -> str:
    """Return the name of the model of a run, with the file that the run has kept."""
    file, colon, word = name.rpartition(":")
    if not colon or not (directory / COPY).exists():
        return name
    sys.path.append(str(Path(file).resolve().parent))  # for what the file imports, of which there is no copy
    return f"{directory / COPY}:{word}"


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
    init = lambda seed: module.init(jax.random.key(seed), *examples)
    variables = jax.eval_shape(init, 0)
    mutable = [name for name in variables if name != "params"]

    def call(variables, train, counts, rng, *inputs):
        how = {name: value for name, value in {"train": train, "counts": counts}.items() if name in takes}
        rngs = None if rng is None else {"dropout": rng}
        return module.apply(variables, *inputs, **how, rngs=rngs, mutable=mutable if train and mutable else False)

    def train(variables, counts, rng, *inputs):
        found = call(variables, True, counts, rng, *inputs)
        return found if mutable else (found, {})

    predict = lambda variables, *inputs: call(variables, False, None, None, *inputs)
    try:
        jax.eval_shape(lambda variables: train(variables, jnp.ones(1, bool), None, *examples), variables)
        random = False
    except InvalidRngError:
        random = True
    return Model(init, predict, train, random, bool(mutable))


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
    return Model(init, predict, train, random, changes)
