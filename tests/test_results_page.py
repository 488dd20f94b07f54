"""The page of results equals its files: each claim has a row, and a figure that differs is noticed."""

import html.parser
import json
import re
import shutil
from pathlib import Path

import pytest
import results_page
from results_page import KINDS, MET, by_met, commands, pages, row

ROOT = Path(__file__).parent.parent
PAPERS = json.loads((ROOT / "experiments" / "claims.json").read_text())
FIGURE = {"what": "rate", "file": "a", "key": "rate", "decimals": 2, "how": "measured"}
FOUND = {"cores": 2, "device": "cpu", "date": "2026-01-01"}


@pytest.mark.parametrize("name", ["results.md", "results.html"])
def test_a_page_is_that_of_its_files(name):
    assert pages(ROOT)[name] == (ROOT / "docs" / name).read_text(), "python experiments/results_page.py"


def test_a_figure_that_differs_makes_a_page_stale(tmp_path):
    for name in ("docs", "experiments"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("notebooks", "__pycache__"))
    assert pages(tmp_path) == pages(ROOT)
    path = tmp_path / "experiments" / "results" / "cpr_real_cost.json"
    found = json.loads(path.read_text())
    found["results"]["one_shard_over_full_restore"] += 0.01
    path.write_text(json.dumps(found))
    assert all(pages(tmp_path)[name] != pages(ROOT)[name] for name in pages(ROOT))


@pytest.mark.parametrize(
    "more, results, value, interval",
    [
        ({}, {}, "1.50", ""),
        ({"half": "h"}, {"h": 0.25}, "1.50", "1.25 to 1.75 (95 %)"),
        ({"low": "l", "high": "u"}, {"l": 1, "u": 1234.5}, "1.50", "1.00 to 1,234.50 (95 %)"),
        ({"low": "l", "high": "u", "ends": "range"}, {"l": 1, "u": 2}, "1.50", "1.00 to 2.00 (range)"),
        ({"runs": ["n", "seeds"], "unit": " %"}, {"n": 8}, "1.50 %", "8 seeds"),
        ({"runs": ["n", "seeds"], "half": "h"}, {"n": 8, "h": 0.5}, "1.50", "1.00 to 2.00 (95 %), 8 seeds"),
    ],
)
def test_a_row_says_a_figure_and_its_interval(more, results, value, interval):
    made = row(FIGURE | more, {"results": {"rate": 1.5, **results}, "environment": FOUND}, "python x.py")
    assert made[1:3] == (value, interval) and made.machine == "2 cores, cpu, 2026-01-01"


def test_a_key_that_a_file_lacks_is_refused():
    with pytest.raises(ValueError, match=r"a\.json lacks \['h'\].*claims\.json"):
        row(FIGURE | {"half": "h"}, {"results": {"rate": 1.5}, "environment": FOUND}, "")


def test_every_paper_has_claims_that_are_not_reproduced_and_they_come_first():
    assert [paper["name"] for paper in PAPERS] == ["OAC", "ShadowSync", "CPR"]
    for paper in PAPERS:
        order = [MET.index(claim["met"]) for claim in by_met(paper["claims"])]
        assert order == sorted(order) and order[0] == 0 and len(order) >= 5
        assert all(claim["says"] for claim in paper["claims"])
        assert all(bool(claim["figures"]) == (claim["met"] != "not reproduced") for claim in paper["claims"])


def test_kinds_share_no_column_and_every_row_has_a_command_of_its_file():
    text = pages(ROOT)["results.md"]
    ran = commands((ROOT / "docs" / "measured.md").read_text())
    heads = [line.split("|")[2].strip() for line in text.splitlines() if line.startswith("| figure |")]
    assert heads and set(heads) <= set(KINDS)
    for figure in (one for paper in PAPERS for claim in paper["claims"] for one in claim["figures"]):
        named = [kind for kind in KINDS if kind in figure["key"]]
        assert named in ([], [figure["how"]]), figure  # a key that names a kind is shown as that kind
        assert f"`{ran[figure['file']]}`" in text


def test_the_page_of_html_stands_alone():
    links = []
    parser = html.parser.HTMLParser()
    parser.handle_starttag = lambda tag, attrs: links.extend(v for k, v in attrs if k in ("href", "src"))
    parser.feed(pages(ROOT)["results.html"])
    assert sum(link.startswith("data:image/png;base64,") for link in links) == len(results_page.PICTURES)
    files = {link for link in links if not link.startswith("data:")}
    assert all(re.fullmatch(r"\.\./experiments/results/\w+\.json", link) for link in files)
    assert all((ROOT / "docs" / link).exists() for link in files)
