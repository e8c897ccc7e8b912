"""Ranks watch each other, so that one that dies, raises or hangs ends all of them with the cause.

Each rank has a thread that beats twice a second over a connection of its own. The leading rank's
collects the signs of a failure, decides what the cause was, and tells everybody.
"""

from __future__ import annotations

import logging
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import msgspec

from infer.errors import EngineError

logger = logging.getLogger(__name__)

BEAT_S = 0.5
SILENCE_S = 5.0
STEP_DEADLINE_S = 7.0  # without progress inside a step
GATHER_S = 0.4  # between the first sign of a failure and the verdict
VERDICT_S = 2.5  # a rank that failed waits so long for a better explanation
PREFIX = 4


class Weight(IntEnum):
    """How well a sign explains a failure."""

    CONSEQUENCE = 0  # a collective or a connection broke
    HANG = 1
    DEATH = 2
    ERROR = 3


class Sign(msgspec.Struct, tag="sign", array_like=True, frozen=True):
    """Something is wrong with a rank."""

    rank: int
    weight: Weight
    text: str


class Beat(msgspec.Struct, tag="beat", array_like=True, frozen=True):
    """A rank is alive, and how it fares."""

    rank: int
    device: str
    memory_bytes: int  # on the device, at most so far; on a CPU the process's, now
    steps: int  # launched
    busy_s: float  # in steps so far


class Farewell(msgspec.Struct, tag="farewell", array_like=True, frozen=True):
    """The leading rank ends the group in order."""


class Verdict(msgspec.Struct, tag="verdict", array_like=True, frozen=True):
    """The cause, from the leading rank: the end of all."""

    rank: int
    text: str


@dataclass(slots=True)
class _Block:
    """What the main thread is doing."""

    what: str
    limited: bool  # against the deadline
    thread: int
    since: float


class Watch:
    """One rank's watch over the others and over itself.

    Args:
        peers: connections by rank: of all followers on the leading rank, of rank 0 on the others.
        on_failure: called once, in the watch's thread, with the verdict.
        describe: says how a rank whose connection broke ended, waiting for it a moment.
        memory: device and bytes in use, for the beats.
    """

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, socket.socket],
        on_failure: Callable[[Verdict], None],
        *,
        deadline: float = STEP_DEADLINE_S,
        describe: Callable[[int], str] | None = None,
        memory: Callable[[], tuple[str, int]] = lambda: ("", 0),
    ) -> None:
        self.rank = rank
        self._peers = dict(peers)
        self._on_failure = on_failure
        self._deadline = deadline
        self._describe = describe or (lambda rank: f"rank {rank} has ended")
        self._memory = memory
        self._block: _Block | None = None
        self._signs: list[Sign] = []
        self._verdict: Verdict | None = None
        self._judged = threading.Event()
        self._closing = threading.Event()
        self._heard = dict.fromkeys(self._peers, time.monotonic())
        self._steps, self._busy_s = 0, 0.0
        self._beats: dict[int, Beat] = {}
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    # --- the main thread's side -------------------------------------------------------------------

    def check(self) -> None:
        """Raise EngineError once the group has failed."""
        if self._verdict is not None:
            raise EngineError(self._verdict.text)

    def touch(self) -> None:
        """Note progress."""
        if self._block is not None:
            self._block.since = time.monotonic()

    @contextmanager
    def guard(self, what: str, *, limited: bool = True) -> Iterator[None]:
        """A block that all ranks run; see ``infer.parallel.Link.guard``."""
        self.check()
        began = time.monotonic()
        outer, self._block = self._block, _Block(what, limited, threading.get_ident(), began)
        try:
            yield
        except BaseException as error:
            fault = self.explained(error, what)
            if fault is error:
                raise
            raise fault from error
        finally:
            self._block = outer
            if limited:
                self._busy_s += time.monotonic() - began

    def explained(self, error: BaseException, what: str) -> BaseException:
        """``error`` of this rank, or the EngineError that says which rank's fault it was."""
        text = f"rank {self.rank} failed in {what}: {type(error).__name__}: {error}"
        self.sign(Sign(self.rank, _weight(error), text))
        self._judged.wait(VERDICT_S)
        verdict = self._verdict
        if verdict is None or verdict.rank == self.rank:
            return error
        return EngineError(verdict.text)

    def count(self) -> None:
        """Note the launch of a step."""
        self._steps += 1

    def reports(self) -> tuple[Beat, ...]:
        """How this rank fares now, and what it last heard of the others."""
        own = Beat(self.rank, *self._memory(), self._steps, self._busy_s)
        return tuple(beat for _, beat in sorted({**self._beats, self.rank: own}.items()))

    def limit(self, deadline: float) -> None:
        """Set the seconds a step may make no progress."""
        self._deadline = deadline

    def sign(self, sign: Sign) -> None:
        """Report what is wrong; the watch does the rest."""
        self._signs.append(sign)
        self._poke()

    def close(self) -> None:
        """Stop watching: from now on, ends are no failures."""
        if self.rank == 0 and self._verdict is None:
            self._send(Farewell())
        self._closing.set()
        self._poke()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # --- the thread -------------------------------------------------------------------------------

    def _poke(self) -> None:
        try:
            self._waker.send(b"x")
        except OSError:
            pass  # the thread has ended already

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:
            # Nobody would notice a failure any more, so this is one.
            logger.exception("the watch of rank %d failed", self.rank)
            self._signs.append(Sign(self.rank, Weight.ERROR, f"its watch failed: {error}"))
            self._judge()

    def _watch(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._wake, selectors.EVENT_READ, None)
        buffers = {rank: bytearray() for rank in self._peers}
        for rank, peer in self._peers.items():
            selector.register(peer, selectors.EVENT_READ, rank)
        next_beat = last = time.monotonic()
        judge_at: float | None = None
        while not self._closing.is_set():
            wake_at = min(next_beat, judge_at or next_beat)
            for key, _ in selector.select(max(0.0, wake_at - time.monotonic())):
                if key.data is None:
                    self._wake.recv(64)
                elif not self._read(key.data, buffers[key.data]):
                    selector.unregister(key.fileobj)
            now = time.monotonic()
            if now - last > 4 * BEAT_S:  # this thread itself was held up: nobody was silent
                self._heard = dict.fromkeys(self._peers, now)
            last = now
            if now >= next_beat:
                next_beat = now + BEAT_S
                self._send(Beat(self.rank, *self._memory(), self._steps, self._busy_s))
                self._look(now)
            if self._signs and judge_at is None:
                judge_at = self._first_sign(now)
            if self._verdict is not None or (judge_at is not None and now >= judge_at):
                if not self._closing.is_set():
                    self._judge()
                break
        selector.close()
        self._wake.close()
        self._waker.close()

    def _first_sign(self, now: float) -> float:
        if self.rank == 0:
            return now + GATHER_S
        for sign in self._signs:
            self._send(sign)
        if any(sign.rank == 0 and sign.weight == Weight.DEATH for sign in self._signs):
            return now  # nobody is left to judge
        return now + VERDICT_S - GATHER_S

    def _read(self, rank: int, buffer: bytearray) -> bool:
        """Take what a peer says; False once it is gone."""
        try:
            data = self._peers[rank].recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            if not self._closing.is_set():
                self._signs.append(Sign(rank, Weight.DEATH, self._describe(rank)))
            return False
        self._heard[rank] = time.monotonic()
        buffer += data
        while len(buffer) >= PREFIX:
            end = PREFIX + int.from_bytes(buffer[:PREFIX], "little")
            if len(buffer) < end:
                break
            self._take(_DECODER.decode(bytes(buffer[PREFIX:end])))
            del buffer[:end]
        return True

    def _take(self, said: Sign | Beat | Farewell | Verdict) -> None:
        match said:
            case Farewell():
                self._closing.set()
            case Beat():
                self._beats[said.rank] = said
            case Sign():
                self._signs.append(said)
            case Verdict():
                self._verdict = said

    def _look(self, now: float) -> None:
        """Look for silence and for a step without progress."""
        block = self._block
        if block is not None and not block.limited:
            return  # loading and warming up hold threads up, on all ranks
        if block is not None and now - block.since > self._deadline:
            text = f"rank {self.rank} made no progress in {block.what} for {self._deadline:.0f} s"
            self._signs.append(Sign(self.rank, Weight.HANG, f"{text}, {_where(block.thread)}"))
        for rank, heard in self._heard.items():
            if now - heard > SILENCE_S:
                text = f"rank {rank} has been silent for {SILENCE_S:.0f} s"
                self._signs.append(Sign(rank, Weight.DEATH, text))

    def _judge(self) -> None:
        verdict = self._verdict or _verdict(self._signs)
        self._verdict = verdict
        if self.rank == 0:
            self._send(verdict)
        logger.error("rank %d: the group ends: %s", self.rank, verdict.text)
        try:
            self._on_failure(verdict)
        finally:
            self._judged.set()

    def _send(self, said: Sign | Beat | Farewell | Verdict) -> None:
        payload = msgspec.msgpack.encode(said)
        for peer in self._peers.values():
            try:
                peer.send(len(payload).to_bytes(PREFIX, "little") + payload, socket.MSG_DONTWAIT)
            except OSError:
                pass  # gone, which reading finds out; or so far behind that it will be


_DECODER = msgspec.msgpack.Decoder(Sign | Beat | Farewell | Verdict)


def _verdict(signs: list[Sign]) -> Verdict:
    """The best explanation; all hangs together, since each waits for another."""
    heaviest = max(sign.weight for sign in signs)
    chosen = [sign for sign in signs if sign.weight == heaviest]
    texts = [sign.text for sign in chosen] if heaviest == Weight.HANG else [chosen[0].text]
    return Verdict(chosen[0].rank, "; ".join(dict.fromkeys(texts)))


def _weight(error: BaseException) -> Weight:
    broken = isinstance(error, (OSError, EOFError)) or type(error).__name__ == "DistBackendError"
    if broken or (isinstance(error, RuntimeError) and "gloo" in str(error).lower()):
        return Weight.CONSEQUENCE
    return Weight.CONSEQUENCE if isinstance(error, EngineError) else Weight.ERROR


def _where(thread: int) -> str:
    """Where a thread is, as far as this package goes."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "its thread has ended"
    stack = traceback.extract_stack(frame)
    return "in " + " < ".join(f"{f.name} ({f.filename}:{f.lineno})" for f in reversed(stack[-4:]))
