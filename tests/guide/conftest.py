"""The tiny checkpoint that snippets and examples run on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.guide.checkpoints import tiny_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")
