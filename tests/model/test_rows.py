"""What a starting request brings to the device: its parameters, its last token, its blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from infer import graphs
from infer import host as hosts
from infer import rows as row_state
from infer.config import GenerationDefaults, Limits
from infer.hostbatch import build
from infer.rows import RowState
from infer.schedule import schedule
from infer.types import Request, SamplingParams

LIMITS = Limits(
    max_model_len=64, max_num_seqs=5, max_num_batched_tokens=64, block_size=16, num_blocks=20,
    prefix_caching=True, vocab_size=100, defaults=GenerationDefaults(eos_token_ids=(2,)),
)  # fmt: skip
SEEDS = (0, 2**63 - 1, 2**32 + 5)


def _params(i: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.5 + i, top_k=3 + i, top_p=0.9 - i / 10, min_p=i / 8, seed=SEEDS[i]
    )


def _rows() -> RowState:
    return row_state.make(LIMITS, LIMITS.vocab_size, torch.device("cpu"))


@pytest.mark.parametrize("in_graph", [False, True])
def test_rows_hold_what_the_requests_asked_for(in_graph: bool) -> None:
    prompts = [tuple(range(3 + i, 10 + 9 * i)) for i in range(3)]
    requests = [
        Request(request_id=str(i), prompt_token_ids=prompt, params=_params(i))
        for i, prompt in enumerate(prompts)
    ]
    plan, host = schedule(hosts.submit(hosts.make(LIMITS), requests, LIMITS), LIMITS)
    rows, untouched = _rows(), _rows()
    changes = row_state.changes(plan, host.seqs, rows)
    changed = {name: torch.from_numpy(array) for name, array in changes.items()}
    if in_graph:  # as the inputs of a graph hold them, among padding
        shape = graphs.Shape(64, LIMITS.max_num_seqs, decode=False)
        assert changes["places"].size <= shape.num_changes
        layout = graphs.make_layout(shape, LIMITS)
        packed = np.empty_like(layout.template)
        layout.pack(build(plan, host.seqs), changes, packed)
        batch, changed = graphs.views(
            torch.from_numpy(packed), shape, rows.block_tables, LIMITS.max_model_len
        )
        ids = [token for prompt in prompts for token in prompt]
        assert batch.input_ids[: len(ids)].tolist() == ids
    row_state.introduce(rows, changed)

    used = [host.seqs.rows_of[str(i)][0] for i in range(3)]
    s = rows.sampling
    for i, row in enumerate(used):
        params = _params(i)
        assert s.temperature[row].item() == pytest.approx(params.temperature)
        assert s.top_k[row].item() == params.top_k
        assert s.top_p[row].item() == pytest.approx(params.top_p)
        assert s.min_p[row].item() == pytest.approx(params.min_p)
        assert s.choice[row].item() == 0
        assert int(s.seed[row].numpy().view(np.uint64).item()) == SEEDS[i]
        assert rows.last_token[row].item() == prompts[i][-1]
        table = host.seqs.block_table[row]
        count = -(-len(prompts[i]) // 16)
        assert rows.block_tables[row, :count].tolist() == table[:count].tolist()
    for row in set(range(LIMITS.max_num_seqs + 1)) - set(used):
        assert torch.equal(rows.block_tables[row], untouched.block_tables[row])
        assert torch.equal(rows.last_token[row], untouched.last_token[row])
        for name in ("temperature", "top_k", "top_p", "min_p", "choice", "seed"):
            assert torch.equal(getattr(s, name)[row], getattr(untouched.sampling, name)[row])


def test_padding_changes_nothing() -> None:
    rows = _rows()
    before = rows.words.clone()
    place = torch.full((7,), row_state.spare_place(LIMITS), dtype=torch.int32)
    words = torch.full((7,), LIMITS.num_blocks, dtype=torch.int32)
    row_state.introduce(rows, {"places": place, "words": words})
    assert torch.equal(rows.words, before)
