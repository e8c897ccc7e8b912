"""What a measurement depends on beside the model: versions, commit and processor."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = ("purestep", "torch", "triton", "transformers", "flash-attn", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that an engine's results depend on, if installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The short hash of the checkout that this code runs from; None where there is none."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    return done.stdout.strip() or None


def processor(device: torch.device) -> str:
    """The model name of the GPU, or of the CPU as the operating system tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
