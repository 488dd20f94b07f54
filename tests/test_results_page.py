"""The page of results equals its files: each claim has a row, and a figure that differs is noticed."""

import html
import html.parser
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from results_page import (
    MET,
    PICTURES,
    Config,
    add,
    by_met,
    cells,
    correction,
    digest,
    drawn_from,
    filled,
    main,
    pages,
    runs,
)

ROOT = Path(__file__).parent.parent
CLAIMS = json.loads((ROOT / "experiments" / "claims.json").read_text())
PAPERS = CLAIMS["papers"]
FOUND = {"cores": 2, "device": "cpu", "date": "2026-01-01"}
RESULTS = ROOT / "experiments" / "results"


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


def test_a_second_machine_has_a_section_and_links_of_its_own(checkout):
    (path,) = (checkout / "experiments" / "results").glob("*/shadowsync_soak.json")
    (checkout / "experiments" / "results" / "h100").mkdir()
    shutil.copy(path, checkout / "experiments" / "results" / "h100")
    claims = json.loads(json.dumps(CLAIMS))
    claims["runs"][f"h100/{path.stem}"] = {"command": "none", "says": "Of earlier code.", "tables": []}
    claims["machines"]["h100"] = {"title": "Runs on another", "says": "Idle."}
    (checkout / "experiments" / "claims.json").write_text(json.dumps(claims))
    text = pages(checkout)["results.md"]
    here, there = f"{path.stem}-{path.parent.name}", f"{path.stem}-h100"
    assert (
        f"[{path.stem}](#{here}), [{path.stem}](#{there}) (earlier code)" in text and f"### {path.stem}, h100\n" in text
    )


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
    assert filled("{step_ms_batch_64:2~}", found["results"], {}) == "2.00 (1.00 to 3.00)"
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
    with pytest.raises(ValueError, match=r"and experiments/results differ in m/a: each file needs an entry"):
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
    assert f"[each seed]({run.seeds})" in pages(ROOT)["results.md"]


def test_a_corrected_interval_is_that_of_nadeau_and_bengio():
    """Recomputed from the rows of 25 random splits, a fifth as many test rows as training rows."""
    assert correction(25, 0.2) == pytest.approx(2.449489742783178)  # the square root of 1 + 25 * 0.2
    (run,) = runs(ROOT)["cpr_overhead_criteo"]
    rows = [json.loads(line) for line in (ROOT / "docs" / run.seeds).read_text().splitlines()]
    mfu, vanilla = ([row["test_auc"] for row in rows if row["scheme"] == scheme] for scheme in ("mfu", "vanilla"))
    gain = np.subtract(mfu, vanilla)
    half = scipy.stats.t.ppf(0.975, 24) * gain.std(ddof=1) * (1 / 25 + 0.2) ** 0.5
    assert half == pytest.approx(0.000991368, abs=1e-9)
    assert run.results["cpr_mfu_test_auc_minus_vanilla_corrected"] == pytest.approx(half)
    assert filled("{cpr_mfu_test_auc_minus_vanilla:5~}", run.results, {}).endswith("(corrected ± 0.00099)")


def test_intervals_are_corrected_wherever_random_splits_of_one_sample_are_compared():
    every = [run for of_name in runs(ROOT).values() for run in of_name]
    splits = {run.name for run in every if str(run.found["config"].get("path")).startswith("['split_0', ")}
    assert splits == {run.name for run in every if run.results is not run.found["results"]}


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
    "text, results, shown",
    [
        ("{a:2} s", {}, "1.50 s"),
        ("{a:2~}", {}, "1.50"),
        ("{a:2~}", {"a_half_interval": 0.25}, "1.50 ± 0.25"),
        ("{a:2~}", {"a_half_width": 0.0}, "1.50 ± 0"),
        ("{a:2~}", {"a_low": 1, "a_high": 1234.5}, "1.50 (1.00 to 1,234.50)"),
        ("{a:2}", {"a_low": 1, "a_high": 2}, "1.50"),
        ("{a:1%}", {}, "150.0 %"),
        ("{a:-2}", {"a": 1251}, "1,300"),
        ("{a:1}", {"a": 0}, "0"),
        ("{a:1}", {"a": -0.01}, "0.0"),
    ],
)
def test_a_text_has_a_figure_and_its_interval(text, results, shown):
    assert filled(text, {"a": 1.5} | results, {}) == shown


def test_a_cell_is_that_of_its_row_and_its_column():
    results = {"a_x": 1, "a_y": 2, "x_b": 3, "y_b": 4}
    columns = {"X": "x", "Y": "y"}
    rows = {"A": "a_*:0", "B": ["*_b:0", ""], "C": "{*_b:0} of {a_*:0}"}
    table = cells({"head": "measured: n", "columns": columns, "rows": rows}, results)
    assert table == [["measured: n", "X", "Y"], ["A", "1", "2"], ["B", "3", ""], ["C", "3 of 1", "4 of 2"]]
    turned = {"head": "measured", "columns": {"A": "a_*:0", "B": "*_b:0"}, "rows": columns}
    assert cells(turned, results)[1:] == [["X", "1", "3"], ["Y", "2", "4"]]


@pytest.mark.parametrize(
    "text, message",
    [
        ("{b:2}", r"the file lacks 'b'.*claims\.json"),
        ("{word:2}", "the file lacks 'word'"),
        ("{other/a:2}", "no one file is called other"),
        ("{a}", "a figure is {key:decimals}"),
    ],
)
def test_a_figure_that_a_file_lacks_or_of_another_form_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        filled(text, {"a": 1.5, "word": "x"}, {})


def test_a_table_of_no_kind_or_with_a_figure_of_another_is_refused():
    with pytest.raises(ValueError, match="begins with its kind, measured"):
        cells({"head": "rates", "columns": {"": "a:1"}, "rows": {"": "*"}}, {"a": 1})
    with pytest.raises(ValueError, match="is modelled, in a table of kind 'measured'"):
        cells({"head": "measured", "columns": {"": "a_modelled:1"}, "rows": {"": "*"}}, {"a_modelled": 1})


def test_every_paper_has_claims_that_are_not_shown_and_those_that_hold_come_first():
    assert [paper["name"] for paper in PAPERS] == ["OAC", "ShadowSync", "CPR"]
    for paper in PAPERS:
        order = [MET.index(claim["met"]) for claim in by_met(paper["claims"])]
        assert order == sorted(order) and MET[order[0]] == "holds" and len(order) >= 9
        assert MET[order[-1]] in ("not shown", "contradicted here")
        assert all(claim["how"] and claim["says"] for claim in paper["claims"])
        assert all(claim["runs"] or claim["met"] == "not shown" for claim in paper["claims"])


def test_every_claim_leads_to_its_runs():
    text, found = pages(ROOT)["results.md"], runs(ROOT)
    for run in (run for of_name in found.values() for run in of_name):
        assert f"### {run.heading}\n`{run.about['command']}`, {run.where}: [{run.name}.json]({run.file})" in text
    for claim in (claim for paper in PAPERS for claim in paper["claims"]):
        assert all(run.link in text for name in claim["runs"] for run in found[name])


def test_the_page_of_html_has_the_cells_of_that_in_markdown():
    made = pages(ROOT)
    lines = [line for line in made["results.md"].splitlines() if line.startswith("|") and "| --- |" not in line]
    rows = re.findall(r"<tr>(.*?)(?=<tr>|</table>)", made["results.html"])
    plain = [[re.sub(r"<[^>]*>", "", cell) for cell in re.split("<t[hd]>", row)[1:]] for row in rows]
    assert plain == [[html.escape(cell).replace("`", "") for cell in line[2:-2].split(" | ")] for line in lines]
    text = re.sub(r"<code>.*?</code>", "", made["results.html"])
    assert "**" not in text and "](" not in text


def test_the_page_of_html_stands_alone():
    links, anchors = [], []
    parser = html.parser.HTMLParser()

    def seen(tag, attrs):
        links.extend(v for k, v in attrs if k in ("href", "src"))
        anchors.extend(v for k, v in attrs if k == "id")

    parser.handle_starttag = seen
    parser.feed(pages(ROOT)["results.html"])
    assert sum(link.startswith("data:image/png;base64,") for link in links) == len(list(RESULTS.glob("*/*.png")))
    assert {"results"} | {link[1:] for link in links if link.startswith("#")} == set(anchors)  # the contents have all
    assert len(anchors) == len(set(anchors))
    files = {link for link in links if not link.startswith(("data:", "#"))}
    assert all((ROOT / "docs" / link).exists() for link in files)
