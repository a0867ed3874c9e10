"""gpt-fast's folders: ``model.pth`` in floats or ``model_int8.pth``, with a Hugging Face config and
tokenizer; read only.

Names are Meta's. Rows of queries and keys are in Meta's order; ``wqkv`` has them and the values'
rows. In int8 each linear, also the head, has ``weight`` int8 [N, K] and ``scales`` [N], ``w =
weight * scales``; the embedding and the norms are floats. Source: gpt-fast's
``convert_hf_checkpoint.py``, ``quantize.py`` and ``model.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.base.late import LateModule
from quantkit.errors import UnsupportedError
from quantkit.formats.container import Container
from quantkit.tensors.dtypes import DType

# Folders are recognized without it.
if TYPE_CHECKING:
    from quantkit.formats.containers import gpt_fast_checkpoint
else:
    gpt_fast_checkpoint = LateModule("quantkit.formats.containers.gpt_fast_checkpoint")

_INT4 = "gpt-fast-int4"
_FILES = {"gpt-fast": "model.pth", "gpt-fast-int8": "model_int8.pth", _INT4: "model_int4*.pth"}


class GptFast(Container):
    """The container of PyTorch's gpt-fast."""

    name = "gpt-fast"
    title = "gpt-fast"
    config_file = "config.json"
    weights: Mapping[str, str] = _FILES
    stores_tied_head = True
    derived = True
    read_only = True

    def find_weight_kinds(self, path: Path) -> list[str]:
        kinds: list[str] = []
        for kind, file_pattern in _FILES.items():
            if path.is_dir() and any(path.glob(file_pattern)):
                kinds.append(kind)
        return kinds

    def open(
        self, path: Path, kind: str, *, tensors_only: bool = False, floats_as: DType | None = None
    ) -> gpt_fast_checkpoint.GptFastCheckpoint:
        """Open a file, see `Container.open`; int4 files, whose layout depends on the kernel of one
        kind of GPU, are not read.
        """
        if kind == _INT4:
            problem = (
                "gpt-fast's int4 files have a layout for one GPU kernel, which is not supported"
            )
            file_name = next(path.glob(_FILES[kind])).name
            expected = " or ".join(list(_FILES.values())[:2])
            raise UnsupportedError(problem, path=path, found=file_name, expected=expected)
        return gpt_fast_checkpoint.GptFastCheckpoint(path, path / _FILES[kind])
