"""Where a server listens, and that it says at once when it cannot."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from octavo.config import ServerConfig
from octavo.errors import ConfigError
from octavo.server.listener import bind, check_certificate, listening
from support.certificate import CERTIFICATE, KEY


def test_a_wrong_host_is_a_config_error():
    with pytest.raises(ConfigError, match="--host"):
        bind("192.0.2.1", 8000)


def test_a_busy_port_is_a_config_error():
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^port {port} on 127.0.0.1 cannot be used: Address already in use"):
            bind("127.0.0.1", port)


def test_a_socket_in_the_file_system_is_there_as_long_as_the_server(tmp_path):
    path = tmp_path / "socket"
    with listening(ServerConfig(uds=str(path))) as listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        listener.accept()[0].close()
    assert not path.exists()


def test_a_stale_socket_is_replaced(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with listening(ServerConfig(uds=str(path))), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    assert not path.exists()


def test_a_live_socket_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "socket"
    config = ServerConfig(uds=str(path))
    with listening(config):
        with pytest.raises(ConfigError, match=f"^{path} cannot be used: a server listens there"), listening(config):
            pass
        assert path.is_socket()


def test_the_socket_of_another_is_not_removed(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as other:
        with listening(ServerConfig(uds=str(path))):
            other.bind(str(tmp_path / "other"))
            os.rename(tmp_path / "other", path)
        assert path.is_socket()


def test_what_is_no_socket_is_left_alone(tmp_path):
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="it exists and is no socket"), listening(ServerConfig(uds=str(path))):
        pass
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("path", "why"), [("/nowhere/socket", "No such file or directory"), ("/tmp/" + "x" * 200, "too long")]
)
def test_a_path_that_cannot_be_is_refused(path, why):
    with pytest.raises(ConfigError, match=f"cannot be used: .*{why}"), listening(ServerConfig(uds=path)):
        pass


ENCRYPTED = """\
-----BEGIN EC PRIVATE KEY-----
Proc-Type: 4,ENCRYPTED
DEK-Info: AES-128-CBC,3EE4DF3B86326F2EB7138115FD216C0F

4vzB47J4jIRkHWj77iqMMcLUxCWxQwbfQ9+XUhtt2tKvkidQupIIV8D3jIheVzx2
7wEvIAFF7RfbUZAXQEMnrMqxDUaXky2pIxmPwPK2FT6Kj0/PO2zWO9jrYW5fCZzy
3xHXbWM2xIeApBIA4Y91ua0rnpHzSnmGp1Bg5BBfvs4=
-----END EC PRIVATE KEY-----
"""


@pytest.mark.parametrize(
    ("certificate", "key", "why"),
    [
        (CERTIFICATE, None, "PEM"),
        ("nonsense", KEY, "PEM"),
        (CERTIFICATE, "", "PEM"),
        (CERTIFICATE, ENCRYPTED, ""),
    ],
    ids=["no key", "no certificate", "empty key", "encrypted key"],
)
def test_a_wrong_certificate_is_refused(tmp_path: Path, certificate: str, key: str | None, why: str):
    certfile, keyfile = tmp_path / "cert.pem", tmp_path / "key.pem"
    certfile.write_text(certificate)
    if key is not None:
        keyfile.write_text(key)
    config = ServerConfig(ssl_certfile=str(certfile), ssl_keyfile=None if key is None else str(keyfile))
    with pytest.raises(ConfigError, match=f"^{certfile}.* cannot be used: .*{why}"):
        check_certificate(config)


def test_certificate_and_key_may_share_a_file(tmp_path: Path):
    both = tmp_path / "both.pem"
    both.write_text(CERTIFICATE + KEY)
    check_certificate(ServerConfig(ssl_certfile=str(both)))


def test_a_certificate_that_is_not_there(tmp_path: Path):
    path = str(tmp_path / "none.pem")
    with pytest.raises(ConfigError, match=f"^{path} cannot be used: No such file or directory"):
        check_certificate(ServerConfig(ssl_certfile=path))
