"""Traces on disk: replayed, drawn and exported, through the command line."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from infer.cli import main
from infer.trace.files import read
from infer.trace.perfetto import chrome_trace
from infer.trace.replay import differences
from infer.trace.view import draw
from tests.trace.runs import case, kinds


def recorded(tmp_path: Path, *arguments: str) -> Path:
    path = tmp_path / "trace.jsonl"
    assert main(["trace", *arguments, "--out", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def chunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("chunk"), "--case", "chunk")


def test_a_file_is_one_object_a_line(chunk: Path) -> None:
    lines = [json.loads(line) for line in chunk.read_text().splitlines()]
    assert [e["event"] for e in lines[:3]] == ["trace", "submitted", "submitted"]
    without = [{k: v for k, v in e.items() if k not in ("t", "host_s", "device_s")} for e in lines]
    known = [
        {k: v for k, v in e.items() if k not in ("t", "host_s", "device_s")} for e in case("chunk")
    ]
    assert without == known


def test_replay_agrees(chunk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "replay", str(chunk)]) == 0
    assert "the same" in capsys.readouterr().out


def test_replay_tells_what_changed(
    chunk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [json.loads(line) for line in chunk.read_text().splitlines()]
    inputs = next(e for e in events if e["event"] == "inputs" and e["step"] == 1)
    inputs["slot_mapping"][3] += 1
    forged = tmp_path / "forged.jsonl"
    forged.write_text("".join(json.dumps(e) + "\n" for e in events))
    assert main(["trace", "replay", str(forged)]) == 1
    assert "step 1, inputs, slot_mapping[3]: 516 recorded, 515 now" in capsys.readouterr().out


def test_replay_notices_a_cut_file(chunk: Path) -> None:
    events = read(str(chunk))
    assert differences(events[:-1], events)
    assert differences(events, events[:-2])
    assert not differences(events, events)


def test_tokens_are_those_of_any_engine(chunk: Path) -> None:
    """Another budget cuts the prompts elsewhere: other steps, the same tokens."""
    other = ["trace", "replay", str(chunk), "--max-num-batched-tokens", "200"]
    assert main(other) == 1
    assert main([*other, "--tokens-only"]) == 0


def test_tokens_only_still_compares_tokens() -> None:
    events = list(case("chunk"))
    changed = json.loads(json.dumps(events))
    kinds(changed, "finished")[0]["token_ids"][-1] += 1
    assert differences(events, changed, tokens_only=True)


def test_view(chunk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "view", str(chunk)]) == 0
    text = capsys.readouterr().out
    for part in ("cu_seqlens_q  [0, 188, 220]", "cu_seqlens_k  [0, 700, 732]", "512", "finished"):
        assert part in text
    assert main(["trace", "view", str(chunk), "--step", "1"]) == 0
    one = capsys.readouterr().out
    assert "step 1\n" in one and "step 2\n" not in one
    assert "gave its blocks back" in draw(case("preempt"))
    assert "lm_head" in draw(case("lifecycle", True))


def test_perfetto(tmp_path: Path) -> None:
    path = recorded(tmp_path, "--case", "walk-b")
    out = tmp_path / "walk.json"
    assert main(["trace", "perfetto", str(path), "--out", str(out)]) == 0
    found = json.loads(out.read_text())["traceEvents"]
    spans = [e for e in found if e["ph"] == "X"]
    steps = [e for e in spans if e["pid"] == 1]
    assert [e["name"].split(":")[0] for e in steps] == [f"step {i}" for i in range(5)]
    ends = [(e["ts"], e["ts"] + e["dur"]) for e in steps]
    assert all(a[1] <= b[0] + 1e-3 for a, b in itertools.pairwise(ends)), "steps do not overlap"
    names = {
        e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name" and e["pid"] == 2
    }
    per_request = {
        name: sum(e["tid"] == t for e in spans if e["pid"] == 2) for t, name in names.items()
    }
    assert per_request == {"R1": 2, "R2": 5}
    counters = [e["args"] for e in found if e["ph"] == "C" and e["name"] == "requests"]
    assert counters[-1] == {"running": 0, "waiting": 0}


def test_perfetto_of_choices_and_preemption() -> None:
    found = json.loads(chrome_trace(case("preempt")))["traceEvents"]
    assert [e["name"] for e in found if e["ph"] == "i"][-1] == "preempted"


def test_prompts_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recorded(
        tmp_path,
        *("--prompt-ids", "[1, 2, 3]", "--prompt-ids", "[4, 5]", "--max-tokens", "2"),
        *("--model", "tiny", "--num-blocks", "8"),
    )
    events: list[Any] = read(str(path))
    assert [e["num_prompt_tokens"] for e in kinds(tuple(events), "submitted")] == [3, 2]
    assert main(["trace", "replay", str(path)]) == 0


def test_a_random_preset_is_replayed_from_its_name(tmp_path: Path) -> None:
    """The header has what it takes: name, kind of weights, dtype and every engine option."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": 300,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "rms_norm_eps": 1e-5,
            }
        )
    )
    options = ("--model", str(tmp_path), "--load-format", "random", "--num-blocks", "9")
    path = recorded(tmp_path, "--prompt-ids", "[1, 2, 3]", *options)
    assert main(["trace", "replay", str(path)]) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--case", "nothing"], "choose walk-a"),
        ([], "there is nothing to trace"),
        (["replay"], "needs a FILE"),
        (["view", "/nonexistent"], "cannot read"),
        (["record", "file"], "--out file"),
        (["--case", "chunk", "--prompt", "a"], "not both"),
        (["--prompt-ids", "[1.5]", "--model", "tiny"], "JSON list of token ids"),
        (["--prompt", "a", "--model", "tiny"], "has no tokenizer"),
        (["--case", "walk-a", "--out", "/nonexistent/file"], "cannot write"),
    ],
)
def test_mistakes(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{}\n", "[]\n", "not json\n", '{"event": "trace"}\n'])
def test_no_trace(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    assert main(["trace", "view", str(path)]) == 2
    assert "error:" in capsys.readouterr().err
