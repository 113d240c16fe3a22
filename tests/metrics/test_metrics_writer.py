"""calibadv_jax.metrics.metrics_writer: rows on disk, resuming, values JSON does not know."""

from __future__ import annotations

from unittest.mock import Mock, call

import numpy as np
import pytest

from calibadv_jax.core.errors import UserError
from calibadv_jax.metrics.metrics_writer import MetricsWriter, read_metrics


def write(directory, steps, start_step=None):
    with MetricsWriter(directory, start_step=start_step) as writer:
        for step in steps:
            writer.write(step, {"loss": step / 2})


def steps(directory):
    return [row["step"] for row in read_metrics(directory / "metrics.jsonl")]


def test_resumed_file_equals_an_uninterrupted_one(tmp_path):
    write(tmp_path / "whole", range(6))
    write(tmp_path / "resumed", range(5))
    write(tmp_path / "resumed", range(3, 6), start_step=3)
    whole, resumed = (tmp_path / name / "metrics.jsonl" for name in ("whole", "resumed"))
    assert whole.read_bytes() == resumed.read_bytes()
    write(tmp_path / "whole", range(2))  # without a start step all rows stay
    assert steps(tmp_path / "whole") == [0, 1, 2, 3, 4, 5, 0, 1]


@pytest.mark.parametrize("start_step", [None, 2])
def test_torn_last_line_is_dropped(tmp_path, start_step):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 2, "lo')
    assert steps(tmp_path) == [0, 1]
    write(tmp_path, range(2, 4), start_step)
    assert steps(tmp_path) == [0, 1, 2, 3]


@pytest.mark.parametrize("line", ["{", "[1]", '{"loss": 1.0}', '{"step": "3"}', ""])
def test_foreign_line_is_refused(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n' + line + '\n{"step": 1}\n')
    before = path.read_bytes()
    with pytest.raises(UserError, match="no such metrics file"):
        read_metrics(tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: not a row of metrics; remove the line"):
        MetricsWriter(tmp_path, start_step=1)
    assert path.read_bytes() == before


def test_failed_rewrite_leaves_the_file(tmp_path, monkeypatch):
    write(tmp_path, range(3))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    full_disk = Mock(side_effect=OSError("no space left"))
    monkeypatch.setattr("calibadv_jax.core.files.os.replace", full_disk)
    with pytest.raises(OSError, match="no space left"):
        MetricsWriter(tmp_path, start_step=1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_row_is_json_and_readable_at_once(tmp_path):
    with MetricsWriter(tmp_path / "run") as writer:
        values = {"loss": float("nan"), "kl": np.float32("inf"), "lr": np.float32(0.5), "turns": np.int64(4)}
        writer.write(3, values)
        text = (tmp_path / "run/metrics.jsonl").read_text()
    start = '{"step": 3, "loss": null, "kl": null, "lr": 0.5, "turns": 4, '
    assert text == start + '"nonfinite": ["loss", "kl"]}\n'


def test_backends_get_finite_values_rewinds_and_end(tmp_path):
    backends = [Mock(), Mock()]
    with MetricsWriter(tmp_path, backends) as writer:
        with pytest.raises(TypeError):
            writer.write(0, {"good": 1.0, "bad": np.ones(3)})
        writer.write(1, {"loss": np.float32(0.5), "kl": float("nan")})
        assert steps(tmp_path) == [1]
        writer.rewind(1)
    for backend in backends:
        assert backend.mock_calls == [call.write(1, {"loss": 0.5}), call.rewind(1), call.close()]
