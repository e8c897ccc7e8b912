"""What every test needs before anything is imported: no network, no telemetry, no thread pools."""

from __future__ import annotations

import os

for name, value in (
    ("TOKENIZERS_PARALLELISM", "false"),
    ("GRADIO_ANALYTICS_ENABLED", "False"),
    ("HF_HUB_OFFLINE", "1"),
    ("OMP_NUM_THREADS", "1"),  # tiny tensors: a second thread costs more than it gives
):
    os.environ.setdefault(name, value)
