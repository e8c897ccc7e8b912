"""The whole page: tabs, mounting, headers and the application of its own."""

from __future__ import annotations

import os
from html import escape
from typing import Any

import gradio as gr
from fastapi import FastAPI
from starlette.responses import RedirectResponse, Response

from dashboard.chat import ChatPage
from dashboard.client import EngineApi
from dashboard.completion import CompletionPage
from dashboard.guard import PageGuard
from dashboard.insight import Insight
from dashboard.inspector import InspectorPage
from dashboard.modelpage import ModelPage
from dashboard.pacing import Pacer
from dashboard.panels import MetricsPage
from dashboard.settings import Settings
from dashboard.theme import head, icon, make_theme, style_sheet
from infer.errors import InferError

TITLE = "purestep"
MAX_EVENTS = 512
UPDATES = {"cpu": 30.0, "gpu": 120.0}  # redraws a second over all open pages


def build_app(settings: Settings) -> Any:
    """The page as a ``gr.Blocks``, for an engine that answers at ``settings.url``."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # nothing is told to anybody
    # After every event Gradio summarises all that it remembers, for a page that is off here.
    os.environ["GRADIO_ANALYTICS_CACHE_FREQUENCY"] = str(1 << 40)
    os.environ["GRADIO_ANALYTICS_MAX_EVENTS"] = "1"
    api = EngineApi(settings.api, settings.api_key)
    pacer = Pacer(settings.max_updates_per_s or UPDATES["cpu"])
    chat = ChatPage(api, pacer)
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_height=True) as demo:
        header = gr.HTML(
            header_html(None), elem_id="page-header", padding=False, apply_default_css=False
        )
        with gr.Tabs(elem_id="pages") as tabs:
            with gr.Tab("Chat", id="chat", elem_id="tab-chat"):
                parts = chat.build()
            with gr.Tab("Completion", id="completion", elem_id="tab-completion"):
                columns = CompletionPage(api, pacer).build()
            with gr.Tab("Metrics", id="metrics", elem_id="tab-metrics") as tab:
                metrics = MetricsPage(api).build(tab)
            with gr.Tab("Inspector", id="inspector", elem_id="tab-inspector") as tab:
                inspector = InspectorPage(api).build(tab)
            with gr.Tab("Model", id="model", elem_id="tab-model") as tab:
                ModelPage(api).build(tab)
        stored = gr.Textbox(visible="hidden", label="Stored conversation", elem_id="stored")
        _connect_timers(tabs, {"Metrics": metrics, "Inspector": inspector})

        async def start(text: str) -> list[Any]:
            insight: Insight | None = None
            try:
                insight = await api.insight()
                if settings.max_updates_per_s is None:
                    pacer.updates_per_s = UPDATES.get(insight.engine.device, UPDATES["gpu"])
            except InferError as error:
                gr.Warning(str(error))
            defaults = insight.defaults if insight is not None else {}
            values = chat.start(text, insight, parts)[0]
            more = [update for controls in columns for update in controls.updates(defaults)]
            return [header_html(insight), *values, *more]

        demo.load(
            start,
            stored,
            [
                header,
                *chat.start("", None, parts)[1],
                *(part for controls in columns for part in controls.components),
            ],
            js="() => purestep.restore()",
            show_progress="hidden",
            concurrency_limit=None,
            api_visibility="private",
        )
        demo.unload(chat.forget)
    _start_queue(demo, settings)
    return demo


def _start_queue(demo: Any, settings: Settings) -> None:
    """Events of many pages at once, in a queue that rests when there are none."""
    demo.max_threads = MAX_EVENTS  # so many run at the same time, coroutines included
    demo.queue(max_size=settings.max_waiting, default_concurrency_limit=None)
    # Gradio looks for events a thousand times a second, which an engine on the same cores feels.
    demo._queue.sleep_when_free = 0.02
    demo._queue.progress_update_sleep_when_free = 0.5  # nothing here reports progress


def _connect_timers(tabs: Any, pages: dict[str, tuple[Any, Any]]) -> None:
    """Let a live page's timer run while its tab is open and its switch is on."""

    def choose(data: gr.SelectData, *switches: bool) -> list[Any]:
        return [
            gr.Timer(active=on and data.value == name)
            for name, on in zip(pages, switches, strict=True)
        ]

    tabs.select(
        choose,
        [switch for _, switch in pages.values()],
        [timer for timer, _ in pages.values()],
        queue=False,
        show_progress="hidden",
        api_visibility="private",
    )


def mount(app: FastAPI, settings: Settings) -> FastAPI:
    """Put the page at ``settings.path`` of ``app``, which also answers the engine's API or not."""
    demo = build_app(settings)
    gr.mount_gradio_app(
        app,
        demo,
        path=settings.path,
        footer_links=[],
        run_history=False,
        show_error=False,
        max_file_size=1,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        theme=make_theme(),
        css=style_sheet(),
        head=head(),
    )
    app.add_middleware(PageGuard, path=settings.path)
    taken = {getattr(route, "path", None) for route in app.routes}
    for path, answer in {
        "/": lambda: RedirectResponse(settings.path + "/"),
        "/favicon.ico": lambda: Response(icon(), media_type="image/svg+xml"),
    }.items():
        if path not in taken:
            app.add_api_route(path, answer, include_in_schema=False)
    return app


def header_html(insight: Insight | None) -> str:
    """The page's title, with the engine it talks to."""
    line = "no engine"
    if insight is not None:
        engine = insight.engine
        line = f"{engine.model_name} · {engine.dtype} · {engine.device}"
    return (
        '<header class="page-header"><h1>purestep</h1>'
        f'<span class="engine-line">{escape(line)}</span></header>'
    )
