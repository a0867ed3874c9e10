"""OpenAI's API over HTTP: a server for one model, which needs the packages of `quantkit[serve]`, and a client, which
needs none of them. This file imports none."""

from __future__ import annotations

import ipaddress
from importlib.util import find_spec

from quantkit.errors import RequestError

SLOTS, WAITING, TIME_LIMIT, KEPT, PORT = 8, 64, 600.0, 8, 8000
"""Sequences that run at the same time, requests that may wait for them, seconds that a request may take, sequences that
stay in the cache when they end, and the port, by default."""


def require_packages() -> None:
    """Raise a `RequestError` if a package of `quantkit[serve]` is not installed."""
    for name in ("llguidance", "starlette", "uvicorn", "prometheus_client"):
        if find_spec(name) is None:
            raise RequestError(f"{name} is not installed", hint='pip install "quantkit[serve]"')


def is_loopback(host: str) -> bool:
    """Whether a host, by name or address, is this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
