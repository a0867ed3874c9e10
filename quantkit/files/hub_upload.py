"""Upload files to a model's repository on the hub: all become visible with one commit.

`huggingface_hub` does the work: `preupload_lfs_files` sends the content of large files, which the
hub then has even if the command is killed; `create_commit` names them all in one commit. This
module adds what the library does not do: threads that Ctrl-C does not wait for, the progress of all
files, a check of the model card before the repository is created, and a check of what the hub lists
afterwards. `upload_folder` makes several commits of a large folder, so it is not used.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from quantkit.base.progress import Progress
from quantkit.errors import CheckpointError, RequestError
from quantkit.files.hub import SECONDS, silence_library
from quantkit.files.hub_answers import (
    HubFile,
    files_by_name,
    parse_hub_file,
    validate_commit,
    validate_hub_answers,
)
from quantkit.files.hub_failures import short, translate_read_error, translate_write_error
from quantkit.files.hub_names import PREFIX
from quantkit.files.hub_threads import result_in_time, run_in_threads
from quantkit.files.local_files import MEGABYTE, LocalFile, report_bytes

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

_Answer = TypeVar("_Answer")
_REQUEST_SECONDS = 60.0
# Small files are part of the request that commits.
_COMMIT_SECONDS = 600.0
_NUM_THREADS = 4


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
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        return _fetch_repository(name, branch, branch)
    except RepositoryNotFoundError:
        return None
    except RevisionNotFoundError:
        # A branch that is created begins with the files of the default one.
        repository = read_repository(name)
        if repository is None:
            return None
        return replace(repository, branch=branch, has_branch=False)


def create_repository(name: str, *, private: bool) -> None:
    """Create a model's repository.

    Raises:
        RequestError: if the token may not, or the repository is there but cannot be read.
        UnreachableError, CheckpointError: see `read_repository`.
    """
    from huggingface_hub import HfApi

    request = partial(HfApi().create_repo, name, private=private)
    _write(request, name, "create the repository")


def create_branch(name: str, branch: str) -> None:
    """Create a branch from the head of the default one; the errors are those of
    `create_repository`.
    """
    from huggingface_hub import HfApi

    request = partial(HfApi().create_branch, name, branch=branch, exist_ok=True)
    _write(request, name, f"create the branch {branch}")


def validate_model_card(content: str, name: str) -> None:
    """Have the hub check the metadata of a model card, before anything large is sent.

    Raises:
        RequestError: if the hub refuses it.
        UnreachableError, CheckpointError: see `read_repository`.
    """
    import huggingface_hub.utils

    utils: Any = huggingface_hub.utils
    endpoint = huggingface_hub.HfApi().endpoint

    # `ModelCard.validate` of some versions sends it to huggingface.co, whichever the hub.
    def request() -> str:
        response = utils.get_session().post(
            f"{endpoint}/api/validate-yaml",
            json={"content": content, "repoType": "model"},
            headers=utils.build_hf_headers(),
        )
        # A bad request: the metadata is not what the hub reads.
        if response.status_code == 400:
            problems = response.json().get("errors", ())
            return "; ".join(str(entry["message"]) for entry in problems) or "no reason"
        utils.hf_raise_for_status(response)
        return ""

    problem = _write(request, name, "check the model card")
    if problem:
        raise RequestError(
            "the hub refuses the metadata of the model card",
            path=PREFIX + name,
            found=textwrap.shorten(problem, 300, placeholder=" ..."),
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
        UnreachableError: if the hub cannot be reached or is overloaded. The same call continues.
        CheckpointError: if a file changes while it is sent, or the hub's answer is malformed.
    """
    from huggingface_hub import CommitOperationDelete, HfApi

    additions: dict[str, CommitOperationAdd] = {}
    for file in files:
        additions[file.name] = _prepare_addition(file)
    _send(files, additions, repository, progress)
    # The commit reads small files again.
    for file in files:
        file.require_unchanged()
    changes: list[CommitOperationAdd | CommitOperationDelete] = [*additions.values()]
    for file_name in deleted:
        changes.append(CommitOperationDelete(file_name, is_folder=False))
    progress("commit", 0, 1, "commits")
    request = partial(
        HfApi().create_commit,
        repository.name,
        changes,
        commit_message=message,
        revision=repository.branch,
        parent_commit=repository.commit,
    )
    commit = _write(request, repository.name, "commit", _COMMIT_SECONDS)
    progress("commit", 1, 1, "commits")
    return validate_commit(commit.oid, PREFIX + repository.name)


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
            digest = file.digest_like(remote_file)
        raise CheckpointError(
            f"'{file.name}' on the hub differs from what was sent, at commit {commit[:12]}",
            path=PREFIX + name,
            found=remote_content,
            expected=f"{file.size} bytes, {digest[:12]}",
            hint="repeat the command",
        )


def _prepare_addition(file: LocalFile) -> CommitOperationAdd:
    """Prepare a file for the library, with its hash, for which the library would read it again."""
    from huggingface_hub import CommitOperationAdd

    content: str | bytes
    if isinstance(file.content, Path):
        content = str(file.content.absolute())
    else:
        content = file.content
    try:
        addition = CommitOperationAdd(file.name, content)
    except (OSError, ValueError) as error:
        file.require_unchanged()
        raise RequestError(
            "cannot be sent to the hub", path=file.name, found=short(error)
        ) from error
    # Otherwise the library would read the file once more.
    addition.upload_info.sha256 = bytes.fromhex(file.sha256)
    return addition


def _send(
    files: Sequence[LocalFile],
    additions: Mapping[str, CommitOperationAdd],
    repository: Repository,
    progress: Progress,
) -> None:
    """Send the content of files that the hub stores apart from git to a repository, and wait until
    it has them; the errors are those of `commit_files`.

    One request covers all small files. Each other file has its own, since for several files the
    library uses threads for which Ctrl-C would wait.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    total = sum(file.size for file in files)
    sent: list[LocalFile] = []

    def upload(*batches: Sequence[LocalFile]) -> None:
        for batch in batches:
            api.preupload_lfs_files(
                repository.name,
                [additions[file.name] for file in batch],
                revision=repository.branch,
                num_threads=_NUM_THREADS,
                free_memory=False,
                # Without it, the library leaves out files that the repository's .gitignore lists.
                gitignore_content="",
            )
            sent.extend(batch)

    def report() -> None:
        report_bytes(progress, "upload", sum(file.size for file in sent), total)

    small_files: list[LocalFile] = []
    # By content: of several files with the same one, the hub has all after the first.
    large_files: dict[str, list[list[LocalFile]]] = {}
    uploads: list[Callable[[], None]] = []
    # Largest first, so that no long upload begins when all others have ended.
    for file in sorted(files, key=lambda file: -file.size):
        if file.size < MEGABYTE:
            small_files.append(file)
        else:
            large_files.setdefault(file.sha256, []).append([file])
    try:
        report()
        with silence_library(), validate_hub_answers(PREFIX + repository.name):
            # A token that may not write there fails before large files are sent.
            if small_files:
                run_in_threads([partial(upload, small_files)], 1, on_tick=report)
            for batches in large_files.values():
                uploads.append(partial(upload, *batches))
            run_in_threads(uploads, _NUM_THREADS, on_tick=report)
    except Exception as error:
        # A changed file is the better explanation of whatever the hub answered.
        for file in files:
            file.require_unchanged()
        path = PREFIX + repository.name
        raise translate_write_error(error, path, "write to the repository") from error


def _fetch_repository(name: str, revision: str | None, branch: str | None) -> Repository:
    """Fetch the list of files at a revision.

    Raises the library's own errors for a repository or a revision that does not exist.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    path = PREFIX + name
    try:
        with silence_library():
            request = partial(HfApi().model_info, name, revision=revision, files_metadata=True)
            info = result_in_time(request, SECONDS)
    except Exception as error:
        missing = isinstance(error, RepositoryNotFoundError | RevisionNotFoundError)
        # A subclass of `RepositoryNotFoundError`, but such a repository exists.
        if missing and not isinstance(error, GatedRepoError):
            raise
        raise translate_read_error(error, path, hint="repeat the command") from error
    # The hub redirects requests for the old name of a renamed repository.
    if isinstance(info.id, str) and info.id != name:
        raise RequestError(
            "the repository has another name", path=path, found=info.id, hint=f"push to {info.id}"
        )
    if isinstance(info.private, bool):
        private = info.private
    else:
        private = None
    files: dict[str, HubFile] = {}
    for sibling in files_by_name(info, path).values():
        file = parse_hub_file(sibling, path)
        files[file.name] = file
    return Repository(
        name=name,
        branch=branch,
        commit=validate_commit(info.sha, path),
        private=private,
        files=files,
    )


def _write(
    request: Callable[[], _Answer], name: str, doing: str, seconds: float = _REQUEST_SECONDS
) -> _Answer:
    """Make a request that writes to a repository, and translate its errors."""
    try:
        with silence_library():
            return result_in_time(request, seconds)
    except Exception as error:
        raise translate_write_error(error, PREFIX + name, doing) from error
