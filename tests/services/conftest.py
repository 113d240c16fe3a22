"""Retries without long pauses."""

import pytest

from calibadv_jax.services import http_client, retriever_client


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(http_client, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(retriever_client, "CHECK_PAUSE", 0.05)
