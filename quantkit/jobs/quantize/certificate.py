"""The certificate for long contexts: what a quantized model lost by position, on request, before
it gets its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.base.arguments import as_integer, as_path
from quantkit.base.progress import Progress
from quantkit.data.files import gate_texts
from quantkit.errors import RequestError
from quantkit.files.located import text_of
from quantkit.formats.checkpoint import Checkpoint
from quantkit.jobs.output.labels import file_name
from quantkit.model.rounded_inputs import RoundedInputs
from quantkit.quality.bounds import scheme_bound, with_inputs
from quantkit.quality.measures import LOGITS_BYTES
from quantkit.quality.position_divergence import divergence_by_position, position_windows
from quantkit.quality.positions import CACHES, TOKENS, PositionCertificate
from quantkit.tensors.activations import InputRounding
from quantkit.tensors.scheme import QuantScheme
from quantkit.text.tokenizer import Tokenizer, prompt_start

_MIN_TOKENS = 2
# At most, over a long text.
_LETTERS_OF_TOKEN = 64
_STATES_OF_ATTENTION = (
    9  # as wide as queries, that a block holds together: they, keys, values, and what turns them
)


@dataclass(frozen=True)
class CertifiedText:
    """The text on which a model is certified: token ids in `windows` [W, T], of `requested`
    positions or fewer.
    """

    name: str
    sha256: str
    requested: int
    windows: Tensor
    notes: list[str]

    def certificate(
        self,
        source: Checkpoint,
        result: Checkpoint,
        schemes: Iterable[QuantScheme],
        inputs: Mapping[str, InputRounding],
        progress: Progress,
    ) -> PositionCertificate:
        """Measure a result against its source, with the inputs of its linears rounded. The bound is
        that of the gate. Raises `NonFiniteError` if a model's logits are NaN or Inf.
        """
        bound = with_inputs(scheme_bound(schemes), inputs.values()).kl
        run = RoundedInputs(result, inputs)
        (caches,) = divergence_by_position(source, [run], self.windows, progress=progress)
        found = {}
        for cache, buckets in caches.items():
            found[cache] = [bucket.round_values() for bucket in buckets]
        count, length = self.windows.shape
        return PositionCertificate(
            self.name, self.sha256, self.requested, length, count, bound, found
        )

    def memory_bytes(self, config: ModelConfig) -> int:
        """Return what the hidden states take of the source and of the result with either cache,
        what attention makes of one of them, and the logits that are compared.
        """
        wide = config.num_heads * config.head_dim
        states = (1 + len(CACHES)) * config.hidden_size + _STATES_OF_ATTENTION * max(
            wide, config.hidden_size
        )
        length = self.windows.shape[1]
        logits = (1 + len(CACHES)) * min(LOGITS_BYTES, 4 * length * config.vocab_size)
        return 4 * length * states + logits

    def attention_flops(self, config: ModelConfig) -> int:
        """Of all passes, what grows with the square of the length."""
        count, length = self.windows.shape
        seen = sum(min(length / 2, layer.window or length) for layer in config.layers)
        return int(
            (1 + len(CACHES)) * count * length * seen * 4 * config.num_heads * config.head_dim
        )

    @property
    def tokens(self) -> int:
        """That go through a model in all passes."""
        return (1 + len(CACHES)) * self.windows.numel()


def prepare_certified_text(
    positions: int | None, text: str | Path | None, source: Checkpoint, tokenizer: Tokenizer | None
) -> CertifiedText | None:
    """Return the text that a certificate is about; None if none was requested.

    Args:
        positions: tokens of its windows, at most; a shorter text, or context, is measured to its
            end.
        text: a file; None is the texts of the gate, one after the other.

    Raises:
        RequestError: if a text is given alone or cannot be read, the positions are no such number,
            or the model has no tokenizer or cannot be run.
    """
    if positions is None:
        if text is not None:
            raise RequestError("`certify_text` goes with `certify_positions`")
        return None
    length = as_integer("certify_positions", positions, _MIN_TOKENS)
    if not source.config.runnable:
        raise RequestError(
            "`certify_positions` does not go with `tensors_only=True`: the model is not run"
        )
    if tokenizer is None:
        raise RequestError(
            "a certificate for long contexts needs a tokenizer, and the source has none",
            path=source.path,
        )
    name, digest, raw = _text(None if text is None else as_path("certify_text", text))
    ids = tokenizer.encode(raw[: _LETTERS_OF_TOKEN * max(length, TOKENS)])
    context = source.config.max_positions
    windows, notes = position_windows(name, ids, prompt_start(tokenizer), length, context)
    if notes and text is None and windows.shape[1] < context:
        notes[0] += "; `certify_text` names a longer one"
    return CertifiedText(name, digest, length, windows, notes)


def _text(path: Path | None) -> tuple[str, str, str]:
    """Return the name, sha256 and content of a text."""
    if path is None:
        texts = gate_texts()
        raw = "\n\n".join(texts.values())
        return " and ".join(texts), hashlib.sha256(raw.encode()).hexdigest(), raw
    raw, digest = text_of(path)
    return file_name(path) or "unnamed text", digest, raw
