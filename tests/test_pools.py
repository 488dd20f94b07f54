"""What surrounds a pool of trainers: what it resumes from, how it is stopped, and how its pauses are told apart."""

import contextlib
import itertools
import signal
import threading
import time
import types
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from homes import every_row
from in_process_servers import Fleet, InProcess, InThread, Supervised
from main.click_data import synthetic_clicks
from main.pools import SharedStream, Watch, examples_of, has_image, restored
from main.signals import Asked, Stopped
from main.sources import Criteo, Synthetic, Tabular, prepared_directory
from pauses import Timed, longest_by_state
from threads import until
from trainer_work import CLICKS, OWN, SPEC, work

from jaxrec.checkpoint import Checkpointer, newest, read_manifest
from jaxrec.cluster.pool import PoolSyncServer, ServedTables, TrainerPool, image_of
from jaxrec.cluster.processes import Process
from jaxrec.cluster.supervisor import GivenUp
from jaxrec.cluster.trainers import Progress, TrainerProcess
from jaxrec.embedding.lookup import plan
from jaxrec.embedding.servers import ServerGone, ShardServer
from jaxrec.shadowsync import model_averaging
from jaxrec.types import ShardsLost

PARAMS = {"weights": np.arange(3, dtype=np.float32), "bias": np.float32(0.5)}


def test_a_pool_resumes_with_the_rows_the_parameters_and_the_positions_of_its_newest_image(tmp_path, capsys):
    with Fleet(SPEC, OWN[1]) as fleet, Checkpointer(tmp_path, copy="shards") as checkpointer:
        assert not has_image(tmp_path)
        for step, positions in ((1, [2, 3]), (2, [5, 4]), (3, [8, 7])):
            for name, shard in ((name, shard) for name in SPEC.stacks for shard in range(SPEC.shards)):
                mine = {part: np.asarray(rows[shard]) + step for part, rows in fleet.tables.parts(name).items()}
                fleet.tables.with_shard(name, shard, mine)
            image = image_of(tmp_path, jax.tree.map(lambda leaf, by=step: leaf + by, PARAMS), fleet.tables)
            checkpointer.save(image, {"positions": positions, "examples": 10 * step, "examples_before": 5})
        saved = every_row(fleet.tables)
    with Fleet(SPEC, OWN[1], servers=1) as fleet:
        params, past = restored(tmp_path, PARAMS, fleet.tables)
        jax.tree.map(np.testing.assert_array_equal, params, jax.tree.map(lambda leaf: leaf + 3, PARAMS))
        jax.tree.map(np.testing.assert_array_equal, every_row(fleet.tables), saved)
    assert (
        has_image(tmp_path)
        and past["positions"] == [8, 7]
        and examples_of(past) == 35
        and "step_00000003" in capsys.readouterr().out
    )


def test_an_image_of_a_run_in_lock_step_is_refused(tmp_path):
    with Fleet(SPEC, OWN[1]) as fleet, Checkpointer(tmp_path, copy="shards") as checkpointer:
        checkpointer.save(image_of(tmp_path, PARAMS, fleet.tables), {"techniques": {}})
    with pytest.raises(ValueError, match="is of a run in lock step, .*: give another --workdir"):
        has_image(tmp_path)


@pytest.mark.parametrize("steps", [6, 7, 8])
def test_a_trainer_that_starts_at_the_end_of_its_share_has_no_batch(steps):
    shared = SharedStream(lambda: synthetic_clicks((3, 4), 2, steps, seed=0, test_batches=1).train, steps)
    shares = [[len(list(shared(trainer, 3)(start))) for start in range(steps // 3 + 1)] for trainer in range(3)]
    assert shares == [[*range(steps // 3, -1, -1)]] * 3


over = threading.Event()  # the pool is: `paced` streams end, also those of trainers that were killed


class InThisProcess:
    """What a pool uses of `Process`; its object runs in threads, until it is killed."""

    def __init__(self, kind, name, args=(), threads=4, resources=None):
        self.name, self.handle, self.pid, self.asked_at = name, InThread(kind(*args)), None, 0.0

    def poll(self, method):
        self.asked_at = time.monotonic()
        with contextlib.suppress(ServerGone, AttributeError):  # a sync server has no `process_info` without Ray
            return self.handle.call(method).result(60)

    look = Process.look

    def death_reason(self, timeout_s):
        return f"{self.name} has ended" if self.handle.dead.is_set() else ""

    def kill(self):
        if not self.handle.dead.is_set():
            self.handle.kill()


class Handled(InProcess):
    """A shard server that is its own handle."""

    @property
    def handle(self):
        return self


@pytest.fixture
def pool_of(monkeypatch):
    """Makes pools, of one trainer by default, whose processes are threads; returns a pool and the list of these."""
    processes = []

    def process(*given, **more):
        processes.append(InThisProcess(*given, **more))
        return processes[-1]

    monkeypatch.setattr("jaxrec.cluster.pool.RayProcess", process)
    monkeypatch.setattr("jaxrec.cluster.pool.packed", lambda work: work)
    cluster = types.SimpleNamespace(check_entered=lambda: None)
    over.clear()
    with Supervised(SPEC, OWN[1], way=lambda *about: Handled(ShardServer(*about))) as servers:
        yield lambda work, trainers=1, **more: (TrainerPool(cluster, servers, work, trainers, **more), processes)
        over.set()
        until(lambda: all(thread.name != "free-trainer" for thread in threading.enumerate()))


def test_a_successor_of_a_trainer_begins_where_that_was_and_every_example_counts_once(pool_of):
    begun, ended = [], threading.Event()

    def batches(trainer, trainers):
        def stream(start):
            begun.append(start)
            for number in range(start, 6):
                if number == 4 and len(begun) == 1:
                    ended.wait(60)
                    return
                yield CLICKS.batch(number, 16)

        return stream

    def kill(pool):
        if pool.progress[0].position == 4 and len(processes) == 1:
            processes[0].kill()

    pool, processes = pool_of(work(batches=batches))
    with pool, pytest.warns(UserWarning, match="trainer 0 restarts at its batch 4"):
        _, stats = pool.run(kill)
    ended.set()
    assert begun == [0, 4] and (stats.examples, stats.examples_lost) == (6 * 16, 0)


@pytest.mark.filterwarnings("ignore:.*(its successor has|is given up):UserWarning")
def test_the_successor_of_a_sync_server_has_the_parameters_of_a_trainer_and_waits_for_none_given_up(
    pool_of, monkeypatch
):
    begun_with, allowed, ended, here = [], threading.Semaphore(3), threading.Event(), threading.current_thread()

    class Noted(PoolSyncServer):
        def __init__(self, packed, leaves, *more):
            begun_with.append(leaves)
            super().__init__(packed, leaves, *more)

    def batches(trainer, trainers):
        def stream(start):
            if trainer == 1:  # it is given up, and what it lacks is counted here
                if threading.current_thread() is not here:
                    ended.wait(60)
                    raise EOFError
                return
            for number in range(start, 6):
                assert allowed.acquire(timeout=60)
                yield CLICKS.batch(number, 16)

        return stream

    def kill(pool):
        if not pool.failures:
            processes[2].kill()
        elif pool.progress[0].position == 3 and len(processes) == 3:
            newest.extend(processes[1].handle.server.newest())
            processes[0].kill()
        elif len(processes) == 4 and not ended.is_set():
            ended.set()
            allowed.release(3)

    monkeypatch.setattr("jaxrec.cluster.pool.PoolSyncServer", Noted)
    newest = []
    pool, processes = pool_of(work(batches=batches, rule=model_averaging(), every_steps=1), 2, most_deaths=0)
    with pool:
        _, stats = pool.run(kill)
    assert [one.kind for one in stats.failures] == ["trainer", "sync server"]
    assert (stats.examples, stats.examples_lost) == (6 * 16, 0)
    initial, successors = begun_with
    assert all(map(np.array_equal, successors, newest)) and not any(map(np.array_equal, successors, initial))


def test_an_image_of_a_pool_has_positions_that_its_parameters_have_passed(pool_of, monkeypatch, tmp_path):
    """Batches after its positions may be trained twice when it is restored, and none is left out."""
    asked, answered, allowed = threading.Event(), threading.Event(), threading.Semaphore(3)

    class Slow(PoolSyncServer):
        def leaves(self):
            asked.set()
            assert answered.wait(60)
            return super().leaves()

    def batches(trainer, trainers):
        def stream(start):
            for number in range(start, 8):
                assert allowed.acquire(timeout=60)
                yield CLICKS.batch(number, 16)

        return stream

    def save_meanwhile(pool):
        position = pool.progress[0].position
        if position == 3 and not asked.is_set():
            saver.start()
            assert asked.wait(60)
            allowed.release(3)
        if position == 6 and not answered.is_set():
            answered.set()
            saver.join()
            allowed.release(2)

    monkeypatch.setattr("jaxrec.cluster.pool.PoolSyncServer", Slow)
    pool, _ = pool_of(work(batches=batches, rule=model_averaging()), directory=tmp_path, save_every_seconds=1e6)
    saver = threading.Thread(target=pool.save)
    with pool:
        pool.run(save_meanwhile)
    assert read_manifest(newest(tmp_path)).extra == {"positions": [3], "examples": 3 * 16}
    with Fleet(SPEC, OWN[1]) as fleet:
        params, _ = restored(tmp_path, work().params, fleet.tables)
    assert {name: leaf.shape for name, leaf in params.items()} == {"dense": (3,), "bias": ()}
    assert all(np.any(leaf) for leaf in params.values())


def paced(allowed):
    """Batches of a trainer, each once it is allowed."""

    def batches(trainer, trainers):
        def stream(start):
            for number in range(start, 6):
                until(lambda: over.is_set() or allowed.acquire(blocking=False))
                if over.is_set():
                    raise EOFError
                yield CLICKS.batch(number, 16)

        return stream

    return batches


@pytest.fixture
def begun_with(monkeypatch):
    """The leaves that each sync server has begun with."""
    noted = []

    class Noted(PoolSyncServer):
        def __init__(self, packed, leaves, *more):
            noted.append(leaves)
            super().__init__(packed, leaves, *more)

    monkeypatch.setattr("jaxrec.cluster.pool.PoolSyncServer", Noted)
    return noted


@pytest.mark.filterwarnings("ignore:.*(its successor has|restarts at):UserWarning")
@pytest.mark.parametrize("saves", [True, False])
def test_where_all_die_at_once_successors_have_the_parameters_saved_last_and_never_the_initial_ones(
    pool_of, begun_with, tmp_path, saves
):
    begun, allowed = itertools.count(), [threading.Semaphore(0), threading.Semaphore(3), threading.Semaphore(9)]

    def batches(trainer, trainers):
        return paced(allowed[next(begun)])(trainer, trainers)

    def kill(pool):
        deaths = len(pool.failures)
        if not deaths and pool.progress[0].state == "training":
            processes[1].kill()  # before any round: what its successor begins with is nothing to keep
        elif deaths == 1 and pool.progress[0].position == 3:
            if saves:
                pool.save()
            for process in (processes[0], processes[2]):
                process.kill()

    of_all = work(batches=batches, rule=model_averaging(), every_steps=1)
    pool, processes = pool_of(of_all, directory=tmp_path, save_every_seconds=1e6)
    with pool, contextlib.nullcontext() if saves else pytest.raises(GivenUp, match="the dense parameters are lost"):
        _, stats = pool.run(kill)
        assert {one.kind for one in stats.failures} == {"trainer", "sync server"} and stats.examples == 6 * 16
    if saves:
        with Fleet(SPEC, OWN[1]) as fleet:
            params, past = restored(tmp_path, work().params, fleet.tables)
        assert past["positions"] == [3]
        assert all(map(np.array_equal, begun_with[1], jax.tree.leaves(params)))
        assert not any(map(np.array_equal, begun_with[1], begun_with[0]))


@pytest.mark.filterwarnings("ignore:.*(its successor has|restarts at):UserWarning")
def test_a_sync_server_that_dies_with_the_last_trainer_begins_again_with_what_another_has_ended_with(
    pool_of, begun_with, monkeypatch
):
    class DiesOnce(TrainerProcess):
        def result(self):
            if len(processes) == 3 and self is processes[2].handle.server:
                processes[0].kill()
                processes[2].kill()
            return super().result()

    monkeypatch.setattr("jaxrec.cluster.pool.TrainerProcess", DiesOnce)
    pool, processes = pool_of(work(rule=model_averaging(), every_steps=3), 2)
    with pool:
        params, stats = pool.run()
    assert {one.kind for one in stats.failures} == {"trainer", "sync server"} and len(params) == 2
    assert not any(map(np.array_equal, begun_with[1], begun_with[0]))


def test_a_trainer_that_dies_after_the_last_round_is_replaced(pool_of, monkeypatch):
    class DiesOnce(TrainerProcess):
        def result(self):
            if len(processes) == 2:
                processes[1].kill()
            return super().result()

    monkeypatch.setattr("jaxrec.cluster.pool.TrainerProcess", DiesOnce)
    pool, processes = pool_of(work(rule=model_averaging(), every_steps=1))
    with pool, pytest.warns(UserWarning, match="trainer 0 restarts at its batch 12"):
        (params,), stats = pool.run()
    assert [one.kind for one in stats.failures] == ["trainer"] and stats.examples == 12 * 16
    assert np.any(params["dense"])


@pytest.mark.parametrize("where", ["in its stream", "before its first batch", "before its stream"])
def test_a_trainer_that_answers_and_trains_nothing_is_named_once(pool_of, monkeypatch, where):
    allowed, began, polls = threading.Semaphore(2 * (where == "in its stream")), threading.Event(), []
    if where == "before its first batch":
        began.set()
    if where != "in its stream":  # else there is more time until its first batch
        monkeypatch.setattr("jaxrec.cluster.pool.START_TIMEOUT_S", 0.05)

    def batches(trainer, trainers):
        assert began.wait(60)
        return paced(allowed)(trainer, trainers)

    def release(pool):
        if named() or not began.is_set():
            polls.append(len(named()))
        if len(polls) == 5 and where == "in its stream" and not began.is_set():
            polls.clear()
            began.set()
        if len(polls) == 9:
            began.set()
            allowed.release(6)

    def named():
        return [str(one.message) for one in caught if "trainer 0 answers, but has trained no batch" in str(one.message)]

    pool, _ = pool_of(work(batches=batches), timeout_s=0.05)
    with pool, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pool.run(release)
    of_a_batch = named()[: polls[8]]
    assert 0 < len(of_a_batch) == len(set(of_a_batch)) <= 2
    assert where != "in its stream" or "at its batch 0" not in " ".join(of_a_batch)


def test_what_a_trainer_is_given_and_cannot_read_ends_the_run(pool_of, monkeypatch):
    monkeypatch.setattr("jaxrec.cluster.pool.TrainerProcess", Illiterate)
    pool, _ = pool_of(work())
    with pool, pytest.raises(RuntimeError, match="trainer 0 cannot begin: .*not on that machine"):
        pool.run()


class Illiterate(TrainerProcess):
    def begin(self, *args):
        raise ModuleNotFoundError("not on that machine")


def test_an_error_on_entering_a_pool_ends_its_processes(pool_of):
    pool, processes = pool_of(work(), 2, cores=[[0], 1])
    with pytest.raises(TypeError), pool:
        pass
    assert len(processes) == 1 and all(process.handle.dead.is_set() for process in processes)


@pytest.mark.filterwarnings("ignore:.*is given up:UserWarning")
def test_what_cannot_be_counted_of_a_trainer_given_up_is_told_and_loses_nothing(pool_of):
    here = threading.current_thread()

    def batches(trainer, trainers):
        def stream(start):
            if trainer == 1 and threading.current_thread() is here:
                raise FileNotFoundError("not on this machine")
            for number in range(start, 6):
                if trainer == 1 and number == 4:
                    processes[1].kill()
                yield CLICKS.batch(number, 16)

        return stream

    pool, processes = pool_of(work(batches=batches), 2, most_deaths=0)
    with pool, pytest.warns(UserWarning, match="the examples that trainer 1 has lost are not all counted"):
        params, stats = pool.run()
    assert len(params) == 1 and stats.steps[0] == 6 and stats.examples_lost == 0


def test_rows_of_a_dead_server_are_initial_ones_where_no_image_is_intact(tmp_path):
    with Supervised(SPEC, OWN[1]) as servers:
        initial = every_row(servers.tables)
        tables = ServedTables(servers, tmp_path, 1e6, PARAMS)
        with Checkpointer(tmp_path / "other") as checkpointer:
            checkpointer.save(image_of(tmp_path, PARAMS, servers.tables))
        (tmp_path / "other" / "step_00000001").rename(tmp_path / "step_00000001")
        for file in (tmp_path / "step_00000001").rglob("*"):
            if file.is_file() and file.name != "manifest.json" and not file.name.startswith("_"):
                file.write_bytes(b"damaged")
        servers.ways[0].kill()
        with pytest.raises(ShardsLost):
            servers.tables.read(plan(SPEC, CLICKS.batch(0, 16).ids))
        with pytest.warns(UserWarning, match="no image is intact, rows are initial ones again"):
            tables.restore_lost(lambda: (None, {}))
        jax.tree.map(np.testing.assert_array_equal, every_row(servers.tables), initial)
        tables.close()


def test_values_that_no_image_could_hold_are_refused_at_once_and_positions_are_numbers(pool_of, tmp_path):
    with pytest.raises(ValueError, match="extra=.* cannot be saved as JSON: .*float32"):
        pool_of(work(), extra={"rate": np.float32(0.1)})
    rule, options = model_averaging(), {"directory": tmp_path, "save_every_seconds": 1e6}
    pool, _ = pool_of(work(rule=rule, every_steps=1), positions=np.array([9]), **options)
    with pool:
        pool.run(lambda pool: pool.save() if pool.progress[0].position == 12 else None)
    assert read_manifest(newest(tmp_path)).extra["positions"] == [12]


def test_a_stop_saves_and_each_death_is_logged_once():
    logged, saved, asked = [], [], Asked()
    run = types.SimpleNamespace(log=logged.append, directory=Path("d"))
    watch = Watch(run, 20, asked)
    death = types.SimpleNamespace(_asdict=lambda: {"kind": "trainer"})
    progress = [Progress(position=5), Progress(position=9)]
    pool = types.SimpleNamespace(progress=progress, failures=[death], save=lambda: saved.append(1))
    watch(pool)
    watch(pool)
    assert logged == [{"kind": "trainer"}] and not saved
    asked.signal = signal.SIGTERM
    with pytest.raises(Stopped, match="SIGTERM"):
        watch(pool)
    assert saved == [1]


def test_trainers_find_the_data_from_any_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw = Criteo(path=(Path("train.txt"),), min_count=3)
    Path("prepared").mkdir()
    assert raw.from_anywhere().path == (tmp_path / prepared_directory(raw.path, {"min_count": 3}),)
    for kind in (Criteo, Tabular):
        assert kind(path=(Path("prepared"),)).from_anywhere().path == (tmp_path / "prepared",)
    assert Synthetic().from_anywhere() == Synthetic()


def test_pauses_are_told_apart_by_what_went_on_meanwhile(tmp_path, monkeypatch):
    instants = [0.0, 1.0, 2.0, 3.0, 6.0, 7.0, 9.0, 10.0, 11.0]  # the first two compile
    monkeypatch.setattr("pauses.time.monotonic", iter(instants).__next__)
    assert list(Timed(lambda trainer, trainers: lambda start: iter(range(start, 9)), tmp_path)(0, 1)(0)) == [*range(9)]
    samples = [(at / 2, "calm") for at in range(30)]
    samples[7] = (3.5, "stopped")  # within the step of 3 s
    samples[17] = (8.5, "starting")  # within that of 2 s
    samples[18] = (9.0, "stopped")  # the same, and before the next one
    assert longest_by_state(tmp_path, samples) == {
        "steps_calm": 3, "steps_stopped": 2, "steps_starting": 1, "steps_rows_away": 0,
        "longest_step_over_median_calm": 1.0, "longest_step_over_median_stopped": 3.0,
        "longest_step_over_median_starting": 2.0,
    }  # fmt: skip
