"""Chat templates in Jinja's sandbox, and marks that tell a user's text from the template's own.

Note [forged control tokens]: a template joins its own control tokens (``<|im_start|>``) with text
that users wrote, and a tokenizer finds control tokens by their spelling, whoever wrote them. So a
mark (one private character that occurs nowhere in the input) is put before every place where a
user's string spells a control token, or begins or ends with a part of one. The template carries
the marks along; after rendering, a spelling with a mark at its start or inside it is the user's,
and is encoded as ordinary text. Marks go *before* a spelling, so that a template's own tests
(``'</think>' in content``) still see it.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Never

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from infer.errors import CheckpointError, RequestError

ROLES = frozenset(
    ("system", "developer", "user", "assistant", "tool", "function", "ipython", "model")
)
UNTRUSTED_ROLES = frozenset(("tool", "function", "ipython"))  # they quote third parties
_SAME_ROLE = {"developer": "system", "function": "tool"}
Message = Mapping[str, Any]
_ESCAPED = re.compile("[^\x00-\x7f\ue000-\uf8ff]")
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "chat_template")


class _GenerationTag(Extension):
    """``{% generation %}`` marks assistant text for training; here its body is plain output."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise_exception(message: str) -> Never:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if ensure_ascii:  # but marks must stay what they are
        text = _ESCAPED.sub(lambda match: json.dumps(match[0])[1:-1], text)
    return text


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template for the sandbox, with the helpers that transformers gives it.

    Raises:
        CheckpointError: the template is not valid Jinja.
    """
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    try:
        return env.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(
            f"the chat template is not valid Jinja (line {error.lineno}: {error.message}); "
            "repair chat_template in tokenizer_config.json or chat_template.jinja"
        ) from error


def render(
    template: jinja2.Template,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """Render a conversation that ``plain_messages`` checked.

    Raises:
        RequestError: the template refused the conversation, or failed on it.
    """
    try:
        return template.render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
    except Exception as error:
        # Templates are programs of strangers: whatever one raises concerns this request alone.
        raise RequestError(
            f"the chat template refuses this conversation: {str(error) or type(error).__name__}; "
            "change the messages or send a plain prompt",
            param="messages",
        ) from error


def plain_messages(messages: Sequence[Message], source: str) -> list[dict[str, Any]]:
    """Copy messages into plain JSON values, the only kind a template may see, for one template.

    Absent fields (None) are left out and text parts are joined by newlines. Newer spellings of a
    role become the older one that the template's ``source`` knows, and tool-call arguments that are
    JSON text become objects, unless it takes the text itself.

    Raises:
        RequestError: no message, an unknown role, or content that is not text.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            "messages must be a list of at least one message with a role and content",
            param="messages",
        )
    result = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{where} is a {type(message).__name__}, not an object", param=where)
        plain = {
            key: value for key, value in plain_json(message, where).items() if value is not None
        }
        role = plain.get("role")
        if role not in ROLES:
            raise RequestError(
                f"{where}.role is {role!r}; the roles are {', '.join(sorted(ROLES))}", param=where
            )
        if isinstance(plain.get("content"), list):
            plain["content"] = "\n".join(_text_part(part, where) for part in plain["content"])
        elif not isinstance(plain.get("content", ""), str):
            raise RequestError(f"{where}.content must be text or a list of text parts", param=where)
        other = _SAME_ROLE.get(role)
        if other is not None and f"'{role}'" not in source and f'"{role}"' not in source:
            plain["role"] = other  # a template that does not know a role may drop it in silence
        if "arguments is string" not in source:
            _parse_arguments(plain)
        result.append(plain)
    return result


def plain_json(value: Any, where: str) -> Any:
    """Rebuild ``value`` out of dict, list, str, numbers, bool and None.

    Raises:
        RequestError: it holds something else, or is nested too deeply.
    """
    try:
        return _plain(value, where)
    except RecursionError:
        raise RequestError(f"{where} is nested too deeply; flatten it", param=where) from None


def check_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Template variables of a request as plain JSON.

    Raises:
        RequestError: a name that the renderer sets itself.
    """
    for name in _RESERVED:
        if name in variables:
            raise RequestError(
                f"{name!r} cannot be set as a template variable; it is not the caller's to choose",
                param="chat_template_kwargs",
            )
    return {name: plain_json(value, name) for name, value in variables.items()}


@dataclass(frozen=True, slots=True)
class Marker:
    """Puts a mark into strings where they spell tokens or parts of them; see the module note."""

    pattern: re.Pattern[str] | None

    @classmethod
    def build(cls, tokens: Sequence[str]) -> Marker:
        """A marker for these spellings."""
        if not tokens:
            return cls(None)
        heads = {token[:n] for token in tokens for n in range(1, len(token))}
        tails = {token[n:] for token in tokens for n in range(1, len(token))}
        pattern = rf"(?=(?:{any_of(tokens)}))" + (
            rf"|(?=(?:{any_of(heads)})\Z)|\A(?={any_of(tails)})" if heads else ""
        )
        return cls(re.compile(pattern))

    def text(self, text: str, mark: str) -> str:
        """``text`` with its marks."""
        return text if self.pattern is None else self.pattern.sub(mark, text)

    def value(self, value: Any, mark: str) -> Any:
        """A plain JSON value with marks in every string, keys included."""
        if isinstance(value, str):
            return self.text(value, mark)
        if isinstance(value, dict):
            return {
                self.text(key, mark): item if key == "role" else self.value(item, mark)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self.value(item, mark) for item in value]
        return value


def genuine_spellings(
    pattern: re.Pattern[str], text: str, marks: Sequence[int]
) -> tuple[list[re.Match[str]], bool]:
    """Where the template itself spelled a token, and whether anybody else did.

    ``marks`` are the offsets in ``text`` that carried a mark, in ascending order.
    """
    genuine, forged, position = [], False, 0
    while match := pattern.search(text, position):
        after = bisect_left(marks, match.start())
        if after < len(marks) and marks[after] < match.end():
            forged = True
            position = match.start() + 1  # a genuine one may begin inside
        else:
            genuine.append(match)
            position = match.end()
    return genuine, forged


def unused_character(*values: Any) -> str:
    """A private-use character that no string in these plain JSON values contains."""
    used: set[str] = set()
    for value in values:
        _collect_private(value, used)
    return next(chr(c) for c in range(0xE000, 0xF8FF) if chr(c) not in used)


def split_marks(marked: str, mark: str) -> tuple[str, list[int]]:
    """The text without its marks, and the offsets in it that carried one, in order."""
    pieces = marked.split(mark)
    offsets, position = [], 0
    for piece in pieces[:-1]:
        position += len(piece)
        offsets.append(position)
    return "".join(pieces), offsets


def any_of(tokens: Sequence[str] | set[str]) -> str:
    # Longest first, as tokenizers match.
    return "|".join(re.escape(token) for token in sorted(tokens, key=lambda t: (-len(t), t)))


def _collect_private(value: Any, used: set[str]) -> None:
    if isinstance(value, str):
        if not value.isascii():
            used.update(c for c in value if "\ue000" <= c <= "\uf8ff")
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect_private(key, used)
            _collect_private(item, used)
    elif isinstance(value, list):
        for item in value:
            _collect_private(item, used)


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    raise RequestError(
        f"{where} holds a {type(value).__name__}; only JSON values reach a chat template",
        param=where,
    )


def _text_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise RequestError(
        f"{where}.content holds a part of type {kind!r}; this engine reads text only", param=where
    )


def _parse_arguments(message: dict[str, Any]) -> None:
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
            continue
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            continue  # the template gets the text and decides
        if isinstance(arguments, dict):
            function["arguments"] = arguments
