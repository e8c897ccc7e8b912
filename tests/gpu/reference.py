"""Plain float32 references of the kernels, one position at a time where that is clearest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Relative L2 error; NaN anywhere gives NaN, which passes no comparison."""
    out, reference = out.double().cpu(), reference.double().cpu()
    return float((out - reference).norm() / reference.norm())


@dataclass(frozen=True, slots=True)
class Pages:
    """A paged cache filled at random, its unused cells poisoned with NaN."""

    k: Tensor  # [num_blocks + 1, block_size, num_kv_heads, head_dim]
    v: Tensor
    block_tables: Tensor  # i32[rows, max_blocks]
    seq_rows: Tensor  # i32[num_seqs]
    dense_k: tuple[Tensor, ...]  # f32[context, num_kv_heads, head_dim] a sequence
    dense_v: tuple[Tensor, ...]

    def slots(self, seq: int, begin: int, end: int) -> Tensor:
        """Cache slots of positions begin..end-1 of a sequence."""
        block_size = self.k.shape[1]
        positions = torch.arange(begin, end, device=self.k.device)
        blocks = self.block_tables[self.seq_rows[seq].long(), positions // block_size].long()
        return blocks * block_size + positions % block_size


def make_pages(
    filled: list[int],
    capacity: list[int],
    *,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> Pages:
    """Scatter sequences of ``filled`` positions over shuffled blocks that hold ``capacity``."""
    counts = [max(1, -(-n // block_size)) for n in capacity]
    total = sum(counts) + 3
    shape = (total + 1, block_size, num_kv_heads, head_dim)
    k = torch.full(shape, float("nan"), dtype=dtype)
    v = torch.full(shape, float("nan"), dtype=dtype)
    order = torch.randperm(total, generator=generator).to(torch.int32)
    rows = torch.randperm(len(filled) + 2, generator=generator)[: len(filled)].to(torch.int32)
    tables = torch.full((len(filled) + 2, max(counts) + 1), total, dtype=torch.int32)
    dense_k, dense_v, used = [], [], 0
    for seq, (length, count) in enumerate(zip(filled, counts, strict=True)):
        blocks = order[used : used + count]
        used += count
        tables[rows[seq], :count] = blocks
        positions = torch.arange(length)
        slots = blocks.long()[positions // block_size] * block_size + positions % block_size
        for cache, dense in ((k, dense_k), (v, dense_v)):
            values = torch.randn(length, num_kv_heads, head_dim, generator=generator).to(dtype)
            cache.view(-1, num_kv_heads, head_dim)[slots] = values
            dense.append(values.float().to(device))
    return Pages(
        k.to(device), v.to(device), tables.to(device), rows.to(device),
        tuple(dense_k), tuple(dense_v),
    )  # fmt: skip


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Causal float32 attention of the last n positions: q [n, heads, dim], k and v [m, ..]."""
    n, heads, dim = q.shape
    m, kv_heads, _ = k.shape
    k = k.repeat_interleave(heads // kv_heads, dim=1)
    v = v.repeat_interleave(heads // kv_heads, dim=1)
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k.float()) * dim**-0.5
    position = torch.arange(m - n, m, device=q.device)[:, None]
    other = torch.arange(m, device=q.device)[None, :]
    hidden = other > position
    if window is not None:
        hidden |= other <= position - window
    scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hnm,mhd->nhd", scores.softmax(dim=-1), v.float())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension in float32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def rotate(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """RoPE with rotated halves, float32: x [tokens, heads, dim]."""
    cos, sin = cos_sin[positions.long()].float().chunk(2, dim=-1)
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def cos_sin_table(num_positions: int, head_dim: int, device: torch.device) -> Tensor:
    """Cosines, then sines, of plain RoPE: f32[num_positions, head_dim]."""
    inverse = 1e4 ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.arange(num_positions).float()[:, None] * inverse
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
