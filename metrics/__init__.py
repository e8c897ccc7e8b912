"""Prometheus metrics of the engine: names, observer, exporter and reader.

``Metrics`` is the value that a server composes: an observer for the engine, ``render`` for its
``/metrics`` route, ``read`` for a dashboard. ``serve`` does the same for a script in one line.
"""

from metrics.asgi import CountRequests
from metrics.observer import Metrics
from metrics.reader import History, Latency, Reading
from metrics.serving import MetricsServer, ScriptMetrics, serve

__all__ = [
    "CountRequests",
    "History",
    "Latency",
    "Metrics",
    "MetricsServer",
    "Reading",
    "ScriptMetrics",
    "serve",
]
