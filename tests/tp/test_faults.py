"""A rank that dies, raises, hangs or goes its own way ends all of them, with the cause, in time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

import infer
from infer import LLM, EngineConfig, SamplingParams, device_step
from infer.errors import EngineError
from infer.parallel import TP
from infer.ranks import lead
from infer.watch import STEP_DEADLINE_S
from tests.tp.conftest import CPU

FAULTY = Path(__file__).parent / "faulty"
LIMIT_S = 10.0
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


def workers() -> set[int]:
    """Processes of this user that are ranks started by this process, dead ones included."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if parent == os.getpid() and b"infer.worker" in command:
            found.add(int(folder.name))
    return found


@contextmanager
def group(size: int, step_deadline: float = STEP_DEADLINE_S) -> Iterator[tuple[TP, list[int]]]:
    """A group of its own, and the processes of ranks 1 and up."""
    before = workers()
    tp = lead(size, step_deadline=step_deadline)
    started = sorted(workers() - before)
    assert len(started) == size - 1
    yield tp, started
    assert tp.link is not None
    tp.link.close()
    assert not workers() & set(started)


@contextmanager
def ends_in_time() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < LIMIT_S


def engine(folder: Path, tp: TP) -> LLM:
    return LLM(infer.load(folder, tp=tp, **CPU), num_blocks=64, block_size=16)


def stays_dead(llm: LLM, cause: str) -> None:
    with pytest.raises(EngineError, match=cause):
        llm.generate([[1, 2, 3]], LONG, progress=False)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_kill_in_mid_stream(checkpoint: Callable[[str], Path], size: int) -> None:
    with group(size) as (tp, processes):
        llm = engine(checkpoint("qwen3"), tp)
        stream = llm.stream([1, 2, 3], LONG)
        for _ in range(5):
            next(stream)
        os.kill(processes[-1], signal.SIGKILL)
        cause = rf"rank {size - 1} \(process {processes[-1]}\) was killed by SIGKILL"
        with ends_in_time(), pytest.raises(EngineError, match=cause):
            for _ in stream:
                pass
        stays_dead(llm, "SIGKILL")


@pytest.mark.slow
def test_a_stopped_rank(checkpoint: Callable[[str], Path]) -> None:
    with group(2) as (tp, processes):
        llm = engine(checkpoint("qwen3"), tp)
        stream = llm.stream([1, 2, 3], LONG)
        next(stream)
        os.kill(processes[0], signal.SIGSTOP)
        with ends_in_time(), pytest.raises(EngineError, match="rank 1 has been silent"):
            for _ in stream:
                pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("1:5:raise", "rank 1 failed in the launch of step 4: RuntimeError: an injected fault"),
        ("1:5:hang", "rank 1 made no progress in the launch of step 4 for 3 s, in wait .* faulty"),
        ("1:5:token", "the host state of rank 1 differs from rank 0's .* first in token_ids"),
    ],
)
def test_a_fault_in_the_step_of_a_rank(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, fault: str, cause: str
) -> None:
    monkeypatch.syspath_prepend(FAULTY)
    monkeypatch.setenv("FAULT", fault)
    with group(2, step_deadline=3.0) as (tp, _):
        llm = engine(checkpoint("qwen3"), tp)
        with ends_in_time(), pytest.raises(EngineError, match=cause):
            llm.generate([[1, 2, 3]], LONG, progress=False)
        stays_dead(llm, cause)


@pytest.mark.slow
def test_a_fault_in_the_first_rank_s_step(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with group(2) as (tp, _):
        llm = engine(checkpoint("qwen3"), tp)
        stream = llm.stream([1, 2, 3], LONG)
        next(stream)
        monkeypatch.setattr(device_step, "pick", lambda *_: 1 / 0)
        with ends_in_time(), pytest.raises(EngineError, match=r"rank 0 .* ZeroDivisionError"):
            for _ in stream:
                pass
        monkeypatch.undo()
        stays_dead(llm, "ZeroDivisionError")


@pytest.mark.slow
def test_ranks_start_again_after_a_failure(checkpoint: Callable[[str], Path]) -> None:
    """Nothing of a failed group is in the way of the next: no port, no name, no process."""
    folder = checkpoint("qwen3")
    with group(2) as (tp, processes):
        dead = engine(folder, tp)
        os.kill(processes[0], signal.SIGKILL)
        stays_dead(dead, "SIGKILL")
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        alone = LLM(infer.load(folder, **CPU), num_blocks=64).generate(
            [[5]], params, progress=False
        )
        with group(2) as (again, _), group(2) as (beside, _):
            for place in (again, beside):
                outputs = engine(folder, place).generate([[5]], params, progress=False)
                assert outputs[0].outputs[0].token_ids == alone[0].outputs[0].token_ids


@pytest.mark.slow
def test_the_poorest_rank_sets_the_kv_budget(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block ids of one rank must lie in the pools of all."""
    options = EngineConfig(block_size=64, max_model_len=256)
    alone = infer.init(infer.load(checkpoint("qwen3"), **CPU), options)
    monkeypatch.syspath_prepend(FAULTY)
    monkeypatch.setenv("FAULT", "1:0:poor")
    with group(2) as (tp, _):
        model = infer.load(checkpoint("qwen3"), tp=tp, **CPU)
        state = infer.init(model, options)
        # Each of the ranks has half of the KV heads, so twice the blocks; the poor one a third.
        assert state.limits.num_blocks == alone.limits.num_blocks * 2 // 3
        assert state.kv.num_blocks == state.limits.num_blocks


@pytest.mark.slow
def test_a_rank_that_alone_refuses_ends_them(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leading rank waits for it in a collective, where no answer can reach it."""
    monkeypatch.syspath_prepend(FAULTY)
    monkeypatch.setenv("FAULT", "1:0:refuse")
    with group(2) as (tp, _):
        model = infer.load(checkpoint("qwen3"), tp=tp, **CPU)
        with ends_in_time(), pytest.raises(EngineError, match=r"ConfigError: .* another opinion"):
            infer.init(model)


@pytest.mark.slow
def test_a_refusal_of_the_first_rank_alone_ends_them(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise infer.ConfigError("no ops here")

    with group(2) as (tp, _):
        model = infer.load(checkpoint("qwen3"), tp=tp, **CPU)
        monkeypatch.setattr("infer.initialize.make_ops", refuse)
        monkeypatch.setattr("infer.channel.REFUSED_S", 1.0)
        with ends_in_time(), pytest.raises(infer.ConfigError, match="no ops here"):
            infer.init(model)
        monkeypatch.undo()
        with pytest.raises(EngineError, match="no ops here"):
            infer.init(model)


LEADER = """
import sys, time
from infer import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", dtype="float32", threads=1, num_blocks=64, tp=3)
stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=400, ignore_eos=True, temperature=0))
next(stream)
print("running", flush=True)
sys.stdin.readline()
if sys.argv[2] == "steps":
    for _ in stream:
        pass
elif sys.argv[2] == "exits":
    sys.exit(0)
time.sleep(60)
"""


def children(pid: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def gone(pid: int) -> bool:
    """Whether a process has ended (orphans are reaped by whoever adopted them, some day)."""
    try:
        return (
            re.search(r"^State:\s+[ZX]", Path(f"/proc/{pid}/status").read_text(), re.M) is not None
        )
    except OSError:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("what", ["steps", "idles", "exits"])
def test_the_leading_rank_dies(checkpoint: Callable[[str], Path], what: str) -> None:
    environment: Mapping[str, str] = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", LEADER, str(checkpoint("qwen3")), what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as leader:
        assert leader.stdin is not None and leader.stdout is not None
        assert leader.stdout.readline() == b"running\n"
        ranks = children(leader.pid)
        assert len(ranks) == 2
        leader.stdin.write(b"\n")
        leader.stdin.flush()
        if what != "exits":
            leader.kill()
    deadline = time.monotonic() + LIMIT_S
    while not all(map(gone, ranks)):
        assert time.monotonic() < deadline, "a process stays behind"
        time.sleep(0.05)
    assert leader.returncode == (0 if what == "exits" else -signal.SIGKILL)
