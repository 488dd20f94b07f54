"""The accelerator kit: its runner survives parts that fail or hang, and every part runs as a smoke test."""

import copy
import dataclasses
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import on_accelerator
import pytest
from accelerator import measure
from accelerator.measure import ROW, Task, in_turns, interval, over
from homes import needs_compiler
from threads import until

SCRIPT = Path(on_accelerator.__file__)


def python(*lines):
    return [sys.executable, "-c", "\n".join(lines)]


def part_of(out, script, seconds=60.0):
    """Runs a shell script, which starts at once, as the process of a part."""
    return on_accelerator.run_part("fake", ["sh", "-c", script], out, seconds)


def before_its_time_begins(monkeypatch, act):
    """Calls `act` right before the runner waits for a part; the part's time limit counts from then on."""
    wait = subprocess.Popen.wait

    def act_and_wait(process, timeout=None):
        if timeout is not None:
            act()
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", act_and_wait)


def alive(pid):
    """Whether a process is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid):
    """Waits until a killed process has ended."""
    until(lambda: not alive(pid))
    return True


# The figures


def test_the_interval_covers_the_median_and_shrinks_with_rounds():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        found = interval(rng.normal(5, 1, 24), draws=400)
        covered += found["low"] <= 5 <= found["high"]
    assert 180 <= covered < 200  # 95 % of 200, but not all
    few, many = (interval(rng.normal(5, 1, n)) for n in (6, 600))
    assert many["high"] - many["low"] < (few["high"] - few["low"]) / 3 and many["rounds"] == 600


def test_the_interval_repeats_and_refuses_what_is_none():
    assert interval([1.0, 2.0, 4.0]) == interval([1.0, 2.0, 4.0])
    assert interval([7.0]) == {"median": 7.0, "low": None, "high": None, "rounds": 1}
    for bad in ([], [1.0, np.nan], [np.inf], [[1.0]]):
        with pytest.raises(ValueError, match="are no rounds"):
            interval(bad)


def test_a_ratio_is_of_paired_rounds():
    """A slow minute that affects both sides leaves the ratio unchanged."""
    below = np.array([1.0, 1.0, 10.0, 1.0])
    found = over(2 * below, below)
    assert found["median"] == found["low"] == found["high"] == 2
    with pytest.raises(ValueError, match="cannot be paired"):
        over([1.0], [1.0, 2.0])


def test_ways_take_turns_and_keep_the_time(monkeypatch):
    clock, called = [0.0], []
    monkeypatch.setattr(measure.time, "monotonic", lambda: clock[0])

    def way(name):
        called.append(name)
        clock[0] += 1
        return clock[0]

    ways = {"a": lambda: way("a"), "b": lambda: way("b")}
    found = in_turns(ways, until=11.0, end=1e9, rounds=24)
    assert called == ["a", "b"] * 5 and [len(v) for v in found.values()] == [5, 5]  # a sixth round would end at 12
    assert len(in_turns(ways, until=0.0, end=1e9)["a"]) == measure.LEAST_ROUNDS  # enough for an interval
    assert len(in_turns(ways, until=0.0, end=clock[0] + 5)["a"]) == 2  # but not beyond the end
    assert len(in_turns(ways, until=1e9, end=1e9, rounds=1)["b"]) == 1


def test_points_stop_when_the_time_is_nearly_used(monkeypatch):
    clock, said, done = [0.0], [], []
    monkeypatch.setattr(measure.time, "monotonic", lambda: clock[0])
    task = Task(seconds=100, say=said.append)

    def pass_time(seconds):
        clock[0] += seconds
        return seconds

    def one(point, until):
        assert clock[0] < until <= task.end
        done.append(point["size"])
        pass_time(4 * point["size"])  # to prepare
        task.turns({"way": lambda: pass_time(2 * point["size"])}, until)

    task.each([{"size": size} for size in (1, 1, 5, 1, 1, 1)], one, cost="size")
    assert done == [1, 1, 1, 1] and 80 < clock[0] < task.end == 90  # 5 needs 4 * 5 and three rounds of 2 * 5
    assert task.left_out == ["size 5: no time was left", "size 1: no time was left"] and len(said) == 2


def test_a_point_that_fails_is_left_out_by_name(capsys):
    task, done = Task(60, say=lambda line: None), []

    def one(point, until):
        if point["batch"] == 1:
            raise MemoryError("first line\nthe card is full")
        done.append(point["batch"])

    task.each([{"batch": n} for n in range(3)], one)
    assert done == [0, 2] and task.left_out == ["batch 1: MemoryError: the card is full"]
    assert "Traceback" in capsys.readouterr().err


def test_a_row_is_kept_and_said():
    said = []
    task = Task(60, say=said.append)
    task.row({"batch": 4}, {"step_ms": interval([1.0, 2.0])})
    assert json.loads(said[0].removeprefix(ROW)) == task.rows[0] and said[0].startswith(ROW)


# The runner


def test_a_part_that_fails_says_why_and_keeps_its_rows(tmp_path, capsys, monkeypatch):
    row = f"""echo '{ROW}{{"point": 1}}'"""
    assert not part_of(tmp_path, f"{row}; echo before; echo MemoryError: the card is full >&2; exit 1")
    said = (tmp_path / "fake.failed.txt").read_text()
    assert "ended with code 1" in said and '1 rows were measured before:\n{"point": 1}' in said
    assert "before" in said and "MemoryError: the card is full" in said.splitlines()[-1]
    assert "before" in capsys.readouterr().out
    assert not part_of(tmp_path, ":")
    assert "ended with code 0 and without a result" in (tmp_path / "fake.failed.txt").read_text()
    before_its_time_begins(monkeypatch, (tmp_path / "begins").touch)  # the runner has seen no result yet
    write = f"until [ -e '{tmp_path}/begins' ]; do sleep 0.01; done; echo x > '{tmp_path}/fake.json'"
    assert part_of(tmp_path, write) and not (tmp_path / "fake.failed.txt").exists()
    assert not part_of(tmp_path, ":")  # the result is from an earlier run


def test_a_part_that_hangs_is_killed_with_all_that_it_started(tmp_path, monkeypatch):
    before_its_time_begins(monkeypatch, lambda: until((tmp_path / "hangs").exists))
    assert not part_of(tmp_path, f"sleep 1000 & echo child $!; : > '{tmp_path}/hangs'; wait", seconds=1.0)
    said = (tmp_path / "fake.failed.txt").read_text()
    assert "killed at its limit of 1 s" in said
    assert gone(int(said.rpartition("child ")[2].split()[0]))


@pytest.mark.process
def test_a_part_does_not_outlive_a_runner_that_is_killed(tmp_path):
    """Otherwise it would hold the accelerator."""
    hang = "import time; time.sleep(1000)"
    lines = [
        "import os, subprocess, sys, threading, on_accelerator",
        "threading.Thread(target=on_accelerator._end_with_the_runner, daemon=True).start()",
        f"p = subprocess.Popen([sys.executable, '-c', {hang!r}])",
        "print('pids', os.getpid(), p.pid, flush=True)",
        "p.wait()",
    ]
    runner = ["import on_accelerator, pathlib, sys"]
    runner += [f"on_accelerator.run_part('fake', {python(*lines)!r}, pathlib.Path({str(tmp_path)!r}), 300)"]
    process = subprocess.Popen(
        python(*runner), stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(SCRIPT.parent)}
    )
    pids = [int(pid) for pid in process.stdout.readline().split()[1:]]
    assert len(pids) == 2 and all(map(alive, pids))
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert all(map(gone, pids))


def fake_parts(monkeypatch, outcomes):
    """Replaces the parts' processes by `outcomes`, {name: act(result path)}; returns the list of names as they run."""
    ran = []

    def run_part(name, command, out, seconds):
        ran.append(name)
        return outcomes.get(name, lambda path: path.write_text(RESULT))(out / f"{name}.json") is not False

    monkeypatch.setattr(on_accelerator, "run_part", run_part)
    return ran


RESULT = json.dumps({"kind": "measured", "rows": [], "left_out": [], "seconds": 1, "about": {"device": "card"}})


def test_a_failing_part_does_not_stop_the_next_and_is_tried_again(tmp_path, monkeypatch, capsys):
    ran = fake_parts(monkeypatch, {"oac": lambda path: False})
    given = on_accelerator.flags(["--out", str(tmp_path)])
    assert on_accelerator.main(given) == 1 and ran == list(on_accelerator.PARTS)
    assert "oac         no result" in capsys.readouterr().out
    ran.clear()
    assert on_accelerator.main(given) == 1 and ran == ["oac"]  # parts with a result are not run again
    ran.clear()
    on_accelerator.main(on_accelerator.flags(["saves", "shadow", "--again", "--out", str(tmp_path)]))
    assert ran == ["shadow", "saves"]  # in the kit's order


def test_all_parts_keep_the_time_that_is_lent(tmp_path, monkeypatch):
    minutes = []
    monkeypatch.setattr(
        on_accelerator, "run_part", lambda name, command, out, seconds: not minutes.append(seconds / 60)
    )
    on_accelerator.main(on_accelerator.flags(["--out", str(tmp_path)]))
    assert sum(minutes) <= 45 and max(minutes) <= 8
    minutes.clear()
    on_accelerator.main(on_accelerator.flags(["--out", str(tmp_path), "--minutes-per-part", "0.5"]))
    assert minutes == [0.5] * len(on_accelerator.PARTS)
    for line in on_accelerator.__doc__.splitlines():  # for a machine with ten minutes a command
        if "--out $OUT" in line:
            parts = line.partition("on_accelerator.py")[2].partition("--out")[0].split()
            assert sum(on_accelerator.PARTS[name].minutes for name in parts) <= 9.5


def test_a_full_disk_does_not_stop_the_next_part(tmp_path, capsys):
    (tmp_path / "fake.failed.txt.partial").mkdir()  # blocks the temporary file of the text
    assert not part_of(tmp_path, "exit 1")
    assert "could not be written" in capsys.readouterr().out


def test_a_damaged_result_is_named(tmp_path):
    (tmp_path / "oac.json").write_text('{"half')
    assert "oac.json is damaged: --again" in on_accelerator.summary(["oac"], tmp_path)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--out", __file__], "is no directory"),
        (["--out", "s3://bucket/run"], "is no path on this machine"),
        (["step_tim", "--out", "x"], "there is no part 'step_tim'"),
        ([], "--out"),
        (["--out", "x", "--minutes-per-part", "0"], "must be above 0"),
        (["--out", "x", "--minutes-per-part", "nan"], "must be above 0"),
    ],
)
def test_bad_flags_are_refused_by_name(flags, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        on_accelerator.flags(flags)
    assert words in capsys.readouterr().err


def test_a_part_refuses_a_machine_without_accelerator(tmp_path):
    with pytest.raises(ValueError, match="part oac wants an accelerator"):
        on_accelerator.measure("oac", tmp_path, 60, smoke=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.process
def test_the_kit_imports_nothing_that_a_bare_machine_lacks():
    """Tyro, polars, tensorflow-datasets, matplotlib, tqdm and scipy are missing there; scipy comes with jax."""
    lines = ["import sys", "for name in 'tyro polars tensorflow_datasets matplotlib tqdm simpy torch'.split():"]
    lines += ["    sys.modules[name] = None", "import importlib, on_accelerator"]
    lines += [f"importlib.import_module({part.module!r})" for part in on_accelerator.PARTS.values()]
    lines += ["from studies.reference import Job, reference_work", "reference_work(Job(rows=100, model='dcnv2'))"]
    lines += ["assert 'main.cli' not in sys.modules"]
    done = subprocess.run(
        python(*lines), capture_output=True, text=True, cwd="/", env=os.environ | {"PYTHONPATH": str(SCRIPT.parent)}
    )
    assert done.returncode == 0, done.stderr


# The parts


def smoke(name, out):
    done = subprocess.run(
        [sys.executable, SCRIPT, name, "--smoke", "--out", out], capture_output=True, text=True,
        env={key: value for key, value in os.environ.items() if key != "XLA_FLAGS"},
    )  # fmt: skip
    failed = out / f"{name}.failed.txt"
    assert done.returncode == 0, failed.read_text() if failed.exists() else done.stderr
    found = json.loads((out / f"{name}.json").read_text())
    assert found["part"] == name and found["kind"] == "smoke, not a measurement"
    assert found["about"].keys() >= {"device", "driver", "jax", "torch", "commit", "cores"}
    assert [path.name for path in out.iterdir()] == [f"{name}.json"]
    return found, {json.dumps(row["point"]): row["figures"] for row in found["rows"]}


@pytest.mark.slow
@pytest.mark.process
def test_step_time(tmp_path):
    found, rows = smoke("step_time", tmp_path)
    assert len(rows) == 2 and '"dcnv2"' in list(rows)[1]
    for figures in rows.values():
        for way in (
            "jaxrec",
            "jaxrec_device_plan",
            "jaxrec_device_plan_resident",
            "jaxrec_planned",
        ):
            assert figures[f"{way}_ms"]["median"] > 0
        assert figures["jaxrec_matmul_error"] < 1e-5
        if found["about"]["torch"]:
            assert figures["torch_unique_over_jaxrec"]["median"] == pytest.approx(
                figures["torch_unique_ms"]["median"] / figures["jaxrec_ms"]["median"]
            )
        else:
            assert found["left_out"] == ["PyTorch: torch is not installed"]


@pytest.mark.slow
@pytest.mark.process
def test_pinned(tmp_path):
    needs_compiler()
    found, rows = smoke("pinned", tmp_path)
    assert found["left_out"] == ["FBGEMM: there is no GPU, or fbgemm_gpu is not installed"] * 2
    *equality, narrow, wide, ten = rows.values()
    for figures in equality:
        assert all(figures[f"{what}_bitwise_equal"] for what in ("read", "put", "steps", "again"))
    for figures in (narrow, wide, ten):
        assert all(figures[f"{what}_ms"]["median"] > 0 for what in ("pinned", "plan", "read", "put"))
    assert narrow["device_over_pinned"]["median"] > 0 and "device_ms" not in ten
    assert narrow["moved_gb"] == pytest.approx(4e-9 * narrow["unique_rows"] * 17)


@pytest.mark.slow
@pytest.mark.process
def test_oac_streams(tmp_path):
    needs_compiler()
    found, rows = smoke("oac_streams", tmp_path)
    assert found["left_out"] == []
    *equality, wide, narrow, ten = rows.values()
    for figures in equality:
        assert all(figures[f"{way}_bitwise_equal"] for way in ("sync_again", "oac_1", "oac_4", "oac_16"))
    for figures in (wide, narrow, ten):
        assert all(figures[f"{way}_ms"]["median"] > 0 for way in ("sync", "oac_1", "oac_2", "oac_4", "read", "put"))
        assert 0 < figures["oac_1_rows_of_the_ring"] < figures["oac_4_rows_of_the_ring"] < figures["unique_rows"]
    assert wide["device_over_sync"]["median"] > 0 and "device_ms" not in ten


@pytest.mark.slow
@pytest.mark.process
def test_graph(tmp_path):
    needs_compiler()
    found, rows = smoke("graph", tmp_path)
    assert found["left_out"] == []
    (figures,) = rows.values()
    assert all(figures[f"{way}_ms"]["median"] > 0 for way in ("sync", "oac_2", "oac_4", "plan", "read", "put"))
    assert 0 < figures["oac_2_rows_of_the_ring"] < figures["oac_4_rows_of_the_ring"] < figures["unique_rows"]


@pytest.mark.slow
@pytest.mark.process
def test_oac(tmp_path):
    found, rows = smoke("oac", tmp_path)
    assert found["left_out"] == []  # the CPU supports pinned memory, too
    link, *equality, modes = rows.values()
    assert link["fetch_async_gb_per_s"]["median"] > 0 and len(equality) == 2
    for figures in equality:
        assert figures["sync_again_bitwise_equal"] and figures["oac_4_bitwise_equal"]
        assert figures["oac_4_stale_rows"] > 0 and not figures["async_4_bitwise_equal"]  # the case is not trivial
    assert modes["oac_4_rate_over_sync"]["median"] > 0 and modes["oac_4_fetch_pinned_ms"]["median"] > 0


@pytest.mark.slow
@pytest.mark.process
def test_oac_wide(tmp_path):
    _, rows = smoke("oac_wide", tmp_path)
    ((point, figures),) = rows.items()
    assert json.loads(point) == {"batch": 64, "tables": 10, "width": 128, "rows": 2000, "table_gb": 0.0}
    assert figures["oac_4_ms"]["median"] > 0 and figures["stale_rows_share"] > 0


@pytest.mark.slow
@pytest.mark.process
def test_shadow(tmp_path):
    _, rows = smoke("shadow", tmp_path)
    assert len(rows) == 2
    for figures in rows.values():
        assert figures["foreground_sync_gap_steps"]["median"] == 6  # one round every six steps
        assert all(figures[f"{way}_rate_over_none"]["median"] > 0 for way in ("shadow", "blocked", "foreground"))


@pytest.mark.slow
@pytest.mark.process
def test_saves(tmp_path):
    _, rows = smoke("saves", tmp_path)
    assert len(rows) == 2
    for figures in rows.values():
        assert 0 < figures["rows_megabytes"]["median"] < 0.25 * figures["full_megabytes"]["median"]
        for way in ("full", "rows"):
            assert 0 < figures[f"{way}_stall_s"]["median"] <= figures[f"{way}_seconds"]["median"]
            assert figures[f"{way}_rate_beside_over_alone"]["median"] > 0
        assert figures["restore_seconds"]["median"] > 0 and figures["restore_idle_seconds"]["median"] > 0


@pytest.mark.slow
@pytest.mark.process
def test_cores(tmp_path):
    _, rows = smoke("cores", tmp_path)
    alone, *_, averaged = rows.values()
    assert alone["efficiency"] == 1 and len(rows) == 3
    assert averaged["of_none"] > 0 and averaged["sync_gap_steps"] > 0


def from_pytorch(params, module):
    """Our parameters with the values of a PyTorch module: layers of one shape have the same order in both."""
    import jax

    theirs = [p.detach().numpy().T for p in module.parameters()]
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    named = {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}
    found = {}
    for name in sorted(named, key=lambda name: "bottom" not in name):
        index = next(i for i, value in enumerate(theirs) if value.shape == named[name])
        found[name] = theirs.pop(index).copy()
    assert not theirs
    return jax.tree.unflatten(tree, [found[name] for name in named])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of FBGEMM, where it is imported
@pytest.mark.parametrize("hots", ["one", "mlperf"])
@pytest.mark.parametrize("model", ["dlrm", "dcnv2", "dcnv2_mlperf"])
def test_every_pytorch_variant_has_our_losses_from_our_initial_values(model, hots, monkeypatch):
    """Rows begin at zero; the dense network begins with PyTorch's values. Batches repeat, and so do ids within one."""
    torch = pytest.importorskip("torch")
    from studies import torch_dlrm
    from studies.reference import Job, in_bags, reference_work, synthetic

    job = Job(rows=2_000, batch_size=64, model=model, hots=hots, hots_scale=0.1)
    batches, steps = synthetic(job, 3)[1], 12
    work = torch_dlrm.TorchWork(job.cardinalities, job.width, batches, model, field_hots=job.field_hots)
    torch.manual_seed(0)
    initial = work.dense_part()
    monkeypatch.setattr(torch_dlrm.TorchWork, "dense_part", lambda *_: copy.deepcopy(initial))
    monkeypatch.setattr(torch.nn.EmbeddingBag, "reset_parameters", lambda bag: torch.nn.init.zeros_(bag.weight))
    monkeypatch.setattr(torch, "randn", torch.zeros)

    task, params = reference_work(job)
    tables = {name: dataclasses.replace(table, scale=0.0) for name, table in task.spec.tables.items()}
    task = dataclasses.replace(task, spec=dataclasses.replace(task.spec, tables=tables))
    state, ours = task.init(from_pytorch(params, initial), "host"), []
    for i in range(steps):
        state, metrics = task.step(state, in_bags(job, task.spec, batches[i % 3]))
        ours.append(float(metrics["loss"]))
    assert ours[-1] < ours[0]

    for variant, make in torch_dlrm.VARIANTS.items():
        if "compiled" in variant or (variant == "fbgemm" and not importlib.util.find_spec("fbgemm_gpu")):
            continue
        step = make(work)
        theirs = [step(i, resident=bool(i % 2)) for i in range(steps)]
        assert all(map(torch.is_tensor, theirs))  # reading them would wait for the device
        np.testing.assert_allclose([float(loss) for loss in theirs], ours, rtol=2e-5, err_msg=variant)


def test_pytorch_is_given_the_bags_that_jaxrec_is_given():
    """Checked by a loop over examples and fields; ids index the stack of all tables if the variant has one."""
    torch = pytest.importorskip("torch")
    from studies import torch_dlrm
    from studies.reference import Job, in_bags, reference_work, synthetic

    job = Job(rows=500, batch_size=3, hots="mlperf", hots_scale=0.2)
    (batch,) = synthetic(job, 1)[1]
    work = torch_dlrm.TorchWork(job.cardinalities, job.width, [batch], field_hots=job.field_hots)
    bags = in_bags(job, reference_work(job)[0].spec, batch).ids
    bags = {field: ids.reshape(3, -1) for field, ids in bags.items()}
    starts, ids = work.bag_starts.tolist(), (batch.ids["sparse"] + work.stacked_offsets).reshape(-1)
    found = [part.tolist() for part in np.split(ids, starts[1:])]
    first = np.cumsum((0, *job.cardinalities))
    assert found == [(bags[f][b] + first[i]).tolist() for b in range(3) for i, f in enumerate(bags)]
    flat = work.by_field(torch.as_tensor(batch.ids["sparse"])).numpy()
    ends = work.bag_ends_by_field.tolist()
    found = [flat[start:end].tolist() for start, end in itertools.pairwise(ends)]
    assert found == [ids.tolist() for field in bags.values() for ids in field]
