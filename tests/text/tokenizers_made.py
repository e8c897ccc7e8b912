"""Small tokenizers of the kinds that checkpoints bring, trained here on a few lines of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

DATA = Path(__file__).parent.parent / "data"
CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock, isn't it?",
    "Hello world! Hello there, world of tokens; the tokens are there.\n\nA new paragraph.",
    "naïve café Ünïcödé — “quotes” … 你好世界，世界你好。 こんにちは 🙂👍🏽 Привет, мир",
    "def f(x):\n    return x ** 2  # the square of x\n",
    "user assistant system tool think im_start im_end function name arguments",
    '{"name": "get_weather", "arguments": {"city": "Paris"}}',
]
QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_ADDED = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
QWEN_ADDED += ["<think>", "</think>"]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def qwen_like(folder: Path) -> Path:
    """Byte-level BPE with Qwen3's added tokens and its chat template."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([special(text) for text in QWEN_SPECIAL])
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in QWEN_ADDED])
    template = (DATA / "qwen3" / "chat_template.jinja").read_text()
    return write(
        folder,
        backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
    )


def llama2_like(folder: Path) -> Path:
    """Sentencepiece-style BPE with byte fallback: a space before every text, dropped again."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    _train_sentencepiece(backend)
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
        "{% else %}{{ raise_exception('Only user and assistant roles!') }}{% endif %}{% endfor %}"
    )
    return write(
        folder,
        backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=template,
    )


def metaspace_like(folder: Path) -> Path:
    """The newer sentencepiece style, with a Metaspace pre-tokenizer and decoder."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
    )
    _train_sentencepiece(backend)
    return write(folder, backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _train_sentencepiece(backend: Tokenizer) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=tokens, show_progress=False, limit_alphabet=40
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )


def special(text: str) -> AddedToken:
    """A control token."""
    return AddedToken(text, normalized=False, special=True)


def write(folder: Path, backend: Tokenizer, **config: Any) -> Path:
    """Write the files of a checkpoint's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    state = json.loads(backend.to_str())
    # Byte tokens were given to the trainer as special ones.
    state["added_tokens"] = [
        token for token in state["added_tokens"] if not token["content"].startswith("<0x")
    ]
    (folder / "tokenizer.json").write_text(json.dumps(state))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    config["clean_up_tokenization_spaces"] = False
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
