"""The chat page in a real browser."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.ui.conftest import Site, Watch, ready

pytestmark = pytest.mark.browser

BOT = "#bot [data-testid=bot]"
# What Gradio logs when a page with an open stream is left.
LEAVING = ("AbortError", "errored out", "network error", "Failed to fetch")


def ask(page: Any, text: str) -> None:
    page.evaluate(
        """() => {
          const id = sessionStorage.getItem('purestep.open');
          const talk = JSON.parse(localStorage.getItem('purestep.conversation.' + id) || 'null');
          window.seen = talk && talk.updated;
        }"""
    )
    page.locator("#msg textarea").fill(text)
    page.locator("#msg textarea").press("Enter")


def finished(page: Any) -> None:
    """Wait for the end of an answer that was not yet waited for: it is in the browser's storage."""
    page.wait_for_function(
        """() => {
          const id = sessionStorage.getItem('purestep.open');
          const talk = JSON.parse(localStorage.getItem('purestep.conversation.' + id) || 'null');
          if (!talk || !talk.messages.at(-1).stats) return false;
          if (talk.updated === window.seen) return false;
          window.seen = talk.updated;
          return true;
        }"""
    )
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_answer_streams_with_statistics(open_page: Callable[..., Any], site: Site) -> None:
    page = open_page()
    site.engine.token_s = 0.05
    ask(page, "hello there")
    expect(page.locator(BOT).first).to_contain_text("word2")
    assert "word11" not in page.locator(BOT).first.inner_text()  # it is shown while it grows
    finished(page)
    expect(page.locator(BOT).first).to_contain_text("word11")
    line = page.locator("#bot .thought-group").last
    expect(line).to_contain_text("tokens/s")
    expect(line).to_contain_text("first token")
    expect(line).to_contain_text("12 tokens")
    line.locator(".title").click()
    expect(page.locator("#bot")).to_contain_text("Prompt: 32 tokens")
    expect(page.locator("#chat-status")).to_contain_text("Context 44 of 2,048 tokens")
    body = site.engine.bodies[-1]
    assert body["messages"] == [{"role": "user", "content": "hello there"}]
    assert "seed" not in body and body["max_tokens"] == 512
    assert body["temperature"] == 0.2 and body["top_p"] == 0.9  # the model's defaults


def test_stop_frees_the_engine_within_a_second(open_page: Callable[..., Any], site: Site) -> None:
    page = open_page()
    ask(page, "a long one")
    expect(page.locator(BOT).first).to_contain_text("word5")
    assert site.engine.running == 1
    page.get_by_role("button", name="Stop", exact=True).click()
    until(lambda: site.engine.running == 0, 1.0)
    finished(page)
    expect(page.locator("#bot .thought-group").last).to_contain_text("stopped by you")
    expect(page.locator(BOT).first).to_contain_text("word5")  # what was there stays
    ask(page, "and on")
    expect(page.locator("#bot [data-testid=user]")).to_have_count(2)
    until(lambda: len(site.engine.bodies) == 2, 5)
    roles = [m["role"] for m in site.engine.bodies[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_the_end_of_an_answer_is_followed_until_the_reader_scrolls_up(
    open_page: Callable[..., Any], site: Site
) -> None:
    page = open_page(viewport={"width": 1280, "height": 600})
    page.locator("#chat-max-tokens input").fill("")
    ask(page, "a long one")
    expect(page.locator(BOT).first).to_contain_text("word300", timeout=20_000)
    view = page.locator("#bot .bubble-wrap")
    below = "node => node.scrollHeight - node.clientHeight - node.scrollTop"
    top = "node => node.scrollTop"
    page.wait_for_function(f"({below})(document.querySelector('#bot .bubble-wrap')) < 40")
    assert view.evaluate(top) > 0
    box = view.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.wheel(0, -150)
    page.wait_for_function(f"({below})(document.querySelector('#bot .bubble-wrap')) > 100")
    page.wait_for_timeout(300)
    before = view.evaluate(top)
    height = view.evaluate("node => node.scrollHeight")
    page.wait_for_function(
        f"document.querySelector('#bot .bubble-wrap').scrollHeight > {height} + 50"
    )
    assert view.evaluate(top) == before  # read in peace
    page.mouse.wheel(0, 100_000)
    height = view.evaluate("node => node.scrollHeight")
    page.wait_for_function(
        f"document.querySelector('#bot .bubble-wrap').scrollHeight > {height} + 50"
    )
    assert view.evaluate(below) < 40
    page.get_by_role("button", name="Stop", exact=True).click()
    finished(page)


def test_retry_edit_and_undo(open_page: Callable[..., Any], site: Site) -> None:
    page = open_page()
    ask(page, "first question")
    finished(page)
    page.get_by_role("button", name="Retry").click()
    until(lambda: len(site.engine.bodies) == 2, 5)
    finished(page)
    assert site.engine.bodies[0]["messages"] == site.engine.bodies[1]["messages"]
    expect(page.locator("#bot [data-testid=user]")).to_have_count(1)

    page.get_by_role("button", name="Edit", exact=True).first.click()
    page.get_by_label("Edited message").fill("no question")
    page.get_by_label("Edited message").press("Escape")
    expect(page.get_by_label("Edited message")).to_have_count(0)
    expect(page.locator("#bot [data-testid=user]")).to_contain_text("first question")
    expect(page.locator("#msg textarea")).to_be_focused()
    page.get_by_role("button", name="Edit", exact=True).first.click()
    page.get_by_label("Edited message").fill("better question")
    page.get_by_role("button", name="Submit", exact=True).click()
    until(lambda: len(site.engine.bodies) == 3, 5)
    finished(page)
    assert site.engine.bodies[2]["messages"] == [{"role": "user", "content": "better question"}]
    expect(page.locator("#bot [data-testid=user]")).to_have_count(1)
    expect(page.locator("#bot [data-testid=user]")).to_contain_text("better question")

    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#bot [data-testid=user]")).to_have_count(0)
    expect(page.locator("#msg textarea")).to_have_value("better question")


def test_an_answer_can_be_edited(open_page: Callable[..., Any], site: Site, watch: Watch) -> None:
    page = open_page()
    ask(page, "please think")
    finished(page)
    page.get_by_role("button", name="Edit", exact=True).last.click()
    field = page.locator("#bot textarea:visible")
    expect(field).to_have_count(1)  # neither the reasoning nor the statistics
    expect(field).to_have_value(re.compile("^word0"))
    field.fill("A better answer.")
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(page.locator("#bot")).to_contain_text("A better answer.")
    expect(page.locator("#bot")).not_to_contain_text("word0")
    expect(page.locator("#bot .thought-group").last).to_contain_text("12 tokens")
    page.wait_for_function(
        "Object.values(localStorage).some((text) => text.includes('A better answer.'))"
    )
    assert len(site.engine.bodies) == 1  # nothing is asked
    page.reload()
    ready(page)
    watch.forgive(*LEAVING)
    expect(page.locator("#bot")).to_contain_text("A better answer.")
    ask(page, "go on")
    until(lambda: len(site.engine.bodies) == 2, 5)
    said = [m["content"] for m in site.engine.bodies[-1]["messages"]]
    assert said == ["please think", "A better answer.", "go on"]


def test_settings_reach_the_engine(open_page: Callable[..., Any], site: Site) -> None:
    page = open_page()
    page.get_by_label("System prompt").fill("Be brief.")
    page.locator("#chat-temperature input[type=number]").fill("0.7")
    page.locator("#chat-max-tokens input").fill("5")
    page.locator("#chat-seed input").fill("42")
    page.get_by_label("Stop strings").fill("END\nHALT")
    page.get_by_label("Thinking").uncheck()
    page.get_by_role("button", name="Penalties").click()
    page.locator("#chat-presence-penalty input[type=number]").fill("0.5")
    page.locator("#chat-presence-penalty input[type=number]").press("Tab")
    ask(page, "please think")
    finished(page)
    body = site.engine.bodies[-1]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["temperature"] == 0.7 and body["max_tokens"] == 5 and body["seed"] == 42
    assert body["stop"] == ["END", "HALT"] and body["presence_penalty"] == 0.5
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert "repetition_penalty" not in body  # neutral: the engine's own


def test_a_wrong_setting_is_named(open_page: Callable[..., Any], site: Site) -> None:
    page = open_page()
    page.locator("#chat-seed input").fill("minus one")
    ask(page, "hello")
    expect(page.get_by_text("Seed is 'minus one'; it must be a whole number")).to_be_visible()
    assert site.engine.bodies == []
    expect(page.locator("#msg textarea")).to_have_value("hello")
    page.locator("#chat-seed input").fill("")
    page.locator("#chat-max-tokens input").fill("")
    ask(page, "hello")
    finished(page)
    assert "max_tokens" not in site.engine.bodies[-1]
    expect(page.locator("#bot [data-testid=user]")).to_have_count(1)

    page.locator("#chat-seed input").fill("minus two")
    page.locator("#msg textarea").fill("again")
    for _ in range(3):  # refused as often as it is sent
        page.locator("#msg textarea").press("Enter")
    expect(page.get_by_text("Seed is 'minus two'").first).to_be_visible()
    page.wait_for_timeout(500)  # everything that a refusal brings
    expect(page.locator("#bot [data-testid=user]")).to_have_count(1)  # still there
    page.locator("#chat-seed input").fill("7")
    page.locator("#msg textarea").press("Enter")
    until(lambda: len(site.engine.bodies) == 2, 10)
    assert site.engine.bodies[-1]["seed"] == 7


# Results reach the page late, the end of their stream among them.
LATE = """
const real = window.fetch.bind(window);
window.fetch = async (...call) => {
  const answer = await real(...call);
  if (!String(call[0].url || call[0]).includes('/queue/data')) return answer;
  const late = new TransformStream({ async transform(chunk, controller) {
    await new Promise((resolve) => setTimeout(resolve, 150));
    controller.enqueue(chunk);
  }});
  return new Response(answer.body.pipeThrough(late), { headers: answer.headers });
};
"""


def test_a_question_asked_as_the_stream_of_results_closes_is_answered(
    open_page: Callable[..., Any], site: Site, watch: Watch
) -> None:
    page = open_page()
    page.add_init_script(LATE)
    page.reload()
    ready(page)
    seed, box = page.locator("#chat-seed input"), page.locator("#msg textarea")
    for turn in range(2):
        seed.fill(f"wrong {turn}")
        box.fill(f"question {turn}")
        box.press("Enter")
        expect(page.get_by_text(f"Seed is 'wrong {turn}'")).to_be_visible()
        page.wait_for_timeout(100 * turn)  # somewhere in the tail of what was refused
        seed.fill(str(turn))
        box.press("Enter")
        expect(page.locator("#bot [data-testid=user]")).to_have_count(turn + 1)
        until(lambda n=turn + 1: len(site.engine.bodies) == n, 5)  # type: ignore[misc]
        expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert [body["seed"] for body in site.engine.bodies] == [0, 1]
    watch.forgive(*LEAVING)


def test_thinking_folds_away(open_page: Callable[..., Any], site: Site) -> None:
    page = open_page()
    ask(page, "please think")
    finished(page)
    thought = page.locator("#bot .thought-group").first
    expect(thought).to_contain_text("Thought")
    expect(page.get_by_text("Let me think about it.")).to_be_hidden()
    thought.locator(".title").click()
    expect(page.get_by_text("Let me think about it.")).to_be_visible()
    ask(page, "and now")
    until(lambda: len(site.engine.bodies) == 2, 5)
    said = [m["content"] for m in site.engine.bodies[-1]["messages"] if m["role"] == "assistant"]
    assert said and "Let me think" not in said[0]  # past reasoning is not sent again


def test_markdown_math_and_code(open_page: Callable[..., Any]) -> None:
    page = open_page()
    ask(page, "something rich")
    finished(page)
    answer = page.locator(BOT).first
    expect(answer.locator("h1")).to_have_text("Heading")
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer.locator(".katex")).to_have_count(2)
    expect(answer.locator("pre")).to_contain_text("def step(model, state):")
    expect(answer.locator("pre").locator("xpath=..").get_by_role("button")).to_have_count(1)


def test_tags_are_shown_as_they_were_written(open_page: Callable[..., Any], site: Site) -> None:
    page = open_page()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    question = "Which tags? <b>bold</b>, List<String> & <img src=x>"
    ask(page, question)
    finished(page)
    expect(page.locator("#bot [data-testid=user]")).to_have_text(plain(question))
    answer = page.locator(BOT).first
    for piece in (
        "A <div style='position:fixed;inset:0'>, a vector<int>, <your name>, </p>.",
        "#include <stdio.h>",
        "<section>",
        "<Custom-Tag a='1'/>",
        "</section>",
        "Code <b> and:",
        "<p>one</p>",
        "The end.",
    ):
        expect(answer).to_contain_text(plain(piece))
    assert answer.locator("b, section, pre p, [style*=fixed]").count() == 0
    page.get_by_role("button", name="Copy message").first.click()
    page.wait_for_function(f"async () => await navigator.clipboard.readText() === '{question}'")
    answer.evaluate("node => getSelection().selectAllChildren(node)")
    page.keyboard.press("Control+c")
    page.wait_for_function("async () => (await navigator.clipboard.readText()).includes('r<int>,')")
    page.get_by_role("button", name="Edit", exact=True).first.click()
    page.get_by_label("Edited message").press("End")
    page.keyboard.type("!")
    page.get_by_role("button", name="Submit", exact=True).click()
    until(lambda: len(site.engine.bodies) == 2, 5)
    assert site.engine.bodies[1]["messages"] == [{"role": "user", "content": question + "!"}]
    finished(page)


def plain(text: str) -> re.Pattern[str]:
    """``text``, with or without the invisible character that keeps a tag from being one."""
    return re.compile(re.escape(text).replace("<", "<\u2060?"))


def test_hostile_answer_is_inert(open_page: Callable[..., Any], watch: Watch) -> None:
    page = open_page()
    ask(page, "hostile")
    finished(page)
    expect(page.locator(BOT).first).to_contain_text("done.")
    until(lambda: len(watch.blocked) >= 1, 5)  # the image was tried, and did not get out
    assert all("198.51.100.7" in url for url in watch.blocked)
    watch.forgive("Content Security Policy")
    assert page.evaluate("window.hacked") is None
    assert page.locator(f"{BOT} script").count() == 0
    assert page.locator(f"{BOT} [onerror]").count() == 0
    link = page.locator(BOT).first.get_by_text("click")
    if link.evaluate("node => node.tagName") == "A":
        assert not (link.get_attribute("href") or "").startswith("javascript")


def test_two_tabs_do_not_mix(open_page: Callable[..., Any], site: Site) -> None:
    one = open_page()
    two = open_page(context=one.context)
    ask(one, "long from one")
    expect(one.locator(BOT).first).to_contain_text("word3")
    ask(two, "hello from two")
    finished(two)
    expect(two.locator("#bot [data-testid=user]")).to_have_text("hello from two")
    assert site.engine.running == 1  # the other tab's goes on
    one.get_by_role("button", name="Stop", exact=True).click()
    until(lambda: site.engine.running == 0, 1.0)
    finished(one)
    expect(one.locator("#bot [data-testid=user]")).to_have_text("long from one")
    for page in (one, two):  # both conversations are in both tabs' lists
        expect(page.locator(".talks .talk-title")).to_have_count(2)


@pytest.mark.parametrize("way", ["close", "reload"])
def test_leaving_frees_the_engine(
    open_page: Callable[..., Any], site: Site, watch: Watch, way: str
) -> None:
    page = open_page()
    ask(page, "a long one")
    expect(page.locator(BOT).first).to_contain_text("word5")
    assert site.engine.running == 1
    if way == "close":
        page.close()
        until(lambda: site.engine.running == 0, 1.0)
        return
    page.reload(wait_until="commit")
    until(lambda: site.engine.running == 0, 2.0)
    page.wait_for_selector("#msg textarea")
    expect(page.locator("#bot [data-testid=user]")).to_have_text("a long one")
    ask(page, "still there?")
    finished(page)
    watch.forgive(*LEAVING)


def test_an_answer_survives_a_reload(
    open_page: Callable[..., Any], site: Site, watch: Watch
) -> None:
    page = open_page()
    ask(page, "a long one")
    expect(page.locator(BOT).first).to_contain_text("word5")
    page.reload()
    ready(page)
    expect(page.locator(BOT).first).to_contain_text("word5")
    expect(page.locator("#bot .thought-group").last).to_contain_text("stopped by you")
    seen = page.locator(BOT).first.inner_text().split()
    assert seen == [f"word{i}" for i in range(len(seen))]
    page.wait_for_function("Object.values(localStorage).some((text) => text.includes('word5'))")
    page.get_by_role("button", name="Continue", exact=True).click()
    expect(page.locator(BOT).first).to_contain_text(f"word{len(seen) + 3}")
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    watch.forgive(*LEAVING)


def test_a_question_that_got_no_answer_can_be_asked_again(
    open_page: Callable[..., Any], site: Site
) -> None:
    page = open_page()
    page.evaluate(
        """() => {
          const messages = [{ role: 'user', text: 'anybody?' }];
          const talk = { id: 'a', title: 'anybody?', created: 1, updated: 1, messages };
          localStorage.setItem('purestep.conversation.a', JSON.stringify(talk));
          sessionStorage.setItem('purestep.open', 'a');
        }"""
    )
    page.reload()
    ready(page)
    expect(page.locator("#bot")).to_contain_text("left before an answer was complete")
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(BOT).first).to_contain_text("word11")
    assert [m["content"] for m in site.engine.bodies[-1]["messages"]] == ["anybody?"]


def test_conversations_are_kept_renamed_and_deleted(
    open_page: Callable[..., Any], site: Site, watch: Watch
) -> None:
    page = open_page()
    ask(page, "about apples")
    finished(page)
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#bot [data-testid=user]")).to_have_count(0)
    ask(page, "about pears")
    finished(page)
    page.reload()
    expect(page.locator("#bot [data-testid=user]")).to_have_text("about pears")
    watch.forgive(*LEAVING)
    page.get_by_role("button", name="about apples", exact=True).click()
    expect(page.locator("#bot [data-testid=user]")).to_have_text("about apples")
    expect(page.locator("#bot .thought-group").last).to_contain_text("12 tokens")

    page.get_by_role("button", name="Rename about apples").click()
    page.get_by_label("New title").fill("Fruit")
    page.get_by_label("New title").press("Enter")
    expect(page.get_by_role("button", name="Fruit", exact=True)).to_be_visible()
    ask(page, "more")  # saving again keeps the new title
    finished(page)
    expect(page.get_by_role("button", name="Fruit", exact=True)).to_be_visible()

    ask(page, "a long one")  # its answer must not bring the conversation back
    expect(page.locator(BOT).last).to_contain_text("word3")
    page.get_by_role("button", name="Delete Fruit").click()
    page.get_by_role("button", name="Really delete Fruit").click()
    expect(page.locator(".talks .talk-title")).to_have_count(1)
    expect(page.locator("#bot [data-testid=user]")).to_have_count(0)
    until(lambda: site.engine.running == 0, 2)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator(".talks .talk-title")).to_have_count(1)


@pytest.mark.slow
def test_leaving_in_mid_answer_always_clears_the_page(
    open_page: Callable[..., Any], site: Site
) -> None:
    page = open_page()
    for turn in range(20):
        site.engine.token_s = 0.002 * (turn % 5 + 1)
        ask(page, "a long one")
        expect(page.locator(BOT).last).to_contain_text(f"word{turn % 7}")
        if turn % 2:
            page.get_by_role("button", name="New conversation").click()
        else:
            page.get_by_role("button", name="Delete a long one").first.click()
            page.get_by_role("button", name="Really delete a long one").click()
        until(lambda: site.engine.running == 0, 2)
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        expect(page.locator("#bot [data-testid=user]")).to_have_count(0)
        expect(page.locator(".talks .talk-title")).to_have_count((turn + 1) // 2)


@pytest.mark.slow
def test_leaving_a_conversation_keeps_what_was_written(
    open_page: Callable[..., Any], site: Site
) -> None:
    page = open_page()
    ask(page, "a long one")
    expect(page.locator(BOT).last).to_contain_text("word3")
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#bot [data-testid=user]")).to_have_count(0)
    until(lambda: site.engine.running == 0, 2)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator("#bot [data-testid=user]")).to_have_count(0)
    ask(page, "another")
    finished(page)
    page.get_by_role("button", name="a long one", exact=True).click()
    expect(page.locator(BOT).first).to_contain_text("word3")
    expect(page.locator("#bot .thought-group").last).to_contain_text("stopped by you")


def test_export_and_import(open_page: Callable[..., Any], tmp_path: Path) -> None:
    page = open_page()
    page.get_by_label("System prompt").fill("Be kind.")
    ask(page, "please think")
    finished(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    file = tmp_path / "talks.json"
    download.value.save_as(file)
    exported = json.loads(file.read_text())
    assert exported["format"] == "purestep.conversations"
    (talk,) = exported["conversations"]
    answer = talk["messages"][1]
    assert answer["stats"]["completion_tokens"] == 12 and answer["settings"]["temperature"] == 0.2

    other = open_page()  # another browser: nothing of the first one's storage
    expect(other.locator(".talks .talk-title")).to_have_count(0)
    with other.expect_file_chooser() as chooser:
        other.get_by_role("button", name="Import").click()
    chooser.value.set_files(file)
    other.get_by_role("button", name="please think", exact=True).click()
    expect(other.locator("#bot [data-testid=user]")).to_have_text("please think")
    expect(other.locator("#bot .thought-group").first).to_contain_text("Thought")
    expect(other.get_by_label("System prompt")).to_have_value("Be kind.")

    bad = tmp_path / "bad.json"
    bad.write_text('{"format": "something else"}')
    with other.expect_file_chooser() as chooser:
        other.get_by_role("button", name="Import").click()
    chooser.value.set_files(bad)
    expect(other.get_by_text("not a conversation of this page")).to_be_visible()


def test_full_queue_is_said_clearly(open_page: Callable[..., Any], site: Site) -> None:
    page = open_page()
    site.engine.full = True
    ask(page, "anybody?")
    expect(page.locator("#bot")).to_contain_text("The engine's queue is full")
    site.engine.full = False
    page.get_by_role("button", name="Retry").click()
    finished(page)
    expect(page.locator(BOT).first).to_contain_text("word11")


def test_usable_at_390_pixels(open_page: Callable[..., Any]) -> None:
    page = open_page(viewport={"width": 390, "height": 844})
    ask(page, "something rich")
    finished(page)
    for name in ("Chat", "Completion", "Metrics", "Inspector", "Model"):
        page.get_by_role("tab", name=name, exact=True).first.click()
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390, f"{name} is {width} pixels wide"
    page.get_by_role("tab", name="Chat", exact=True).first.click()
    expect(page.get_by_label("System prompt")).to_be_hidden()
    page.get_by_role("button", name="Settings", exact=True).click()
    expect(page.get_by_label("System prompt")).to_be_visible()


@pytest.mark.slow
def test_dark_mode(open_page: Callable[..., Any], site: Site) -> None:
    def brightness(page: Any) -> float:
        colour: str = page.evaluate(
            "getComputedStyle(document.querySelector('gradio-app')).backgroundColor"
        )
        return sum(int(n) for n in colour[4:-1].split(",")[:3]) / 3

    light = open_page(url=f"{site.url}?__theme=light")
    dark = open_page(url=f"{site.url}?__theme=dark")
    assert brightness(light) > 230
    assert brightness(dark) < 40
    system = open_page(color_scheme="dark")
    assert brightness(system) < 40


def test_every_control_has_a_name_and_the_keyboard_does(open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.locator("#msg textarea").focus()
    page.keyboard.type("by keyboard")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")  # once too often: asked once all the same
    finished(page)
    page.locator("#msg textarea").focus()
    page.keyboard.type("more")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Send"
    page.keyboard.press("Enter")
    expect(page.locator("#bot [data-testid=user]")).to_have_count(2)
    finished(page)
    for name in ("Chat", "Completion", "Metrics", "Inspector", "Model"):
        page.get_by_role("tab", name=name, exact=True).first.click()
        page.wait_for_timeout(300)
        nameless = page.evaluate(NAMELESS)
        assert nameless == [], f"{name}: {nameless}"


NAMELESS = """() => [...document.querySelectorAll('button, input, textarea, select, [role=button]')]
  .filter((node) => node.offsetParent !== null && !node.hidden)
  .filter((node) => {
    const labels = node.labels ? [...node.labels].map((l) => l.textContent.trim()).join('') : '';
    const by = node.getAttribute('aria-labelledby');
    const named = by && document.getElementById(by);
    return !(node.getAttribute('aria-label') || labels || node.textContent.trim()
      || node.title || (named && named.textContent.trim()));
  })
  .map((node) => node.outerHTML.slice(0, 160))"""
