"""From request bodies to ``SamplingParams``: limits, aliases, refusals of what is not offered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infer.errors import RequestError
from infer.server.config import ServerConfig
from infer.server.errors import ApiError, bad_request
from infer.server.protocol import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    Conversation,
    GenerationBody,
    TokenizeBody,
    Tool,
)
from infer.types import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
# How a call begins in the format of Qwen3 and Hermes; a model goes on from there.
CALL_OPENING = '<tool_call>\n{"name": "'
TEMPLATE_VARIABLES = frozenset({"enable_thinking"})

# Fields that never change an answer here.
IGNORED = frozenset(
    [
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
    ]
)
# Fields that change nothing at these values, which clients send as defaults.
NEUTRAL: Mapping[str, Any] = {
    "add_generation_prompt": True,
    "annotations": [],
    "continue_final_message": False,
    "detokenize": True,
    "early_stopping": False,
    "echo": False,
    "include_reasoning": True,
    "length_penalty": 1.0,
    "modalities": ["text"],
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "spaces_between_special_tokens": True,
    "strict": False,
    "suffix": "",
    "use_beam_search": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What shapes an answer, beside the tokens."""

    params: SamplingParams
    stream: bool
    include_usage: bool
    continuous_usage: bool
    priority: int
    cache_salt: str | None
    timeout: float
    show_prompt_logprobs: bool = False
    echo: bool = False
    discard_output: bool = False  # echo with max_tokens 0: the prompt alone is the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a chat, and the text the answer is made to begin with, if any."""

    tools: list[dict[str, Any]] | None
    opening: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """The message an answer goes on with; without text, the answer is a message of its own."""

    role: str = "assistant"
    text: str = ""
    is_reasoning: bool = False


def check_model(name: str | None, served: tuple[str, ...]) -> None:
    """Raise 404 for another model than those served; leaving it out means the only one."""
    if name is not None and name not in served:
        raise ApiError(
            404,
            f"the model {name[:200]!r} does not exist here; this server has {', '.join(served)}",
            param="model",
            code="model_not_found",
        )


def completion_options(body: CompletionBody, config: ServerConfig) -> Options:
    """Options of ``/v1/completions``.

    Raises:
        ApiError, RequestError: a field is out of range or not supported.
    """
    refuse_unknown(body)
    echo = bool(body.echo)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    discard = echo and max_tokens == 0
    prompt_logprobs = body.prompt_logprobs
    if echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    params = _sampling(
        body,
        config,
        max_tokens=1 if discard else max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    return _options(body, config, params, echo=echo, discard=discard)


def chat_options(body: ChatBody, config: ServerConfig) -> Options:
    """Options of ``/v1/chat/completions``; errors as for ``completion_options``."""
    refuse_unknown(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", param="top_logprobs")
    if not 0 <= (body.top_logprobs or 0) <= config.max_logprobs:
        raise bad_request(
            f"top_logprobs is {body.top_logprobs}, it must be from 0 to {config.max_logprobs}",
            param="top_logprobs",
        )
    if body.parallel_tool_calls is False:
        raise bad_request(
            "parallel_tool_calls: false is not supported; leave it out", param="parallel_tool_calls"
        )
    tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = _sampling(
        body,
        config,
        max_tokens=tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    return _options(body, config, params)


def tool_use_of(body: ChatBody, tools: list[dict[str, Any]] | None) -> ToolUse:
    """Which tools the model is offered, and how its answer must begin.

    Raises:
        ApiError: a choice of a tool that was not given, or of one in an answer that goes on with
            what is there.
    """
    choice = body.tool_choice
    if choice is None or choice == "auto":
        return ToolUse(tools=tools)
    if choice == "none":
        return ToolUse(tools=None)
    if not tools:
        raise bad_request("tool_choice needs tools", param="tool_choice")
    if body.add_generation_prompt is False:
        raise bad_request(
            "tool_choice begins an answer with a call, and add_generation_prompt: false begins no "
            "answer; set tool_choice to 'auto'",
            param="tool_choice",
        )
    if isinstance(choice, str):
        return ToolUse(tools=tools, opening=CALL_OPENING)
    refuse_unknown(choice)
    name = choice.function.name
    if all(tool["function"]["name"] != name for tool in tools):
        raise bad_request(
            f"tool_choice names {name[:64]!r}, which is not a tool", param="tool_choice"
        )
    return ToolUse(tools=tools, opening=f'{CALL_OPENING}{name}", "arguments": ')


def ending_of(body: Conversation | TokenizeBody) -> dict[str, Any]:
    """How the conversation ends, as ``Tokenizer.encode_chat`` takes it."""
    return {
        "add_generation_prompt": body.add_generation_prompt is not False,
        "continue_final_message": body.continue_final_message or False,
    }


def lead_of(body: Conversation, messages: list[dict[str, Any]]) -> Lead:
    """What the answer goes on with, of ``messages`` that the tokenizer accepts."""
    if not body.continue_final_message:
        return Lead()
    is_reasoning = body.continue_final_message == "reasoning_content"
    last = messages[-1]
    text = last.get("reasoning_content" if is_reasoning else "content") or ""
    return Lead(role=last["role"], text=text, is_reasoning=is_reasoning)


def refuse_unknown(body: Any) -> None:
    """Raise for fields this server does not know, unless they change nothing.

    Walks into the nested bodies too. A null is the same as leaving a field out.
    """
    for name, value in (body.model_extra or {}).items():
        if value is None or name in IGNORED or (name in NEUTRAL and value == NEUTRAL[name]):
            continue
        if name == "chat_template":
            raise bad_request(
                "chat_template cannot be sent with a request; the checkpoint's own is used",
                param=name,
            )
        raise bad_request(
            f"{name[:100]!r} is not supported by this server and would change the answer; "
            "remove it",
            param=name[:100],
        )


def messages_of(messages: list[ChatMessage], config: ServerConfig) -> list[dict[str, Any]]:
    """Messages as a template takes them; content parts become one text.

    Raises:
        ApiError: too many, or a part that is not text.
    """
    if len(messages) > config.max_messages:
        raise bad_request(
            f"messages has {len(messages)} entries, the limit is {config.max_messages}",
            param="messages",
        )
    return [_message(message, f"messages.{i}") for i, message in enumerate(messages)]


def tools_of(tools: list[Tool] | None, config: ServerConfig) -> list[dict[str, Any]] | None:
    """Tools as a template takes them.

    Raises:
        ApiError: too many, or a field of another API.
    """
    if not tools:
        return None
    if len(tools) > config.max_tools:
        raise bad_request(
            f"tools has {len(tools)} entries, the limit is {config.max_tools}", param="tools"
        )
    for tool in tools:
        refuse_unknown(tool)
        refuse_unknown(tool.function)
    return [tool.model_dump(exclude_none=True) for tool in tools]


def template_variables(variables: dict[str, Any] | None) -> dict[str, Any]:
    """The variables a client may set in a chat template.

    Raises:
        ApiError: a name or type outside the allowlist.
    """
    for name, value in (variables or {}).items():
        if name not in TEMPLATE_VARIABLES or not isinstance(value, bool):
            raise bad_request(
                f"chat_template_kwargs.{name[:100]} cannot be set; allowed: "
                + ", ".join(f"{known} (true or false)" for known in sorted(TEMPLATE_VARIABLES)),
                param="chat_template_kwargs",
            )
    return dict(variables or {})


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    refuse_unknown(message)
    plain = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        texts = []
        for part in message.content:
            if part.type != "text" or part.text is None:
                raise bad_request(
                    f"{where}.content has a part of type {part.type[:50]!r}; "
                    "this server reads text only",
                    param="messages",
                )
            texts.append(part.text)
        plain["content"] = "\n".join(texts)
    elif message.content is None:
        if message.role != "assistant" or not message.tool_calls:
            raise bad_request(f"{where}.content is missing", param="messages")
        plain["content"] = ""
    return plain


def _options(
    body: GenerationBody,
    config: ServerConfig,
    params: SamplingParams,
    *,
    echo: bool = False,
    discard: bool = False,
) -> Options:
    stream = body.stream_options
    if stream is not None:
        if not body.stream and (stream.include_usage or stream.continuous_usage_stats):
            raise bad_request("stream_options needs stream: true", param="stream_options")
        unknown = [
            name
            for name, value in (stream.model_extra or {}).items()
            if value and name != "include_obfuscation"
        ]
        if unknown:
            raise bad_request(
                f"stream_options.{unknown[0][:100]} is not supported", param="stream_options"
            )
    return Options(
        params=params,
        stream=bool(body.stream),
        include_usage=bool(stream and (stream.include_usage or stream.continuous_usage_stats)),
        continuous_usage=bool(stream and stream.continuous_usage_stats),
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        timeout=min(body.timeout or config.request_timeout, config.request_timeout),
        show_prompt_logprobs=body.prompt_logprobs is not None,
        echo=echo,
        discard_output=discard,
    )


def _sampling(
    body: GenerationBody,
    config: ServerConfig,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    if body.response_format is not None and body.response_format.type != "text":
        raise bad_request(
            f"response_format {body.response_format.type[:50]!r} is not supported, only 'text' is",
            param="response_format",
        )
    n = 1 if body.n is None else body.n
    if body.best_of is not None and body.best_of != n:
        raise bad_request("best_of is not supported, unless it equals n", param="best_of")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    stop_ids = tuple(body.stop_token_ids or ())
    for name, value, limit in (
        ("n", n, config.max_n),
        ("stop", len(stop), config.max_stop),
        ("stop_token_ids", len(stop_ids), MAX_STOP_TOKEN_IDS),
        ("logit_bias", len(body.logit_bias or {}), MAX_LOGIT_BIAS),
        ("logprobs", logprobs or 0, config.max_logprobs),
        ("prompt_logprobs", prompt_logprobs or 0, config.max_logprobs),
    ):
        if value > limit:
            raise bad_request(f"{name} is {value}, this server's limit is {limit}", param=name)
    return SamplingParams(
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_bias(body.logit_bias),
        seed=body.seed,
        n=n,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        stop=stop,
        stop_token_ids=stop_ids,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def _bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    try:
        # JSON keys are text. int() alone would also take "1_0" and Arabic digits.
        return {int(key): value for key, value in bias.items() if _is_id(key)}
    except ValueError:
        raise RequestError("logit_bias must map token ids to numbers", param="logit_bias") from None


def _is_id(key: str) -> bool:
    if not (key.isascii() and key.isdecimal() and len(key) <= 10):
        raise ValueError(key)
    return True
