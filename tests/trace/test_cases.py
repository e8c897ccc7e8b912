"""The built-in cases against numbers that were worked out on paper."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from infer.config import ModelConfig
from infer.loading import load
from infer.modelconfig import model_config
from infer.presets import find_preset
from infer.trace.cases import CASES, case_setup
from infer.trace.record import record
from infer.trace.setup import arrival
from tests.trace.runs import at, case, kinds, scheduled, sequence


def lengths(events: Any, step: int, name: str) -> tuple[int, int, int, str]:
    after = sequence(at(events, step, "committed"), name)
    keys = ("num_tokens", "num_cached_tokens", "num_output_tokens", "status")
    return tuple(after[key] for key in keys)  # type: ignore[return-value]


def test_walk_a_one_prefill_and_two_decodes() -> None:
    events = case("walk-a")
    assert scheduled(events) == [{"R1": 3}, {"R1": 1}, {"R1": 1}]
    inputs = kinds(events, "inputs")
    assert [e["positions"] for e in inputs] == [[0, 1, 2], [3], [4]]
    assert [e["context_lens"] for e in inputs] == [[3], [4], [5]]
    assert lengths(events, 0, "R1") == (4, 3, 1, "running")
    assert lengths(events, 1, "R1") == (5, 4, 2, "running")
    assert lengths(events, 2, "R1") == (6, 0, 3, "finished")
    assert sequence(at(events, 2, "committed"), "R1")["block_table"] == []
    # A step's input is the token the step before it gave.
    (finished,) = kinds(events, "finished")
    assert [e["input_ids"] for e in inputs[1:]] == [[t] for t in finished["token_ids"][:2]]
    # Candidates are there before they are accepted.
    assert sequence(at(events, 0, "scheduled"), "R1")["num_tokens"] == 3
    assert at(events, 0, "sampled")["tokens"][0]["token_id"] == finished["token_ids"][0]


def test_walk_b_the_batch_shrinks_to_one() -> None:
    events = case("walk-b")
    both = {"R1": 1, "R2": 1}
    assert scheduled(events) == [{"R1": 3, "R2": 4}, both, {"R2": 1}, {"R2": 1}, {"R2": 1}]
    assert at(events, 0, "inputs")["cu_seqlens_q"] == [0, 3, 7]
    assert lengths(events, 0, "R1")[:2] == (4, 3)
    assert lengths(events, 0, "R2")[:2] == (5, 4)
    assert lengths(events, 1, "R1")[3] == "finished"
    free = [e["num_free_blocks"] for e in kinds(events, "committed")]
    assert free == [6, 7, 7, 7, 8]
    assert at(events, 4, "committed")["running"] == []


def test_walk_c_crosses_a_block_boundary() -> None:
    events = case("walk-c")
    (first,) = sequence(at(events, 0, "committed"), "R1")["block_table"]
    assert lengths(events, 0, "R1")[:2] == (257, 256)
    table = sequence(at(events, 1, "scheduled"), "R1")["block_table"]
    assert len(table) == 2 and table[0] == first
    assert [at(events, s, "inputs")["positions"] for s in (1, 2)] == [[256], [257]]
    assert [at(events, s, "inputs")["context_lens"] for s in (1, 2)] == [[257], [258]]
    slots = [at(events, s, "inputs")["slot_mapping"] for s in (1, 2)]
    assert slots == [[table[1] * 256], [table[1] * 256 + 1]]
    prefill = at(events, 0, "inputs")["slot_mapping"]
    assert prefill == list(range(first * 256, first * 256 + 256))
    assert lengths(events, 2, "R1")[0] == 259, "the last token has no KV and no slot"


def test_lifecycle() -> None:
    events = case("lifecycle")
    assert scheduled(events) == [{"R1": 64, "R2": 96}, {"R1": 1, "R2": 1}, {"R2": 1}]
    first, second = at(events, 0, "inputs"), at(events, 1, "inputs")
    assert first["cu_seqlens_q"] == first["cu_seqlens_k"] == [0, 64, 160]
    assert first["logits_rows"] == [63, 159]
    assert second["positions"] == [64, 96]
    assert second["context_lens"] == [65, 97]
    assert lengths(events, 0, "R1")[:2] == (65, 64)
    assert lengths(events, 0, "R2")[:2] == (97, 96)
    assert [e["kind"] for e in kinds(events, "scheduled")] == ["prefill", "decode", "decode"]
    outputs = {e["request_id"]: len(e["token_ids"]) for e in kinds(events, "finished")}
    assert outputs == {"R1": 2, "R2": 3}
    assert lengths(events, 1, "R1") == (66, 0, 2, "finished")


def test_chunk() -> None:
    events = case("chunk")
    assert scheduled(events)[:3] == [{"A": 512}, {"A": 188, "B": 32}, {"A": 1, "B": 1}]
    assert at(events, 0, "sampled")["tokens"] == [], "an intermediate chunk samples nothing"
    assert lengths(events, 0, "A") == (700, 512, 0, "running")
    second = at(events, 1, "inputs")
    assert len(second["input_ids"]) == 220
    assert second["cu_seqlens_q"] == [0, 188, 220]
    assert second["cu_seqlens_k"] == [0, 700, 732]
    assert second["positions"] == [*range(512, 700), *range(32)]
    assert (second["max_seqlen_q"], second["max_seqlen_k"]) == (188, 700)
    assert [len(table) for table in second["block_tables"]] == [3, 1]
    assert second["logits_rows"] == [187, 219]
    assert lengths(events, 1, "A")[:3] == (701, 700, 1)
    assert lengths(events, 1, "B")[:3] == (33, 32, 1)
    third = at(events, 2, "inputs")
    assert (third["positions"], third["context_lens"]) == ([700, 32], [701, 33])
    assert at(events, 2, "scheduled")["kind"] == "decode"
    assert lengths(events, 2, "A")[:2] == (702, 701)


def test_prefix() -> None:
    events = case("prefix")
    own = [
        e for e in kinds(events, "scheduled") if "Q" in [s["request_id"] for s in e["sequences"]]
    ]
    first = sequence(own[0], "Q")
    assert (first["num_cached_tokens"], first["num_scheduled_tokens"]) == (512, 108)
    inputs = at(events, own[0]["step"], "inputs")
    assert inputs["cu_seqlens_q"] == [0, 108]
    assert inputs["cu_seqlens_k"] == [0, 620]
    assert inputs["positions"] == list(range(512, 620))
    shared = sequence(at(events, 1, "scheduled"), "P")["block_table"][:2]
    assert first["block_table"][:2] == shared
    cached = {e["request_id"]: e["num_cached_tokens"] for e in kinds(events, "finished")}
    assert cached == {"P": 0, "Q": 512}


def test_a_prompt_of_exactly_the_shared_part_computes_its_last_block() -> None:
    setup = case_setup("prefix", "tiny", {}, {})
    first, second = setup.arrivals
    shared = replace(second.request, prompt_token_ids=first.request.prompt_token_ids[:512])
    setup = replace(setup, arrivals=(first, replace(second, request=shared)))
    events = tuple(record(load_tiny(), setup))
    (finished,) = [e for e in kinds(events, "finished") if e["request_id"] == "Q"]
    assert finished["num_cached_tokens"] == 256


def load_tiny() -> Any:
    from infer.trace.setup import load_model

    return load_model(case_setup("prefix", "tiny", {}, {}))


def test_preempt() -> None:
    events = case("preempt")
    assert scheduled(events)[:2] == [{"A": 4, "B": 4, "C": 4}, {"A": 1, "B": 1}]
    (event,) = kinds(events, "preempted")
    assert (event["step"], event["request_id"], event["num_tokens"]) == (1, "C", 5)
    after = sequence(at(events, 1, "committed"), "C")
    assert (after["status"], after["num_cached_tokens"], after["block_table"]) == (
        "preempted",
        0,
        [],
    )
    assert at(events, 1, "committed")["waiting"] == ["C"]
    again = next(e for e in kinds(events, "scheduled")[2:] if "C" in scheduled_names(e))
    assert sequence(again, "C")["num_scheduled_tokens"] == 5, "prompt and output are recomputed"
    ends = {e["request_id"]: e["num_preemptions"] for e in kinds(events, "finished")}
    assert ends == {"A": 0, "B": 0, "C": 1}
    assert all(len(e["token_ids"]) == 3 for e in kinds(events, "finished"))


def scheduled_names(event: dict[str, Any]) -> list[str]:
    return [s["request_id"] for s in event["sequences"]]


def test_refcount() -> None:
    events = case("refcount")
    shared = [str(b) for b in sequence(at(events, 0, "scheduled"), "P")["block_table"][:2]]
    counts = [[e["ref_counts"][b] for b in shared] for e in kinds(events, "committed")]
    changes = [c for i, c in enumerate(counts) if i == 0 or counts[i - 1] != c]
    assert changes == [[0, 0], [1, 1], [2, 2], [1, 1], [0, 0]]


@pytest.mark.parametrize("name", CASES)
def test_slots_follow_from_block_tables(name: str) -> None:
    """slot = block_table[position // block_size] * block_size + position % block_size."""
    events = case(name)
    size = events[0]["engine"]["block_size"]
    for inputs in kinds(events, "inputs"):
        tables = inputs["block_tables"]
        bounds = inputs["cu_seqlens_q"]
        for i, (start, end) in enumerate(itertools.pairwise(bounds)):
            positions = inputs["positions"][start:end]
            assert inputs["slot_mapping"][start:end] == [
                tables[i][p // size] * size + p % size for p in positions
            ]
            assert positions[-1] + 1 == inputs["context_lens"][i]
    live = [s for e in kinds(events, "committed") for s in e["sequences"]]
    for after in live:
        if after["status"] == "running" and after["num_output_tokens"]:
            assert after["num_tokens"] == after["num_cached_tokens"] + 1


def test_shapes_of_a_qwen3_layer() -> None:
    """One layer of Qwen3-0.6B on the lifecycle case: the widths of its projections."""
    preset = find_preset("qwen3-0.6b")
    assert preset is not None and preset.config is not None
    cfg: ModelConfig = replace(model_config(preset.config), num_layers=1)
    model = load(config=cfg, load_format="random", device="cpu", progress=False)
    events = tuple(record(model, case_setup("lifecycle", None, {}, {}), shapes=True))
    first, second = kinds(events, "shapes")[:2]
    named = {entry["name"]: entry for entry in first["tensors"]}
    assert named["qkv"]["output"] == [160, 4096]
    assert named["heads"]["q"] == [160, 16, 128]
    assert named["heads"]["k"] == named["heads"]["v"] == [160, 8, 128]
    assert named["o"]["output"] == [160, 1024]
    assert named["gate_up"]["output"] == [160, 6144]
    assert named["down"]["output"] == [160, 1024]
    assert named["lm_head"]["output"] == [2, 151_936]
    assert second["tensors"][0]["output"] == [2, 4096]


def test_shapes_change_no_token() -> None:
    plain, shaped = case("lifecycle"), case("lifecycle", True)
    assert kinds(plain, "finished") == kinds(shaped, "finished")
    layers = {entry["layer"] for entry in kinds(shaped, "shapes")[0]["tensors"]}
    assert layers == {0, 1, None}


def test_choices_share_a_prompt_and_part_by_copies() -> None:
    """Three choices: one prefill, one logits row, three tokens, two copies of a block."""
    setup = case_setup("walk-a", "tiny", {}, {"max_num_seqs": 4})
    wanted = arrival("R", range(10, 16), 3, n=3, temperature=1.0, seed=5)
    events = tuple(record(load_tiny(), replace(setup, arrivals=(wanted,))))
    assert scheduled(events)[0] == {"R": 6}
    first = at(events, 0, "sampled")["tokens"]
    assert [(t["choice"], t["position"]) for t in first] == [(0, 6), (1, 6), (2, 6)]
    assert len(at(events, 0, "inputs")["logits_rows"]) == 1
    assert list(at(events, 0, "committed")["ref_counts"].values()) == [3]
    assert len(at(events, 1, "scheduled")["copies"]) == 2
    assert list(at(events, 1, "committed")["ref_counts"].values()) == [1, 1, 1]
    assert [s["choice"] for s in at(events, 1, "scheduled")["sequences"]] == [0, 1, 2]
    ends = {e["choice"]: e["token_ids"] for e in kinds(events, "finished")}
    assert sorted(ends) == [0, 1, 2]
    assert all(len(ids) == 3 for ids in ends.values())
