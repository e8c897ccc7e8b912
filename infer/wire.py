"""What crosses between a server and an engine process: length-prefixed msgpack, nothing executable.

A frame is four bytes, the payload's length (little endian), and the payload.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from infer import errors
from infer.engineloop import Abort, Command, Output, Refusal, Stop, Submit
from infer.errors import EngineError, InferError, RequestError
from infer.types import (
    EngineInfo,
    FinishEvent,
    PromptLogprobsEvent,
    Request,
    StepStats,
    TokenEvent,
)

PREFIX = 4
MAX_FRAME = 1 << 30


class Start(msgspec.Struct, tag="start", array_like=True, frozen=True):
    """The first message: make the engine with ``module:function(options)``."""

    builder: str
    options: dict[str, Any]


class SubmitMessage(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    """``Submit``."""

    request: Request


class AbortMessage(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """``Abort``."""

    request_id: str


class StopMessage(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    """``Stop``."""


class LookMessage(msgspec.Struct, tag="look", array_like=True, frozen=True):
    """Tell the last steps. The answer, ``SeenMessage``, carries the same number."""

    number: int
    step: int | None


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The engine is made."""

    info: EngineInfo


class ErrorMessage(msgspec.Struct, array_like=True, frozen=True):
    """A typed error by its name."""

    name: str
    message: str
    param: str | None

    @classmethod
    def of(cls, error: BaseException) -> ErrorMessage:
        """``error`` for the wire; one that is not ours keeps its name in the message."""
        if isinstance(error, InferError):
            return cls(type(error).__name__, str(error), getattr(error, "param", None))
        return cls("EngineError", f"{type(error).__name__}: {error}", None)

    def error(self) -> InferError:
        """The error again."""
        kind = getattr(errors, self.name, EngineError)
        if not (isinstance(kind, type) and issubclass(kind, InferError)):
            kind = EngineError
        if issubclass(kind, RequestError):
            return kind(self.message, param=self.param)
        return kind(self.message)


class RefusalMessage(msgspec.Struct, array_like=True, frozen=True):
    """``Refusal``."""

    request_id: str
    error: ErrorMessage


class OutputMessage(msgspec.Struct, tag="output", array_like=True, frozen=True):
    """``Output``; its events sorted by kind, which keeps the order that matters in a request."""

    prompts: list[PromptLogprobsEvent]
    tokens: list[TokenEvent]
    finishes: list[FinishEvent]
    stats: StepStats | None
    refusals: list[RefusalMessage]


class SeenMessage(msgspec.Struct, tag="seen", array_like=True, frozen=True):
    """The last steps as JSON; None when nobody watches them."""

    number: int
    text: str | None


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The engine could not be made, or died."""

    error: ErrorMessage


class Ended(msgspec.Struct, tag="ended", array_like=True, frozen=True):
    """The loop ended as asked."""


ToEngine = Start | SubmitMessage | AbortMessage | StopMessage | LookMessage
FromEngine = Ready | OutputMessage | SeenMessage | Failed | Ended


def frame(message: ToEngine | FromEngine) -> bytes:
    """A message as a frame."""
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(PREFIX, "little") + payload


class Frames:
    """Cuts a byte stream into payloads."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add bytes; gives the payloads that are now complete.

        Raises:
            EngineError: a frame beyond ``MAX_FRAME``: the stream is not one of ours.
        """
        self._buffer += data
        begin = 0
        while len(self._buffer) - begin >= PREFIX:
            size = int.from_bytes(self._buffer[begin : begin + PREFIX], "little")
            if size > MAX_FRAME:
                raise EngineError(f"a frame of {size} bytes, the limit is {MAX_FRAME}")
            end = begin + PREFIX + size
            if len(self._buffer) < end:
                break
            yield bytes(self._buffer[begin + PREFIX : end])
            begin = end
        del self._buffer[:begin]


def command_message(command: Command) -> ToEngine:
    """A loop's command for the wire."""
    match command:
        case Submit(request):
            return SubmitMessage(request)
        case Abort(request_id):
            return AbortMessage(request_id)
        case Stop():
            return StopMessage()


def message_command(message: ToEngine) -> Command:
    """The command a message carries.

    Raises:
        EngineError: the message carries none.
    """
    match message:
        case SubmitMessage(request):
            return Submit(request)
        case AbortMessage(request_id):
            return Abort(request_id)
        case StopMessage():
            return Stop()
        case Start():
            raise EngineError("the engine was started twice")
        case LookMessage():
            raise EngineError("a look at the engine is no command of its loop")


def output_message(output: Output) -> OutputMessage:
    """A loop's output for the wire."""
    prompts: list[PromptLogprobsEvent] = []
    tokens: list[TokenEvent] = []
    finishes: list[FinishEvent] = []
    for event in output.events:
        match event:
            case TokenEvent():
                tokens.append(event)
            case FinishEvent():
                finishes.append(event)
            case PromptLogprobsEvent():
                prompts.append(event)
    refusals = [RefusalMessage(r.request_id, ErrorMessage.of(r.error)) for r in output.refusals]
    return OutputMessage(prompts, tokens, finishes, output.stats, refusals)


def message_output(message: OutputMessage) -> Output:
    """The output a message carries."""
    return Output(
        events=(*message.prompts, *message.tokens, *message.finishes),
        stats=message.stats,
        refusals=tuple(Refusal(r.request_id, r.error.error()) for r in message.refusals),
    )
