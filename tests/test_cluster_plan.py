"""A plan for many servers follows from given costs, and costs from measured times; the measurement needs Ray."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import cpr_scalability
import numpy as np
import pytest
from cpr_scalability import Config, Job, check, names_of, of_limits, of_step, of_tables, planned
from hypothesis import given
from hypothesis import strategies as st
from studies.cluster_costs import Costs, Timed, fitted

ROOT = Path(__file__).parent.parent
some = st.floats(0.01, 100)
jobs = st.builds(
    Job, terabytes=some, servers=st.integers(1, 1000), width=st.integers(1, 512), rows_per_step=st.integers(1, 10**6),
    compute_ms=some, link_gbit_per_s=some, files_mb_per_s=st.floats(1, 1e5), server_mtbf_hours=st.floats(100, 1e5),
    total_hours=some, target_pls=st.floats(0.01, 1),
)  # fmt: skip
costs = st.builds(Costs, *[some] * 7, *[st.floats(1, 1e5)] * 2, st.floats(1e3, 1e8), some)


@given(jobs, costs)
def test_a_step_is_its_parts_and_batches_in_flight_hide_the_shorter_one(job, paid):
    step = of_step(job, paid)
    read, put = step["read_ms_modelled"], step["put_ms_modelled"]
    assert step["sync_ms_modelled"] == pytest.approx(job.compute_ms + read + put)
    assert step["oac_ms_modelled"] == pytest.approx(max(job.compute_ms, read + put))
    assert read + put >= 2 * step["link_ms_modelled"]


@given(jobs, costs)
def test_twice_the_servers_hold_half_each_and_cost_their_messages_more(job, paid):
    twice = dataclasses.replace(job, servers=2 * job.servers)
    for key in ("server_gb_modelled", "server_access_counts_gb_modelled"):
        assert of_tables(twice)[key] == pytest.approx(of_tables(job)[key] / 2)
    more = of_step(twice, paid)["read_ms_modelled"] - of_step(job, paid)["read_ms_modelled"]
    assert more == pytest.approx(job.servers * paid.read_message_ms, rel=1e-6, abs=1e-6)


@given(jobs, costs)
def test_at_each_limit_that_is_named_the_two_sides_are_equal(job, paid):
    limits = of_limits(job, paid)
    rows = limits["rows_per_step_that_oac_hides_modelled"]
    step = of_step(dataclasses.replace(job, rows_per_step=rows), paid)
    if rows > 0:
        assert step["read_ms_modelled"] + step["put_ms_modelled"] == pytest.approx(job.compute_ms, rel=1e-6)
    servers = limits["servers_whose_messages_take_the_computation_modelled"]
    if servers > 0:
        none = of_step(dataclasses.replace(job, servers=servers, rows_per_step=0), paid)
        assert none["read_ms_modelled"] + none["put_ms_modelled"] == pytest.approx(job.compute_ms, rel=1e-6)
    free = dataclasses.replace(paid, read_message_ms=0.0, put_message_ms=0.0)
    assert not any("servers_whose" in key for key in of_limits(job, free))


@given(jobs, costs)
def test_every_figure_of_a_plan_is_a_number_and_says_that_it_is_modelled(job, paid):
    found = planned(job, paid)
    assert all(key.endswith("_modelled") and math.isfinite(value) and value >= 0 for key, value in found.items())
    assert found["restore_one_s_modelled"] <= found["restore_all_s_modelled"] * (1 + 1e-9)
    assert found["save_s_modelled"] >= job.terabytes * 1e6 / job.files_mb_per_s * (1 - 1e-9)


@given(base=some, message=some, row=st.floats(0.1, 100), noise=st.integers(0, 2**31))
def test_costs_that_times_were_made_of_are_found_again_and_noise_makes_none_negative(base, message, row, noise):
    places = [(servers, rows) for servers in (1, 4, 8) for rows in (500, 4000, 32_000)]
    times = [Timed(*place, base + message * place[0] + row * place[1] / 1e3) for place in places]
    assert fitted(times) == pytest.approx((base, message, row), rel=1e-6)
    rng = np.random.default_rng(noise)
    assert min(fitted([one._replace(ms=one.ms * rng.uniform(0.5, 2)) for one in times])) >= 0


WRONG = [(name, value) for name in (*names_of(Job), *names_of(Costs)) for value in (-1.0, math.nan, math.inf)]
WRONG += [("terabytes", 0.0), ("servers", 0), ("save_mb_per_s", 0.0), ("read_row_us", 0.0), ("target_pls", 2.0)]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_flag_of_which_no_plan_can_be_made_is_named(name, value):
    check(Config(plan=True))
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} .* must be"):
        check(Config(plan=True, **{name: value}))


def test_a_plan_from_flags_says_that_its_costs_were_given(tmp_path):
    found = cpr_scalability.main(Config(plan=True, workdir=tmp_path / "run", read_row_us=3.0))
    assert found["read_row_us_given"] == 3.0 and json.loads((tmp_path / "run" / "results.json").read_text()) == found
    assert not any(key.endswith("_measured") for key in found)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_costs_are_measured_over_processes_and_planned_with(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: `make cluster`, or pip install -e '.[cluster]'")
    command = [sys.executable, ROOT / "experiments" / "cpr_scalability.py", "--plan", "--measure", "--preset", "smoke"]
    done = subprocess.run([*command, "--workdir", tmp_path / "run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "run" / "results.json").read_text())
    paid = {name: found[f"{name}_measured"] for name in names_of(Costs)}
    assert all(paid[name] > 0 for name in ("read_row_us", "put_row_us", "save_mb_per_s", "restore_mb_per_s", "start_s"))
    plan = planned(Job(*(getattr(Config(), name) for name in names_of(Job))), Costs(**paid))
    assert {key: found[key] for key in plan} == pytest.approx(plan)
    times = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {(one["verb"], one["servers"], one["rows"]) for one in times} == {
        (verb, servers, rows) for verb in ("read", "put") for servers in (1, 2) for rows in (500, 2000)
    }
