"""Loading streams: the peak is the model and one tensor, however the checkpoint is laid out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from infer.modelconfig import model_config
from infer.weights import abstract, weight_bytes

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 12_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "dtype": "float32",
}
MIB = 1 << 20
PROGRAM = """
import re, sys, torch
from pathlib import Path
from infer.loading import load

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

torch.set_num_threads(1)
Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
before = peak()
model = load(sys.argv[1], device="cpu", dtype=sys.argv[2], progress=False)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_memory_is_the_model_and_one_tensor(dtype: str, tmp_path: Path) -> None:
    cfg = model_config(CONFIG)
    pieces = [piece for param in abstract(cfg).values() for piece in param.pieces]
    tensors = {piece.hf_name: torch.rand(piece.hf_shape) for piece in pieces}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    largest = max(tensor.nbytes for tensor in tensors.values())
    del tensors
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), dtype]
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=100, check=True)
    model_bytes = weight_bytes(cfg, getattr(torch, dtype))
    assert model_bytes <= int(run.stdout) + 8 * MIB  # the measure sees the model
    assert int(run.stdout) <= model_bytes + largest + 48 * MIB  # libraries loaded on the way
