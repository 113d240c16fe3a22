"""The script for a lent GPU: its order, its bounds, what it keeps, and a rehearsal at tiny sizes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.device import parse
from benchmarks.lent_gpu import Part, kept_results, line_of, parts, run_part, run_parts

ROOT = Path(__file__).resolve().parents[2]
HOUR = 3600.0


def counting(name, file, status=0):
    """A part that adds a letter to a file, so that its runs can be counted."""
    program = f"import sys; open({str(file)!r}, 'a').write('x'); sys.exit({status})"
    return Part(name, 60, ("-c", program))


def test_parts_that_have_a_result_are_not_run_again(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    chosen = [counting("first", first), counting("second", second, status=3)]
    out = tmp_path / "out"
    for _ in range(2):
        assert run_parts(chosen, out, HOUR, 989.0, retry=False)
    assert (first.read_text(), second.read_text()) == ("x", "x")
    assert run_parts(chosen, out, HOUR, 989.0, retry=True)
    assert (first.read_text(), second.read_text()) == ("x", "xx")
    results = kept_results(out / "results.jsonl")
    assert results["first"]["ended"] == "done"
    assert results["second"]["ended"] == "failed with status 3"


def test_part_is_not_begun_without_time(tmp_path, capsys):
    ran = tmp_path / "ran"
    assert not run_parts([counting("part", ran)], tmp_path / "out", 1.0, 989.0, retry=False)
    assert not ran.exists()
    assert "no time left for part: give the same command again" in capsys.readouterr().out


def test_part_is_ended_after_its_seconds(tmp_path):
    waits = Part("waits", 1, ("-c", "import threading; threading.Event().wait()"))
    result = run_part(waits, tmp_path, 1.0, 989.0)
    assert result["ended"] == "ended after 1 s"


def test_line_that_was_cut_off_does_not_spoil_the_next_one(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "results.jsonl").write_text('{"name": "first", "ended": "done", "seconds": 1}\n{"name": "sec')
    second = tmp_path / "second"
    assert run_parts([counting("second", second)], out, HOUR, 989.0, retry=False)
    assert sorted(kept_results(out / "results.jsonl")) == ["first", "second"]


def test_result_with_figures_as_a_line():
    figures = {"results": [{"name": "update", "median_s": 2.5, "tokens_per_s": 52429.0, "mfu": 0.19}]}
    result = {"name": "part", "ended": "done", "seconds": 20.0, "figures": figures}
    assert line_of(result) == "part: done (20.0 s)\n  update: 2.500 s, 52429 tokens/s, 19.0% of the peak"


def test_arguments_of_every_part_are_those_of_its_program():
    names = [part.name for part in parts()]
    assert len(set(names)) == len(names)
    assert names[:2] == ["tests", "update-0.5b-tokamax-full"]
    for part in parts():
        if part.arguments[1] == "benchmarks.device":
            words = [word.format(out="/out", peak=989.0) for word in part.arguments[2:]]
            options = parse(words)
            assert options.rows % options.microbatch == 0
            assert options.json == Path(f"/out/{part.name}.json")


@pytest.mark.slow
def test_rehearsal_measures_profiles_and_goes_on(tmp_path):
    command = [sys.executable, "-m", "benchmarks.lent_gpu", str(tmp_path), "--rehearse"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = kept_results(tmp_path / "results.jsonl")
    assert list(results) == ["update-tiny", "profile-tiny", "operations", "sampler-tiny"]
    rows = [
        row["name"] for result in results.values() for row in result.get("figures", {}).get("results", ())
    ]
    assert rows == ["update", "update", "log-probabilities", "sampler (prefill + decode)"]
    assert "matrix product" in (tmp_path / "operations.txt").read_text()
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (again.returncode, again.stdout) == (0, "")
    assert json.loads((tmp_path / "profile-tiny.json").read_text())["remat"] == "attention"
