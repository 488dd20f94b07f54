"""What the README says can be done: its Python runs from top to bottom, and its figures come from its commands."""

import dataclasses
import doctest
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = sorted((ROOT / "experiments" / "results").glob("*.json"))
NOT_OF_THE_RUN = {"workdir", "resume", "path", "traces"}  # where things lay
COMMAND = re.compile(r"experiments/(\w+)\.py([^\n`|$]*)")


def blocks(text):
    """The Python of a page, block by block; doctests as what they run."""
    found = re.findall(r"```python\n(.*?)```", text, re.S)
    return [doctest.script_from_examples(block) if block.startswith(">>>") else block for block in found]


END = """
import concurrent.futures, shutil
from jaxrec.shadowsync import Left

assert recovery.saves > 0 and restored_step == 200 and int(state.dense.step) == 200
assert figures.steps == [200] * 8 and min(figures.rounds) > 0 and shadow.rounds > 0


def two_trainers(*texts):  # the last block, as two threads that share a group
    own = {**globals(), "shared": SyncGroup(model_averaging(), params, trainers=2)}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return [found.exception() for found in [pool.submit(exec, text, dict(own)) for text in texts]]


texts = [open(f"trainer_{i}.py").read() for i in (0, 1)]
assert two_trainers(*texts) == [None, None]
shutil.rmtree("runs")
alone = two_trainers(texts[0].replace("state = shadow.finish(pipeline.state)", "pass"), texts[1])
assert alone[0] is None and isinstance(alone[1], Left), alone  # who does not finish leaves the other behind
"""


@pytest.mark.slow
def test_the_readme_runs_from_top_to_bottom(tmp_path):
    """As a user runs it, in a process of its own on the devices of the machine; the last block by two trainers too."""
    parts = blocks(README)
    assert len(parts) == README.count("```python") == 6
    for trainer in (0, 1):
        text = parts[5].replace(
            "SyncGroup(model_averaging(), params, trainers=1).trainer(0)", f"shared.trainer({trainer})"
        )
        assert text != parts[5] and "shadow.finish(" in text
        (tmp_path / f"trainer_{trainer}.py").write_text(text.replace("runs/all", f"runs/all_{trainer}"))
    parts[4] += "restored_step = image.step\n"
    (tmp_path / "readme.py").write_text("\n\n".join([*parts, END]))
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "error::UserWarning", "readme.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def commands():
    """(experiment, flags) of every row of the README's table, and of `make soak`."""
    rows = [line for line in README.splitlines() if line.startswith("|")]
    soaks = [line for line in (ROOT / "Makefile").read_text().splitlines() if "experiments/" in line]
    found = [COMMAND.search(text.split("|")[-2] if text.startswith("|") else text) for text in (*rows, *soaks)]
    return sorted({(match[1], match[2].strip()) for match in found if match and match[1] not in ("prepare", "train")})


def config_of(experiment, flags):
    """What an experiment makes of its flags, as results.json has it."""
    found = tyro.cli(importlib.import_module(experiment).Config, args=shlex.split(flags))
    return json.loads(json.dumps(dataclasses.asdict(found), default=str))


def differences(wanted, found):
    """{flag: (of the command, of the file)}; flags that are younger than the file are not compared."""
    synthetic_only = {"rows"} if found.get("data") == "criteo" else set()
    shared = (wanted.keys() & found.keys()) - NOT_OF_THE_RUN - synthetic_only
    gone = {name: ("no such flag", found[name]) for name in found.keys() - wanted.keys() - {"experiment", "run"}}
    return gone | {name: (wanted[name], found[name]) for name in shared if wanted[name] != found[name]}


def files_of(experiment):
    return {path.stem: json.loads(path.read_text())["config"] for path in RESULTS if path.stem.startswith(experiment)}


@pytest.mark.parametrize(("experiment", "flags"), commands(), ids=map(" ".join, commands()))
def test_a_command_of_the_readme_gives_the_figures_of_its_file(experiment, flags):
    wanted = config_of(experiment, flags)
    differ = {name: differences(wanted, config) for name, config in files_of(experiment).items()}
    assert differ and not all(differ.values()), differ


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_results_file_has_a_command_in_the_readme(path):
    config = json.loads(path.read_text())["config"]
    given = [(name, flags) for name, flags in commands() if path.stem.startswith(name)]
    assert any(not differences(config_of(*each), config) for each in given), given


def test_another_flag_and_a_flag_that_is_gone_are_noticed():
    config = files_of("oac_time_to_accuracy")["oac_time_to_accuracy"]
    assert not differences(config_of("oac_time_to_accuracy", ""), config)
    assert differences(config_of("oac_time_to_accuracy", "--batch-size 128"), config) == {"batch_size": (128, 256)}
    assert differences(config_of("oac_time_to_accuracy", ""), config | {"links": 2}) == {"links": ("no such flag", 2)}
