"""The routes. Each reads its body and leaves the work to an ``Answer`` that disconnects cancel."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Send

from infer.answers import END_THINK
from infer.server.chat import ChatFormat
from infer.server.choices import chat_choice, in_reasoning, text_choice
from infer.server.completions import CompletionFormat, encode_prompt, prompts_of
from infer.server.errors import ApiError, bad_request
from infer.server.generation import Format, Generation, Prompt
from infer.server.http import Answer, Record, read_body, record_of, send_json
from infer.server.logprobs import token_text
from infer.server.params import (
    Options,
    chat_options,
    check_model,
    completion_options,
    ending_of,
    lead_of,
    messages_of,
    refuse_unknown,
    template_variables,
    tool_use_of,
    tools_of,
)
from infer.server.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ErrorAnswer,
    TokenizeBody,
)
from infer.server.services import Services
from infer.types import Request as EngineRequest

# For the OpenAPI document: what any route may answer, and what the routes with a body may.
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer} for status in (401, 403, 404, 405, 500)
}
BODY_ERRORS: dict[int | str, dict[str, Any]] = ERRORS | {
    status: {"model": ErrorAnswer} for status in (400, 408, 413, 415, 429, 503)
}
STREAMED: dict[int | str, dict[str, Any]] = BODY_ERRORS | {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
}


def openai_routes(services: Services) -> APIRouter:
    """``/v1/...``."""
    router = APIRouter(prefix="/v1", tags=["openai"], responses=ERRORS)

    @router.post("/completions", openapi_extra=_body(CompletionBody), responses=STREAMED)
    async def completions(request: Request) -> Response:
        """Continue prompts of text or token ids."""
        record = record_of(request)
        record.generates = True
        body = await read_body(request, CompletionBody, services.config, services.pool)
        check_model(body.model, services.model_names)
        options = completion_options(body, services.config)
        prompts = prompts_of(body, services.config)

        async def work(send: Send) -> None:
            with services.admission.admit(len(prompts) * options.params.n):
                await _complete(services, body, options, prompts, record, send)

        return Answer(work, record)

    @router.post("/chat/completions", openapi_extra=_body(ChatBody), responses=STREAMED)
    async def chat_completions(request: Request) -> Response:
        """Continue a conversation."""
        record = record_of(request)
        record.generates = True
        body = await read_body(request, ChatBody, services.config, services.pool)
        check_model(body.model, services.model_names)
        options = chat_options(body, services.config)

        async def work(send: Send) -> None:
            with services.admission.admit(options.params.n):
                await _chat(services, body, options, record, send)

        return Answer(work, record)

    @router.get("/models")
    async def models() -> dict[str, Any]:
        """The models this server has, under every name they may be asked for by."""
        return {"object": "list", "data": [_card(services, n) for n in services.model_names]}

    @router.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One model."""
        check_model(name, services.model_names)
        return _card(services, name)

    return router


def utility_routes(services: Services) -> APIRouter:
    """Health, metrics, and the tokenizer."""
    router = APIRouter(tags=["server"], responses=ERRORS)

    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses={503: {"model": ErrorAnswer}})
    async def health() -> Response:
        """200 while the engine answers requests, else 503 with the cause."""
        state = services.client.health
        if state.ok:
            return Response('{"status":"ok"}', 200, media_type="application/json")
        raise ApiError(503, state.cause or "not ready", kind="server_error", code="unhealthy")

    @router.get(
        "/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
    )
    async def metrics(request: Request) -> Response:
        """Prometheus or OpenMetrics, as the Accept header asks."""
        if services.render_metrics is None:
            raise ApiError(404, "this server runs without metrics", code="no_metrics")
        accept = request.headers.get("accept")
        kind, content = await asyncio.to_thread(services.render_metrics, accept)
        return Response(content, headers={"content-type": kind})

    @router.post("/tokenize", openapi_extra=_body(TokenizeBody), responses=BODY_ERRORS)
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt, or of a conversation as the chat route would render it."""
        body = await read_body(request, TokenizeBody, services.config, services.pool)

        async def work(send: Send) -> None:
            await send_json(send, await _tokenize(services, body))

        return Answer(work, record_of(request))

    @router.post("/detokenize", openapi_extra=_body(DetokenizeBody), responses=BODY_ERRORS)
    async def detokenize(request: Request) -> Response:
        """Text of token ids."""
        body = await read_body(request, DetokenizeBody, services.config, services.pool)
        check_model(body.model, services.model_names)
        refuse_unknown(body)
        _check_ids(body.tokens, services.client.info.vocab_size, "tokens")

        async def work(send: Send) -> None:
            def decode() -> str:
                return services.tokenizer.decode(body.tokens, skip_special_tokens=False)

            await send_json(send, {"prompt": await services.pool.run(decode)})

        return Answer(work, record_of(request))

    return router


async def _complete(
    services: Services,
    body: CompletionBody,
    options: Options,
    prompts: Sequence[str | list[int]],
    record: Record,
    send: Send,
) -> None:
    special = body.add_special_tokens is not False

    def encode() -> list[tuple[tuple[int, ...], str]]:
        return [
            encode_prompt(p, services.tokenizer, add_special_tokens=special, echo=options.echo)
            for p in prompts
        ]

    encoded = await services.pool.run(encode)
    answer_id = f"cmpl-{record.request_id}"
    engine_id = _engine_id(answer_id)
    format = CompletionFormat(
        answer_id,
        int(time.time()),
        services.model_names[0],
        services.tokenizer,
        options,
        [text for _, text in encoded],
    )
    n = options.params.n
    choices = [text_choice(services.tokenizer, options, i) for i in range(len(prompts) * n)]
    requests = [
        _request(f"{engine_id}-{i}" if len(prompts) > 1 else engine_id, ids, options)
        for i, (ids, _) in enumerate(encoded)
    ]
    jobs = [Prompt(r, choices[i * n : (i + 1) * n]) for i, r in enumerate(requests)]
    await _generation(services, jobs, options, format, record).run(send)


async def _chat(
    services: Services, body: ChatBody, options: Options, record: Record, send: Send
) -> None:
    tools = tools_of(body.tools, services.config)
    use = tool_use_of(body, tools)
    messages = messages_of(body.messages, services.config)
    variables = template_variables(body.chat_template_kwargs)
    lead = lead_of(body, messages)
    tokenizer = services.tokenizer

    def encode() -> tuple[list[int], list[int]]:
        ids = tokenizer.encode_chat(messages, tools=use.tools, **ending_of(body), **variables)
        if not use.opening:
            return ids, []
        closing = f"\n{END_THINK}\n\n" if in_reasoning(tokenizer, ids) else ""
        return ids, tokenizer.encode(closing + use.opening, add_special_tokens=False)

    ids, opening = await services.pool.run(encode)
    answer_id = f"chatcmpl-{record.request_id}"
    model = services.model_names[0]
    format = ChatFormat(answer_id, int(time.time()), model, tokenizer, options, lead.role)
    choices = [
        chat_choice(tokenizer, options, i, prompt_ids=ids, use=use, lead=lead)
        for i in range(options.params.n)
    ]
    engine_id = _engine_id(answer_id)
    jobs = [Prompt(_request(engine_id, (*ids, *opening), options), choices)]
    await _generation(services, jobs, options, format, record).run(send)


async def _tokenize(services: Services, body: TokenizeBody) -> dict[str, Any]:
    check_model(body.model, services.model_names)
    refuse_unknown(body)
    tokenizer = services.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", param="prompt")
    ending = ending_of(body)
    tools = tools_of(body.tools, services.config)
    if body.prompt is not None and (tools or ending != ending_of(TokenizeBody())):
        raise bad_request(
            "add_generation_prompt, continue_final_message and tools need messages",
            param="messages",
        )
    special = body.add_special_tokens is not False
    variables = template_variables(body.chat_template_kwargs)

    def encode() -> list[int]:
        if body.prompt is not None:
            return tokenizer.encode(body.prompt, special)
        messages = messages_of(body.messages or [], services.config)
        return tokenizer.encode_chat(messages, tools=tools, **ending, **variables)

    ids = await services.pool.run(encode)
    strings = [token_text(tokenizer, i) for i in ids] if body.return_token_strs else None
    return {
        "count": len(ids),
        "max_model_len": services.client.info.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }


def _engine_id(answer_id: str) -> str:
    """An id no other request has; clients may send the same ``x-request-id`` twice."""
    return f"{answer_id}-{secrets.token_hex(4)}"


def _request(request_id: str, ids: Sequence[int], options: Options) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(ids),
        params=options.params,
        priority=options.priority,
        cache_salt=options.cache_salt,
    )


def _generation(
    services: Services, jobs: list[Prompt], options: Options, format: Format, record: Record
) -> Generation:
    note: Callable[[ApiError], None] = lambda error: services.note(error, record)  # noqa: E731
    return Generation(
        client=services.client,
        prompts=jobs,
        options=options,
        format=format,
        record=record,
        note_error=note,
    )


def _check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    bad = next((i for i in ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise bad_request(
            f"{param} has the id {bad}; ids are from 0 to {vocab_size - 1}", param=param
        )


def _card(services: Services, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": services.created,
        "owned_by": "purestep",
        "root": services.client.info.model_name,
        "parent": None,
        "max_model_len": services.client.info.max_model_len,
    }


def _body(model: type[BaseModel]) -> dict[str, Any]:
    """The request body for the OpenAPI document; it is read and checked by ``read_body``."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
