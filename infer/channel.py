"""Messages between the leading rank and its followers: a fixed header and a payload of any size.

They travel over stream sockets of their own, between CPUs, never through the collectives: a socket
pair to a process on this host, TCP to another. Payloads are msgpack; nothing executable crosses.
"""

from __future__ import annotations

import secrets
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec

from infer import errors
from infer.errors import EngineError, InferError, RequestError

HEADER = struct.Struct("<BxxxIQQ")  # kind, engine or model, step, payload bytes
HELLO = struct.Struct("<32sIB")  # token, rank, role
CONNECT_S = 60.0
REFUSED_S = 10.0  # ranks that refuse what others do not may wait so long for each other


class Kind(IntEnum):
    """What a message asks, or answers."""

    GROUP = 1  # join the process group
    LOAD = 2  # load a model
    OPEN = 3  # make an engine
    LAUNCH = 4  # a step; payload: submits, aborts and forks before it
    COLLECT = 5
    DROP_ENGINE = 6
    DROP_MODEL = 7
    STOP = 8
    DONE = 9  # answers to GROUP, LOAD and OPEN
    REFUSED = 10  # payload: the error
    HEARD = 11  # all ranks know of a refusal


class Role(IntEnum):
    """The two connections of a follower."""

    CONTROL = 0
    WATCH = 1


@dataclass(frozen=True, slots=True)
class Message:
    """One message."""

    kind: Kind
    number: int = 0
    step: int = 0
    payload: bytes = b""

    def encoded(self) -> bytes:
        """Header and payload."""
        return HEADER.pack(self.kind, self.number, self.step, len(self.payload)) + self.payload


def receive(connection: socket.socket) -> Message:
    """Wait for a message.

    Raises:
        EOFError: the other end is gone.
    """
    kind, number, step, size = HEADER.unpack(_exactly(connection, HEADER.size))
    return Message(Kind(kind), number, step, _exactly(connection, size) if size else b"")


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size)
    if len(data) == size:
        return data
    buffer = bytearray(data)
    while len(buffer) < size:
        data = connection.recv(min(size - len(buffer), 1 << 20))
        if not data:
            raise EOFError("the other end closed the connection")
        buffer += data
    return bytes(buffer)


def error_payload(error: InferError) -> bytes:
    """A typed error as a payload."""
    return msgspec.msgpack.encode((type(error).__name__, str(error), getattr(error, "param", None)))


def payload_error(payload: bytes) -> InferError:
    """The error again."""
    name, text, param = msgspec.msgpack.decode(payload, type=tuple[str, str, str | None])
    kind = getattr(errors, name, EngineError)
    if not (isinstance(kind, type) and issubclass(kind, InferError)):
        kind = EngineError
    return kind(text, param=param) if issubclass(kind, RequestError) else kind(text)


# --- connections between hosts --------------------------------------------------------------------


def listen(store: Any, toward: tuple[str, int]) -> tuple[socket.socket, str]:
    """A listener on a free port, published in the group's store; it and the token it asks for.

    ``toward`` is an address all ranks reach: the interface that leads there is listened on.
    """
    with socket.socket(_family(toward), socket.SOCK_DGRAM) as probe:
        probe.connect(toward)
        host = probe.getsockname()[0]
    listener = socket.create_server((host, 0), family=_family((host, 0)))
    token = secrets.token_hex(16)
    port = listener.getsockname()[1]
    store.set("channel", msgspec.json.encode((host, port, token)).decode())
    return listener, token


def accept(listener: socket.socket, token: str, size: int) -> dict[int, dict[Role, socket.socket]]:
    """Both connections of every follower; strangers are turned away.

    Raises:
        EngineError: some did not come.
    """
    found: dict[int, dict[Role, socket.socket]] = {rank: {} for rank in range(1, size)}
    listener.settimeout(CONNECT_S)
    while any(len(roles) < len(Role) for roles in found.values()):
        try:
            connection, _ = listener.accept()
        except TimeoutError as error:
            missing = [str(rank) for rank, roles in found.items() if len(roles) < len(Role)]
            raise EngineError(
                f"ranks {', '.join(missing)} did not connect within {CONNECT_S:.0f} s; "
                "their output says why"
            ) from error
        connection.settimeout(CONNECT_S)
        try:
            given, rank, role = HELLO.unpack(_exactly(connection, HELLO.size))
        except (EOFError, OSError):
            connection.close()
            continue
        known = secrets.compare_digest(given, token.encode())
        if not known or rank not in found or role not in iter(Role):
            connection.close()
            continue
        found[rank][Role(role)] = tuned(connection)
    return found


def connect(store: Any, rank: int) -> dict[Role, socket.socket]:
    """A follower's two connections to the leading rank."""
    kind = tuple[str, int, str]
    host, port, token = msgspec.json.decode(store.get("channel"), type=kind)
    roles = {}
    for role in Role:
        connection = socket.create_connection((host, port), timeout=CONNECT_S)
        connection.sendall(HELLO.pack(token.encode(), rank, role))
        roles[role] = tuned(connection)
    return roles


def tuned(connection: socket.socket) -> socket.socket:
    """Blocking, and without waiting for more to send."""
    connection.settimeout(None)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _family(address: tuple[str, int]) -> socket.AddressFamily:
    return socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
