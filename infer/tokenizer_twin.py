"""A tokenizer under whose eyes no text of a user's is a control token."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from infer.errors import RequestError


@dataclass(frozen=True, slots=True)
class Twin:
    """The same tokenizer, except that its added tokens have secret names.

    Text that spells an added token is ordinary text to it, and all else (normalizing, word
    boundaries, what an added token strips around itself) works as in the original.
    """

    backend: Backend
    names: Mapping[str, str]  # content of an added token -> its secret name
    ids: Mapping[int, int]  # id of an added token here -> its id in the original

    @classmethod
    def build(cls, original: Backend) -> Twin:
        """The twin of ``original``, under names that nobody can guess."""
        state = json.loads(original.to_str())
        backend = Backend.from_str(json.dumps({**state, "added_tokens": []}))
        nonce = secrets.token_hex(16)
        names: dict[str, str] = {}
        ids: dict[int, int] = {}
        for token_id, token in sorted(original.get_added_tokens_decoder().items()):
            secret = not token.content.isspace()
            name = f"\ue000{nonce}:{token_id}\ue001" if secret else token.content
            renamed = AddedToken(
                name,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized and not secret,
            )
            backend.add_tokens([renamed])
            names[token.content] = name
            twin_id = backend.token_to_id(name)
            assert twin_id is not None, "it was just added"
            ids[twin_id] = token_id
        return cls(backend, names, ids)

    def encode(self, text: str, genuine: Sequence[re.Match[str]]) -> list[int]:
        """Ids of ``text``, where only the ``genuine`` matches are added tokens."""
        pieces, position = [], 0
        for match in genuine:
            pieces += [text[position : match.start()], self.names[match.group()]]
            position = match.end()
        renamed = "".join([*pieces, text[position:]])
        return [self.ids.get(i, i) for i in encode(self.backend, renamed, False)]


def encode(backend: Backend, text: str, add_special_tokens: bool) -> list[int]:
    """Ids of ``text``.

    Raises:
        RequestError: it is no text.
    """
    try:
        return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)
    except (TypeError, UnicodeEncodeError) as error:
        raise RequestError(
            "the text is not valid Unicode (it holds half of a surrogate pair); repair it",
            param="prompt",
        ) from error
