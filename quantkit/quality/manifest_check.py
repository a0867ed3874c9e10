"""Hold a folder against its own manifest: the sha256 of every file, and what its quality was when it was made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError, QualityError
from quantkit.formats import manifest
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.output.staging import require_finished
from quantkit.formats.registry import read_names
from quantkit.progress import Progress, in_phase, silent
from quantkit.quality.bounds import REPEATABLE
from quantkit.quality.gate import Gate
from quantkit.quality.measures import token_perplexities
from quantkit.quality.windows import measured_windows

_WEIGHT_FILES = {".safetensors", ".pth", ".bin", ".gguf"}


def verify_files(folder: str | Path, *, progress: Progress = silent) -> list[str]:
    """Hold a folder against its manifest: the sha256 of its files and, if it was quantized, its quality.

    Returns:
        What was found, for people.

    Raises:
        CheckpointError: if there is no manifest, a file is missing or changed, or one of weights,
            of the config or of the tokenizer was added; see also `recheck`.
        QualityError: see `recheck`.
    """
    folder = Path(folder)
    require_finished(folder, manifest.NAME)
    made = manifest.read(folder)
    listed = made["files"]
    for path in sorted(folder.iterdir()):
        if path.name not in listed and (path.suffix in _WEIGHT_FILES or _decides(path.name)):
            raise CheckpointError(
                "the manifest does not list this file", path=path, hint="what is read must be what was written"
            )
    for index, (name, expected) in enumerate(listed.items()):
        progress("sha256", index, len(listed), "files")
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise CheckpointError("a file of the manifest is missing", path=path)
        found = manifest.file_sha256(path)
        if found != expected:
            raise CheckpointError(
                "the file is not what quantkit wrote", path=path, found=f"sha256 {found[:12]}", expected=expected[:12],
                hint="copy or make it again",
            )  # fmt: skip
    lines = [f"{folder}: all {len(listed)} files are as quantkit wrote them"]
    if made.get("job") == "quantize" or "quality" in made:
        lines += recheck(folder, made, progress=progress)
    return lines


def _decides(name: str) -> bool:
    """Whether a file beside the weights has a say in what is loaded."""
    return name in read_names() or name.endswith(".index.json")


def recheck(folder: Path, made: Mapping[str, Any], *, progress: Progress = silent) -> list[str]:
    """Hold a quantized folder against the figures in its manifest; lines for people.

    The source is not needed: the model's own perplexities are measured again.

    Raises:
        CheckpointError: if the manifest does not tell of a gate.
        QualityError: if a perplexity is another than the manifest's, or the model did not
            pass its gate when it was made.
    """
    quality: Any = made.get("quality")
    recorded = Gate.from_json(quality, folder / manifest.NAME)
    checkpoint = open_checkpoint(folder)
    texts = measured_windows(checkpoint)
    known = {one.text for one in recorded.texts if one.text in texts and texts[one.text][0] == one.sha256}
    again = {name: windows for name, (_, windows) in texts.items() if name in known}
    told = in_phase(progress, "perplexity")
    figures = token_perplexities(checkpoint, list(again.values()), progress=told) if again else []
    perplexities = dict(zip(again, figures, strict=True))
    lines = []
    for one in recorded.texts:
        if one.text not in perplexities:
            lines.append(f"'{one.text}' is not the text it was measured on; not measured again")
            continue
        found = perplexities[one.text]
        if not (math.isfinite(found) and math.isclose(found, one.perplexity, rel_tol=REPEATABLE)):
            raise QualityError(
                f"perplexity on '{one.text}' is not what the manifest says", path=folder, found=f"{found:.4g}",
                expected=f"{one.perplexity:.4g}", hint="make it again",
            )  # fmt: skip
        lines.append(
            f"'{one.text}': perplexity {found:.4g} as recorded (source {one.source_perplexity:.4g}),"
            f" KL {one.kl:.3g} (bound {one.kl_bound:.3g})"
        )
    what, measured, allowed = recorded.problem() or ("", None, None)
    if what or quality.get("passed") is not True:
        raise QualityError(
            "did not pass its gate when it was made" + (f": {what}" if what else ""), path=folder,
            found=measured, expected=allowed,
            hint="it was kept with `accept_quality_loss=True`" if quality.get("accepted") else "make it again",
        )  # fmt: skip
    return lines
