"""GGUF files: llama.cpp's, with all of a model in one, or in parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from quantkit.errors import RequestError, UnsupportedError
from quantkit.formats.codecs.codec import QuantMethod
from quantkit.formats.container import Output
from quantkit.formats.containers.gguf_checkpoint import GgufCheckpoint
from quantkit.formats.files.gguf_parts import gguf_file


class Gguf:
    """The container of llama.cpp: config, tokenizer and weights are in one file, or in the parts of one."""

    name = "gguf"
    title = "GGUF"
    config_file = "model.gguf"
    weights: Mapping[str, str] = {"gguf": "*.gguf"}
    methods: Mapping[str, QuantMethod] = {}
    native = None
    stores_tied_head = False
    states_tokens = True
    model_parallel = False
    derived = True
    read_only = True
    one_file = True

    def present(self, path: Path) -> list[str]:
        return [] if gguf_file(path) is None else ["gguf"]

    def indexed(self, path: Path, kind: str) -> bool:
        return False

    def open(self, path: Path, kind: str, *, tensors_only: bool = False) -> GgufCheckpoint:
        if tensors_only:
            raise RequestError("`tensors_only=True` is for Hugging Face folders; of GGUF all is known", path=path)
        file = gguf_file(path)
        assert file is not None, path
        return GgufCheckpoint(file)

    def encoder(self, output: Output) -> NoReturn:
        raise _not_written()

    def side_files(self, output: Output) -> NoReturn:
        raise _not_written()

    def notes(self, output: Output) -> list[str]:
        return []


def _not_written() -> UnsupportedError:
    return UnsupportedError("GGUF is not written")
