"""Messages as text: HTML in them is shown and never obeyed.

The chat component renders Markdown, HTML included: it would draw some tags, over the whole page if
their style says so, and drop all others, with whatever ``vector<int>`` or ``#include <stdio.h>``
said. So an invisible character is put behind the bracket that would open a tag. It is taken out
again when the text is edited, and when it is copied (``static/page.js``).
"""

from __future__ import annotations

import re

WORD_JOINER = "\u2060"
# Fenced code, code in a line, and math: in all of them a bracket is a bracket. A fence that is
# still being written has no end yet.
FENCE = re.compile(r"[ \t>]*(?:[-*+] |\d+[.)] )?[ \t]*(`{3,}|~{3,})")
VERBATIM = re.compile(
    r"(?<![`\\])(?P<ticks>`+)(?!`)[^`]+(?P=ticks)(?!`)"
    r"|\$\$[^$]+\$\$|\\\[[^\\]+(?:\\(?!\])[^\\]+)*\\\]|\\\([^\\]+(?:\\(?!\))[^\\]+)*\\\)"
)
# Not the address in <https://example.org>, which is a link.
OPENING = re.compile(r"<(?=[a-zA-Z/!?])(?![a-zA-Z][a-zA-Z+.-]+:)")


def inert(text: str) -> str:
    """``text`` for the chat component: every tag outside of code is text."""
    if "<" not in text:
        return text
    parts: list[str] = []
    prose: list[str] = []  # lines since the last fence
    fence = ""  # that is open
    for line in text.splitlines(keepends=True):
        found = FENCE.match(line)
        if fence:
            parts.append(line)
            if found and found[1].startswith(fence) and not line[found.end() :].strip():
                fence = ""
        elif found:
            parts += [_inert_prose("".join(prose)), line]
            prose, fence = [], found[1]
        else:
            prose.append(line)
    return "".join([*parts, _inert_prose("".join(prose))])


def written(shown: str) -> str:
    """The text of which ``shown`` is the ``inert`` form."""
    return shown.replace(WORD_JOINER, "")


def _inert_prose(text: str) -> str:
    parts, at = [], 0
    for verbatim in VERBATIM.finditer(text):
        parts += [_joined(text[at : verbatim.start()]), verbatim[0]]
        at = verbatim.end()
    return "".join([*parts, _joined(text[at:])])


def _joined(prose: str) -> str:
    return OPENING.sub("<" + WORD_JOINER, prose)
