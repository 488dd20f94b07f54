"""Generate docs/results.md and docs/results.html from experiments/results and experiments/claims.json.

    python experiments/results_page.py

claims.json has, for each claim of the papers' abstracts, how far it is met, a sentence, and the keys of its figures,
which are read from the result files. Commands are taken from docs/measured.md, which tests check against the files.
"""

import base64
import html
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrec.files import atomic_write

ROOT = Path(__file__).parent.parent
KINDS = ("measured", "emulated", "simulated", "modelled")
MET = ("not reproduced", "no", "partly", "yes")  # unfavourable first
PICTURES = {"oac_over_sync.png": "The rate of each mode over that of sync; the link is emulated, no link is measured"}
HEAD = "Every claim of the three abstracts, as far as two CPU cores can tell. Only the abstracts could be read."
_RUN = re.compile(r"^`(python experiments/[^`]*)`[^\n]*\n\[(\w+)\.json\]", re.M)
_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:75rem;margin:auto;padding:1rem;color:#111}
.wide{overflow-x:auto;margin-bottom:1rem}table{border-collapse:collapse;font-size:.85rem}
th,td{border:1px solid #999;padding:.3rem .5rem;
text-align:left;vertical-align:top}th{background:#eee}code{font-size:.8rem;overflow-wrap:anywhere}img{max-width:100%}"""


class Row(NamedTuple):
    """A row of a table: a figure with its interval and origin."""

    what: str
    value: str
    interval: str
    command: str
    machine: str
    file: str


def commands(measured: str) -> dict[str, str]:
    """Parse docs/measured.md into {result file: command that produced it}.

    >>> commands("`python experiments/a.py --x 1` (in `make soak`) on 2026-01-01:\\n[b.json](b.json)")
    {'b': 'python experiments/a.py --x 1'}
    """
    return {file: command for command, file in _RUN.findall(measured)}


def row(figure: Mapping[str, Any], found: Mapping[str, Any], command: str) -> Row:
    """Format a figure from its result file.

    Args:
      figure: entry of claims.json: what, file, key, decimals; either low and high or half, the keys of its interval.
      found: content of the file: results and environment.
      command: command that produced the file.

    Raises:
      ValueError: the file lacks a key.
    """
    results, environment = found["results"], found["environment"]
    runs = figure.get("runs", [])
    keys = [figure[name] for name in ("key", "low", "high", "half") if name in figure] + runs[:1]
    if lost := [key for key in keys if key not in results]:
        raise ValueError(f"{figure['file']}.json lacks {lost}: give keys of its results in experiments/claims.json.")
    value, unit = results[figure["key"]], figure.get("unit", "")
    number = lambda given: f"{given + 0.0:,.{figure['decimals']}f}"
    interval = ""
    if "half" in figure:
        half = results[figure["half"]]
        interval = f"{number(value - half)} to {number(value + half)} (95 %)"
    elif "low" in figure:
        interval = f"{number(results[figure['low']])} to {number(results[figure['high']])}"
        interval += f" ({figure.get('ends', '95 %')})"
    if runs:
        interval = ", ".join(filter(None, [interval, f"{results[runs[0]]} {runs[1]}"]))
    machine = f"{environment['cores']} cores, {environment['device']}, {environment['date']}"
    return Row(figure["what"], number(value) + unit, interval, command, machine, figure["file"])


def tables(claim: Mapping[str, Any], files: Mapping[str, Any], ran: Mapping[str, str]) -> dict[str, list[Row]]:
    """{kind: rows} of a claim; figures of different kinds share no column."""
    made = {kind: [one for one in claim["figures"] if one["how"] == kind] for kind in KINDS}
    return {
        kind: [row(one, files[one["file"]], ran[one["file"]]) for one in figures]
        for kind, figures in made.items()
        if figures
    }


def by_met(claims: list) -> list:
    """Sort claims in page order: those not reproduced first."""
    return sorted(claims, key=lambda claim: MET.index(claim["met"]))


def markdown(papers: list, files: Mapping[str, Any], ran: Mapping[str, str]) -> str:
    """The page in Markdown, for readers of the repository."""
    lines = ["# Results", "", HEAD, "Made by `python experiments/results_page.py`: change that, or the files.", ""]
    for paper in papers:
        lines += [f"## {paper['name']}", "", f"{paper['source']}.", ""]
        for claim in by_met(paper["claims"]):
            lines += [f"### {claim['claim']}: {claim['met']}", "", claim["says"], ""]
            for kind, rows in tables(claim, files, ran).items():
                lines += [f"| figure | {kind} | interval, seeds | command | machine, date | file |", "|---" * 6 + "|"]
                for one in rows:
                    link = f"[{one.file}.json](../experiments/results/{one.file}.json)"
                    cells = [one.what, one.value, one.interval, f"`{one.command}`", one.machine, link]
                    lines.append(f"| {' | '.join(cells)} |")
                lines.append("")
    lines += [f"![{words}](../experiments/results/{name})\n\n{words}." for name, words in PICTURES.items()]
    return "\n".join(lines) + "\n"


def page(papers: list, files: Mapping[str, Any], ran: Mapping[str, str], pictures: Mapping[str, bytes]) -> str:
    """The page as one HTML file with embedded images."""
    body = [f"<h1>Results of jaxrec</h1><p>{HEAD}</p>"]
    for paper in papers:
        body.append(f"<h2>{_said(paper['name'])}</h2><p>{_said(paper['source'])}</p>")
        for claim in by_met(paper["claims"]):
            body.append(f"<h3>{_said(claim['claim'])}: {claim['met']}</h3><p>{_said(claim['says'])}</p>")
            for kind, rows in tables(claim, files, ran).items():
                head = ["figure", kind, "interval, seeds", "command", "machine, date", "file"]
                body.append(f'<div class="wide"><table><tr>{"".join(f"<th>{cell}</th>" for cell in head)}</tr>')
                for one in rows:
                    link = f'<a href="../experiments/results/{one.file}.json">{one.file}.json</a>'
                    cells = [*map(_said, one[:3]), f"<code>{_said(one.command)}</code>", _said(one.machine), link]
                    body.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
                body.append("</table></div>")
    for name, words in PICTURES.items():
        data = base64.b64encode(pictures[name]).decode()
        body.append(f'<p><img alt="{_said(words)}" src="data:image/png;base64,{data}"></p><p>{_said(words)}.</p>')
    top = '<!doctype html><html lang="en"><meta charset="utf-8"><title>Results of jaxrec</title>'
    top += f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style>'
    return top + "\n".join(body) + "</html>\n"


def _said(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def pages(root: Path) -> dict[str, str]:
    """{name: text} of both pages, from the files of a checkout."""
    results = root / "experiments" / "results"
    papers = json.loads((root / "experiments" / "claims.json").read_text())
    files = {path.stem: json.loads(path.read_text()) for path in results.glob("*.json")}
    ran = commands((root / "docs" / "measured.md").read_text())
    pictures = {name: (results / name).read_bytes() for name in PICTURES}
    return {"results.md": markdown(papers, files, ran), "results.html": page(papers, files, ran, pictures)}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit("error: results_page.py takes no flags: it writes docs/results.md and docs/results.html.")
    for name, text in pages(ROOT).items():
        with atomic_write(ROOT / "docs" / name) as partial:
            partial.write_text(text)
        print(f"docs/{name}")
