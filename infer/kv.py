"""The paged KV cache: per-layer tensors, their sizing and allocation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVCache:
    """K and V pages of every layer. Donated: a step owns them until it returns them.

    ``k[l]`` and ``v[l]`` are ``[num_blocks + 1, block_size, num_kv_heads, head_dim]``. The last
    block takes the writes of padded rows, so that replayed graphs need no mask.
    """

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]

    @property
    def num_blocks(self) -> int:
        """Usable blocks, without the spare one."""
        return self.k[0].shape[0] - 1

    @property
    def block_size(self) -> int:
        """Positions a block holds."""
        return self.k[0].shape[1]


def allocate(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    """Allocate pages for ``num_blocks`` usable blocks a layer and one spare block."""
    shape = (num_blocks + 1, block_size, num_kv_heads, head_dim)
    pages = [_zeros(shape, dtype, device) for _ in range(2 * num_layers)]
    return KVCache(k=tuple(pages[:num_layers]), v=tuple(pages[num_layers:]))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros take no memory before they are written, and lie on large pages; torch's do not.
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)


def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """KV bytes of one position: layers x (K and V) x heads x head_dim x item size."""
    return num_layers * 2 * num_kv_heads * head_dim * dtype.itemsize
