"""Parts of a run are killed at random: no step is lost or doubled, and the result is the same."""

import pytest

from benchmarks import kill

pytest.importorskip("faiss")
pytest.importorskip("fastapi")


@pytest.mark.slow
def test_a_disturbed_run_ends_as_an_undisturbed_one(tmp_path, capsys):
    """The trainer gets SIGTERM and SIGKILL, the retriever SIGKILL (seed 45 draws so)."""
    arguments = ["--output", str(tmp_path / "runs"), "--kills", "3", "--steps", "8"]
    status = kill.main([*arguments, "--seed", "45", "--deadline", "1200"])
    report = capsys.readouterr().out
    assert status == 0, report
    assert "parameters equal bit for bit: True" in report
    assert "files of trajectories: those of the steps: True" in report
