"""What `quantkit.push` sent, or would send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quantkit.base.memory import size_text

State = Literal["new", "changed", "same"]
_MAX_NAMED = 4


@dataclass(frozen=True)
class PushedFile:
    """A file of the model, and its state: ``new`` or ``changed`` compared with the repository,
    or the ``same``.
    """

    name: str
    size: int
    state: State


@dataclass(frozen=True)
class PushResult:
    """What `quantkit.push` sent, or would send.

    Attributes:
        url: of the repository.
        branch: None for the default one.
        commit: the head of the branch, with these files and those that stay; None if it is not
            there yet.
        private: whether the repository is private; None if the hub does not state it.
        created: whether the repository was created, or would be.
        files: of the model, by name.
        deleted, kept: other files in the repository that were deleted, and those that stay.
        dry_run: whether nothing was sent.
        notes: what users should know.
    """

    name: str
    url: str
    branch: str | None
    commit: str | None
    private: bool | None
    created: bool
    files: list[PushedFile]
    deleted: list[str]
    kept: list[str]
    dry_run: bool
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """Convert the result to plain values."""
        return {**vars(self), "files": [vars(file) for file in self.files]}

    def lines(self) -> list[str]:
        """Write the result as text; for a dry run with every file."""
        sent = [file for file in self.files if file.state != "same"]
        same_count = len(self.files) - len(sent)
        visibility = {True: "private", False: "public", None: "visibility unknown"}[self.private]
        if self.branch:
            visibility += f", branch {self.branch}"
        destination = f"{self.url} ({visibility})"
        amount = f"{file_count(len(sent))}, {size_text(sum(file.size for file in sent))}"
        # What is said of files that are not sent.
        same_text: list[str] = []
        if same_count:
            same_text.append(f"{file_count(same_count)} there already")
        other_texts: list[str] = []
        if self.deleted:
            other_texts.append(f"{file_count(len(self.deleted))} deleted")
        if self.kept:
            stay = "file stays" if len(self.kept) == 1 else "files stay"
            other_texts.append(f"{len(self.kept)} other {stay}: {some_names(self.kept)}")
        if self.dry_run:
            action = "would create" if self.created else "would send to"
            width = max((len(file.name) for file in self.files), default=0)
            lines = [f"{action} {destination}"]
            for file in self.files:
                lines.append(f"  {file.state:<8}{file.name:<{width}}  {size_text(file.size)}")
            for name in self.deleted:
                lines.append(f"  {'delete':<8}{name}")
            lines.append("; ".join([f"{amount} to send", *same_text, *other_texts]))
            lines.append("nothing was sent")
            return lines
        # No commit was made, so there is none to name.
        if not sent and not self.deleted:
            return [
                f"{destination}: nothing to send",
                "; ".join(["every file there is the same", *other_texts]),
            ]
        created = "created, " if self.created else ""
        parts = [f"sent {amount}", *same_text, *other_texts, "the hub's list of files is as here"]
        return [f"{destination}: {created}commit {self.commit}", "; ".join(parts)]


def file_count(count: int) -> str:
    """Write a number of files in words."""
    noun = "file" if count == 1 else "files"
    return f"{count} {noun}"


def some_names(names: Sequence[str]) -> str:
    """List the first of several names, and count the remaining ones."""
    parts = list(names[:_MAX_NAMED])
    if len(names) > _MAX_NAMED:
        parts.append(f"and {len(names) - _MAX_NAMED} more")
    return ", ".join(parts)
