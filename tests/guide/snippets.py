"""The fenced blocks and the links of the guide."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDE = tuple(
    ROOT / name
    for name in ("README.md", "infer/README.md", "metrics/README.md", "dashboard/README.md")
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Shell commands, continued lines joined; a quoted argument may span lines."""
        out: list[str] = []
        for line in self.text.splitlines():
            if out and (out[-1].endswith("\\") or out[-1].count("'") % 2):
                out[-1] = out[-1].removesuffix("\\") + "\n" + line
            elif line.strip():
                out.append(line)
        return out


def blocks(language: str) -> list[Block]:
    """Every block of one language, over all pages."""
    found = []
    for page in GUIDE:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            if match[1] == language:
                found.append(Block(page, line, match[1], match[2]))
    return found


def links() -> list[tuple[Path, str, str]]:
    """(page, text, target) of every link and picture outside blocks."""
    return [
        (page, match[1], match[2])
        for page in GUIDE
        for match in LINK.finditer(FENCE.sub("", page.read_text(encoding="utf-8")))
    ]
