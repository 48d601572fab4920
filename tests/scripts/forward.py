"""Forwards a port to another address, as a gateway does: ``forward.py LISTEN_HOST:PORT HOST:PORT``."""

import contextlib
import socket
import sys
import threading


def address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


with socket.create_server(address(sys.argv[1])) as door:
    while True:
        caller, _ = door.accept()
        try:
            called = socket.create_connection(address(sys.argv[2]))
        except OSError:
            caller.close()
            continue
        for ends in ((caller, called), (called, caller)):
            threading.Thread(target=pass_on, args=ends, daemon=True).start()
