"""The page's files and their paths.

They are read once, and nothing else in the folder is served.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FILES = {
    "/": ("index.html", "text/html"),
    "/style.css": ("style.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/api.js": ("api.js", "text/javascript"),
    "/certificate.js": ("certificate.js", "text/javascript"),
    "/markdown.js": ("markdown.js", "text/javascript"),
}
"""By path, the name of each file in this folder, and its type."""

# No source but the server itself: an answer that is shown as HTML by mistake could load nothing.
_SOURCES = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {source}" for name, source in _SOURCES.items()),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Of each response: the page runs no other script, and connects to no other server."""


def page_routes() -> list[Route]:
    """Create a route for each file of the page."""
    routes: list[Route] = []
    for path, (name, kind) in FILES.items():
        routes.append(_route(path, name, kind))
    return routes


def _route(path: str, name: str, kind: str) -> Route:
    """Read a file of the page, and create its route."""
    # Read once: no request can name another file.
    content = (Path(__file__).parent / name).read_bytes()

    async def respond(request: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=kind)

    return Route(path, respond)
