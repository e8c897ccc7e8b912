"""The page behind an API key, as a browser meets it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Error, expect

from dashboard import Settings, mount
from infer.server.config import ServerConfig
from infer.server.middleware import Guard
from tests.ui.conftest import Watch, ready
from tests.ui.fake_engine import FakeEngine
from tests.ui.serving import free_socket, in_loop, serving
from tests.ui.test_chat import BOT, ask, finished
from tests.ui.test_pages import open_tab

pytestmark = pytest.mark.browser
KEY = "a-key:with-a-colon"


@pytest.fixture(scope="module")
def locked() -> Iterator[str]:
    """The page and the engine's API behind the server's own guard."""
    app = FakeEngine().app()
    sock = free_socket()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    in_loop(lambda: mount(app, Settings(url=url, api_key=KEY)))
    config = ServerConfig(api_key=KEY)
    app.add_middleware(Guard, config=config, note=lambda error, record: None)
    with serving(app, sock):
        yield url


def test_the_page_works_with_the_key_as_password(browser: Any, locked: str) -> None:
    context = browser.new_context(http_credentials={"username": "anybody", "password": KEY})
    watch = Watch()
    page = context.new_page()
    watch.follow(page)
    refused = []
    page.on("response", lambda r: r.status == 401 and refused.append(r.url))
    page.goto(f"{locked}/ui/")
    ready(page)
    ask(page, "hello")
    finished(page)
    expect(page.locator(BOT).first).to_contain_text("word11")
    for name, board in (("Metrics", "#metrics-board svg.chart"), ("Model", "#model-board .tile")):
        open_tab(page, name)
        expect(page.locator(board).first).to_be_visible()
    assert refused == []  # styles, scripts, events and their stream: all carry the key
    context.close()
    assert watch.remote == [] and watch.errors == []


def test_without_the_key_a_person_is_asked_for_it(browser: Any, locked: str) -> None:
    context = browser.new_context()
    page = context.new_page()
    # How a browser without a window ends where one with a window asks for a password; it does so
    # only for schemes that it knows.
    with pytest.raises(Error, match="ERR_INVALID_AUTH_CREDENTIALS"):
        page.goto(f"{locked}/ui/")
    context.close()


def test_a_wrong_key_shows_nothing(browser: Any, locked: str) -> None:
    context = browser.new_context(http_credentials={"username": "me", "password": "wrong-key"})
    page = context.new_page()
    answer = page.goto(f"{locked}/ui/")
    assert answer is not None and answer.status == 401
    expect(page.locator("body")).to_contain_text("the API key is missing or wrong")
    assert page.locator("gradio-app").count() == 0
    context.close()
