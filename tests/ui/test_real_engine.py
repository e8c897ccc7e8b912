"""The page over the real server and the default model."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from tests.ui.screenshots import server
from tests.ui.test_chat import BOT, ask, finished
from tests.ui.test_pages import open_tab

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=["--no-engine-process", "--engine-process"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with server(None, request.param) as address:
        yield address


def gauge(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=30).text
    match = re.search(rf"^infer_{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
    assert match is not None
    return float(match[1])


def falls_to_zero(url: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while gauge(url, "num_requests_running"):
        assert time.monotonic() < deadline, "the engine still runs something"
        time.sleep(0.02)


def test_a_conversation_with_a_model(open_page: Callable[..., Any], url: str) -> None:
    page = open_page(url=f"{url}/ui/")
    page.set_default_timeout(120_000)
    expect.set_options(timeout=60_000)
    try:
        page.locator("#chat-temperature input[type=number]").fill("0")
        page.locator("#chat-max-tokens input").fill("16")
        page.locator("#chat-max-tokens input").press("Tab")
        ask(page, "What is the capital of France?")
        finished(page)
        expect(page.locator(BOT).first).to_contain_text("Paris")
        page.get_by_role("button", name="Retry").click()
        finished(page)
        expect(page.locator("#bot [data-testid=user]")).to_have_count(1)
        page.locator("#bot .thought-group .title").last.click()
        expect(page.locator("#bot")).to_contain_text("of them cached")  # the prefix cache's share

        page.locator("#chat-max-tokens input").fill("")
        page.locator("#chat-max-tokens input").press("Tab")
        ask(page, "Write a very long story about the sea.")
        expect(page.locator("#bot [data-testid=user]")).to_have_count(2)
        page.wait_for_function(
            "() => [...document.querySelectorAll('#bot [data-testid=bot]')]"
            ".slice(2).some((bot) => bot.innerText.trim().length > 5)"
        )
        assert gauge(url, "num_requests_running") == 1
        page.get_by_role("button", name="Stop", exact=True).click()
        falls_to_zero(url, 1.0)
        finished(page)
        expect(page.locator("#bot .thought-group").last).to_contain_text("stopped by you")

        open_tab(page, "Inspector")
        board = page.locator("#inspector-board")
        expect(board.locator(".step-column .bar.prefill").first).to_be_attached()
        expect(board.locator(".step-column .bar.decode").first).to_be_attached()
        expect(board.locator(".blocks i.cached").first).to_be_attached()
        open_tab(page, "Metrics")
        expect(page.locator("#metrics-board svg.chart")).to_have_count(9)
        expect(page.locator("#metrics-board")).to_contain_text("Throughput")
        open_tab(page, "Model")
        expect(page.locator("#model-board")).to_contain_text("smollm2")
    finally:
        expect.set_options(timeout=5_000)


def test_an_answer_cut_and_continued_is_the_answer_uncut(
    open_page: Callable[..., Any], url: str
) -> None:
    page = open_page(url=f"{url}/ui/")
    page.set_default_timeout(120_000)
    page.locator("#chat-temperature input[type=number]").fill("0")
    line = page.locator("#bot .thought-group").last

    def asked(tokens: int) -> str:
        page.get_by_role("button", name="New conversation").click()
        expect(page.locator("#bot [data-testid=user]")).to_have_count(0)
        page.locator("#chat-max-tokens input").fill(str(tokens))
        ask(page, "What is a lighthouse?")
        expect(line).to_contain_text(f"· {tokens} tokens", timeout=60_000)
        return str(page.locator(BOT).first.inner_text()).splitlines()[0]

    whole, begun = asked(24), asked(8)
    assert whole.startswith(begun) and whole != begun
    page.locator("#chat-max-tokens input").fill("16")
    page.get_by_role("button", name="Continue", exact=True).click()
    expect(line).to_contain_text("· 24 tokens", timeout=60_000)
    assert page.locator(BOT).first.inner_text().splitlines()[0] == whole


def test_tokens_have_probabilities(open_page: Callable[..., Any], url: str) -> None:
    page = open_page(url=f"{url}/ui/")
    page.set_default_timeout(120_000)
    open_tab(page, "Completion")
    page.locator("#prompt textarea").fill("One, two, three, four,")
    page.get_by_role("button", name="Settings A").click()
    page.locator("#a-max-tokens input").fill("6")
    page.locator("#a-temperature input[type=number]").fill("0")
    page.locator("#a-temperature input[type=number]").press("Tab")
    page.get_by_role("button", name="Complete", exact=True).click()
    expect(page.locator("#tokens-a .token")).to_have_count(6, timeout=60_000)
    expect(page.locator("#tokens-a .tokens")).to_contain_text("five")
    page.locator("#tokens-a .token").first.hover()
    shares = page.locator("#tokens-a .token-detail li").all_inner_texts()
    assert len(shares) == 5
    percents = [float(re.findall(r"([\d.]+) %", text)[0]) for text in shares]
    assert percents == sorted(percents, reverse=True) and sum(percents) <= 101
