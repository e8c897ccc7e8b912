"""Every script in ``examples`` runs, and what it prints is right."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


class Examples:
    """Runs examples in this process on the tiny model."""

    def __init__(
        self, model: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self._model, self._patch, self._capsys = model, patch, capsys

    def __call__(self, name: str) -> list[str]:
        path = str(ROOT / "examples" / f"{name}.py")
        self._patch.setattr(sys, "argv", [path, str(self._model)])
        runpy.run_path(path, run_name="__main__")
        return self._capsys.readouterr().out.splitlines()


@pytest.fixture
def example(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Examples:
    return Examples(tiny, monkeypatch, capsys)


def test_batch(example: Examples) -> None:
    lines = example("batch")
    steps = [line for line in lines if line.startswith("step ")]
    ended = [line for line in lines if line.startswith("'")]
    assert len(ended) == 3
    assert "of 3 sequences" in steps[0]
    assert len(steps) <= 12, "the three run side by side"


def test_streaming(example: Examples) -> None:
    assert len("".join(example("streaming"))) > 0


def test_fork(example: Examples) -> None:
    lines = example("fork")
    shared, *branches = lines
    assert int(shared.split()[0]) >= 7, "61 bytes are known; most of their blocks of 8 are shared"
    texts = {line.partition(": ")[0]: line.partition(": ")[2] for line in branches}
    assert sorted(texts) == ["branch 0", "branch 1", "branch 2", "trunk"]
    assert len(set(texts.values())) == 4, "forks draw numbers of their own"


def test_policy(example: Examples) -> None:
    greedy, gentle, same = example("policy")
    fast, smooth = ([int(n) for n in line.split()[1:]] for line in (greedy, gentle))
    assert max(fast) == 121, "the whole late prompt beside the early request's token"
    assert max(smooth[1:]) == 16
    assert len(smooth) > len(fast)
    assert same == "the same tokens: True"


def test_scoring(example: Examples, tiny: Path) -> None:
    from tests.server.fakes import fake_tokenizer

    found = {line[11:]: float(line[:9]) for line in example("scoring")}
    hf, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), fake_tokenizer()
    beginning = len(tokenizer.encode("The cat sat on the"))
    assert len(found) == 3
    assert list(found.values()) == sorted(found.values(), reverse=True)
    for text, score in found.items():
        ids = torch.tensor([tokenizer.encode(text)])
        with torch.inference_mode():
            logs = hf(input_ids=ids).logits[0].log_softmax(dim=-1)
        own = logs[:-1].gather(1, ids[0, 1:, None])[beginning - 1 :].sum()
        # The engine's default dtype may be bfloat16.
        assert score == pytest.approx(float(own), rel=0.03)


def test_time_travel(example: Examples) -> None:
    lines = example("time_travel")
    assert lines[:2] == ["the same way again: True", "the story is the same beside another: True"]
    assert len({line.partition(": ")[2] for line in lines[2:]}) == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_as_a_command_on_the_embedded_model(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "False" not in done.stdout
