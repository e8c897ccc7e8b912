"""What bytes each token id adds to a text: a table made once from a tokenizer's decoder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from tokenizers import Tokenizer as Backend

from infer.errors import CheckpointError

_SPACE_MARK = "\u2581"  # sentencepiece writes spaces like this
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class ByteTable(Sequence[bytes]):
    """Bytes of every id, and what a text loses at its start.

    Any id may be looked up; one the tokenizer does not know has no bytes.
    """

    tokens: tuple[bytes, ...]
    # Spaces dropped at the start of a text; None: all that its first token begins with.
    leading_spaces: int | None

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.tokens)

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[bytes, ...]: ...

    def __getitem__(self, index: int | slice) -> bytes | tuple[bytes, ...]:
        if isinstance(index, slice):
            return self.tokens[index]
        return self.tokens[index] if 0 <= index < len(self.tokens) else b""

    def join(self, ids: Iterable[int]) -> bytes:
        """Bytes of a whole text."""
        start = TextStart(self.leading_spaces)
        pieces = (self[token_id] for token_id in ids)
        return b"".join(data[start.num_dropped(data) :] for data in pieces)


class TextStart:
    """Counts the spaces that the first tokens of a text lose."""

    __slots__ = ("_spaces", "_whole_token")

    def __init__(self, leading_spaces: int | None) -> None:
        self._spaces = 0 if leading_spaces is None else leading_spaces
        self._whole_token = leading_spaces is None

    def num_dropped(self, data: bytes) -> int:
        """How many bytes the next token loses at its start."""
        if not data or not (self._spaces or self._whole_token):
            return 0
        spaces = len(data) - len(data.lstrip(b" "))
        if self._whole_token:
            self._whole_token = False
            return spaces
        dropped = min(spaces, self._spaces)
        self._spaces = self._spaces - dropped if spaces == len(data) else 0
        return dropped


def byte_table(backend: Backend) -> ByteTable:
    """The table of a tokenizer, by the rules of its decoder.

    Raises:
        CheckpointError: the decoder joins tokens in a way that has no bytes per token.
    """
    steps = _decoder_steps(backend)
    kinds = [step["type"] for step in steps]
    to_bytes = _byte_level() if "ByteLevel" in kinds else _pieces(steps)
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = [b""] * (1 + max(vocab.values(), default=-1))
    for token, token_id in vocab.items():
        tokens[token_id] = to_bytes(token)
    leading: int | None = 0
    for step in steps:
        if step["type"] == "Strip":
            leading = int(step["start"])
        elif step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            leading = None
        elif step["type"] == "Spaces":
            leading = 1
    return ByteTable(tuple(tokens), leading)


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    """The decoder as a list of known steps."""
    if backend.decoder is None:
        return [{"type": "Spaces"}]  # tokens are words
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    for step in steps:
        kind = step["type"]
        ok = kind in ("ByteLevel", "ByteFallback", "Fuse", "Metaspace")
        ok = ok or (kind == "Replace" and "String" in step["pattern"])
        ok = ok or (kind == "Strip" and step["content"] == " " and step["stop"] == 0)
        if not ok:
            raise CheckpointError(
                f"the tokenizer's decoder has a step {step!r}, which has no bytes per token; "
                "the decoders of byte-level and sentencepiece tokenizers are supported"
            )
    return list(steps)


def _byte_level() -> Callable[[str], bytes]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others follow U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in plain]
    # A character outside the alphabet must fail to encode: then the token is its own text.
    table = dict.fromkeys(others, "\uffff")
    table |= {0x100 + index: chr(byte) for index, byte in enumerate(others)}

    def to_bytes(token: str) -> bytes:
        try:
            return token.translate(table).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode("utf-8", "replace")

    return to_bytes


def _pieces(steps: list[dict[str, Any]]) -> Callable[[str], bytes]:
    """Sentencepiece words, or words joined by spaces."""
    replacements: list[tuple[str, str]] = []
    for step in steps:
        if step["type"] == "Metaspace":
            replacements.append((step.get("replacement", _SPACE_MARK), " "))
        elif step["type"] == "Replace":
            replacements.append((step["pattern"]["String"], step["content"]))
    prefix = b" " if any(step["type"] == "Spaces" for step in steps) else b""
    has_bytes = any(step["type"] == "ByteFallback" for step in steps)

    def to_bytes(token: str) -> bytes:
        if has_bytes and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes((int(match[1], 16),))
        for old, new in replacements:
            token = token.replace(old, new)
        return prefix + token.encode("utf-8", "replace")

    return to_bytes
