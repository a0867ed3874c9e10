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
_LIMITS = {
    # Four for each property that may be left out.
    "max_items_in_row": 5000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
    # Whose time depends on the vocabulary.
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
        self._tokenizer, self._vocab_size, self._end_ids = tokenizer, vocab_size, tuple(end_ids)
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        self._vocabulary: tuple[LLTokenizer, int] | None = None
        self._compiled: OrderedDict[str, LLMatcher | RequestError] = OrderedDict()

    def constraint(
        self, grammar: str, end_ids: Sequence[int] = (), reasoning: Reasoning | None = None
    ) -> ConstraintFactory:
        """Return what restricts continuations to a grammar, in llguidance's variant of Lark.

        Args:
            grammar: whose first rule is ``answer``.
            end_ids: tokens that also end the text.
            reasoning: that may come first, without restriction.

        Raises:
            RequestError: if the grammar is not supported, too large, or has no text; or llguidance
                is not installed.
        """
        ends = []
        for one in dict.fromkeys((*self._end_ids, *end_ids)):
            if 0 <= one < self._vocab_size:
                ends.append(one)
        if not ends:
            raise RequestError(
                "the model has no end token, so no answer could end where its format does"
            )
        whole = (START if reasoning is None else START_AFTER_REASONING) + grammar
        if (known := self._find_compiled(whole)) is None:
            # One at a time: each may need memory.
            if not self._compiling.acquire(timeout=_WAIT_SECONDS):
                raise RequestError("other formats of answers are being compiled", hint="try again")
            try:
                known = self._find_compiled(whole) or self._matcher(whole)
            except RequestError as error:
                known = error
            finally:
                self._compiling.release()
            self._keep(whole, known)
        if isinstance(known, RequestError):
            raise RequestError(
                known.problem, found=known.found, expected=known.expected, hint=known.hint
            )
        assert self._vocabulary is not None
        matcher = known
        size = self._vocabulary[1]
        vocab_size = self._vocab_size

        def begun() -> Constraint:
            result = GrammarConstraint(matcher.deep_copy(), size, vocab_size, ends)
            if reasoning is None:
                return result
            return AfterReasoning(result, reasoning, ends, size - 1, vocab_size)

        return begun

    def _find_compiled(self, grammar: str) -> LLMatcher | RequestError | None:
        """Return a matcher at the beginning of a text, never to be changed, or why there is none;
        None if neither is known.
        """
        with self._lock:
            if (result := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
            return result

    def _keep(self, grammar: str, result: LLMatcher | RequestError) -> None:
        with self._lock:
            self._compiled[grammar] = result
            while len(self._compiled) > MAX_GRAMMARS:
                self._compiled.popitem(last=False)

    def _matcher(self, grammar: str) -> LLMatcher:
        if find_spec("llguidance") is None:
            raise RequestError("llguidance is not installed", hint=_NO_PACKAGE)
        from llguidance import LLMatcher, LLParserLimits

        vocabulary, _ = self._vocabulary = self._vocabulary or self._tokens()
        limits: Any = _LIMITS
        try_out(HEAD + grammar, limits)
        result = LLMatcher(vocabulary, HEAD + grammar, log_level=0, limits=LLParserLimits(**limits))
        if result.is_error():
            first = None
        else:
            first = result.deep_copy()
        if first is not None:
            first.compute_bitmask()
        if first is None or first.is_error():
            raise RequestError(f"the format is not supported: {_reason(first or result)}")
        return result

    def _tokens(self) -> tuple[LLTokenizer, int]:
        """Return the bytes of all tokens, and behind them a token that stands for the end; with
        their number.
        """
        from llguidance import LLTokenizer, TokenizerWrapper

        known = self._tokenizer.token_bytes
        if known is None:
            raise RequestError(
                "the format of answers cannot be restricted, as the bytes of the tokenizer's tokens"
                " are not known",
                found=self._tokenizer.kind,
            )
        none = {*(self._end_ids), self._tokenizer.bos_id}
        count = min(self._tokenizer.vocab_size, self._vocab_size)
        tokens = []
        for token in range(count):
            tokens.append((b"" if token in none else known.of(token)) or b"")
        wrapper = TokenizerWrapper(_Vocabulary(tokens))
        return LLTokenizer(wrapper, slices=LLTokenizer.json_slices()), count + 1


class GrammarConstraint:
    """A `Constraint` of one continuation."""

    def __init__(self, matcher: LLMatcher, size: int, vocab_size: int, ends: Sequence[int]) -> None:
        """
        Args:
            size: the matcher's number of tokens, of which the last stands for the end.
            vocab_size: V.
            ends: the tokens that end the text.
        """
        # Here, as commands that only check options import this file.
        import numpy as np

        self._matcher, self._size, self._vocab_size, self._ends = (
            matcher,
            size,
            vocab_size,
            list(ends),
        )
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
        # Llguidance tokenizes what must follow, unless `no_forcing` is set.
        return []


def _make_matcher_error(matcher: LLMatcher) -> QuantkitError:
    return QuantkitError(
        "no token can follow in the requested format",
        found=_reason(matcher) or None,
        hint="the vocabulary does not spell what must follow, or the format is too complex",
    )


def _reason(matcher: LLMatcher) -> str:
    """Return the first line of a matcher's error, without its place in a grammar that the user did
    not write.
    """
    error = matcher.get_error()
    if error.startswith("panic"):
        _log.warning("llguidance: %s", error.partition("\n")[0])
        return "it is too complex"
    lines = []
    for line in error.partition("\n   1 | ")[0].splitlines():
        if line.strip():
            lines.append(line.strip())
    text = " ".join(line for line in lines if not line.startswith("<")).rpartition("JSON schema: ")[
        2
    ]
    text = text.partition(" while processing")[0]
    if "NoExtension" in text:
        return "no text has it"
    return text[:300]
