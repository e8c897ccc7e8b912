"""How much of a GPU is left for KV: measured on the largest steps before the pool is allocated."""

from __future__ import annotations

import torch

from infer import device_step as step
from infer import graphs
from infer import rows as row_state
from infer.config import EngineConfig, Limits
from infer.graphs import Shape
from infer.kv import KVCache
from infer.model import Model
from infer.ops import Ops
from infer.weights import local_config


def free_budget(device: torch.device, fraction: float) -> int:
    """Bytes of ``fraction`` of the GPU that nobody uses, other processes' memory respected."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(total * fraction) - (total - free)


@torch.inference_mode()
def working_bytes(model: Model, ops: Ops, kv: KVCache, limits: Limits, config: EngineConfig) -> int:
    """Bytes that rows, the largest eager step and the graphs need beside weights and KV.

    Runs the largest step with the hungriest sampler and captures the largest graphs, on a KV cache
    of one block; smaller graphs share their memory. All of it must have run before, so that no
    compiling is measured.
    """
    largest = Shape(limits.max_num_batched_tokens, limits.max_num_seqs, decode=False)
    use_graphs = config.cuda_graphs and ops.capturable
    vocab = local_config(model.config, model.tp).vocab_size
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(model.device)
    rows = row_state.make(limits, vocab, model.device)
    batch = graphs.padded_batch(largest, limits, rows)
    hidden, kv = step.forward(model, ops, kv, rows, batch)
    scores = step.logits(model, ops, hidden, batch.logits_rows)
    _, rows = step.pick(model, scores, rows, batch, graphs.TRUNCATING)
    pool = torch.cuda.graph_pool_handle()
    biggest = graphs.largest_shapes(limits) if use_graphs else []
    with graphs.quiet_gc():
        captured = [
            graphs.capture(model, ops, kv, rows, limits, shape, pool, sampling=True)
            for shape in biggest
        ]
    torch.cuda.synchronize(model.device)
    used = torch.cuda.memory_reserved(model.device) - before
    del captured
    return used
