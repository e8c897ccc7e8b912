"""Going on with an answer that was cut off: the message as a value, and the page in a browser."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import expect

from dashboard import conversation as talks
from dashboard.answering import answer, explain
from dashboard.client import Piece, Usage
from dashboard.conversation import Message, Stats
from dashboard.pacing import Pacer
from dashboard.transcript import display
from infer.errors import CapacityError, RequestError
from tests.ui.conftest import Site, Watch, ready
from tests.ui.test_chat import BOT, LEAVING, ask, until

CUT = Message(
    role="assistant",
    text="The cap",
    reasoning="France: Paris.",
    thinking_s=1.5,
    stats=Stats(
        ttft_s=0.25, total_s=2.0, tokens_per_s=10.0, prompt_tokens=20, cached_tokens=16,
        completion_tokens=8, finish_reason="length",
    ),
)  # fmt: skip
ASKED = talks.add(talks.new(), Message(role="user", text="What is the capital?"))


class Says:
    """Stands for an engine that answers with these pieces, or with an error after them."""

    def __init__(self, *pieces: Piece, error: Exception | None = None) -> None:
        self.pieces, self.error = pieces, error

    async def chat(self, body: dict[str, Any]) -> AsyncGenerator[Piece, None]:
        for piece in self.pieces:
            yield piece
        if self.error is not None:
            raise self.error


async def grown(says: Says, before: Message) -> list[Message]:
    stop = asyncio.Event()
    stream = answer(says, Pacer(1000), {}, {"seed": 1}, stop, before)  # type: ignore[arg-type]
    return [message async for message in stream]


@pytest.mark.anyio
async def test_statistics_are_of_the_whole_answer() -> None:
    usage = Usage(prompt_tokens=30, completion_tokens=5, cached_tokens=25)
    says = Says(Piece(text="ital"), Piece(text=" is Paris.", finish_reason="stop", usage=usage))
    messages = await grown(says, CUT)
    assert replace(messages[0], stats=None) == replace(CUT, stats=None, settings={"seed": 1})
    growing = messages[0].stats
    assert growing is not None and growing.finish_reason == ""  # no end yet
    assert growing.completion_tokens == 8 and growing.cached_tokens == 16
    last = messages[-1]
    assert (last.text, last.reasoning) == ("The capital is Paris.", CUT.reasoning)
    assert last.thinking_s == 1.5
    stats = last.stats
    assert stats is not None and stats.finish_reason == "stop"
    assert stats.completion_tokens == 8 + 5
    assert stats.prompt_tokens + stats.completion_tokens == 30 + 5  # what the context holds now
    assert stats.cached_tokens == 22  # of a prompt of 22
    assert stats.ttft_s == 0.25 and stats.total_s >= 2.0


@pytest.mark.anyio
async def test_a_refusal_loses_nothing() -> None:
    (*_, last) = await grown(Says(error=CapacityError("full")), CUT)
    assert (last.text, last.reasoning, last.thinking_s) == ("The cap", CUT.reasoning, 1.5)
    assert last.error is not None and "full" in last.error
    assert last.stats is not None and last.stats.completion_tokens == 8
    assert talks.cut_off(talks.add(ASKED, last)) is last  # it can be tried again


@pytest.mark.anyio
async def test_a_thought_goes_on() -> None:
    thought = replace(CUT, text="", reasoning="France: Pa")
    pieces = (Piece(reasoning="ris."), Piece(text="Paris.", finish_reason="stop"))
    messages = await grown(Says(*pieces), thought)
    assert messages[0].thinking_s is None  # it is thinking again
    last = messages[-1]
    assert (last.text, last.reasoning) == ("Paris.", "France: Paris.")
    assert last.thinking_s is not None and last.thinking_s >= 1.5


def test_half_a_character_at_the_end_is_written_again() -> None:
    message = replace(CUT, text="Sm\ufffdrre \ufffd\ufffd")
    assert talks.reopened(message).text == "Sm\ufffdrre "


def test_requests_that_go_on() -> None:
    body = talks.wire_continued(replace(ASKED, system="Be brief."), talks.reopened(CUT))
    assert [m["role"] for m in body["messages"]] == ["system", "user", "assistant"]
    last = {"role": "assistant", "content": "The cap", "reasoning_content": "France: Paris."}
    assert body["messages"][-1] == last
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False
    body = talks.wire_continued(ASKED, replace(CUT, text=""))
    assert body["continue_final_message"] == "reasoning_content"


@pytest.mark.parametrize(
    ("last", "offered"),
    [
        (CUT, True),
        (replace(CUT, text=""), True),
        (replace(CUT, text="", reasoning=""), False),
        (replace(CUT, stats=Stats(finish_reason="stopped")), True),
        (replace(CUT, stats=Stats(finish_reason="error")), True),
        (replace(CUT, stats=Stats(finish_reason="stop")), False),
        (replace(CUT, stats=None), False),  # it is being written
        (Message(role="user", text="x"), False),
    ],
)
def test_what_can_go_on(last: Message, offered: bool) -> None:
    entries = display(talks.add(ASKED, last))
    assert ["options" in entry for entry in entries] == [False] * (len(entries) - 1) + [offered]


# --- in the browser -------------------------------------------------------------------------------


def cap(page: Any, tokens: str) -> None:
    page.locator("#chat-max-tokens input").fill(tokens)


def stored(page: Any) -> dict[str, Any]:
    """The open conversation as the browser keeps it."""
    text = page.evaluate(
        "localStorage.getItem('purestep.conversation.' + sessionStorage.getItem('purestep.open'))"
    )
    found: dict[str, Any] = json.loads(text)
    return found


def button(page: Any) -> Any:
    return page.get_by_role("button", name="Continue", exact=True)


@pytest.mark.browser
def test_an_answer_cut_by_its_length_goes_on(open_page: Callable[..., Any], site: Site) -> None:
    page = open_page()
    cap(page, "5")
    ask(page, "please think")
    expect(page.locator("#bot")).to_contain_text("cut at max tokens")
    for count in (10, 12):
        button(page).click()
        expect(page.locator("#bot .thought-group").last).to_contain_text(f"· {count} tokens")
    assert site.engine.bodies[1]["messages"] == [
        {"role": "user", "content": "please think"},
        {
            "role": "assistant",
            "content": "word0 word1 word2 word3 word4 ",
            "reasoning_content": "Let me think about it. ",
        },
    ]
    assert site.engine.bodies[1]["continue_final_message"] is True
    assert site.engine.bodies[1]["add_generation_prompt"] is False
    expect(button(page)).to_have_count(0)  # it came to its own end
    expect(page.locator("#bot [data-testid=user]")).to_have_count(1)
    page.wait_for_function("JSON.stringify(localStorage).includes('word11')")
    (_, said) = stored(page)["messages"]
    assert said["text"] == "".join(f"word{i} " for i in range(12))
    assert said["reasoning"] == "Let me think about it. "
    # 32 tokens of the question, and all of the answer
    expect(page.locator("#chat-status")).to_contain_text("Context 44 of 2,048 tokens")


@pytest.mark.browser
def test_a_stopped_answer_goes_on_and_stops_again(
    open_page: Callable[..., Any], site: Site
) -> None:
    page = open_page()
    ask(page, "a long one")
    expect(page.locator(BOT).first).to_contain_text("word5")
    expect(button(page)).to_have_count(0)  # while it grows
    page.get_by_role("button", name="Stop", exact=True).click()
    button(page).click()
    until(lambda: len(site.engine.bodies) == 2, 5)
    known = len(site.engine.bodies[1]["messages"][-1]["content"].split())
    expect(page.locator(BOT).first).to_contain_text(f"word{known + 5} ")
    expect(button(page)).to_have_count(0)
    page.get_by_role("button", name="Stop", exact=True).click()
    until(lambda: site.engine.running == 0, 1.0)
    expect(button(page)).to_be_visible()
    page.wait_for_function(f"JSON.stringify(localStorage).includes('word{known + 5} ')")
    words = stored(page)["messages"][-1]["text"].split()
    assert words == [f"word{i}" for i in range(len(words))]  # nothing twice, nothing lost
    ask(page, "and on")
    until(lambda: len(site.engine.bodies) == 3, 5)
    assert site.engine.bodies[-1]["messages"][1]["content"].split() == words
    assert "continue_final_message" not in site.engine.bodies[-1]


@pytest.mark.browser
def test_a_stopped_thought_goes_on(open_page: Callable[..., Any], site: Site) -> None:
    page = open_page()
    site.engine.token_s = 0.4
    ask(page, "please think")
    expect(page.locator("#bot")).to_contain_text("Let me")
    page.get_by_role("button", name="Stop", exact=True).click()
    site.engine.token_s = 0.01
    button(page).click()
    expect(page.locator("#bot")).to_contain_text("word11")
    body = site.engine.bodies[-1]
    assert body["continue_final_message"] == "reasoning_content"
    assert body["messages"][-1]["content"] == ""
    assert body["messages"][-1]["reasoning_content"].startswith("Let me")
    expect(page.locator("#bot .thought-group").first).to_contain_text("Thought")
    page.wait_for_function("JSON.stringify(localStorage).includes('word11')")
    said = stored(page)["messages"][-1]
    assert said["reasoning"].split() == ["Let", "me", "think", "about", "it."]


@pytest.mark.browser
def test_retry_edit_and_undo_of_what_went_on(open_page: Callable[..., Any], site: Site) -> None:
    page = open_page()
    cap(page, "5")
    ask(page, "hello there")
    button(page).click()
    expect(page.locator("#bot .thought-group").last).to_contain_text("· 10 tokens")
    page.get_by_role("button", name="Edit", exact=True).last.click()
    page.locator("#bot textarea:visible").fill("Own words here")
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(page.locator(BOT).first).to_contain_text("Own words here")
    button(page).click()
    until(lambda: len(site.engine.bodies) == 3, 5)
    assert site.engine.bodies[-1]["messages"][-1]["content"] == "Own words here"
    expect(page.locator(BOT).first).to_contain_text("Own words hereword3")
    expect(button(page)).to_be_visible()
    page.get_by_role("button", name="Retry").click()
    until(lambda: len(site.engine.bodies) == 4, 5)
    assert site.engine.bodies[3]["messages"] == site.engine.bodies[0]["messages"]
    # The button of the answer before stays until the new one grows: this one has ended.
    expect(page.locator("#bot .thought-group").last).to_contain_text("· 5 tokens")
    expect(button(page)).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#bot [data-testid=user]")).to_have_count(0)
    expect(button(page)).to_have_count(0)
    expect(page.locator("#msg textarea")).to_have_value("hello there")


@pytest.mark.browser
@pytest.mark.parametrize("way", ["reload", "another conversation"])
def test_leaving_while_it_goes_on(
    open_page: Callable[..., Any], site: Site, watch: Watch, way: str
) -> None:
    page = open_page()
    cap(page, "5")
    ask(page, "a long one")
    expect(button(page)).to_be_visible()
    page.wait_for_function("JSON.stringify(localStorage).includes('word4 ')")
    cap(page, "")
    button(page).click()
    expect(page.locator(BOT).first).to_contain_text("word9 ")
    assert site.engine.running == 1
    if way == "reload":
        page.reload()
        ready(page)
        watch.forgive(*LEAVING)
        expect(page.locator(BOT).first).to_contain_text("word4")  # what was complete before
    else:
        page.get_by_role("button", name="New conversation").click()
        expect(page.locator("#bot [data-testid=user]")).to_have_count(0)
        page.wait_for_function("JSON.stringify(localStorage).includes('word9 ')")
        page.get_by_role("button", name="a long one", exact=True).click()
        expect(page.locator(BOT).first).to_contain_text("word9")
    until(lambda: site.engine.running == 0, 2.0)
    cap(page, "5")
    button(page).click()
    until(lambda: len(site.engine.bodies) == 3, 5)
    words = site.engine.bodies[-1]["messages"][-1]["content"].split()
    assert words == [f"word{i}" for i in range(len(words))]
    expect(page.locator(BOT).first).to_contain_text(f"word{len(words) + 4}")


@pytest.mark.browser
def test_two_tabs_go_on_alone(open_page: Callable[..., Any], site: Site) -> None:
    one = open_page()
    two = open_page(context=one.context)
    for page, question in ((one, "long from one"), (two, "long from two")):
        cap(page, "3")
        ask(page, question)
        expect(button(page)).to_be_visible()
    cap(one, "")
    button(one).click()
    expect(one.locator(BOT).first).to_contain_text("word6 ")
    expect(two.locator(BOT).first).to_contain_text("word2")
    expect(two.locator(BOT).first).not_to_contain_text("word3")
    button(two).click()
    expect(two.locator("#bot .thought-group").last).to_contain_text("· 6 tokens")
    assert site.engine.bodies[-1]["messages"][0]["content"] == "long from two"
    assert site.engine.running == 1
    one.get_by_role("button", name="Stop", exact=True).click()
    until(lambda: site.engine.running == 0, 1.0)
    expect(button(one)).to_be_visible()


@pytest.mark.browser
def test_a_full_engine_and_a_wrong_setting_lose_nothing(
    open_page: Callable[..., Any], site: Site
) -> None:
    page = open_page()
    cap(page, "5")
    ask(page, "hello there")
    expect(button(page)).to_be_visible()
    cap(page, "none")
    button(page).click()
    expect(page.get_by_text("Max tokens is 'none'")).to_be_visible()
    assert len(site.engine.bodies) == 1
    cap(page, "5")
    site.engine.full = True
    button(page).click()
    expect(page.locator("#bot")).to_contain_text("queue is full")
    expect(page.locator(BOT).first).to_contain_text("word4")
    site.engine.full = False
    button(page).click()
    expect(page.locator("#bot .thought-group").last).to_contain_text("· 10 tokens")
    expect(page.locator("#bot")).not_to_contain_text("queue is full")


def test_a_refusal_is_said_without_the_name_of_its_request() -> None:
    said = explain(RequestError("request 'chatcmpl-1': the prompt has 9 tokens"))
    assert said == "The prompt has 9 tokens"


def test_a_single_token_is_said_as_one() -> None:
    once = Stats(total_s=0.5, prompt_tokens=1, completion_tokens=1, finish_reason="length")
    message = Message(role="assistant", text="Hi", stats=once)
    *_, line = display(talks.add(ASKED, message))
    assert line["metadata"]["title"].startswith("1 token ·")
    assert "Prompt: 1 token, none cached" in line["content"][0]["text"]
    assert "Answer: 1 token in 500 ms" in line["content"][0]["text"]
