"""Loading straight to a GPU."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from infer.loading import load, pick_dtype
from infer.parallel import TP
from tests.checkpoint.test_loading import assert_fused
from tests.checkpoint.tiny import CASES, save, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("case", CASES)
def test_a_folder_loads_onto_the_gpu(case: str, tmp_path: Path) -> None:
    hf = tiny_model(case)
    model = load(save(hf, tmp_path), device="cuda", dtype="float32", progress=False)
    assert model.device == torch.device("cuda", torch.cuda.current_device())
    assert model.weights.embed.device == model.device
    assert_fused(model.weights, {name: t.cuda() for name, t in hf.state_dict().items()})


def test_auto_is_bfloat16_on_a_recent_gpu() -> None:
    device = torch.device("cuda", 0)
    recent = torch.cuda.get_device_capability(device) >= (8, 0)
    assert pick_dtype("auto", device) == (torch.bfloat16 if recent else torch.float32)


def test_random_weights_are_made_on_the_gpu_in_a_moment() -> None:
    load("qwen3-0.6b", load_format="random", progress=False)  # the first use of a GPU takes longer
    torch.cuda.synchronize()
    start = time.perf_counter()
    model = load("qwen3-0.6b", load_format="random", progress=False)
    torch.cuda.synchronize()
    assert time.perf_counter() - start < 1
    embed = model.weights.embed
    assert embed.float().std().item() == pytest.approx(0.02, rel=0.01)
    part = load("qwen3-0.6b", load_format="random", tp=TP(rank=1, size=2), progress=False)
    assert torch.equal(part.weights.embed, embed[75968:])
    down = model.weights.layers[0].down
    assert torch.equal(part.weights.layers[0].down, down[:, 1536:])
