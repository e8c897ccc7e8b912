"""Sampling on the GPU against the CPU path, without waiting for the device."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from infer.ops.sample import SampleFlags, SamplingRows, sample
from tests.ops.sampling import flags_of, random_rows, rows_of

pytestmark = pytest.mark.gpu
I32 = torch.int32


def on_gpu(rows: SamplingRows) -> SamplingRows:
    return SamplingRows(**{f.name: getattr(rows, f.name).cuda() for f in fields(rows)})


def test_cuda_draws_as_the_cpu_and_never_waits() -> None:
    index = torch.arange(64, dtype=I32)
    logits = torch.randn(64, 5000, generator=torch.manual_seed(1)) * 3
    rows = random_rows(64, 1)
    expected = sample(logits, index, index, rows, flags_of(rows))
    inputs = (logits.cuda(), index.cuda(), index.cuda(), on_gpu(rows), flags_of(rows))
    sample(*inputs)  # whatever is loaded lazily
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = sample(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Logarithms differ in their last bits between devices; a near tie may fall otherwise.
    assert (got.tokens.cpu() == expected.tokens).sum() >= 63


def test_greedy_equals_argmax() -> None:
    index = torch.arange(64, dtype=I32)
    logits = torch.randn(64, 5000, generator=torch.manual_seed(1)).bfloat16()
    expected = logits.float().numpy().argmax(-1)  # numpy promises the first of equals
    rows = on_gpu(rows_of(64, temperature=0))
    got = sample(logits.cuda(), index.cuda(), index.cuda(), rows, SampleFlags(greedy=True))
    assert got.tokens.tolist() == expected.tolist()
