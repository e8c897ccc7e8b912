"""Vocabularies in GGUF files against the tokenizers they came from."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from infer.errors import CheckpointError
from infer.gguf_tokenizer import tokenizer_files
from infer.loading import load
from infer.presets import DEFAULT, find_preset
from tests.checkpoint.gguf_make import add_vocabulary, write
from tests.checkpoint.tiny import tiny_model

CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "progress": False}
TEXTS = [
    "Hello world, it's 12345 o'clock.",
    "  two spaces,\ttabs\n\n\nand lines \r\n  end  ",
    "naïve café Ünïcödé — “quotes” … 你好世界 こんにちは 🙂👍🏽",
    "def f(x):\n    return x**2 + 0.5e-3  # don't, WE'LL, I'VE",
    "<|start|>user\nhi<|end|><tool>",
    "e\u0301 is not é for everybody",
    "",
]
# The patterns that the published tokenizer.json files of these families hold.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "purestep"


def trained(pre: str) -> Backend:
    """A small byte-level BPE tokenizer of a family."""
    backend = Backend(models.BPE(ignore_merges=pre == "llama-bpe"))
    if pre == "smollm":
        cut: list[Any] = [pre_tokenizers.Digits(individual_digits=True)]
    elif pre == "gpt-2":
        cut = []
    else:
        cut = [pre_tokenizers.Split(Regex(QWEN2 if pre == "qwen2" else LLAMA3), "isolated")]
    plain = pre in ("gpt-2", "smollm")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=plain)]
    )
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|start|>", "<|end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return backend


def metadata(backend: Backend, pre: str, **more: Any) -> dict[str, Any]:
    """What a GGUF file of this tokenizer says."""
    model = json.loads(backend.to_str())["model"]
    vocab = backend.get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    types = {"<|start|>": 3, "<|end|>": 3, "<tool>": 4}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "[PAD401]"],
        "tokenizer.ggml.token_type": [*(types.get(token, 1) for token in tokens), 5],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def rebuilt(data: dict[str, Any]) -> Backend:
    return Backend.from_str(json.dumps(tokenizer_files(data)["tokenizer.json"]))


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2", "llama-bpe"])
def test_byte_level_vocabularies_encode_the_same(pre: str) -> None:
    original = trained(pre)
    ours = rebuilt(metadata(original, pre, add_bos_token=False))
    for text in TEXTS:
        ids = original.encode(text).ids
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids) == original.decode(ids), text
    assert ours.token_to_id("[PAD401]") is None


def test_a_bos_token_is_added_where_the_file_says_so() -> None:
    data = metadata(trained("llama-bpe"), "llama-bpe")
    plain = rebuilt(data | {"tokenizer.ggml.add_bos_token": False}).encode("hi").ids
    assert rebuilt(data).encode("hi").ids == [0, *plain]  # Llama 3 does by default
    assert rebuilt(data).encode("hi", add_special_tokens=False).ids == plain
    qwen = metadata(trained("qwen2"), "qwen2")
    assert rebuilt(qwen).encode("hi").ids[0] != 0
    assert rebuilt(qwen | {"tokenizer.ggml.add_bos_token": True}).encode("hi").ids[0] == 0


# --- sentencepiece --------------------------------------------------------------------------------

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS = "▁t he ▁the in er ▁a re on ▁th at ent ▁in ing th ▁s or es ell o, ▁h ello ▁hello ▁hell"
LETTERS = [*"▁abcdefghijklmnopqrstuvwxyz,."]


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    words = WORDS.split()
    tokens = [*PIECES, *words, *LETTERS]
    scores = [0.0] * len(PIECES) + [-float(i) for i in range(len(words) + len(LETTERS))]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(words) + len(LETTERS))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def merged(text: str, data: dict[str, Any]) -> list[int]:
    """sentencepiece's algorithm as its paper tells it: merge the neighbours whose union scores
    best, leftmost first, until none is a token; what is left over is spelled in bytes."""
    tokens = data["tokenizer.ggml.tokens"]
    ids = {token: i for i, token in enumerate(tokens)}
    scores = data["tokenizer.ggml.scores"]
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        unions = [
            (-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids
        ]
        if not unions:
            break
        _, i = min(unions)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    spelled = [
        [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
        for part in parts
    ]
    return [1, *(i for piece in spelled for i in piece)]


@pytest.mark.parametrize(
    "text",
    [
        "the hello",
        "hello, the other thing is in there",
        "Übergröße 你好 tt",
        "  spaced   out ",
        "thhellell inginger enthe",
        "",
    ],
)
def test_sentencepiece_vocabularies_encode_the_same(text: str) -> None:
    data = sentencepiece_metadata()
    ours = rebuilt(data)
    ids = ours.encode(text).ids
    assert ids == merged(text, data)
    assert ours.decode(ids, skip_special_tokens=True) == text


def test_sentencepiece_without_the_prefix() -> None:
    ours = rebuilt(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False))
    assert ours.encode("the").tokens == ["t", "he"]
    assert ours.decode(ours.encode(" the the").ids) == " the the"


# --- files ----------------------------------------------------------------------------------------


def test_a_file_brings_its_tokenizer_and_template(tmp_path: Path) -> None:
    backend = trained("smollm")
    data = metadata(backend, "smollm")
    template = "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}"

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        add_vocabulary(
            writer,
            "gpt2",
            tokenizer_pre="smollm",
            token_list=data["tokenizer.ggml.tokens"],
            token_types=data["tokenizer.ggml.token_type"],
            token_merges=data["tokenizer.ggml.merges"],
            chat_template=template,
            eot_token_id=7,
        )

    hf = tiny_model("llama", vocab_size=len(data["tokenizer.ggml.tokens"]))
    write(tmp_path / "tiny.gguf", hf, extra=vocabulary)
    model = load(tmp_path / "tiny.gguf", **CPU)
    tokenizer = model.tokenizer
    assert tokenizer is not None
    for text in TEXTS:
        assert tokenizer.encode(text) == backend.encode(text).ids
    assert tokenizer.chat_template == template
    assert model.config.eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "martian"}, "martian"),
        ({"tokenizer.ggml.model": "t5"}, "t5"),
        ({"tokenizer.ggml.tokens": []}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "1 token types"),
        ({"tokenizer.ggml.model": "llama"}, "score"),
    ],
)
def test_unfaithful_vocabularies_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        tokenizer_files(metadata(trained("gpt-2"), "gpt-2") | changes)


def test_a_file_without_a_vocabulary_has_no_tokenizer() -> None:
    assert tokenizer_files({}) == {}
    assert tokenizer_files({"tokenizer.ggml.model": "no_vocab"}) == {}


# --- the embedded default -------------------------------------------------------------------------


def embedded() -> Path:
    preset = find_preset(DEFAULT)
    path = preset.packaged_file() if preset else None
    if path is None:
        pytest.skip("the package that carries the default model is not installed")
    return path


@pytest.mark.slow
def test_the_default_models_tokenizer_and_tensors_are_transformers_own() -> None:
    """transformers reads GGUF files too, by code of its own."""
    import torch
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = embedded()
    model = load(**CPU)
    assert model.tokenizer is not None
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in [*TEXTS, "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"]:
        assert model.tokenizer.encode(text) == theirs.encode(text), text
    assert model.tokenizer.chat_template == theirs.chat_template

    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(model.path)
        shell = transformers.AutoModelForCausalLM.from_config(config)
    loaded = load_gguf_checkpoint(path, return_tensors=True, model_to_load=shell)
    state = {name: torch.as_tensor(values) for name, values in loaded["tensors"].items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    from tests.checkpoint.test_loading import assert_fused

    assert_fused(model.weights, state)
