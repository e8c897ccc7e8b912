"""Read the JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from infer.errors import CheckpointError


def read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """The object in ``path``; with ``missing_ok``, an empty one where there is no such file.

    Raises:
        CheckpointError: the file cannot be read, or holds something else than an object.
    """
    if missing_ok and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot read {path} ({error}); download the checkpoint again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} holds a {type(value).__name__}, it must be a JSON object; "
            "download the checkpoint again"
        )
    return value
