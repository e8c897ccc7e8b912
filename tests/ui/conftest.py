"""A headless Chromium and a page over a scripted engine. Skips where there is no Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.ui.browsing import ARGUMENTS
from tests.ui.fake_engine import FakeEngine
from tests.ui.serving import free_socket, in_loop, serving

LOCAL = {"127.0.0.1", "localhost", ""}


@dataclass
class Site:
    """A served page and the engine behind it."""

    url: str  # of the page
    api: str
    engine: FakeEngine


@dataclass
class Watch:
    """What pages did that they should not have done."""

    remote: list[str] = field(default_factory=list)  # requests that left this machine
    errors: list[str] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)  # by the content security policy

    def follow(self, page: Any) -> None:
        page.on("request", lambda r: self._request(r.url))
        page.on("requestfailed", self._failed)
        page.on("pageerror", lambda e: self.errors.append(str(e)))
        page.on("console", lambda m: m.type == "error" and self.errors.append(m.text))

    def _request(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob") and parts.hostname not in LOCAL:
            self.remote.append(url)

    def _failed(self, request: Any) -> None:
        if request.failure == "csp":
            self.remote.remove(request.url)
            self.blocked.append(request.url)

    def forgive(self, *parts: str) -> None:
        """Forget errors that hold one of ``parts``."""
        self.errors[:] = [e for e in self.errors if not any(part in e for part in parts)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # Not for the session: while it is open, tests with a loop of their own cannot run.
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed (make system-deps)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        instance = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield instance
        instance.close()


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    from dashboard import Settings, mount

    engine = FakeEngine()
    app = engine.app()
    sock = free_socket()
    api = f"http://127.0.0.1:{sock.getsockname()[1]}"
    in_loop(lambda: mount(app, Settings(url=api)))
    with serving(app, sock):
        yield Site(f"{api}/ui/", api, engine)


def ready(page: Any) -> None:
    """Wait until a page has its values."""
    page.wait_for_selector("#msg textarea")
    page.wait_for_function(
        "(document.querySelector('.engine-line') || {innerText: 'no engine'}).innerText"
        " != 'no engine'"
    )


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def open_page(browser: Any, site: Site, watch: Watch) -> Iterator[Callable[..., Any]]:
    """Opens pages that must stay on this machine and log no error."""
    site.engine.reset()
    contexts = []

    def make(*, context: Any = None, url: str | None = None, **options: Any) -> Any:
        if context is None:
            context = browser.new_context(
                viewport=options.pop("viewport", {"width": 1280, "height": 800}), **options
            )
            context.set_default_timeout(20_000)
            contexts.append(context)
        page = context.new_page()
        watch.follow(page)
        page.goto(url or site.url)
        ready(page)
        return page

    yield make
    for context in contexts:
        context.close()
    assert watch.remote == []
    assert watch.errors == []
