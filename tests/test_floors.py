"""Imports point down, techniques are independent, and only listed modules use threads, clocks and disks.

docs/design.md shows these levels; `python tests/test_floors.py` prints the text for it. Tests use the library's
public names only.
"""

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "jaxrec"
# A level imports only from the levels above it in this list; within a package any acyclic order will do.
LEVELS = [
    ["types", "files", "interrupts", "bounds", "metrics", "xla", "__main__"],
    ["sharding", "ranking", "callbacks"],
    ["embedding", "outcome"],
    ["validate", "table_use", "data", "models", "checkpoint"],
    ["step", "prefetch"],
    ["task"],
    ["engine"],
    ["loop", "oac", "shadowsync", "cpr"],
    ["cluster"],
    [""],
]
# Only these may use threads, clocks and disks; all others are functions of their arguments.
HOST = [
    "files", "interrupts", "xla", "prefetch", "checkpoint", "cluster", "data",
    "embedding.host", "embedding.native", "embedding.pinned", "embedding.remote", "embedding.servers",
    "oac.flight", "oac.stages", "oac.pipeline", "table_use",
    "shadowsync.transport", "shadowsync.synchroniser", "shadowsync.workers", "shadowsync.free",
    "cpr.costs", "cpr.saving", "cpr.tracking",
]  # fmt: skip
HOST_MODULES = {"threading", "queue", "time", "os", "orbax", "mmap", "fcntl", "shutil", "gzip"}
ORBAX_FILE = "checkpoint.format"
DESIGN = ROOT.parent / "docs" / "design.md"
MARKERS = "<!-- levels: tests/test_floors.py prints them -->\n", "<!-- end of the levels -->\n"


def package_of(module):
    return module.partition(".")[0]


def level_of(module):
    return next(level for level, packages in enumerate(LEVELS) if package_of(module) in packages)


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
            for alias in node.names:
                below = ROOT / Path(*node.module.split(".")[1:]) / alias.name
                known = node.module.startswith("jaxrec") and (below.with_suffix(".py").exists() or below.is_dir())
                yield f"{node.module}.{alias.name}" if known else node.module


def ours(tree):
    """The modules of jaxrec that a module imports."""
    return {name.partition(".")[2] for name in imports(tree) if package_of(name) == "jaxrec"}


def trees():
    """{module: its syntax tree}."""
    return {module_of(path, ROOT): parsed(path) for path in sorted(ROOT.rglob("*.py"))}


def violations(trees):
    found = []
    for module, tree in trees.items():
        for other in ours(tree):
            if package_of(other) != package_of(module) and level_of(other) >= level_of(module):
                found.append(f"{module} imports {other}, which is not below it")
        for name in set(map(package_of, imports(tree))):
            if name in HOST_MODULES and not is_host(module):
                found.append(f"{module} imports {name}, and is not of the host")
            elif name == "orbax" and module != ORBAX_FILE:
                found.append(f"{module} imports {name}, which {ORBAX_FILE} alone knows")
    inside = lambda module, tree: {other for other in ours(tree) if package_of(other) == package_of(module)}
    graph = {module: inside(module, tree) for module, tree in trees.items()}
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        found.append(f"a circle of imports: {' -> '.join(error.args[1])}")
    return found


def is_host(module):
    return any(f"{module}.".startswith(f"{host}.") for host in HOST)


def levels_text():
    """The text in docs/design.md: the highest level first."""
    lines = ["```"]
    for number, packages in reversed(list(enumerate(LEVELS))):
        lines.append(f"{number}  {'  '.join(packages) or 'jaxrec itself: what `import jaxrec` gives'}")
    return "\n".join([*lines, "```", ""])


if __name__ == "__main__":
    print(levels_text(), end="")


def test_imports_point_down():
    assert violations(trees()) == []


def test_levels_and_hosts_name_what_is_there():
    modules = trees()
    assert sorted(name for packages in LEVELS for name in packages) == sorted({*map(package_of, modules)})
    uses = {module for module, tree in modules.items() if HOST_MODULES & {*map(package_of, imports(tree))}}
    unused = [host for host in HOST if not any(f"{name}.".startswith(f"{host}.") for name in uses)]
    assert unused == [], "these touch no thread, clock or disk any more: take them out of HOST"


def test_the_design_shows_these_levels():
    begin, end = MARKERS
    shown = DESIGN.read_text().partition(begin)[2].partition(end)[0]
    assert shown == levels_text(), f"between the markers of docs/design.md has to stand:\n{levels_text()}"


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("types.py", "from jaxrec.files import write_text"),
        ("embedding/lookup.py", "from jaxrec.embedding.device import DeviceTables"),
        ("embedding/spec.py", "from jaxrec.embedding import HostTables"),
        ("checkpoint/row_deltas.py", "import orbax.checkpoint"),
        ("metrics.py", "from os import path"),
        ("step.py", "import jaxrec.loop"),
        ("outcome.py", "from jaxrec.step import update"),
        ("oac/ring.py", "import jaxrec.oac.pipeline"),
        ("oac/ring.py", "import threading"),
        ("oac/pipeline.py", "from jaxrec.shadowsync import Shadow"),
    ],
)
def test_a_forbidden_import_is_found(path, line):
    """Negative control."""
    source = ROOT / path
    changed = ast.parse(f"{source.read_text()}\n{line}\n")
    assert len(violations(trees() | {module_of(source, ROOT): changed})) == 1


TESTS = Path(__file__).parent
PUBLIC = {"_asdict", "_fields", "_make", "_replace", "_exit"}  # despite the underscore: of named tuples and of `os`
MOST_PRIVATE_TOUCHES = 3


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def private_touches(tree):
    """Lines that use a private name of another object, import one, or pass one to `monkeypatch.setattr`."""
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


# The main job's helpers are still in test_runs.
IMPORT_TESTS = {"test_demo.py imports test_runs", "test_main_kills.py imports test_runs"}


def test_no_module_imports_a_test_module():
    """Nor does a quoted program, but for its own file: what several need is in modules named after what they hold."""
    line = re.compile(r"^ *(?:from|import) (test_\w+)", re.MULTILINE)
    named = {path: set(line.findall(path.read_text())) - {path.stem} for path in TESTS.rglob("*.py")}
    assert {f"{path.name} imports {name}" for path, names in named.items() for name in names} <= IMPORT_TESTS


def test_tests_use_what_is_public():
    """Tests inject faults through arguments: a stream, a hook, a transfer, a transport, a file changed on disk."""
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
