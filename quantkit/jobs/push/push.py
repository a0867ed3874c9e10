"""Push a model to a repository of the Hugging Face hub: checked before, compared after."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from quantkit.base.arguments import as_path, as_string, require_flags
from quantkit.base.json_values import format_value
from quantkit.base.messages import Message, Option
from quantkit.base.progress import Progress, silent, skip_repeated_reports
from quantkit.errors import CheckpointError, QuantkitError, RequestError
from quantkit.files.hub_answers import COMMIT
from quantkit.files.hub_names import PREFIX, REVISION
from quantkit.files.hub_upload import (
    Repository,
    commit_files,
    create_branch,
    create_repository,
    read_repository,
    require_repository_name,
    require_sent,
    require_token,
    validate_model_card,
)
from quantkit.files.local_files import LocalFile, hash_files, in_memory
from quantkit.files.source import SourceFile
from quantkit.formats.authorship import CARD as README
from quantkit.formats.authorship import HUB_NAME, LICENSE
from quantkit.formats.output.destination import manifest_path
from quantkit.jobs.push.card import Card, model_card
from quantkit.jobs.push.files import manifests, model_files, require_sound
from quantkit.jobs.push.result import PushedFile, PushResult, State, some_names
from quantkit.quality.manifest_files import is_loaded, require_as_written

_KEPT = ".gitattributes"
"""The hub makes it, and it decides what is stored in LFS."""
# Bytes in a second, for estimates of the remaining time.
_HASH_SPEED = 1e9
_UPLOAD_SPEED = 2e7
_COMMIT_SECONDS = 5.0
_log = logging.getLogger(__name__)


def push(
    path: str | Path,
    name: str,
    *,
    public: bool = False,
    base_model: str | None = None,
    license: str | None = None,
    revision: str | None = None,
    message: str | None = None,
    delete_others: bool = False,
    dry_run: bool = False,
    on_steps: Callable[[Mapping[str, float]], object] | None = None,
    progress: Progress = silent,
) -> PushResult:
    """Send a model to a repository of the Hugging Face hub, in one commit, and compare what the hub
    lists with it.

    Nothing is sent of a model in which `quantkit.diagnose` finds an error, or whose files are not
    those of its manifest. Files that the hub has already are not sent again, also those that an
    interrupted call has sent: the same call continues it. The model itself is not changed.

    Args:
        path: a folder, or a GGUF file, of which all parts are sent; not hidden files.
        name: ``owner/name``. The repository is created if it is not there.
        public: create a public repository, not a private one; one that exists keeps its visibility.
        base_model: for the model card, if neither it nor the manifest states it: the source's name
            on the hub.
        license: for the model card: its licence as hubs name it; required for a public repository
            if the card has none.
        revision: the branch to commit to; created from the default one if it is not there.
        message: of the commit.
        delete_others: delete all other files of the repository in the same commit.
        dry_run: check the model, list what would be sent, and send nothing; this needs no access
            token.
        on_steps: is called with the seconds that each phase is estimated to take.
        progress: is called while files are read and sent.

    Returns:
        The commit, and the state of each file.

    Raises:
        RequestError: for an invalid argument; if there is no access token or it may not write
            there; if a public repository would have no licence, or if files in the repository would
            be loaded with the model's.
        CheckpointError: if something is wrong with the model; if the hub does not hold what was
            sent.
        UnreachableError: if the hub cannot be reached or is overloaded; the same call continues.

    Example:
        >>> quantkit.push("Qwen2.5-0.5B-int4", "me/Qwen2.5-0.5B-int4", license="apache-2.0").url
        'https://huggingface.co/me/Qwen2.5-0.5B-int4'
    """
    from huggingface_hub import HfApi

    require_flags(public=public, delete_others=delete_others, dry_run=dry_run)
    name = _repository_name(name)
    _require_valid(base_model, license, revision, message)
    progress = skip_repeated_reports(progress)
    # Local checks come first: an error in the model needs no network.
    model = require_sound(as_path("path", path))
    paths, hidden = model_files(model)
    card = model_card(model, paths, name, base_model, license)
    notes = _Notes()
    if hidden:
        notes.extend([f"hidden files are not sent: {some_names(hidden)}"])
    if not dry_run:
        require_token(name)
    repository, private = _read_existing_repository(name, revision, public, dry_run, notes)
    # A short new card must not replace one that somebody wrote.
    sends_card = not card.is_new or repository is None or README not in repository.files
    if sends_card:
        _check_card(card, private, notes)
    else:
        notes.extend([f"{README} there stays as it is: {model} has none"])
    names = set(paths)
    if sends_card:
        names.add(README)
    if repository is None:
        other_names = []
    else:
        other_names = sorted(set(repository.files) - names - {_KEPT, README})
    if not delete_others:
        _require_no_mixture(name, names, other_names)
    files = _local_files(model, paths, dry_run, on_steps, notes, progress)
    if sends_card and (card.changed or card.is_new):
        files[README] = in_memory(README, card.content)
    states: dict[str, State] = {}
    changed: list[LocalFile] = []
    for file in files.values():
        state = _compare_with_repository(file, repository)
        states[file.name] = state
        if state != "same":
            changed.append(file)
    if delete_others:
        deleted = other_names
        kept = []
    else:
        deleted = []
        kept = other_names
    created = repository is None
    has_branch = repository is not None and repository.has_branch
    if not dry_run and (not has_branch or changed or deleted):
        # The hub would refuse an invalid card only after large files were sent.
        if README in states and states[README] != "same":
            validate_model_card(card.content.decode("utf-8-sig"), name)
        repository = _ensure_destination(name, revision, repository, private=not public)
        if changed or deleted:
            commit_message = message or f"Upload {name} with quantkit"
            commit = commit_files(changed, deleted, repository, commit_message, progress)
            _require_commit_matches(list(files.values()), name, commit)
            repository = replace(repository, commit=commit)
    pushed: list[PushedFile] = []
    for file_name in sorted(files):
        pushed.append(PushedFile(file_name, files[file_name].size, states[file_name]))
    return PushResult(
        name=name,
        url=f"{HfApi().endpoint}/{name}",
        branch=revision,
        commit=None if repository is None else repository.commit,
        private=private,
        created=created,
        files=pushed,
        deleted=deleted,
        kept=kept,
        dry_run=dry_run,
        notes=notes.lines,
    )


class _Notes:
    """Notes for the result, which are logged at once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def extend(self, lines: list[str]) -> None:
        for line in lines:
            self.lines.append(line)
            _log.info("%s", line)


def _repository_name(name: str) -> str:
    # Other commands take names with the prefix, so users may write it here too.
    plain = as_string("name", name).removeprefix(PREFIX)
    if not HUB_NAME.fullmatch(plain) or "/" not in plain:
        raise RequestError(
            "is not the name of a model repository",
            found=format_value(name),
            expected="owner/name",
        )
    require_repository_name(plain)
    return plain


def _require_valid(
    base_model: str | None, license: str | None, revision: str | None, message: str | None
) -> None:
    for value, pattern, option, expected in (
        (base_model, HUB_NAME, "base_model", "owner/name"),
        (license, LICENSE, "license", "apache-2.0, llama3.1, other, ..."),
        (revision, re.compile(REVISION, re.ASCII), "revision", "the name of a branch"),
    ):
        if value is not None and not pattern.fullmatch(as_string(option, value)):
            raise RequestError(
                Message(Option(option), " is not in the form that hubs accept"),
                found=format_value(value),
                expected=expected,
            )
    if base_model is not None and "/" not in base_model:
        raise RequestError(
            Message(Option("base_model"), " has no owner"), found=base_model, expected="owner/name"
        )
    # Where a model is read, a revision may be a commit as well.
    if revision is not None and COMMIT.fullmatch(revision):
        raise RequestError(
            Message(Option("revision"), " is a commit, to which nothing can be pushed"),
            found=revision,
            expected="a branch",
        )
    if message is not None and not as_string("message", message).strip():
        raise RequestError(Message(Option("message"), " is empty"), expected="a commit message")


def _read_existing_repository(
    name: str, branch: str | None, public: bool, dry_run: bool, notes: _Notes
) -> tuple[Repository | None, bool | None]:
    """Read the repository, None if it is not there, and find whether it is private or will be.

    A dry run continues without it.
    """
    try:
        repository = read_repository(name, branch)
    except QuantkitError as error:
        if not dry_run:
            raise
        notes.extend([f"files are not compared with the hub: {error}"])
        repository = None
    if repository is None:
        return None, not public
    if public and repository.private:
        notes.extend([f"{name} exists and stays private; its settings on the hub change that"])
    # The hub may not state the visibility, which is None then.
    elif not public and repository.private is False:
        notes.extend([f"{name} exists and is public: the model is published"])
    return repository, repository.private


def _local_files(
    model: Path,
    paths: Mapping[str, Path],
    dry_run: bool,
    on_steps: Callable[[Mapping[str, float]], object] | None,
    notes: _Notes,
    progress: Progress,
) -> dict[str, LocalFile]:
    """Hash the files, and compare them with the manifests."""
    if on_steps is not None and not dry_run:
        size = sum(path.stat().st_size for path in paths.values())
        on_steps(
            {
                "sha256": size / _HASH_SPEED,
                "upload": size / _UPLOAD_SPEED,
                "commit": _COMMIT_SECONDS,
            }
        )
    files = hash_files(paths, progress)
    digests = {paths[name]: file.sha256 for name, file in files.items()}

    def find_digest(path: Path) -> str:
        # A manifest can also list files that are not sent. All others are hashed once.
        return digests.get(path) or SourceFile(path).sha256()

    models_with_manifest = manifests(model)
    for listed_model in models_with_manifest:
        _, edited = require_as_written(listed_model, sha256=find_digest)
        for file_name, change in edited.items():
            notes.extend([f"{file_name} was {change} since quantkit wrote it"])
        path = manifest_path(listed_model)
        if listed_model.is_file() and path not in digests:
            notes.extend(
                [f"{path} is of the whole folder, and not sent: pass the folder to send it"]
            )
    if not models_with_manifest:
        notes.extend([f"{model} has no manifest of quantkit to compare its files with"])
    return files


def _check_card(card: Card, private: bool | None, notes: _Notes) -> None:
    """Require a licence of a public model, and note what else the card lacks."""
    if not card.license:
        problem = "the model card has no license"
        if private is False:
            raise RequestError(
                problem,
                found=README,
                hint=Message(Option("license"), " adds it, such as apache-2.0 or other"),
            )
        notes.extend([Message(f"{problem}: ", Option("license"), " adds it")])
    if card.lacks_base:
        notes.extend(
            [Message("the model card has no base model: ", Option("base_model"), " adds it")]
        )
    if card.changed and not card.is_new:
        notes.extend(
            [
                f"the model card is sent with {_join_names(card.changed)} added;"
                " the folder is not changed"
            ]
        )


def _compare_with_repository(file: LocalFile, repository: Repository | None) -> State:
    if repository is None:
        announced = None
    else:
        announced = repository.files.get(file.name)
    if announced is None:
        return "new"
    if file.equals(announced):
        return "same"
    return "changed"


def _require_no_mixture(name: str, files: Collection[str], other_files: Sequence[str]) -> None:
    """Refuse to leave files of another model among those that readers load; GGUF files are
    independent of them.
    """
    if all(not is_loaded(file) or file.endswith(".gguf") for file in files):
        return
    mixed = []
    for other_file in other_files:
        if "/" not in other_file and is_loaded(other_file) and not other_file.endswith(".gguf"):
            mixed.append(other_file)
    if mixed:
        raise RequestError(
            "the repository has other files that readers would load with this model",
            path=PREFIX + name,
            found=some_names(mixed),
            hint=(
                Message(
                    Option("delete_others", value=True),
                    " deletes them in the same commit; or push to another repository",
                )
            ),
        )


def _ensure_destination(
    name: str, branch: str | None, repository: Repository | None, *, private: bool
) -> Repository:
    """Create the repository and the branch if they are not there, and read them."""
    if repository is None:
        create_repository(name, private=private)
        repository = read_repository(name, branch)
        # What was meant to be private must not be published by a setting of the hub.
        if private and repository is not None and repository.private is False:
            problem = "the hub has created a public repository"
            raise RequestError(
                problem,
                path=PREFIX + name,
                hint=Message(Option("public", value=True), " accepts it"),
            )
    if repository is not None and not repository.has_branch and branch is not None:
        create_branch(name, branch)
        repository = read_repository(name, branch)
    if repository is None or not repository.has_branch:
        problem = "the hub does not list what it has created"
        raise CheckpointError(problem, path=PREFIX + name, hint="repeat the command")
    return repository


def _require_commit_matches(files: list[LocalFile], name: str, commit: str) -> None:
    try:
        require_sent(files, name, commit)
    except RequestError as error:
        problem = f"commit {commit} was made, but not compared with the files: {error.problem}"
        raise type(error)(
            problem, path=error.path, hint="repeat the command, which compares them"
        ) from error


def _join_names(names: list[str]) -> str:
    *first_names, last_name = names
    if not first_names:
        return last_name
    return f"{', '.join(first_names)} and {last_name}"
