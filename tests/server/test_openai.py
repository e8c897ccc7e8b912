"""The ``openai`` package against a running server, and the documents that other clients read."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.fakes import FakeModel, expected
from tests.server.harness import Running, serving


def text(tokens: list[int]) -> str:
    return bytes(tokens).decode()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(FakeModel(depth=1), served_model_name=("m", "alias")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False) as made:
        yield made


HELLO: list[Any] = [{"role": "user", "content": "hello"}]
# The prompt of HELLO ends with the newline after "assistant".
REPLY = [10]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="m", messages=HELLO, max_tokens=6)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == text(expected(REPLY, 6))
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.model == "m"
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6
    details = answer.usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens == 1


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="alias",
        messages=HELLO,
        max_completion_tokens=9,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    texts, reasons = {0: "", 1: ""}, {}
    roles = []
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.delta.role:
            roles.append(choice.index)
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert texts == {i: text(expected(REPLY, 9, i)) for i in (0, 1)}
    assert reasons == {0: "length", 1: "length"}
    assert sorted(roles) == [0, 1]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 18
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_logprobs(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="m", messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=2
    )
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == list(text(expected(REPLY, 3)))
    assert [entry.bytes for entry in logprobs.content] == [[t] for t in expected(REPLY, 3)]
    assert [top.token for top in logprobs.content[0].top_logprobs] == [
        text(expected(REPLY, 1)),
        "A",
    ]
    stream = client.chat.completions.create(
        model="m", messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=2, stream=True
    )
    streamed = [
        entry
        for chunk in stream
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or ()
    ]
    assert streamed == logprobs.content


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="m", prompt="abc")
    assert answer.choices[0].text == text(expected(b"abc", 16))  # OpenAI's default length
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"


def test_completion_of_many_prompts(client: openai.OpenAI) -> None:
    prompts: list[Any] = [["ab", "cd"], [[97, 98], [99, 100]]]
    for prompt in prompts:
        answer = client.completions.create(model="m", prompt=prompt, max_tokens=4, n=2)
        assert [(c.index, c.text) for c in answer.choices] == [
            (0, text(expected(b"ab", 4, 0))),
            (1, text(expected(b"ab", 4, 1))),
            (2, text(expected(b"cd", 4, 0))),
            (3, text(expected(b"cd", 4, 1))),
        ]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 4
        stream = client.completions.create(model="m", prompt=prompt, max_tokens=4, n=2, stream=True)
        texts = dict.fromkeys(range(4), "")
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == {c.index: c.text for c in answer.choices}


def test_completion_of_token_ids_with_echo_and_legacy_logprobs(client: openai.OpenAI) -> None:
    """What lm-evaluation-harness sends and reads."""
    prompt = [104, 105, 106]
    answer = client.completions.create(
        model="m", prompt=prompt, max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234
    )
    (choice,) = answer.choices
    (new,) = expected(prompt, 1)
    assert choice.text == "hij" + chr(new)
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["h", "i", "j", chr(new)]
    assert logprobs.token_logprobs == [None, -1.0, -1.0, -0.5]
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] is None
    assert logprobs.top_logprobs[1:] == [{"i": -1.0}, {"j": -1.0}, {chr(new): -0.5}]


def test_echo_alone(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="m", prompt="abc", max_tokens=0, echo=True, logprobs=0)
    (choice,) = answer.choices
    assert choice.text == "abc"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "c"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    streamed = client.completions.create(
        model="m", prompt="abc", max_tokens=2, echo=True, stream=True
    )
    assert "".join(c.choices[0].text for c in streamed) == "abc" + text(expected(b"abc", 2))


def test_stop_strings_and_tokens(client: openai.OpenAI) -> None:
    tokens = expected(REPLY, 30)
    word = text(tokens[5:7])
    cut = client.chat.completions.create(model="m", messages=HELLO, stop=[word], max_tokens=30)
    assert cut.choices[0].message.content == text(tokens).split(word)[0]
    assert cut.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model="m", messages=HELLO, stop=word, max_tokens=30, stream=True
    )
    assert "".join(c.choices[0].delta.content or "" for c in stream) == text(tokens).split(word)[0]
    kept = client.chat.completions.create(
        model="m",
        messages=HELLO,
        max_tokens=30,
        extra_body={"stop_token_ids": [tokens[3]], "include_stop_str_in_output": True},
    )
    assert kept.choices[0].message.content == text(tokens[:4])


def test_vllm_bench_shape(http: httpx.Client) -> None:
    """The body that ``vllm bench serve`` and GuideLLM send, and the stream they read."""
    body = {
        "model": "m",
        "prompt": "abc",
        "repetition_penalty": 1.0,
        "max_tokens": 5,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "ignore_eos": True,
        "stop": None,
        "user": "somebody",
        "best_of": 1,
        "use_beam_search": False,
    }
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, last, rest = answer.text.split("\n\n")
    assert rest == ""
    assert last == "data: [DONE]"
    documents = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(c["text"] for d in documents for c in d["choices"]) == text(expected(b"abc", 5))
    counts = [d["usage"]["completion_tokens"] for d in documents]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert documents[-1]["choices"] == []


def test_curl(server: Running) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    body = json.dumps({"messages": HELLO, "max_tokens": 4, "stream": True})
    kind = "content-type: application/json"
    url = f"{server.url}/v1/chat/completions"
    run = subprocess.run(
        [curl, "-sN", "--noproxy", "*", url, "-H", kind, "-d", body],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.endswith("data: [DONE]\n\n")
    documents = [json.loads(line[6:]) for line in run.stdout.split("\n\n")[:-2]]
    parts = [d["choices"][0]["delta"].get("content", "") for d in documents]
    assert "".join(parts) == text(expected(REPLY, 4))


def test_guidellm_shape(http: httpx.Client) -> None:
    """The chat body that GuideLLM sends."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_tokens": 3,
        "max_completion_tokens": 3,
        "stop": None,
        "ignore_eos": True,
    }
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")


def test_prompt_logprobs(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "ab", "prompt_logprobs": 1}).json()
    own = {"98": {"logprob": -1.0, "rank": 1, "decoded_token": "b"}}
    assert answer["choices"][0]["prompt_logprobs"] == [None, own]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["m", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/name")
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="x")
    assert missing.value.code == "model_not_found"


def test_tokenize_and_detokenize(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    assert tokens["tokens"] == [104, 195, 169]
    assert tokens["count"] == 3
    assert tokens["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
    assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "hé"}
    chat = http.post("/tokenize", json={"messages": HELLO}).json()
    back = http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert back == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert http.post("/tokenize", json={}).status_code == 400
    assert http.post("/detokenize", json={"tokens": [-1]}).status_code == 400


def test_messages_of_parts_and_other_roles(http: httpx.Client) -> None:
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "22"},
    ]
    chat = http.post("/tokenize", json={"messages": messages}).json()
    back = http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert back.startswith(
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\na\nb<|im_end|>"
    )
    assert '"name": "weather"' in back


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
GOOD: dict[str, Any] = {"messages": HELLO, "max_tokens": 2}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": 1e9}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 2**40}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**70}, "seed"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"chat_template": "{{ 7 * 7 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": {"x": 1}}}, "chat_template_kwargs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": [{"type": "function", "function": {"name": "bad name"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"some_new_parameter": 1}, "some_new_parameter"),
        ({"timeout": -1}, "timeout"),
        ({"priority": 2**21}, "priority"),
        ({"best_of": 3}, "best_of"),
    ],
)
def test_refusals_name_the_parameter(
    http: httpx.Client, change: dict[str, Any], param: str
) -> None:
    answer = http.post("/v1/chat/completions", json={**GOOD, **change})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]


def test_null_and_neutral_parameters_change_nothing(http: httpx.Client) -> None:
    plain = http.post("/v1/chat/completions", json=GOOD).json()["choices"]
    nulls = dict.fromkeys(("stop", "seed", "tools", "guided_json", "logit_bias", "unknown"))
    neutral = {"user": "me", "metadata": {"a": "b"}, "length_penalty": 1.0, "store": True}
    assert (
        http.post("/v1/chat/completions", json={**GOOD, **nulls, **neutral}).json()["choices"]
        == plain
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "\\ud800 lone"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"prompt": []}',
        b'{"prompt": [[]]}',
        b'{"prompt": ""}',
        b'{"prompt": ["a", 1]}',
        b'{"prompt": [1, "a"]}',
        b'{"prompt": [-1]}',
        b'{"prompt": [99999999999999999999]}',
        b'{"prompt": [511, 512]}',
        b'{"prompt": {"a": 1}}',
        b'{"prompt": "x", "max_tokens": 0}',
    ],
)
def test_bad_bodies_are_the_clients_fault(http: httpx.Client, body: bytes) -> None:
    answer = http.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_deep_schemas_are_refused_or_rendered(http: httpx.Client) -> None:
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"a": deep}
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    answer = http.post("/v1/chat/completions", json={**GOOD, "tools": tools})
    assert answer.status_code in (200, 400)


def test_other_content_types_are_refused(http: httpx.Client) -> None:
    """A web page may send these anywhere without asking."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = http.post("/v1/completions", content=b"{}", headers={"content-type": kind})
        assert answer.status_code == 415


def test_unknown_routes_and_methods(http: httpx.Client) -> None:
    assert http.get("/nothing").json()["error"]["message"]
    assert http.get("/nothing").status_code == 404
    assert http.get("/v1/completions").status_code == 405
    for page in ("/docs", "/redoc"):
        assert http.get(page).status_code == 404
    assert http.get("/openapi.json").status_code == 200
