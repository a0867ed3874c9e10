"""Errors of the hub's library, as users read them."""

from __future__ import annotations

import errno
import textwrap
from typing import Any

from quantkit.errors import CheckpointError, NoSpaceError, RequestError, UnreachableError

_RETRYABLE = (408, 429, *range(500, 600))  # HTTP statuses
_LOG_IN = "log in: hf auth login; or correct HF_TOKEN"


def short(error: Exception) -> str:
    """The message of a library's error, in one line."""
    return textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" ...")


def read_failure(
    error: Exception, path: str, what: str = "model", hint: str = "try again, or pass a path"
) -> Exception:  # fmt: skip
    """The typed form of an error of a request that reads.

    Args:
        path: the repository.
        what: its kind.
        hint: what to do if the hub cannot be reached.
    """
    import huggingface_hub.utils

    errors: Any = huggingface_hub.utils
    if type(error) is ValueError or isinstance(error, LookupError | TypeError | AttributeError | RecursionError):
        problem = f"the hub's answer cannot be read: {short(error)}"
        return CheckpointError(problem, path=path, hint="try again")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return RequestError("HF_HUB_OFFLINE forbids requests to the hub", path=path, hint="unset it, or pass a path")
    if isinstance(error, errors.GatedRepoError):
        return RequestError("access to it on the hub is restricted", path=path, hint="log in: hf auth login")
    if isinstance(error, errors.RevisionNotFoundError):
        return RequestError("the hub knows no such revision of it", path=path)
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        again = "check the spelling; for a private one, log in: hf auth login"
        return RequestError(f"the hub knows no such {what}", path=path, hint=again)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return NoSpaceError("the disk of the hub's cache is full", path=path)
    if isinstance(error, OSError) and error.filename is not None:
        problem = f"the hub's cache cannot be written: {error.strerror}"
        return RequestError(problem, path=error.filename, hint="HF_HOME chooses another")
    status = _status(error)
    if status == 401:
        return RequestError("the hub does not accept the access token", path=path, hint=_LOG_IN)
    kind = UnreachableError if status is None or status in _RETRYABLE else RequestError
    reason = short(error) if status is None else f"status {status}"
    return kind(f"the hub cannot be reached for a {what}: {reason}", path=path, hint=hint)


def _status(error: Exception) -> int | None:
    """The HTTP status of the hub's answer; None if there was none."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None
