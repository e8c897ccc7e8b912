"""From token ids to text as they arrive: whole characters only, and stop strings cut off."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

from infer.token_bytes import TextStart
from infer.tokenizer import Tokenizer
from infer.types import FinishReason, SamplingParams


class IncrementalDetokenizer:
    """Text of a growing list of ids. The pieces together equal ``Tokenizer.decode`` of the list.

    A piece never ends inside a character: bytes that may begin one wait for the rest of it.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._table = tokenizer.byte_table
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._start = TextStart(self._table.leading_spaces)
        self._utf8 = _utf8_decoder()

    def push(self, ids: Iterable[int]) -> str:
        """The text that ``ids`` complete."""
        pieces = []
        for token_id in ids:
            if token_id not in self._skip:
                data = self._table[token_id]
                pieces.append(data[self._start.num_dropped(data) :])
        return self._utf8.decode(b"".join(pieces))

    def flush(self) -> str:
        """The end of the text: U+FFFD when it ends inside a character."""
        return self._utf8.decode(b"", final=True)


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Which stop string was completed, and how many bytes of the scanned data follow it."""

    index: int
    num_after: int


def stop_scan(tail: bytes, new: bytes, stops: Sequence[bytes]) -> tuple[StopMatch | None, bytes]:
    """Look for the first stop string that is completed in ``new``.

    Args:
        tail: what the last call returned for this text, at first ``b""``.
        new: the next bytes of the text.
        stops: non-empty strings.

    Returns:
        The match that ends first (of those that end together, the longest), and the new tail: the
        longest end of the text that begins a stop string without being one. That is all that later
        calls need, and all that must be held back from a reader.
    """
    data = tail + new
    best: tuple[int, int, int] | None = None
    for index, stop in enumerate(stops):
        start = data.find(stop, max(0, len(tail) - len(stop) + 1))
        if start >= 0:
            found = (start + len(stop), start, index)
            best = found if best is None else min(best, found)
    match = None if best is None else StopMatch(best[2], len(data) - best[0])
    length = max((_overlap(data, stop) for stop in stops), default=0)
    return match, data[len(data) - length :]


class TextStream:
    """One continuation's text while its tokens arrive, without what a reader must not see.

    Text that may begin a stop string, and tokens that may end the continuation, wait until the next
    token shows what they are. Stop strings are found by the engine's own rules (``stop_scan`` over
    ``Tokenizer.token_bytes``, not before ``min_tokens`` tokens): both agree on where a text ends.

    ``follows_text`` keeps a space that the first token begins with: right for a continuation that
    is appended to its prompt, and not what ``Tokenizer.decode`` does.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, *, follows_text: bool = False
    ) -> None:
        self._table = tokenizer.byte_table
        self._hidden_ids = tokenizer.special_ids if params.skip_special_tokens else frozenset[int]()
        self._may_end = tokenizer.special_ids.union(tokenizer.eos_token_ids, params.stop_token_ids)
        self._stops = tuple(stop.encode("utf-8", "surrogatepass") for stop in params.stop)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._start = TextStart(0 if follows_text else self._table.leading_spaces)
        self._utf8 = _utf8_decoder()
        self._count = 0
        self._held_token: int | None = None
        self._tail = b""
        self._shown = b""  # for every byte of the tail, whether the text shows it
        self._stopped = False

    def push(self, ids: Iterable[int]) -> str:
        """The text that ``ids`` let a reader see."""
        pieces = []
        for token_id in ids:
            pieces.append(self._release())
            self._count += 1
            if token_id in self._may_end:
                self._held_token = token_id
            else:
                pieces.append(self._append(token_id))
        return self._utf8.decode(b"".join(pieces))

    def finish(self, reason: FinishReason, stop: str | int | None = None) -> str:
        """The last text. A final EOS or stop token belongs to it only if stops are included."""
        token_id, self._held_token = self._held_token, None
        by_token = reason is FinishReason.STOP and not isinstance(stop, str)
        pieces = []
        if token_id is not None and not by_token:
            pieces.append(self._append(token_id))
        if not self._stopped:
            self._stopped = True
            pieces.append(bytes(compress(self._tail, self._shown)))
            if token_id is not None and by_token and self._include_stop:
                # This token ended the text, even if it also completes a stop string.
                data = self._table[token_id]
                pieces.append(data[self._num_hidden(token_id, data) :])
        return self._utf8.decode(b"".join(pieces), final=True)

    def _release(self) -> bytes:
        token_id, self._held_token = self._held_token, None
        return b"" if token_id is None else self._append(token_id)

    def _num_hidden(self, token_id: int, data: bytes) -> int:
        """How many bytes at the start of a token's ``data`` the text does not show."""
        return len(data) if token_id in self._hidden_ids else self._start.num_dropped(data)

    def _append(self, token_id: int) -> bytes:
        """Take a token; returns the bytes that are certain to be part of the text."""
        if self._stopped:
            return b""
        data = self._table[token_id]
        dropped = self._num_hidden(token_id, data)
        if not self._stops:
            return data[dropped:]
        match, tail = stop_scan(self._tail, data, self._stops)
        text = self._tail + data
        shown = self._shown + bytes(dropped) + b"\1" * (len(data) - dropped)
        end = len(text) - len(tail)
        if match is not None and self._count > self._min_tokens:
            self._stopped = True
            end = len(text) - match.num_after
            if not self._include_stop:
                end -= len(self._stops[match.index])
        self._tail, self._shown = text[end:], shown[end:]
        return bytes(compress(text[:end], shown[:end]))


def _overlap(data: bytes, stop: bytes) -> int:
    """Length of the longest end of ``data`` that is a beginning of ``stop``, but not all of it."""
    position = max(0, len(data) - len(stop) + 1)
    while (position := data.find(stop[:1], position)) >= 0:
        if stop.startswith(data[position:]):
            return len(data) - position
        position += 1
    return 0


def _utf8_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")
