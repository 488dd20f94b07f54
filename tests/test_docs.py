"""The documentation: its Python runs, its links resolve, its figures are those of runs."""

import dataclasses
import doctest
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import on_accelerator
import pytest
import tyro
from main.config import PARTS, parse
from main.graphs import settled
from main.run_dir import flat
from results_page import anchor, runs

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
RUNNING = [
    "README.md",
    "docs/graphs.md",
    "docs/oac.md",
    "docs/recipes.md",
    "docs/serving.md",
    "docs/techniques.md",
    "docs/your_data.md",
    "docs/your_model.md",
]
RESULTS = sorted((ROOT / "experiments" / "results").glob("*/*.json"))
SCRIPTS = sorted((ROOT / "experiments").glob("*.py"))
WITH_EXAMPLES = [path.stem for path in SCRIPTS if "    >>> " in path.read_text()]
KINDS = ("measured", "emulated", "modelled", "simulated")
CACHE_MAY_WARN = [part for verb in ("reading", "writing") for part in ("-W", f"ignore:Error {verb} persistent")]
NOT_OF_THE_RUN = {"workdir", "resume", "path", "binned", "traces"}  # locations and outputs
A_RUN = re.compile(
    r"^### \w+, \w+\n`python (?:experiments|tests/soak)/(\w+)\.py([^`]*)`, (\d{4}-\d\d-\d\d), .*?"
    r"\[(\w+)\.json\]\(\.\./experiments/results/(\w+/(\w+))\.json\)",
    re.M,
)


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def python(directory, *command):
    """Runs code as a user would: on the machine's devices, with warnings as errors, except those of the compilation
    cache, which tests share and another process may be writing."""
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "error::UserWarning", *CACHE_MAY_WARN, *map(str, command)]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)


# ---- the README is short, and code on pages runs


def test_the_readme_has_a_snippet_for_each_technique_and_says_first_how_to_install():
    headings = re.findall(r"^## (.*)$", text_of("README.md"), re.M)
    texts = re.split(r"^## .*$", text_of("README.md"), flags=re.M)[1:]
    parts = dict(zip(headings, texts, strict=True))
    assert all(">>> " in parts[name] for name in ("OAC", "ShadowSync", "CPR"))
    assert "pip install" in parts["Start"] and headings.index("Start") < headings.index("OAC")


def test_the_readme_is_short_and_its_examples_need_few_names():
    page = text_of("README.md")
    imported = ", ".join(re.findall(r"^>>> from jaxrec\S* import (.*)$", page, re.M)).split(", ")
    assert len(page.splitlines()) <= 130 and len(set(imported)) == len(imported) <= 15


def test_every_page_with_examples_is_run():
    with_examples = [page for page in PAGES if "```python" in page.read_text()]
    assert with_examples == sorted(ROOT / page for page in RUNNING)
    texts = [page.read_text() for page in with_examples]
    assert all(text.count("```python") == text.count("```python\n>>> ") for text in texts)


@pytest.mark.process
@pytest.mark.parametrize("page", [pytest.param("README.md", marks=pytest.mark.gate), *RUNNING[1:]])
def test_a_page_runs_from_top_to_bottom(page, tmp_path):
    done = python(tmp_path, "-m", "doctest", ROOT / page)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [*tmp_path.iterdir()]  # so that it also runs a second time, or after another page


@pytest.mark.process
def test_a_page_that_is_wrong_is_noticed(tmp_path):
    (tmp_path / "page.md").write_text("```python\n>>> 1 + 1\n3\n\n```\n")
    assert python(tmp_path, "-m", "doctest", "page.md").returncode == 1


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_an_experiment_run(name):
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    done = doctest.testmod(importlib.import_module(name), optionflags=flags)
    assert done.attempted > 0 and done.failed == 0


TWO_TRAINERS = """
import concurrent.futures
from jaxrec.shadowsync import PeerLeft


def two_trainers(*texts):  # the last example, as two threads that share a group
    own = {**globals(), "shared": SyncGroup(model_averaging(), params, trainers=2)}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return [found.exception() for found in [pool.submit(exec, text, dict(own)) for text in texts]]


texts = [open(f"trainer_{i}.py").read() for i in (0, 1)]
assert two_trainers(*texts) == [None, None]
alone = two_trainers(texts[0].replace("state = shadow.finish(state)", "pass"), texts[1])
assert alone[0] is None and isinstance(alone[1], PeerLeft), alone  # who does not finish leaves the other behind
"""
ONE_TRAINER = "SyncGroup(model_averaging(), params, trainers=1).trainer(0)"


@pytest.mark.slow
def test_all_three_techniques_run_in_two_trainers(tmp_path):
    *before, last = re.findall(r"```python\n(.*?)```", text_of("docs/techniques.md"), re.S)
    last = doctest.script_from_examples(last)
    assert ONE_TRAINER in last and "state = shadow.finish(state)" in last
    for trainer in (0, 1):
        text = last.replace(ONE_TRAINER, f"shared.trainer({trainer})")
        (tmp_path / f"trainer_{trainer}.py").write_text(text)
    script = [*map(doctest.script_from_examples, before), TWO_TRAINERS]
    (tmp_path / "page.py").write_text("\n\n".join(script))
    done = python(tmp_path, "page.py")
    assert done.returncode == 0, done.stderr


# ---- links


def dangling(page: Path) -> list[str]:
    """Links of a page to missing files or headings; web links are not followed."""
    links, lost = re.findall(r"\]\(([^)\s]+)\)", page.read_text()), []
    for link in (link for link in links if "://" not in link):
        name, _, place = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (place and place not in anchors(target)):
            lost.append(link)
    return lost


def anchors(page: Path) -> set[str]:
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", page.read_text(), re.M)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    assert not dangling(page)


def test_a_link_that_dangles_is_noticed(tmp_path):
    (tmp_path / "page.md").write_text("# One, two\n[a](page.md#one-two), [b](gone.md#x), [c](https://a.b), [d](#three)")
    assert dangling(tmp_path / "page.md") == ["gone.md#x", "#three"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_and_tests_that_a_page_names_are_there(page):
    text = page.read_text()
    if page.name == "results.md":
        text = re.sub(r"`python [^`]*`", "", text)  # a command is that of its day
    named = re.findall(r"\b(?:experiments|tests|docs)/[a-z_/]+\.(?:py|md)", text)
    assert not [name for name in named if not (ROOT / name).exists()]


# ---- figures


class Measurement(NamedTuple):
    """A section of docs/results.md with a results file."""

    experiment: str
    flags: str
    date: str
    file: str


def measurements(page: str) -> list[Measurement]:
    found = [match.groups() for match in A_RUN.finditer(page)]
    assert all(shown == linked for *_, shown, _, linked in found)
    return [Measurement(experiment, flags.strip(), date, file) for experiment, flags, date, _, file, _ in found]


def tables(page: str) -> list[list[list[str]]]:
    """The tables of a page: rows of cells, the heading first."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", page, re.M)
    rows = [[line.strip("|").split("|") for line in block.splitlines()] for block in blocks]
    return [[[cell.strip() for cell in row] for row in [table[0], *table[2:]]] for table in rows]


def kind_of(table: list[list[str]]) -> str:
    """The first word of a heading: "emulated" in "emulated: window"."""
    return re.split("[: ]", table[0][0])[0]


def config_of(experiment, flags):
    """An experiment's configuration by its flags, as stored in results.json."""
    if experiment == "on_accelerator":
        with tempfile.TemporaryDirectory() as out:  # `flags` creates it
            return {"parts": on_accelerator.flags(shlex.split(flags.replace("--out DIR", f"--out {out}"))).parts}
    config = importlib.import_module(experiment).Config
    found = parse(config, shlex.split(flags)) if experiment == "train" else tyro.cli(config, args=shlex.split(flags))
    found = settled(found) if hasattr(found, "n3") else found
    return json.loads(json.dumps(flat(found), default=str))


def differences(wanted, found):
    """{flag: (value in the command, value in the file)}; flags newer than the file are not compared."""
    if "tables" in wanted and "tables" in found:  # left to the run: on the devices of a CPU, as older files say
        wanted, found = (flags | {"tables": flags["tables"] or "device"} for flags in (wanted, found))
    synthetic_only = {"rows"} if found.get("data") == "criteo" else set()
    shared = (wanted.keys() & found.keys()) - NOT_OF_THE_RUN - synthetic_only
    # Older runs of train.py have noted the flags of all parts, also of those that they did not have.
    of_parts = (
        {field.name for part in PARTS for field in dataclasses.fields(part)} if "learning_rate" in wanted else set()
    )
    known = wanted.keys() | of_parts | {"experiment", "run"}
    gone = {name: ("no such flag", found[name]) for name in found.keys() - known}
    return gone | {name: (wanted[name], found[name]) for name in shared if wanted[name] != found[name]}


def results_of(file):
    """Content of a results file, machine/name."""
    return json.loads((ROOT / "experiments" / "results" / f"{file}.json").read_text())


TEXT = text_of("docs/results.md")
MEASURED = measurements(TEXT)


def test_every_results_file_has_one_section():
    assert sorted(each.file for each in MEASURED) == [f"{path.parent.name}/{path.stem}" for path in RESULTS]
    assert len(re.findall(r"/experiments/results/\S+\.json\)", TEXT)) == len(RESULTS)  # every link was parsed


@pytest.mark.parametrize("each", MEASURED, ids=lambda each: each.file)
def test_a_command_gives_the_figures_of_its_file_and_its_date(each):
    found = results_of(each.file)
    assert not differences(config_of(each.experiment, each.flags), found["config"])
    assert each.date == found["environment"]["date"]


def test_the_figures_of_a_gpu_are_of_the_commit_that_the_page_says():
    (said,) = re.findall(r"\*\*These are figures of commit (\w+)", TEXT)
    assert {commit_of(path) for path in SECTIONS if path.startswith("one_h200/")} == {said}


def test_what_is_called_bound_by_the_link_waits_for_the_link():
    assert results_of("two_cores_cpu/oac_throughput")["results"]["slowest_stage_link_link"] in ("send", "fetch")


def numbers_in(found) -> list[float]:
    """All numbers of nested results."""
    if isinstance(found, dict | list):
        inner = found.values() if isinstance(found, dict) else found
        return [number for each in inner for number in numbers_in(each)]
    return [float(found)] if isinstance(found, int | float) and not isinstance(found, bool) else []


def strangers(section: str, results) -> list[str]:
    """Figures in a section's tables that are no rounded number of its results; signs are not compared."""
    values, found = np.abs(numbers_in(results)), []
    for cell in (cell for table in tables(section) for row in table[1:] for cell in row[1:]):
        scales = np.array([1, 100] if "%" in cell else [1])[:, None]  # shares may be in percent
        for shown in re.findall(r"\d[\d,]*(?:\.\d+)?", cell):
            whole, _, decimals = shown.replace(",", "").partition(".")
            step = 10.0 ** (-len(decimals) or len(whole) - len(whole.rstrip("0")))
            given = float(f"{whole}.{decimals}")
            if not (np.abs(values * scales - given) <= 0.5001 * step).any():
                found.append(f"{shown} in {cell}")
    return found


SECTIONS = {each.file: section for section in re.split(r"^(?=##)", TEXT, flags=re.M) for each in measurements(section)}


@pytest.mark.parametrize("file", SECTIONS)
def test_the_figures_of_a_section_are_those_of_its_file(file):
    machine, name = file.split("/")
    (run,) = (run for run in runs(ROOT)[name] if run.machine == machine)
    assert strangers(SECTIONS[file], run.results) == []  # with the intervals that are corrected


def test_a_figure_that_is_changed_is_noticed():
    section = "| measured | |\n|---|---|\n| AUC | 0.7613 ± 0.0002 |\n| share | 1.5 % |\n| runs | 97,000 |\n"
    assert strangers(section, {"auc": 0.76128, "half": [0.00021], "share": 0.0152, "n": 97123}) == []
    assert strangers(section, {"auc": 0.7612, "half": [0.00021], "share": 0.0156, "n": 98123}) == [
        "0.7613 in 0.7613 ± 0.0002", "1.5 in 1.5 %", "97,000 in 97,000",
    ]  # fmt: skip


def test_make_soak_runs_what_its_sections_say():
    soaks = re.findall(r"/(\w+\.py --[a-z-]+ \d+) \$\(ARGS\)", text_of("Makefile"))
    assert len(soaks) == 5 and set(soaks) <= {f"{each.experiment}.py {each.flags}" for each in MEASURED}


def test_a_table_has_figures_of_one_kind():
    kinds = [kind_of(table) for table in tables(TEXT)]
    assert kinds.count("claim") == 3  # a summary of each paper
    assert len(kinds) > 20 and set(kinds) <= {*KINDS, "claim"}


BOLD = re.compile(r"\*\*(-?\d[^*]*)\*\*")


def unmeasured(rows):
    """Figures of the README, {row: those in bold}, that no table of their kind has from one of the row's commits."""
    figures = {(kind, commit_of(file)): set() for kind in KINDS for file in SECTIONS}
    for file, section in SECTIONS.items():
        for table in tables(section):
            cells = [cell for row in table[1:] for cell in row[1:]]
            figures[kind_of(table), commit_of(file)].update(cells, [cell.partition(" (")[0] for cell in cells])
    found = []
    for sentence, kind, commits in rows:
        of_each = [figures.get((kind, commit), set()) for commit in commits.split(", ")]
        given = set(BOLD.findall(sentence))
        assert given and all(given & each for each in of_each), f"no figure, or none of a commit: {sentence}"
        assert not re.search(r"\d\.\d", BOLD.sub("", sentence)), f"a figure that is not in bold: {sentence}"
        found += sorted(given.difference(*of_each))
    return found


def test_a_figure_of_the_readme_stands_among_the_measured_ones_under_its_kind_and_commit():
    (shown,) = tables(text_of("README.md"))
    assert shown[0] == ["result", "kind", "commit"] and len(shown) == 11
    assert {kind for _, kind, _ in shown[1:]} <= set(KINDS) and unmeasured(shown[1:]) == []
    (sentence, kind, commit), *_ = [row for row in shown if "2.54 (2.34 to 2.61)" in row[0]]
    assert unmeasured([(sentence.replace("2.54", "2.55"), kind, commit)]) == ["2.55 (2.34 to 2.61)"]
    with pytest.raises(AssertionError, match="none of a commit"):
        unmeasured([(sentence, "emulated", commit)])


def test_the_first_screen_of_the_readme_repeats_figures_of_its_table():
    page = " ".join(text_of("README.md").split())
    said = page[page.index("On an **H200**") : page.index("## Start")]
    figure = re.compile(r"-?\d\.\d+ (?:\(\S+ to \S+\)|± \d\.\d+)")
    assert not re.search(r"\d\.\d", figure.sub("", said))
    assert len(figure.findall(said)) == 5 and set(figure.findall(said)) <= set(BOLD.findall(page))


def commit_of(file):
    return results_of(file)["environment"]["commit"][:7]


def test_another_flag_and_a_flag_that_is_gone_are_noticed():
    config = results_of("two_cores_cpu/oac_time_to_accuracy")["config"]
    assert not differences(config_of("oac_time_to_accuracy", "--seeds 24"), config)
    other = config_of("oac_time_to_accuracy", "--seeds 24 --batch-size 128")
    assert differences(other, config) == {"batch_size": (128, 256)}
    gone = differences(config_of("oac_time_to_accuracy", "--seeds 24"), config | {"links": 2})
    assert gone == {"links": ("no such flag", 2)}
