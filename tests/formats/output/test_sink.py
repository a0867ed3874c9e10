"""A thread that writes or hashes may fail of anything: the job ends with that error, and nobody
waits for ever.
"""

from __future__ import annotations

import errno
import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from partial import contents, no_hang, partial

import quantkit
from quantkit.errors import DestinationError
from quantkit.formats.output import sink
from quantkit.jobs.output import writer as output

Break = Callable[[pytest.MonkeyPatch, BaseException], None]


@pytest.fixture(autouse=True)
def _in_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(output, "SAFE_POINT_BYTES", 50_000)
    with no_hang():
        yield


def _in_hashing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    class Hash:
        def __init__(self) -> None:
            self._true = hashlib.sha256()
            self.hexdigest = self._true.hexdigest

        def update(self, data: Any) -> None:
            if len(data) > 100_000:
                raise error
            self._true.update(data)

    monkeypatch.setattr(sink, "hashlib", SimpleNamespace(sha256=Hash))


def _in_writing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    true = sink._GrowingFile.write

    def write(self: Any, data: bytes | memoryview) -> None:
        if len(data) > 100_000:
            raise error
        true(self, data)

    monkeypatch.setattr(sink._GrowingFile, "write", write)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "error", [MemoryError("no more"), RuntimeError("a bug"), OSError(errno.EIO, "Input/output")]
)
@pytest.mark.parametrize("place", [_in_writing, _in_hashing])
@pytest.mark.parametrize("in_flight", [1 << 26, 1], ids=["at a safe point", "while others wait"])
def test_an_error_in_a_thread_ends_the_job(
    in_flight: int,
    place: Break,
    error: Exception,
    demo_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, dst = tmp_path / "whole", tmp_path / "out"
    quantkit.convert(demo_model, whole)
    with monkeypatch.context() as broken:
        broken.setattr(sink, "IN_FLIGHT_BYTES", in_flight)
        place(broken, error)
        expected = (
            DestinationError if isinstance(error, OSError) and place is _in_writing else type(error)
        )
        with pytest.raises(expected, match=r"no more|a bug|Input/output"):
            quantkit.convert(demo_model, dst)
    assert not [thread for thread in threading.enumerate() if thread.name == "quantkit-write"]
    assert not dst.exists()
    quantkit.convert(demo_model, dst, resume=True)
    assert contents(dst) == contents(whole)


@pytest.mark.parametrize("which", ["quantkit-write", "quantkit-hash"])
def test_a_thread_that_cannot_be_started_ends_the_job(
    which: str, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = threading.Thread.start
    started = []

    def start(self: threading.Thread) -> None:
        if self.name == which and not started:
            started.append(self)
            raise RuntimeError("can't start new thread")
        true(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        quantkit.convert(demo_model, tmp_path / "out")
    assert not [thread for thread in threading.enumerate() if thread.name == "quantkit-write"]
    assert partial(tmp_path / "out").is_dir()
    quantkit.convert(demo_model, tmp_path / "out", resume=True)  # the lock is free again
