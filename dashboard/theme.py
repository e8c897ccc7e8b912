"""Colours, fonts and style sheet. Everything is served from this machine."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import gradio as gr

# Hues of requests in timelines and block maps: apart for the eye, also in grey and when
# colour-blind (they differ in lightness too). Style sheets know them as .hue-0 to .hue-9.
NUM_HUES = 10


def make_theme() -> Any:
    """A quiet theme: one accent, hairlines instead of shadows, the system's own fonts."""
    sans = ["ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
    mono = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"]
    return gr.themes.Base(
        primary_hue=gr.themes.colors.teal,
        secondary_hue=gr.themes.colors.teal,
        neutral_hue=gr.themes.colors.slate,
        font=sans,
        font_mono=mono,
        radius_size=gr.themes.sizes.radius_md,
    ).set(
        body_background_fill="*neutral_50",
        body_background_fill_dark="#0d1117",
        background_fill_primary="#ffffff",
        background_fill_primary_dark="#151b23",
        background_fill_secondary="*neutral_50",
        background_fill_secondary_dark="#10161d",
        block_background_fill="#ffffff",
        block_background_fill_dark="#151b23",
        block_border_width="1px",
        block_border_color="*neutral_200",
        block_border_color_dark="#2a323d",
        border_color_primary="*neutral_200",
        border_color_primary_dark="#2a323d",
        block_shadow="none",
        block_label_background_fill="transparent",
        block_label_background_fill_dark="transparent",
        block_label_border_width="0px",
        block_title_text_color="*neutral_700",
        block_title_text_color_dark="*neutral_200",
        block_title_text_weight="600",
        block_title_text_size="*text_sm",
        block_info_text_color="*neutral_500",
        block_info_text_color_dark="*neutral_400",
        block_info_text_size="*text_xs",
        input_background_fill="#ffffff",
        input_background_fill_dark="#0d1117",
        input_border_color="*neutral_300",
        input_border_color_dark="#374151",
        input_border_width="1px",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_text_color="#ffffff",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover_dark="*primary_800",
        button_secondary_background_fill="#ffffff",
        button_secondary_background_fill_dark="#1c242e",
        button_secondary_border_color="*neutral_300",
        button_secondary_border_color_dark="#374151",
        button_border_width="1px",
        button_large_text_size="*text_md",
        button_large_text_weight="500",
        button_large_padding="8px 14px",
        slider_color="*primary_600",
        slider_color_dark="*primary_500",
        body_text_color="*neutral_900",
        body_text_color_dark="#e6edf3",
        body_text_color_subdued="*neutral_500",
        body_text_color_subdued_dark="*neutral_400",
        layout_gap="12px",
        block_padding="12px",
    )


def style_sheet() -> str:
    """The page's own rules."""
    return _static("style.css")


def head() -> str:
    """The page's script, for the document's head."""
    return f"<script>{_static('page.js')}</script>"


def icon() -> str:
    """The page's icon, an SVG."""
    return _static("icon.svg")


def _static(name: str) -> str:
    return files("dashboard").joinpath("static", name).read_text(encoding="utf-8")
