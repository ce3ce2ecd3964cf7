"""The socket that a server listens at."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator

from gemmakv.server.settings import Settings

BACKLOG = 1024  # connections that wait to be accepted


@contextlib.contextmanager
def bound(settings: Settings) -> Iterator[socket.socket]:
    """Holds a socket that listens while the body runs. Its file, if it has
    one, is removed at the end, in the process that made it. Raises OSError
    naming the address.
    """
    if not settings.is_path:
        yield bind(settings)
        return
    path, owner = settings.host, os.getpid()
    found = _bind_path(path, shared=bool(settings.api_keys))
    made = os.stat(path)
    try:
        yield found
    finally:
        if os.getpid() == owner:
            with contextlib.suppress(OSError):
                left = os.lstat(path)
                # A later file may have the number of the one that is gone.
                if os.path.samestat(left, made) and (
                    left.st_mtime_ns == made.st_mtime_ns
                ):
                    os.unlink(path)


def _bind_path(path: str, shared: bool) -> socket.socket:
    """Makes a Unix socket that listens. Its mode follows the umask; without
    keys (`shared` is false) others than its user and group never reach it.
    """
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        found.bind(path)
        mode = stat.S_IMODE(os.stat(path).st_mode)
        os.chmod(path, mode & (0o666 if shared else 0o660))
        found.listen(BACKLOG)
        found.setblocking(False)
    except OSError as error:
        found.close()
        raise OSError(f"host: {path}: {error.strerror or error}") from None
    return found


def _remove_stale(path: str) -> None:
    """Removes the socket of a server that is gone. Raises OSError for one at
    which a program listens, and for what is no socket.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(
            errno.EEXIST, "expected a free path or a socket, found a file"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # one that is busy does not answer
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass
    raise OSError(errno.EADDRINUSE, "another program listens there")


def bind(settings: Settings) -> socket.socket:
    """Makes a socket that listens. Raises OSError naming the address."""
    host, port = settings.host, settings.port
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise OSError(f"host: {host!r}: {error.strerror}") from None
    found = socket.socket(family, kind, proto)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(BACKLOG)
        found.setblocking(False)
    except OSError as error:
        found.close()
        words = error.strerror
        if error.errno == errno.EADDRINUSE:
            words = "another program listens there; --port takes another one"
        raise OSError(f"port: {host}:{port}: {words}") from None
    return found


def address_of(settings: Settings, sock: socket.socket) -> str:
    """Gives the address of a server as clients write it."""
    if settings.is_path:
        return f"unix:{settings.host}"
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
