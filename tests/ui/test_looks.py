"""What the eye needs: contrast, nothing beyond its frame, a place for the keyboard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.ui.conftest import Site
from tests.ui.test_chat import BOT, ask, finished

pytestmark = pytest.mark.browser

# Texts whose contrast is below 4.5 to 1 (WCAG 2.1, 1.4.3); highlighted code and what is disabled
# are left out.
FAINT = """() => {
  const parse = (c) => {
    const n = c.match(/[\\d.]+/g).map(Number), scale = c.startsWith('color(') ? 255 : 1;
    return [n[0] * scale, n[1] * scale, n[2] * scale, n[3] === undefined ? 1 : n[3]];
  };
  const over = (a, b) => [0, 1, 2].map((i) => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
  const light = (c) => c.slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const found = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement, text = texts.currentNode.textContent.trim();
    if (!text || !node.checkVisibility({ visibilityProperty: true })) continue;
    if (node.closest('script, style, svg, pre, :disabled')) continue;
    const chain = [];
    for (let at = node; at; at = at.parentElement) chain.push(getComputedStyle(at));
    const share = chain.reduce((all, style) => all * style.opacity, 1);
    const back = chain.reverse().map((style) => parse(style.backgroundColor))
      .reduce((under, colour) => over(colour, under), [255, 255, 255, 1]);
    const ink = parse(getComputedStyle(node).color);
    const [low, high] = [light(over([...ink.slice(0, 3), ink[3] * share], back)), light(back)]
      .sort((a, b) => a - b);
    const contrast = (high + 0.05) / (low + 0.05);
    if (share && contrast < 4.5) found.push(`${text.slice(0, 30)}: ${contrast.toFixed(2)}`);
  }
  return found;
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_can_be_read(open_page: Callable[..., Any], site: Site, theme: str) -> None:
    page = open_page(url=f"{site.url}?__theme={theme}")
    page.locator("#chat-max-tokens input").fill("3")
    ask(page, "hello")
    finished(page)
    page.mouse.move(0, 0)
    for name in ("Chat", "Completion", "Metrics", "Inspector", "Model"):
        page.get_by_role("tab", name=name, exact=True).first.click()
        page.wait_for_timeout(500)  # colours fade over
        assert page.evaluate(FAINT) == [], name


@pytest.mark.parametrize("size", [(1920, 1080), (1280, 800), (768, 1024), (390, 844)])
def test_the_chat_fits_the_window(open_page: Callable[..., Any], size: tuple[int, int]) -> None:
    page = open_page(viewport={"width": size[0], "height": size[1]})
    ask(page, "something wide")
    finished(page)
    root = page.locator("html")
    assert root.evaluate("node => node.scrollHeight <= node.clientHeight")
    assert root.evaluate("node => node.scrollWidth <= node.clientWidth")
    answer = page.locator(BOT).first
    expect(answer.locator("td").last).to_be_attached()
    expect(answer.locator(".katex-display")).to_have_count(1)
    edge = answer.bounding_box()
    for part in (".katex-display", "table", "pre"):
        box = answer.locator(part).first.bounding_box()
        assert box["x"] + box["width"] <= edge["x"] + edge["width"] + 1, part


def test_the_keyboard_is_seen(open_page: Callable[..., Any]) -> None:
    page = open_page()
    for inner, framed in (("#msg textarea", "#msg"), ("#system textarea", "#system textarea")):
        page.get_by_role("button", name="New conversation").focus()
        colour = f"getComputedStyle(document.querySelector('{framed}')).borderColor"
        page.wait_for_timeout(400)
        before = page.evaluate(colour)
        page.locator(inner).focus()
        page.wait_for_function(f"{colour} === 'rgb(13, 148, 136)'")
        assert before != "rgb(13, 148, 136)"
