"""The files in which a command writes its results: JSON, a report, a picture."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from quantkit.base.json_values import replace_non_finite
from quantkit.cli.output import say
from quantkit.errors import DestinationError, RequestError

STDOUT = "-"
# A file with one of these names in a model's folder would be read as a part of the model.
_MODEL_SUFFIXES = (".safetensors", ".bin", ".pth", ".gguf", ".index.json")
_MARKDOWN = ("", ".md", ".markdown", ".txt")
_PAGES = (".html", ".htm")
_PICTURES = {"": "png", ".png": "png", ".pdf": "pdf", ".svg": "svg"}


class Outputs:
    """Where a command writes its results; what cannot be written is refused before the work begins.

    Each file is written completely or not at all. An earlier one is replaced, but never a file of a
    model or one that the command reads.

    Attributes:
        json_on_stdout: whether standard output is for JSON alone.
    """

    def __init__(
        self,
        data: str | None,
        *,
        report: Path | None = None,
        plot: Path | None = None,
        reads: Iterable[Path | str | None] = (),
        makes: Path | None = None,
    ) -> None:
        """
        Args:
            data: a file for JSON; ``-`` is standard output, and everything else is then printed to
                stderr.
            report: a file for Markdown, or for an HTML page, by its suffix.
            plot: a file for a picture; its suffix decides the format.
            reads: files that the command reads.
            makes: the folder that the command makes.

        Raises:
            DestinationError: if a file cannot be written, or must not be.
            RequestError: if a suffix is not supported, two outputs are the same file, or matplotlib
                is missing for a picture or a page, or cannot be imported.
        """
        self.json_on_stdout = data == STDOUT
        if data is None or self.json_on_stdout:
            self._data = None
        else:
            self._data = Path(data)
        self._report = report
        self._plot = plot
        if self._data is not None and self._data.is_dir():
            raise DestinationError(
                "is a folder; --json requires the path of a file, or - for stdout", path=data
            )
        if report is not None and report.suffix.lower() not in _MARKDOWN + _PAGES:
            raise RequestError(
                "unknown report format", path=report, found=report.suffix, expected=".md or .html"
            )
        if plot is not None and plot.suffix.lower() not in _PICTURES:
            raise RequestError(
                "unknown picture format",
                path=plot,
                found=plot.suffix,
                expected=".png, .pdf or .svg",
            )
        for option, path in (("--report", report), ("--plot", plot)):
            if path is not None and str(path) == STDOUT:
                if option == "--report":
                    hint = "--table markdown prints tables for a report"
                else:
                    hint = None
                raise RequestError(f"{option} requires the path of a file, not {STDOUT}", hint=hint)
        files = [path for path in (self._data, report, plot) if path is not None]
        # Two names may be links to one file.
        real_paths = {os.path.realpath(path) for path in files}
        if len(real_paths) < len(files):
            raise RequestError("two outputs have the same path", path=files[0])
        for path in files:
            _require_writable(path, reads, makes)
        if plot is not None or self.wants_page:
            from quantkit.evals import optional

            # This module imports matplotlib's compiled parts too, so an installation in which those
            # do not load fails before the work.
            optional("matplotlib.backends.backend_agg")

    def say(self, lines: Iterable[str], *, wrap: bool = True) -> None:
        """Print lines to stdout, or to stderr if stdout is for JSON."""
        say(lines, err=self.json_on_stdout, wrap=wrap)

    @property
    def wants_page(self) -> bool:
        """Return whether the report is an HTML page."""
        return self._report is not None and self._report.suffix.lower() in _PAGES

    def write(
        self,
        value: Any,
        *,
        report: Callable[[], str] | None = None,
        picture: Callable[[str], bytes] | None = None,
        show: Callable[[], None] | None = None,
    ) -> None:
        """Write the requested files, then print. Each step is done even if another fails, so
        results that took hours are not lost when stdout is closed.

        Args:
            value: for JSON; numbers that are not finite become null.
            report: returns the report, an HTML page if `wants_page`.
            picture: draws, given the format.
            show: prints.

        Raises:
            DestinationError: if a file cannot be written.
            RequestError: if there is nothing to draw.
        """
        plot_file = self._plot
        data_file = self._data
        report_file = self._report
        # The stack calls the steps in reverse order: the files first, what is printed last. It
        # calls each of them even if another raises.
        with ExitStack() as steps:
            if self.json_on_stdout:
                steps.callback(lambda: say([_format_json(value)], wrap=False))
            if show is not None:
                steps.callback(show)
            if plot_file is not None and picture is not None:
                picture_format = _PICTURES[plot_file.suffix.lower()]
                steps.callback(lambda: replace(plot_file, picture(picture_format)))
            if data_file is not None:
                steps.callback(lambda: replace(data_file, _format_json(value).encode() + b"\n"))
            if report_file is not None and report is not None:
                steps.callback(lambda: replace(report_file, report().encode()))


def _format_json(value: Any) -> str:
    """Format a value as JSON, with null for numbers that are not finite."""
    return json.dumps(replace_non_finite(value), indent=2, allow_nan=False)


def replace(path: Path, content: bytes) -> None:
    """Write a file completely or not at all; a pipe, a device or the target of a link is written to
    directly. Raises `DestinationError` if it cannot be written.
    """
    partial = _partial_path(path)
    try:
        if _is_special(path):
            path.write_bytes(content)
            return
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DestinationError(
            f"cannot be written: {error.strerror or error}", path=path
        ) from error


def _partial_path(path: Path) -> Path:
    """Return the name under which a file is written until it is complete."""
    # With the process id, two commands that write the same file do not share a partial one.
    return path.with_name(f"{path.name}.{os.getpid()}.partial")


def _is_special(path: Path) -> bool:
    """Return whether the path is a pipe, a device or a link, which is not replaced."""
    return path.is_symlink() or (path.exists() and not path.is_file())


def _is_writable(path: Path) -> bool:
    """Create and remove the partial file of a path, to find out whether it can be written."""
    if _is_special(path):
        return os.access(path, os.W_OK)
    # Permissions alone do not show it: /proc takes no files.
    try:
        _partial_path(path).touch()
        _partial_path(path).unlink()
    except OSError:
        return False
    return True


def _require_writable(path: Path, reads: Iterable[Path | str | None], makes: Path | None) -> None:
    """Raise a `DestinationError` if a file cannot be written there, or must not be."""
    from quantkit.formats.detect import is_model_folder
    from quantkit.formats.output.staging import name_partial_folder
    from quantkit.formats.registry import read_names

    if path.is_dir():
        raise DestinationError("is a folder", path=path, expected="a file to write")
    if not _is_writable(path):
        raise DestinationError(
            "cannot be written to this folder", path=path, expected="a writable folder"
        )
    real = Path(os.path.realpath(path))
    # Files with other names may be added to a model's folder, but never replaced in it.
    names_a_model = real.name in read_names() or real.name.endswith(_MODEL_SUFFIXES)
    if is_model_folder(real.parent) and (path.exists() or names_a_model):
        raise DestinationError(
            "is part of a model folder, or would be read as part of it",
            path=path,
            hint="choose another name",
        )
    for read in reads:
        if read is not None and path.exists() and os.path.realpath(read) == str(real):
            raise DestinationError(
                "is an input of this command, which does not overwrite it",
                path=path,
                hint="choose another name",
            )
    if makes is None:
        return
    # The model is written to the partial folder, which is renamed at the end.
    folders = (os.path.realpath(makes), os.path.realpath(name_partial_folder(makes)))
    if str(real) in folders:
        raise DestinationError(
            "is where the model will be written", path=path, hint="choose another name"
        )
