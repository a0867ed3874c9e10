"""Calibration samples that the float model writes itself: plain texts, and conversations where the
model has a chat template.

The beginning of a text is drawn at a high temperature that falls to the row's own, as in
"Self-calibration" (2410.17170); without a token to begin with, the first token is any, as in
LLM-QAT (2305.17888). The rows have several temperatures. In conversations the model writes the
question too, as in Magpie (2406.08464).

B rows, V vocabulary, T tokens of a row.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.base.memory import malloc_trim
from quantkit.base.messages import Message, Option
from quantkit.base.progress import Progress
from quantkit.calibration.conversations import TEMPLATE_SECONDS, model_chat
from quantkit.calibration.data import SELF, Calibration
from quantkit.calibration.packaged import TEMPLATE_LENGTH
from quantkit.errors import CheckpointError, RequestError
from quantkit.formats.checkpoint import Checkpoint, parameter_count, require_calibratable
from quantkit.runtime.generation_config import end_tokens
from quantkit.runtime.rows import RowWriter, load_decoder_rows, require_room, weight_dtype
from quantkit.tensors.finite import nonfinite_logits
from quantkit.text.chat import TemplateChat
from quantkit.text.template_process import Budget
from quantkit.text.tokenizer import Tokenizer, prompt_start

TEMPERATURES = (0.7, 1.0, 1.3)
"""The temperatures of rows, in turn."""
ROUNDS = 4
"""How often rows are written at most, as those that repeat themselves are written again."""
REPETITIVE = "repetitive"
"""The kind of dropped samples in the manifest."""
# The temperature of the first token of a text, which falls to the row's over so many tokens.
_FIRST_TEMPERATURE = 2.0
_FALLING_TOKENS = 4
# Of the length of a row, for a question that the model does not end.
_QUESTION_SHARE = 4
# Tokens that are judged together, the length of the sequences counted in them, and how many of
# these differ at least in text that does not repeat itself.
_WINDOW = 48
_SEQUENCE = 3
_DIFFERENT = 0.5
# Shorter rows are not judged.
_SHORTEST_JUDGED = 16
# If fewer of the samples remain, the solver would learn too little of the model.
_FEWEST_KEPT = 4
# Bytes of the cache and the logits of rows that are written together, and their number at most. The
# free memory must not decide: other rows together would change the roundings of a product, and so
# the samples.
_BATCH_BYTES = 2**30
# Of a logit, its probability, and their sum.
_LOGIT_BYTES = 20
_MOST_ROWS = 64
_MOST_ROWS_ON_GPU = 256
_QUESTION = "QUESTION7f3a"
_ANSWER = "ANSWER5c1d"


@dataclass(frozen=True)
class Passage:
    """A part of a text that the model writes.

    Attributes:
        ends: the tokens that end it.
        keeps_end: whether such a token stays in the text. If not, what follows begins with its own
            spelling of it.
        longest: its tokens at most, or None.
        begins_freely: whether its first tokens are drawn at a higher temperature.
    """

    ends: frozenset[int]
    keeps_end: bool
    longest: int | None = None
    begins_freely: bool = True


@dataclass(frozen=True)
class Layout:
    """What a row consists of: tokens that it begins with, and the parts of each text, over and
    over: fixed tokens, or passages that the model writes.

    At least one part is a passage, and after one that does not keep its end come fixed tokens.
    """

    start: tuple[int, ...]
    parts: tuple[tuple[int, ...] | Passage, ...]


class _Row:
    """The state of a row while it is written."""

    def __init__(self, layout: Layout, temperature: float) -> None:
        self._parts: Iterator[tuple[int, ...] | Passage] = itertools.cycle(layout.parts)
        self._temperature = temperature
        self._fixed = deque(layout.start)
        self._passage: Passage | None = None
        self._written = 0
        if not self._fixed:
            self._enter_next_part()

    @property
    def temperature(self) -> float:
        """Return the temperature of the next token."""
        passage = self._passage
        if passage is None or not passage.begins_freely or self._written >= _FALLING_TOKENS:
            return self._temperature
        remaining = 1 - self._written / _FALLING_TOKENS
        return self._temperature + remaining * max(0.0, _FIRST_TEMPERATURE - self._temperature)

    @property
    def refused(self) -> frozenset[int]:
        """Return the tokens that must not come next: an empty passage would tell nothing."""
        if self._passage is None or self._written > 0:
            return frozenset()
        return self._passage.ends

    def accept(self, drawn: int) -> int:
        """Return the row's next token, which is `drawn` where the model writes."""
        passage = self._passage
        if passage is None:
            token = self._fixed.popleft()
            if not self._fixed:
                self._enter_next_part()
            return token
        ended = drawn in passage.ends
        if (ended and not passage.keeps_end) or self._written == passage.longest:
            self._enter_next_part()
            return self.accept(drawn)
        self._written += 1
        if ended:
            self._enter_next_part()
        return drawn

    def _enter_next_part(self) -> None:
        part = next(self._parts)
        while part == ():
            part = next(self._parts)
        if isinstance(part, Passage):
            self._passage = part
            self._written = 0
        else:
            self._passage = None
            self._fixed.extend(part)


class Chooser:
    """Chooses the next tokens of rows from the logits of the model.

    Each row has random numbers of its own, which depend on the seed and the row's number alone.
    """

    def __init__(
        self, rows: Sequence[tuple[int, Layout]], length: int, seed: int, refused: Tensor
    ) -> None:
        """
        Args:
            rows: the number of each row, and its layout.
            length: T.
            seed: of all rows.
            refused: the tokens that no row may contain, [V] bool.
        """
        self._rows: list[_Row] = []
        numbers: list[Tensor] = []
        for number, layout in rows:
            self._rows.append(_Row(layout, TEMPERATURES[number % len(TEMPERATURES)]))
            generator = torch.Generator().manual_seed(_derive_seed(seed, number))
            numbers.append(torch.rand(length, generator=generator))
        self._numbers = torch.stack(numbers, dim=1)
        self._refused = refused
        self._last_allowed = int((~refused).nonzero()[-1])
        self._position = 0

    def choose(self, logits: Tensor) -> Tensor:
        """Choose the tokens [B] for logits [B, V].

        Raises:
            NonFiniteError: if the logits are NaN or Inf.
        """
        scores = logits.float().masked_fill(self._refused.to(logits.device), -torch.inf)
        for index, row in enumerate(self._rows):
            ends = list(row.refused)
            if ends:
                scores[index, ends] = -torch.inf
        temperatures = torch.tensor([row.temperature for row in self._rows], device=logits.device)
        probabilities = torch.softmax(scores / temperatures[:, None], dim=-1)
        cumulative = probabilities.cumsum(-1)
        totals = cumulative[:, -1:]
        numbers = self._numbers[self._position].to(logits.device)
        self._position += 1
        # The first token at which the sum exceeds the number: none of probability 0.
        drawn = torch.searchsorted(cumulative, numbers[:, None] * totals, right=True)
        if not totals.isfinite().all():
            raise nonfinite_logits(dtype=logits.dtype)
        tokens: list[int] = []
        for row, token in zip(self._rows, drawn.flatten().tolist(), strict=True):
            tokens.append(row.accept(min(token, self._last_allowed)))
        return torch.tensor(tokens, device=logits.device)


@dataclass(frozen=True)
class SelfText:
    """How a model writes samples.

    Attributes:
        layouts: of the rows, in turn.
        hides_start: whether the token that rows begin with is left out of the samples, because the
            tokenizer does not put it before a text.
        refused: the tokens that no row may contain, [V] bool.
        notes: for the user.
    """

    layouts: tuple[Layout, ...]
    hides_start: bool
    refused: Tensor
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, source: Checkpoint, tokenizer: Tokenizer | None, length: int) -> SelfText:
        """Choose the layouts for a model: half of the rows are conversations where it has a chat
        template, all are plain texts elsewhere.

        Args:
            tokenizer: None for a model that is known by tokens only.
            length: tokens of a sample.

        Raises:
            CheckpointError: for a damaged generation_config.json.
        """
        config = source.config
        ends = end_tokens(source.path, config)
        chat: TemplateChat | None = None
        notes: list[str] = []
        lead: tuple[int, ...] = ()
        known_tokens = config.vocab_size
        if tokenizer is not None:
            chat, notes = model_chat(source.path, tokenizer)
            lead = tuple(prompt_start(tokenizer))
            # The embedding of many models has more rows than there are tokens.
            known_tokens = min(known_tokens, tokenizer.vocab_size)
        refused = torch.arange(config.vocab_size) >= known_tokens
        # They stand for images or sound, which there are not.
        for token in config.media_tokens:
            # Some configs name one that the vocabulary does not have.
            if token < config.vocab_size:
                refused[token] = True
        if chat is not None:
            ends = tuple(dict.fromkeys((*ends, *chat.end_ids)))
        start = lead or _choose_start(config, ends)
        plain = Layout(start, (Passage(frozenset(ends), keeps_end=True), lead))
        layouts = [plain]
        if chat is not None and tokenizer is not None:
            try:
                layouts.append(_lay_out_conversation(chat, tokenizer, start, ends, length))
            except (RequestError, CheckpointError) as error:
                problem = f"{source.path}: {error.problem.rstrip('.')}"
                notes = [*notes, f"{problem}; calibration has no conversations"]
        return cls(tuple(layouts), not lead and bool(start), refused, tuple(notes))

    @property
    def has_conversations(self) -> bool:
        return len(self.layouts) > 1

    def draw(
        self,
        writer: RowWriter,
        config: ModelConfig,
        *,
        samples: int,
        length: int,
        seed: int,
        device: torch.device,
        progress: Progress,
    ) -> tuple[Tensor, int]:
        """Write samples; those that repeat themselves are written again.

        Args:
            writer: the model.
            config: of the model.
            samples, length: the number of samples, and of tokens in each.
            seed: of all of them.
            device: where the model runs.
            progress: called for each token of a row.

        Returns:
            The samples [N, T], fewer than `samples` if too many repeat themselves; and how many
            were dropped.
        """
        total = samples * length
        together = count_rows_together(config, length, device)
        kept: list[Tensor] = []
        numbers = itertools.count()
        written = 0
        for _ in range(ROUNDS):
            missing = samples - len(kept)
            while missing > 0:
                batch = list(itertools.islice(numbers, min(missing, together)))
                missing -= len(batch)
                written += len(batch)
                begun = len(kept) * length
                rows = self._write(writer, batch, length, seed, begun, total, progress)
                repetitive = find_repetitive(rows)
                for row, is_repetitive in zip(rows, repetitive, strict=True):
                    if not is_repetitive:
                        kept.append(row)
        progress(SELF, total, total, "tokens")
        return torch.stack(kept) if kept else torch.empty(0, length), written - len(kept)

    def _write(
        self,
        writer: RowWriter,
        numbers: Sequence[int],
        length: int,
        seed: int,
        begun: int,
        total: int,
        progress: Progress,
    ) -> Tensor:
        """Write the rows of these numbers, [B, T]."""
        full_length = length + self.hides_start
        rows: list[tuple[int, Layout]] = []
        for number in numbers:
            # Rows with each layout have all temperatures.
            layout = self.layouts[number // len(TEMPERATURES) % len(self.layouts)]
            rows.append((number, layout))
        chooser = Chooser(rows, full_length, seed, self.refused)
        position = 0

        def choose(logits: Tensor) -> Tensor:
            nonlocal position
            position += 1
            progress(SELF, begun + min(position, length) * len(rows), total, "tokens")
            return chooser.choose(logits)

        # Without a token that rows begin with, the first one may be any.
        first = chooser.choose(torch.zeros(len(rows), len(self.refused)))
        written = writer.write_rows(first, full_length, choose)
        return written[:, int(self.hides_start) :]


def draw_self_text(
    source: Checkpoint,
    tokenizer: Tokenizer | None,
    *,
    samples: int,
    length: int,
    seed: int,
    device: torch.device,
    progress: Progress,
) -> Calibration:
    """Let a float model write its calibration samples.

    The same model, arguments and machine give the same samples.

    Args:
        source: the model.
        tokenizer: None for a model that is known by tokens only.
        samples, length: the number of samples, and of tokens in each.
        seed: of the draw.
        device: where the model runs.
        progress: called for each token of a row.

    Raises:
        UnsupportedError: if nothing here runs the model, or transformers generates no text with it.
        RequestError: if the model does not fit in memory, or repeats itself in most samples.
        NonFiniteError: if its logits are NaN or Inf.
    """
    require_calibratable(source)
    text = SelfText.of(source, tokenizer, length)
    with open_row_writer(source, device) as writer:
        tokens, dropped = text.draw(
            writer,
            source.config,
            samples=samples,
            length=length,
            seed=seed,
            device=device,
            progress=progress,
        )
    del writer
    malloc_trim()
    notes = list(text.notes)
    counts = {}
    if dropped:
        counts = {REPETITIVE: dropped}
        notes.append(
            f"dropped from the calibration samples, as the model repeats itself in them: {dropped}"
        )
    if len(tokens) * _FEWEST_KEPT < samples:
        raise RequestError(
            "the model repeats itself in most of the text that it writes",
            path=source.path,
            found=f"{len(tokens)} samples that do not, of {len(tokens) + dropped}",
            expected=f"at least {-(-samples // _FEWEST_KEPT)}",
            hint=Message("leave ", Option("calibration", value=SELF), " out, or give a text"),
        )
    if len(tokens) < samples:
        notes.append(f"{len(tokens)} calibration samples are drawn, not {samples}")
    return Calibration(
        tokens=tokens,
        sha256=hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
        seed=seed,
        source=SELF,
        dropped=counts,
        notes=tuple(notes),
        temperatures=TEMPERATURES,
        has_conversations=text.has_conversations,
    )


def open_row_writer(source: Checkpoint, device: torch.device) -> AbstractContextManager[RowWriter]:
    """Load a model that writes rows; leaving the context frees what transformers has loaded.

    Args:
        source: of a model that quantkit's decoder or transformers runs.
        device: where the decoder runs; transformers runs on the CPU.

    Raises:
        RequestError: if its weights do not fit in memory.
    """
    if source.config.run_by is None:
        return nullcontext(load_decoder_rows(source, device))
    # Imports transformers, which is optional.
    from quantkit.runtime.by_transformers import TransformersModel

    return TransformersModel(source)


def require_self_text(
    source: Checkpoint, tokenizer: Tokenizer | None, device: torch.device
) -> None:
    """Make the checks of `draw_self_text` that need no weights, which raise its errors."""
    require_calibratable(source)
    SelfText.of(source, tokenizer, _SHORTEST_JUDGED)
    require_room(source, device)


def find_repetitive(rows: Tensor) -> list[bool]:
    """Return which rows [B, T] of tokens repeat themselves in some part."""
    length = rows.shape[1]
    window = min(_WINDOW, length)
    if length < _SHORTEST_JUDGED:
        return [False] * len(rows)
    sequences = window - _SEQUENCE + 1
    result: list[bool] = []
    for row in rows.tolist():
        fewest = sequences
        for begin in range(0, length - window + 1, max(1, window // 4)):
            part = row[begin : begin + window]
            different = {tuple(part[at : at + _SEQUENCE]) for at in range(sequences)}
            fewest = min(fewest, len(different))
        result.append(fewest < _DIFFERENT * sequences)
    return result


def count_rows_together(config: ModelConfig, length: int, device: torch.device) -> int:
    """Return how many rows of T tokens are written together, whatever memory is free."""
    most = _MOST_ROWS
    if device.type == "cuda":
        most = _MOST_ROWS_ON_GPU
    return max(1, min(most, _BATCH_BYTES // _row_bytes(config, length)))


def estimate_writing_bytes(
    source: Checkpoint, samples: int, length: int, device: torch.device
) -> int:
    """Estimate the memory in which a model writes samples, on the device where it runs."""
    rows = min(samples, count_rows_together(source.config, length, device))
    weights = weight_dtype(source, device).itemsize * parameter_count(source)
    return weights + rows * _row_bytes(source.config, length)


def _row_bytes(config: ModelConfig, length: int) -> int:
    """Return the bytes of the cache and the logits of a row of T tokens at most: models that
    transformers runs have caches of their own kinds.
    """
    return 8 * config.num_layers * config.hidden_size * length + _LOGIT_BYTES * config.vocab_size


def _choose_start(config: ModelConfig, ends: Sequence[int]) -> tuple[int, ...]:
    """Return what texts begin with where the tokenizer puts nothing before them: what separates
    the texts on which such models were trained.
    """
    if config.bos_token_id is not None:
        return (config.bos_token_id,)
    return tuple(ends[:1])


def _lay_out_conversation(
    chat: TemplateChat,
    tokenizer: Tokenizer,
    start: tuple[int, ...],
    ends: Sequence[int],
    length: int,
) -> Layout:
    """Lay out conversations in a chat template: its tokens before the question, between question
    and answer, and after the answer.

    Raises:
        RequestError, CheckpointError: if the template refuses such a conversation, or spells it in
            another way.
    """
    budget = Budget(TEMPLATE_SECONDS, TEMPLATE_LENGTH, repeatable=True)
    question = {"role": "user", "content": _QUESTION}
    answer = {"role": "assistant", "content": _ANSWER}
    asked = chat.text([question], budget=budget, add_generation_prompt=True)
    answered = chat.text([question, answer], budget=budget, add_generation_prompt=False)
    before, question_mark, between = asked.partition(_QUESTION)
    _, answer_mark, after = answered.partition(_ANSWER)
    if not (question_mark and answer_mark) or _QUESTION in between or _ANSWER in after:
        raise RequestError("the chat template does not spell a conversation as it is")
    fixed: list[tuple[int, ...]] = []
    for text in (before, between, after):
        ids = tuple(tokenizer.encode(text, specials=True, bos=False)) if text else ()
        fixed.append(ids)
    before_ids, between_ids, after_ids = fixed
    # Rows begin with it already.
    if start and before_ids[: len(start)] == start:
        before_ids = before_ids[len(start) :]
    question_passage = Passage(
        ends=frozenset((*ends, *between_ids[:1])),
        keeps_end=not between_ids,
        longest=max(1, length // _QUESTION_SHARE),
    )
    answer_passage = Passage(
        ends=frozenset((*ends, *after_ids[:1])),
        keeps_end=not after_ids,
        begins_freely=False,
    )
    return Layout(start, (before_ids, question_passage, between_ids, answer_passage, after_ids))


def _derive_seed(seed: int, number: int) -> int:
    """Derive the seed of a row, below 2 ** 63."""
    digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
