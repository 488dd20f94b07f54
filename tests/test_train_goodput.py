"""Restarts by hand beside recoveries, in small."""

import pytest
from smoke import smoke


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_run_whose_processes_all_die_is_restarted_and_one_whose_server_dies_recovers(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: `make cluster`, or pip install -e '.[cluster]'")
    found = smoke(tmp_path, "train_goodput", "--arms", "restart", "mfu")
    assert found["restart_starts"] == found["restart_kills"] + 1 > 1 == found["mfu_starts"]
    assert 0 == found["none_kills"] < found["mfu_shards_failed"] <= 4 * found["mfu_kills"]  # of two servers
    assert abs(found["auc_lost_restart"]) < 0.01 and "mfu_overhead_percent" in found
