"""The chat page, its live panels and the step inspector.

Names are imported when first used: ``import dashboard`` alone does not load gradio.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dashboard.insight import Insight as Insight
    from dashboard.insight import insight_routes as insight_routes
    from dashboard.pages import build_app as build_app
    from dashboard.pages import mount as mount
    from dashboard.recorder import StepRecorder as StepRecorder
    from dashboard.settings import Settings as Settings

_HOMES = {
    "Insight": "dashboard.insight",
    "Settings": "dashboard.settings",
    "StepRecorder": "dashboard.recorder",
    "build_app": "dashboard.pages",
    "insight_routes": "dashboard.insight",
    "mount": "dashboard.pages",
}

__all__ = [*sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dashboard' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
