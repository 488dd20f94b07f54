"""Imports point down, siblings do not meet, and only host files touch threads, clocks and disks.

docs/design.md shows these floors; `python tests/test_floors.py` prints what has to stand there. And
of the tests: they look at the library from outside.
"""

import ast
import functools
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "jaxrec"
# One floor per line, lowest first; units of one floor do not import each other, except inside one package.
FLOORS = [
    ["types", "files", "interrupts", "bounds", "errors", "xla"],
    [
        "sharding", "metrics", "embedding.spec", "embedding.initial", "embedding.kernels", "embedding.messages",
        "oac.ring", "oac.ends", "shadowsync.rules", "cpr.schedule", "cpr.failure", "cpr.fit", "cpr.trackers",
    ],
    ["embedding.tables", "embedding.planning", "shadowsync.leaves", "oac.flow", "ranking"],
    ["embedding.mapped", "embedding.servers"],
    [
        "embedding.device", "embedding.host", "embedding.in_process", "embedding.links",
        "embedding.optimizers", "embedding.pooling",
        "models", "data.synthetic", "data.loader", "data.criteo", "data.triples", "oac.stale",
        "shadowsync.meeting", "cpr.replay", "cpr.traces", "cpr.listed",
    ],
    ["embedding.remote", "data.tabular"],
    ["embedding", "boundary", "losses", "shadowsync.transport", "shadowsync.synchroniser", "cpr.priority"],
    ["arithmetic"],
    ["step", "checkpoint", "stream", "announced", "shadowsync.shadow"],
    ["ahead", "asked", "engine"],
    ["watched"],
    ["serial"],
    ["loop", "oac", "shadowsync", "cpr", "cluster"],
    ["cluster.trainers"],
    ["cluster.crew"],
    [""],
]  # fmt: skip
HOST_FILES = [
    "files", "interrupts", "xla", "stream", "ahead", "checkpoint", "cluster", "data", "embedding.in_process",
    "embedding.links", "embedding.mapped", "embedding.servers",
    "oac.committing", "oac.ends", "oac.leaving", "oac.pipeline", "oac.stages", "oac.view", "oac.threads",
    "shadowsync.synchroniser", "shadowsync.meeting", "shadowsync.shadow", "shadowsync.trainers",
    "shadowsync.transport", "shadowsync.workers", "cpr.costs", "cpr.saves", "cpr.traces", "cpr.watch",
]  # fmt: skip
HOST_MODULES = {"threading", "queue", "time", "os", "orbax", "mmap", "fcntl", "shutil", "gzip"}
ORBAX_FILE = "checkpoint.image"
DESIGN = ROOT.parent / "docs" / "design.md"
MARKERS = "<!-- floors: tests/test_floors.py prints them -->\n", "<!-- end of the floors -->\n"


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


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


def imports(tree):
    for node in ast.walk(tree):
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


def trees():
    """{module: what it is parsed to}."""
    return {module_of(path, ROOT): parsed(path) for path in sorted(ROOT.rglob("*.py"))}


def violations(trees):
    found = []
    for module, tree in trees.items():
        if module in ("data", "models"):
            continue
        me, floor = unit(module)
        for name in imports(tree):
            if name.split(".")[0] == "jaxrec":
                other, below = unit(".".join(name.split(".")[1:]))
                if not (below < floor or other == me):
                    found.append(f"{module} imports {name}")
            elif name.split(".")[0] in HOST_MODULES and not is_host(module):
                found.append(f"{module} imports {name} but is no host file")
            elif name.split(".")[0] == "orbax" and module != ORBAX_FILE:
                found.append(f"{module} imports {name}, which {ORBAX_FILE} alone knows")
    return found


def is_host(module):
    return any(module == host or module.startswith(host + ".") for host in HOST_FILES)


def grouped(units, star="*"):
    """Names as people read them: ["files*", "oac.{ring,ends*}"], with a star at host files."""
    packages = {}
    for unit in units:
        package, _, name = unit.rpartition(".")
        packages.setdefault(package, []).append(name + star * is_host(unit))
    found = packages.pop("", [])
    for package, names in packages.items():
        found.append(f"{package}.{{{','.join(names)}}}" if len(names) > 1 else f"{package}.{names[0]}")
    return found


def floors_text():
    """What docs/design.md shows: the highest floor first, and the host files inside of packages."""
    lines = ["```"]
    for number, units in reversed(list(enumerate(FLOORS))):
        named = "  ".join(grouped(units)) if units != [""] else "jaxrec itself: what `import jaxrec` gives"
        lines += textwrap.wrap(named, 96, initial_indent=f"{number:>2}  ", subsequent_indent=" " * 4)
    units = {unit for floor in FLOORS for unit in floor}
    inside = [host for host in HOST_FILES if host not in units and host.split(".")[0] in units]
    told = " *  host files, which may use threads, clocks and disks. So may "
    told += ", ".join(grouped(inside, star="")) + "."
    told = textwrap.wrap(told, 96, subsequent_indent=" " * 4)
    return "\n".join([*lines, *told, "```", ""])


if __name__ == "__main__":
    print(floors_text(), end="")


def test_imports_point_down():
    assert violations(trees()) == []


def test_floors_and_host_files_name_what_is_there():
    modules = trees()
    assert [name for units in FLOORS for name in units if name not in modules] == []
    uses = {module for module, tree in modules.items() if HOST_MODULES & roots_of(tree)}
    unused = [host for host in HOST_FILES if not any(f"{name}.".startswith(f"{host}.") for name in uses)]
    assert unused == [], "these touch no thread, clock or disk any more: take them out of HOST_FILES"


def roots_of(tree):
    return {name.split(".")[0] for name in imports(tree)}


def test_the_design_shows_these_floors():
    begin, end = MARKERS
    shown = DESIGN.read_text().partition(begin)[2].partition(end)[0]
    assert shown == floors_text(), f"between the markers of docs/design.md has to stand:\n{floors_text()}"


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("types.py", "from jaxrec import step"),
        ("embedding/planning.py", "from jaxrec.embedding.device import DeviceTables"),
        ("embedding/spec.py", "import jaxrec.embedding.initial"),
        ("models/dlrm.py", "from jaxrec.step import update"),
        ("data/loader.py", "from jaxrec.data.synthetic import SyntheticClicks"),
        ("step.py", "import threading"),
        ("serial.py", "import threading"),
        ("checkpoint/rows.py", "import orbax.checkpoint"),
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
        ("cpr/schedule.py", "from jaxrec.cpr.replay import Replay"),
        ("cpr/recovery.py", "from jaxrec.oac import Pipeline"),
    ],
)
def test_a_forbidden_import_is_found(path, line):
    """Negative control."""
    source = ROOT / path
    changed = ast.parse(f"{source.read_text()}\n{line}\n")
    assert len(violations(trees() | {module_of(source, ROOT): changed})) == 1


TESTS = Path(__file__).parent
NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}  # public in spite of their names
MOST_PRIVATE_TOUCHES = 3


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


def found_in_tests(rule):
    return [f"{path.name}:{line}" for path in sorted(TESTS.rglob("*.py")) for line in rule(parsed(path))]


def test_tests_use_what_is_public():
    """Faults come in by arguments: a stream, a hook, a transfer, a transport, a file that was changed on disk."""
    found = found_in_tests(private_touches)
    assert len(found) <= MOST_PRIVATE_TOUCHES, found


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
