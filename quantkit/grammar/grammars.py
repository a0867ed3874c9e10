"""Grammars compiled for the tokens of a model, as masks over its vocabulary.

llguidance computes the masks. Each token is known by its bytes; special tokens add none, and rows
of the model beyond its tokenizer are never drawn.

V vocabulary.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from quantkit.errors import QuantkitError, RequestError
from quantkit.grammar.after_reasoning import AfterReasoning, Reasoning
from quantkit.grammar.lark import HEAD, START, START_AFTER_REASONING
from quantkit.grammar.trial import try_out
from quantkit.runtime.constraint import Constraint, ConstraintFactory
from quantkit.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from torch import Tensor

_log = logging.getLogger(__name__)

MAX_GRAMMARS = 32
"""Compiled grammars that are kept."""

_WAIT_SECONDS = 60.0
# `LLParserLimits`. They bound the time and memory of one mask, because grammars come from clients.
_LIMITS = {
    # Four for each optional property.
    "max_items_in_row": 5000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
    # The time of this step depends on the vocabulary.
    "precompute_large_lexemes": False,
}
_NO_PACKAGE = 'pip install "quantkit[serve]"'


class Grammars:
    """The grammars of one model, compiled when they are first needed; its methods may be called
    from any thread.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]) -> None:
        """
        Args:
            vocab_size: V, the model's; the tokenizer may have fewer tokens, or more.
            end_ids: tokens that end any text of the model.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = tuple(end_ids)
        # Two locks, so that compiled grammars can be looked up while another one is compiled.
        self._lock = threading.Lock()
        self._compiling = threading.Lock()
        self._vocabulary: tuple[LLTokenizer, int] | None = None
        self._compiled: OrderedDict[str, LLMatcher | RequestError] = OrderedDict()

    def constraint(
        self, grammar: str, end_ids: Sequence[int] = (), reasoning: Reasoning | None = None
    ) -> ConstraintFactory:
        """Compile a grammar, in llguidance's variant of Lark, to a constraint of continuations.

        Args:
            grammar: begins with the rule ``answer``.
            end_ids: tokens that also end the text.
            reasoning: may precede the answer, without restriction.

        Raises:
            RequestError: if the grammar is not supported, too large, or has no text; or llguidance
                is not installed.
        """
        ends: list[int] = []
        for end_id in dict.fromkeys((*self._end_ids, *end_ids)):
            # Ids beyond the vocabulary have no logits.
            if 0 <= end_id < self._vocab_size:
                ends.append(end_id)
        if not ends:
            raise RequestError(
                "the model has no end token, so an answer could not end with its format"
            )
        start = START if reasoning is None else START_AFTER_REASONING
        full_grammar = start + grammar
        compiled = self._find_compiled(full_grammar)
        if compiled is None:
            # One compilation at a time, because each may need much memory.
            if not self._compiling.acquire(timeout=_WAIT_SECONDS):
                raise RequestError("other answer formats are being compiled", hint="try again")
            try:
                # Another thread may have compiled the grammar while this one waited.
                compiled = self._find_compiled(full_grammar) or self._matcher(full_grammar)
            except RequestError as error:
                compiled = error
            finally:
                self._compiling.release()
            # Errors are kept too, so that a refused grammar is not compiled again.
            self._keep(full_grammar, compiled)
        if isinstance(compiled, RequestError):
            # Raising the kept error itself would add each request's traceback to it.
            raise RequestError(
                compiled.problem,
                found=compiled.found,
                expected=compiled.expected,
                hint=compiled.hint,
            )
        assert self._vocabulary is not None
        matcher = compiled
        size = self._vocabulary[1]
        vocab_size = self._vocab_size

        def begin_constraint() -> Constraint:
            constraint = GrammarConstraint(matcher.deep_copy(), size, vocab_size, ends)
            if reasoning is None:
                return constraint
            return AfterReasoning(constraint, reasoning, ends, size - 1, vocab_size)

        return begin_constraint

    def _find_compiled(self, grammar: str) -> LLMatcher | RequestError | None:
        """Look up a matcher at the beginning of a text, which callers copy and never change, or
        the error of its compilation; None if the grammar has not been compiled.
        """
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
            return compiled

    def _keep(self, grammar: str, result: LLMatcher | RequestError) -> None:
        with self._lock:
            self._compiled[grammar] = result
            # The least recently used grammar is the first.
            while len(self._compiled) > MAX_GRAMMARS:
                self._compiled.popitem(last=False)

    def _matcher(self, grammar: str) -> LLMatcher:
        if find_spec("llguidance") is None:
            raise RequestError("llguidance is not installed", hint=_NO_PACKAGE)
        from llguidance import LLMatcher, LLParserLimits

        if self._vocabulary is None:
            self._vocabulary = self._tokens()
        vocabulary = self._vocabulary[0]
        limits: Any = _LIMITS
        # A grammar can take very long or much memory, and only a process can be ended.
        try_out(HEAD + grammar, limits)
        matcher = LLMatcher(
            vocabulary, HEAD + grammar, log_level=0, limits=LLParserLimits(**limits)
        )
        if matcher.is_error():
            raise RequestError(f"the format is not supported: {_reason(matcher)}")
        # Some errors appear only when the first mask is computed. The kept matcher must stay at the
        # beginning, so a copy computes it.
        trial = matcher.deep_copy()
        trial.compute_bitmask()
        if trial.is_error():
            raise RequestError(f"the format is not supported: {_reason(trial)}")
        return matcher

    def _tokens(self) -> tuple[LLTokenizer, int]:
        """Create a vocabulary of the bytes of all tokens, and after them one token for the end;
        with their number.
        """
        from llguidance import LLTokenizer, TokenizerWrapper

        token_bytes = self._tokenizer.token_bytes
        if token_bytes is None:
            raise RequestError(
                "the answer format cannot be constrained, because the bytes of the"
                " tokenizer's tokens are unknown",
                found=self._tokenizer.kind,
            )
        # Tokens without bytes are never part of an answer. The constraint itself allows the end
        # tokens where the grammar's end token is allowed.
        without_bytes = {*(self._end_ids), self._tokenizer.bos_id}
        count = min(self._tokenizer.vocab_size, self._vocab_size)
        tokens: list[bytes] = []
        for token in range(count):
            if token in without_bytes:
                tokens.append(b"")
            else:
                tokens.append(token_bytes.of(token) or b"")
        wrapper = TokenizerWrapper(_Vocabulary(tokens))
        return LLTokenizer(wrapper, slices=LLTokenizer.json_slices()), count + 1


class GrammarConstraint:
    """A `Constraint` of one continuation."""

    def __init__(self, matcher: LLMatcher, size: int, vocab_size: int, ends: Sequence[int]) -> None:
        """
        Args:
            size: the matcher's number of tokens, of which the last is the end.
            vocab_size: V.
            ends: the tokens that end the text.
        """
        # Imported here because commands that only check options import this file.
        import numpy as np

        self._matcher = matcher
        self._size = size
        self._vocab_size = vocab_size
        self._ends = list(ends)
        # llguidance writes masks as words of 32 bits.
        self._bits: Any = np.zeros((size + 31) // 32, np.int32)
        self._ended = False

    def compute_token_mask(self) -> Tensor:
        import numpy as np
        import torch

        mask = np.zeros(self._vocab_size, np.bool_)
        if not self._ended:
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            if self._matcher.is_error():
                raise _make_matcher_error(self._matcher)
            bits = np.unpackbits(
                self._bits.view(np.uint8), count=self._size, bitorder="little"
            ).view(np.bool_)
            mask[: self._size - 1] = bits[:-1]
        # After an end token, only end tokens may follow.
        if self._ended or bits[-1]:
            mask[self._ends] = True
        elif not mask.any():
            raise _make_matcher_error(self._matcher)
        return torch.from_numpy(mask)

    def accept(self, token: int) -> None:
        self._ended = self._ended or token in self._ends
        if not self._ended and not self._matcher.consume_token(token):
            raise _make_matcher_error(self._matcher)


class _Vocabulary:
    """Tokens as llguidance reads them."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = [*tokens, b"<end>"]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        # llguidance tokenizes text that must follow only if `no_forcing` is not set, and `HEAD`
        # sets it.
        return []


def _make_matcher_error(matcher: LLMatcher) -> QuantkitError:
    return QuantkitError(
        "no token can follow in the requested format",
        found=_reason(matcher) or None,
        hint="the vocabulary cannot produce what must follow, or the format is too complex",
    )


def _reason(matcher: LLMatcher) -> str:
    """Shorten a matcher's error to its first line, without its place in a grammar that the user
    did not write.
    """
    error = matcher.get_error()
    if error.startswith("panic"):
        _log.warning("llguidance: %s", error.partition("\n")[0])
        return "it is too complex"
    lines: list[str] = []
    # The quoted grammar follows, with numbers of lines.
    for line in error.partition("\n   1 | ")[0].splitlines():
        stripped = line.strip()
        if stripped and not stripped.startswith("<"):
            lines.append(stripped)
    text = " ".join(lines).rpartition("JSON schema: ")[2]
    text = text.partition(" while processing")[0]
    # llguidance's name for an empty language.
    if "NoExtension" in text:
        return "no text has it"
    return text[:300]
