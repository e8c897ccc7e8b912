"""A conversation whose last message is left open, for the model to go on with.

Note [continued message]: the text to go on with gets an end: a private character that occurs
nowhere else, and a blank behind it. The prompt is what the template renders before that character.
Where a blank is still behind it, the template keeps the blanks of a text, and the text stays as
it is. Where it is gone, the template trims texts, and the blanks at this one's end go too. Nothing
comes behind the text but what the model writes, so a control token's spelling that is cut off there
is ordinary text (Note [forged control tokens]).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from infer.errors import RequestError

Field = Literal["content", "reasoning_content"]
PARAM = "continue_final_message"


def continued_field(
    continue_final_message: bool | str, add_generation_prompt: bool
) -> Field | None:
    """The field of the last message that the model goes on with, if any; True means its content.

    Raises:
        RequestError: a field that nobody goes on with, or a new turn is asked for as well.
    """
    if not continue_final_message:
        return None
    if add_generation_prompt:
        raise RequestError(
            "continue_final_message goes on with the last message and add_generation_prompt begins "
            "a new one; both cannot be true, so set one of them to false",
            param=PARAM,
        )
    if continue_final_message is True or continue_final_message == "content":
        return "content"
    if continue_final_message == "reasoning_content":
        return "reasoning_content"
    raise RequestError(
        f"continue_final_message is {str(continue_final_message)[:50]!r}; "
        "it must be true, false, 'content' or 'reasoning_content'",
        param=PARAM,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnd:
    """The end of a continued text; see Note [continued message]."""

    field: Field
    text: str
    mark: str  # the private character

    @classmethod
    def of(cls, message: Mapping[str, Any], field: Field, mark: str) -> OpenEnd:
        """The end of a plain ``message``'s ``field``.

        Raises:
            RequestError: there is no text to go on with, or something comes after it.
        """
        text = message.get(field)
        if not isinstance(text, str):
            raise RequestError(
                f"{PARAM} needs text in the {field} of the last message, which has none",
                param=PARAM,
            )
        for later in ("tool_calls",) if field == "content" else ("content", "tool_calls"):
            if message.get(later):
                raise RequestError(
                    f"the {later} of the last message would be lost, because they come after its "
                    f"{field}; leave them out to continue the {field}",
                    param=PARAM,
                )
        return cls(field=field, text=text, mark=mark)

    def put(self, message: dict[str, Any]) -> None:
        """Put the end into ``message``, a marked copy of the plain one."""
        message[self.field] += f"{self.mark} "

    def cut(self, text: str, marks: Sequence[int]) -> tuple[str, list[int]]:
        """The rendered ``text`` and its ``marks`` up to the end.

        Raises:
            RequestError: the template does not show the continued text as it is.
        """
        position = text.rfind(self.mark)
        shown = text[: max(position, 0)]
        if not text.startswith(f"{self.mark} ", position):
            shown = shown.rstrip()
        if position < 0 or not shown.rstrip().endswith(self.text.strip()):
            raise RequestError(
                f"this model's chat template leaves out or changes the {self.field} of the last "
                f"message, so that it cannot be continued; set {PARAM} to false",
                param=PARAM,
            )
        return shown, [mark for mark in marks if mark < len(shown)]
