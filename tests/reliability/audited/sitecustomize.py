"""Every address that a process and its children name to the system goes into a file."""

import os
import sys

EVENTS = {"socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname"}


def note(event: str, arguments: tuple[object, ...]) -> None:
    if event in EVENTS or event == "socket.sendto":
        address = arguments[-1] if event.split(".")[1] in ("connect", "bind", "sendto") else None
        host = address[0] if isinstance(address, tuple) else arguments[0]
        if isinstance(address, (str, bytes)):
            host = "unix"
        with open(os.environ["AUDIT_FILE"], "a", encoding="utf-8") as file:
            file.write(f"{event} {host!r}\n")


sys.addaudithook(note)
