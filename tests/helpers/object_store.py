"""A real S3 service for tests: moto's, in a thread."""

from __future__ import annotations

import httpx
import pytest


@pytest.fixture
def s3(monkeypatch):
    """Address of an empty bucket, ``s3://runs``; the environment names service and credentials."""
    fsspec = pytest.importorskip("fsspec")
    s3fs = pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    httpx.post(f"{url}/moto-api/reset").raise_for_status()  # buckets outlive a server within a process
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()  # those of an earlier service
    fsspec.filesystem("s3").mkdir("runs")
    yield "s3://runs"
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()
