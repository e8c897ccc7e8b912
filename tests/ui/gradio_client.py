"""A chat page without a browser: speaks Gradio's queue over HTTP, to put load on the pages."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx


class PageClient:
    """One open page. Many of them share an ``httpx.AsyncClient``."""

    def __init__(self, http: httpx.AsyncClient, config: dict[str, Any], base: str) -> None:
        self._http = http
        self._base = f"{base}/gradio_api"
        self._session = uuid.uuid4().hex[:12]
        names = {c["id"]: c for c in config["components"]}
        by_id = {c["props"].get("elem_id"): i for i, c in names.items()}
        box = by_id["msg"]
        jobs = config["dependencies"]
        send = next(d for d in jobs if [box, "submit"] in d["targets"])
        grow = next(d for d in jobs if d["trigger_after"] == send["id"])
        finish = next(d for d in jobs if d["trigger_after"] == grow["id"])
        self._send, self._then = send, (grow, finish)
        self._values = {i: c["props"].get("value") for i, c in names.items()}
        self._box, self._max_tokens = box, by_id["chat-max-tokens"]

    @classmethod
    async def open(cls, http: httpx.AsyncClient, base: str) -> PageClient:
        """Load the page at ``base``."""
        config = (await http.get(f"{base}/config")).json()
        return cls(http, config, base)

    async def ask(self, text: str, max_tokens: int) -> AsyncIterator[dict[str, Any]]:
        """Send a message; gives the queue's messages up to the end of the answer."""
        given = {self._box: text, self._max_tokens: str(max_tokens)}
        for job in (self._send, *self._then):
            async for message in self._run(job, given):
                yield message

    async def _run(
        self, job: dict[str, Any], given: dict[int, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        data = [given.get(i, self._values[i]) for i in job["inputs"]]
        body = {"data": data, "fn_index": job["id"], "session_hash": self._session}
        (await self._http.post(f"{self._base}/queue/join", json=body)).raise_for_status()
        url = f"{self._base}/queue/data?session_hash={self._session}"
        async with self._http.stream("GET", url, timeout=None) as events:
            async for line in events.aiter_lines():
                if not line.startswith("data:"):
                    continue
                message = json.loads(line[5:])
                if message["msg"] == "close_stream":
                    return
                yield message
                if message["msg"] == "process_completed" and not message["success"]:
                    raise RuntimeError(f"the page failed: {message}")
