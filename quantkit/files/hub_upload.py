"""Upload files to a model's repository on the hub: all become visible with one commit.

`huggingface_hub` does the work: `preupload_lfs_files` sends the content of large files, which the
hub then has even if the command is killed; `create_commit` names them all in one commit. This
module adds what the library does not do: threads that Ctrl-C does not wait for, time limits, the
progress of all files, and a check of what the hub lists afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from quantkit.base.progress import Progress
from quantkit.errors import CheckpointError, RequestError
from quantkit.files.hub import PREFIX, SECONDS, silence_library
from quantkit.files.hub_answers import HubFile, files_by_name, parse_hub_file, validate_commit
from quantkit.files.hub_failures import short, translate_read_error, translate_write_error
from quantkit.files.hub_send import UploadProgress, prepare_addition, reporting_library, send
from quantkit.files.hub_threads import result_in_time
from quantkit.files.local_files import LocalFile

_Answer = TypeVar("_Answer")
_REQUEST_SECONDS = 60.0
# Small files are part of the request that commits.
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
    # It becomes part of an HTTP header.
    if not token.isascii() or not token.isprintable() or " " in token:
        raise RequestError(
            "the access token contains invalid characters", path=PREFIX + name, hint=hint
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
    """Read which files a model's repository has; None if the hub knows no such repository, or none
    that the token may read.

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
        # A branch that is created begins with the files of the default one.
        repository = read_repository(name)
        if repository is None:
            return None
        return Repository(
            name=name,
            branch=branch,
            commit=repository.commit,
            private=repository.private,
            files=repository.files,
            has_branch=False,
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
            # A subclass of ValueError is an error of the answer, not of the card.
            if type(error) is not ValueError:
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
    """Send files and commit them, and return the commit's id.

    The library does not send content again that the hub has already. Nothing is visible before the
    commit, which fails if the branch has another head than `repository.commit`.

    Raises:
        RequestError: if the token may not write there, or the hub refuses a file.
        UnreachableError: if the hub cannot be reached or is overloaded, or nothing was sent for ten
            minutes. The same call continues.
        CheckpointError: if a file changes while it is sent, or the hub's answer is malformed.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    name = repository.name
    branch = repository.branch
    sent = UploadProgress({file.name: file.size for file in files}, progress)
    operations = {file.name: prepare_addition(file, sent) for file in files}
    with reporting_library(sent):
        send(files, operations, name, branch, sent)
        # The commit reads small files again.
        for file in files:
            file.require_unchanged()
        for file_name, operation in operations.items():
            # The library would leave the file out without an error.
            if getattr(operation, "_should_ignore", False):
                raise RequestError(
                    "the repository's .gitignore excludes a file",
                    path=PREFIX + name,
                    found=file_name,
                    hint="remove it from .gitignore on the hub",
                )
        changes: list[CommitOperationAdd | CommitOperationDelete] = [*operations.values()]
        for file_name in deleted:
            changes.append(CommitOperationDelete(file_name, is_folder=False))
        progress("commit", 0, 1, "commits")
        commit = _write(
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
    return validate_commit(commit.oid, PREFIX + name)


def require_sent(files: Sequence[LocalFile], name: str, commit: str) -> None:
    """Require that the hub lists the files, with their sizes and hashes, at a commit.

    Raises:
        CheckpointError: if a file is missing there, or has another size or hash.
        RequestError, UnreachableError: see `read_repository`.
    """
    remote_files = _fetch_repository(name, commit, None).files
    for file in files:
        remote_file = remote_files.get(file.name)
        if file.equals(remote_file):
            continue
        if remote_file is None:
            remote_content = "nothing"
            digest = file.sha256
        else:
            remote_content = f"{remote_file.size} bytes, {remote_file.digest[:12]}"
            digest = _select_digest(file, remote_file)
        raise CheckpointError(
            f"'{file.name}' on the hub differs from what was sent, at commit {commit[:12]}",
            path=PREFIX + name,
            found=remote_content,
            expected=f"{file.size} bytes, {digest[:12]}",
            hint="repeat the command",
        )


def _select_digest(file: LocalFile, remote_file: HubFile) -> str:
    # The hub lists the sha256 of a file in LFS, and git's blob id of any other.
    if len(remote_file.digest) == len(file.sha256):
        return file.sha256
    return file.blob_id


def _fetch_repository(name: str, revision: str | None, branch: str | None) -> Repository:
    """Fetch the list of files at a revision.

    Raises the library's own errors for a repository or a revision that does not exist.
    """
    import huggingface_hub.utils
    from huggingface_hub import HfApi

    errors: Any = huggingface_hub.utils
    path = PREFIX + name
    try:
        with silence_library():
            request = partial(HfApi().model_info, name, revision=revision, files_metadata=True)
            info = result_in_time(request, SECONDS)
    except Exception as error:
        missing = isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError)
        # `GatedRepoError` is a subclass of `RepositoryNotFoundError`, but such a repository exists.
        if missing and not isinstance(error, errors.GatedRepoError):
            raise
        raise translate_read_error(error, path, hint="repeat the command") from error
    # The hub redirects requests for the old name of a renamed repository.
    if isinstance(info.id, str) and info.id != name:
        raise RequestError(
            "the repository has another name", path=path, found=info.id, hint=f"push to {info.id}"
        )
    files: dict[str, HubFile] = {}
    for sibling in files_by_name(info, path).values():
        file = parse_hub_file(sibling, path)
        files[file.name] = file
    if isinstance(info.private, bool):
        private = info.private
    else:
        private = None
    return Repository(
        name=name,
        branch=branch,
        commit=validate_commit(info.sha, path),
        private=private,
        files=files,
    )


def _write(request: Callable[[], _Answer], name: str, doing: str, seconds: float) -> _Answer:
    try:
        with silence_library():
            return result_in_time(request, seconds)
    except Exception as error:
        raise translate_write_error(error, PREFIX + name, doing) from error
