"""Tokenizer of a checkpoint: text to ids, ids to bytes, conversations to ids.

Built on the ``tokenizers`` package alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from infer import chat_template as chat
from infer.continued import OpenEnd, continued_field
from infer.errors import CheckpointError, RequestError
from infer.jsonfile import read_json
from infer.token_bytes import ByteTable, byte_table
from infer.tokenizer_files import read_backend, read_chat_templates
from infer.tokenizer_twin import Twin, encode

_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokenizer:
    """Immutable; safe to share between threads. Derived tables are made on first use."""

    backend: Backend
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # "bos_token" -> "<s>", ...
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    special_ids: frozenset[int] = frozenset()  # control tokens: no text of their own
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # "default", "tool_use", ...

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer | None:
        """Read the tokenizer of a checkpoint folder; None when the folder brings none.

        Raises:
            CheckpointError: its files are damaged or of a kind this package does not read.
        """
        folder = Path(path)
        backend = read_backend(folder)
        if backend is None:
            return None
        config = {
            **read_json(folder / "special_tokens_map.json", missing_ok=True),
            **read_json(folder / "tokenizer_config.json", missing_ok=True),
        }
        generation = read_json(folder / "generation_config.json", missing_ok=True)
        eos = generation.get("eos_token_id")
        return cls.build(
            backend,
            config,
            eos_token_ids=[eos] if isinstance(eos, int) else eos or (),
            chat_templates=read_chat_templates(folder, config),
        )

    @classmethod
    def build(
        cls,
        backend: Backend,
        config: Mapping[str, Any],
        *,
        eos_token_ids: Iterable[int] = (),
        chat_templates: Mapping[str, str] | None = None,
    ) -> Tokenizer:
        """A tokenizer from its backend and the content of ``tokenizer_config.json``.

        Raises:
            CheckpointError: the two contradict each other.
        """
        backend.no_truncation()
        backend.no_padding()
        _add_missing(backend, config)
        named = {name: text for name in _NAMED if (text := _content(config.get(name))) is not None}
        extra = [
            text
            for key in ("additional_special_tokens", "extra_special_tokens")
            for value in _values(config.get(key))
            if (text := _content(value)) is not None
        ]
        # A named token is a control token even where the vocabulary does not say so.
        added = backend.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        missing = [text for text in dict.fromkeys([*named.values(), *extra]) if text not in special]
        backend.add_special_tokens([_special(text) for text in missing])
        ids = {
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        own_eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
        eos = dict.fromkeys([*([] if own_eos is None else [own_eos]), *eos_token_ids])
        bos = backend.token_to_id(named["bos_token"]) if "bos_token" in named else None
        return cls(
            backend=backend,
            special_tokens=named,
            eos_token_ids=tuple(eos),
            bos_token_id=bos,
            special_ids=frozenset(ids),
            chat_templates=dict(chat_templates or {}),
        )

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id; a model may have padded rows beyond it."""
        return len(self.token_bytes)

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """Bytes each id adds to the text; a control token's own spelling for control tokens.

        Ids without a token have none, nor have those beyond ``vocab_size``: models pad their
        vocabulary. A sentencepiece word keeps the space before it; ``decode``
        drops it at the start of a text where the tokenizer says so.
        """
        return self.byte_table

    @cached_property
    def byte_table(self) -> ByteTable:
        """``token_bytes`` and how a text begins."""
        return byte_table(self.backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``. Control tokens spelled in it become control tokens.

        ``add_special_tokens`` adds what the checkpoint puts around a text, such as a BOS token.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        return encode(self.backend, text, add_special_tokens)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD, unknown ids nothing."""
        skip = self.special_ids if skip_special_tokens else frozenset[int]()
        return self.byte_table.join(i for i in ids if i not in skip).decode("utf-8", "replace")

    @property
    def chat_template(self) -> str | None:
        """Source of the default chat template, None when the checkpoint brings none."""
        return self.chat_templates.get("default")

    def apply_chat_template(
        self,
        messages: Sequence[chat.Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as the model's text. ``variables`` reach the template by name.

        It ends where an answer begins (``add_generation_prompt``), or with the last message's text
        (``continue_final_message``: true for its content, or a field's name), or with the last
        message and what closes it. For display; to generate, use ``encode_chat``, which knows who
        wrote what.

        Raises:
            RequestError: no template, one that shows no tools, a message that is not text, the
                template refuses, or the last message cannot be continued.
        """
        ending = (add_generation_prompt, continue_final_message)
        return self._render(messages, ending, tools, variables)[0]

    def encode_chat(
        self,
        messages: Sequence[chat.Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Ids of the conversation. Only the template writes control tokens, never a message.

        A control token spelled in a message, a tool or a variable is encoded as ordinary text.
        Added tokens that are not control tokens (``<think>``) may be spelled by all messages but
        tool results.

        Raises:
            RequestError: as ``apply_chat_template``, or the tokenizer itself makes a control token
                out of ordinary text.
        """
        ending = (add_generation_prompt, continue_final_message)
        text, marks = self._render(messages, ending, tools, variables)
        genuine, forged = chat.genuine_spellings(self._added_pattern, text, marks)
        if forged:
            ids = self._twin.encode(text, genuine)
        else:
            ids = encode(self.backend, text, add_special_tokens=False)
        self._check_controls(ids, [match.group() for match in genuine])
        return ids

    def _render(
        self,
        messages: Sequence[chat.Message],
        ending: tuple[bool, bool | str],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> tuple[str, list[int]]:
        """The text, and the offsets in it that carried a mark."""
        add_generation_prompt, continue_final_message = ending
        field = continued_field(continue_final_message, add_generation_prompt)
        name = "tool_use" if tools and "tool_use" in self.chat_templates else "default"
        template = self._compiled.get(name)
        if template is None:
            raise RequestError(
                "this model has no chat template; send a plain prompt, or use an instruct model",
                param="messages",
            )
        source = self.chat_templates[name]
        if tools and "tools" not in source:
            raise RequestError(
                "this model's chat template shows the model no tools; leave tools out, or use a "
                "model that was trained to call them",
                param="tools",
            )
        plain = chat.plain_messages(messages, source)
        plain_tools = chat.plain_json(tools, "tools") if tools else None
        plain_variables = chat.check_variables(variables)
        mark = chat.unused_character(source, plain, plain_tools, plain_variables)
        control, every = self._markers
        marked = [
            (every if message["role"] in chat.UNTRUSTED_ROLES else control).value(message, mark)
            for message in plain
        ]
        open_end = None
        if field is not None:
            other = chat.unused_character(source, plain, plain_tools, plain_variables, mark)
            open_end = OpenEnd.of(plain[-1], field, other)
            open_end.put(marked[-1])
        rendered = chat.render(
            template,
            marked,
            tools=control.value(plain_tools, mark),
            add_generation_prompt=add_generation_prompt,
            variables={**self.special_tokens, **control.value(plain_variables, mark)},
        )
        text, marks = chat.split_marks(rendered, mark)
        return (text, marks) if open_end is None else open_end.cut(text, marks)

    def _check_controls(self, ids: Sequence[int], genuine: Sequence[str]) -> None:
        # Normalizers and unigram models can make a control token out of ordinary text.
        expected = Counter(map(self.backend.token_to_id, genuine))
        for token_id, count in Counter(i for i in ids if i in self.special_ids).items():
            if count > expected[token_id] and token_id != self._unknown_id:
                raise RequestError(
                    f"a message contains text that this tokenizer reads as the control token "
                    f"{self.backend.id_to_token(token_id)!r}; remove it",
                    param="messages",
                )

    @cached_property
    def _compiled(self) -> dict[str, jinja2.Template]:
        return {name: chat.compile_template(source) for name, source in self.chat_templates.items()}

    @cached_property
    def _unknown_id(self) -> int | None:
        unknown = self.special_tokens.get("unk_token")
        return None if unknown is None else self.backend.token_to_id(unknown)

    @cached_property
    def _added_tokens(self) -> tuple[str, ...]:
        # Some vocabularies add runs of spaces or newlines; those are text like any other.
        tokens = (token.content for token in self.backend.get_added_tokens_decoder().values())
        return tuple(token for token in tokens if token and not token.isspace())

    @cached_property
    def _markers(self) -> tuple[chat.Marker, chat.Marker]:
        """For control tokens, and for all added tokens."""
        every = self._added_tokens
        control = [t for t in every if self.backend.token_to_id(t) in self.special_ids]
        return chat.Marker.build(control), chat.Marker.build(every)

    @cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        return re.compile(chat.any_of(self._added_tokens) or "(?!)")

    @cached_property
    def _twin(self) -> Twin:
        return Twin.build(self.backend)


def _add_missing(backend: Backend, config: Mapping[str, Any]) -> None:
    """Add what ``added_tokens_decoder`` lists and the vocabulary lacks, at the stated ids."""
    known = backend.get_added_tokens_decoder()
    stated = {int(key): value for key, value in (config.get("added_tokens_decoder") or {}).items()}
    for token_id, value in sorted(stated.items()):
        token = AddedToken(
            value["content"],
            single_word=bool(value.get("single_word")),
            lstrip=bool(value.get("lstrip")),
            rstrip=bool(value.get("rstrip")),
            normalized=bool(value.get("normalized")),
            special=bool(value.get("special")),
        )
        if token_id in known and (known[token_id].special or not token.special):
            continue
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(token.content) != token_id:
            raise CheckpointError(
                f"tokenizer_config.json gives token {token.content!r} the id {token_id}, "
                f"tokenizer.json gives it {backend.token_to_id(token.content)}; "
                "the two files are of different checkpoints"
            )


def _special(text: str) -> AddedToken:
    return AddedToken(text, special=True, normalized=False)


def _content(value: Any) -> str | None:
    """A token's text, stated as such or as an object."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _values(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value or ()
