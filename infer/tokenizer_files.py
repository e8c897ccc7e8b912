"""Read the files of a checkpoint's tokenizer.

transformers is imported only to convert a checkpoint that brings no ``tokenizer.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from infer.errors import CheckpointError

_OLD_FORMATS = ("tokenizer.model", "vocab.json", "tekken.json")


def read_backend(folder: Path) -> Backend | None:
    """The folder's tokenizer, converted where it is of an older format; None if there is none.

    Raises:
        CheckpointError: its files are damaged or of a kind this package does not read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        found = any((folder / name).is_file() for name in _OLD_FORMATS)
        return _convert(folder) if found else None
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise CheckpointError(
            f"{path} is not a tokenizer this package reads ({error}); download it again"
        ) from error


def _convert(folder: Path) -> Backend:
    """Make a tokenizer.json out of an older format."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        return Backend.from_str(tokenizer.backend_tokenizer.to_str())
    except Exception as error:
        raise CheckpointError(
            f"{folder} has no tokenizer.json and its older tokenizer files cannot be converted "
            f"({error}); add a tokenizer.json"
        ) from error


def read_chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. A .jinja file wins over the configuration, as in transformers."""
    found: dict[str, str] = {}
    stated = config.get("chat_template")
    if isinstance(stated, str):
        found["default"] = stated
    elif isinstance(stated, list):
        found |= {str(entry["name"]): str(entry["template"]) for entry in stated}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        found["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return found
