"""Tests marked `anyio` run on asyncio."""

import pytest


@pytest.fixture
def anyio_backend():
    return "asyncio"
