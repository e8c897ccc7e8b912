"""A notebook or a debugger shows values as they are: what it shows must be readable."""

from __future__ import annotations

from pathlib import Path

import infer


def test_large_values_are_shown_in_short(tiny: Path) -> None:
    model = infer.load(tiny)
    state = infer.init(model, infer.EngineConfig(num_blocks=16, max_num_seqs=2))
    for name in ("a", "b", "c"):
        request = infer.Request(request_id=name, prompt_token_ids=(1, 2, 3))
        state = infer.submit(state, request)
    assert "0 requests admitted, 3 waiting, 16 of 16 blocks available" in repr(state)
    state, _ = infer.step(model, state)
    assert "step 1 is next, 2 requests admitted, 1 waiting" in repr(state)
    for value in (model, state, infer.snapshot(state)):
        assert "tensor(" not in repr(value)
        assert len(repr(value)) < 2000
