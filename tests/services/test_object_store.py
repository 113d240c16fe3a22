"""Objects in a store: created once, and waits that end."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fsspec.implementations.dirfs import DirFileSystem

from calibadv_jax.core.errors import EnvironmentFailure, UserError, exit_status
from calibadv_jax.core.signals import DAEMON_THREAD
from calibadv_jax.metrics.console import Console
from calibadv_jax.services import object_store
from calibadv_jax.services.object_store import ObjectStore

pytestmark = pytest.mark.medium


def open_store(url, console=None):
    return ObjectStore(str(url), f"run.mirror={url}", (console or Console(progress=False)).note)


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_object_is_created_once(tmp_path, s3, kind):
    url = tmp_path / "store" if kind == "folder" else f"{s3}/a"
    data = [bytes([number]) * 1000 for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        created = list(threads.map(lambda each: open_store(url).create("marker/1", each), data))
    [winner] = [each for each, is_created in zip(data, created, strict=True) if is_created]
    store = open_store(url)
    assert store.files.cat_file("marker/1") == winner
    assert store.sizes("marker") == {"1": 1000} and store.sizes("") == {"marker": store.sizes("")["marker"]}


def test_hanging_store_is_an_environment_failure(monkeypatch, capsys):
    """A service that takes connections and never answers."""
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.getsockname()))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "testing")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # else the call goes on after the server's end
        monkeypatch.setattr(object_store, "STALL_SECONDS", 2)
        monkeypatch.setattr(object_store, "REPORT_SECONDS", 1)
        with pytest.raises(EnvironmentFailure, match="has not answered for 2 s") as ended:
            store = open_store("s3://runs/a", Console())
            store.call("reading its marker", lambda: store.sizes("marker"))
    for thread in [each for each in threading.enumerate() if each.name == DAEMON_THREAD]:
        thread.join()  # `exit_process` would end the program of the tests for a later one
    assert exit_status(ended.value) == 75
    assert "waiting for run.mirror=s3://runs/a (reading its marker)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://bucket/run", r"gcsfs.*pip install .*'calibadv-jax\[gcs\]'"),
        ("floppy://a/run", "no conditional put is known for floppy://; use a folder, s3://"),
        ("memory://a/run", "no conditional put is known for memory://; use a folder, s3://"),
    ],
)
def test_unusable_kind_of_store_is_refused(url, message):
    with pytest.raises(UserError, match=message):
        open_store(url)


@pytest.mark.parametrize(("error", "status"), [(PermissionError, 2), (FileNotFoundError, 2), (OSError, 75)])
def test_refusal_by_the_store_is_an_input_error(error, status):
    def work():
        raise error("refused")

    with pytest.raises(UserError, match="check the address and the credentials") as ended:
        open_store("/tmp/none").call("fetching", work)
    assert exit_status(ended.value) == status


def test_precondition_without_its_name_is_understood(s3, monkeypatch):
    """As of services that do not say which condition failed."""
    store = open_store(f"{s3}/a")

    class ClientError(Exception):
        response = {"Error": {"Code": "PreconditionFailed"}}

    def refuse(*_, **__):
        raise OSError("At least one of the pre-conditions you specified did not hold") from ClientError()

    monkeypatch.setattr(DirFileSystem, "pipe_file", refuse)
    assert store.create("marker/1", b"x") is False
