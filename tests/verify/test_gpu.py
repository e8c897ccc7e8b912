"""``infer verify`` on a GPU: every comparison of random Qwen3-0.6B that the machine can make."""

from __future__ import annotations

import pytest
import torch

from infer.verify.run import ALL_CHECKS, verify
from infer.verify.subject import Subject

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
# For a CPU; a package that may be absent; a second GPU.
MAY_BE_MISSING = {"native", "bf16-native", "bf16-flash_attn", "tp"}


def test_random_qwen3() -> None:
    subject = Subject(model="qwen3-0.6b", options={"load_format": "random", "device": "cuda"})
    outcome = verify(subject, tp=min(2, torch.cuda.device_count()))
    assert outcome.passed, [(row.name, row.reasons) for row in outcome.failed]
    ran = {row.name for row in outcome.rows if row.status == "pass"}
    assert ran >= {check.name for check in ALL_CHECKS} - MAY_BE_MISSING
    rows = {row.name: row for row in outcome.rows}
    assert rows["graphs"].counts["graph steps"] > 0
    assert rows["kv-cache"].counts == {"positions with": 71, "positions without": 540}


def test_a_fault_in_a_graph_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays that write KV one slot too far, where eager steps are right."""
    from infer.graphs import Layout

    inner = Layout.pack

    def shifted(self, batch, tables, out):  # type: ignore[no-untyped-def]
        inner(self, batch, tables, out)
        if self.shape.decode:
            start = self.starts["slot_mapping"]
            out[start : start + batch.num_tokens] += 1

    monkeypatch.setattr(Layout, "pack", shifted)
    subject = Subject(model="qwen3-0.6b", options={"load_format": "random", "device": "cuda"})
    rows = {r.name: r for r in verify(subject, only=("transformers", "graphs"), half=False).rows}
    assert rows["transformers"].status == "pass"
    assert rows["graphs"].status == "fail"
