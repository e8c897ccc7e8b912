"""In front of every route, mounted pages included: identity, origin, size, and the log line.

Plain ASGI, so that a disconnect reaches whoever answers the request.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infer.server.config import ServerConfig
from infer.server.errors import ApiError, to_api_error
from infer.server.http import Record, new_record, too_large

logger = logging.getLogger(__name__)
access_log = logging.getLogger("infer.access")

NoteError = Callable[[ApiError, Record | None], None]

OPEN_PATHS = frozenset({"/health"})
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
# What probes, scrapers and open pages ask for all the time; refusals of it are logged all the same.
_WATCHING = re.compile(r"/(health|metrics|debug|ui)(/|$)", re.ASCII)
_REQUEST_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)


class Guard:
    """Refuses what may not pass: a wrong key, a foreign origin or host, a body too large.

    A key is accepted as ``Authorization: Bearer KEY``, or as the password of HTTP Basic, which is
    how a browser opens the pages.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, note: NoteError) -> None:
        self._app = app
        self._config = config
        self._note = note
        key = config.api_key
        self._digest = None if key is None else hashlib.sha256(key.encode()).digest()
        self._hosts = LOOPBACK_HOSTS | {config.host.lower()} | set(config.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        if refusal is None:
            limited = receive if scope["type"] == "websocket" else self._limited(receive)
            await self._app(scope, limited, send)
            return
        self._note(refusal, scope.get("state", {}).get("record"))
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await refusal.response()(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        if scope["path"] not in OPEN_PATHS and not self._knows(headers.get("authorization")):
            return ApiError(
                401,
                "the API key is missing or wrong; send `Authorization: Bearer KEY`",
                kind="authentication_error",
                code="invalid_api_key",
                # Browsers ask for a password only where Basic stands alone; clients need no hint.
                headers={"WWW-Authenticate": 'Basic realm="purestep", charset="UTF-8"'},
            )
        host = _hostname(headers.get("host", ""))
        if self._digest is None and host not in self._hosts:
            # A name that an attacker points at this machine turns a browser into a client here.
            return ApiError(
                403, f"host {host!r} is not this server's; see allowed_hosts", code="wrong_host"
            )
        origin = headers.get("origin")
        if origin is not None and not self._same_origin(origin, headers.get("host", "")):
            return ApiError(
                403, "calls from another web origin; see allowed_origins", code="wrong_origin"
            )
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self._config.max_body_bytes:
            return too_large(self._config.max_body_bytes)
        return None

    def _knows(self, authorization: str | None) -> bool:
        if self._digest is None:
            return True
        scheme, _, value = (authorization or "").partition(" ")
        key = value.strip().encode("utf-8", "replace")
        if scheme.lower() == "basic":
            try:
                key = base64.b64decode(key, validate=True).partition(b":")[2]
            except binascii.Error:
                key = b""
        elif scheme.lower() != "bearer":
            key = b""
        # Digests have one length, so the time tells nothing of the key.
        return hmac.compare_digest(hashlib.sha256(key).digest(), self._digest)

    def _same_origin(self, origin: str, host: str) -> bool:
        if not {origin, "*"}.isdisjoint(self._config.allowed_origins):
            return True
        try:
            return urlsplit(origin).netloc.lower() == host.lower() != ""
        except ValueError:
            return False

    def _limited(self, receive: Receive) -> Receive:
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._config.max_body_bytes:
                raise too_large(self._config.max_body_bytes)
            return message

        return limited


class AccessLog:
    """Gives every request an id and a record, answers for bugs, and writes one line at the end."""

    def __init__(self, app: ASGIApp, note: NoteError) -> None:
        self._app = app
        self._note = note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        known = _REQUEST_ID.fullmatch(given) is not None
        record = new_record(given if known else secrets.token_hex(12))
        scope.setdefault("state", {})["record"] = record

        async def logged(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = record.request_id
                headers["x-content-type-options"] = "nosniff"
            await send(message)

        try:
            await self._app(scope, receive, logged)
        except Exception as error:
            logger.exception("request %s failed", record.request_id)
            answer = to_api_error(error)
            self._note(answer, record)
            if record.status is not None:
                raise  # too late for an answer: the connection is closed
            await answer.response()(scope, receive, logged)
        finally:
            self._log(scope, record)

    def _log(self, scope: Scope, record: Record) -> None:
        quiet = record.status is None or record.status < 400
        quiet = quiet and _WATCHING.match(scope["path"]) is not None
        level = logging.DEBUG if quiet else logging.INFO
        if not access_log.isEnabledFor(level):
            return
        now = time.monotonic()
        first = record.first_token
        # A path can hold anything; only its known form is logged. Prompts are in no field.
        fields = {
            "id": record.request_id,
            "method": scope["method"],
            "path": scope["path"][:128],
            "status": record.status,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "generated_tokens": record.generated_tokens,
            "ttft_s": None if first is None else round(first - record.arrival, 4),
            "total_s": round(now - record.arrival, 4),
            "finish": record.finish,
            "error": record.error,
        }
        shown = {key: value for key, value in fields.items() if value is not None}
        pairs = " ".join(f"{key}={_quoted(value)}" for key, value in shown.items())
        access_log.log(level, "request %s", pairs, extra={"fields": {"event": "request", **shown}})


def _quoted(value: object) -> str:
    text = str(value)
    return text if re.fullmatch(r"[\w./:+-]+", text, re.ASCII) else json.dumps(text)


def _hostname(host: str) -> str:
    """The name in a Host header, without port and brackets, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
