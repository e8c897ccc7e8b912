"""Shared fixtures of the reliability tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.tiny import write_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder without weights."""
    return write_tiny(tmp_path_factory.mktemp("reliability") / "tiny")


@pytest.fixture
def anyio_backend() -> str:
    """Coroutine tests run on asyncio."""
    return "asyncio"
