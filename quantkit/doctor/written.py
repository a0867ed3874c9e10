"""A rule about models that quantkit made: whether their files are still those that it wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quantkit.doctor.findings import Finding, finding
from quantkit.doctor.folder import Folder
from quantkit.errors import CheckpointError
from quantkit.files.located import located
from quantkit.formats import manifest
from quantkit.progress import Progress
from quantkit.quality.manifest_check import placed_manifest, require_as_written


@dataclass(frozen=True)
class Written:
    """What was found.

    Attributes:
        manifest: of the model; empty where there is none that can be read.
        compared: what was read, for people; None where nothing was.
    """

    findings: list[Finding] = field(default_factory=list)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    compared: str | None = None


def check(folder: Folder, progress: Progress) -> Written:
    """Compare the sha256 of a model's files with its manifest, if it has one."""
    model, path = placed_manifest(located(folder.path))
    if not path.exists():
        return Written()
    made: Mapping[str, Any] = {}
    try:
        made = manifest.read(model)
        require_as_written(model, progress=progress)
    except CheckpointError as error:
        where = path.name if error.path is None else error.path.name
        return Written([finding("not-as-written", where, error.problem)], made)
    return Written([], made, f"sha256 of {len(made['files'])} files, as {path.name} has them")
