"""This process's TCP connections, those of libraries included, by file descriptor."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator
from typing import NamedTuple

__all__ = ["Socket", "connected_sockets", "socket_inodes"]


class Socket(NamedTuple):
    """A connection of this process; `ports` are its own and the peer's."""

    descriptor: int
    inode: str
    ports: tuple[int, int]

    def shut_down(self) -> None:
        """End it for both sides; nothing happens where it is closed by now."""
        # a closed descriptor may be in use again for something else
        if _inode(self.descriptor) == self.inode:
            # raises where the other side was faster
            with contextlib.suppress(OSError), _opened(self.descriptor) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    def is_open(self) -> bool:
        """False once the peer has closed it."""
        try:
            with _opened(self.descriptor) as connection:
                return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False


def socket_inodes() -> set[str]:
    """Those of all sockets there are now, for `connected_sockets` to leave out later."""
    inodes = (_inode(int(name)) for name in os.listdir("/proc/self/fd"))
    return {inode for inode in inodes if inode.startswith("socket:")}


def connected_sockets(but: Collection[str] = ()) -> Iterator[Socket]:
    """All connections there are now, `but` for these inodes; those that only listen are left out.

    Opening a socket to ask it takes far longer than reading its inode.
    """
    for name in os.listdir("/proc/self/fd"):
        inode = _inode(int(name))
        if inode.startswith("socket:") and inode not in but:
            with contextlib.suppress(OSError), _opened(int(name)) as connection:
                if connection.type == socket.SOCK_STREAM and connection.family != socket.AF_UNIX:
                    # the second raises for a socket that listens
                    ports = connection.getsockname()[1], connection.getpeername()[1]
                    yield Socket(int(name), inode, ports)


def _opened(descriptor: int) -> socket.socket:
    """The socket under a descriptor of its own; OSError where it was closed meanwhile."""
    return socket.socket(fileno=os.dup(descriptor))


def _inode(descriptor: int) -> str:
    """Empty where the descriptor is closed."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
