"""Generate docs/results.md and docs/results.html from experiments/results and experiments/claims.json.

    python experiments/results_page.py
    python experiments/results_page.py --add runs/oac_link-1 --to two_cores_cpu/oac_link     first stores a run there
    python experiments/results_page.py --add runs/gpu/oac.json --to one_h200/oac    a part of on_accelerator.py

claims.json has, for each claim of the papers' abstracts, whether and how far it is met, a text and its runs, and for
each file of experiments/results, as MACHINE/NAME, the command of the run, a text and the tables of its figures. Where
random splits of one sample are compared, it has their `test_over_train`, by which intervals are corrected. Where the
page has figures, it has keys of a file:

- `{key:2}` in a text is the figure with two decimals (-3: in thousands; 1%: a share, in percent), `{key:2~}` the same
  with its interval if the file has one, and `{NAME/key:2}` that of another file, as in the text of a claim.
- A cell of a table is such a text, or `key:2` alone, which is `{key:2~}`. It is that of its row, with the text of the
  column in place of each *; if the row has no *, it is that of the column, with the text of the row in place of *. A
  list gives a row each cell.
"""

import base64
import dataclasses
import hashlib
import html
import json
import math
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import cpr_overhead
import oac_throughput
import shadowsync_isolation
import shadowsync_quality
import shadowsync_scaling
from main.cli import command_line
from studies import recovery_overheads

from jaxrec.files import atomic_write, make_directory, write_text

ROOT = Path(__file__).parent.parent
KINDS = ("measured", "emulated", "simulated", "modelled")
PATHS = ("path", "binned", "traces")  # flags that name a place on one machine
MET = ("holds", "holds in part", "not shown", "contradicted here")
HALVES = ("half_interval", "half_width")  # names of half an interval in keys
_VERSIONS = {"commit": "commit", "jax": "jax", "Python": "python"}
_FIGURE = re.compile(r"\{(?:(\w+)/)?([^{}:/]+):(-?\d+)(%?)(~?)\}")
_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:auto;padding:1rem;color:#111}
.wide{overflow-x:auto;margin-bottom:1rem}table{border-collapse:collapse;font-size:.9rem}
th,td{border:1px solid #999;padding:.3rem .5rem;
text-align:left;vertical-align:top}th{background:#eee}code,h3,p a{overflow-wrap:anywhere}img{max-width:100%}"""

# How the picture of a results file is drawn: (its content, empty directory).
PICTURES: dict[str, Callable[[Mapping[str, Any], Path], Any]] = {
    "oac_throughput": lambda found, to: oac_throughput.draw_ratios(to / "over_sync.png", found["results"]),
    "oac_wide": lambda found, to: oac_throughput.draw_on_gpu(to / "over_sync.png", found),
    "shadowsync_quality_criteo": lambda found, to: shadowsync_quality.draw(to, found["results"]),
    "shadowsync_scaling_processes": lambda found, to: shadowsync_scaling.draw_measured(to, found["results"]),
    "shadowsync_isolation": lambda found, to: shadowsync_isolation.draw(to, found["results"]),
    "cpr_overhead_criteo": lambda found, to: cpr_overhead.draw_accuracy(
        to / "accuracy.png", found["results"], found["config"]["failures"]
    ),
    "cluster_failures": lambda found, to: recovery_overheads.draw_overheads(to / "overheads.png", found["results"]),
}
EARLIER = re.compile(r"Of earlier code(: [^.]*)?\.")  # in the text of a run: its figures, or some of them
BESIDE = {"oac_wide": "oac"}  # another file of the machine, whose results the picture of the first shows too


class Run(NamedTuple):
    """A results file: the folder of its machine, its name and content, its entry of claims.json, the file with its
    seeds' rows, and the results of the file in BESIDE."""

    machine: str
    name: str
    found: Mapping[str, Any]
    about: Mapping[str, Any]
    seeds: str = ""
    beside: Mapping[str, Any] = {}

    @property
    def results(self) -> dict[str, Any]:
        """Its results and, of random splits of one sample, corrected half widths."""
        found = self.found["results"]
        if "test_over_train" not in self.about:
            return found
        times = correction(len(self.found["config"]["path"]), self.about["test_over_train"])
        halves = [key for key, value in found.items() if any(half in key for half in HALVES) and value is not None]
        return found | {re.sub("|".join(HALVES), "corrected", key): found[key] * times for key in halves}

    @property
    def drawn(self) -> Mapping[str, Any]:
        """Results that the picture shows."""
        return {**self.found["results"], **self.beside}

    @property
    def file(self) -> str:
        return f"../experiments/results/{self.machine}/{self.name}.json"

    @property
    def heading(self) -> str:
        return f"{self.name}, {self.machine}"

    @property
    def link(self) -> str:
        """Link to its section, marked if figures are of earlier code."""
        earlier = EARLIER.search(self.about["says"])
        return f"[{self.name}](#{anchor(self.heading)})" + (f" (earlier code{earlier[1] or ''})" if earlier else "")

    @property
    def where(self) -> str:
        environment = self.found["environment"]
        cores = f"{environment['cores']} core{'s' * (environment['cores'] != 1)}"
        versions = [f"{name} {environment[key]}" for name, key in _VERSIONS.items() if key in environment]
        parts = (environment["date"], cores, environment.get("cpu"), environment["device"], *versions)
        return ", ".join(filter(None, parts))


def add(directory: Path, to: str, root: Path) -> Path:
    """Store a finished run, or a part of on_accelerator.py, as experiments/results/MACHINE/NAME.json; return that path.

    The file holds its flags without paths of this machine, its environment and its results. NAME.jsonl beside it holds
    the rows of each seed, if the run logged any.

    Args:
      directory: of the run, or the file of the part.
      to: MACHINE/NAME.

    Raises:
      ValueError: `to` has another form; the directory holds no finished run, or the file no measurement.
    """
    if not re.fullmatch(r"\w+/\w+", to):
        raise ValueError(f"--to {to!r} is not MACHINE/NAME, such as two_cores_cpu/oac_link.")
    found, rows = (of_part(json.loads(directory.read_text())), "") if directory.is_file() else of_run(directory)
    target = root / "experiments" / "results" / f"{to}.json"
    make_directory(target.parent)
    write_text(target, json.dumps(found, indent=2) + "\n")
    target.with_suffix(".jsonl").unlink(missing_ok=True)  # of an earlier run
    if rows:
        write_text(target.with_suffix(".jsonl"), rows)
    return target


def of_run(directory: Path) -> tuple[dict[str, Any], str]:
    """Return the content of the results file of a run, and the lines of its log that are of a seed."""
    if lost := [name for name in ("config", "environment", "results") if not (directory / f"{name}.json").exists()]:
        raise ValueError(f"{directory} holds no finished run: it lacks {', '.join(f'{name}.json' for name in lost)}.")
    found = {
        name: json.loads((directory / f"{name}.json").read_text()) for name in ("config", "environment", "results")
    }
    metrics = directory / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    config = {name: value for name, value in found["config"].items() if name not in ("experiment", "run")}
    for name in PATHS:
        if given := config.get(name):
            config[name] = [Path(one).name for one in given] if isinstance(given, list) else Path(given).name
    found["config"] = config | {"workdir": None}
    return found, "".join(line for line in lines if "seed" in json.loads(line))


def of_part(found: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the content of a file of on_accelerator.py to that of a results file: FIGURE[_low]_POINT.

    >>> figures = {"step_ms": {"median": 1.5, "low": 1.0, "high": 2.0, "rounds": 24}, "error": 0.1}
    >>> rows = [{"point": {"width": 16, "batch": 64}, "figures": figures}]
    >>> part = {"part": "step_time", "kind": "measured", "about": {}, "left_out": [], "rows": rows}
    >>> of_part(part)["results"]
    {'step_ms_width_16_batch_64': 1.5, 'step_ms_low_width_16_batch_64': 1.0, 'step_ms_high_width_16_batch_64': 2.0,
     'step_ms_rounds_width_16_batch_64': 24, 'error_width_16_batch_64': 0.1}
    """
    if found["kind"] != "measured":
        raise ValueError(f"a file of kind {found['kind']!r} holds no measurement: run the part without --smoke.")
    results = {}
    for row in found["rows"]:
        point = "_".join(f"{name}_{value}" for name, value in row["point"].items())
        for name, value in row["figures"].items():
            for key, one in (value if isinstance(value, dict) else {"median": value}).items():
                results[f"{name}_{point}" if key == "median" else f"{name}_{key}_{point}"] = one
    config = {"parts": [found["part"]]}
    return {"config": config, "environment": found["about"], "results": results, "left_out": found["left_out"]}


def runs(root: Path) -> dict[str, list[Run]]:
    """All results files of a checkout, in the order of claims.json: {name: a run for each machine}."""
    results = root / "experiments" / "results"
    about = json.loads((root / "experiments" / "claims.json").read_text())["runs"]
    files = {f"{path.parent.name}/{path.stem}" for path in results.glob("*/*.json")}
    if lost := sorted(files ^ about.keys()):
        raise ValueError(
            f"experiments/claims.json and experiments/results differ in {', '.join(lost)}: each file needs an entry of "
            "`runs`, with command, says and tables."
        )
    found: dict[str, list[Run]] = {}
    for file in about:
        path = results / f"{file}.json"
        rows = path.with_suffix(".jsonl")
        seeds = f"../{rows.relative_to(root)}" if rows.exists() else ""
        other = path.with_name(f"{BESIDE.get(path.stem)}.json")
        beside = json.loads(other.read_text())["results"] if other.exists() else {}
        run = Run(path.parent.name, path.stem, json.loads(path.read_text()), about[file], seeds, beside)
        found.setdefault(path.stem, []).append(run)
    return found


def correction(splits: int, test_over_train: float) -> float:
    """Return by how much an interval over random splits of one sample must be wider, to hold for another sample.

    The splits share most of their rows, so the mean over n of them has the variance (1/n + test/train) s^2 and not
    s^2 / n. Reference: Nadeau and Bengio, "Inference for the Generalization Error", Machine Learning 52, 2003,
    corrected resampled t-test.

    Args:
      test_over_train: test rows of a split for each of its training rows.

    >>> correction(splits=15, test_over_train=0.2)
    2.0
    """
    return math.sqrt(1 + splits * test_over_train)


def end_of(results: Mapping[str, Any], key: str, end: str) -> Any:
    """The end of an interval of a figure, whose key has the name of the end somewhere in that of the figure.

    >>> end_of({"rate_low_width_16": 1.0, "rate_width_16": 2.0}, "rate_width_16", "low")
    1.0
    """
    words = key.split("_")
    keys = ("_".join([*words[:i], end, *words[i:]]) for i in range(1, len(words) + 1))
    return next((results[each] for each in keys if results.get(each) is not None), None)


def figure(results: Mapping[str, Any], key: str, decimals: int, share: bool = False, interval: bool = False) -> str:
    """Format a figure of a results file, with its interval if asked to and if there is one.

    >>> results = {"rate_a": 1.5, "rate_low_a": 1.0, "rate_high_a": 1234.5, "auc": 0.75, "auc_half_interval": 0.25}
    >>> figure(results, "rate_a", 2, interval=True), figure(results, "auc", 1, share=True, interval=True)
    ('1.50 (1.00 to 1,234.50)', '75.0 ± 25.0 %')
    >>> figure(results | {"auc_corrected": 0.5}, "auc", 2, interval=True)
    '0.75 ± 0.25 (corrected ± 0.50)'
    """
    times = 100 if share else 1
    number = lambda value: f"{round(value * times, decimals) + 0.0:,.{max(decimals, 0)}f}" if value else "0"
    text, unit = number(results[key]), " %" if share else ""
    low, high = end_of(results, key, "low"), end_of(results, key, "high")
    half = next((found for end in HALVES if (found := end_of(results, key, end)) is not None), None)
    if not interval or (low is None and half is None):
        return text + unit
    if half is None:
        return f"{text}{unit} ({number(low)} to {number(high)}{unit})"
    corrected = end_of(results, key, "corrected")
    return f"{text} ± {number(half)}{unit}" + (f" (corrected ± {number(corrected)})" if corrected is not None else "")


def filled(text: str, results: Mapping[str, Any], found: Mapping[str, list[Run]]) -> str:
    """Put figures in place of {key:decimals}.

    Raises:
      ValueError: a file lacks a key, or is that of several machines, or what is between braces has another form.
    """

    def shown(match: re.Match) -> str:
        name, key, decimals, share, interval = match.groups()
        if name and len(found.get(name, ())) != 1:
            raise ValueError(f"{match[0]}: no one file is called {name}; give the figures of one in its own text.")
        of = found[name][0].results if name else results
        if not isinstance(of.get(key), int | float):
            raise ValueError(f"{match[0]}: the file lacks {key!r}: give a key of its results in claims.json.")
        return figure(of, key, int(decimals), bool(share), bool(interval))

    if "{" in _FIGURE.sub("", text):
        raise ValueError(
            f"{text!r}: a figure is {{key:decimals}} or {{key:decimals%}}, either with ~ before the brace."
        )
    return _FIGURE.sub(shown, text)


def cells(table: Mapping[str, Any], results: Mapping[str, Any]) -> list[list[str]]:
    """The rows of a table, the heading first."""
    kind = table["head"].partition(":")[0]
    if kind not in KINDS:
        raise ValueError(f"a table's head begins with its kind, {', '.join(KINDS)}, not {table['head']!r}.")
    rows = [[table["head"], *table["columns"]]]
    for label, row in table["rows"].items():
        texts = []
        each = row if isinstance(row, list) else [row] * len(table["columns"])
        for given, column in zip(each, table["columns"].values(), strict=True):
            text = column.replace("*", given) if isinstance(row, str) and "*" not in row else given.replace("*", column)
            if text and "{" not in text:
                text = f"{{{text}~}}"
            for named in ([other for other in KINDS if other in key] for _, key, *_ in _FIGURE.findall(text)):
                if named and kind not in named:
                    raise ValueError(f"{text} is {', '.join(named)}, in a table of kind {kind!r}.")
            texts.append(filled(text, results, {}))
        rows.append([label, *texts])
    return rows


def table_of(head: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a table in Markdown, and an empty one."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)] + [""]


def by_met(claims: list) -> list:
    """Sort claims in page order: those that hold first, those contradicted last."""
    return sorted(claims, key=lambda claim: MET.index(claim["met"]))


def section(run: Run, found: Mapping[str, list[Run]]) -> str:
    """The section of a run, in Markdown."""
    results = run.results
    seeds = f", [each seed]({run.seeds})" if run.seeds else ""
    says = filled(run.about["says"], results, found)
    origin = f"`{run.about['command']}`, {run.where}: [{run.name}.json]({run.file}){seeds}."
    lines = [f"### {run.heading}", f"{origin} {says}", ""]
    for table in run.about["tables"]:
        head, *rows = cells(table, results)
        lines += table_of(head, rows)
    return "\n".join(lines)


def markdown(claims: Mapping[str, Any], found: Mapping[str, list[Run]]) -> str:
    """The page in Markdown, for readers of the repository."""
    lines = ["# Results", ""]
    for text in claims["says"]:
        lines += [filled(text, {}, found), ""]
    for paper in claims["papers"]:
        claims_of = by_met(paper["claims"])
        rows = [[claim["claim"], claim["met"], filled(claim["how"], {}, found)] for claim in claims_of]
        lines += [f"## {paper['name']}", f"{paper['source']}.", ""]
        lines += table_of(["claim", "here", "how far, where or why"], rows)
        for claim in claims_of:
            links = ", ".join(run.link for name in claim["runs"] for run in found[name])
            says = filled(claim["says"], {}, found) + f" Runs: {links}." * bool(links)
            lines += [f"### {claim['claim']}: {claim['met']}", says, ""]
            for run, words in pictures(claim, found):
                lines += [f"![{words}]({Path(run.file).with_suffix('.png')})", ""]
    every = [run for of_name in found.values() for run in of_name]
    for machine, about in claims["machines"].items():
        lines += [f"## {about['title']}", about["says"], ""]
        lines += [section(run, found) for run in every if run.machine == machine]
    return "\n".join(lines)


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading.

    >>> anchor("oac_link, two_cores_cpu"), anchor("The rate of asynchronous training: not shown")
    ('oac_link-two_cores_cpu', 'the-rate-of-asynchronous-training-not-shown')
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def page(text: str, directory: Path) -> str:
    """The page as one HTML file with embedded images, from its Markdown.

    Args:
      text: of headings, paragraphs, lists, tables and pictures, with emphasis, code and links.
      directory: to which the paths of pictures are relative.
    """
    body: list[str] = []
    for block in text.strip().split("\n\n"):
        if block.startswith("#"):  # text may follow in the next line
            first, _, block = block.partition("\n")
            level, heading = first.split(" ", 1)
            body.append(f'<h{len(level)} id="{anchor(heading)}">{_said(heading)}</h{len(level)}>')
        if block.startswith("!"):
            words, path = re.fullmatch(r"!\[(.*)\]\((.*)\)", block).groups()  # type: ignore[union-attr]
            data = base64.b64encode((directory / path).read_bytes()).decode()
            body.append(f'<p><img alt="{html.escape(words)}" src="data:image/png;base64,{data}"></p>')
        elif block.startswith("|"):
            head, _, *rows = ([*map(_said, line[2:-2].split(" | "))] for line in block.splitlines())
            lines = [f"<th>{'<th>'.join(head)}", *(f"<td>{'<td>'.join(row)}" for row in rows)]
            body.append(f'<div class="wide"><table><tr>{"<tr>".join(lines)}</table></div>')
        elif block.startswith("- "):
            body.append("<ul>" + "".join(f"<li>{_said(line[2:])}" for line in block.splitlines()) + "</ul>")
        elif block:
            body.append(f"<p>{_said(block)}</p>")
    body.insert(1, _contents(text))
    top = '<!doctype html><html lang="en"><meta charset="utf-8"><title>Results of jaxrec</title>'
    top += f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style>'
    return top + "\n".join(body) + "</html>\n"


def _contents(text: str) -> str:
    """Return links to the sections, each with those below it.

    >>> _contents("# A\\n\\n## B\\n\\n### C d\\n")
    '<nav><details><summary><a href="#b">B</a></summary><ul><li><a href="#c-d">C d</a></ul></details></nav>'
    """
    _, *parts = re.split(r"^(?=## )", text, flags=re.M)
    shown = ""
    for part in parts:
        first, *below = (f'<a href="#{anchor(its)}">{_said(its)}</a>' for its in re.findall(r"^###? (.*)", part, re.M))
        shown += f"<details><summary>{first}</summary><ul>{''.join(f'<li>{link}' for link in below)}</ul></details>"
    return f"<nav>{shown}</nav>"


def _said(text: str) -> str:
    """Markdown within a line, as HTML: code has no links in it, and no stars.

    >>> _said("**See `a[b](c)`, [d](e.md)**: a & b")
    '<strong>See <code>a[b](c)</code>, <a href="e.md">d</a></strong>: a &amp; b'
    """
    parts = html.escape(text).split("`")
    parts[::2] = [re.sub(r"\[([^\]]*)\]\(([^)]*)\)", r'<a href="\2">\1</a>', part) for part in parts[::2]]
    parts[1::2] = [f"<code>{part}</code>" for part in parts[1::2]]
    return re.sub(r"\*\*(.*?)\*\*", r"<strong>\1</strong>", "".join(parts))


def pages(root: Path) -> dict[str, str]:
    """{name: text} of both pages, from the files of a checkout."""
    text = markdown(json.loads((root / "experiments" / "claims.json").read_text()), runs(root))
    return {"results.md": text, "results.html": page(text, root / "docs")}


# Pictures: each says in its metadata which results it shows.


def pictures(claim: Mapping[str, Any], found: Mapping[str, list[Run]]) -> list[tuple[Run, str]]:
    """The runs whose pictures a claim shows, one for each machine, with words for readers without images."""
    return [(run, words) for name, words in claim.get("pictures", {}).items() for run in found[name]]


def digest(run: Run) -> str:
    """Of the results that a picture is drawn from."""
    return hashlib.sha256(json.dumps(run.drawn, sort_keys=True).encode()).hexdigest()


def drawn_from(picture: Path) -> str | None:
    """Digest of the results that a picture shows; None without a picture."""
    from PIL import Image

    return Image.open(picture).info.get("Source") if picture.exists() else None


def draw(run: Run, target: Path) -> None:
    """Draw the picture of a results file to `target`."""
    from PIL import Image, PngImagePlugin

    with tempfile.TemporaryDirectory() as directory:
        PICTURES[run.name]({**run.found, "results": run.drawn}, Path(directory))
        (drawn,) = Path(directory).glob("*.png")
        said = PngImagePlugin.PngInfo()
        said.add_text("Source", digest(run))
        with atomic_write(target) as partial:
            Image.open(drawn).save(partial, format="png", pnginfo=said, optimize=True)


@dataclasses.dataclass(frozen=True)
class Config:
    """A run to store first."""

    add: Path | None = None
    """Directory of the run, or the file of a part of on_accelerator.py."""
    to: str = ""
    """MACHINE/NAME to store it as; experiments/claims.json needs an entry for it."""


def main(config: Config, root: Path = ROOT) -> dict[str, str]:
    """Store a run if asked to, draw stale pictures and write both pages; return {name: text} of the pages."""
    if (config.add is None) != (not config.to):
        raise ValueError("--add and --to come together: the directory of a run, and MACHINE/NAME to store it as.")
    if config.add:
        print(add(config.add, config.to, root).relative_to(root))
    for each in (run for name in PICTURES for run in runs(root)[name]):
        to = (root / "docs" / each.file).with_suffix(".png")
        if drawn_from(to) != digest(each):
            draw(each, to)
            print(each.file.removeprefix("../"))
    made = pages(root)
    for name, text in made.items():
        write_text(root / "docs" / name, text)
        print(f"docs/{name}")
    return made


if __name__ == "__main__":
    command_line(main, Config, __doc__)
