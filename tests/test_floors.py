"""Imports point down, siblings do not meet, and only host files touch threads, clocks and disks (docs/design.md).

And of the tests: they look at the library from outside, and none is longer than a screen.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "jaxrec"
# A floor a line, lowest first; units of one floor do not import each other, except inside one package.
FLOORS = [
    ["types", "files", "interrupts"],
    [
        "sharding", "metrics", "embedding.spec", "embedding.initial", "embedding.kernels", "oac.ring", "oac.ends",
        "shadowsync.rules", "cpr.schedule", "cpr.failure", "cpr.fit", "cpr.trackers",
    ],
    ["embedding.tables", "embedding.planning", "shadowsync.leaves", "oac.flow"],
    ["embedding.mapped"],
    [
        "embedding.device", "embedding.host", "embedding.optimizers", "embedding.activations",
        "models", "data.synthetic", "data.loader", "data.criteo", "data.triples", "oac.stale",
        "shadowsync.meeting", "shadowsync.live", "cpr.emulate", "cpr.traces", "cpr.listed",
    ],
    ["embedding", "boundary", "losses", "shadowsync.transport", "shadowsync.synchroniser", "cpr.priority"],
    ["arithmetic"],
    ["step", "checkpoint", "stream", "announced", "shadowsync.shadow", "shadowsync.foreground"],
    ["engine"],
    ["loop", "oac", "shadowsync", "cpr"],
    [""],
]  # fmt: skip
HOST_FILES = ["files", "interrupts", "stream", "checkpoint", "engine", "loop", "data"]
HOST_FILES += [
    "embedding.host",
    "embedding.mapped",
    "oac.committing",
    "oac.ends",
    "oac.leaving",
    "oac.pipeline",
    "oac.stages",
    "oac.turns",
    "oac.workers",
    "shadowsync.foreground",
    "shadowsync.meeting",
    "shadowsync.shadow",
    "shadowsync.trainers",
    "shadowsync.transport",
    "shadowsync.workers",
    "cpr.traces",
    "cpr.recovery",
    "cpr.saves",
    "cpr.watch",
]
HOST_MODULES = {"threading", "queue", "time", "os", "orbax", "mmap", "fcntl", "shutil", "gzip"}


def unit(module):
    """The longest unit that a module belongs to, and its floor."""
    while True:
        for floor, units in enumerate(FLOORS):
            if module in units:
                return module, floor
        module = module.rpartition(".")[0]


def module_of(path, root):
    name = ".".join(path.relative_to(root).with_suffix("").parts)
    return name.removesuffix("__init__").rstrip(".")


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if (ROOT / Path(*node.module.split(".")[1:])).is_dir() and node.module.startswith("jaxrec"):
                for alias in node.names:
                    sub = ROOT / Path(*node.module.split(".")[1:]) / alias.name
                    known = sub.with_suffix(".py").exists() or sub.is_dir()
                    yield f"{node.module}.{alias.name}" if known else node.module
            else:
                yield node.module


def violations(root):
    found = []
    for path in sorted(root.rglob("*.py")):
        module = module_of(path, root)
        if module in ("data", "models"):
            continue
        me, floor = unit(module)
        for name in imports(path):
            if name.split(".")[0] == "jaxrec":
                other, below = unit(".".join(name.split(".")[1:]))
                if not (below < floor or other == me):
                    found.append(f"{module} imports {name}")
            elif name.split(".")[0] in HOST_MODULES and not any(
                module == h or module.startswith(h + ".") for h in HOST_FILES
            ):
                found.append(f"{module} imports {name} but is no host file")
    return found


def test_imports_point_down():
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("types.py", "from jaxrec import step"),
        ("embedding/planning.py", "from jaxrec.embedding.device import DeviceTables"),
        ("embedding/spec.py", "import jaxrec.embedding.initial"),
        ("models/dlrm.py", "from jaxrec.step import update"),
        ("data/loader.py", "from jaxrec.data.synthetic import SyntheticClicks"),
        ("step.py", "import threading"),
        ("metrics.py", "from os import path"),
        ("step.py", "import jaxrec.loop"),
        ("losses.py", "from jaxrec.arithmetic import update"),
        ("arithmetic.py", "from jaxrec.step import make_update"),
        ("oac/ring.py", "import jaxrec.oac.pipeline"),
        ("oac/stale.py", "import threading"),
        ("loop.py", "from jaxrec.oac import Pipeline"),
        ("oac/pipeline.py", "from jaxrec.shadowsync import Shadow"),
        ("shadowsync/rules.py", "import threading"),
        ("shadowsync/hogwild.py", "import time"),
        ("shadowsync/shadow.py", "from jaxrec.step import update"),
        ("cpr/priority.py", "import time"),
        ("cpr/schedule.py", "from jaxrec.cpr.emulate import Replay"),
        ("cpr/recovery.py", "from jaxrec.oac import Pipeline"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path, path, line):
    """Negative control."""
    for source in ROOT.rglob("*.py"):
        target = tmp_path / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source.read_text() + (f"\n{line}\n" if source == ROOT / path else ""))
    assert len(violations(tmp_path)) == 1


TESTS = Path(__file__).parent
NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}  # public in spite of their names
MOST_PRIVATE_TOUCHES, MOST_LINES_OF_A_TEST = 3, 30


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLE


def private_touches(tree):
    """Lines that use a private name of another object, import one, or give it to `monkeypatch.setattr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.lineno
        elif isinstance(node, ast.ImportFrom):
            yield from (node.lineno for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr":
            names = [str(given.value).rpartition(".")[2] for given in node.args[:2] if isinstance(given, ast.Constant)]
            yield from (node.lineno for name in names if is_private(name))


def long_tests(tree):
    """Lines of the tests that are longer than a screen, decorators not counted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            if node.end_lineno - node.lineno + 1 > MOST_LINES_OF_A_TEST:
                yield node.lineno


def found_in_tests(rule):
    return [f"{path.name}:{line}" for path in sorted(TESTS.rglob("*.py")) for line in rule(ast.parse(path.read_text()))]


def test_tests_use_what_is_public():
    """Faults come in by arguments: a stream, a hook, a transfer, a transport, a file that was changed on disk."""
    found = found_in_tests(private_touches)
    assert len(found) <= MOST_PRIVATE_TOUCHES, found


def test_no_test_is_longer_than_a_screen():
    assert found_in_tests(long_tests) == []


@pytest.mark.parametrize(
    ("code", "touches"),
    [
        ("shadow._busy", 1), ("recovery._saves._whole", 2), ("sys._current_frames()", 1), ("saver._write = slow", 1),
        ("from jaxrec.checkpoint.restore import _overlay, restore", 1), ("self._seen = state._replace(step=1)", 0),
        ("tables.__enter__()", 0), ("patch.setattr(saver, '_write', slow)", 1), ("patch.setattr('a._b', slow)", 1),
    ],
)  # fmt: skip
def test_a_private_touch_is_found(code, touches):
    """Negative control."""
    assert len(list(private_touches(ast.parse(code)))) == touches


@pytest.mark.parametrize(("lines", "found"), [(30, []), (31, [2])])
def test_a_long_test_is_found(lines, found):
    """Negative control."""
    code = "@pytest.mark.slow\ndef test_it():\n" + "    pass\n" * (lines - 1)
    assert list(long_tests(ast.parse(code))) == found
