"""Parts of a run are killed at random: no step is lost or doubled, and the result is the same."""

import pytest

from benchmarks import kill

pytest.importorskip("faiss")
pytest.importorskip("fastapi")


@pytest.mark.slow
def test_run_on_changing_machines_ends_as_an_undisturbed_one(tmp_path, capsys):
    """One machine is lost and one is taken over (seed 4 draws so); uploads are slower than steps."""
    pytest.importorskip("moto.server")
    arguments = ["--output", str(tmp_path / "runs"), "--store", "500000", "--kills", "2", "--steps", "9"]
    status = kill.main([*arguments, "--seed", "4", "--deadline", "1200"])
    report = capsys.readouterr().out
    assert status == 0, report
    assert "lost                 1" in report and "taken over           1" in report
    assert "parameters equal bit for bit: True" in report
    assert "checkpoints in the store:" in report and "9]" in report


@pytest.mark.slow
def test_a_disturbed_run_ends_as_an_undisturbed_one(tmp_path, capsys):
    """The trainer gets SIGTERM and SIGKILL, the retriever SIGKILL (seed 45 draws so)."""
    arguments = ["--output", str(tmp_path / "runs"), "--kills", "3", "--steps", "8"]
    status = kill.main([*arguments, "--seed", "45", "--deadline", "1200"])
    report = capsys.readouterr().out
    assert status == 0, report
    assert "parameters equal bit for bit: True" in report
    assert "files of trajectories: those of the steps: True" in report
