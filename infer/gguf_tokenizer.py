"""A GGUF file's vocabulary rebuilt as the files of a Hugging Face tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infer.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type

# How each family cuts a text into words before byte-level BPE.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "tekken": TEKKEN,
}
DIGITS_APART = ("smollm",)  # every digit a word, then GPT-2's own pattern
PLAIN = ("gpt-2", "gpt2")
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a word in the vocabulary is one token


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``tokenizer.json`` and ``tokenizer_config.json``; empty without a vocabulary.

    Raises:
        CheckpointError: a vocabulary or pre-tokenizer this package cannot rebuild faithfully.
    """
    kind = metadata.get("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        return {}
    if kind == "gpt2":
        tokenizer = _byte_level(metadata)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata)
    else:
        raise CheckpointError(
            f"unknown vocabulary type {kind!r} (tokenizer.ggml.model); gpt2 and llama are supported"
        )
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": _config(metadata)}


def _config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds_bos(metadata),
    }
    named = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    for ours, theirs in named.items():
        token_id = metadata.get(f"tokenizer.ggml.{ours}_token_id")
        if token_id is not None and 0 <= token_id < len(tokens):
            config[f"{theirs}_token"] = tokens[token_id]
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    if metadata.get("tokenizer.ggml.bos_token_id") is None:
        return False
    by_default = (
        metadata["tokenizer.ggml.model"] == "llama"
        or metadata.get("tokenizer.ggml.pre") in WHOLE_WORDS
    )
    return bool(metadata.get("tokenizer.ggml.add_bos_token", by_default))


def _vocabulary(metadata: Mapping[str, Any]) -> tuple[dict[str, int], list[int]]:
    """(token -> id without unused ones, the type of every id)."""
    tokens: Sequence[str] | None = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError("the GGUF file names a vocabulary but holds no tokenizer.ggml.tokens")
    types = list(metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise CheckpointError(
            f"the GGUF file has {len(tokens)} tokens but {len(types)} token types"
        )
    return {t: i for i, t in enumerate(tokens) if types[i] != UNUSED}, types


def _added(vocab: Mapping[str, int], types: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[token_id] != USER_DEFINED,
        }
        for token, token_id in vocab.items()
        if types[token_id] in (CONTROL, USER_DEFINED, UNKNOWN)
    ]


def _bos_template(metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> dict[str, Any] | None:
    """A post-processor that puts the BOS token first, or None."""
    if not _adds_bos(metadata):
        return None
    bos_id = metadata["tokenizer.ggml.bos_token_id"]
    bos = metadata["tokenizer.ggml.tokens"][bos_id]

    def special(type_id: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": bos, "type_id": type_id}}

    first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [special(0), first],
        "pair": [special(0), first, special(1), second],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def _byte_level(metadata: Mapping[str, Any]) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    vocab, types = _vocabulary(metadata)
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": bool(metadata.get("tokenizer.ggml.add_space_prefix", False)),
        "trim_offsets": True,
        "use_regex": pre not in PATTERNS,
    }
    pre_tokenizer: dict[str, Any]
    if pre in PATTERNS:
        cut: dict[str, Any] = {"type": "Split", "pattern": {"Regex": PATTERNS[pre]}}
        cut |= {"behavior": "Isolated", "invert": False}
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [cut, byte_level]}
    elif pre in DIGITS_APART:
        digits = {"type": "Digits", "individual_digits": True}
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
    elif pre in PLAIN:
        pre_tokenizer = byte_level
    else:
        known = ", ".join((*PLAIN, *DIGITS_APART, *PATTERNS))
        raise CheckpointError(f"unknown pre-tokenizer {pre!r} (tokenizer.ggml.pre); known: {known}")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(vocab, types),
        "normalizer": {"type": "NFC"} if PATTERNS.get(pre) == QWEN2 else None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _bos_template(metadata, vocab),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in WHOLE_WORDS,
            "vocab": vocab,
            "merges": [m.split(" ", 1) for m in metadata.get("tokenizer.ggml.merges", ())],
        },
    }


def _sentencepiece(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A sentencepiece BPE vocabulary: its scores are the order of merges."""
    vocab, types = _vocabulary(metadata)
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(types):
        raise CheckpointError("the GGUF file's vocabulary has no score for every token")
    unknown = next((token for token, i in vocab.items() if types[i] == UNKNOWN), None)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizers = [{"type": "Prepend", "prepend": "▁"}, space] if prefix else [space]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *strip,
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(vocab, types),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": _bos_template(metadata, vocab),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": _merges(vocab, types, scores),
        },
    }


def _merges(
    vocab: Mapping[str, int], types: Sequence[int], scores: Sequence[float]
) -> list[list[str]]:
    """Every way to make a token of two others, best score of the whole first.

    sentencepiece merges the pair whose union scores best, so the order among tokens is that of the
    scores; among the splits of one token it does not matter which comes first, they give the same.
    """
    words = {token: i for token, i in vocab.items() if types[i] in (NORMAL, USER_DEFINED)}
    merges: list[tuple[float, int, int, str, str]] = []
    for token, i in words.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in words and right in words:
                merges.append((-scores[i], words[left], words[right], left, right))
    return [[left, right] for *_, left, right in sorted(merges)]
