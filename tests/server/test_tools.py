"""Reasoning and tool calls over HTTP, with answers that the test writes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from infer.errors import RequestError
from infer.types import Request
from tests.server.fakes import ADDED, FakeModel, fake_tokenizer
from tests.server.harness import Running, serving

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
USER: Any = {"role": "user", "content": "Rain in Paris?"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Paris"}}\n</tool_call>'


class Script:
    """What the model says next, whoever asks."""

    def __init__(self) -> None:
        self.tokenizer = fake_tokenizer()
        self.text = ""
        self.prompts: list[str] = []

    def __call__(self, request: Request, index: int) -> Iterable[int]:
        prompt = self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        if prompt not in self.prompts:
            self.prompts.append(prompt)
        return self.tokenizer.encode(self.text, add_special_tokens=False)


@pytest.fixture(scope="module")
def script() -> Script:
    return Script()


@pytest.fixture(scope="module")
def server(script: Script) -> Iterator[Running]:
    with serving(FakeModel(reply=script)) as running:
        yield running


@pytest.fixture
def client(server: Running, script: Script) -> Iterator[openai.OpenAI]:
    script.prompts.clear()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def both(client: openai.OpenAI, **body: Any) -> tuple[dict[str, Any], str]:
    """The message and finish reason of one request; streaming and not must agree on them."""
    whole = client.chat.completions.create(model="fake", messages=[USER], **body).choices[0]
    message = whole.message.model_dump()
    message = {k: message.get(k) for k in ("content", "reasoning_content", "tool_calls")}
    parts: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = None
    stream: Any = client.chat.completions.create(model="fake", messages=[USER], stream=True, **body)
    for chunk in stream:
        (choice,) = chunk.choices
        delta = choice.delta.model_dump()
        for name in ("content", "reasoning_content"):
            parts[name] += delta.get(name) or ""
        parts["tool_calls"] += delta.get("tool_calls") or []
        reason = choice.finish_reason or reason
    assert parts["content"] == (message["content"] or "")
    assert parts["reasoning_content"] == (message["reasoning_content"] or "")
    calls = message["tool_calls"] or []
    assert [c["function"] for c in parts["tool_calls"]] == [c["function"] for c in calls]
    assert [c["index"] for c in parts["tool_calls"]] == list(range(len(calls)))
    assert reason == whole.finish_reason
    return message, whole.finish_reason


def test_reasoning(client: openai.OpenAI, script: Script) -> None:
    script.text = "<think>\nLet me see.\n</think>\n\nYes, it rains."
    message, reason = both(client)
    assert message["reasoning_content"] == "Let me see."
    assert message["content"] == "Yes, it rains."
    assert reason == "stop"


def test_thinking_can_be_switched_off(client: openai.OpenAI, script: Script) -> None:
    script.text = "Yes."
    message, _ = both(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert message["content"] == "Yes."
    assert message["reasoning_content"] is None
    assert script.prompts[0].endswith("<think>\n\n</think>\n\n")


def test_tool_calls(client: openai.OpenAI, script: Script) -> None:
    script.text = f"I look it up.\n{CALL}\n{CALL.replace('Paris', 'Rome')}"
    message, reason = both(client, tools=[WEATHER])
    assert message["content"] == "I look it up."
    assert reason == "tool_calls"
    calls = message["tool_calls"]
    assert [json.loads(c["function"]["arguments"]) for c in calls] == [
        {"town": "Paris"},
        {"town": "Rome"},
    ]
    assert {c["function"]["name"] for c in calls} == {"weather"}
    assert len({c["id"] for c in calls}) == 2
    assert "The weather in a town" in script.prompts[0]


def test_calls_are_text_without_tools(client: openai.OpenAI, script: Script) -> None:
    script.text = CALL
    for body in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        script.prompts.clear()
        message, reason = both(client, **body)
        assert message["content"] == CALL
        assert message["tool_calls"] is None
        assert reason == "stop"
        assert "The weather" not in script.prompts[0]


def test_a_malformed_call_stays_content(client: openai.OpenAI, script: Script) -> None:
    script.text = '<tool_call>\n{"name": "weather", "arguments": {"town": \n</tool_call>'
    message, reason = both(client, tools=[WEATHER])
    assert message["content"] == script.text
    assert reason == "stop"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_call_can_be_asked_for(client: openai.OpenAI, script: Script, choice: Any) -> None:
    opening = CALL[: CALL.index("weather" if choice == "required" else '{"town"')]
    script.text = CALL.removeprefix(opening)
    message, reason = both(client, tools=[WEATHER], tool_choice=choice)
    assert script.prompts[0].endswith(opening)
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["weather"]
    assert not message["content"]
    assert reason == "tool_calls"


def test_a_conversation_with_calls_goes_back_to_the_model(
    client: openai.OpenAI, script: Script
) -> None:
    script.text = "22 degrees."
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages: Any = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "22 <|im_end|>" + ADDED[2]},
    ]
    answer = client.chat.completions.create(model="fake", messages=messages, tools=[WEATHER])
    assert answer.choices[0].message.content == "22 degrees."
    # What a tool result spells is text to the model, not a control token.
    ids = client.post("/../tokenize", cast_to=object, body={"messages": messages})
    assert ids["tokens"].count(257) == 3  # type: ignore[index]


def test_tools_that_the_template_would_not_show_are_refused() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer = replace(fake_tokenizer(), chat_templates={"default": template})
    with (
        serving(tokenizer=tokenizer) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):

        def ask(**choice: Any) -> Any:
            return client.chat.completions.create(
                model="fake", messages=[USER], tools=[WEATHER], max_tokens=2, **choice
            )

        for choice in ({}, {"tool_choice": "required"}):
            with pytest.raises(openai.BadRequestError, match="chat template") as caught:
                ask(**choice)
            assert caught.value.param == "tools"
        assert ask(tool_choice="none").choices
        body = {"messages": [USER], "tools": [WEATHER]}
        tokenized = httpx.post(f"{running.url}/tokenize", json=body, trust_env=False)
        assert tokenized.status_code == 400
    with pytest.raises(RequestError, match="chat template") as offline:
        tokenizer.encode_chat([USER], tools=[WEATHER])
    assert offline.value.param == "tools"


def test_tools_without_messages_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tools need messages"):
        client.post("/../tokenize", cast_to=object, body={"prompt": "a", "tools": [WEATHER]})
