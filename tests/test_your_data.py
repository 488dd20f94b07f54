"""docs/your_data.md as a new user follows it: its schema and its two commands, on a generated table."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "your_data.md").read_text()


def block(kind):
    (found,) = re.findall(rf"^```{re.escape(kind)}\n(.*?)^```$", PAGE, re.M | re.S)
    return found


def write_clicks(path, rows=4000):
    """Write clicks that depend only on user, item and the items seen."""
    rng = np.random.default_rng(0)
    taste, worth = rng.normal(size=30), rng.normal(size=20)
    lines = [block("csv").splitlines()[0]]
    for row in range(rows):
        user, item, seen = rng.integers(30), rng.integers(20), rng.integers(0, 20, rng.integers(0, 4))
        logit = 1.5 * taste[user] + 1.5 * worth[item] + worth[seen].sum()
        click, price = (
            int(rng.random() < 1 / (1 + np.exp(-logit))),
            f"{rng.random() * 90:.2f}" * int(rng.random() < 0.9),
        )
        tags = "|".join(rng.choice(["new", "red", "big"], rng.integers(0, 3)))
        lines.append(f"{click},u{user},i{item},{price},{tags},{'|'.join(f'i{i}' for i in seen)},{row // 40}")
    path.write_text("\n".join(lines) + "\n")


def shell(line, directory):
    """Run a command of the page in `directory`, with the Python and the scripts of this checkout."""
    words = shlex.split(line)
    assert words[0] == "python" and words[1].startswith("experiments/")
    command = [sys.executable, str(ROOT / words[1]), *words[2:]]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_schema_is_short_and_the_commands_are_two():
    assert len(block("schema.py").splitlines()) <= 15 and len(block("sh").splitlines()) == 2


def test_the_rows_of_the_page_fit_its_schema(tmp_path):
    namespace: dict = {}
    exec(block("schema.py"), namespace)
    header, *rows = block("csv").splitlines()
    assert set(namespace["schema"].used) == set(header.split(","))
    assert all(row.count(",") == header.count(",") for row in rows)


def write_ratings(path, users=150):
    """Write ratings whose users like the movies near to those that they liked; sorted by user, not by time."""
    rng = np.random.default_rng(0)
    lines = []
    for user in range(users):
        taste = rng.integers(4)
        for time in rng.permutation(1000)[:40]:
            movie = rng.integers(40)
            stars = 5 if movie % 4 == taste else rng.integers(1, 4)
            lines.append(f"{user}::é{movie}::{stars}::{978300000 + time}")
    path.write_bytes("\n".join(lines).encode("latin-1"))


def test_ratings_without_histories_lead_to_an_auc(tmp_path):
    write_ratings(tmp_path / "ratings.dat")
    (tmp_path / "ratings.py").write_text(block("ratings.py"))
    assert len(block("ratings.py").splitlines()) <= 12
    prepare, train = block("commands").splitlines()
    assert "train: 4797 rows" in shell(prepare, tmp_path)
    shell(f"{train} --epochs 3 --batch-size 64", tmp_path)
    results = json.loads((tmp_path / "runs" / "ratings" / "results.json").read_text())
    assert results["test_auc"] > 0.9


@pytest.mark.slow
def test_the_page_leads_to_an_auc(tmp_path):
    write_clicks(tmp_path / "clicks.csv")
    (tmp_path / "schema.py").write_text(block("schema.py"))
    prepare, train = block("sh").splitlines()
    said = shell(prepare, tmp_path)
    assert (
        "train: 2800 rows" in said
        and "validation: 400 rows" in said
        and (tmp_path / "clicks.prepared" / "summary.png").stat().st_size > 1000
    )
    assert "AUC" in shell(train, tmp_path)
    results = json.loads((tmp_path / "runs" / "clicks" / "results.json").read_text())
    assert results["test_auc"] > 0.75
    evaluate, predict = re.findall(r"`(python experiments/evaluate.py [^`]*)`", PAGE)
    assert "gauc" in shell(evaluate, tmp_path)
    header, *rows = (tmp_path / "clicks.csv").read_text().splitlines()
    for name, first in (("new.csv", "click,"), ("unlabelled.csv", "")):  # the test rows, with and without labels
        kept = [row if first else row.partition(",")[2] for row in (header, *rows[3200:])]
        (tmp_path / name).write_text("\n".join(kept) + "\n")
    said = shell(f"{predict} --workdir labelled", tmp_path)
    found = json.loads((tmp_path / "labelled" / "results.json").read_text())
    assert found["rows"] == 800 and found["auc"] == pytest.approx(results["test_auc"], abs=1e-6)
    assert re.search(r"(?m)^ *auc +0\.8", said), said
    shell(f"{predict.replace('new.csv', 'unlabelled.csv')} --workdir unlabelled", tmp_path)
    logits = [np.load(tmp_path / name / "predictions.npz")["logit"] for name in ("labelled", "unlabelled")]
    np.testing.assert_array_equal(*logits)
