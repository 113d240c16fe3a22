"""Retries without long pauses."""

import pytest

from calibadv_jax.services import http_client, replicas


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(http_client, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(replicas, "CHECK_PAUSE", 0.05)
