"""llama.cpp through llama-cpp-python, in an environment that has it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

# llama.cpp calls it as long as the library is loaded.
_callbacks: list[Any] = []


def silence() -> None:
    """Drop what llama.cpp logs."""
    import llama_cpp

    _callbacks.append(llama_cpp.llama_log_callback(lambda level, message, data: None))
    llama_cpp.llama_log_set(_callbacks[-1], ctypes.c_void_p(0))


def quantize_file(source: str, file: str, kind: str, **settings: Any) -> None:
    """Quantize a GGUF file by llama.cpp's own quantizer.

    Args:
        source: the file of floats.
        file: the file to write.
        kind: such as `Q4_0`.
        settings: other fields of `llama_model_quantize_params`.

    Raises:
        SystemExit: if it fails.
    """
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    for name, value in settings.items():
        setattr(options, name, value)
    if llama_cpp.llama_model_quantize(source.encode(), file.encode(), ctypes.byref(options)):
        raise SystemExit(f"llama.cpp could not make {file}")


def tokenize(vocabulary: Any, text: str, *, specials: bool, around: bool = True) -> list[int]:
    """Return llama.cpp's tokens of a text.

    Args:
        vocabulary: what `llama_model_get_vocab` returns.
        text: the text.
        specials: whether special tokens that are spelled in the text are read as such.
        around: whether to add those that begin or end a text.
    """
    import llama_cpp

    data = text.encode()
    room = (llama_cpp.llama_token * (len(data) + 16))()
    count = llama_cpp.llama_tokenize(vocabulary, data, len(data), room, len(room), around, specials)
    return list(room[:count])


def list_end_tokens(vocabulary: Any) -> list[int]:
    """Return the tokens that end a generation for llama.cpp."""
    import llama_cpp

    count = llama_cpp.llama_vocab_n_tokens(vocabulary)
    return [token for token in range(count) if llama_cpp.llama_vocab_is_eog(vocabulary, token)]


def log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the logarithms of probabilities for logits [..., V]."""
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
