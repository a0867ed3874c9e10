"""Where the packaged files are."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent
DEMO_MODEL = _HERE / "mini-en"
EXCERPT = _HERE / "excerpt.txt"
CALIBRATION = _HERE / "calibration.jsonl"


def excerpt() -> str:
    """Public-domain English that the demo model was not trained on."""
    return EXCERPT.read_text(encoding="utf-8")


def gate_texts() -> dict[str, str]:
    """Return what every quantized model is measured on: a speech, and many small kinds of text,
    code among them.
    """
    return {"speech": excerpt(), "mixed": (_HERE / "mixed.txt").read_text(encoding="utf-8")}
