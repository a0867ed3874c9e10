"""OpenAI's API over HTTP: a server for one model, which needs the packages of `quantkit[serve]`,
and a client, which needs none of them. This file imports none.
"""

from __future__ import annotations

import ipaddress
import re
from importlib.util import find_spec

from quantkit.base.json_values import format_value
from quantkit.base.messages import Message, Option
from quantkit.errors import RequestError

SLOTS = 8
WAITING = 64
TIME_LIMIT = 600.0
KEPT = 8
PORT = 8000
"""Sequences that run at the same time, requests that may wait for them, seconds that a request may
take, sequences that stay in the cache when they end, and the port, by default.
"""

CONNECTIONS = 256
"""Open connections of one address, by default: more than requests are taken at the same time, and
fewer than a process may usually have files open.
"""

# A host with or without a port; an IPv6 address is in brackets, as its colons would be ambiguous.
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:]*)(?::\d*)?", re.ASCII)
_NAME = re.compile(r"\[[0-9a-fA-F:.]+\]|[\w.-]+", re.ASCII)


def require_packages() -> None:
    """Raise a `RequestError` if a package of `quantkit[serve]` is not installed."""
    # `find_spec` imports nothing, so the check is fast.
    for name in ("llguidance", "starlette", "uvicorn", "prometheus_client"):
        if find_spec(name) is None:
            raise RequestError(f"{name} is not installed", hint='pip install "quantkit[serve]"')


def is_loopback(host: str) -> bool:
    """Tell whether a host, by name or address, is this machine alone."""
    # Other names are not resolved: a name server could give them any address later.
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def without_port(host: str) -> str | None:
    """Remove the port from the value of a header Host, and convert it to lower case.

    Returns None if the value is not a host.
    """
    match = _HOST.fullmatch(host.lower())
    if match is None:
        return None
    return match[1]


def parse_host_name(host: str) -> str:
    """Convert a name of a server to its form in the header Host.

    Raises `RequestError` if it is not a name.
    """
    # Several colons are an IPv6 address.
    if host.count(":") > 1 and not host.startswith("["):
        name = f"[{host}]"
    else:
        name = host
    if not _NAME.fullmatch(name):
        raise RequestError(
            Message(Option("allowed_host"), " is not a valid host name"),
            found=format_value(host),
            expected="a name or an address, without a port",
            argument="allowed_host",
        )
    return name.lower()
