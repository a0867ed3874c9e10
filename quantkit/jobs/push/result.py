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
        """Return the result as plain values."""
        return {**vars(self), "files": [vars(file) for file in self.files]}

    def lines(self) -> list[str]:
        """Return the result as text; for a dry run every file."""
        sent = [file for file in self.files if file.state != "same"]
        same = len(self.files) - len(sent)
        visibility = {True: "private", False: "public", None: "visibility unknown"}[self.private]
        where = f"{self.url} ({visibility}{f', branch {self.branch}' if self.branch else ''})"
        amount = f"{file_count(len(sent))}, {size_text(sum(file.size for file in sent))}"
        if same:
            there = [f"{file_count(same)} there already"]
        else:
            there = []
        if self.deleted:
            others = [f"{file_count(len(self.deleted))} deleted"]
        else:
            others = []
        if len(self.kept) == 1:
            stay = "file stays"
        else:
            stay = "files stay"
        if self.kept:
            others += [f"{len(self.kept)} other {stay}: {some_names(self.kept)}"]
        else:
            others += []
        if self.dry_run:
            width = max((len(file.name) for file in self.files), default=0)
            rows = []
            for file in self.files:
                rows.append(f"  {file.state:<8}{file.name:<{width}}  {size_text(file.size)}")
            rows += [f"  {'delete':<8}{name}" for name in self.deleted]
            if self.created:
                made = "would create"
            else:
                made = "would send to"
            return [
                f"{made} {where}",
                *rows,
                "; ".join([f"{amount} to send", *there, *others]),
                "nothing was sent",
            ]
        if not sent and not self.deleted:
            return [
                f"{where}: nothing to send",
                "; ".join(["every file there is the same", *others]),
            ]
        made = "created, " if self.created else ""
        done = "; ".join([f"sent {amount}", *there, *others, "the hub's list of files is as here"])
        return [f"{where}: {made}commit {self.commit}", done]


def file_count(count: int) -> str:
    """Return a number of files in words."""
    return f"{count} file{'' if count == 1 else 's'}"


def some_names(names: Sequence[str]) -> str:
    """Return the first of several names."""
    more = len(names) - _MAX_NAMED
    return ", ".join([*names[:_MAX_NAMED], *([f"and {more} more"] if more > 0 else [])])
