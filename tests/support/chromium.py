"""A page in headless Chromium, driven through a pipe in its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), "Escape": (27, "")}
"""The codes of keys that the browser acts on itself, and their characters."""
_SHIFT = 8


def executable() -> str | None:
    """Where Chromium is: what CHROMIUM says, or on PATH."""
    return os.environ.get("CHROMIUM") or next(
        (path for name in NAMES if (path := shutil.which(name))), None
    )


class Page:
    """One page; what its console said that is wrong, and what it asked the network for."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._left, self._count = write, read, b"", 0
        self._session: str | None = None
        self._loaded = False
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> Any:
        """Ask for something, and wait for the answer."""
        self._count += 1
        requested: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            requested["sessionId"] = self._session
        os.write(self._write, json.dumps(requested).encode() + b"\0")
        while True:
            reported = self._reported()
            if reported.get("id") == self._count:
                assert "error" not in reported, reported["error"]
                return reported["result"]

    def open(
        self,
        page: Path | str,
        *,
        width: int,
        height: int = 740,
        dark: bool = False,
        phone: bool = False,
    ) -> None:
        """Load a file, or an address, in a window of that size."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self.send("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while not self._loaded:
            self._reported()

    def value(self, expression: str) -> Any:
        """What JavaScript gives."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def hover(self, selector: str) -> None:
        """Scroll to an element, and move the mouse over it."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", **self._middle(selector))

    def click(self, selector: str) -> None:
        at = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def press(self, key: str, *, shift: bool = False) -> None:
        code, text = _KEYS.get(key, (0, ""))
        given = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": code,
            "modifiers": _SHIFT * shift,
        }
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **given)
        self.send("Input.dispatchKeyEvent", type="keyUp", **given)

    def write(self, text: str) -> None:
        """Type where the focus is."""
        self.send("Input.insertText", text=text)

    def wait(self, expression: str, seconds: float = 60) -> None:
        """Until JavaScript gives a true value."""
        deadline = time.monotonic() + seconds
        while not self.value(f"!!({expression})"):
            assert time.monotonic() < deadline, f"not true after {seconds} seconds: {expression}"
            time.sleep(0.02)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _middle(self, selector: str) -> dict[str, float]:
        name = json.dumps(selector)
        self.value(f"document.querySelector({name}).scrollIntoView({{block: 'center'}})")
        rect = f"document.querySelector({name}).getClientRects()[0]"
        left, top, width, height = self.value(f"(r => [r.x, r.y, r.width, r.height])({rect})")
        return {"x": left + width / 2, "y": top + height / 2}

    def _reported(self) -> dict[str, Any]:
        """The next thing that the browser says; what concerns the page is kept."""
        while b"\0" not in self._left:
            part = os.read(self._read, 1 << 20)
            assert part, "Chromium has ended"
            self._left += part
        first, _, self._left = self._left.partition(b"\0")
        reported: dict[str, Any] = json.loads(first)
        method, params = reported.get("method"), reported.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.errors.append(str(params["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        return reported


@contextmanager
def opened(program: str, profile: Path) -> Iterator[Page]:
    """An empty page, in a browser of its own."""
    read_here, write_there = os.pipe()
    read_there, write_here = os.pipe()
    command = [
        program,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--no-first-run",
        "--disable-extensions",
        "--disable-background-networking",
        f"--user-data-dir={profile}",
        "--remote-debugging-pipe",
    ]
    # The browser reads from its file 3 and writes to its file 4.
    pipes = f'exec 3<&{read_there} 4>&{write_there}; exec "$@"'
    shell = ["bash", "-c", pipes, "bash", *command]
    with (profile.parent / "chromium.log").open("wb") as log:
        browser = subprocess.Popen(
            shell, pass_fds=(read_there, write_there), stdout=log, stderr=log
        )
    os.close(read_there)
    os.close(write_there)
    try:
        page = Page(write_here, read_here)
        yield page
    finally:
        os.close(write_here)  # without it the browser ends
        try:
            browser.wait(timeout=20)
        except subprocess.TimeoutExpired:
            browser.kill()
            browser.wait()
        os.close(read_here)
