"""Fixed token paths: what every compared run is fed, so that only the mechanism differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infer.errors import ConfigError
from infer.model import Model

GENERATED = 8
# Prompt lengths. The first is counted by hand elsewhere (64 + 7 = 71 positions); the others end a
# few positions before a block does, so that every sequence needs a new block while it decodes.
LENGTHS = (64, 45, 107, 107)
SHARED = 70  # first tokens that the last two prompts have in common
TEXT = (
    "The engine keeps its whole state in one value. A step takes the state and gives back the next "
    "one, together with a report of what was done: which requests were scheduled, how many "
    "positions were computed, which blocks of the cache were written, and which tokens were "
    "sampled. Nothing else changes, so that a state can be kept, compared and continued. Requests "
    "arrive at any time and leave as soon as they are done. Those that begin with the same words "
    "share the keys and values of that beginning, which are computed once. When the memory runs "
    "out, the youngest request gives its blocks back and computes them again later. All of this "
    "must not change a single token. Whoever doubts that should measure it: feed the same tokens "
    "through the model in two ways and look at how far the results are apart. Rivers of numbers "
    "run through the layers of the network, and at the end of each of them stands one word more. "
)


@dataclass(frozen=True, slots=True)
class Path:
    """A prompt and the tokens that follow it, whatever a run samples."""

    name: str
    tokens: tuple[int, ...]
    num_prompt: int

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens that are there from the beginning."""
        return self.tokens[: self.num_prompt]

    @property
    def num_generated(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_positions(self) -> int:
        """Positions a run computes: the last token is sampled and never fed."""
        return len(self.tokens) - 1

    def cut(self, name: str, length: int) -> Path:
        """The first ``length`` tokens as a prompt, and the one token after it."""
        return Path(name, self.tokens[: length + 1], length)


def prompts(model: Model, *, seed: int = 0) -> list[list[int]]:
    """Prompts of ``LENGTHS`` (shorter for a model of few positions).

    A text where the model has a tokenizer, else random ids; the last two share their beginning.

    Raises:
        ConfigError: the model has too few positions for anything to be compared.
    """
    most = model.config.max_position_embeddings - GENERATED - 1
    if most < 40:
        raise ConfigError(
            f"the model has {model.config.max_position_embeddings} positions, a comparison needs 49"
        )
    ids = _token_ids(model, sum(LENGTHS), seed)
    out, at = [], 0
    for length in LENGTHS:
        out.append(ids[at : at + length][:most])
        at += length
    shared = min(SHARED, most - 8)
    out[3] = [*out[2][:shared], *out[3][shared:]]
    if out[3][shared] == out[2][shared]:  # where they part, they must
        out[3][shared] = (out[3][shared] + 1) % model.config.vocab_size
    return out


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are equal."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _token_ids(model: Model, count: int, seed: int) -> list[int]:
    vocab = model.config.vocab_size
    if model.tokenizer is not None:
        ids = [i for i in model.tokenizer.encode(TEXT) if i < vocab]
        if len(ids) >= 80:
            return (ids * (count // len(ids) + 1))[:count]
    found: list[int] = np.random.default_rng(seed).integers(0, vocab, count).tolist()
    return found
