"""The command `calibadv inspect`: its arguments, the server it starts."""

from http.server import ThreadingHTTPServer

import pytest

from benchmarks.generated_run import make_run
from calibadv_jax import cli


def test_kept_steps_are_served(tmp_path, monkeypatch, capsys):
    make_run(tmp_path / "run", 160)
    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", lambda self: None)
    for port, status, output in (
        ("0", 0, "2 steps, 160 trajectories"),
        ("70000", 2, "argument --port: 70000: give 0 or more and below 65536"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.calibadv(["inspect", str(tmp_path / "run"), "--port", port])
        printed = capsys.readouterr()
        assert end.value.code == status and output in printed.err
        assert printed.out.startswith("http://localhost:") == (status == 0)
