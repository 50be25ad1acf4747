"""Where the server listens: a port, or a socket in the file system. It is taken before anything loads, so that whatever
is wrong with it is said at once. Knows nothing of HTTP.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import stat
from collections.abc import Iterator

from octavo.config import ServerConfig
from octavo.errors import ConfigError

BACKLOG = 2048  # connections that wait for an accept, also while the model loads
PROBE_SECONDS = 1.0
# Linux would keep up to 4 MiB of an answer that nobody reads. It doubles this; enough for megabytes a second at any
# distance on earth, where a stream of tokens needs some kilobytes.
SEND_BUFFER_BYTES = 128 * 1024


@contextlib.contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    """A listening socket; clients that come before the server is up wait in its queue. Raises ConfigError."""
    if config.uds is None:
        with bind(config.host, config.port) as listener:
            yield listener
        return
    with bind_unix(config.uds) as listener:
        ours = os.stat(config.uds).st_ino
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.stat(config.uds).st_ino == ours:  # and nobody has put another in its place
                    os.unlink(config.uds)


def bind(host: str, port: int) -> socket.socket:
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # also of what it accepts
        listener.bind(address)
        listener.listen(BACKLOG)
        return listener
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"port {port} on {host} cannot be used: {error.strerror} (--port, --host)", param="port"
        ) from None


def bind_unix(path: str) -> socket.socket:
    """The file is made with the umask's permissions. One that nobody listens at any more is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(path)
        listener.listen(BACKLOG)
        return listener
    except OSError as error:
        listener.close()
        raise ConfigError(f"{path} cannot be used: {error.strerror or error} (--uds)", param="uds") from None


def _remove_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(errno.EEXIST, "it exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError(errno.EADDRINUSE, "a server listens there")


def check_certificate(config: ServerConfig) -> None:
    """Raises ConfigError where certificate and key do not make a server."""
    if config.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Without a password, OpenSSL would ask for that of an encrypted key at the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        files = " and ".join(filter(None, (config.ssl_certfile, config.ssl_keyfile)))
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        message = f"{files} cannot be used: {why} (--ssl-certfile, --ssl-keyfile)"
        raise ConfigError(message, param="ssl_certfile") from None
