"""``python -m infer`` is the command ``infer``."""

from __future__ import annotations

import sys

from infer.cli import main

sys.exit(main())
