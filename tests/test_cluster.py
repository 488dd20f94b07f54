"""Rows on Ray servers that are really killed: bit for bit as host tables, and as `Serial` with the same failures.

All tests share one Ray, which takes seconds to start: they form one group and are slow.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import evaluate
import jax
import numpy as np
import pytest
from click_model import ROWS, SPEC, TASK, batch_at, bits, fresh, plain, plan_of
from equality import same
from runs_with_losses import ENGINES, EVERY, LENGTH, run, serially
from studies import server_kills
from studies.server_kills import Killing
from threads import until
from watching import Process, command_of, differences, processes_below

from jaxrec import Serial
from jaxrec.checkpoint import Checkpointer, images, newest, read_manifest, restore
from jaxrec.checkpoint.format import number_of
from jaxrec.cluster import Cluster, GivenUp, Supervisor
from jaxrec.cluster.reaper import MARK, marked, reap
from jaxrec.cluster.runtime import import_ray
from jaxrec.cluster.servers import RayServer, ServerConfig, server_process
from jaxrec.cpr import Recovery
from jaxrec.oac import Pipeline
from jaxrec.types import ShardsLost

pytest.importorskip("ray", reason="Ray is not installed: `make cluster`, or pip install -e '.[cluster]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("ignore:shards .* has taken its place:UserWarning"),
    pytest.mark.filterwarnings("ignore:a save failed"),  # a death may void the row delta that servers write
]
OF_STOPPED_S = 2.0  # a stopped server counts as dead after this time


@pytest.fixture(scope="module")
def cluster():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), sys.excepthook, dict(os.environ)
    with Cluster() as cluster:
        now = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), sys.excepthook
        assert now == before[:3]
        assert not {name for name in os.environ if "TOKEN" in name or "JAXREC_C" in name} - set(before[3])
        yield cluster


@pytest.fixture
def start(cluster):
    """Creates supervisors whose servers end with the test."""
    with contextlib.ExitStack() as stack:

        def start(servers=2, **options):
            return stack.enter_context(contextlib.closing(Supervisor(cluster, SPEC, ROWS, servers, **options)))

        yield start


def kill(servers, index, number=signal.SIGKILL):
    os.kill(servers.processes[index], number)


# ---- bit for bit as host tables


@pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)
def test_a_run_over_two_processes_has_the_bits_of_host_tables(make, start):
    servers = start()
    assert len(set(servers.processes)) == 2 and os.getpid() not in servers.processes
    with make(fresh("host")._replace(tables=servers.tables)) as engine:
        losses = [float(metrics["loss"]) for _, metrics in engine.run(map(batch_at, range(LENGTH)))]
        found = bits(engine.state)
    wanted, wanted_losses = plain(LENGTH)[:2]
    assert same(found, wanted) and losses == wanted_losses


def test_an_image_that_servers_have_written_is_restored_into_others_and_into_host_tables(start, tmp_path):
    state = fresh("host")._replace(tables=start(2, directory=tmp_path).tables)
    with Serial(TASK, state) as engine:
        engine.train(map(batch_at, range(EVERY)))
    wanted = bits(engine.state)
    with Checkpointer(tmp_path, copy="shards") as checkpointer:
        checkpointer.save(engine.state)
    for tables in (start(3).tables, fresh("host").tables):
        assert same(bits(restore(tmp_path, fresh("host")._replace(tables=tables))[0]), wanted)
    assert [path.name for path in tmp_path.iterdir() if "probe" in path.name] == []


def spilled():
    """Files that Ray has spilled because its store was full."""
    return [path for path in Path(tempfile.gettempdir()).glob("jaxrec-*/session_2*/ray_spilled*/*") if path.is_file()]


def test_what_was_read_stays_what_it_was_and_nothing_spills(start):
    """Answers are views of shared memory, which Ray reuses; 320 MB pass through a store of 256 MiB."""

    def megabytes(stack, shard, parts, number):
        return np.full(1 << 20, number, np.float32)

    tables, plans = start().tables, plan_of(range(40))
    first = tables.read(plans)
    before = jax.tree.map(np.array, first)
    for number in range(20):
        tables.on_shards(megabytes, number)
    tables.put(plans, jax.tree.map(lambda array: array + 1, first))
    assert same(before, first) and not same(before, tables.read(plans))
    assert spilled() == []
    held = [import_ray().put(np.zeros(40 << 20, np.uint8)) for _ in range(8)]
    until(spilled)  # negative control
    del held


# ---- deaths


@pytest.fixture
def killing():
    """Kills a server as soon as a message is on its way to it; takes the arguments of `Killing`."""
    plans = []

    def add(*args, **options):
        plans.append(Killing(*args, **options))
        return plans[-1]

    with server_kills.killing(plans):
        yield add


@pytest.mark.parametrize(
    ("engine", "death"), [("serial", "read"), ("pipeline", "put"), ("pipeline", "save"), ("serial", "restore")]
)
def test_kill_9_at_any_instant_ends_as_serial_that_loses_its_shards_at_that_step(
    engine, death, start, killing, tmp_path
):
    """The other pairs of engine and instant are covered by cluster_soak.py."""
    scheme = "vanilla" if death == "put" else "mfu"
    servers = start()
    verb, number = {"read": ("read", 9), "put": ("put", 9), "save": ("run", 3), "restore": ("put", 9)}[death]
    first = killing(servers, verb, number)
    if death == "restore":
        killing(servers, "change", incarnation=2)
    # In a save the death is noticed before the next batch arrives, so that its step is known.
    gate = lambda index: (
        index in (EVERY, 3 * EVERY // 2) and death == "save" and first.dead.wait(1 if index == EVERY else 60)
    )
    made = ENGINES[engine](fresh("host")._replace(tables=servers.tables))
    found, log, recovery = run(made, tmp_path / "found", scheme, servers, gate)
    assert [death.server for death in servers.deaths] == [1] * (2 if death == "restore" else 1)
    assert [shards for shards, _ in log.losses.values()] == [(1, 3)] and recovery.failed == 2
    assert same(found, serially(tmp_path / "wanted", scheme, log))
    assert not same(found, serially(tmp_path / "control", scheme))


@pytest.mark.parametrize("also", [{}, {10: [1]}, {10: [1, 3]}], ids=str)
def test_a_death_that_no_call_meets_is_noticed_and_its_successor_begun_before_the_next_call(start, tmp_path, also):
    """Also if a callback loses some or all of its shards at the same step."""
    servers = start()
    first = servers.processes[1]

    def kills(info):
        if info.step == 10:
            kill(servers, 1)
            until(lambda: servers.deaths and servers.processes[1] != first)  # no call meanwhile
            assert servers.tables.lost == (1, 3)

    recovery = Recovery(tmp_path / "found", EVERY, LENGTH, failures=also)
    with Serial(TASK, fresh("host")._replace(tables=servers.tables), [servers, recovery, kills]) as engine:
        found = bits(engine.train(map(batch_at, range(LENGTH))))
    (death,) = servers.deaths
    assert death.reason == f"its process {first} on {servers.in_use[1].address} has ended" and recovery.failed == 2
    assert same(found, serially(tmp_path / "wanted", "vanilla", losses={10: ((1, 3), ())}))


def test_a_spare_takes_the_place_of_the_dead_and_another_one_waits_then(start, killing, tmp_path):
    servers = start(spares=1)
    (spare,) = servers.spares
    killing(servers, "put", 9)
    engine = ENGINES["pipeline"](fresh("host")._replace(tables=servers.tables))
    found, log, _ = run(engine, tmp_path / "found", "mfu", servers)
    assert servers.processes[1] == spare and servers.spares not in ([], [spare])
    assert same(found, serially(tmp_path / "wanted", "mfu", log))
    (dead,), before = servers.spares, servers.processes[0]
    os.kill(dead, signal.SIGKILL)  # a dead spare is skipped
    until(lambda: not command_of(dead))
    recovery = Recovery(tmp_path / "again", EVERY, LENGTH)
    with Serial(TASK, fresh("host")._replace(tables=servers.tables), [servers, recovery]) as engine:
        kill(servers, 0)
        engine.train(map(batch_at, range(3)))
    assert servers.processes[0] not in (before, dead) and servers.in_use[0].address
    waiting = servers.spares
    servers.close()
    until(lambda: not any(map(command_of, waiting)))


def test_a_server_that_is_stopped_is_named_in_time_killed_and_succeeded(start, tmp_path):
    servers = start(timeout_s=OF_STOPPED_S)
    first = servers.processes[0]
    gate = lambda index: kill(servers, 0, signal.SIGSTOP) if index == 10 and not servers.deaths else None
    engine = ENGINES["pipeline"](fresh("host")._replace(tables=servers.tables))
    found, log, _ = run(engine, tmp_path / "found", "mfu", servers, gate)
    assert [death.server for death in servers.deaths] == [0]
    said = r"server 0 \(incarnation 1\) has not answered (read|put|take|track|run) within 2 s"
    assert re.search(said, servers.deaths[0].reason)
    until(lambda: not command_of(first), 10)
    assert same(found, serially(tmp_path / "wanted", "mfu", log))


def test_who_has_no_supervisor_listed_ends_with_the_name_of_the_server(start):
    servers = start()
    with Serial(TASK, fresh("host")._replace(tables=servers.tables)) as engine:
        kill(servers, 1)
        with pytest.raises(ShardsLost, match="no callback restores them"):
            engine.train(map(batch_at, range(3)))
    with pytest.raises(ShardsLost, match=r"server 1 \(incarnation 1\) is gone: its process \d+ on .* has ended"):
        servers.tables.read(plan_of(range(40)))
    assert servers.deaths == []  # and no unused successor is started


def test_one_death_too_many_ends_the_run_and_says_so(start, tmp_path):
    servers = start(most_deaths=1)
    killed = iter([10, 12])
    until_killed = [next(killed)]

    def gate(index):
        if until_killed and index >= until_killed[0] and len(servers.deaths) < 2:
            kill(servers, 1)
            until_killed[:] = [one for one in [next(killed, None)] if one]

    with pytest.raises(GivenUp, match=r"2 deaths of servers within 10 minutes, above most_deaths=1; .* of server 1 "):
        run(ENGINES["serial"](fresh("host")._replace(tables=servers.tables)), tmp_path, "mfu", servers, gate)
    assert len(servers.deaths) == 2


def test_full_recovery_over_servers_that_are_killed_ends_as_a_run_without_failures(start, killing, tmp_path):
    servers = start()
    killing(servers, "put", 15)
    recovery = Recovery(tmp_path, EVERY, LENGTH, mode="full", copy="shards")
    state = fresh("host")._replace(tables=servers.tables)
    with Pipeline(TASK, state, [servers, recovery], window=3) as engine:
        state = engine.train(lambda step: map(batch_at, range(step, LENGTH)))
        assert recovery.failed == 2 and len(servers.deaths) == 1
        assert same(bits(state), plain(LENGTH)[0])
    assert images(tmp_path)


# ---- refusals, by name and in time


def test_a_server_without_a_machine_is_named_in_time(cluster):
    with pytest.raises(TimeoutError, match=r"server 0 \(incarnation 1, shards \[0, 2\]\) has no process yet"):
        Supervisor(cluster, SPEC, ROWS, 2, start_timeout_s=1.0, resources={"no machine has this": 1})


def test_a_directory_that_a_server_does_not_see_is_refused(cluster, tmp_path):
    config = ServerConfig(SPEC, SPEC.layout(ROWS), tmp_path, "a probe that is elsewhere")
    server = RayServer(config, 0, [0, 2], 1, server_process())
    with (
        contextlib.ExitStack() as stack,
        pytest.raises(ValueError, match=r"of shards \[0, 2\] does not see .*where the"),
    ):
        stack.callback(server.kill)
        server.wait(60)


def test_a_second_cluster_in_one_process_is_refused(cluster):
    with pytest.raises(ValueError, match="in use in this process already"), Cluster():
        pass


DRIVER = """
import sys
sys.path[:0] = {path!r}
from click_model import ROWS, SPEC
from jaxrec.checkpoint import restore_shards
from jaxrec.cluster import Cluster, Supervisor

try:
    with Cluster({address!r}) as cluster:
        servers = Supervisor(cluster, SPEC, ROWS, 2)
        print("begun", *servers.processes, flush=True)
        sys.stdin.read()
        restore_shards(None, servers.tables, range(4))
    print("ended")
except Exception as error:
    print(type(error).__name__, error)
"""
PATH = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]


def driver_of(address, **variables):
    """Starts a driver process; returns it and its first output."""
    code, environment = DRIVER.format(path=PATH, address=address), os.environ | variables
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    driver = subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes)
    return driver, driver.stdout.readline()


@pytest.fixture
def by_hand(short):
    """Starts Ray as a user does by hand: {environment variables} -> its address."""
    directories = []

    def begin(variables):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        directories.append(short / f"r{port}")
        words = ["start", "--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false"]
        words += [f"--temp-dir={directories[-1]}", "--object-store-memory=200000000"]
        command = [str(Path(sys.executable).parent / "ray"), *words]
        marks = {MARK: str(directories[-1]), "HOME": str(short), "RAY_USAGE_STATS_ENABLED": "0"}
        subprocess.run(command, env=os.environ | marks | variables, check=True, capture_output=True)
        return f"127.0.0.1:{port}"

    yield begin
    for directory in directories:
        reap(str(directory))


def test_a_cluster_that_runs_is_joined_with_its_token_and_never_without(by_hand, short):
    token = {"RAY_AUTH_TOKEN": "ab" * 32}
    closed, open_to_all = by_hand(token | {"RAY_AUTH_MODE": "token"}), by_hand({"RAY_AUTH_MODE": "disabled"})
    driver, said = driver_of(closed, HOME=str(short), **token)
    word, *processes = said.split()
    assert word == "begun" and all(command_of(int(process)) for process in processes)
    driver.kill()
    driver.communicate()
    until(lambda: not any(command_of(int(process)) for process in processes), 3)
    for address, given, error in (
        (closed, {}, "ValueError the cluster at .* requires a token that this process does not have"),
        (open_to_all, token, "ServerGone server 0 .* has not begun: .*RAY_AUTH_MODE=token"),
    ):
        driver, said = driver_of(address, HOME=str(short), **given)
        driver.communicate("")
        assert re.match(error, said)


# ---- the driver


def started(short):
    """A driver whose Ray has its files in the given directory, and the process ids of its servers."""
    driver, said = driver_of(None, TMPDIR=str(short))
    word, *processes = said.split()
    assert word == "begun"
    return driver, [int(process) for process in processes]


@pytest.fixture
def short():
    """A directory with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="d-", dir="/tmp") as directory:
        yield Path(directory)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_driver_that_is_killed_leaves_no_process_within_three_seconds_and_no_file(short, stopped):
    driver, processes = started(short)
    (directory,) = short.glob("jaxrec-*")
    assert set(processes) < set(marked(str(directory)))
    if stopped:
        os.kill(processes[1], signal.SIGSTOP)
    driver.kill()
    driver.wait()
    until(lambda: not any(map(command_of, processes)), 3)
    until(lambda: not marked(str(directory)) and not directory.exists(), 10)
    assert list(short.glob("jaxrec-*")) == []


def test_a_driver_that_ends_leaves_nothing_and_what_its_terminal_says_is_not_for_its_servers(short):
    driver, processes = started(short)
    (directory,) = short.glob("jaxrec-*")
    for process in marked(str(directory)):
        os.kill(process, signal.SIGHUP)
        os.kill(process, signal.SIGINT)
    assert all(map(command_of, processes))
    said, _ = driver.communicate("", timeout=60)
    assert "ended" in said and driver.returncode == 0
    assert not any(map(command_of, processes)) and not marked(str(directory)) and list(short.glob("jaxrec-*")) == []


# ---- the main job

JOB = ["--preset", "smoke", "--rows", "500", "--batch-size", "64", "--embedding-width", "8", "--steps", "{steps}"]
JOB = [*JOB, "--model", "small_dlrm", "--evaluations", "2", "--pipeline", "oac", "--save-every-steps", "40"]
STEPS, LIMIT_S = 600, 200


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The main job over host tables."""
    directory = tmp_path_factory.mktemp("undisturbed")
    assert job(directory, "--tables", "host").ended().code == 0
    return directory


def job(workdir, *flags, short=None, steps=STEPS):
    """Starts the main job in a new process."""
    words = [word.format(steps=steps) for word in JOB] + [*flags, "--workdir", str(workdir), "--resume"]
    script = Path(__file__).parent.parent / "experiments" / "train.py"
    environment = os.environ | ({"TMPDIR": str(short)} if short else {})
    environment.pop("XLA_FLAGS", None)
    return Process([sys.executable, str(script), *words], environment, LIMIT_S)


def servers_of(short):
    """The process ids of servers, in the order of their start."""
    return sorted(processes_below(short))


def has_saved(workdir, step):
    return any(number_of(path) >= step for path in images(workdir / "checkpoints"))


def test_the_main_job_with_full_recovery_survives_the_death_of_a_server_and_its_own_bit_for_bit(
    short, undisturbed, tmp_path
):
    flags = ["--tables", "remote", "--servers", "2", "--cpr", "full"]
    first = job(tmp_path, *flags, short=short)
    until(lambda: has_saved(tmp_path, 40), LIMIT_S)
    os.kill(servers_of(short)[-1], signal.SIGKILL)
    saved = max(number_of(path) for path in images(tmp_path / "checkpoints"))
    until(lambda: has_saved(tmp_path, saved + 80), LIMIT_S)
    first.send(signal.SIGKILL)
    assert "has taken its place" in first.ended().said
    until(lambda: not list(short.glob("jaxrec-*")), 10)
    ended = job(tmp_path, *flags, short=short).ended()
    assert ended.code == 0 and "going on from" in ended.said
    assert differences(undisturbed, tmp_path) == []
    assert not list(short.glob("jaxrec-*"))


def test_the_main_job_without_a_recovery_names_the_dead_server_and_goes_on_when_it_is_told_to(
    short, undisturbed, tmp_path
):
    first = job(tmp_path, "--tables", "remote", short=short)
    until(lambda: has_saved(tmp_path, 40), LIMIT_S)
    os.kill(servers_of(short)[0], signal.SIGKILL)
    ended = first.ended()
    assert ended.code == 1 and "Traceback" not in ended.said
    assert re.search(r"error: shards \[0, 2, 4, 6\] are lost: server 0 .* has ended; go on .* --resume", ended.said)
    until(lambda: not list(short.glob("jaxrec-*")), 10)
    second = job(tmp_path, "--tables", "remote", short=short)
    until(lambda: has_saved(tmp_path, 200), LIMIT_S)
    second.send(signal.SIGTERM)
    ended = second.ended()
    assert ended.code == 128 + signal.SIGTERM and "stopped and saved at step" in ended.said
    assert job(tmp_path, "--tables", "remote", short=short).ended().code == 0
    assert differences(undisturbed, tmp_path) == []


def test_the_main_job_survives_a_death_after_its_last_step_and_says_so_in_one_line(short, undisturbed, tmp_path):
    first = job(tmp_path, "--tables", "remote", "--servers", "2", "--cpr", "full", short=short)
    first.read(4)  # the last evaluation; the last save and the test follow
    os.kill(servers_of(short)[-1], signal.SIGKILL)
    ended = first.ended()
    assert ended.code == 0 and differences(undisturbed, tmp_path) == []
    assert json.loads((tmp_path / "results.json").read_text())["shards_failed"] == 4
    assert ended.said.count("has taken its place") == 1 and "(raylet)" not in ended.said
    assert [*tmp_path.glob("ray_logs/session_*/raylet.out")]
    assert not list(short.glob("jaxrec-*"))


def test_a_run_that_goes_on_counts_the_deaths_since_its_image(short, tmp_path):
    flags = ["--tables", "remote", "--servers", "2", "--cpr", "vanilla"]
    first = job(tmp_path, *flags, short=short)
    first.read(3)  # the first evaluation
    os.kill(servers_of(short)[-1], signal.SIGKILL)
    until((tmp_path / "failures.json").exists, LIMIT_S)
    first.send(signal.SIGKILL)
    first.ended()
    ended = job(tmp_path, *flags, short=short).ended()
    assert ended.code == 0 and "going on from" in ended.said
    assert json.loads((tmp_path / "results.json").read_text())["shards_failed"] == 4


def test_a_run_whose_ray_dies_ends_by_its_name_and_says_how_to_go_on(short, tmp_path):
    flags = ["--tables", "remote", "--servers", "2", "--cpr", "full"]
    first = job(tmp_path, *flags, short=short, steps=50_000)  # its servers die some ten seconds after Ray's agent
    until(lambda: has_saved(tmp_path, 40), LIMIT_S)
    found = [process for directory in short.glob("jaxrec-*") for process in marked(str(directory))]
    (raylet,) = [process for process in found if "raylet/raylet" in command_of(process).split("\0")[0]]
    os.kill(raylet, signal.SIGKILL)
    ended = first.ended()
    assert ended.code == 1 and "Traceback" not in ended.said
    assert re.search(rf"error: Ray's raylet \(process {raylet}\).* has died. Go on with .* --resume", ended.said)
    assert not list(short.glob("jaxrec-*"))


def pool_job(workdir, short):
    words = ["--preset", "smoke", "--rows", "500", "--batch-size", "64", "--embedding-width", "8", "--model"]
    words += ["small_dlrm", "--tables", "remote", "--shadowsync", "easgd", "--trainers", "2", "--workers", "2"]
    words += ["--steps", "4000", "--workdir", str(workdir), "--resume"]
    script = Path(__file__).parent.parent / "experiments" / "train.py"
    return Process([sys.executable, str(script), *words], os.environ | {"TMPDIR": str(short)}, LIMIT_S)


def newest_image(workdir):
    return read_manifest(newest(workdir / "checkpoints"))


def test_the_main_job_in_processes_survives_a_death_and_a_stop_and_is_evaluated(short, tmp_path, capsys):
    first = pool_job(tmp_path, short)
    until(lambda: processes_below(short, "TrainerProcess"), LIMIT_S)
    os.kill(processes_below(short, "TrainerProcess")[-1], signal.SIGKILL)
    until((tmp_path / "metrics.jsonl").exists, LIMIT_S)  # it has a row for the death
    first.send(signal.SIGTERM)
    ended = first.ended()
    assert ended.code == 128 + signal.SIGTERM and "stopped and saved" in ended.said and "Traceback" not in ended.said
    second = pool_job(tmp_path, short).ended()
    assert second.code == 0 and "going on from" in second.said
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["steps"] == 4000 and found["examples"] == 4000 * 64 and found["examples_lost"] == 0
    assert newest_image(tmp_path).extra["positions"] == [2000, 2000] and found["test_auc"] > 0.6
    assert not list(short.glob("jaxrec-*"))
    again = evaluate.main(evaluate.Config(run_directory=tmp_path, workdir=tmp_path / "evaluated"))
    assert again["auc"] == pytest.approx(found["test_auc"], abs=1e-6)
