"""The certificate for long contexts: the loss of a quantized model by position, measured on request
before the output gets its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.base.arguments import as_integer, as_path
from quantkit.base.late import LateModule
from quantkit.base.messages import Message, Option
from quantkit.base.progress import Progress
from quantkit.data.files import gate_texts
from quantkit.errors import RequestError
from quantkit.files.located import read_utf8_text
from quantkit.formats.checkpoint import Checkpoint
from quantkit.jobs.output.labels import file_name
from quantkit.model.rounded_inputs import RoundedInputs
from quantkit.quality.bounds import scheme_bound, with_inputs
from quantkit.quality.measures import tokens_per_head_pass
from quantkit.quality.positions import TOKENS, PositionCertificate, select_caches
from quantkit.tensors.activations import InputRounding
from quantkit.tensors.scheme import QuantScheme
from quantkit.text.tokenizer import Tokenizer, prompt_start

if TYPE_CHECKING:
    from quantkit.quality import position_divergence
else:
    position_divergence = LateModule("quantkit.quality.position_divergence")

_MIN_TOKENS = 2
# Characters per token at most, over a long text: enough of it is tokenized, and no more.
_LETTERS_OF_TOKEN = 64
# Tensors as wide as the queries that a block keeps at the same time: queries, keys, values, and the
# intermediate results of their rotation.
_STATES_OF_ATTENTION = 9


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
        the gate's. Raises `NonFiniteError` if a model's logits are NaN or Inf.
        """
        bound = with_inputs(scheme_bound(schemes), inputs.values()).kl
        run = RoundedInputs(result, inputs)
        (caches,) = position_divergence.divergence_by_position(
            source, [run], self.windows, progress=progress
        )
        rounded_caches = {}
        # The manifest records rounded values, and the certificate equals the one read back from it.
        for cache, buckets in caches.items():
            rounded_caches[cache] = [bucket.round_values() for bucket in buckets]
        count, length = self.windows.shape
        return PositionCertificate(
            text=self.name,
            sha256=self.sha256,
            asked=self.requested,
            length=length,
            windows=count,
            kl_bound=bound,
            caches=rounded_caches,
        )

    def memory_bytes(self, config: ModelConfig) -> int:
        """Estimate the bytes of the hidden states of the source and of the result with either
        cache, of the attention of one of them, and of the logits that are compared.
        """
        # The source, and the result with each cache.
        num_runs = 1 + len(select_caches(config))
        head_dim = max(config.head_dim, config.full_head_dim or 0)
        attention_width = max(config.num_heads * head_dim, config.hidden_size)
        states = num_runs * config.hidden_size + _STATES_OF_ATTENTION * attention_width
        length = self.windows.shape[1]
        # Hidden states and logits are float32; logits are computed in parts of limited size.
        head_tokens = min(length, tokens_per_head_pass(config.vocab_size))
        logits = 4 * num_runs * head_tokens * config.vocab_size
        return 4 * length * states + logits

    def attention_flops(self, config: ModelConfig) -> int:
        """Count the operations of all passes that grow with the square of the length."""
        count, length = self.windows.shape
        # A causal mask lets a token attend to half of the tokens on average; a window to fewer.
        attended = 0.0
        for number, layer in enumerate(config.layers):
            attended += min(length / 2, layer.window or length) * config.head_dim_of(number)
        # Scores and weighted values: two products, of a multiplication and an addition each.
        return int(
            (1 + len(select_caches(config))) * count * length * attended * 4 * config.num_heads
        )

    def count_tokens(self, config: ModelConfig) -> int:
        """Count the tokens that go through a model in all passes."""
        return (1 + len(select_caches(config))) * self.windows.numel()


def prepare_certified_text(
    positions: int | None, text: str | Path | None, source: Checkpoint, tokenizer: Tokenizer | None
) -> CertifiedText | None:
    """Read and tokenize the text on which a model is certified; None if none was requested.

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
            raise RequestError(
                Message(Option("certify_text"), " requires ", Option("certify_positions"))
            )
        return None
    length = as_integer("certify_positions", positions, _MIN_TOKENS)
    if not source.config.measurable:
        raise RequestError(
            Message(
                Option("certify_positions"),
                " cannot be combined with ",
                Option("tensors_only", value=True),
                ": the model is not run",
            )
        )
    if tokenizer is None:
        raise RequestError(
            "certifying long contexts requires a tokenizer, and the source has none",
            path=source.path,
        )
    if text is None:
        text_path = None
    else:
        text_path = as_path("certify_text", text)
    name, digest, raw = _text(text_path)
    ids = tokenizer.encode(raw[: _LETTERS_OF_TOKEN * max(length, TOKENS)])
    context = source.config.max_positions
    windows, notes = position_divergence.position_windows(
        name, ids, prompt_start(tokenizer), length, context
    )
    if notes and text is None and windows.shape[1] < context:
        notes[0] += Message("; ", Option("certify_text"), " sets a longer one")
    return CertifiedText(name=name, sha256=digest, requested=length, windows=windows, notes=notes)


def _text(path: Path | None) -> tuple[str, str, str]:
    """Read a text: its name, sha256 and content."""
    if path is None:
        texts = gate_texts()
        raw = "\n\n".join(texts.values())
        return " and ".join(texts), hashlib.sha256(raw.encode()).hexdigest(), raw
    raw, digest = read_utf8_text(path)
    return file_name(path) or "unnamed text", digest, raw
