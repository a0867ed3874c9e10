"""Greedy decoding as one captured step: from tokens to the next ones, without host involvement in
between.

N rows, one for each sequence.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from quantkit.errors import RequestError
from quantkit.model.cache import KVCache
from quantkit.model.decoder import Decoder
from quantkit.model.device import host_copy, numbers

DECODE_SETTING = "QUANTKIT_DECODE"
"""Environment variable: how a GPU decodes greedily. With ``compiled`` and ``eager``, a step from
tokens to the next ones is captured as one CUDA graph, of the compiled step or of torch's operators;
with ``steps`` not. On a CPU nothing is captured, and such a step runs only if this variable is set.
"""

_KINDS = ("compiled", "eager", "steps")
_WARM_UPS = (
    # Runs of a step before it is captured: the first compiles, and tunes what it compiles.
    3
)

_log = logging.getLogger(__name__)


def decode_kind(device: torch.device, compiled: bool) -> str:
    """Return how an engine decodes greedily, given whether its steps are compiled: compiled, eager
    or steps. Raises `RequestError` if the environment variable has another value.
    """
    setting = os.environ.get(DECODE_SETTING) or None
    if setting is not None and setting not in _KINDS:
        raise RequestError(
            f"{DECODE_SETTING} has an unknown value", found=setting, expected=", ".join(_KINDS)
        )
    if device.type == "cuda" and not compiled:
        return "steps"
    return setting or ("compiled" if device.type == "cuda" else "steps")


class PendingTokens:
    """Tokens [N] on their way to the host, which waits for them only in `read`."""

    def __init__(self, tokens: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tokens.device.type != "cuda":
            self._tokens = tokens.clone()
            return
        with torch.cuda.device(tokens.device):
            self._tokens, self._event = host_copy(tokens), torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def is_ready(self) -> bool:
        """Return whether they can be read without waiting."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[int]:
        """Return the tokens; -1 in place of each whose logits were NaN or Inf."""
        if self._event is not None:
            self._event.synchronize()
        return cast(list[int], self._tokens.tolist())


class EagerRecorder:
    """Captures nothing and runs a step again: for a CPU."""

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return a function that runs a step again on the same tensors.

        It may run the step several times first.
        """
        return step

    def fetch(self, tokens: Tensor) -> PendingTokens:
        """Begin to copy tokens [N] to the host, and with them what was copied before."""
        return PendingTokens(tokens)


class GraphRecorder(EagerRecorder):
    """Captures CUDA graphs. All share one memory pool and one stream: they run one after the other,
    and the results of a step lie outside the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        stream = self._stream
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            stream.wait_stream(current)
            try:
                # Alone, `torch.cuda.graph` uses a stream of the first GPU that captured anything,
                # and if a step cannot be captured it leaves its stream the current one.
                with torch.cuda.stream(stream):
                    for _ in range(_WARM_UPS):
                        step()
                    graph = torch.cuda.CUDAGraph()
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
    """Replace the token of each row by the likeliest next one, and advance its position; all in
    place.

    Args:
        rows: for each row its slot, its position, and the index of its token in `last`, [3, N].
            Positions stop at the last one of the cache.
        last: the tokens to continue from, replaced by those drawn.
        drawn: [N], receives the tokens drawn, or -1 where logits are NaN or Inf.
        one_slot: whether the cache has one slot.
    """
    slots, positions, places = rows.unbind(0)
    shape = (1, -1) if one_slot else (-1, 1)
    if model.config.follows_length:
        lengths = (positions + 1).view(shape)
    else:
        lengths = None
    hidden = model.hidden(
        last.index_select(0, places).view(shape),
        positions if one_slot else positions.view(shape),
        cache,
        slots=None if one_slot else slots,
        lengths=lengths,
    )
    logits = model.head(hidden.flatten(0, 1))
    tokens = logits.argmax(-1)
    last.index_copy_(0, places, tokens)
    drawn.copy_(only_finite(tokens, logits))
    positions.add_(1).clamp_(max=cache.length - 1)


def only_finite(tokens: Tensor, logits: Tensor) -> Tensor:
    """Tokens [N], with -1 where the logits [N, V] that they were drawn from are NaN or Inf."""
    low, high = torch.aminmax(logits, dim=-1)
    return tokens.masked_fill((low.isfinite() & high.isfinite()).logical_not(), -1)


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
        """Nothing is ever read from the cache's last position; `last` is the last token of each
        slot and one unused element, [slots + 1]; `step` is `greedy_step`, compiled or not.
        """
        self._model = model
        self._cache = cache
        self._last = last
        self._step = step
        self._recorder = recorder
        # For each number of rows the tensors of the step, see `greedy_step`, and the function that
        # runs it.
        self._captured: dict[int, tuple[Tensor, Tensor, Callable[[], None]]] = {}
        self._next: tuple[list[int], list[int]] | None = (
            # Slots and positions that the device continues from.
            None
        )
        self._idle = len(last) - 1

    def decode(self, slots: Sequence[int], positions: Sequence[int], rows: int) -> PendingTokens:
        """Draw the next token of each sequence by a step that is `prepare`d, from the last tokens
        in slots [N] at positions [N], of which the first `rows` are of sequences and the rest is
        padding.
        """
        state, drawn, replay = self._captured[len(slots)]
        current = list(slots), list(positions)
        # unknown until the step is complete
        expected = self._next
        self._next = None
        if current != expected:
            places = [*current[0][:rows], *[self._idle] * (len(slots) - rows)]
            state.copy_(numbers([*current[0], *current[1], *places], state.device).view(3, -1))
        replay()
        end = self._cache.length - 1
        self._next = current[0], [min(position + 1, end) for position in current[1]]
        return self._recorder.fetch(drawn[:rows])

    @torch.inference_mode()
    def prepare(self, count: int) -> bool:
        """Capture the step for `count` rows, unless that is done, and compare it once with the step
        itself; whether it may be used. If not, a warning is logged.

        The comparison uses unused rows, at the cache's last position: sequences may be running.
        """
        if count in self._captured:
            return True
        self._next = None
        device = self._last.device
        rest = [0] * count, [self._cache.length - 1] * count, [self._idle] * count
        rows = numbers([number for part in rest for number in part], device).view(3, -1)
        drawn = torch.zeros(count, dtype=torch.long, device=device)
        step = partial(
            self._step, self._model, rows, self._last, drawn, self._cache, len(self._last) == 2
        )

        def result(run: Callable[[], None]) -> Tensor:
            self._last[self._idle :].zero_()
            drawn.fill_(-2)  # which no step writes
            for _ in range(2):
                run()
            return drawn.clone()

        try:
            replay = self._recorder.record(step)
            if not torch.equal(result(replay), result(step)):
                raise RuntimeError("the captured step draws other tokens")
        except Exception as error:
            # Drivers and compilers have their own exception types.
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            _log.warning("decoding steps cannot be captured here (%s); they run one by one", reason)
            return False
        self._captured[count] = rows, drawn, replay
        return True
