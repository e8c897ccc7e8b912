"""Encoding, decoding and the byte table against transformers, and damaged folders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from infer.errors import CheckpointError, RequestError
from infer.tokenizer import Tokenizer
from tests.text import tokenizers_made as made
from tests.text.conftest import Pair

TEXTS = [
    "Hello world, it's 12345 o'clock.",
    "  two spaces,\ttabs\n\n\nand lines \r\n  end  ",
    "naïve café Ünïcödé — “quotes” … 你好世界 こんにちは 🙂👍🏽 👩‍👩‍👧",
    "def f(x):\n    return x**2",
    "e\u0301 \x00 \ue000 \ufffd ▁ Ġ <0x41>",
    " ",
    "",
]
ANY = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_encode_equals_transformers(pair: Pair, text: str, special: bool) -> None:
    assert pair.ours.encode(text, special) == pair.theirs.encode(text, add_special_tokens=special)


@ANY
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_encode_any_text(pair: Pair, text: str) -> None:
    assert pair.ours.encode(text) == pair.theirs.encode(text)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_decode_equals_transformers(pair: Pair, text: str, skip: bool) -> None:
    ids = pair.theirs.encode(text + "".join(pair.theirs.all_special_tokens) + text)
    expected = pair.theirs.decode(ids, skip_special_tokens=skip)
    assert pair.ours.decode(ids, skip_special_tokens=skip) == expected


@ANY
@given(data=st.data())
def test_decode_any_ids_of_a_byte_level_tokenizer(qwen: Pair, data: st.DataObject) -> None:
    """Any ids, valid UTF-8 or not: both replace each broken part by one U+FFFD."""
    ids = data.draw(st.lists(st.integers(0, qwen.ours.vocab_size - 1)))
    assert qwen.ours.decode(ids) == qwen.theirs.decode(ids, skip_special_tokens=True)


def test_every_id_has_the_bytes_that_decoding_shows(pair: Pair) -> None:
    table = pair.ours.token_bytes
    assert len(table) == pair.ours.vocab_size == len(pair.theirs)
    before = pair.theirs.encode("the", add_special_tokens=False)
    prefix = pair.theirs.decode(before)
    for token_id, data in enumerate(table):
        text = pair.theirs.decode([*before, token_id], skip_special_tokens=False)
        if "\ufffd" not in text:
            assert prefix.encode() + data == text.encode(), token_id


def test_sentencepiece_bytes(llama2: Pair) -> None:
    table = llama2.ours.token_bytes
    vocab = llama2.theirs.get_vocab()
    assert [table[vocab[f"<0x{byte:02X}>"]] for byte in range(256)] == [
        bytes((byte,)) for byte in range(256)
    ]
    assert table[vocab["▁the"]] == b" the"
    assert table[vocab["</s>"]] == b"</s>"


def test_special_ids_equal_transformers(pair: Pair) -> None:
    added = pair.theirs.added_tokens_decoder
    assert pair.ours.special_ids == {i for i, token in added.items() if token.special}
    assert pair.ours.special_ids >= set(pair.theirs.all_special_ids)
    assert pair.ours.bos_token_id == pair.theirs.bos_token_id
    assert pair.theirs.eos_token_id in pair.ours.eos_token_ids


def test_unknown_ids_have_no_text(pair: Pair) -> None:
    ids = pair.ours.encode("the", add_special_tokens=False)
    beyond = pair.ours.vocab_size
    assert pair.ours.decode([*ids, beyond, 10**9, -1]) == pair.ours.decode(ids)
    table = pair.ours.token_bytes
    assert (table[beyond], table[-1]) == (b"", b"")
    assert list(table) == [table[i] for i in range(len(table))]


def test_half_a_surrogate_pair_is_refused(pair: Pair) -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        pair.ours.encode("a\ud83d")


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert Tokenizer.from_folder(tmp_path) is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", '{"model": 3}'])
def test_damaged_files(tmp_path: Path, name: str, content: str) -> None:
    folder = made.qwen_like(tmp_path)
    (folder / name).write_text(content)
    if (name, content) == ("tokenizer_config.json", '{"model": 3}'):
        assert Tokenizer.from_folder(folder) is not None  # says nothing, contradicts nothing
        return
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.from_folder(folder)


def test_files_of_different_checkpoints(tmp_path: Path) -> None:
    folder = made.qwen_like(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {"9999": {"content": "<|extra|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"<\|extra\|>.*9999"):
        Tokenizer.from_folder(folder)


def test_tokens_that_only_the_configuration_lists(tmp_path: Path) -> None:
    folder = made.qwen_like(tmp_path)
    size = Backend.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {
        str(size): {"content": "<|extra|>", "special": True},
        str(size + 1): {"content": "<plain>", "special": False},
    }
    config["additional_special_tokens"] = ["<|more|>"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    assert tokenizer.encode("<|extra|><plain><|more|>") == [size, size + 1, size + 2]
    assert {size, size + 2} <= tokenizer.special_ids
    assert tokenizer.decode([size, size + 1, size + 2]) == "<plain>"


def test_eos_ids_join_those_of_the_generation_config(tmp_path: Path) -> None:
    folder = made.qwen_like(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [400, 402]}')
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    own = tokenizer.encode("<|im_end|>")
    assert set(tokenizer.eos_token_ids) == {*own, 400, 402}


def test_a_decoder_without_bytes_per_token_is_refused(tmp_path: Path) -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    folder = made.write(tmp_path, backend)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    with pytest.raises(CheckpointError, match="WordPiece"):
        tokenizer.decode([1, 2])


def test_words_without_a_decoder_are_joined_by_spaces() -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "<e>": 2}, unk_token="a"))
    backend.add_special_tokens([AddedToken("<e>", special=True)])
    tokenizer = Tokenizer.build(backend, {"eos_token": "<e>"})
    assert tokenizer.decode([0, 1, 2, 0]) == backend.decode([0, 1, 2, 0]) == "a b a"


def test_older_formats_are_converted(tmp_path: Path) -> None:
    """GPT-2's two files: a vocabulary and its merges."""
    backend = Backend.from_file(str(made.qwen_like(tmp_path / "new") / "tokenizer.json"))
    old = tmp_path / "old"
    old.mkdir()
    backend.model.save(str(old))
    (old / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (old / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = Tokenizer.from_folder(old)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("Hello there, world")) == "Hello there, world"


def test_an_older_format_that_cannot_be_converted(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"not sentencepiece")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_importing_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, infer.tokenizer\n"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
