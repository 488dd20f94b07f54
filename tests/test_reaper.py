"""What is said when Ray or the driver of a run dies, however late the program that watches them looks."""

import os
import types

import pytest

from jaxrec.cluster import reaper

GCS, ADVICE = "Ray's gcs_server (process 7), its control service,", "Go on with --resume."


def ended_pipe(written=b""):
    """The end to read from of a pipe whose other end is closed."""
    end, other = os.pipe()
    os.write(other, written)
    os.close(other)
    return end


@pytest.mark.parametrize("ray_dies", [False, True])
@pytest.mark.parametrize("written", [b"", reaper.BEGUN, reaper.BEGUN + reaper.ENDING])
def test_a_run_that_ends_without_a_word_is_told_how_to_go_on_whether_ray_died_before_or_after_it(
    monkeypatch, capsys, written, ray_dies
):
    monkeypatch.setattr(reaper, "essential", lambda directory: {ended_pipe(): GCS} if ray_dies else {})
    reaper.watch(ended_pipe(written), "", ADVICE)
    what = f"{GCS} has died, and the run has ended" if ray_dies else "the run was killed, or ended by Ray"
    assert capsys.readouterr().err == (f"{what}. {ADVICE}\n" if written == reaper.BEGUN else "")


@pytest.mark.parametrize("read", [True, False])
def test_the_death_of_ray_is_told_once_while_the_driver_lives_also_if_nobody_reads_it(monkeypatch, read):
    driver, end = os.pipe()
    os.write(end, reaper.BEGUN)
    said = []

    def write(line):
        if not said:
            os.close(end)  # the driver ends only now
        said.append(line)
        if not read:
            raise BrokenPipeError

    monkeypatch.setattr(reaper, "essential", lambda directory: {ended_pipe(): GCS})
    monkeypatch.setattr(reaper.sys, "stderr", types.SimpleNamespace(write=write, flush=lambda: None))
    reaper.watch(driver, "", ADVICE)
    assert "".join(said).strip() == f"{GCS} has died, and Ray may end this run without a message. {ADVICE}"
