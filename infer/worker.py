"""Ranks above 0: they do what the leading rank does, on their own copy of the host state."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import TCPStore

from infer import channel, engine, groups, lockstep
from infer.channel import Kind, Message, Role
from infer.config import EngineConfig, ModelConfig
from infer.errors import EngineError, InferError
from infer.host import Host
from infer.initialize import init
from infer.loading import load
from infer.lockstep import Aborted, Forked, Outside, Submitted
from infer.model import Model
from infer.parallel import TP
from infer.ranks import JoinGroup, torchrun_store
from infer.state import EngineState, Ticket
from infer.watch import Beat, Verdict, Watch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Following:
    """The link of a rank that follows (``infer.parallel.Link``)."""

    watch: Watch = field(repr=False)

    @property
    def leads(self) -> bool:
        """No."""
        return False

    def touch(self) -> None:
        """Note progress."""
        self.watch.touch()

    def check(self) -> None:
        """Raise EngineError once the group has failed."""
        self.watch.check()

    def guard(self, what: str) -> Any:
        """A block that all ranks run together."""
        return self.watch.guard(what)

    @contextmanager
    def loading(self, tp: TP, options: Mapping[str, Any]) -> Iterator[TP]:
        """Load as told."""
        yield tp

    @contextmanager
    def opening(self, config: EngineConfig) -> Iterator[Outside | None]:
        """Make an engine as told."""
        yield None

    def launching(self, outside: Outside, step: int, host: Host) -> None:
        """Nobody follows a follower."""

    def collecting(self, outside: Outside, step: int) -> None:
        """Nobody follows a follower."""

    def reports(self) -> tuple[Beat, ...]:
        """Of this rank and the leading one."""
        return self.watch.reports()

    def close(self) -> None:
        """The leading rank ends this one."""


@dataclass(slots=True)
class _Engine:
    """An engine of this rank: its newest state, and the steps in flight."""

    model: Model
    state: EngineState
    tickets: deque[Ticket] = field(default_factory=deque)


def main(arguments: list[str]) -> int:
    """Follow over two inherited sockets: ``python -m infer.worker RANK CONTROL WATCH``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank, *descriptors = map(int, arguments)
    ends = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    follow(rank, dict(zip(Role, ends, strict=True)))
    return 0


def follow_torchrun(rank: int) -> None:
    """Follow the leading rank of the processes that torchrun started, to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    store = torchrun_store()
    follow(rank, channel.connect(store, rank), store)


def follow(rank: int, connections: Mapping[Role, socket.socket], store: Any = None) -> None:
    """Do what the leading rank says until it says stop. A failure of the group ends the process."""
    device = torch.device("cpu")

    def memory() -> tuple[str, int]:
        return groups.memory_in_use(device)

    watch = Watch(rank, {0: connections[Role.WATCH]}, _end, memory=memory)
    control = connections[Role.CONTROL]
    follower: _Follower | None = None
    try:
        message = channel.receive(control)
        if message.kind is not Kind.STOP:
            follower = _join(control, message, watch, store)
            device = follower.device
            while (message := follower.next()).kind is not Kind.STOP:
                follower.obey(message)
    except BaseException as error:
        logger.exception("rank %d failed", rank)
        watch.explained(error, "what it was told")
        _leave(1)
    watch.close()
    if follower is not None:
        follower.release()


def _end(verdict: Verdict) -> None:
    """The group has failed: this rank has nothing to save."""
    _leave(1)


def _leave(code: int) -> None:
    """End without a teardown that could wait for a dead peer."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def _join(control: socket.socket, message: Message, watch: Watch, store: Any) -> _Follower:
    assert message.kind is Kind.GROUP
    join = msgspec.msgpack.decode(message.payload, type=JoinGroup)
    watch.limit(join.step_deadline)
    device = torch.device("cpu")
    if join.device == "cuda":
        index = join.rank if join.store is not None else int(os.environ["LOCAL_RANK"])
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    control.sendall(Message(Kind.DONE).encoded())
    if join.store is not None:
        store = TCPStore(*join.store)
    with watch.guard("the start of the ranks", limited=False):
        place = groups.join(store, join.rank, join.size, join.name, device, local=join.local)
    return _Follower(control, replace(place, link=Following(watch)), device, watch)


class _Follower:
    """Models and engines of this rank, by the numbers the leading rank gave them."""

    def __init__(self, control: socket.socket, tp: TP, device: torch.device, watch: Watch) -> None:
        self._control = control
        self._tp = tp
        self.device = device
        self._watch = watch
        self._models: dict[int, Model] = {}
        self._engines: dict[int, _Engine] = {}
        self._refused: InferError | None = None

    def next(self) -> Message:
        """Wait for the next message.

        Raises:
            InferError: this rank refused the last one, and the leading rank did not hear of it: it
                waits in a collective for what this rank will not do.
        """
        self._control.settimeout(None if self._refused is None else channel.REFUSED_S)
        try:
            message = channel.receive(self._control)
        except TimeoutError as error:
            assert self._refused is not None
            raise self._refused from error
        self._refused = None
        return message

    def obey(self, message: Message) -> None:
        """Carry out one message."""
        match message.kind:
            case Kind.LAUNCH:
                self._launch(message)
            case Kind.COLLECT:
                self._collect(message)
            case Kind.LOAD:
                self._answered(message, self._load)
            case Kind.OPEN:
                self._answered(message, self._open)
            case Kind.DROP_ENGINE:
                self._engines.pop(message.number, None)
            case Kind.DROP_MODEL:
                self._models.pop(message.number, None)
            case Kind.HEARD:
                pass
            case _:
                raise EngineError(f"the leading rank sent {message.kind.name}, out of order")

    def release(self) -> None:
        """Drop everything: graphs first, for they hold on to the group."""
        self._engines.clear()
        self._models.clear()
        groups.release(self._tp)

    def _answered(self, message: Message, act: Any) -> None:
        answer = Message(Kind.DONE)
        with self._watch.guard(f"{message.kind.name.lower()}ing", limited=False):
            try:
                act(message)
            except InferError as error:
                self._watch.check()
                answer = Message(Kind.REFUSED, payload=channel.error_payload(error))
                self._refused = error
        self._control.sendall(answer.encoded())

    def _load(self, message: Message) -> None:
        options = msgspec.msgpack.decode(message.payload)
        config = options.pop("config")
        self._models[message.number] = load(
            options.pop("model"),
            device=self.device,
            config=None if config is None else msgspec.convert(config, ModelConfig),
            tp=self._tp,
            progress=False,
            **options,
        )

    def _open(self, message: Message) -> None:
        kind = tuple[int, EngineConfig]
        number, config = msgspec.msgpack.decode(message.payload, type=kind)
        model = self._models[number]
        self._engines[message.number] = _Engine(model, init(model, config))

    def _heard(self, message: Message) -> _Engine:
        """The engine of a message, after what came from outside."""
        own = self._engines[message.number]
        events, check = lockstep.decode(message.payload)
        for event in events:
            match event:
                case Submitted(requests):
                    own.state = engine.submit(own.state, requests)
                case Aborted(request_id):
                    own.state = engine.abort(own.state, request_id)
                case Forked(request_id, new_id):
                    own.state = engine.fork(own.state, request_id, new_id)
        if check is not None:
            field_name = lockstep.first_difference(check, lockstep.fingerprint(own.state.host))
            if field_name is not None:
                raise EngineError(
                    f"the host state of rank {self._tp.rank} differs from rank 0's before step "
                    f"{message.step}, first in {field_name}"
                )
        return own

    def _launch(self, message: Message) -> None:
        own = self._heard(message)
        self._watch.count()
        own.state, ticket = engine.launch(own.model, own.state)
        assert ticket.step == message.step
        own.tickets.append(ticket)

    def _collect(self, message: Message) -> None:
        own = self._heard(message)
        own.state, _ = engine.collect(own.model, own.state, own.tickets.popleft())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
