"""The comparisons. Each takes the context and gives a row; ``CHECKS`` has them in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from infer.errors import ConfigError
from infer.verify.compare import compare, joined
from infer.verify.context import (
    AGAINST_OURSELVES,
    AGAINST_TRANSFORMERS,
    BLOCK,
    Context,
    sampled_like,
)
from infer.verify.paths import Path, common_prefix
from infer.verify.ranks import tensor_parallel
from infer.verify.result import Row, judged, not_run
from infer.verify.runs import Observed, observe


@dataclass(frozen=True, slots=True)
class Check:
    """A comparison by name."""

    name: str
    title: str
    run: Callable[[str, str, Context], Row]


def against_transformers(name: str, title: str, c: Context) -> Row:
    """Every position of every path, and every sampled token."""
    return judged(
        name,
        title,
        c.against_reference(c.base),
        tolerance=AGAINST_TRANSFORMERS,
        tokens=sampled_like(c.base, c.paths),
        counts={"positions": c.base.num_positions},
        expected={"positions": sum(path.num_positions for path in c.paths)},
        peak_bytes=c.base.peak_bytes,
        seconds=c.base.seconds,
    )


def kv_cache(name: str, title: str, c: Context) -> Row:
    """One request that decodes, beside a fresh one for every token (64 + 7 = 71 against 540)."""
    path = c.paths[0]
    first, steps = path.num_prompt, path.num_generated
    cuts = [path.cut(f"cut{i}", first + i) for i in range(steps)]
    run = observe(c.model, c.config(), [[cut] for cut in cuts], whole=False)
    alone = observe(c.model, c.config(), [[path]])
    pairs = [
        compare(alone.logits[path.name, at][None], run.logits[cut.name, at][None])
        for cut in cuts
        for at in (cut.num_prompt - 1,)
    ]
    return judged(
        name,
        title,
        joined(pairs),
        tolerance=AGAINST_OURSELVES,
        tokens=sampled_like(run, cuts),
        counts={"positions with": alone.num_positions, "positions without": run.num_positions},
        expected={
            "positions with": first + steps - 1,
            "positions without": sum(range(first, first + steps)),
        },
        peak_bytes=run.peak_bytes,
        seconds=run.seconds + alone.seconds,
    )


def chunked(name: str, title: str, c: Context) -> Row:
    """Prompts cut by a budget that is no multiple of the block size, beside whole ones."""
    longest = max(c.paths, key=lambda path: path.num_prompt)
    budget = max(5, longest.num_prompt // 3 - 2)
    run = observe(c.model, c.config(max_num_batched_tokens=budget), [[p] for p in c.paths])
    chunks = sum(-(-path.num_prompt // budget) for path in c.paths)
    return _beside_base(name, title, c, run, expected={"prefill steps": chunks})


def prefix(name: str, title: str, c: Context) -> Row:
    """A prompt after another that begins alike, and once more after itself, beside a cold one.

    The two part inside a block and go on for whole blocks, which must not be taken for each other.
    """
    first, second = c.paths[3], c.paths[2]
    again = replace(second, name="again")
    config = c.config(prefix_caching=True)
    run = observe(c.model, config, [[first], [second], [again]])
    shared = common_prefix(first.tokens, second.tokens) // BLOCK * BLOCK
    # A prompt's last position is always computed.
    whole = (second.num_prompt - 1) // BLOCK * BLOCK
    got, at = run.of(again)
    want, _ = c.base.of(second)
    parts = [c.against_base(run, [first, second]), compare(got, want[at])]
    return judged(
        name,
        title,
        joined(parts),
        tolerance=AGAINST_OURSELVES,
        tokens=sampled_like(run, [first, second, again]),
        counts={
            "cached of a shared beginning": run.cached[second.name],
            "cached of itself": run.cached[again.name],
            "positions": run.num_positions,
        },
        expected={
            "cached of a shared beginning": shared,
            "cached of itself": whole,
            "positions": sum(p.num_positions for p in (first, second, again)) - shared - whole,
        },
        peak_bytes=run.peak_bytes,
        seconds=run.seconds,
    )


def batched(name: str, title: str, c: Context) -> Row:
    """All paths at once, beside each alone."""
    run = observe(c.model, c.config(), [c.paths])
    return _beside_base(name, title, c, run, at_least={"sequences": len(c.paths)})


def preempted(name: str, title: str, c: Context) -> Row:
    """A pool with one block more than the prompts need, beside one that is large enough."""
    blocks = sum(-(-path.num_prompt // BLOCK) for path in c.paths) + 1
    run = observe(c.model, c.config(num_blocks=blocks), [c.paths])
    return _beside_base(name, title, c, run, at_least={"preemptions": 1})


def pipelined(name: str, title: str, c: Context) -> Row:
    """Steps launched before the last one's tokens are read, beside one at a time."""
    run = observe(c.model, c.config(pipeline_depth=1, prefix_caching=True), [c.paths[:3]])
    return _beside_base(name, title, c, run, c.paths[:3], at_least={"sequences": 2})


def restored(name: str, title: str, c: Context) -> Row:
    """A snapshot in the middle and an engine made from it, beside one that was left alone."""
    run = observe(c.model, c.config(), [c.paths], interrupt=4)
    return _beside_base(name, title, c, run)


def compiled(name: str, title: str, c: Context) -> Row:
    """The compiled layer, beside the eager one."""
    from infer.compile import obstacle
    from infer.ops.backends import make_ops

    ops = make_ops("torch", c.model.config, c.model.device)
    reason = obstacle(ops, c.model.device)
    if reason is not None:
        return not_run(name, title, reason)
    config = c.config(compile=True, attention_backend="torch")
    return _beside_base(name, title, c, observe(c.model, config, [c.paths]))


def graphs(name: str, title: str, c: Context) -> Row:
    """CUDA Graphs: their logits, and the tokens of those that sample inside, beside eager steps."""
    if c.model.device.type != "cuda":
        return not_run(name, title, "CUDA Graphs need a GPU")
    return judged(name, title, **_graphed(c))


def _graphed(c: Context) -> dict[str, Any]:
    """Two runs in graphs: one that ends at logits, one that samples inside."""
    config = c.config(cuda_graphs=True)
    seen = observe(c.model, config, [c.paths], whole=False, logprobs=1)
    inside = observe(c.model, config, [c.paths], whole=False)
    right, total = sampled_like(inside, c.paths)
    more_right, more = sampled_like(seen, c.paths)
    return {
        "errors": c.against_base(seen),
        "tolerance": AGAINST_OURSELVES,
        "tokens": (right + more_right, total + more),
        "counts": {"graph steps": seen.num_graph_steps + inside.num_graph_steps},
        "at_least": {"graph steps": 2},
        "peak_bytes": seen.peak_bytes,
        "seconds": seen.seconds + inside.seconds,
    }


def backend(kind: str) -> Callable[[str, str, Context], Row]:
    """The comparison of one attention backend with transformers."""

    def check(name: str, title: str, c: Context) -> Row:
        from infer.ops.backends import make_ops

        try:
            make_ops(kind, c.model.config, c.model.device)
        except ConfigError as error:
            return not_run(name, title, str(error))
        run = observe(c.model, c.config(attention_backend=kind), [c.paths])
        return judged(
            name,
            title,
            c.against_reference(run),
            tolerance=AGAINST_TRANSFORMERS,
            tokens=sampled_like(run, c.paths),
            counts={"positions": run.num_positions},
            peak_bytes=run.peak_bytes,
            seconds=run.seconds,
        )

    return check


def _beside_base(
    name: str,
    title: str,
    c: Context,
    run: Observed,
    paths: Sequence[Path] | None = None,
    *,
    expected: dict[str, int] | None = None,
    at_least: dict[str, int] | None = None,
) -> Row:
    """A run that must compute what the base run did, position for position."""
    counts = {
        "positions": run.num_positions,
        "sequences": run.max_batch,
        "prefill steps": run.num_prefill_steps,
    }
    if run.num_preemptions:
        counts["preemptions"] = run.num_preemptions
    chosen = list(paths or c.paths)
    if not run.num_preemptions and not run.cached_any:
        expected = {"positions": sum(p.num_positions for p in chosen), **(expected or {})}
    return judged(
        name,
        title,
        c.against_base(run, chosen),
        tolerance=AGAINST_OURSELVES,
        tokens=sampled_like(run, chosen),
        counts=counts,
        expected=expected,
        at_least=at_least,
        peak_bytes=run.peak_bytes,
        seconds=run.seconds,
    )


CHECKS = (
    Check("transformers", "engine and transformers", against_transformers),
    Check("kv-cache", "with and without KV cache", kv_cache),
    Check("chunked", "prompts whole and in chunks", chunked),
    Check("prefix", "cold and warm prefix cache", prefix),
    Check("batched", "alone and in a batch", batched),
    Check("preempted", "preempted and left alone", preempted),
    Check("pipelined", "pipeline depth 0 and 1", pipelined),
    Check("restored", "restored from a snapshot", restored),
    Check("compiled", "eager and compiled", compiled),
    Check("graphs", "eager and CUDA Graphs", graphs),
    Check("native", "backend native and transformers", backend("native")),
    Check("torch", "backend torch and transformers", backend("torch")),
    Check("triton", "backend triton and transformers", backend("triton")),
    Check("tp", "one rank and several", tensor_parallel),
)
