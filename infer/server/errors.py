"""Errors as OpenAI's clients expect them: a status and ``{"error": {message, type, ...}}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from infer.errors import (
    CapacityError,
    ContextLengthError,
    EngineError,
    EngineUnavailable,
    InferError,
    RequestError,
)

RETRY_AFTER_S = 1


class ApiError(Exception):
    """An answer other than 2xx."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error document."""
        # A message may quote what a client sent; a lone surrogate has no UTF-8 form.
        message = self.message.encode("utf-8", "replace").decode()
        return {
            "error": {
                "message": message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """The whole answer."""
        content = msgspec.json.encode(self.body())
        return Response(content, self.status, self.headers, media_type="application/json")


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be answered as it is written."""
    return ApiError(400, message, param=param, code=code)


def deadline_error(seconds: float) -> ApiError:
    """The request's time is up."""
    # Not retried: the same request would run out of time again.
    return ApiError(
        408,
        f"the request was not finished within {seconds:g} s; ask for fewer tokens or raise timeout",
        kind="timeout_error",
        code="deadline_exceeded",
        headers={"x-should-retry": "false"},
    )


def to_api_error(error: Exception) -> ApiError:
    """The answer to any error of ours, of the frameworks, or of a bug."""
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            return bad_request(str(error), param=error.param, code="context_length_exceeded")
        case RequestError():
            return bad_request(str(error), param=error.param)
        case CapacityError():
            return ApiError(
                429,
                str(error),
                kind="rate_limit_error",
                code="server_busy",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        case EngineUnavailable():
            return ApiError(503, str(error), kind="server_error", code="engine_unavailable")
        case EngineError():
            return ApiError(500, str(error), kind="server_error", code="engine_error")
        case ValidationError():
            return _validation(error)
        case HTTPException():
            return ApiError(
                error.status_code,
                str(error.detail),
                kind="invalid_request_error" if error.status_code < 500 else "server_error",
                headers=error.headers,
            )
        case InferError():
            return ApiError(500, str(error), kind="server_error")
        case _:
            return ApiError(500, "an internal error; see the server's log", kind="server_error")


def _validation(error: ValidationError) -> ApiError:
    """The faults of the first field that pydantic complains of. Inputs are not repeated."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    field = faults[0]["loc"][:1]
    same = [fault for fault in faults if fault["loc"][:1] == field]
    if len(same) == 1:
        where = ".".join(str(part) for part in same[0]["loc"]) or "body"
    else:  # the branches of a union
        where = str(*field) or "body"
    messages = dict.fromkeys(fault["msg"] for fault in same)
    param = str(field[0]) if field else None
    return bad_request(f"{where[:200]}: {'; or: '.join(messages)}"[:1000], param=param)
