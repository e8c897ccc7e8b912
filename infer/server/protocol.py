"""Request bodies. Types only; what an engine or a configuration limits is checked in ``params``.

Parsing is strict (``"1"`` is not a number). Fields nobody here knows are kept, so that ``params``
can tell those that would change the answer from those that would not.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

# What an engine keeps in 32 bits must fit there.
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Ids = Annotated[list[Int32], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
IdLists = Annotated[list[Ids], Field(fail_fast=True)]
# True: the content of the last message.
ContinueFinal = bool | Literal["content", "reasoning_content"]


class Body(BaseModel):
    """Any request body."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(Body):
    """What a stream tells beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(Body):
    """Only ``{"type": "text"}`` is supported."""

    type: str


class GenerationBody(Body):
    """What both completion routes take: OpenAI's fields and vLLM's."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: Int32 | None = None
    max_tokens: Int32 | None = None
    min_tokens: Int32 | None = None
    stop: str | Texts | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Int32 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    best_of: Int32 | None = None
    priority: Int32 | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None  # seconds for the whole answer


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: str | Texts | Ids | IdLists
    echo: bool | None = None
    logprobs: Int32 | None = None
    add_special_tokens: bool | None = None


class TextPart(Body):
    """One part of a message; other types than text are refused by ``params``."""

    type: str
    text: str | None = None


class FunctionCall(Body):
    """A call an assistant made; ``arguments`` is JSON text."""

    name: str
    arguments: str


class ToolCall(Body):
    """A tool call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionSpec(Body):
    """A function a model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Body):
    """The function of a ``ToolChoice``."""

    name: str


class ToolChoice(Body):
    """Makes the model call one function."""

    type: Literal["function"]
    function: NamedFunction


class Conversation(Body):
    """Messages and what goes into the template with them."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None  # true unless given
    continue_final_message: ContinueFinal | None = None


class ChatBody(GenerationBody, Conversation):
    """``POST /v1/chat/completions``."""

    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class TokenizeBody(Body):
    """``POST /tokenize``: a prompt, or messages as the chat route would render them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: ContinueFinal | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class ErrorDetail(BaseModel):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Ids
