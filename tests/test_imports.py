"""Who may import what, read from the sources: nothing is imported here, so a cycle or a missing
package cannot hide a finding. The layers among the modules are import-linter's (pyproject.toml)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("infer", "metrics", "dashboard")
HOST_LAYERS = (
    "errors",
    "types",
    "config",
    "blocks",
    "prefix",
    "sequences",
    "schedule",
    "persistent",
)
COMPILE_OWNER = ROOT / "infer" / "compile.py"


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import statement, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.lineno, node.module
            submodules = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from ((node.lineno, name) for name in submodules if module_path(name))


def module_path(name: str) -> Path | None:
    """The file of a module of ours, or None."""
    base = ROOT.joinpath(*name.split("."))
    candidates = (base.with_suffix(".py"), base / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


@pytest.mark.parametrize("layer", HOST_LAYERS)
def test_host_layers_never_import_torch(layer: str) -> None:
    """Neither themselves nor through another module of infer."""
    start = f"infer.{layer}"
    if module_path(start) is None:
        pytest.skip(f"{start} does not exist")
    found: list[str] = []
    seen, todo = {start}, [start]
    while todo:
        name = todo.pop()
        path = module_path(name)
        if path is None:
            continue
        for line, imported in imported_names(path):
            if imported.split(".")[0] == "torch":
                found.append(f"{path.relative_to(ROOT)}:{line} imports {imported}")
            if imported.startswith("infer.") and imported not in seen:
                seen.add(imported)
                todo.append(imported)
    assert not found, f"{start} must stay free of torch: {found}"


def test_torch_compile_is_named_in_one_file() -> None:
    named = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources()
        if path != COMPILE_OWNER
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.compile"
    ]
    assert not named, f"torch.compile belongs to {COMPILE_OWNER.relative_to(ROOT)}: {named}"
