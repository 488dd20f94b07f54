"""The site of documentation: Markdown by MyST, notebooks by myst-nb, the API from docstrings.

`make docs` builds it, and a warning is an error. Notebooks are shown with the outputs that are committed.
"""

import re
import shutil
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
_META = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
REPOSITORY = _META.get("urls", {}).get("Repository", "")
# What reStructuredText would take for marks: a lone star, a bar, an underscore at the end of a word.
_MARKS = re.compile(r"(\*|\||(?<=\w)_(?!\w))(?=[^`]*(?:`[^`]*`[^`]*)*$)")
_SECTION = re.compile(r"^(Args|Returns|Raises|Attributes|Yields):")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)#\s]*)\)")

project = _META["name"]
copyright = author = "the authors of jaxrec"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"
html_theme = "furo"
exclude_patterns = ["requirements.txt", "_build"]
autodoc_typehints = "none"
autodoc_mock_imports = ["ray"]
default_role = "code"
autodoc_member_order = "bysource"
napoleon_use_ivar = True  # attributes are named once, where a class lists them
# Notebooks begin where they like; types are not links; a block of a page may be a file that a test writes.
suppress_warnings = ["myst.header", "ref.python", "misc.highlighting_failure"]


def beyond(text: str, repository: str) -> str:
    """Links that lead out of docs/ lead to the repository, or name the file while nobody has published it."""

    def found(match):
        mark, words, path = match.groups()
        if mark:
            return match[0]  # a picture is copied
        if path == "README.md":
            return f"[{words}](index.md)"
        if path.startswith("colabs/") and path.endswith(".ipynb"):
            return f"[{words}](notebooks/{Path(path).name})"
        if repository:
            return f"[{words}]({repository}/blob/main/{path})"
        return f"`{path}`" if words.strip("`") in path else f"{words} (`{path}`)"

    return _LINK.sub(found, text)


def _read(app, name, source):
    if not name.startswith("notebooks/"):
        source[0] = beyond(source[0], REPOSITORY)


def literal(lines: list[str]) -> list[str]:
    """Docstrings are prose for people at a prompt: what is indented in their prose is shown as it stands."""
    shown: list[str] = []
    section = False
    for before, line in zip(["", *lines], lines, strict=False):
        if _SECTION.match(line):
            section = True
        elif line and not line.startswith(" "):
            section = False
        if line.startswith("- ") and before and not before.startswith(("- ", " ")):
            shown.append("")  # a list begins after an empty line
        if line.startswith("    ") and not before.strip() and not section and not _in_literal(shown):
            shown += ["::", ""]
        quoted = line.startswith("    ") and not section
        code = quoted or line.lstrip().startswith((">>>", "..."))
        shown.append(line if code else _MARKS.sub(r"\\\1", line))
    return shown


def _in_literal(shown):
    """Whether the last line that is not indented begins a literal block."""
    return next((line for line in reversed(shown) if line and not line.startswith(" ")), "") == "::"


def _docstring(app, what, name, thing, options, lines):
    lines[:] = literal(lines)


def setup(app):
    """Copies the notebooks in, as Sphinx reads below its own directory only."""
    target = HERE / "notebooks"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in sorted((HERE.parent / "colabs").glob("*.ipynb")):
        shutil.copy(path, target)
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _docstring, priority=100)  # before napoleon
