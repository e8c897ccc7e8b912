"""Compile the kernels for this very processor, once, into the user's cache."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import xxhash

from infer.usercache import cache_root, locked

logger = logging.getLogger(__name__)

FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast"),
    *("-shared", "-fPIC", "-pthread", "-w"),
)
TIMEOUT_S = 300.0


class BuildError(Exception):
    """The kernels cannot be had here; the message says why."""


def library_file() -> Path:
    """The compiled library, from the cache or compiled now.

    Its name holds what it was made from (sources, compiler, processor) and a hash of its content,
    so a stale or damaged file is never taken. Safe to run several times at once.

    Raises:
        BuildError: no compiler, one that fails, or a cache that cannot be written.
    """
    folder, name = cache_root() / "native", _name(_compiler())
    found = _intact(folder, name)
    if found is not None:
        return found
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(folder / f"{name}.lock"):
            return _intact(folder, name) or _build(folder, name)
    except OSError as error:
        raise BuildError(f"cannot write compiled kernels to {folder} ({error})") from error


def compiler() -> str | None:
    """The C++ compiler: ``$CXX``, or the first of the usual names."""
    names = (os.environ.get("CXX"), "g++", "clang++", "c++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _compiler() -> str:
    found = compiler()
    if found is None:
        raise BuildError("there is no C++ compiler (looked for $CXX, g++, clang++ and c++)")
    return found


def _sources() -> list[Path]:
    return sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h"))


def _name(cxx: str) -> str:
    digest = xxhash.xxh3_64(f"{cxx} {' '.join(FLAGS)} {_processor()}".encode())
    digest.update(_run([cxx, "--version"]).stdout)
    for source in _sources():
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _processor() -> str:
    """What ``-march=native`` looks at: a cache may be shared by different machines."""
    lines: set[str] = set()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = platform.processor()
    for line in text.splitlines():
        if line.split(":")[0].strip() in ("model name", "flags", "Features", "CPU part"):
            lines.add(line)
    return "\n".join([platform.machine(), *sorted(lines)])


def _intact(folder: Path, name: str) -> Path | None:
    for path in folder.glob(f"{name}-*.so"):
        if path.stem == f"{name}-{xxhash.xxh3_64_hexdigest(path.read_bytes())}":
            return path
    return None


def _build(folder: Path, name: str) -> Path:
    """Compile; the library appears under its name complete or not at all."""
    _tell("compiling kernels for this processor, once")
    began = time.monotonic()
    for old in folder.glob(f"{name}*.so*"):
        old.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}.part-", dir=folder) as part:
        made = Path(part) / "native.so"
        done = _run(
            [_compiler(), *FLAGS, str(Path(__file__).with_name("step.cpp")), "-o", str(made)]
        )
        if done.returncode or not made.is_file():
            text = done.stderr.decode(errors="replace").strip()
            first = next((line for line in text.splitlines() if "error" in line), text[:200])
            raise BuildError(f"{_compiler()} failed with status {done.returncode}: {first}")
        target = folder / f"{name}-{xxhash.xxh3_64_hexdigest(made.read_bytes())}.so"
        made.rename(target)
    _tell(f"kernels compiled in {time.monotonic() - began:.1f} s")
    return target


def _tell(text: str) -> None:
    """Log it; who sits at a terminal where nothing is logged should not wonder either."""
    logger.info(text)
    if sys.stderr.isatty() and not logger.isEnabledFor(logging.INFO):
        sys.stderr.write(f"{text}\n")


def _run(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} cannot be run ({error})") from error
