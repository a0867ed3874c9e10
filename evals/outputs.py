"""The files an evaluation is written to."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import DestinationError
from quantkit.evals.extras import optional
from quantkit.evals.plot import picture
from quantkit.evals.report import markdown
from quantkit.evals.results import Evaluation
from quantkit.formats.detect import is_model_folder
from quantkit.formats.output.destination import destination_error


@dataclass(frozen=True)
class Outputs:
    """Where to write the report, its data and its picture; None where not wanted.

    Raises:
        DestinationError: at once, if a file's folder is not there or cannot be written in.
        RequestError: at once, if a picture is wanted and matplotlib is not installed.
    """

    report: Path | None = None
    data: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        if self.plot is not None:
            optional("matplotlib")
        require_writable(self.report, self.data, self.plot)

    def write(self, found: Evaluation) -> None:
        """Write what is wanted; each file is there whole or not at all.

        Raises:
            DestinationError: if one cannot be written.
            RequestError: if there is nothing to draw.
        """
        if self.report is not None:
            replace(self.report, markdown(found).encode())
        if self.data is not None:
            replace(self.data, json.dumps(found.to_json(), indent=2, allow_nan=False).encode() + b"\n")
        if self.plot is not None:
            replace(self.plot, picture(found))


def require_writable(*paths: Path | None) -> None:
    """Check where reports are to go; an earlier one is replaced, a file of a model never.

    Raises:
        DestinationError: if the folder of one is not there or cannot be written in, or the file is of a model.
    """
    for path in paths:
        if path is not None and path.exists() and is_model_folder(path.parent):
            raise DestinationError(
                "is a file in a model's folder; nothing is overwritten there", path=path, hint="choose another name"
            )
        if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
            raise DestinationError("cannot be written there", path=path, expected="a folder that can be written in")


def replace(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all.

    Raises:
        DestinationError: if it cannot be written.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise destination_error(error, path) from error
