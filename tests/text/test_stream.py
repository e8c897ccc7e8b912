"""Incremental text: whole characters, stop strings over token boundaries, final tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infer.text import IncrementalDetokenizer, TextStream, stop_scan
from infer.tokenizer import Tokenizer
from infer.types import FinishReason, SamplingParams
from tests.text.conftest import Pair

ANY = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("é世🙂👍🏽 \n"))
STOPS = st.lists(st.text("ab\n世 ", min_size=1, max_size=4), min_size=1, max_size=4)


def pieces(stream: Any, ids: list[int], cuts: list[int]) -> list[str]:
    """Push ``ids`` in groups that end at ``cuts``."""
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [stream.push(ids[a:b]) for a, b in pairwise(bounds)]


# --- the detokenizer ----------------------------------------------------------------------------


@ANY
@given(text=TEXT, cuts=st.lists(st.integers(0, 1000), max_size=5), skip=st.booleans())
def test_pieces_join_to_the_whole_text(pair: Pair, text: str, cuts: list[int], skip: bool) -> None:
    ids = pair.ours.encode(text)
    stream = IncrementalDetokenizer(pair.ours, skip_special_tokens=skip)
    parts = [*pieces(stream, ids, cuts), stream.flush()]
    expected = pair.theirs.decode(ids, skip_special_tokens=skip)
    if "\ufffd" in expected and "\ufffd" not in text:  # unknown characters differ in number
        expected = pair.ours.decode(ids, skip_special_tokens=skip)
    assert "".join(parts) == expected
    # Of a valid text no piece holds half a character, and nothing is left for the end.
    if "\ufffd" not in expected:
        assert not any("\ufffd" in part for part in parts)
        assert parts[-1] == ""


@ANY
@given(data=st.data())
def test_any_ids_join_to_the_whole_text(pair: Pair, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, pair.ours.vocab_size + 5), max_size=30))
    stream = IncrementalDetokenizer(pair.ours)
    parts = [stream.push([token_id]) for token_id in ids]
    assert "".join([*parts, stream.flush()]) == pair.ours.decode(ids)


def test_a_character_comes_when_it_is_whole(qwen: Pair) -> None:
    ids = qwen.ours.encode("🙂")
    assert len(ids) > 1, "the test needs a character of several tokens"
    stream = IncrementalDetokenizer(qwen.ours)
    assert [stream.push([token_id]) for token_id in ids] == [""] * (len(ids) - 1) + ["🙂"]
    assert stream.flush() == ""


def test_half_a_character_at_the_end(qwen: Pair) -> None:
    stream = IncrementalDetokenizer(qwen.ours)
    assert stream.push(qwen.ours.encode("a🙂")[:-1]) == "a"
    assert stream.flush() == "\ufffd"


def test_work_per_token_does_not_grow(qwen: Pair) -> None:
    """What a stream keeps is bounded, however long the text and its broken beginnings are."""
    broken = qwen.ours.encode("🙂")[:-1]
    stream = TextStream(qwen.ours, SamplingParams(stop=("x" * 50,)))
    for _ in range(2000):
        stream.push(broken)
        assert len(stream._tail) <= 50
        assert len(stream._utf8.getstate()[0]) < 4


# --- stop strings -------------------------------------------------------------------------------


def first_stop(text: bytes, stops: list[bytes], start: int = 0) -> tuple[int, int] | None:
    """By trying every end: (begin, end) of the first stop completed after ``start`` bytes."""
    for end in range(start + 1, len(text) + 1):
        found = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return min(found), end
    return None


@ANY
@given(
    text=st.text("ab\n世 ", max_size=40),
    stops=STOPS,
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_stop_scan_finds_what_a_search_of_the_whole_text_finds(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    data, needles = text.encode(), [stop.encode() for stop in stops]
    bounds = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    expected = first_stop(data, needles)
    tail = b""
    for begin, end in pairwise(bounds):
        match, tail = stop_scan(tail, data[begin:end], needles)
        if match is not None:
            stop_end = end - match.num_after
            assert expected == (stop_end - len(needles[match.index]), stop_end)
            return
        longest = max(
            (n for n in range(end + 1) if any(s[:n] == data[end - n : end] != s for s in needles)),
            default=0,
        )
        assert tail == data[end - longest : end]
    assert expected is None


def test_a_stop_inside_an_ignored_one_is_not_found_again() -> None:
    _, tail = stop_scan(b"", b"a", [b"a", b"ab"])
    match, tail = stop_scan(tail, b"c", [b"a", b"ab"])
    assert match is None
    assert tail == b""


def test_many_long_stops_stay_cheap() -> None:
    """An adversary's 16 stops of 1024 bytes against a text that nearly matches all the time."""
    stops = [b"a" * 1000 + bytes((index,)) * 24 for index in range(16)]
    tail = b""
    for _ in range(3000):
        match, tail = stop_scan(tail, b"a", stops)
        assert match is None
    assert len(tail) == 1000


# --- the stream against a model of the engine ---------------------------------------------------


@dataclass
class Generation:
    """What the engine would report for these tokens, decided token by token in the plainest way."""

    tokenizer: Tokenizer
    params: SamplingParams
    ids: list[int]
    eos: frozenset[int]
    kept: list[int] = field(default_factory=list)
    reason: FinishReason = FinishReason.LENGTH
    stop: str | int | None = None
    text: str = ""

    def run(self) -> Generation:
        table = self.tokenizer.token_bytes
        stops = [stop.encode() for stop in self.params.stop]
        raw, end = b"", None
        for token_id in self.ids:
            before = len(raw)
            self.kept.append(token_id)
            raw += table[token_id]
            if len(self.kept) <= self.params.min_tokens:
                continue
            if token_id in self.eos or token_id in self.params.stop_token_ids:
                self.reason = FinishReason.STOP
                self.stop = None if token_id in self.eos else token_id
                break
            end = first_stop(raw, stops, before)
            if end is not None:
                self.reason = FinishReason.STOP
                length = end[1] - end[0]
                self.stop = next(
                    s
                    for s in self.params.stop
                    if raw[: end[1]].endswith(s.encode()) and len(s.encode()) == length
                )
                break
        self.text = self._text(end)
        return self

    def _text(self, end: tuple[int, int] | None) -> str:
        """The shown bytes of the kept tokens, up to the stop."""
        include = self.params.include_stop_str_in_output
        ids = list(self.kept)
        if self.reason is FinishReason.STOP and not isinstance(self.stop, str) and not include:
            ids.pop()
        limit = None if end is None else end[1 if include else 0]
        shown, position = b"", 0
        for token_id in ids:
            data = self.tokenizer.token_bytes[token_id]
            cut = data if limit is None else data[: max(0, limit - position)]
            position += len(data)
            if not (self.params.skip_special_tokens and token_id in self.tokenizer.special_ids):
                shown += cut
        return shown.decode("utf-8", "replace")


@ANY
@given(data=st.data())
def test_stream_equals_the_text_up_to_the_stop(qwen: Pair, data: st.DataObject) -> None:
    ours = qwen.ours
    alphabet = [*ours.encode("ab\n世 the world"), *ours.encode("<|im_end|><|im_start|><think>")]
    ids = data.draw(st.lists(st.sampled_from(alphabet), min_size=1, max_size=25))
    params = SamplingParams(
        stop=tuple(data.draw(st.lists(st.text("ab\n世 t<|", min_size=1, max_size=3), max_size=3))),
        stop_token_ids=tuple(data.draw(st.lists(st.sampled_from(alphabet), max_size=2))),
        include_stop_str_in_output=data.draw(st.booleans()),
        skip_special_tokens=data.draw(st.booleans()),
        min_tokens=data.draw(st.integers(0, 5)),
    )
    eos = frozenset(ours.eos_token_ids) if data.draw(st.booleans()) else frozenset[int]()
    expected = Generation(ours, params, ids, eos).run()
    stream = TextStream(ours, params)
    cuts = data.draw(st.lists(st.integers(0, 30), max_size=6))
    parts = pieces(stream, expected.kept, cuts)
    parts.append(stream.finish(expected.reason, expected.stop))
    assert "".join(parts) == expected.text
    if "\ufffd" not in expected.text:
        assert not any("\ufffd" in part for part in parts)


def test_a_stop_token_that_also_completes_a_stop_string(qwen: Pair) -> None:
    """The engine reports the token; included, it is included whole."""
    (token,) = qwen.ours.encode(" the")
    params = SamplingParams(stop=("t",), stop_token_ids=(token,), include_stop_str_in_output=True)
    stream = TextStream(qwen.ours, params)
    assert stream.push([token]) == ""
    assert stream.finish(FinishReason.STOP, token) == " the"


def test_text_that_cannot_begin_a_stop_is_not_held_back(qwen: Pair) -> None:
    stream = TextStream(qwen.ours, SamplingParams(stop=("END",)))
    for token_id in qwen.ours.encode("hello world"):
        assert stream.push([token_id]) == qwen.ours.token_bytes[token_id].decode()


def test_text_that_could_begin_a_stop_is_held_back(qwen: Pair) -> None:
    stream = TextStream(qwen.ours, SamplingParams(stop=("abc",)))
    a, b, c, d = (qwen.ours.encode(letter) for letter in "abcd")
    assert [stream.push(ids) for ids in (a, b, d, a, b)] == ["", "", "abd", "", ""]
    assert stream.push(c) == ""
    assert stream.finish(FinishReason.STOP, "abc") == ""


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORT])
def test_held_text_comes_at_the_end(qwen: Pair, reason: FinishReason) -> None:
    stream = TextStream(qwen.ours, SamplingParams(stop=("abc",)))
    assert stream.push(qwen.ours.encode("ab")) == ""
    assert stream.finish(reason) == "ab"


def test_a_stop_that_is_a_special_token(qwen: Pair) -> None:
    """Stops are matched before special tokens are hidden, so their spelling works as a stop."""
    params = SamplingParams(stop=("<|endoftext|>",))
    stream = TextStream(qwen.ours, params)
    assert stream.push(qwen.ours.encode("a<|endoftext|>")) == "a"
    assert stream.finish(FinishReason.STOP, "<|endoftext|>") == ""


def test_the_first_space_of_a_sentencepiece_text(llama2: Pair) -> None:
    ids = llama2.ours.encode("the world", add_special_tokens=False)
    for follows, expected in ((False, "the world"), (True, " the world")):
        stream = TextStream(llama2.ours, SamplingParams(), follows_text=follows)
        text = "".join(stream.push([token_id]) for token_id in ids)
        assert text + stream.finish(FinishReason.LENGTH) == expected


@ANY
@given(text=TEXT)
def test_plain_stream_equals_transformers(pair: Pair, text: str) -> None:
    ids = pair.ours.encode(text)
    expected = pair.theirs.decode(ids, skip_special_tokens=True)
    if pair.ours.decode(ids) != expected:
        return  # an unknown character: the two write different numbers of U+FFFD
    stream = TextStream(pair.ours, SamplingParams())
    parts = [stream.push([token_id]) for token_id in ids]
    assert "".join(parts) + stream.finish(FinishReason.LENGTH) == expected
