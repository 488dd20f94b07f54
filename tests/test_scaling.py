"""Trainers in simulated time obey closed-form limits; the experiment keeps its contract."""

import pytest
import shadowsync_scaling as scaling
from hypothesis import given, settings
from hypothesis import strategies as st
from smoke import logged, smoke
from studies import shadow_protocol as protocol

STEP = 0.05
WAYS = st.sampled_from(list(protocol.WAYS))


def point(way, trainers, bytes_per_s=1e12, servers=2, sizes=(400, 300, 200, 100), jitter=0.1, seed=0):
    return protocol.Point(way, trainers, servers, STEP, jitter, seed, sizes, bytes_per_s)


def rates(point, window):
    """Steps per second and rounds per second."""
    found = protocol.simulate(point, window)
    return found["steps_per_s"], found["rounds_per_s"]


@settings(max_examples=25)
@given(way=WAYS, trainers=st.integers(1, 40), seed=st.integers(0, 9))
def test_without_a_limit_trainers_scale_linearly(way, trainers, seed):
    steps, _ = rates(point(way, trainers, seed=seed), 60)
    assert steps == pytest.approx(trainers / STEP, rel=0.03)


@settings(max_examples=25)
@given(
    way=st.sampled_from(["s_easgd", "fr_easgd_5", "fr_easgd_30"]),
    trainers=st.integers(1, 60),
    servers=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=6),
    served=st.floats(1, 200),
)
def test_rounds_never_pass_what_the_busiest_server_can_move(way, trainers, servers, sizes, served):
    """`served`: rounds per second if all tensors were on one server."""
    capped = point(way, trainers, 2 * sum(sizes) * served, servers, tuple(sizes))
    limit, window = 1 / max(capped.server_s), 120
    assert served * 0.999 <= limit <= servers * served * 1.001
    slack = trainers if way == "s_easgd" else 1  # results that were ready when counting began
    assert rates(capped, window)[1] <= limit + slack / (window * STEP)


def test_the_foreground_saturates_at_that_rate_and_the_shadow_does_not():
    saturated = point("fr_easgd_5", 64, bytes_per_s=20_000.0, sizes=(250, 250, 250, 250))
    limit = 5 * 2 * 20_000 / (2 * 1000)  # k * servers * bandwidth / bytes of a round
    assert rates(saturated, 200)[0] == pytest.approx(limit, rel=0.02)
    assert rates(saturated._replace(servers=4), 200)[0] == pytest.approx(2 * limit, rel=0.02)
    steps, rounds = rates(saturated._replace(way="s_easgd"), 200)
    assert steps == pytest.approx(64 / STEP, rel=0.02) and rounds == pytest.approx(limit / 5, rel=0.02)
    assert rates(saturated._replace(way="s_easgd", trainers=128), 200)[1] == pytest.approx(rounds, rel=0.02)


def test_a_shadow_brings_something_to_each_ring_it_can_reach():
    """A ring that ends within a step has a round every step; one of 1.5 steps, every second step."""
    for share, gap in ((0.5, 1), (1.5, 2)):
        ring = point("s_ma", 4, bytes_per_s=1.5 * 1000 / (share * STEP), servers=0, jitter=0.0)
        assert ring.ring_s == pytest.approx(share * STEP)
        # The phases of the trainers differ, which costs up to one step more.
        steps, rounds = rates(ring, 200)
        assert gap <= steps / rounds <= gap + 1


def test_a_wrong_bandwidth_is_seen_in_the_error():
    """Negative control of simulated_over_emulated_sleep_error_max."""
    found = {}
    for bytes_per_s in (20_000.0, 24_000.0):
        each = [point(way, n, bytes_per_s) for way in ("fr_easgd_5", "s_easgd") for n in (4, 64)]
        found[bytes_per_s] = {p._replace(bytes_per_s=0.0): protocol.simulate(p, 60) for p in each}
    right, wrong = found.values()
    assert scaling.largest_error(right, right, "steps_per_s") == 0
    assert scaling.largest_error(right, wrong, "steps_per_s") > 0.1


@pytest.mark.slow
@pytest.mark.process
def test_the_experiment_keeps_its_contract(tmp_path):
    found = smoke(tmp_path, "shadowsync_scaling")
    assert found["regime"] == "free-running"
    assert {key.split("_")[0] for key in found} == {"regime", "measured", "emulated", "simulated"}
    assert all(key.startswith("emulated_sleep_") for key in found if key.startswith("emulated"))
    assert not [key for key in found if "efficiency" in key and not key.startswith("measured")]
    alone = smoke(tmp_path / "alone", "shadowsync_scaling", "--no-protocol", "--rounds", 2)
    assert alone.keys() - {"regime"} == {key for key in found if key.startswith("measured")}
    assert [row["kind"] for row in logged(tmp_path / "alone")] == ["measured"]
    if found["measured_cores"] > 1:  # in one round
        rate, alone = (found[f"measured_examples_per_s_{way}_trainers_2"] for way in ("s_ma-delta_paced", "none"))
        assert found["measured_over_no_sync_s_ma-delta_paced_trainers_2"] == pytest.approx(rate / alone)
    many = "trainers_24_servers_2"
    # Rates of sleeping trainers vary on a busy machine, so only the simulation is checked.
    shadow, foreground = (found[f"simulated_examples_per_s_{way}_{many}"] for way in ("s_easgd", "fr_easgd_5"))
    assert shadow > 1.1 * foreground and found[f"simulated_average_sync_gap_s_easgd_{many}"] > 1.5
    for kind in ("emulated_sleep", "simulated"):
        assert found[f"{kind}_examples_per_s_s_easgd_{many}"] > 0
        assert (tmp_path / f"{kind}.png").stat().st_size > 10_000
    assert found["simulated_over_emulated_sleep_error_max"] > 0
    assert {row["kind"] for row in logged(tmp_path)} == {"measured", "emulated_sleep", "simulated"}
