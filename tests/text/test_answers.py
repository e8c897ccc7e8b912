"""Reasoning and tool calls: the same whatever the pieces are in which an answer arrives."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.answers import ReasoningSplitter, ToolCall, ToolCallParser, opens_reasoning

CUTS = st.lists(st.integers(0, 300), max_size=12)
FAST = settings(deadline=None)


def parts(text: str, cuts: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(bounds)]


def split(text: str, cuts: list[int], *, inside: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(inside=inside)
    found = [*(splitter.push(part) for part in parts(text, cuts)), splitter.flush()]
    return "".join(r for r, _ in found), "".join(c for _, c in found)


def parse(text: str, cuts: list[int]) -> tuple[str, list[ToolCall]]:
    parser = ToolCallParser()
    found = [*(parser.push(part) for part in parts(text, cuts)), parser.flush()]
    return "".join(c for c, _ in found), [call for _, calls in found for call in calls]


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nWhy?\n\nSo.\n</think>\n\nYes.\n", False, "Why?\n\nSo.", "Yes.\n"),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("\n<think>a</think>b", False, "a", "b"),
        ("Why?\n</think>\n\nYes.", True, "Why?", "Yes."),
        ("\n\nWhy?\n", True, "Why?", ""),
        ("<think>never ends </thin", False, "never ends </thin", ""),
        ("Plain <think>not reasoning</think>.", False, "", "Plain <think>not reasoning</think>."),
        ("<think>a</think>b</think><think>c", False, "a", "b</think><think>c"),
        ("<thin", False, "", "<thin"),
        ("<thinking>x", False, "", "<thinking>x"),
        ("  \n", False, "", "  \n"),
        ("", False, "", ""),
    ],
)
@FAST
@given(cuts=CUTS)
def test_reasoning(text: str, inside: bool, reasoning: str, content: str, cuts: list[int]) -> None:
    assert split(text, cuts, inside=inside) == (reasoning, content)


@FAST
@given(
    text=st.lists(
        st.sampled_from(["<think>", "</think>", "<thi", "</", "\n", "a", " ", "<"]), max_size=12
    ).map("".join),
    cuts=CUTS,
    inside=st.booleans(),
)
def test_reasoning_does_not_depend_on_the_pieces(text: str, cuts: list[int], inside: bool) -> None:
    assert split(text, cuts, inside=inside) == split(text, [], inside=inside)


def test_reasoning_is_not_held_back_longer_than_it_must() -> None:
    splitter = ReasoningSplitter()
    assert splitter.push("<think>\nab") == ("ab", "")
    assert splitter.push(" c\n") == (" c", "")
    assert splitter.push("d</th") == ("\nd", "")
    assert splitter.push("ere") == ("</there", "")
    assert splitter.push("</think>\nx") == ("", "x")


def test_reasoning_is_taken_up_again() -> None:
    for said, new, told in (
        ("<think>\nIt is", " so.\n</think>\n\nYes.", (" so.", "Yes.")),
        ("<think>\nIt is\n", "so.", ("so.", "")),
        ("<think>\nIt is </thi", "nk>Yes.", ("", "Yes.")),
        ("<think>\nIt is </thi", "ng>", ("ng>", "")),
        ("<think>\nIt is so.\n</think>", "\n\nYes.", ("", "Yes.")),
        ("<think>\nIt is so.\n</think>\n\nYe", "s. <think>", ("", "s. <think>")),
        ("Ye", "<think>s", ("", "<think>s")),
        ("\n", "<think>\nIt is</think>so", ("It is", "so")),
    ):
        splitter = ReasoningSplitter()
        splitter.resume(said)
        found = [*(splitter.push(letter) for letter in new), splitter.flush()]
        assert ("".join(r for r, _ in found), "".join(c for _, c in found)) == told


def upper(text: str) -> str:
    return "".join(letter for letter in text if letter.isupper())


@FAST
@given(
    said=st.lists(st.sampled_from(["<think>", "</think>", "</thi", "\n", "a", " "]), max_size=8),
    new=st.lists(st.sampled_from(["<think>", "</think>", "nk>", "\n", "A", " "]), max_size=8),
    inside=st.booleans(),
)
def test_what_was_said_is_not_told_again(said: list[str], new: list[str], inside: bool) -> None:
    """Letters of ``new`` are capitals: all of them are told, where one answer has them."""
    before, after = "".join(said), "".join(new)
    splitter = ReasoningSplitter(inside=inside)
    splitter.resume(before)
    reasoning, content = (
        "".join(both) for both in zip(splitter.push(after), splitter.flush(), strict=True)
    )
    assert "a" not in reasoning + content
    whole = split(before + after, [], inside=inside)
    assert (upper(reasoning), upper(content)) == (upper(whole[0]), upper(whole[1]))


def test_prompts_that_open_reasoning() -> None:
    assert opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opens_reasoning("<|im_start|>assistant\n")


def call(name: str, **arguments: object) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


F = ToolCall("f", "{}")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (call("f"), "", [F]),
        (f"Let me see.\n\n{call('f')}", "Let me see.", [F]),
        (f"{call('f')}\n{call('g', a=1)}\n", "", [F, ToolCall("g", '{"a": 1}')]),
        (f"a {call('f')}\n{call('f')}\n b\n", "a b\n", [F, F]),
        (f"\n{call('f')} b", "b", [F]),
        (
            call("f", text='say "</tool_call>" \\ é'),
            "",
            [ToolCall("f", '{"text": "say \\"</tool_call>\\" \\\\ é"}')],
        ),
        ('<tool_call>{"name": "f"}</tool_call>', "", [F]),
        ('<tool_call>{"name": "f", "arguments": {}}', "", [F]),  # the model stopped early
        ("<tool_call>{bad}</tool_call> x", "<tool_call>{bad}</tool_call> x", []),
        ("<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ('<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>', []),
        (
            '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
            '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
            [],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
            [],
        ),
        (f"x\n<tool_call>{{</tool_call>\n{call('f')}", "x\n<tool_call>{</tool_call>", [F]),
        (f"x\n{call('f')} <tool_call>{{</tool_call>", "x\n<tool_call>{</tool_call>", [F]),
        ('a <tool_call>{"name": "f', 'a <tool_call>{"name": "f', []),
        ("a <tool_ca", "a <tool_ca", []),
        ("a < b \n", "a < b \n", []),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", None, []),
    ],
)
def test_tool_calls(text: str, content: str | None, calls: list[ToolCall]) -> None:
    assert parse(text, []) == (text if content is None else content, calls)
    assert parse(text, list(range(min(len(text), 400)))) == (
        text if content is None else content,
        calls,
    )


@FAST
@given(
    text=st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                call("f"),
                call("g", a="</tool_call>"),
                "<to",
                "\n",
                "a",
                '"',
                "{",
                "\\",
                " ",
            ]
        ),
        max_size=8,
    ).map("".join),
    cuts=CUTS,
)
def test_tool_calls_do_not_depend_on_the_pieces(text: str, cuts: list[int]) -> None:
    content, calls = parse(text, cuts)
    whole, expected = parse(text, [])
    assert (content, calls) == (whole, expected)


def test_content_is_not_held_back_longer_than_it_must() -> None:
    parser = ToolCallParser()
    assert parser.push("a <") == ("a", ())
    assert parser.push("b") == (" <b", ())
    assert parser.push(" <tool_call>{}") == ("", ())
    assert parser.push("</tool_call>c") == (" <tool_call>{}</tool_call>c", ())


def resumed(said: str, new: str) -> tuple[str, list[ToolCall]]:
    parser = ToolCallParser()
    parser.resume(said)
    found = [*(parser.push(letter) for letter in new), parser.flush()]
    return "".join(c for c, _ in found), [call for _, calls in found for call in calls]


@pytest.mark.parametrize(
    ("said", "new", "content", "calls"),
    [
        ("Paris is ", "nice.", "nice.", []),
        ("Paris is", " nice.", " nice.", []),
        ("a <", "b", "b", []),
        ("a <tool_c", f"all>{call('f')[11:]}", "", [F]),
        ('Yes.\n<tool_call>\n{"name": "f", "argu', 'ments": {}}\n</tool_call>', "", [F]),
        ('Yes.\n<tool_call>\n{"name": "f", "argu', "ments!</tool_call>", "ments!</tool_call>", []),
        (f"{call('f')} ", f"A {call('f')}", "A", [F]),
        (f"{call('f')}\n<tool_call>", "A</tool_call>", "A</tool_call>", []),
    ],
)
def test_tool_calls_are_taken_up_again(
    said: str, new: str, content: str, calls: list[ToolCall]
) -> None:
    assert resumed(said, new) == (content, calls)


PARTS = ["<tool_call>", "</tool_call>", "<to", "ol_call>", call("f"), "\n", '"', "{", " "]


@FAST
@given(
    said=st.lists(st.sampled_from([*PARTS, "z"]), max_size=6).map("".join),
    new=st.lists(st.sampled_from([*PARTS, "A"]), max_size=6).map("".join),
)
def test_what_was_said_before_a_call_is_not_told_again(said: str, new: str) -> None:
    content, calls = resumed(said, new)
    whole, expected = parse(said + new, [])
    parser = ToolCallParser()
    _, known = parser.push(said)
    assert calls == expected[len(known) :]
    assert upper(content) == upper(whole)
    assert "z" not in content
