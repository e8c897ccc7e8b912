"""Which brackets of a message are kept from opening a tag."""

from __future__ import annotations

import time

import pytest

from dashboard.markup import inert, written

J = "\u2060"
T = "`" * 3


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a < b, 1<2, <3", "a < b, 1<2, <3"),
        ("vector<int> x;", f"vector<{J}int> x;"),
        ("<b>bold</b>", f"<{J}b>bold<{J}/b>"),
        ("<!-- a --> <?xml?>", f"<{J}!-- a --> <{J}?xml?>"),
        ("see <https://example.org>", "see <https://example.org>"),
        ("`<b>` and <b>", f"`<b>` and <{J}b>"),
        ("``<b>`` <b>", f"``<b>`` <{J}b>"),
        (f"{T}html\n<p>\n{T}\n<p>", f"{T}html\n<p>\n{T}\n<{J}p>"),
        (f"~~~\n<p>\n{T}\n<p>\n~~~\n<p>", f"~~~\n<p>\n{T}\n<p>\n~~~\n<{J}p>"),
        (f"- a\n  {T}\n  <p>\n  {T}\n<p>", f"- a\n  {T}\n  <p>\n  {T}\n<{J}p>"),
        (f"<p>\n{T}html\n<p>", f"<{J}p>\n{T}html\n<p>"),  # still being written
        ("$$a<b$$ \\(a<b\\) \\[a<b\\] a<b", f"$$a<b$$ \\(a<b\\) \\[a<b\\] a<{J}b"),
    ],
)
def test_tags_outside_of_code_are_text(text: str, shown: str) -> None:
    assert inert(text) == shown
    assert written(shown) == text


@pytest.mark.parametrize("piece", ["<", "`", "` ", "<b`", "\\(", "\\(a\\", "$$<", f"\n{T}\n<"])
def test_any_text_is_read_in_a_moment(piece: str) -> None:
    text = "<a" + piece * (20_000 // len(piece))
    started = time.monotonic()
    assert written(inert(text)) == text
    assert time.monotonic() - started < 1.0
