"""Log-probabilities as OpenAI's two routes and vLLM's ``prompt_logprobs`` show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from infer.tokenizer import Tokenizer
from infer.types import Logprob, PromptLogprobsEvent, TokenEvent

FLOOR = -9999.0  # JSON has no -Infinity

Entry = tuple[Logprob, tuple[Logprob, ...]]


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """One token as text. A token that is not UTF-8 by itself is spelled ``bytes:\\xNN...``.

    So different tokens stay different as keys of one object.
    """
    data = token_bytes(tokenizer, token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """One token's bytes; none for a padded row of the vocabulary."""
    table = tokenizer.token_bytes
    return table[token_id] if 0 <= token_id < len(table) else b""


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[TokenEvent]) -> dict[str, Any]:
    """``logprobs`` of a chat choice."""

    def entry(logprob: Logprob) -> dict[str, Any]:
        return {
            "token": token_text(tokenizer, logprob.token_id),
            "logprob": max(logprob.logprob, FLOOR),
            "bytes": list(token_bytes(tokenizer, logprob.token_id)),
        }

    return {
        "content": [
            {
                **entry(token.logprob),
                "top_logprobs": [entry(top) for top in token.top_logprobs],
            }
            for token in tokens
            if token.logprob is not None
        ],
        "refusal": None,
    }


class LegacyLogprobs:
    """``logprobs`` of ``/v1/completions``: four parallel lists, offsets into the whole text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def prompt(self, ids: Sequence[int], event: PromptLogprobsEvent, top_n: int) -> dict[str, Any]:
        """The lists for an echoed prompt; its first token has no probability."""
        entries: list[Entry | None] = [None, *event.logprobs]
        return self._lists(list(zip(ids, entries, strict=True)), top_n)

    def tokens(self, tokens: Iterable[TokenEvent], top_n: int) -> dict[str, Any]:
        """The lists for the next generated tokens."""
        entries = [
            (t.token_id, None if t.logprob is None else (t.logprob, t.top_logprobs)) for t in tokens
        ]
        return self._lists(entries, top_n)

    def _lists(self, entries: list[tuple[int, Entry | None]], top_n: int) -> dict[str, Any]:
        texts, offsets = [], []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for token_id, entry in entries:
            text = token_text(self._tokenizer, token_id)
            texts.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
            if entry is None:
                logprobs.append(None)
                tops.append(None)
                continue
            own, best = entry
            logprobs.append(max(own.logprob, FLOOR))
            top = {
                token_text(self._tokenizer, b.token_id): max(b.logprob, FLOOR)
                for b in reversed(best[:top_n])  # on equal spellings, the better one stays
            }
            # The token itself is always among them, as in OpenAI's answers.
            tops.append(dict(reversed(top.items())) | {text: max(own.logprob, FLOOR)})
        return {
            "text_offset": offsets,
            "token_logprobs": logprobs,
            "tokens": texts,
            "top_logprobs": tops,
        }


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several ``LegacyLogprobs`` results one after another."""
    whole: dict[str, Any] = {}
    for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs"):
        whole[name] = [item for part in parts for item in part[name]]
    return whole


def prompt_logprobs(
    tokenizer: Tokenizer, event: PromptLogprobsEvent
) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: one object a position, keyed by token id, None for the first."""

    def entry(logprob: Logprob) -> dict[str, Any]:
        return {
            "logprob": max(logprob.logprob, FLOOR),
            "rank": logprob.rank,
            "decoded_token": token_text(tokenizer, logprob.token_id),
        }

    rows: list[dict[str, Any] | None] = [None]
    for own, best in event.logprobs:
        rows.append({str(logprob.token_id): entry(logprob) for logprob in (*best, own)})
    return rows
