"""Generate docs/results.md and docs/results.html from experiments/results and experiments/claims.json.

    python experiments/results_page.py
    python experiments/results_page.py --add runs/oac_link-1 --to two_cores_cpu/oac_link     first stores a run there
    python experiments/results_page.py --add runs/gpu/oac.json --to one_h200/oac    a part of on_accelerator.py

claims.json has, for each claim of the papers' abstracts, how far it is met, a sentence, the keys of its figures and its
picture. Figures are read from experiments/results/MACHINE/NAME.json, with a row for each machine that has the file, and
pictures are drawn from it. Commands are taken from docs/measured.md, which tests check against the files.
"""

import base64
import dataclasses
import hashlib
import html
import json
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import cluster_failures
import cpr_overhead
import oac_throughput
import shadowsync_isolation
import shadowsync_quality
import shadowsync_scaling
from main.cli import command_line

from jaxrec.files import atomic_write, make_directory, write_text

ROOT = Path(__file__).parent.parent
KINDS = ("measured", "emulated", "simulated", "modelled")
PATHS = ("path", "traces")  # flags that name a place on one machine
MET = ("not reproduced", "no", "not shown", "partly", "yes")  # unfavourable first
HEAD = (
    "Every claim of the three abstracts, as far as two CPU cores and half an hour on one GPU can tell. "
    "Only the abstracts could be read. "
    "The last column of a table leads to the run: its command, machine, date and file."
)
_RUN = re.compile(
    r"^`(python experiments/[^`]*)`[^\n]*\n\[\w+\.json\]\(\.\./experiments/results/(\w+/\w+)\.json\)", re.M
)
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
    "cluster_failures": lambda found, to: cluster_failures.draw_overheads(to / "overheads.png", found["results"]),
}
BESIDE = {"oac_wide": "oac"}  # another file of the machine, whose results the picture of the first shows too


class Run(NamedTuple):
    """A results file: the folder of its machine, its name, content and command, the file with its seeds' rows, and
    the results of the file in BESIDE."""

    machine: str
    name: str
    found: Mapping[str, Any]
    command: str
    seeds: str = ""
    beside: Mapping[str, Any] = {}

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
    def anchor(self) -> str:
        return self.heading.replace(", ", "-")

    @property
    def where(self) -> str:
        environment = self.found["environment"]
        cores = f"{environment['cores']} core{'s' * (environment['cores'] != 1)}"
        parts = (cores, environment.get("cpu"), environment["device"], environment["date"])
        return ", ".join(filter(None, parts))


class Row(NamedTuple):
    """A row of a table: a figure with its interval and origin."""

    what: str
    value: str
    interval: str
    run: Run


def commands(measured: str) -> dict[str, str]:
    """Parse docs/measured.md into {machine/name of a results file: command that produced it}.

    >>> commands("`python experiments/a.py --x 1` (in `make soak`) on 2026-01-01:\\n"
    ...          "[b.json](../experiments/results/m/b.json)")
    {'m/b': 'python experiments/a.py --x 1'}
    """
    return {file: command for command, file in _RUN.findall(measured)}


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
    """All results files of a checkout: {name: a run for each machine}."""
    ran = commands((root / "docs" / "measured.md").read_text())
    found: dict[str, list[Run]] = {}
    for path in sorted((root / "experiments" / "results").glob("*/*.json")):
        machine, name = path.parent.name, path.stem
        if f"{machine}/{name}" not in ran:
            raise ValueError(
                f"docs/measured.md has no section for {machine}/{name}.json: write one, which begins with "
                "`python experiments/...` on its date and a link to the file."
            )
        rows = path.with_suffix(".jsonl")
        seeds = f"../{rows.relative_to(root)}" if rows.exists() else ""
        other = path.with_name(f"{BESIDE.get(name)}.json")
        beside = json.loads(other.read_text())["results"] if other.exists() else {}
        run = Run(machine, name, json.loads(path.read_text()), ran[f"{machine}/{name}"], seeds, beside)
        found.setdefault(name, []).append(run)
    return found


def row(figure: Mapping[str, Any], run: Run) -> Row:
    """Format a figure from its results file.

    Args:
      figure: entry of claims.json: what, file, key, decimals; either low and high or half, the keys of its interval.
      run: the file.

    Raises:
      ValueError: the file lacks a key.
    """
    results = run.found["results"]
    times = figure.get("runs", [])
    keys = [figure[name] for name in ("key", "low", "high", "half") if name in figure] + times[:1]
    if lost := [key for key in keys if key not in results]:
        raise ValueError(f"{run.file} lacks {lost}: give keys of its results in experiments/claims.json.")
    value, unit = results[figure["key"]], figure.get("unit", "")
    number = lambda given: f"{given + 0.0:,.{figure['decimals']}f}"
    interval = ""
    if "half" in figure:
        half = results[figure["half"]]
        interval = f"{number(value - half)} to {number(value + half)} (95 %)"
    elif "low" in figure:
        interval = f"{number(results[figure['low']])} to {number(results[figure['high']])}"
        interval += f" ({figure.get('ends', '95 %')})"
    if times:
        interval = ", ".join(filter(None, [interval, f"{results[times[0]]} {times[1]}"]))
    return Row(figure["what"], number(value) + unit, interval, run)


def tables(claim: Mapping[str, Any], found: Mapping[str, list[Run]]) -> dict[str, list[Row]]:
    """{kind: rows} of a claim; figures of different kinds share no column."""
    rows: dict[str, list[Row]] = {kind: [] for kind in KINDS}
    for figure in claim["figures"]:
        rows[figure["how"]] += [row(figure, run) for run in found[figure["file"]]]
    return {kind: of_kind for kind, of_kind in rows.items() if of_kind}


def by_met(claims: list) -> list:
    """Sort claims in page order: those not reproduced first."""
    return sorted(claims, key=lambda claim: MET.index(claim["met"]))


def shown(papers: list, found: Mapping[str, list[Run]]) -> list[Run]:
    """The runs that figures of the page come from."""
    names = {figure["file"] for paper in papers for claim in paper["claims"] for figure in claim["figures"]}
    return [run for name in sorted(names) for run in found[name]]


def markdown(papers: list, found: Mapping[str, list[Run]]) -> str:
    """The page in Markdown, for readers of the repository."""
    lines = ["# Results", "", HEAD, "Made by `python experiments/results_page.py`: change that, or the files.", ""]
    for paper in papers:
        lines += [f"## {paper['name']}", "", f"{paper['source']}.", ""]
        for claim in by_met(paper["claims"]):
            lines += [f"### {claim['claim']}: {claim['met']}", "", claim["says"], ""]
            for kind, rows in tables(claim, found).items():
                lines += [f"| figure | {kind} | interval, seeds | run |", "|---" * 4 + "|"]
                lines += [f"| {' | '.join([*one[:3], f'[{one.run.name}](#{one.run.anchor})'])} |" for one in rows]
                lines.append("")
            for run, words in pictures(claim, found):
                lines += [f"![{words}]({Path(run.file).with_suffix('.png')})", ""]
    lines += ["## Runs", ""]
    for run in shown(papers, found):
        lines += [f"### {run.heading}", "", f"`{run.command}`", "", f"{run.where}: [{run.name}.json]({run.file})"]
        lines += ["", f"Each seed: [{run.name}.jsonl]({run.seeds})"] * bool(run.seeds) + [""]
    return "\n".join(lines)


def page(papers: list, found: Mapping[str, list[Run]], root: Path) -> str:
    """The page as one HTML file with embedded images."""
    body = [f"<h1>Results of jaxrec</h1><p>{HEAD}</p>"]
    for paper in papers:
        body.append(f"<h2>{_said(paper['name'])}</h2><p>{_said(paper['source'])}</p>")
        for claim in by_met(paper["claims"]):
            body.append(f"<h3>{_said(claim['claim'])}: {claim['met']}</h3><p>{_said(claim['says'])}</p>")
            for kind, rows in tables(claim, found).items():
                head = "".join(f"<th>{cell}</th>" for cell in ("figure", kind, "interval, seeds", "run"))
                body.append(f'<div class="wide"><table><tr>{head}</tr>')
                for one in rows:
                    cells = [*map(_said, one[:3]), f'<a href="#{one.run.anchor}">{one.run.name}</a>']
                    body.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
                body.append("</table></div>")
            for run, words in pictures(claim, found):
                data = base64.b64encode((root / "docs" / run.file).with_suffix(".png").read_bytes()).decode()
                body.append(f'<p><img alt="{_said(words)}" src="data:image/png;base64,{data}"></p>')
    body.append("<h2>Runs</h2>")
    for run in shown(papers, found):
        body.append(f'<h3 id="{run.anchor}">{run.heading}</h3><p><code>{_said(run.command)}</code></p>')
        body.append(f'<p>{_said(run.where)}: <a href="{run.file}">{run.name}.json</a></p>')
        if run.seeds:
            body.append(f'<p>Each seed: <a href="{run.seeds}">{run.name}.jsonl</a></p>')
    top = '<!doctype html><html lang="en"><meta charset="utf-8"><title>Results of jaxrec</title>'
    top += f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style>'
    return top + "\n".join(body) + "</html>\n"


def _said(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def pages(root: Path) -> dict[str, str]:
    """{name: text} of both pages, from the files of a checkout."""
    papers, found = json.loads((root / "experiments" / "claims.json").read_text()), runs(root)
    return {"results.md": markdown(papers, found), "results.html": page(papers, found, root)}


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
    """MACHINE/NAME to store it as; docs/measured.md needs a section for it."""


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
