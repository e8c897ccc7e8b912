"""Kernels are compiled ahead, in forks and without a GPU, and found on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia")
from triton.backends.nvidia import driver as nvidia


@pytest.mark.skipif(hasattr(nvidia, "make_launcher"), reason="launchers link against libcuda")
def test_a_rehearsal_is_compiled_by_forks(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.ops.kernel_rehearsal"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # Two kernels in three widths (the repeated one is no further variant), and three that sample.
    assert found["wanted"] == 9
    assert found["complete"], done.stderr
    assert found["hits"] == [True] * 9
    assert found["counted"] == 9
    assert found["again"] == 0
