"""Shared fixtures of the server's tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Coroutine tests run on asyncio."""
    return "asyncio"
