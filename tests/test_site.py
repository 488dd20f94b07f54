"""The documentation site builds without warnings, its links resolve, its messages are those of the code."""

import ast
import html.parser
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parent.parent
REPOSITORY = "https://example.org/repository"


def conf():
    spec = importlib.util.spec_from_file_location("conf_of_docs", ROOT / "docs" / "conf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Links(html.parser.HTMLParser):
    """Links and images of a page, and its anchors."""

    def __init__(self, page: Path):
        super().__init__()
        self.links, self.places = [], set()
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.places.add(found.get("id"))
        self.links += [found[name] for name in ("href", "src") if found.get(name)]


def broken(directory: Path) -> list[str]:
    """Links within a site to a missing file or anchor."""
    pages = {path.resolve(): Links(path) for path in directory.rglob("*.html")}
    wrong = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"\w+:|//", link) or link == "#":
                continue
            file, _, place = unquote(link).partition("#")
            target = (path.parent / file.partition("?")[0]).resolve() if file else path
            if not target.exists() or (place and target in pages and place not in pages[target].places):
                wrong.append(f"{path.name}: {link}")
    return wrong


def built(target: Path, source: Path = ROOT / "docs"):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", source, target]
    return subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_its_links_hold(tmp_path):
    pytest.importorskip("sphinx", reason="Sphinx is in the environment of `make docs` alone")
    pytest.importorskip("myst_nb", reason="myst-nb is in the environment of `make docs` alone")
    done = built(tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert broken(tmp_path / "site") == []


def test_a_link_that_leads_nowhere_is_noticed(tmp_path):
    (tmp_path / "a.html").write_text('<a id="x" href="b.html#y">b</a><a href="#x">x</a><img src="gone.png">')
    (tmp_path / "b.html").write_text('<p id="z">')
    assert broken(tmp_path) == ["a.html: b.html#y", "a.html: gone.png"]


@pytest.mark.parametrize(
    "text, unpublished, published",
    [
        ("[the plan](../tests/abuse)", "the plan (`tests/abuse`)", f"[the plan]({REPOSITORY}/blob/main/tests/abuse)"),
        ("[a](../tests/a.json)", "`tests/a.json`", f"[a]({REPOSITORY}/blob/main/tests/a.json)"),
        ("[one](../colabs/1_oac.ipynb)", "[one](notebooks/1_oac.ipynb)", "[one](notebooks/1_oac.ipynb)"),
        ("[README](../README.md)", "[README](index.md)", "[README](index.md)"),
        ("[near](oac.md#knobs)", "[near](oac.md#knobs)", "[near](oac.md#knobs)"),
    ],
)  # fmt: skip
def test_links_that_leave_the_site_name_the_file_or_lead_to_the_repository(text, unpublished, published):
    assert conf().beyond(text, "") == unpublished
    assert conf().beyond(text, REPOSITORY) == published


def test_a_docstring_shows_its_drawings_as_they_stand_and_its_marks_as_marks():
    lines = [
        "Prose with 2 * x, a|b and an end_ of `a_word_`:",
        "",
        "    a * b",
        "",
        "Args:",
        "  x: of y.",
        "",
        "  z_: w.",
    ]
    assert conf().literal(lines) == [
        r"Prose with 2 \* x, a\|b and an end\_ of `a_word_`:", "", "::", "", "    a * b", "", "Args:", "  x: of y.", "",
        r"  z\_: w.",
    ]  # fmt: skip
    assert conf().literal(["Words:", "- one", "- two"]) == ["Words:", "", "- one", "- two"]


def test_every_page_stands_in_the_index():
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    index = (ROOT / "docs" / "index.md").read_text()
    listed = [line for tree in re.findall(r"```\{toctree\}\n(.*?)```", index, re.S) for line in tree.split()]
    assert pages <= set(listed)


def test_the_first_page_is_the_first_screen_of_the_readme():
    index = (ROOT / "docs" / "index.md").read_text()
    assert index.startswith('```{include} ../README.md\n:end-before: "## Start"\n:relative-docs: docs/\n')
    first, start, _ = (ROOT / "README.md").read_text().partition("\n## Start\n")
    links = re.findall(r"(?<!!)\[[^]]*\]\(([^)]*)\)", first)
    assert start and links and all(link.startswith(("docs/", "https://")) for link in links)  # what MyST can resolve


# ---- troubleshooting


def strings(path: Path) -> str:
    """Strings of a module, with {} for interpolated values."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return "\n".join(found)


def unsaid(page: str) -> list[str]:
    """Messages in the headings of a page that no module contains."""
    sources = [*(ROOT / "jaxrec").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]
    said = "\n".join(map(strings, sources))
    return [message for message in re.findall(r"^### `(.*)`$", page, re.M) if message not in said]


def test_troubleshooting_quotes_messages_that_are_given():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert page.count("\n### `") >= 10 and unsaid(page) == []
    assert unsaid("### `nobody says this`\n### `is locked: another process is`\n") == ["nobody says this"]
