"""Restarts by hand beside recoveries, in small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parent / "soak"


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_run_whose_processes_all_die_is_restarted_and_one_whose_server_dies_recovers(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: `make cluster`, or pip install -e '.[cluster]'")
    command = [sys.executable, SOAK / "train_goodput.py", "--preset", "smoke", "--arms", "restart", "mfu"]
    done = subprocess.run([*command, "--workdir", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["restart_starts"] == found["restart_kills"] + 1 > 1 == found["mfu_starts"]
    assert 0 == found["none_kills"] < found["mfu_shards_failed"] <= 4 * found["mfu_kills"]  # of two servers
    assert abs(found["auc_lost_restart"]) < 0.01 and "mfu_overhead_percent" in found
