"""The Model page: what runs here, and where its memory goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import gradio as gr

from dashboard.client import EngineApi
from dashboard.insight import Insight
from dashboard.status import failure, tile, tiles
from infer.errors import InferError


@dataclass(slots=True)
class ModelPage:
    """The Model page of one engine."""

    api: EngineApi

    def build(self, tab: Any) -> None:
        """Place the page here; it is filled when ``tab`` is opened."""
        board = gr.HTML("", elem_id="model-board", padding=False, apply_default_css=False)

        async def fill() -> str:
            try:
                return model_html(await self.api.insight())
            except InferError as error:
                return failure(error)

        tab.select(fill, None, board, queue=False, show_progress="hidden", api_visibility="private")


def model_html(insight: Insight) -> str:
    """Figures, memory, configuration, options and versions of an engine."""
    engine = insight.engine
    pool_tokens = engine.num_blocks * engine.block_size
    head = tiles(
        tile("Weights", _bytes(engine.weight_bytes), f"{engine.dtype} on {engine.device}"),
        tile("KV a token", _bytes(engine.kv_bytes_per_token), "K and V of all layers"),
        tile("KV pool", f"{pool_tokens:,}",
             f"tokens in {engine.num_blocks:,} blocks of {engine.block_size}"),
        tile("Context", f"{engine.max_model_len:,}", "tokens at most a sequence"),
        tile("Full contexts", f"{pool_tokens / engine.max_model_len:.3g}", "fit at the same time"),
    )  # fmt: skip
    tables = [
        _table("Model", {"name": engine.model_name, "architecture": engine.architecture,
                         "vocabulary": f"{engine.vocab_size:,}", **_shapes(engine.config)}),
        _table("Engine", {
            "attention backend": engine.attention_backend, "compiled": _yes(engine.compiled),
            "tensor parallel": f"{engine.tp_size} rank{'s' if engine.tp_size > 1 else ''}",
            "pipeline depth": engine.pipeline_depth, "rows (max_num_seqs)": engine.max_num_seqs,
            "positions a step": engine.max_num_batched_tokens, "block size": engine.block_size,
        }),
        _table("Sampling defaults", {k.replace("_", " "): f"{v:g}"
                                     for k, v in insight.defaults.items()}),
        _table("Versions", dict(engine.versions)),
    ]  # fmt: skip
    return (
        f'{head}{_memory_bar(insight)}<div class="tables">{"".join(tables)}</div>'
        f"{_template(insight.chat_template)}"
    )


def _memory_bar(insight: Insight) -> str:
    engine = insight.engine
    kv = engine.num_blocks * engine.block_size * engine.kv_bytes_per_token
    total = kv + engine.weight_bytes
    share = 100 * engine.weight_bytes / total if total else 0
    return (
        '<section class="panel wide"><h3>Memory</h3>'
        f'<div class="stack" role="img" aria-label="Weights {_bytes(engine.weight_bytes)}, KV pool '
        f'{_bytes(kv)}"><span class="part weights" style="width:{share:.2f}%"></span>'
        f'<span class="part pool" style="width:{100 - share:.2f}%"></span></div>'
        '<p class="legend"><span class="key line-0">weights '
        f"<b>{_bytes(engine.weight_bytes)}</b></span>"
        f'<span class="key line-1">KV pool <b>{_bytes(kv)}</b></span>'
        f"<span>{_bytes(engine.kv_bytes_per_token)} a token, so one full context of "
        f"{engine.max_model_len:,} tokens takes "
        f"{_bytes(engine.max_model_len * engine.kv_bytes_per_token)}</span></p></section>"
    )


def _shapes(config: Mapping[str, Any]) -> dict[str, Any]:
    hidden = {"vocab_size", "architecture", "rope", "dtype"}
    shown = {
        key.replace("_", " "): _yes(value) if isinstance(value, bool) else value
        for key, value in config.items()
        if key not in hidden and value not in (None, ()) and not isinstance(value, (dict, list))
    }
    rope = config.get("rope")
    if isinstance(rope, Mapping):
        shown["rope"] = f"{rope.get('kind', 'default')}, theta {rope.get('theta', 0):g}"
    return shown


def _table(title: str, rows: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> str:
    pairs = rows.items() if isinstance(rows, Mapping) else rows
    body = "".join(
        f"<tr><th scope='row'>{escape(str(k))}</th><td>{escape(str(v))}</td></tr>" for k, v in pairs
    )
    return f'<section class="panel"><h3>{escape(title)}</h3><table>{body}</table></section>'


def _template(template: str | None) -> str:
    if not template:
        return ""
    return (
        '<details class="panel wide"><summary>Chat template (from the checkpoint)</summary>'
        f'<pre tabindex="0">{escape(template)}</pre></details>'
    )


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.4g} {unit}"
        size /= 1024
    raise AssertionError


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"
