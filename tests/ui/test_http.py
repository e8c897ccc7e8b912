"""What the page's own HTTP surface gives away, and what it refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from dashboard import Settings, mount
from dashboard.client import EngineApi
from dashboard.command import dashboard_app
from infer.errors import ConfigError, EngineUnavailable
from tests.ui.fake_engine import FakeEngine
from tests.ui.gradio_client import PageClient
from tests.ui.serving import free_port, free_socket, in_loop, serving


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    engine = FakeEngine()
    app = engine.app()
    sock = free_socket()
    settings = Settings(url=f"http://127.0.0.1:{sock.getsockname()[1]}")
    in_loop(lambda: mount(app, settings))
    with serving(app, sock) as url:
        yield url


def test_headers_and_root(page: str) -> None:
    answer = httpx.get(f"{page}/ui/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "connect-src 'self'" in policy
    assert "img-src 'self' data: blob:;" in policy and "frame-ancestors 'none'" in policy
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert httpx.get(f"{page}/").headers["location"] == "/ui/"
    assert "content-security-policy" not in httpx.get(f"{page}/v1/models").headers


def test_nothing_can_be_uploaded_or_read(page: str) -> None:
    files = {"files": ("x.txt", b"hello")}
    assert httpx.post(f"{page}/ui/gradio_api/upload", files=files).status_code == 404
    for name in ("/etc/passwd", f"{page}/v1/models"):
        assert httpx.get(f"{page}/ui/gradio_api/file={name}").status_code in (403, 404)
    assert httpx.get(f"{page}/ui/gradio_api/runs").status_code in (403, 404)
    assert httpx.get(f"{page}/ui/monitoring").status_code in (403, 404)
    config = httpx.get(f"{page}/ui/config").json()
    assert config["analytics_enabled"] is False
    assert config["footer_links"] == []


def test_the_page_names_no_other_host(page: str) -> None:
    html = httpx.get(f"{page}/ui/").text
    loaded = re.findall(
        r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[\"'](https?://[^\"']+)", html
    )
    assert [url for url in loaded if not url.startswith(page)] == []


def test_a_foreign_page_may_not_call_from_a_browser() -> None:
    app = in_loop(lambda: dashboard_app("http://127.0.0.1:9", None, "127.0.0.1"))
    with serving(app, free_socket()) as url:
        evil = httpx.get(f"{url}/ui/config", headers={"Origin": "http://evil.example"})
        assert "access-control-allow-origin" not in evil.headers
        rebound = httpx.get(f"{url}/ui/config", headers={"Host": "evil.example"})
        assert rebound.status_code == 400


async def _ask(url: str) -> list[str]:
    async with httpx.AsyncClient(timeout=30) as http:
        client = await PageClient.open(http, f"{url}/ui")
        return [str(message) async for message in client.ask("hello", 8)]


@pytest.mark.anyio
async def test_a_dashboard_of_its_own_sends_the_key() -> None:
    engine = FakeEngine()
    app = FastAPI()
    keys = []

    @app.middleware("http")
    async def guard(request: Request, call_next):  # type: ignore[no-untyped-def]
        keys.append(request.headers.get("authorization"))
        if keys[-1] != "Bearer secret-key":
            error = {"error": {"message": "the API key is missing or wrong"}}
            return JSONResponse(error, 401)
        return await call_next(request)

    app.mount("/", engine.app())
    with serving(app, free_socket()) as api:
        with serving(dashboard_app(api, "secret-key", "127.0.0.1"), free_socket()) as url:
            messages = await _ask(url)
            assert any("word7" in message for message in messages)
        with serving(dashboard_app(api, "wrong-key", "127.0.0.1"), free_socket()) as url:
            messages = await _ask(url)
            assert any("API key is missing or wrong" in message for message in messages)


@pytest.mark.anyio
async def test_an_engine_that_is_down_is_named() -> None:
    api = EngineApi(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(EngineUnavailable, match="does not answer"):
        await api.insight()
    with pytest.raises(EngineUnavailable, match="does not answer"):
        async for _ in api.chat({"messages": []}):
            pass
    await api.close()


def test_settings_are_checked() -> None:
    for bad in ({"url": "127.0.0.1:8000"}, {"path": "/"}, {"path": "ui"}, {"max_waiting": 0}):
        with pytest.raises(ConfigError):
            Settings(**bad)  # type: ignore[arg-type]
    assert Settings(url="http://h:1/v1/").api == "http://h:1"


def test_importing_the_package_loads_neither_gradio_nor_torch() -> None:
    code = (
        "import dashboard, dashboard.recorder, sys; "
        "print('gradio' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}, check=True
    )
    assert done.stdout.split() == ["False", "False"]
