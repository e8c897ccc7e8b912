"""Ranks that watch each other, here two watches in one process; and the messages between ranks."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from infer import channel, watch
from infer.channel import Kind, Message
from infer.errors import CheckpointError, EngineError, RequestError
from infer.lockstep import Aborted, Forked, Happening, Submitted, decode, encode
from infer.persistent import Fifo
from infer.types import Request, SamplingParams
from infer.watch import Sign, Verdict, Watch, Weight


class Pair:
    """A leading and a following watch, and what each was told of a failure."""

    def __init__(self, deadline: float) -> None:
        self.ends = socket.socketpair()
        self.heard: dict[int, Verdict] = {}
        self._both = threading.Barrier(3)
        self.leader, self.follower = (
            Watch(rank, {1 - rank: end}, self._hear(rank), deadline=deadline)
            for rank, end in enumerate(self.ends)
        )

    def _hear(self, rank: int) -> Callable[[Verdict], None]:
        def hear(verdict: Verdict) -> None:
            self.heard[rank] = verdict
            self._both.wait(20)

        return hear

    def judged(self) -> set[Verdict]:
        """Wait until both know."""
        self._both.wait(20)
        return set(self.heard.values())

    def close(self) -> None:
        self.leader.close()
        self.follower.close()
        for end in self.ends:
            end.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(watch, "BEAT_S", 0.05)
    monkeypatch.setattr(watch, "SILENCE_S", 1.0)
    made = Pair(deadline=0.8)
    yield made
    made.close()


def test_an_error_ends_both_with_its_cause(pair: Pair) -> None:
    threading.Thread(target=pair.judged).start()
    with pytest.raises(ZeroDivisionError), pair.follower.guard("step 7"):
        1 / 0  # noqa: B018
    assert pair.heard[0] == pair.heard[1]
    assert pair.heard[0].rank == 1
    assert "rank 1 failed in step 7: ZeroDivisionError" in pair.heard[0].text
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        pair.leader.check()
    with pytest.raises(EngineError, match="rank 1 failed"), pair.leader.guard("step 8"):
        pass


def test_a_broken_collective_is_explained_by_its_cause(pair: Pair) -> None:
    """The rank that died says nothing; the one that waits for it only sees a connection break."""
    threading.Thread(target=pair.judged).start()
    with (
        pytest.raises(EngineError, match="rank 1 has ended") as caught,
        pair.leader.guard("step 3"),
    ):
        broken(pair)
    assert isinstance(caught.value.__cause__, RuntimeError)


def broken(pair: Pair) -> None:
    pair.ends[1].shutdown(socket.SHUT_RDWR)
    raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")


def test_a_step_without_progress_says_where(pair: Pair) -> None:
    def hang() -> None:
        with pair.follower.guard("step 9"):
            stuck.wait(20)

    stuck = threading.Event()
    thread = threading.Thread(target=hang)
    thread.start()
    (verdict,) = pair.judged()
    stuck.set()
    thread.join()
    assert "rank 1 made no progress in step 9" in verdict.text
    assert "wait (" in verdict.text


def test_progress_and_warm_up_keep_the_deadline_away(pair: Pair) -> None:
    with pair.follower.guard("step 1"):
        for _ in range(12):
            pair.follower.touch()
            assert not threading.Event().wait(0.1)
    with pair.follower.guard("loading", limited=False):
        assert not threading.Event().wait(1.2)
    pair.leader.check()
    pair.follower.check()
    assert not pair.heard


def test_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process keeps its connection, and says nothing."""
    monkeypatch.setattr(watch, "BEAT_S", 0.05)
    monkeypatch.setattr(watch, "SILENCE_S", 0.4)
    ours, theirs = socket.socketpair()
    told = threading.Event()
    alone = Watch(0, {1: ours}, lambda verdict: told.set())
    began = time.monotonic()
    assert told.wait(20)
    assert 0.4 < time.monotonic() - began < 10
    with pytest.raises(EngineError, match="rank 1 has been silent"):
        alone.check()
    alone.close()
    ours.close()
    theirs.close()


def test_an_end_in_order_is_no_failure(pair: Pair) -> None:
    pair.leader.close()
    pair.ends[0].shutdown(socket.SHUT_RDWR)  # before the follower has closed its own
    pair.follower.close()
    assert not pair.heard


def test_the_heaviest_sign_decides() -> None:
    signs = [
        Sign(2, Weight.CONSEQUENCE, "a collective broke"),
        Sign(0, Weight.HANG, "no progress"),
        Sign(3, Weight.DEATH, "killed"),
        Sign(1, Weight.CONSEQUENCE, "another broke"),
    ]
    assert watch._verdict(signs) == Verdict(3, "killed")
    assert watch._verdict(signs[:2]) == Verdict(0, "no progress")
    hangs = [Sign(rank, Weight.HANG, f"rank {rank} hangs") for rank in (1, 0)]
    assert watch._verdict(hangs) == Verdict(1, "rank 1 hangs; rank 0 hangs")


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 1 << 20, 24_000_001])
def test_payloads_of_any_size(size: int) -> None:
    sent = Message(Kind.LAUNCH, 3, 1 << 40, random.Random(size).randbytes(size))
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=ours.sendall, args=(sent.encoded(),))
    thread.start()
    assert channel.receive(theirs) == sent
    thread.join()
    ours.close()
    with pytest.raises(EOFError):
        channel.receive(theirs)
    theirs.close()


def test_a_step_without_news_is_a_header() -> None:
    assert encode(Fifo()) == b""
    assert decode(b"") == ([], None)


def test_happenings_arrive_as_they_were() -> None:
    params = SamplingParams(
        n=2, temperature=0.5, logit_bias={5: -1.5, 7: 100}, stop=("a", "b"), stop_token_ids=(3,)
    )
    requests = tuple(
        Request(
            request_id=f"r{i}",
            prompt_token_ids=tuple(range(8000)),
            params=params,
            priority=-3,
            cache_salt="salt",
        )
        for i in range(64)
    )
    events: list[Happening] = [
        Submitted(requests),
        Aborted("r3"),
        Forked("r1", "twin"),
        Aborted("ünknown"),
    ]
    log: Fifo[Happening] = Fifo()
    for event in events:
        log = log.append(event)
    payload = encode(log, {"tokens": 2**64 - 1})
    assert len(payload) > 1 << 20  # the fixed buffer that others overflow
    assert decode(payload) == (events, {"tokens": 2**64 - 1})


def test_errors_keep_their_type() -> None:
    for error in (CheckpointError("damaged"), RequestError("too long", param="prompt")):
        again = channel.payload_error(channel.error_payload(error))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert getattr(again, "param", None) == getattr(error, "param", None)
