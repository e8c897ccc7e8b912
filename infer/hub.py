"""Checkpoints from the Hugging Face hub, kept in its own cache.

``huggingface_hub`` is imported where it is used: local models need not wait for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infer.checkpoint import open_safetensors
from infer.errors import CheckpointError

# Weights, and the texts a checkpoint may bring. Never pickled weights, never code.
WANTED = ["model*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt"]
REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def is_repo_name(name: str) -> bool:
    """Whether ``name`` is written like a hub name: ``owner/name``, or with ``@revision``."""
    return REPO.fullmatch(name) is not None


def download(name: str, progress: bool = True) -> Path:
    """The folder of a hub checkpoint; a complete cached copy is used as it is, without asking.

    Raises:
        CheckpointError: it cannot be had; the message says why and what to do.
    """
    cached = cached_folder(name)
    if cached is not None:
        return cached
    import huggingface_hub as hf
    from huggingface_hub import errors

    repo, _, revision = name.partition("@")
    try:
        with _bars(progress):
            return Path(
                hf.snapshot_download(repo, revision=revision or None, allow_patterns=WANTED)
            )
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{name} asks for its licence to be accepted: open https://huggingface.co/{repo}, "
            "accept it, and log in with `hf auth login`"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise CheckpointError(
            f"the hub has no model {name}, or it is private; check the spelling, or log in with "
            "`hf auth login`"
        ) from error
    except Exception as error:  # whatever the transport of the day fails with
        raise CheckpointError(
            f"cannot download {name}: {_first_line(error)}. Without a network, copy the checkpoint "
            "to this machine and give its folder as the model"
        ) from error


def cached_folder(name: str) -> Path | None:
    """The folder of a hub checkpoint that was downloaded completely, or None."""
    import huggingface_hub as hf
    from huggingface_hub import errors

    repo, _, revision = name.partition("@")
    try:
        folder = hf.snapshot_download(repo, revision=revision or None, local_files_only=True)
        open_safetensors(Path(folder))
    except (errors.EntryNotFoundError, OSError, ValueError, CheckpointError):
        return None  # not there, or a download that was broken off
    return Path(folder) if (Path(folder) / "config.json").is_file() else None


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
