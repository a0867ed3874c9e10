"""Send the content of files to the hub, and report the progress of all of them."""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.base.progress import Progress
from quantkit.errors import RequestError
from quantkit.files.hub import PREFIX, silence_library
from quantkit.files.hub_failures import short, translate_write_error
from quantkit.files.hub_threads import Stall, run_in_threads
from quantkit.files.local_files import MEGABYTE, LocalFile, report_bytes

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

# Longer than the library waits when the hub limits the rate of requests.
_STALLED_SECONDS = 600.0
_NUM_THREADS = 4
_LARGE = MEGABYTE
"""Files of this size and more, and those that are not text, are probably stored apart from git."""


class UploadProgress:
    """Counts the bytes of each file that were sent.

    Attributes:
        ended: set when nothing more is to be sent.
        current: has the `name` of the file that a thread sends.
    """

    def __init__(self, sizes: Mapping[str, int], progress: Progress) -> None:
        self._sizes = sizes
        self._progress = progress
        self._done = dict.fromkeys(sizes, 0)
        self._total = sum(sizes.values())
        self._stall = Stall(_STALLED_SECONDS)
        self.ended = threading.Event()
        self.current = threading.local()

    def reach(self, name: str, position: int) -> None:
        """Record that a file was sent up to a position; a retry begins at 0 again."""
        # The threads of requests cannot be stopped from outside; this error ends them at their next
        # read.
        if self.ended.is_set():
            raise InterruptedError("the upload has ended")
        # The maximum, so that progress never goes back.
        self._done[name] = max(self._done[name], min(position, self._sizes[name]))

    def complete(self, name: str) -> None:
        """Record that the hub has a file."""
        self._done[name] = self._sizes[name]

    def report(self) -> None:
        """Report the progress of all files; a `TimeoutError` if there was none for long."""
        done = sum(self._done.values())
        self._stall.require_growth(done)
        report_bytes(self._progress, "upload", done, self._total)


class _CountedFile(io.FileIO):
    """A file that reports how far it was read."""

    def __init__(self, path: str, reach: Callable[[int], None]) -> None:
        super().__init__(path)
        self._reach = reach

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(-1 if size is None else size)
        self._reach(self.tell())
        return data or b""


def prepare_addition(file: LocalFile, sent: UploadProgress) -> CommitOperationAdd:
    """Prepare a file for the library: its hash is known, and its reads are counted while it is
    sent.
    """
    from huggingface_hub import CommitOperationAdd

    class Addition(CommitOperationAdd):
        @contextmanager
        def as_file(self, with_tqdm: bool = False) -> Iterator[Any]:
            # The library requests a progress bar only where it sends the content, not where it
            # hashes it.
            if with_tqdm and isinstance(self.path_or_fileobj, str):
                with _CountedFile(self.path_or_fileobj, partial(sent.reach, file.name)) as counted:
                    yield counted
            else:
                with super().as_file() as plain:
                    yield plain

    content: str | bytes
    if isinstance(file.content, Path):
        content = str(file.content.absolute())
    else:
        content = file.content
    try:
        operation = Addition(file.name, content)
    except (OSError, ValueError) as error:
        file.require_unchanged()
        raise RequestError(
            "cannot be sent to the hub", path=file.name, found=short(error)
        ) from error
    # Without it, the library would read the file once more for its hash.
    operation.upload_info.sha256 = bytes.fromhex(file.sha256)
    return operation


def send(
    files: Sequence[LocalFile],
    operations: Mapping[str, CommitOperationAdd],
    name: str,
    branch: str | None,
    sent: UploadProgress,
) -> None:
    """Send the content of files that the hub stores apart from git to a repository, and wait until
    it has them.

    One request covers all files that git probably stores. Each other file has its own request,
    since for several the library uses threads for which Ctrl-C would wait.

    Raises:
        RequestError, UnreachableError, CheckpointError: see `commit_files`.
    """
    from huggingface_hub import HfApi

    api = HfApi()

    def upload(*requests: Sequence[str]) -> None:
        for names in requests:
            sent.current.name = names[0]
            additions = [operations[file_name] for file_name in names]
            api.preupload_lfs_files(
                name, additions, revision=branch, num_threads=_NUM_THREADS, free_memory=False
            )
            for file_name in names:
                sent.complete(file_name)

    small_files: list[str] = []
    # By content; for each file, the names of its request.
    large_files: dict[str, list[list[str]]] = {}
    # Largest first, so that no long upload begins when all others have ended.
    for file in sorted(files, key=lambda file: -file.size):
        # A zero byte means that a file is not text, as in git.
        if file.size < _LARGE and b"\0" not in operations[file.name].upload_info.sample:
            small_files.append(file.name)
        else:
            # Files of the same content one after the other: the hub has it after the first.
            large_files.setdefault(file.sha256, []).append([file.name])
    try:
        sent.report()
        # A token that may not write there fails before large files are sent.
        if small_files:
            run_in_threads([partial(upload, small_files)], 1, on_tick=sent.report)
        uploads = [partial(upload, *requests) for requests in large_files.values()]
        run_in_threads(uploads, _NUM_THREADS, on_tick=sent.report)
    except Exception as error:
        # A changed file is the better explanation of whatever the hub answered.
        for file in files:
            file.require_unchanged()
        raise translate_write_error(error, PREFIX + name, "write to the repository") from error
    finally:
        sent.ended.set()


@contextmanager
def reporting_library(sent: UploadProgress) -> Iterator[None]:
    """Silence the library, and replace its display of uploads to Xet storage, which the library
    uses if hf_xet is installed, by the progress of all files.
    """
    import huggingface_hub.utils

    utils: Any = huggingface_hub.utils
    reporting = _xet_reporting()

    class Reporter:
        def __init__(self, *_: Any, **__: Any) -> None:
            self._name = getattr(sent.current, "name", None)

        def update_progress(self, report: Any, *_: Any) -> None:
            done = getattr(report, "total_bytes_completed", None)
            if self._name is not None and isinstance(done, int) and not sent.ended.is_set():
                sent.reach(self._name, done)

        def close(self) -> None:
            pass

    with silence_library(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        were_disabled = utils.are_progress_bars_disabled()
        if reporting is not None:
            original = reporting.XetUploadProgressReporter
            reporting.XetUploadProgressReporter = Reporter
            # The library creates a reporter only if progress bars are enabled.
            utils.enable_progress_bars()
        else:
            utils.disable_progress_bars()
        try:
            yield
        finally:
            if reporting is not None:
                reporting.XetUploadProgressReporter = original
            if were_disabled:
                utils.disable_progress_bars()
            else:
                utils.enable_progress_bars()


def _xet_reporting() -> Any:
    """Find the library's module with the display of uploads to Xet storage; None if it has none, or
    hf_xet is not used.
    """
    # Both are private modules, which another version of the library may not have.
    try:
        from huggingface_hub.utils import _xet_progress_reporting as reporting
        from huggingface_hub.utils._runtime import is_xet_available
    except ImportError:
        return None
    if is_xet_available() and hasattr(reporting, "XetUploadProgressReporter"):
        return reporting
    return None
