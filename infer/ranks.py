"""The leading rank's side of tensor parallelism: start the other ranks, tell them what to do.

``lead`` starts them itself, or meets those that torchrun started. What they are told is which model
to load, which engine to make, and which happenings from outside come before each step; everything
else they work out as this rank does. When nothing refers to them any more, they end.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.rendezvous import rendezvous

from infer import channel, groups, lockstep
from infer.channel import Kind, Message, Role
from infer.config import EngineConfig
from infer.errors import ConfigError, EngineError, InferError
from infer.host import Host
from infer.lockstep import Outside
from infer.parallel import TP
from infer.watch import STEP_DEADLINE_S, Beat, Verdict, Watch

logger = logging.getLogger(__name__)

END_S = 5.0  # for followers that were told to stop
DEATH_S = 0.3  # for a process whose connection broke to be gone as well


class JoinGroup(msgspec.Struct, array_like=True, frozen=True):
    """What a follower needs to join."""

    rank: int
    size: int
    device: str  # "cpu" or "cuda"
    name: str
    local: bool
    store: tuple[str, int] | None  # None: torchrun's
    step_deadline: float


def torchrun_rank() -> int | None:
    """This process's rank when torchrun started several, else None."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if all(name in os.environ for name in names) and int(os.environ["WORLD_SIZE"]) > 1:
        return int(os.environ["RANK"])
    return None


def lead(
    size: int, device: torch.device | str = "cpu", *, step_deadline: float = STEP_DEADLINE_S
) -> TP:
    """Rank 0 of ``size`` ranks, started here or by torchrun.

    ``load(..., tp=...)`` takes the result, any number of times. ``step_deadline`` is how many
    seconds a step may make no progress before the ranks count as hung.

    Raises:
        ConfigError: there are not that many GPUs, or torchrun started another number.
        EngineError: a rank ended before it was there.
    """
    device = torch.device(device)
    if device.index:
        raise ConfigError(
            f"device is {device}, but rank 0 of {size} takes the first GPU, and the others those "
            "that follow; choose GPUs with CUDA_VISIBLE_DEVICES"
        )
    torchrun = torchrun_rank()
    if torchrun is not None:
        if torchrun != 0 or int(os.environ["WORLD_SIZE"]) != size:
            raise ConfigError(
                f"tp is {size}, but torchrun started {os.environ['WORLD_SIZE']} ranks; leave --tp "
                "out, or give the same number to --nproc-per-node (times --nnodes)"
            )
        store, connections = _meet(size)
        followers = _Followers(connections, {}, store)
    else:
        if device.type == "cuda" and size > torch.cuda.device_count():
            raise ConfigError(
                f"tp is {size}, but this host has {torch.cuda.device_count()} GPUs; lower it, or "
                "start ranks on several hosts with torchrun"
            )
        store = _local_store()
        followers = _spawn(size, store)
    ranks = _Ranks(followers, step_deadline, _indexed(device))
    name = f"purestep-{secrets.token_hex(4)}"
    local = torchrun is None or os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    for rank in followers.controls:
        where = ("127.0.0.1", store.port) if torchrun is None else None
        join = JoinGroup(rank, size, device.type, name, local, where, step_deadline)
        ranks.send(rank, Message(Kind.GROUP, payload=msgspec.msgpack.encode(join)))
    with ranks.watch.guard("the start of the ranks", limited=False):
        ranks.answers()
        place = groups.join(store, 0, size, name, _indexed(device), local=local)
        followers.place = place
    return replace(place, link=Leading(ranks, _Lease(ranks, Kind.DROP_MODEL, 0)))


def _local_store() -> Any:
    """A store for ranks of this host, on a free port that other hosts cannot reach."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


# --- the followers --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Followers:
    """Everything that has to be freed when the ranks end."""

    connections: dict[int, dict[Role, socket.socket]]
    processes: dict[int, subprocess.Popen[bytes]]
    store: Any
    place: TP | None = None
    watch: Watch | None = None
    runtimes: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    ended: bool = False

    @property
    def controls(self) -> dict[int, socket.socket]:
        """Connections that carry messages, by rank."""
        return {rank: roles[Role.CONTROL] for rank, roles in self.connections.items()}

    def describe(self, rank: int) -> str:
        """How a rank whose connection broke has ended."""
        process = self.processes.get(rank)
        if process is None:
            return f"rank {rank} has ended"
        try:
            code = process.wait(DEATH_S)
        except subprocess.TimeoutExpired:
            return f"rank {rank} (process {process.pid}) closed its connection"
        if code < 0:
            name = signal.Signals(-code).name
            return f"rank {rank} (process {process.pid}) was killed by {name}"
        return f"rank {rank} (process {process.pid}) ended with exit code {code}"

    def fail(self, verdict: Verdict) -> None:
        """End everything at once, so that nobody here goes on waiting."""
        for process in self.processes.values():
            process.kill()
        for control in self.controls.values():
            _shut(control)
        if self.place is not None:
            groups.abort(self.place)
        for process in self.processes.values():
            process.wait()

    def end(self) -> None:
        """Tell the followers to stop, wait for them, and free everything. Idempotent."""
        if self.ended:
            return
        self.ended = True
        if self.watch is not None:
            self.watch.close()
        for control in self.controls.values():
            try:
                control.sendall(Message(Kind.STOP).encoded())
            except OSError:
                pass  # ended already
        for runtime in list(self.runtimes):
            runtime.release()
        if self.place is not None:
            groups.release(self.place)
        for process in self.processes.values():
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for roles in self.connections.values():
            for connection in roles.values():
                connection.close()


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # not connected any more


def _spawn(size: int, store: Any) -> _Followers:
    """Start the other ranks on this host, each at the far end of two socket pairs."""
    followers = _Followers({}, {}, store)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    for rank in range(1, size):
        ours, theirs = zip(*(socket.socketpair() for _ in Role), strict=True)
        numbers = [str(end.fileno()) for end in theirs]
        followers.connections[rank] = dict(zip(Role, ours, strict=True))
        followers.processes[rank] = subprocess.Popen(
            [sys.executable, "-m", "infer.worker", str(rank), *numbers],
            pass_fds=[end.fileno() for end in theirs],
            stdin=subprocess.DEVNULL,
            stdout=2,  # only this rank prints
            start_new_session=True,  # a terminal's Ctrl-C is for this rank to handle
            env=environment,
        )
        for end in theirs:
            end.close()
    return followers


def torchrun_store() -> Any:
    """The store of the processes that torchrun started."""
    store, _, _ = next(rendezvous("env://", timeout=timedelta(minutes=5)))
    return PrefixStore("purestep", store)


def _meet(size: int) -> tuple[Any, dict[int, dict[Role, socket.socket]]]:
    store = torchrun_store()
    master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    listener, token = channel.listen(store, master)
    with listener:
        return store, channel.accept(listener, token, size)


class _Ranks:
    """The running followers. They end when this does."""

    def __init__(self, followers: _Followers, step_deadline: float, device: torch.device) -> None:
        self._followers = followers
        watched = {rank: roles[Role.WATCH] for rank, roles in followers.connections.items()}
        self.watch = followers.watch = Watch(
            0,
            watched,
            followers.fail,
            deadline=step_deadline,
            describe=followers.describe,
            memory=lambda: groups.memory_in_use(device),
        )
        self.dropped: deque[Message] = deque()
        self.last_model = self.last_engine = 0
        self.close = weakref.finalize(self, followers.end)

    def hold(self, runtime: Any) -> None:
        """Release ``runtime`` before the group."""
        self._followers.runtimes.add(runtime)

    def send(self, rank: int, message: Message) -> None:
        """Tell one follower."""
        self._followers.controls[rank].sendall(message.encoded())

    def tell(self, message: Message) -> None:
        """Tell all followers, after what they may forget."""
        if not self.close.alive:
            raise EngineError("the other ranks were closed; load the model again")
        data = message.encoded()
        while self.dropped:
            data = self.dropped.popleft().encoded() + data
        for roles in self._followers.connections.values():
            roles[Role.CONTROL].sendall(data)

    def answers(self, limit_s: float | None = None) -> None:
        """Wait until every follower has done what it was told.

        Raises:
            InferError: one of them refused.
            TimeoutError: one of them had no answer within ``limit_s``.
        """
        refused: InferError | None = None
        for control in self._followers.controls.values():
            control.settimeout(limit_s)
            answer = channel.receive(control)
            control.settimeout(None)
            if answer.kind is Kind.REFUSED:
                refused = refused or channel.payload_error(answer.payload)
        if refused is not None:
            raise refused


class _Lease:
    """Held by everything that needs a model or engine of the followers."""

    def __init__(self, ranks: _Ranks, kind: Kind, number: int) -> None:
        self.ranks = ranks
        self.number = number
        if number:
            weakref.finalize(self, ranks.dropped.append, Message(kind, number)).atexit = False

    def holds(self, runtime: Any) -> None:
        """``runtime`` must be released before the ranks end."""
        self.ranks.hold(runtime)


# --- the link -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Leading:
    """The link of rank 0 (``infer.parallel.Link``), for one model."""

    _ranks: _Ranks = field(repr=False)
    _lease: _Lease = field(repr=False)

    @property
    def leads(self) -> bool:
        """Yes."""
        return True

    def touch(self) -> None:
        """Note progress."""
        self._ranks.watch.touch()

    def check(self) -> None:
        """Raise EngineError once the group has failed."""
        self._ranks.watch.check()

    def guard(self, what: str) -> Any:
        """A block that all ranks run together."""
        return self._ranks.watch.guard(what)

    def reports(self) -> tuple[Beat, ...]:
        """How every rank fares, those of the others at most a second old."""
        return self._ranks.watch.reports()

    def close(self) -> None:
        """End the followers."""
        self._ranks.close()

    @contextmanager
    def loading(self, tp: TP, options: Mapping[str, Any]) -> Iterator[TP]:
        """A block in which all ranks load a model; gives the place to put into it."""
        ranks = self._ranks
        ranks.last_model += 1
        number = ranks.last_model
        message = Message(Kind.LOAD, number, payload=msgspec.msgpack.encode(options))
        with self._together(message):
            yield replace(tp, link=Leading(ranks, _Lease(ranks, Kind.DROP_MODEL, number)))

    @contextmanager
    def opening(self, config: EngineConfig) -> Iterator[Outside | None]:
        """A block in which all ranks make an engine."""
        ranks = self._ranks
        ranks.last_engine += 1
        number = ranks.last_engine
        payload = msgspec.msgpack.encode((self._lease.number, config))
        with self._together(Message(Kind.OPEN, number, payload=payload)):
            yield Outside(number, _Lease(ranks, Kind.DROP_ENGINE, number))

    @contextmanager
    def _together(self, message: Message) -> Iterator[None]:
        """Tell the others, run the block, wait for them. A refusal on all ranks harms nobody."""
        refused: InferError | None = None
        with self._ranks.watch.guard(f"{message.kind.name.lower()}ing", limited=False):
            self._ranks.tell(message)
            try:
                yield
            except InferError as error:
                self._ranks.watch.check()
                refused = error
            try:
                self._ranks.answers(channel.REFUSED_S if refused is not None else None)
            except InferError as error:
                refused = refused or error
            except TimeoutError:
                # They did not refuse, and wait for this rank in a collective: no way back.
                assert refused is not None
                raise refused from None
            if refused is not None:
                self._ranks.tell(Message(Kind.HEARD))
        if refused is not None:
            raise refused

    def launching(self, outside: Outside, step: int, host: Host) -> None:
        """Tell the followers to launch a step."""
        self._ranks.watch.count()
        check = lockstep.fingerprint(host) if step % lockstep.CHECK_EVERY == 0 else None
        self._step(Kind.LAUNCH, outside, step, lockstep.encode(outside.events, check))

    def collecting(self, outside: Outside, step: int) -> None:
        """Tell the followers to collect a step."""
        self._step(Kind.COLLECT, outside, step, lockstep.encode(outside.events))

    def _step(self, kind: Kind, outside: Outside, step: int, payload: bytes) -> None:
        self._ranks.tell(Message(kind, outside.engine, step, payload))
