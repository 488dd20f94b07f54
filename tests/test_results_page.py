"""The page of results equals its files: each claim has a row, and a figure that differs is noticed."""

import html.parser
import json
import re
import shutil
from pathlib import Path

import pytest
from results_page import KINDS, MET, PICTURES, Config, Run, add, by_met, digest, drawn_from, main, pages, row, runs

ROOT = Path(__file__).parent.parent
PAPERS = json.loads((ROOT / "experiments" / "claims.json").read_text())
FIGURE = {"what": "rate", "file": "a", "key": "rate", "decimals": 2, "how": "measured"}
FOUND = {"cores": 2, "device": "cpu", "date": "2026-01-01"}
RESULTS = ROOT / "experiments" / "results"


def run_of(results):
    return Run("m", "a", {"results": results, "environment": FOUND}, "python x.py")


@pytest.fixture
def checkout(tmp_path):
    """A copy of the pages and their files."""
    for name in ("docs", "experiments"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("notebooks", "__pycache__"))
    return tmp_path


@pytest.mark.parametrize("name", ["results.md", "results.html"])
def test_a_page_is_that_of_its_files(name):
    assert pages(ROOT)[name] == (ROOT / "docs" / name).read_text(), "python experiments/results_page.py"


def test_a_figure_that_differs_makes_a_page_stale(checkout):
    assert pages(checkout) == pages(ROOT)
    (path,) = (checkout / "experiments" / "results").glob("*/cpr_real_cost.json")
    found = json.loads(path.read_text())
    found["results"]["one_shard_over_full_restore"] += 0.01
    path.write_text(json.dumps(found))
    assert all(pages(checkout)[name] != pages(ROOT)[name] for name in pages(ROOT))


def test_a_second_machine_has_rows_of_its_own(checkout):
    results, measured = checkout / "experiments" / "results", checkout / "docs" / "measured.md"
    (path,) = results.glob("*/oac_link.json")
    (results / "h100").mkdir()
    shutil.copy(path, results / "h100")
    section = (
        "`python experiments/oac_link.py` on 2026-01-01:\n[oac_link.json](../experiments/results/h100/oac_link.json)"
    )
    measured.write_text(f"{measured.read_text()}\n{section}\n")
    rows = lambda root: re.findall(r"^\|.*\[oac_link\]\(#(\S+)\) \|$", pages(root)["results.md"], re.M)
    assert rows(ROOT) == [f"oac_link-{path.parent.name}"] and rows(checkout) == ["oac_link-h100", *rows(ROOT)]


@pytest.fixture
def finished(tmp_path):
    """The directory of a run that has ended."""
    directory = tmp_path / "run"
    directory.mkdir()
    config = {
        "seeds": 2,
        "path": "/home/me/x.prepared",
        "workdir": "/home/me/runs",
        "run": "1",
        "experiment": "oac_link",
    }
    for name, content in {"config": config, "environment": FOUND, "results": {"auc": 0.5}}.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    rows = [{"seed": 0, "auc": 0.25}, {"point": 1}, {"seed": 1, "auc": 0.75}]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def test_a_stored_run_has_its_figures_a_row_per_seed_and_no_path_of_the_machine(tmp_path, finished):
    path = add(finished, "m/a", tmp_path)
    config = {"seeds": 2, "path": "x.prepared", "workdir": None}
    assert json.loads(path.read_text()) == {"config": config, "environment": FOUND, "results": {"auc": 0.5}}
    rows = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    assert rows == [{"seed": 0, "auc": 0.25}, {"seed": 1, "auc": 0.75}]
    (finished / "metrics.jsonl").write_text("")  # a later run that logs no seeds takes the place of both files
    assert add(finished, "m/a", tmp_path) == path and not path.with_suffix(".jsonl").exists()


def test_a_part_of_the_accelerator_kit_is_stored_and_a_smoke_test_is_refused(tmp_path):
    median = {"median": 2.0, "low": 1.0, "high": 3.0, "rounds": 24}
    rows = [{"point": {"batch": 64}, "figures": {"step_ms": median, "bitwise_equal": True}}]
    part = {"part": "oac", "kind": "measured", "about": FOUND, "seconds": 9, "left_out": ["batch 4"], "rows": rows}
    (tmp_path / "oac.json").write_text(json.dumps(part))
    found = json.loads(add(tmp_path / "oac.json", "gpu/oac", tmp_path).read_text())
    assert found["config"] == {"parts": ["oac"]} and found["environment"] == FOUND and found["left_out"] == ["batch 4"]
    assert row(
        FIGURE | {"key": "step_ms_batch_64", "low": "step_ms_low_batch_64", "high": "step_ms_high_batch_64"},
        Run("gpu", "oac", found, "python x.py"),
    )[1:3] == ("2.00", "1.00 to 3.00 (95 %)")
    assert found["results"]["bitwise_equal_batch_64"] is True
    (tmp_path / "oac.json").write_text(json.dumps(part | {"kind": "smoke, not a measurement"}))
    with pytest.raises(ValueError, match="holds no measurement"):
        add(tmp_path / "oac.json", "gpu/other", tmp_path)


def test_what_cannot_be_stored_is_refused_and_a_run_without_a_section_is_named(checkout, finished):
    for to in ("a", "../m/a", "m/a.json"):
        with pytest.raises(ValueError, match="is not MACHINE/NAME"):
            add(finished, to, checkout)
    with pytest.raises(ValueError, match="come together"):
        main(Config(add=finished), checkout)
    with pytest.raises(ValueError, match=r"docs/measured\.md has no section for m/a\.json"):
        main(Config(add=finished, to="m/a"), checkout)
    (finished / "results.json").unlink()
    with pytest.raises(ValueError, match=r"no finished run: it lacks results\.json"):
        add(finished, "m/b", checkout)


def test_the_rows_of_seeds_have_the_mean_of_the_page():
    (run,) = runs(ROOT)["cpr_overhead_criteo"]
    rows = [json.loads(line) for line in (ROOT / "docs" / run.seeds).read_text().splitlines()]
    results = run.found["results"]
    auc_of = lambda scheme: {each["seed"]: each["test_auc"] for each in rows if each["scheme"] == scheme}
    vanilla = auc_of("vanilla")
    for scheme in ("mfu", "ssu", "scar"):
        gain = [auc - vanilla[seed] for seed, auc in auc_of(scheme).items()]
        assert sum(gain) / len(gain) == pytest.approx(results[f"cpr_{scheme}_test_auc_minus_vanilla"], abs=1e-12)
    for scheme in {each["scheme"] for each in rows}:
        auc = auc_of(scheme)
        assert len(auc) == run.found["config"]["seeds"]
        assert sum(auc.values()) / len(auc) == pytest.approx(
            results[f"{'' if scheme == 'no_failure' else 'cpr_'}{scheme}_test_auc_mean"], abs=1e-12
        )
    assert f"[{run.name}.jsonl]({run.seeds})" in pages(ROOT)["results.md"]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_that_of_its_file(name):
    for run in runs(ROOT)[name]:
        assert drawn_from(RESULTS / run.machine / f"{name}.png") == digest(run), "python experiments/results_page.py"


def test_a_picture_of_two_files_is_stale_when_the_second_differs(checkout):
    path = checkout / "experiments" / "results" / "one_h200" / "oac.json"
    found = json.loads(path.read_text())
    found["results"]["oac_4_rate_over_sync_width_16_batch_16384"] += 0.01
    path.write_text(json.dumps(found))
    assert digest(*runs(checkout)["oac_wide"]) != digest(*runs(ROOT)["oac_wide"])


def test_every_picture_is_shown():
    named = [name for paper in PAPERS for claim in paper["claims"] for name in claim.get("pictures", {})]
    assert sorted(named) == sorted(PICTURES) == sorted({path.stem for path in RESULTS.glob("*/*.png")})


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
    made = row(FIGURE | more, run_of({"rate": 1.5, **results}))
    assert made[1:3] == (value, interval) and made.run.where == "2 cores, cpu, 2026-01-01"


def test_a_key_that_a_file_lacks_is_refused():
    with pytest.raises(ValueError, match=r"a\.json lacks \['h'\].*claims\.json"):
        row(FIGURE | {"half": "h"}, run_of({"rate": 1.5}))


def test_every_paper_has_claims_that_are_not_reproduced_and_they_come_first():
    assert [paper["name"] for paper in PAPERS] == ["OAC", "ShadowSync", "CPR"]
    for paper in PAPERS:
        order = [MET.index(claim["met"]) for claim in by_met(paper["claims"])]
        assert order == sorted(order) and order[0] == 0 and len(order) >= 5
        assert all(claim["says"] for claim in paper["claims"])
        shown = {claim["met"] for claim in paper["claims"] if claim["figures"]}
        assert "not reproduced" not in shown
        assert all(claim["figures"] or claim["met"] in ("not reproduced", "not shown") for claim in paper["claims"])


def test_kinds_share_no_column_and_every_row_leads_to_its_run():
    text, found = pages(ROOT)["results.md"], runs(ROOT)
    heads = [line.split("|")[2].strip() for line in text.splitlines() if line.startswith("| figure |")]
    assert heads and set(heads) <= set(KINDS)
    for figure in (one for paper in PAPERS for claim in paper["claims"] for one in claim["figures"]):
        named = [kind for kind in KINDS if kind in figure["key"]]
        assert named in ([], [figure["how"]]), figure  # a key that names a kind is shown as that kind
        for run in found[figure["file"]]:
            assert f"](#{run.anchor}) |" in text
            assert f"### {run.heading}\n\n`{run.command}`\n\n{run.where}: [{run.name}.json]({run.file})\n" in text


def test_the_page_of_html_stands_alone():
    links, anchors = [], []
    parser = html.parser.HTMLParser()

    def seen(tag, attrs):
        links.extend(v for k, v in attrs if k in ("href", "src"))
        anchors.extend(v for k, v in attrs if k == "id")

    parser.handle_starttag = seen
    parser.feed(pages(ROOT)["results.html"])
    assert sum(link.startswith("data:image/png;base64,") for link in links) == len(list(RESULTS.glob("*/*.png")))
    assert {link[1:] for link in links if link.startswith("#")} == set(anchors) and len(anchors) == len(set(anchors))
    files = {link for link in links if not link.startswith(("data:", "#"))}
    assert all(re.fullmatch(r"\.\./experiments/results/\w+/\w+\.jsonl?", link) for link in files)
    assert all((ROOT / "docs" / link).exists() for link in files)
