"""The other tabs in a real browser: completion, metrics, inspector, lessons and model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.ui.conftest import Site

pytestmark = pytest.mark.browser


def open_tab(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).first.click()


def test_completion_shows_probabilities_and_forks(
    open_page: Callable[..., Any], site: Site
) -> None:
    page = open_page()
    open_tab(page, "Completion")
    page.locator("#prompt textarea").fill("Once upon")
    page.get_by_label("Side by side").check()
    page.get_by_role("button", name="Complete", exact=True).click()
    tokens = page.locator("#tokens-a .token")
    expect(tokens).to_have_count(24)
    expect(page.locator("#tokens-b .token")).to_have_count(24)
    expect(page.locator("#tokens-a")).to_contain_text("16 of them from the cache")
    assert len(site.engine.bodies) == 2
    assert all(b["logprobs"] == 5 and b["prompt"] == "Once upon" for b in site.engine.bodies)

    tokens.nth(1).hover()
    detail = page.locator("#tokens-a .token-detail")
    expect(detail).to_contain_text("token1")
    expect(detail).to_contain_text("<b>third</b>".replace(" ", "·"))  # as text, not as markup
    likely = tokens.nth(0).evaluate("node => getComputedStyle(node).backgroundColor")
    rare = tokens.nth(11).evaluate("node => getComputedStyle(node).backgroundColor")
    assert likely != rare

    tokens.nth(0).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(detail.locator("li.chosen")).to_contain_text("token2")
    page.keyboard.press("Enter")  # forks B before this token
    expect(page.locator("#tokens-b .prefix")).to_have_text(" token0 token1")
    expect(page.locator("#tokens-b .token")).to_have_count(24)
    assert site.engine.bodies[-1]["prompt"] == "Once upon token0 token1"
    assert len(site.engine.bodies) == 3


def test_metrics_are_drawn_and_pause(open_page: Callable[..., Any], site: Site) -> None:
    page = open_page()
    open_tab(page, "Metrics")
    charts = page.locator("#metrics-board svg.chart")
    expect(charts).to_have_count(9)
    for chart in charts.all():
        box = chart.bounding_box()
        assert box is not None and box["height"] > 60
        assert chart.locator("path.line").count() >= 1, chart.get_attribute("aria-label")
        assert "no data" not in (chart.get_attribute("aria-label") or "")
    for title in ("Time to first token", "Time per output token", "KV utilization", "Batch size",
                  "Throughput", "Requests", "Prefix cache hits"):  # fmt: skip
        expect(page.get_by_role("heading", name=title)).to_be_visible()
    expect(page.locator("#metrics-board")).to_contain_text("p95")

    charts.first.hover()
    expect(page.locator("svg.chart .cursor[visibility=visible] text")).to_contain_text("p50")

    with page.expect_response(lambda r: "/run/predict" in r.url):
        pass  # the next tick
    page.get_by_label("Live").first.uncheck()
    _assert_quiet(page, site)
    page.get_by_label("Live").first.check()
    open_tab(page, "Chat")  # nobody looks: nothing is asked
    _assert_quiet(page, site)


def _assert_quiet(page: Any, site: Site) -> None:
    page.wait_for_timeout(1000)  # a tick that was on its way may still land
    before = site.engine.readings
    page.wait_for_timeout(2500)  # longer than the period
    assert site.engine.readings == before


def test_lessons_step_forward_and_back(open_page: Callable[..., Any]) -> None:
    page = open_page()
    open_tab(page, "Inspector")
    open_tab(page, "Lessons")
    board = page.locator("#lesson-board")
    expect(board).to_contain_text("After 0 steps", timeout=60_000)
    step = page.get_by_role("button", name="Step ▶")
    back = page.get_by_role("button", name="◀ Back")
    expect(back).to_be_disabled()
    seen = []
    for i in (1, 2, 3):
        step.click()
        expect(board).to_contain_text(f"After {i} step")
        seen.append(_arrays(page))
    expect(board).to_contain_text("The end.")
    expect(step).to_be_disabled()
    assert [a["positions"] for a in seen] == [[0, 1, 2], [3], [4]]
    assert [a["context_lens"] for a in seen] == [[3], [4], [5]]
    assert seen[0]["input_ids"] == [100, 200, 300]
    back.click()
    expect(board).to_contain_text("After 2 steps")
    assert _arrays(page) == seen[1]
    step.click()  # computed again from the restored state
    expect(board).to_contain_text("After 3 steps")
    assert _arrays(page) == seen[2]
    page.get_by_role("button", name="Start").click()
    expect(board).to_contain_text("After 0 steps")


@pytest.mark.slow
def test_the_block_boundary_lesson(open_page: Callable[..., Any]) -> None:
    page = open_page()
    open_tab(page, "Inspector")
    open_tab(page, "Lessons")
    board = page.locator("#lesson-board")
    expect(board).to_contain_text("After 0 steps", timeout=60_000)
    page.get_by_label("Lesson", exact=True).click()
    page.get_by_role("option", name="3 · The block boundary").click()
    expect(page.locator("#lesson-intro")).to_contain_text("256 tokens long")
    step = page.get_by_role("button", name="Step ▶")
    step.click()
    expect(board).to_contain_text("After 1 step")
    assert len(_arrays(page)["block_tables"]) == 1
    step.click()
    expect(board).to_contain_text("After 2 steps")
    arrays = _arrays(page)
    first, second = arrays["block_tables"]
    assert arrays["positions"] == [256] and arrays["context_lens"] == [257]
    assert arrays["slot_mapping"] == [second * 256]
    step.click()
    expect(board).to_contain_text("After 3 steps")
    assert _arrays(page)["slot_mapping"] == [second * 256 + 1]
    assert first != second


def test_the_running_engine(open_page: Callable[..., Any], site: Site) -> None:
    page = open_page()
    open_tab(page, "Inspector")
    board = page.locator("#inspector-board")
    columns = board.locator(".step-column")
    expect(columns).to_have_count(9)  # of the preemption lesson, which the fake engine replays
    expect(board.locator("path.preempted")).to_have_count(1)
    expect(board.locator("circle.end")).to_have_count(2)
    expect(board.locator(".blocks i")).to_have_count(5)
    expect(board).to_contain_text("free 5 of 5")
    columns.nth(0).locator("rect.back").click(force=True)
    expect(page.get_by_label("Live").last).not_to_be_checked()  # a choice pauses the view
    expect(board.get_by_role("heading", name="Step 0")).to_be_visible()
    expect(board.locator("table.plan tbody tr")).to_have_count(2)
    arrays = board.locator(".arrays")
    expect(arrays).to_contain_text("slot_mapping")
    assert "input_ids" not in arrays.inner_text()  # prompts stay with those who wrote them
    board.locator(".track").focus()
    page.keyboard.press("ArrowRight")
    expect(board.get_by_role("heading", name="Step 1")).to_be_visible()


def test_model_page(open_page: Callable[..., Any]) -> None:
    page = open_page()
    open_tab(page, "Model")
    board = page.locator("#model-board")
    for text in ("fake-model", "8,192", "2,048", "256.5 MiB", "hidden size", "temperature"):
        expect(board).to_contain_text(text)
    page.get_by_text("Chat template").click()
    expect(board.locator("pre")).to_contain_text("enable_thinking")


def _arrays(page: Any) -> dict[str, list[int]]:
    found: dict[str, list[int]] = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll('#lesson-board .arrays dt')]
          .map((dt) => [dt.querySelector('code').textContent,
            [...dt.nextElementSibling.querySelectorAll('b')].map((b) => Number(b.textContent))]))"""
    )
    return found
