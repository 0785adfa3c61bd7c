"""Where a server listens by its properties, and whether it can."""

import socket
from collections.abc import Mapping

from scripts.lib.errors import UserError

REST = ("inference", "management", "metrics")
_REST_PORTS = {"inference": 8080, "management": 8081, "metrics": 8082}
_GRPC_PORTS = {"grpc_inference": 7070, "grpc_management": 7071}


def free_ports(count: int = 5) -> list[int]:
    """Ports of the loopback interface that nothing listens on now, all different."""
    sockets = []
    try:
        for _ in range(count):
            listener = socket.socket()
            sockets.append(listener)
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()


def address(properties: Mapping[str, str], name: str) -> tuple[str, int]:
    """Host and port of one of the HTTP interfaces (`REST`). Raises UserError when they cannot be made out."""
    url = properties.get(f"{name}_address", f"http://127.0.0.1:{_REST_PORTS[name]}")
    host, _, port = url.partition("://")[2].partition(":")
    try:
        return host, int(port or _REST_PORTS[name])
    except ValueError:
        raise UserError(f"{name}_address: cannot make sense of {url}") from None


def client_url(properties: Mapping[str, str], name: str) -> str:
    """The URL to call a server by from this machine."""
    host, port = address(properties, name)
    scheme = properties.get(f"{name}_address", "http:").partition(":")[0]
    return f"{scheme}://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"


def check_ports(properties: Mapping[str, str]) -> None:
    """Raise UserError when a port that the properties name cannot be listened on."""
    for name in REST:
        _check_port(*address(properties, name), f"{name}_port")
    for name, default in _GRPC_PORTS.items():
        port = properties.get(f"{name}_port", str(default))
        if not port.isdecimal():
            raise UserError(f"{name}_port: cannot make sense of {port}")
        _check_port(properties.get(f"{name}_address", "127.0.0.1"), int(port), f"{name}_port")


def _check_port(host: str, port: int, field: str) -> None:
    with socket.socket() as listener:
        # As servers do: a port in TIME_WAIT is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen()
        except OSError as error:
            raise UserError(
                f"{field}: {host}:{port} cannot be used: {error.strerror}",
                hint="stop what listens there, or choose other ports in serving.yaml",
            ) from None
