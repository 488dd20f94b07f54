"""prepare.py as a user sees it: every failure is one line and an exit code, and nothing is lost."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from smoke import smoke
from test_criteo import digests, lines, write

from jaxrec.data.criteo import prepare

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "experiments" / "prepare.py"
FLAGS = ["--hash-cap", "100"]
TMPFS = 'mount -t tmpfs -o size=$0 tmpfs "$1" && shift && exec "$@"'


def run(*arguments, **options):
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=300, **options
    )


def one_line(text):
    assert text.count("\n") == 1, text
    return text


def big(path):
    return write(path, lines(300) * 60)


def stopped_in_the_second_chunk(path, out, number):
    """Run prepare.py with chunks of 64 KiB, and send it a signal after its first shard; return code and stderr."""
    code = f"""
import runpy, sys
import jaxrec.data.criteo, jaxrec.data.preparation as preparation, jaxrec.data.sources as sources
sources.CHUNK_BYTES = 1 << 16
write = preparation.write_blocks
def told(*arguments):
    size = write(*arguments)
    print("shard", flush=True)
    sys.stdin.readline()  # the signal comes while this waits
    return size
preparation.write_blocks = told
sys.path.insert(0, {str(SCRIPT.parent)!r})
defaults = jaxrec.data.criteo.prepare.__kwdefaults__
defaults["block_rows"], defaults["blocks_per_shard"] = 100, 2
sys.argv = ["prepare.py", "--sources", {str(path)!r}, "--directory", {str(out)!r}, *{FLAGS}]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "shard\n"
    child.send_signal(number)
    _, error = child.communicate(timeout=120)
    return child.returncode, error


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.gate), (signal.SIGTERM, 143)]
)
def test_a_signal_ends_in_a_line_and_the_same_call_goes_on(tmp_path, number, code):
    path, out = big(tmp_path / "t.txt"), tmp_path / "out"
    returned, error = stopped_in_the_second_chunk(path, out, number)
    assert returned == code
    assert one_line(error) == f"stopped by {signal.Signals(number).name}: the same command goes on where it was.\n"
    small = {"hash_cap": 100, "block_rows": 100, "blocks_per_shard": 2}
    prepare([path], out, **small)
    prepare([path], tmp_path / "undisturbed", **small)
    assert digests(out) == digests(tmp_path / "undisturbed")


@pytest.mark.process
def test_a_signal_before_the_work_ends_in_a_line(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-X", "importtime", SCRIPT, "--sources", "none.txt", "--directory", tmp_path / "out"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in child.stderr:
        if line.rstrip().endswith("numpy.version"):  # an early line of -X importtime
            child.send_signal(signal.SIGINT)
            break
    said = [line for line in child.stderr if not line.startswith("import time")]
    assert child.wait(timeout=120) == 130
    assert said == ["stopped by SIGINT: the same command goes on where it was.\n"]


def may_mount():
    try:
        return subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.process
@pytest.mark.parametrize("full_at", ["the first shard", "the vocabulary", "the metadata"])
def test_a_full_disk_ends_in_a_line_and_leaves_what_is_whole(tmp_path, full_at):
    """The disk is a tmpfs of limited size, in pages of 4 KiB."""
    if not may_mount():
        pytest.skip("a disk of its own needs `unshare -Urm`, which is not allowed here")
    path, disk = big(tmp_path / "t.txt"), tmp_path / "disk"
    disk.mkdir()
    prepare([path], tmp_path / "whole", min_count=1)
    shards = sum(file.stat().st_size for file in (tmp_path / "whole").glob("criteo-*"))
    vocabulary = -(-(tmp_path / "whole" / "vocabulary.npz").stat().st_size // 4096) * 4096
    size = {"the vocabulary": 8 << 10, "the first shard": 200 << 10, "the metadata": shards + vocabulary + (12 << 10)}
    out = disk / "out"
    command = [sys.executable, SCRIPT, "--sources", path, "--directory", out, "--min-count", "1"]
    # List the files left on the full disk, then check that the same command resumes once there is space.
    inside = (
        f'"$@"; echo "code $?" >&2; ls {out}; mount -o remount,size=50m {disk}; "$@" > /dev/null; echo "then $?" >&2'
    )
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", TMPFS, str(size[full_at]), disk, "sh", "-c", inside, "sh", *command],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    *said, code, then = done.stderr.splitlines()
    assert (code, then) == ("code 1", "then 0"), done.stderr
    assert len(said) == 1 and "No space left on device" in said[0] and "free some space" in said[0]
    left = done.stdout.split()
    assert not any(name.endswith(".partial") for name in left) and "dataset_info.json" not in left
    assert ("vocabulary.npz" in left) == (full_at != "the vocabulary")
    assert ("criteo-test.array_record-00000" in left) == (full_at == "the metadata")


@pytest.mark.process
def test_missing_rights_end_in_a_line(tmp_path):
    home = {**os.environ, "HOME": str(tmp_path)}  # numba's cache if it cannot write beside the source
    path = write(tmp_path / "t.txt", lines(10))
    (tmp_path / "closed").mkdir(mode=0o500)
    for parent in [tmp_path, *tmp_path.parents][:3]:
        parent.chmod(parent.stat().st_mode | 0o055)
    tmp_path.chmod(0o777)
    if os.geteuid() == 0:
        rights = ["setpriv", "--reuid=65534", "--clear-groups", "--inh-caps=-all"]
        if subprocess.run(
            [*rights, sys.executable, "-c", "import tyro, jaxrec"], capture_output=True, env=home
        ).returncode:
            pytest.skip("the user 65534 may not run this Python")
    else:
        rights = []

    def said(*arguments):
        command = [*rights, sys.executable, SCRIPT, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=home)
        assert done.returncode == 1
        return one_line(done.stderr)

    line = said("--sources", path, "--directory", tmp_path / "closed" / "out")
    assert "closed/out: Permission denied" in line and "rights" in line
    path.chmod(0o000)
    line = said("--sources", path, "--directory", tmp_path / "out")
    assert "t.txt: Permission denied" in line and "rights" in line


@pytest.mark.process
def test_a_good_run_prints_its_figures(tmp_path):
    done = run("--sources", write(tmp_path / "t.txt", lines(100)), "--directory", tmp_path / "out", *FLAGS)
    assert done.returncode == 0 and "rows: {'train': 83, 'test': 17}" in done.stdout


@pytest.mark.slow
@pytest.mark.process
def test_what_preparing_takes_is_measured_of_each_format(tmp_path):
    found = smoke(tmp_path, "preparation_rate")
    for name in ("criteo", "csv", "parquet"):
        assert found[f"{name}_rows_per_s"] > 0 and 0.05 < found[f"{name}_peak_gb"] < 8
        assert found[f"{name}_loader_examples_per_s"] > found[f"{name}_rows_per_s"]
        assert not (tmp_path / name).exists()
