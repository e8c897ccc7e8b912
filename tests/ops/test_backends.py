"""Which backend a device gets, and what is said where none of ours can run."""

from __future__ import annotations

import pytest
import torch

from infer.errors import ConfigError
from infer.ops.backends import choose

CUDA = torch.device("cuda", 0)


def chosen(name: str, device: torch.device, **options: object) -> tuple[str, str | None]:
    settings = {"num_ranks": 1, "compiling": False, **options}
    return choose(name, device, torch.bfloat16, **settings)  # type: ignore[arg-type]


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: request.param)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 1)], indirect=True)
@pytest.mark.usefixtures("capability")
def test_a_gpu_gets_kernels_of_our_own() -> None:
    assert chosen("auto", CUDA) == ("triton", None)
    assert chosen("flash_attn", CUDA) == ("flash_attn", None)
    assert chosen("torch", CUDA) == ("torch", None)


@pytest.mark.parametrize("capability", [(7, 5)], indirect=True)
@pytest.mark.usefixtures("capability")
def test_an_old_gpu_gets_torch_and_the_reason() -> None:
    name, reason = chosen("auto", CUDA)
    assert name == "torch"
    assert reason is not None
    assert "7.5" in reason
    assert "8.0" in reason
    for asked in ("triton", "flash_attn"):
        with pytest.raises(ConfigError, match=r"7\.5.*8\.0.*use attention_backend='torch'"):
            chosen(asked, CUDA)


def test_a_cpu_says_why_it_does_not_use_its_own() -> None:
    cpu = torch.device("cpu")
    name, reason = chosen("auto", cpu, num_ranks=2)
    assert name == "torch"
    assert reason
    with pytest.raises(ConfigError, match="native"):
        chosen("native", cpu, num_ranks=2)
