"""The sampling kernels and the GPU path against the CPU path."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from infer.ops.sample import sample
from infer.ops.sampling import SampleFlags, SamplingRows
from infer.ops.triton_sample import MAX_CANDIDATES, sample_rows
from tests.ops.sampling import flags_of, random_rows, rows_of

I32 = torch.int32


def index(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=I32)


def on(rows: SamplingRows, device: torch.device) -> SamplingRows:
    return SamplingRows(**{f.name: getattr(rows, f.name).to(device) for f in fields(rows)})


def check(
    logits: torch.Tensor, rows: SamplingRows, device: torch.device, block: int = 1024
) -> None:
    """The kernels' tokens and scores are those of the CPU path."""
    count = logits.shape[0]
    expected = sample(logits, index(count), index(count), rows, flags_of(rows))
    at = index(count).to(device)
    got = sample_rows(logits.to(device), at, at, on(rows, device), block=block)
    assert torch.equal(got.nan.cpu(), expected.nan)
    sound = ~expected.nan
    # Logarithms differ in their last bits between devices; a near tie may fall otherwise.
    differ = (got.tokens.cpu() != expected.tokens)[sound]
    assert differ.sum() <= (0 if device.type == "cpu" else count // 50)
    torch.testing.assert_close(
        got.scores.cpu()[sound][~differ], expected.scores[sound][~differ], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("coarse", [False, True], ids=["floats", "many equal logits"])
@pytest.mark.parametrize("scale", [0.2, 3.0])
def test_rows_of_every_kind(coarse: bool, scale: float, device: torch.device) -> None:
    logits = torch.randn(8, 2000, generator=torch.manual_seed(1)) * scale
    check(logits.bfloat16().float() if coarse else logits, random_rows(8, 5), device)


@pytest.mark.parametrize("vocab", [1, 256, 257, 1025])
def test_sizes_around_blocks(vocab: int, device: torch.device) -> None:
    logits = torch.randn(6, vocab, generator=torch.manual_seed(vocab))
    check(logits, random_rows(6, vocab), device)


def test_more_equal_logits_than_candidates(device: torch.device) -> None:
    """A flat row: all of it is above the bound, and does not fit the scratch buffer."""
    logits = torch.zeros(3, MAX_CANDIDATES + 1000)
    check(logits, rows_of(3, top_k=[2, 3, 10], seed=[1, 2, 3]), device, block=4096)


def test_top_k_beyond_the_number_of_blocks(device: torch.device) -> None:
    logits = torch.randn(4, 1000, generator=torch.manual_seed(0))
    rows = rows_of(4, top_k=[5, 100, 999, 1000], top_p=0.9, seed=[1, 2, 3, 4])
    check(logits, rows, device)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("whole", [False, True])
def test_broken_logits(bad: float, whole: bool, device: torch.device) -> None:
    logits = torch.randn(6, 400, generator=torch.manual_seed(0))
    if whole:
        logits[:] = bad
    else:
        logits[3, 7] = bad
    check(logits, random_rows(6, 2), device)
    at = index(6).to(device)
    got = sample_rows(logits.to(device), at, at, on(random_rows(6, 2), device), block=512)
    assert ((got.tokens >= 0) & (got.tokens < 400)).all()


def test_shared_logits_and_a_vocabulary_offset(device: torch.device) -> None:
    logits = torch.randn(2, 500, generator=torch.manual_seed(0))
    sources = torch.tensor([1, 1, 0, 1], dtype=I32)
    rows = rows_of(4, top_k=[0, 50, 3, 0], seed=[1, 2, 3, 4])
    expected = sample(logits, sources, index(4), rows, flags_of(rows), vocab_offset=700)
    got = sample_rows(
        logits.to(device), sources.to(device), index(4).to(device), on(rows, device),
        vocab_offset=700, block=512,
    )  # fmt: skip
    assert got.tokens.tolist() == expected.tokens.tolist()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_cuda_never_waits() -> None:
    logits = torch.randn(64, 5000, generator=torch.manual_seed(1)) * 3
    for rows in (random_rows(64, 1), rows_of(64), rows_of(64, temperature=0)):
        expected = sample(logits, index(64), index(64), rows, flags_of(rows))
        at = index(64).cuda()
        inputs = (logits.cuda(), at, at, on(rows, torch.device("cuda")), flags_of(rows))
        sample(*inputs)  # whatever is loaded lazily
        try:
            torch.cuda.set_sync_debug_mode("error")
            got = sample(*inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert (got.tokens.cpu() == expected.tokens).sum() >= 63


@pytest.mark.gpu
def test_greedy_equals_argmax() -> None:
    logits = torch.randn(64, 5000, generator=torch.manual_seed(1)).bfloat16()
    expected = logits.float().numpy().argmax(-1)  # numpy promises the first of equals
    rows = on(rows_of(64, temperature=0), torch.device("cuda"))
    at = index(64).cuda()
    got = sample(logits.cuda(), at, at, rows, SampleFlags(greedy=True))
    assert got.tokens.tolist() == expected.tolist()
