"""Traces: every step of an engine written down, one JSON object a line.

``cases`` has built-in runs, ``record`` makes events, ``files`` reads and writes them, ``replay``
compares, ``view`` and ``perfetto`` draw.
"""

from __future__ import annotations
