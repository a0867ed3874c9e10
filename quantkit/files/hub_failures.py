"""Translate errors of the hub's library into errors for users."""

from __future__ import annotations

import errno
import textwrap

from quantkit.errors import (
    CheckpointError,
    NoSpaceError,
    QuantkitError,
    RequestError,
    UnreachableError,
)

# HTTP statuses: request timeout, too many requests, and errors of the server.
_RETRYABLE = (408, 429, *range(500, 600))
# Python's own errors, which come from the structure of an answer.
_MALFORMED = LookupError | TypeError | AttributeError | RecursionError


def short(error: Exception) -> str:
    """Shorten the message of a library's error to one line."""
    # Some exceptions have no message.
    return textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" ...")


def translate_read_error(
    error: Exception,
    path: str,
    repository_kind: str = "model",
    hint: str = "try again, or pass a path",
) -> QuantkitError:
    """Translate an error of a request that reads into one of quantkit's.

    Args:
        path: the repository.
        repository_kind: such as ``model``.
        hint: what to do if the hub cannot be reached.
    """
    from huggingface_hub import errors

    # Subclasses of ValueError are not malformed answers: the library derives its checks of names
    # from it.
    if type(error) is ValueError or isinstance(error, _MALFORMED):
        problem = f"the hub's answer cannot be read: {short(error)}"
        return CheckpointError(problem, path=path, hint="try again")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return RequestError(
            "HF_HUB_OFFLINE forbids requests to the hub", path=path, hint="unset it, or pass a path"
        )
    # Before its base class, `RepositoryNotFoundError`.
    if isinstance(error, errors.GatedRepoError):
        return RequestError(
            "access to it on the hub is restricted", path=path, hint="log in: hf auth login"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return RequestError("the hub has no such revision of it", path=path)
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        # The hub does not tell strangers that a private repository exists.
        problem = f"the hub has no such {repository_kind}"
        hint = "check the spelling; for a private one, log in: hf auth login"
        return RequestError(problem, path=path, hint=hint)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return NoSpaceError("the disk of the hub's cache is full", path=path)
    # Errors of the network are OSErrors too, without a file name.
    if isinstance(error, OSError) and error.filename is not None:
        problem = f"the hub's cache cannot be written: {error.strerror}"
        hint = "set HF_HOME to a folder on another disk"
        return RequestError(problem, path=error.filename, hint=hint)
    status = _read_status(error)
    if status == 401:
        hint = "log in: hf auth login; or correct HF_TOKEN"
        return RequestError("the hub does not accept the access token", path=path, hint=hint)
    reason = short(error) if status is None else f"status {status}"
    problem = f"the hub cannot be reached for a {repository_kind}: {reason}"
    if status is None or status in _RETRYABLE:
        return UnreachableError(problem, path=path, hint=hint)
    return RequestError(problem, path=path, hint=hint)


def translate_write_error(error: Exception, path: str, doing: str) -> QuantkitError:
    """Translate an error of a request that writes into one of quantkit's.

    Args:
        path: the repository.
        doing: what the request does, such as ``create the repository``.
    """
    from huggingface_hub.errors import OfflineModeIsEnabled

    # The library wraps the error of a single file in a RuntimeError.
    while isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, QuantkitError):
        return error
    status = _read_status(error)
    if isinstance(error, OfflineModeIsEnabled) or status == 401:
        return translate_read_error(error, path)
    if status is None:
        # Some errors of HTTP clients are ValueErrors and OSErrors at once.
        if isinstance(error, ValueError | _MALFORMED) and not isinstance(error, OSError):
            problem = f"cannot {doing}: the hub's answer cannot be read: {short(error)}"
            return CheckpointError(problem, path=path, hint="repeat the command")
        problem = f"cannot {doing}: the hub cannot be reached: {short(error)}"
        return UnreachableError(problem, path=path, hint="repeat the command")
    message = getattr(error, "server_message", None) or "no reason"
    response = f"status {status}, {textwrap.shorten(message, 200, placeholder=' ...')}"
    if status == 429:
        problem = f"cannot {doing}: the hub limits the number of requests"
        hint = "wait some minutes, and repeat the command"
        return UnreachableError(problem, path=path, hint=hint)
    if status in _RETRYABLE:
        problem = f"cannot {doing}: the hub is overloaded or has failed"
        return UnreachableError(problem, path=path, found=response, hint="repeat the command later")
    # Precondition failed: the head of the branch is not the `parent_commit` of the request.
    if status == 412:
        problem = f"cannot {doing}: the repository has changed since it was read"
        return UnreachableError(problem, path=path, hint="repeat the command")
    if status == 409:
        problem = f"cannot {doing}: the name is in use"
        hint = "choose another name, or use a token that may read it"
        return RequestError(problem, path=path, found=response, hint=hint)
    if status in (403, 404):
        problem = f"the access token may not {doing}"
        hint = "use a token with write access to it: https://huggingface.co/settings/tokens"
        return RequestError(problem, path=path, found=response, hint=hint)
    return RequestError(f"cannot {doing}: the hub refuses it", path=path, found=response)


def _read_status(error: Exception) -> int | None:
    """Read the HTTP status of the hub's answer; None if there was no answer."""
    # Not every error of the library has a response, and a response may be None.
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status
    return None
