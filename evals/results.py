"""The results of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from quantkit.base.json_values import format_value, replace_non_finite
from quantkit.errors import RequestError
from quantkit.evals.samples import TextDetails
from quantkit.evals.tasks import TaskScore
from quantkit.evals.texts import DocumentScore
from quantkit.evals.timing import Speed
from quantkit.quality.figures import Estimate
from quantkit.quality.measures import Divergence
from quantkit.quality.positions import PositionDivergence

_MIN_TEXTS = 3
"""Fewer have no meaningful spread."""


@dataclass(frozen=True)
class TextFacts:
    """A text that was measured on. WikiText is detokenized, conversations are in the chat template
    of the first model (`in_template`), others are read as they are; counts are of the raw text.
    """

    sha256: str
    is_wikitext: bool
    in_template: bool
    documents: int
    words: int
    bytes: int


@dataclass(frozen=True)
class TextMeasures:
    """A model's figures on one text.

    Attributes:
        tokens: of the whole text.
        documents: perplexity of its documents, in rolling windows.
        token_perplexity: over fixed windows.
        divergence: from the reference, over the same windows; None for the reference itself.
        token_perplexity_error: its standard error, with the text's tokens as a sample.
        perplexity_ratio_error: the same for the ratio of token perplexities; None for the reference
            itself.
        positions: the divergence from the reference by position, with keys and values in a "float"
            cache and in an "int8" one; the reference has a float cache both times. Empty if not
            requested, and for the reference.
    """

    tokens: int
    documents: DocumentScore
    token_perplexity: float
    divergence: Divergence | None
    token_perplexity_error: float | None = None
    perplexity_ratio_error: float | None = None
    positions: dict[str, list[PositionDivergence]] = field(default_factory=dict)


@dataclass(frozen=True)
class OverTexts:
    """A model's distance from the reference as the mean of its texts, with equal weights; the ratio
    is the geometric mean. Errors are from the spread between the texts.
    """

    kl: Estimate
    top1_agreement: Estimate
    perplexity_ratio: Estimate


@dataclass(frozen=True)
class Row:
    """One model.

    Attributes:
        megabytes: of its tensors on disk, 10**6 bytes.
        bits_per_weight: of the tensors, over all parameters.
        rolling_window: longest window over documents, in tokens.
        prefix: the token that a document's first is predicted from.
        adds_bos: whether the tokenizer begins a text with BOS.
        texts, tasks: measures by name.
        task_backends: backends of the quantized layers in the tasks; empty without quantized
            layers.
        layer_errors: relative errors of its quantized layers by name, worst first, from its
            manifest; of their outputs, if all manifests with errors have those.
        method: how it was quantized, ``rtn`` or ``gptq``; empty if its manifest does not state it.
    """

    name: str
    megabytes: float
    bits_per_weight: float
    rolling_window: int
    prefix: int
    adds_bos: bool
    texts: dict[str, TextMeasures]
    tasks: dict[str, TaskScore]
    task_backends: list[str]
    speed: Speed | None
    layer_errors: dict[str, float] = field(default_factory=dict)
    method: str = ""


@dataclass(frozen=True)
class EvaluationData:
    """The figures of all models, the reference first if there is one.

    Attributes:
        rows: the models, in order.
        reference: its name.
        texts: what was measured on, by name.
        window: the fixed windows' length in tokens; None where no text was measured on.
        layer_error: which errors of layers the rows have: ``output_error`` or ``relative_error``;
            empty where none.
        device: on which tasks ran and speed was measured.
        versions: of the packages used.
        notes: remarks on the figures.
        details: of each text what only a page shows; empty if not requested, and never in JSON.
    """

    rows: list[Row]
    reference: str | None
    texts: dict[str, TextFacts]
    window: int | None
    layer_error: str
    device: str
    versions: dict[str, str]
    notes: list[str]
    details: dict[str, TextDetails] = field(default_factory=dict)

    def perplexity_ratio(self, row: Row, text: str) -> float | None:
        """Divide the token perplexity by the reference's; None where there is no reference.

        Raises:
            RequestError: if nothing was measured on a text of this name.
        """
        if text not in self.texts:
            raise RequestError(
                "this text was not measured",
                found=format_value(text),
                expected=", ".join(self.texts),
            )
        if self.reference is None:
            return None
        return row.texts[text].token_perplexity / self.rows[0].texts[text].token_perplexity

    def costs(self) -> Iterator[tuple[int, int, Estimate]]:
        """List, by the indices of text and row, KL from the reference or, without one, word
        perplexity; finite ones only.
        """
        for text_index, text in enumerate(self.texts):
            for row_index, row in enumerate(self.rows):
                measures = row.texts[text]
                if self.reference is None:
                    cost = Estimate(measures.documents.word_perplexity)
                elif measures.divergence is None:
                    # The reference itself has no cost.
                    continue
                else:
                    cost = Estimate(measures.divergence.kl, measures.divergence.kl_error)
                # A badly damaged model's figures can be infinite, which no chart can show.
                if math.isfinite(cost.value):
                    yield text_index, row_index, cost

    def over_texts(self, row: Row) -> OverTexts | None:
        """Compute means over the texts; None for fewer than three texts, and for the reference."""
        kls = []
        agreements = []
        log_ratios = []
        for text in self.texts:
            divergence = row.texts[text].divergence
            if divergence is not None:
                kls.append(divergence.kl)
                agreements.append(divergence.top1_agreement)
            ratio = self.perplexity_ratio(row, text)
            if ratio is not None:
                # A ratio is 0 where the reference's perplexity is infinite.
                log_ratios.append(math.log(ratio) if ratio > 0 else -math.inf)
        if len(kls) < _MIN_TEXTS:
            return None
        # The mean of logarithms makes the geometric mean: a ratio and its inverse cancel.
        return OverTexts(_mean(kls), _mean(agreements), _mean(log_ratios).exp())

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values, with None for infinite ones.

        The last model's ``layer_errors`` are at the top level too.
        """
        # Without the details first: `asdict` would copy each prediction of each token.
        value = {**asdict(replace(self, details={})), "layer_errors": self.rows[-1].layer_errors}
        del value["details"]
        for row, plain_row in zip(self.rows, value["rows"], strict=True):
            means = self.over_texts(row)
            plain_row["over_texts"] = None if means is None else asdict(means)
            for text in row.texts:
                plain_row["texts"][text]["perplexity_ratio"] = self.perplexity_ratio(row, text)
        # JSON has no numbers for infinity and NaN.
        plain_value: dict[str, Any] = replace_non_finite(value)
        return plain_value


def _mean(values: Sequence[float]) -> Estimate:
    """Compute the mean of independent figures, and its standard error."""
    count = len(values)
    mean = sum(values) / count
    squared_deviations = sum((value - mean) ** 2 for value in values)
    # The variance of a sample, divided by the number of values for the error of their mean.
    return Estimate(mean, math.sqrt(squared_deviations / (count - 1) / count))
