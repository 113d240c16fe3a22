"""Parts of a run are killed at random: no step is lost or doubled, and the result is the same."""

import pytest

from benchmarks import kill

pytest.importorskip("faiss")
pytest.importorskip("fastapi")


@pytest.mark.slow
def test_a_disturbed_run_ends_as_an_undisturbed_one(tmp_path, capsys):
    """Trainer and retriever get SIGKILL, SIGTERM, and SIGSTOP for two seconds. Larger: benchmarks/kill.py."""
    arguments = ["--output", str(tmp_path / "runs"), "--kills", "4", "--steps", "16", "--pause", "2"]
    status = kill.main([*arguments, "--deadline", "1200"])
    report = capsys.readouterr().out
    assert status == 0, report
    assert "parameters equal bit for bit: True" in report
    assert "files of trajectories: those of the steps: True" in report
