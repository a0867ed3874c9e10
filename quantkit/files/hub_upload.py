"""Uploads to a model's repository on the hub: all files become visible with one commit.

`huggingface_hub` does the work: `preupload_lfs_files` sends the content of large files, which the
hub then has even if the command is killed; `create_commit` names them all in one commit. What the
library does not do is done here: threads that Ctrl-C does not wait for, time limits, the progress
of all files, and a check of what the hub lists afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from quantkit.base.progress import Progress
from quantkit.errors import CheckpointError, RequestError
from quantkit.files.hub import PREFIX, SECONDS, quietly
from quantkit.files.hub_answers import HubFile, files_by_name, parse_hub_file, validate_commit
from quantkit.files.hub_failures import read_failure, short, write_failure
from quantkit.files.hub_send import Sent, addition, reporting_library, send
from quantkit.files.hub_threads import result_in_time
from quantkit.files.local_files import LocalFile

_Answer = TypeVar("_Answer")
_REQUEST_SECONDS = 60.0
_COMMIT_SECONDS = 600.0


@dataclass(frozen=True)
class Repository:
    """A model's repository at a branch, as the hub lists it.

    Attributes:
        name: ``owner/name``.
        branch: None for the default one.
        commit: the head of the branch.
        private: None if the hub does not state it.
        files: by name. For a branch that is not there yet, those of the default one, with which it
            begins.
        has_branch: whether the branch exists.
    """

    name: str
    branch: str | None
    commit: str
    private: bool | None
    files: Mapping[str, HubFile]
    has_branch: bool = True


def require_token(name: str) -> None:
    """Raise a `RequestError` if huggingface_hub finds no access token, or one that cannot be
    sent.
    """
    from huggingface_hub import get_token

    token = get_token()
    hint = "log in: hf auth login; or set HF_TOKEN"
    if not token:
        raise RequestError("there is no access token for the hub", path=PREFIX + name, hint=hint)
    if not token.isascii() or not token.isprintable() or " " in token:
        raise RequestError(
            "the access token contains characters that none has", path=PREFIX + name, hint=hint
        )


def require_repository_name(name: str) -> None:
    """Raise a `RequestError` if the hub does not allow a name of the form ``owner/name``."""
    import huggingface_hub.utils

    utils: Any = huggingface_hub.utils
    try:
        utils.validate_repo_id(name)
    except utils.HFValidationError as error:
        raise RequestError(
            "is not the name of a repository", path=name, found=short(error)
        ) from error


def read_repository(name: str, branch: str | None = None) -> Repository | None:
    """Return what a model's repository holds; None if the hub knows none, or none that the token
    may read.

    Raises:
        UnreachableError: if the hub does not answer in 8 seconds, or is overloaded.
        RequestError: if it refuses the token, or the repository has another name now.
        CheckpointError: if its answer is malformed.
    """
    import huggingface_hub.utils

    errors: Any = huggingface_hub.utils
    try:
        return _fetch_repository(name, branch, branch)
    except errors.RepositoryNotFoundError:
        return None
    except errors.RevisionNotFoundError:
        repository = read_repository(name)
        if repository is None:
            return None
        return Repository(
            name, branch, repository.commit, repository.private, repository.files, has_branch=False
        )


def create_repository(name: str, *, private: bool) -> None:
    """Create a model's repository.

    Raises:
        RequestError: if the token may not, or the repository is there but cannot be read.
        UnreachableError, CheckpointError: see `read_repository`.
    """
    from huggingface_hub import HfApi

    _write(
        partial(HfApi().create_repo, name, private=private),
        name,
        "create the repository",
        _REQUEST_SECONDS,
    )


def create_branch(name: str, branch: str) -> None:
    """Create a branch from the head of the default one; the errors are those of
    `create_repository`.
    """
    from huggingface_hub import HfApi

    request = partial(HfApi().create_branch, name, branch=branch, exist_ok=True)
    _write(request, name, f"create the branch {branch}", _REQUEST_SECONDS)


def validate_model_card(content: str, name: str) -> None:
    """Have the hub check the metadata of a model card, before anything large is sent.

    Raises:
        RequestError: if the hub refuses it.
        UnreachableError, CheckpointError: see `read_repository`.
    """
    from huggingface_hub import HfApi

    # `ModelCard.validate` of older versions sends it to huggingface.co, whichever the hub;
    # `create_commit` calls this.
    validate: Any = getattr(HfApi(), "_validate_yaml", None)

    def request() -> str | None:
        try:
            validate(content, repo_type="model")
        except ValueError as error:
            if type(error) is not ValueError:  # of the answer
                raise
            return short(error)
        return None

    if validate is None:
        return
    with warnings.catch_warnings():
        # Such as that it has no metadata.
        warnings.simplefilter("ignore")
        problem = _write(request, name, "check the model card", _REQUEST_SECONDS)
    if problem is not None:
        raise RequestError(
            "the hub refuses the metadata of the model card", path=PREFIX + name, found=problem
        )


def commit_files(
    files: Sequence[LocalFile],
    deleted: Sequence[str],
    repository: Repository,
    message: str,
    progress: Progress,
) -> str:
    """Send files and commit them; the commit's id.

    Content that the hub has already is not sent again. Nothing is visible before the commit, which
    fails if the branch has another head than `repository.commit`.

    Raises:
        RequestError: if the token may not write there, or the hub refuses a file.
        UnreachableError: if the hub cannot be reached or is overloaded, or nothing was sent for ten
            minutes. The same call continues.
        CheckpointError: if a file changes while it is sent, or the hub's answer is malformed.
    """
    from huggingface_hub import CommitOperationDelete, HfApi

    name = repository.name
    branch = repository.branch
    sent = Sent({file.name: file.size for file in files}, progress)
    operations = {file.name: addition(file, sent) for file in files}
    with reporting_library(sent):
        send(files, operations, name, branch, sent)
        for file in files:
            file.require_unchanged()
        ignored = []
        for one, operation in operations.items():
            if getattr(operation, "_should_ignore", False):
                ignored.append(one)
        # The library would leave it out without an error.
        if ignored:
            problem = "the repository's .gitignore excludes a file"
            hint = "remove it from .gitignore on the hub"
            raise RequestError(problem, path=PREFIX + name, found=ignored[0], hint=hint)
        changes = [
            *operations.values(),
            *(CommitOperationDelete(one, is_folder=False) for one in deleted),
        ]
        progress("commit", 0, 1, "commits")
        made = _write(
            partial(
                HfApi().create_commit,
                name,
                changes,
                commit_message=message,
                revision=branch,
                parent_commit=repository.commit,
            ),
            name,
            "commit",
            _COMMIT_SECONDS,
        )
        progress("commit", 1, 1, "commits")
    return validate_commit(made.oid, PREFIX + name)


def require_sent(files: Sequence[LocalFile], name: str, commit: str) -> None:
    """Compare what the hub lists at a commit with the files.

    Raises:
        CheckpointError: if a file is missing there, or has another size or hash.
        RequestError, UnreachableError: see `read_repository`.
    """
    listed = _fetch_repository(name, commit, None).files
    for file in files:
        found = listed.get(file.name)
        if not file.equals(found):
            if found is None:
                what = "nothing"
            else:
                what = f"{found.size} bytes, {found.digest[:12]}"
            expected = (
                f"{file.size} bytes,"
                f" {(file.sha256 if found is None else _select_digest(file, found))[:12]}"
            )
            raise CheckpointError(
                f"the hub does not hold '{file.name}' as it was sent, at commit {commit[:12]}",
                path=PREFIX + name,
                found=what,
                expected=expected,
                hint="repeat the command",
            )


def _select_digest(file: LocalFile, remote_file: HubFile) -> str:
    if len(remote_file.digest) == len(file.sha256):
        return file.sha256
    return file.blob_id


def _fetch_repository(name: str, revision: str | None, branch: str | None) -> Repository:
    """Return the files at a revision.

    The library's errors for what is not there are raised as they are.
    """
    import huggingface_hub.utils
    from huggingface_hub import HfApi

    errors: Any = huggingface_hub.utils
    path = PREFIX + name
    try:
        with quietly():
            request = partial(HfApi().model_info, name, revision=revision, files_metadata=True)
            info = result_in_time(request, SECONDS)
    except Exception as error:
        missing = isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError)
        # Which is a kind of the first.
        if missing and not isinstance(error, errors.GatedRepoError):
            raise
        raise read_failure(error, path, hint="repeat the command") from error
    if isinstance(info.id, str) and info.id != name:
        raise RequestError(
            "the repository has another name", path=path, found=info.id, hint=f"push to {info.id}"
        )
    files = [parse_hub_file(file, path) for file in files_by_name(info, path).values()]
    if isinstance(info.private, bool):
        private = info.private
    else:
        private = None
    return Repository(
        name, branch, validate_commit(info.sha, path), private, {file.name: file for file in files}
    )


def _write(request: Callable[[], _Answer], name: str, doing: str, seconds: float) -> _Answer:
    try:
        with quietly():
            return result_in_time(request, seconds)
    except Exception as error:
        raise write_failure(error, PREFIX + name, doing) from error
