"""The compiled layer: equal to eager, compiled once, and without copies of the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from infer import compile as compiling
from infer.models import decoder
from infer.ops import torch_traced
from infer.ops.backends import make_ops
from infer.parallel import TP
from tests.model.reference import (
    Driver,
    config_of,
    prompt,
    reference_logits,
    relative_error,
    tiny_model,
    weights_of,
)

needs_compiler = pytest.mark.skipif(compiling.compiler() is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@needs_compiler
def test_equal_to_transformers_and_compiled_once() -> None:
    model = tiny_model("qwen3")
    cfg, weights = config_of(model), weights_of(model)
    ops, reason = compiling.compiled(make_ops("torch", cfg, "cpu"), "cpu")
    assert reason is None
    driver = Driver(cfg=cfg, weights=weights, ops=ops)
    ids = {row: prompt(48, row) for row in range(4)}
    before = compiling.num_compilations()
    got = {0: driver.run([(0, ids[0][:20])]) + driver.run([(0, ids[0][20:21])])}
    assert compiling.num_compilations() - before == 2, "several tokens, and one"
    with torch.compiler.set_stance("fail_on_recompile"):
        for row in (1, 2, 3):
            got[row] = driver.run([(row, ids[row][:21])])
        got[0] += driver.run([(0, ids[0][21:])])
        for i in range(21, 40):
            for row, out in zip(
                (1, 2, 3),
                driver.run([(row, ids[row][i : i + 1]) for row in (1, 2, 3)]),
                strict=True,
            ):
                got[row].append(out)
        mixed = driver.run([(1, ids[1][40:41]), (2, ids[2][40:48]), (3, ids[3][40:47])], pad=2)
        bigger = Driver(cfg=cfg, weights=weights, ops=ops, num_rows=11)
        assert torch.equal(bigger.run([(0, ids[0])])[0].argmax(-1), torch.cat(got[0]).argmax(-1))
    for row, out in zip((1, 2, 3), mixed, strict=True):
        got[row].append(out)
    for row, outs in got.items():
        out = torch.cat(outs)
        assert relative_error(out, reference_logits(model, ids[row])[: len(out)]) < 1e-4


@needs_compiler
def test_the_generated_code_holds_no_copy_of_the_cache() -> None:
    model = tiny_model("llama")
    cfg, weights = config_of(model), weights_of(model)
    ops, _ = compiling.compiled(make_ops("torch", cfg, "cpu"), "cpu")
    assert ops.layer is not None
    driver = Driver(cfg=cfg, weights=weights, ops=ops)
    batch = driver.batch([(0, prompt(20))])
    shape = decoder.layer_shape(cfg, TP())
    with torch.inference_mode():
        step = ops.prepare(batch.attention, ops.cos_sin, driver.kv.k[0], shape)
        hidden = torch.randn(20, cfg.hidden_size)
        k_cache, v_cache = driver.kv.k[0], driver.kv.v[0]
        _, (code, *more) = run_and_get_code(
            ops.layer,
            shape,
            TP(),
            ops,
            weights.layers[0],
            k_cache,
            v_cache,
            hidden,
            hidden + 1,
            step,
        )
    assert not more
    assert "infer.store_kv" in code
    page = f"{driver.block_size}, {cfg.num_kv_heads}, {cfg.head_dim}"
    made = [line for line in code.splitlines() if "empty_strided" in line and page in line]
    assert not made, made
    assert "clone" not in code
    assert k_cache.any(), "the caller's own cache was written"


def test_ops_keep_what_they_declare() -> None:
    model = tiny_model("llama")
    cfg = config_of(model)
    driver = Driver(cfg=cfg, weights=weights_of(model))
    shape = decoder.layer_shape(cfg, TP())
    batch = driver.batch([(0, prompt(1)), (1, prompt(20))])
    k_cache, v_cache = driver.kv.k[0].clone(), driver.kv.v[0].clone()
    step = torch_traced.prepare(
        batch.attention, make_ops("torch", cfg, "cpu").cos_sin, k_cache, shape
    )
    k, v = torch.randn(2, 21, cfg.num_kv_heads, cfg.head_dim)
    torch.library.opcheck(torch_traced.store_kv, (k_cache, v_cache, k, v, step.slots))
    q = torch.randn(21, cfg.num_heads, cfg.head_dim)
    args = (q, k_cache, v_cache, step.tiles, step.rows, step.blocks, step.masks)
    torch.library.opcheck(torch_traced.paged_attention, (*args, shape.num_kv_heads, shape.eps))


def test_without_a_compiler_the_layer_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    ops = make_ops("torch", config_of(tiny_model("llama")), "cpu")
    same, reason = compiling.compiled(ops, "cpu")
    assert same is ops
    assert reason is not None
    assert "C++ compiler" in reason


def test_kernels_of_another_backend_are_left_alone() -> None:
    ops = replace(make_ops("torch", config_of(tiny_model("llama")), "cpu"), name="other")
    assert compiling.compiled(ops, "cpu") == (
        ops,
        "the stages of backend other are kernels already",
    )
