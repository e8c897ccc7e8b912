"""Compiling the kernels: once, side by side, and what happens where it cannot be done."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from infer.config import EngineConfig
from infer.errors import ConfigError
from infer.initialize import init
from infer.native import build
from infer.native.build import BuildError, library_file
from infer.native.library import Library
from infer.ops.backends import choose
from tests.engine.models import model

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "purestep" / "native"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler in $CXX that notes every compilation in the file returned."""
    log, script = tmp_path / "compilations", tmp_path / "cxx"
    script.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo stand-in 1; exit; fi\n'
        f'echo x >>"{log}"\n'
        'while [ "$1" != -o ]; do shift; done\n'
        'echo library >"$2"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return log


def compilations(log: Path) -> int:
    return len(log.read_text().split())


def test_compiled_once(cache: Path, compiler: Path) -> None:
    first = library_file()
    assert first.parent == cache
    assert library_file() == first
    assert compilations(compiler) == 1
    assert [path.suffix for path in cache.iterdir() if path != first] == [".lock"]


def test_compiled_anew_for_other_sources_compilers_and_processors(
    cache: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {library_file()}
    script = Path(os.environ["CXX"])
    script.write_text(script.read_text().replace("stand-in 1", "stand-in 2"))
    made.add(library_file())
    monkeypatch.setattr(build, "_processor", lambda: "another")
    made.add(library_file())
    monkeypatch.setattr(build, "_sources", lambda: [Path(__file__)])
    made.add(library_file())
    assert len(made) == 4


@pytest.mark.parametrize("content", [b"", b"librar"])
def test_a_damaged_library_is_compiled_anew(cache: Path, compiler: Path, content: bytes) -> None:
    path = library_file()
    whole = path.read_bytes()
    path.write_bytes(content)
    assert library_file().read_bytes() == whole
    assert compilations(compiler) == 2


@needs_compiler
@pytest.mark.slow
def test_side_by_side_one_compiles_and_all_load_it(tmp_path: Path) -> None:
    code = (
        "from infer.native.build import library_file\n"
        "from infer.native.library import Library\n"
        "Library(library_file())"
    )
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    started = [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(3)]
    assert [process.wait(100) for process in started] == [0, 0, 0]
    assert len(list((tmp_path / "purestep" / "native").glob("*.so"))) == 1


def test_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compiler", lambda: None)
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        library_file()


def test_a_compiler_that_fails(cache: Path, compiler: Path) -> None:
    script = Path(os.environ["CXX"])
    script.write_text("#!/bin/sh\n[ $1 = --version ] || { echo 'x: error: no luck' >&2; exit 3; }")
    with pytest.raises(BuildError, match="status 3: x: error: no luck"):
        library_file()
    assert not list(cache.glob("*.so")) and not list(cache.glob("*.part-*"))


def test_a_cache_that_cannot_be_written(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiler.parent / "cxx"))  # a file
    with pytest.raises(BuildError, match="cannot write"):
        library_file()


@needs_compiler
def test_the_real_library_loads(cache: Path) -> None:
    assert Library(library_file())
    assert cache.stat().st_mode & 0o077 == 0, "it holds code: nobody else may write there"


# --- which backend runs ---------------------------------------------------------------------------


def chosen(
    name: str, dtype: torch.dtype = torch.float32, ranks: int = 1, compiling: bool = False
) -> tuple[str, str | None]:
    return choose(name, CPU, dtype, num_ranks=ranks, compiling=compiling)


@needs_compiler
def test_auto_is_native_where_it_can_run() -> None:
    assert chosen("auto") == ("native", None)
    assert chosen("auto", torch.bfloat16) == ("native", None)
    assert chosen("torch") == ("torch", None)
    for options, word in (
        ({"dtype": torch.float16}, "float16"),
        ({"ranks": 2}, "2 ranks"),
        ({"compiling": True}, "compiled"),
    ):
        name, reason = chosen("auto", **options)
        assert name == "torch"
        assert word in str(reason)
    with pytest.raises(ConfigError, match=r"float16.*attention_backend='torch'"):
        chosen("native", torch.float16)


def test_without_a_compiler_torch_runs_and_says_why(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "compiler", lambda: None)
    with caplog.at_level("INFO"):
        state = init(model(), EngineConfig(num_blocks=8))
    assert state.runtime.ops.name == "torch"
    assert "no C++ compiler" in caplog.text
    with pytest.raises(ConfigError, match="no C\\+\\+ compiler"):
        init(model(), EngineConfig(num_blocks=8, attention_backend="native"))


@pytest.mark.slow
def test_the_sources_are_in_the_wheel(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "infer" / "native").iterdir():
        if path.is_file():
            assert f"infer/native/{path.name}" in names
