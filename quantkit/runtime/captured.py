"""Greedy decoding as one captured step: from tokens to the next ones, without host involvement in
between.

In this module N is the number of rows of a step, one for each sequence.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from quantkit.base.foreign_errors import describe_foreign_error
from quantkit.errors import RequestError
from quantkit.model.cache import KVCache
from quantkit.model.decoder import Decoder
from quantkit.model.device import copy_integers, host_copy
from quantkit.runtime.greedy import draw_greedily

DECODE_SETTING = "QUANTKIT_DECODE"
"""Environment variable: how a GPU decodes greedily. With ``compiled`` and ``eager``, a step from
tokens to the next ones is captured as one CUDA graph, of the compiled step or of torch's operators;
with ``steps`` not. On a CPU nothing is captured, and such a step runs only if this variable is set.
"""

_KINDS = ("compiled", "eager", "steps")
# Runs of a step before it is captured: the first compiles, and tunes what it compiles.
_WARM_UPS = 3

_log = logging.getLogger(__name__)


def choose_decode_kind(device: torch.device, compiled: bool) -> str:
    """Choose how an engine decodes greedily: "compiled", "eager" or "steps".

    `compiled` tells whether the steps of the engine are compiled. Raises `RequestError` if the
    environment variable has an unknown value.
    """
    setting = os.environ.get(DECODE_SETTING) or None
    if setting is not None and setting not in _KINDS:
        raise RequestError(
            f"{DECODE_SETTING} has an unknown value", found=setting, expected=", ".join(_KINDS)
        )
    # GPUs compile by default, so the caller has asked for eager steps; that excludes graphs.
    if device.type == "cuda" and not compiled:
        return "steps"
    if setting is not None:
        return setting
    return "compiled" if device.type == "cuda" else "steps"


class PendingTokens:
    """Tokens [N] on their way to the host, which waits for them only in `read`."""

    def __init__(self, tokens: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tokens.device.type != "cuda":
            # The next step overwrites the tensor in place.
            self._tokens = tokens.clone()
            return
        with torch.cuda.device(tokens.device):
            self._tokens = host_copy(tokens)
            # The copy is asynchronous; the event tells when it is complete.
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def is_ready(self) -> bool:
        """Tell whether `read` returns without waiting."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[int]:
        """Wait for the tokens and return them; -1 replaces each whose logits were NaN or Inf."""
        if self._event is not None:
            self._event.synchronize()
        return cast(list[int], self._tokens.tolist())


class EagerRecorder:
    """Captures nothing and runs a step again: for a CPU."""

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats a step on the same tensors.

        Subclasses may run the step several times before they return.
        """
        return step

    def fetch(self, tokens: Tensor) -> PendingTokens:
        """Begin to copy tokens [N] to the host; copies begun earlier complete first."""
        return PendingTokens(tokens)


class GraphRecorder(EagerRecorder):
    """Captures CUDA graphs. All share one memory pool and one stream: they run one after the other,
    and a step writes its results to tensors outside the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Graphs that never run at the same time can share the memory of their intermediate tensors.
        self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        stream = self._stream
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            # The step reads tensors that the current stream may still be writing.
            stream.wait_stream(current)
            try:
                # Alone, `torch.cuda.graph` uses a stream of the first GPU that captured anything,
                # and if a step cannot be captured it leaves its stream the current one.
                with torch.cuda.stream(stream):
                    for _ in range(_WARM_UPS):
                        step()
                    graph = torch.cuda.CUDAGraph()
                    # Other threads may allocate or synchronize during the capture, which the
                    # global error mode would reject.
                    with torch.cuda.graph(
                        graph, self._pool, stream, capture_error_mode="thread_local"
                    ):
                        step()
            finally:
                # Steps after this one use the same counters as the kernels.
                current.wait_stream(stream)
        return graph.replay


def greedy_step(
    model: Decoder, rows: Tensor, last: Tensor, drawn: Tensor, cache: KVCache, one_slot: bool
) -> None:
    """Replace the token of each row by the likeliest next one and advance its position, in place.

    Args:
        rows: for each row its slot, its position, and the index of its token in `last`, [3, N].
            Positions stop at the last one of the cache.
        last: the tokens to continue from, replaced by those drawn.
        drawn: [N], receives the tokens drawn, or -1 where logits are NaN or Inf.
        one_slot: whether the cache has one slot.
    """
    slots, positions, last_indices = rows.unbind(0)
    # With one slot all rows are one sequence; otherwise each row is a sequence of one token.
    shape = (1, -1) if one_slot else (-1, 1)
    # The rotary embedding of such models depends on the length of the sequence at this token.
    if model.config.follows_length:
        lengths = (positions + 1).view(shape)
    else:
        lengths = None
    hidden = model.hidden(
        last.index_select(0, last_indices).view(shape),
        # A single sequence takes its positions as [T], several take them as [N, 1].
        positions if one_slot else positions.view(shape),
        cache,
        slots=None if one_slot else slots,
        lengths=lengths,
    )
    logits = model.head(hidden.flatten(0, 1))
    tokens, checked_tokens = draw_greedily(logits)
    last.index_copy_(0, last_indices, tokens)
    drawn.copy_(checked_tokens)
    positions.add_(1).clamp_(max=cache.length - 1)


class CapturedDecode:
    """Decodes sequences in slots of a cache greedily, by a step captured once for each number of
    rows. Tokens and positions stay on the device; the host writes them only when other sequences or
    positions follow.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        last: Tensor,
        step: Callable[..., None],
        recorder: EagerRecorder,
    ) -> None:
        """Prepare to decode with a step; nothing is captured yet.

        Args:
            cache: whose last position no sequence ever reads.
            last: the last token of each slot and one unused element, [slots + 1].
            step: `greedy_step`, compiled or not.
        """
        self._model = model
        self._cache = cache
        self._last = last
        self._step = step
        self._recorder = recorder
        # The captured steps by number of rows: `rows` and `drawn` of `greedy_step`, and the
        # function that repeats the step on them.
        self._captured: dict[int, tuple[Tensor, Tensor, Callable[[], None]]] = {}
        # Slots and positions that the device continues from; None if they are unknown.
        self._next: tuple[list[int], list[int]] | None = None
        # Padding rows read and write the unused element of `last`.
        self._idle = len(last) - 1

    def decode(self, slots: Sequence[int], positions: Sequence[int], rows: int) -> PendingTokens:
        """Draw the next token of each sequence by the step that `prepare` captured.

        The step continues the last tokens of slots [N] at positions [N]. The first `rows` of them
        belong to sequences, the others are padding.
        """
        state, drawn, replay = self._captured[len(slots)]
        current_slots = list(slots)
        current_positions = list(positions)
        # A step that fails leaves the state of the device unknown.
        expected = self._next
        self._next = None
        # The step itself advanced the positions on the device, so steady decoding copies nothing.
        if (current_slots, current_positions) != expected:
            last_indices = [*current_slots[:rows], *[self._idle] * (len(slots) - rows)]
            state_rows = copy_integers(
                [*current_slots, *current_positions, *last_indices], state.device
            )
            state.copy_(state_rows.view(3, -1))
        replay()
        # The same clamp as in `greedy_step`.
        end = self._cache.length - 1
        next_positions = [min(position + 1, end) for position in current_positions]
        self._next = (current_slots, next_positions)
        return self._recorder.fetch(drawn[:rows])

    @torch.inference_mode()
    def prepare(self, count: int) -> bool:
        """Capture the step for `count` rows once, and compare it with the step itself.

        Returns whether `decode` may use it; if not, a warning is logged. The comparison uses
        padding rows, at the cache's last position, because sequences may be running.
        """
        if count in self._captured:
            return True
        self._next = None
        device = self._last.device
        padding_slots = [0] * count
        padding_positions = [self._cache.length - 1] * count
        padding_places = [self._idle] * count
        rows = copy_integers([*padding_slots, *padding_positions, *padding_places], device).view(
            3, -1
        )
        drawn = torch.zeros(count, dtype=torch.long, device=device)
        step = partial(
            self._step, self._model, rows, self._last, drawn, self._cache, len(self._last) == 2
        )

        def draw_tokens(run_step: Callable[[], None]) -> Tensor:
            self._last[self._idle :].zero_()
            # No step writes -2, so a replay that does nothing is noticed.
            drawn.fill_(-2)
            # The second run continues from the token of the first one.
            for _ in range(2):
                run_step()
            return drawn.clone()

        try:
            replay = self._recorder.record(step)
            if not torch.equal(draw_tokens(replay), draw_tokens(step)):
                raise RuntimeError("the captured step draws different tokens")
        # Drivers and compilers have their own exception types.
        except Exception as error:
            reason = describe_foreign_error(error)
            _log.warning("decoding steps cannot be captured here (%s); they run one by one", reason)
            return False
        self._captured[count] = rows, drawn, replay
        return True
