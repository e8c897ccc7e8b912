"""What every test needs before anything is imported: no network, no telemetry, no thread pools."""

from __future__ import annotations

import os
from pathlib import Path

for name, value in (
    ("TOKENIZERS_PARALLELISM", "false"),
    ("GRADIO_ANALYTICS_ENABLED", "False"),
    ("HF_HUB_OFFLINE", "1"),
    ("OMP_NUM_THREADS", "1"),  # tiny tensors: a second thread costs more than it gives
):
    os.environ.setdefault(name, value)

if not Path("/dev/nvidiactl").exists():
    # Without a GPU, kernels run in Triton's interpreter. It must be chosen before anything imports
    # triton, whose own library is decorated then.
    os.environ.setdefault("TRITON_INTERPRET", "1")
