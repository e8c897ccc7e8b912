"""Groups of ranks on the CPU, each started once, and tiny checkpoints for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import infer
from infer import Model
from infer.parallel import TP
from infer.ranks import lead
from tests.tp.models import tiny

CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "progress": False}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a case's random checkpoint, as transformers saves it."""

    @cache
    def made(case: str) -> Path:
        folder = tmp_path_factory.mktemp(case)
        tiny(case).save_pretrained(folder)
        return folder

    return made


def _group(size: int) -> Iterator[TP]:
    tp = lead(size)
    yield tp
    assert tp.link is not None
    tp.link.close()


@pytest.fixture(scope="session")
def two() -> Iterator[TP]:
    """This process and one more."""
    yield from _group(2)


@pytest.fixture(scope="session")
def four() -> Iterator[TP]:
    """This process and three more."""
    yield from _group(4)


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Callable[[int], TP]:
    """The group of so many ranks, started when it is first asked for."""
    return lambda size: request.getfixturevalue({2: "two", 4: "four"}[size])


@pytest.fixture(scope="session")
def model(checkpoint: Callable[[str], Path]) -> Callable[[str, TP | None], Model]:
    """A case's model, alone or on the ranks of a group."""

    @cache
    def loaded(case: str, tp: TP | None) -> Model:
        return infer.load(checkpoint(case), tp=tp or TP(), **CPU)

    return loaded
