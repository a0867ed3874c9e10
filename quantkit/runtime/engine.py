"""A model over a cache of slots, and its one step, which any mixture of sequences may share; eager or compiled."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from itertools import islice, pairwise, product
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from quantkit.arguments import as_whole, require_flags
from quantkit.errors import RequestError
from quantkit.json_values import shown
from quantkit.kernels.build import cache_folder
from quantkit.memory import enough_memory, size_text
from quantkit.model.cache import KVCache, cache_bytes
from quantkit.model.decoder import Decoder
from quantkit.model.device import float_type, free_bytes, numbers
from quantkit.runtime.captured import (
    CapturedDecode,
    EagerRecorder,
    GraphRecorder,
    LateTokens,
    Recorder,
    decode_kind,
    greedy_step,
)
from quantkit.runtime.request import require_model
from quantkit.tensors.dtypes import FloatName

CacheName: TypeAlias = FloatName | Literal["int8"]

LEAST_BUCKET = 16  # rows of a step with several of one sequence
_LEAST_CACHE = 256
_CPU_CHUNK, _CHUNK = 240, 1024  # the first leaves room for 16 sequences that decode, within a bucket of 256
_GRAPHS = 64  # of one function: buckets of rows times sizes of caches
_SINGLE_THREADED: dict[str, str | int | bool | Callable[..., Any]] = {
    "cpp.threads": 1
}  # see `Operations.single_threaded`


class Engine:
    """Runs sequences, each in a slot of a cache.

    Compiled, rows are padded to buckets, powers of two, so that only the first step of a bucket compiles anything.
    What pads a step goes to the positions that follow in the last row's sequence, and is never seen: each later token
    is stored over it first. Beyond a slot's last position there is one more, of which nothing is ever read.

    One user at a time: whoever begins on it (`quantkit.generate`, `stream`, `generate_batch`, a `ChatSession`) takes
    over all slots. A conversation that has lost its slots reads its history anew; a generation that was still going on
    ends with an error at its next step. Of threads, only one may be in an engine's methods.
    """

    def __init__(
        self, model: Decoder, length: int, *, slots: int = 1, cache_dtype: CacheName | torch.dtype | None = None,
        compiled: bool | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            model: from `quantkit.load`.
            length: positions that a slot holds, of prompt and new tokens.
            slots: sequences that it holds at a time.
            cache_dtype: of keys and values, float or int8; None is the activations', int8 takes half of that.
            compiled: by `torch.compile`; None is so on GPUs, while on a CPU eager steps are as fast and begin at once.

        Raises:
            RequestError: for arguments of the wrong type, numbers below 1, a length beyond the model's context, or a
                cache that does not fit in memory.
        """
        require_model("model", model, Decoder)
        length, slots = _at_least_one("length", length), _at_least_one("slots", slots)
        if compiled is not None:
            require_flags(compiled=compiled)
        context = model.config.max_positions
        if length > context:
            raise RequestError(
                "prompt and new tokens exceed the model's context", found=length, expected=f"at most {context}",
                hint="give a shorter prompt, or ask for fewer new tokens",
            )  # fmt: skip
        self.model = model
        self.slots = slots
        self._follows_length = model.config.follows_length
        self.chunk = _CPU_CHUNK if model.device.type == "cpu" else _CHUNK
        """Rows of one prompt that a step should have at most."""
        self._loans = 0
        self._compiled = model.device.type == "cuda" if compiled is None else compiled
        self.length = min(bucket(length, _LEAST_CACHE), context) if self._compiled else length
        """Positions that a slot holds."""
        kind = decode_kind(model.device, self._compiled) if model.group.size == 1 else "steps"
        padded = self._compiled or kind != "steps"
        cache = model.config, slots, self.length + padded, _cached_type(cache_dtype) or model.dtype
        _require_memory(cache_bytes(*cache), slots, self.length, model.device)
        with enough_memory(None):
            self._cache = KVCache(*cache, model.device)
        if self._compiled and model.device.type == "cuda":
            for tensor in self._cache.tensors():  # else recorded steps would copy the cache
                torch._dynamo.mark_static_address(tensor, guard=False)
        self.last = torch.zeros(slots + 1, dtype=torch.long, device=model.device)
        """The token of each slot that was drawn last, and one more of no meaning."""
        self._captured: CapturedDecode | None = None
        if kind != "steps":
            on_gpu = model.device.type == "cuda"
            recorder: Recorder = GraphRecorder(model.device) if on_gpu else EagerRecorder()
            step = _compile(greedy_step, model.device.type) if kind == "compiled" else greedy_step
            self._captured = CapturedDecode(model, self._cache, self.last, step, recorder)

    @property
    def cache_bytes(self) -> int:
        """What keys and values take up in memory."""
        return sum(tensor.nbytes for tensor in self._cache.tensors())

    def acquire(self) -> int:
        """Let somebody have the slots, whoever had them before; the number of this loan."""
        self._loans += 1
        return self._loans

    def is_owned(self, loan: int | None) -> bool:
        """Whether nobody else was lent the slots since."""
        return loan == self._loans

    def require_length(self, length: int) -> None:
        """
        Raises:
            RequestError: unless a slot holds so many positions.
        """
        if length > self.length:
            raise RequestError(
                "prompt and new tokens exceed the engine", found=length, expected=f"at most {self.length}"
            )

    @torch.inference_mode()
    def step(
        self, tokens: Tensor, slots: Sequence[int], positions: Sequence[int], wanted: Sequence[int],
        lengths: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        """Take up N tokens of any sequences.

        Args:
            tokens: their ids [N], on the model's device.
            slots: of their sequences [N]; tokens of one lie side by side.
            positions: in their sequences [N], rising in each. A token sees what its slot holds up to its position,
                and is stored there first, with the others of the step.
            wanted: rows [M] whose logits are asked for.
            lengths: of the sequences as each token finds them [N], which rotary positions may be stretched to: a
                prompt's whole length where it is read in parts. None is up to each token. Past `rope_switch` of the
                config a sequence must be read anew, all of it.

        Returns:
            Logits [M, V].

        Raises:
            RequestError: if there is no such slot or position.
        """
        self._require_room(slots, positions)
        if lengths is None:
            lengths = [position + 1 for position in positions]
        parts = [range(len(slots))] if self.model.ops.ragged else _rectangles(slots)
        if len(parts) == 1:
            return self._run(tokens, slots, positions, wanted, lengths)
        places, logits = {row: place for place, row in enumerate(wanted)}, []
        for part in parts:
            own = [[values[row] for row in part] for values in (slots, positions, lengths)]
            asked = [index for index, row in enumerate(part) if row in places]
            logits.append(self._run(tokens[self._numbers(part)], own[0], own[1], asked, own[2]))
        given = [places[row] for part in parts for row in part if row in places]
        return torch.cat(logits)[self._numbers(sorted(range(len(given)), key=given.__getitem__))]

    @torch.inference_mode()
    def decode(self, slots: Sequence[int], positions: Sequence[int]) -> LateTokens | None:
        """Take up the last token of each of some slots, and draw the next one greedily: from `last`, into `last`.

        Args:
            slots: different ones [N].
            positions: of those tokens in their sequences [N].

        Returns:
            The tokens drawn, on their way to the host; None where `step` is to be taken instead.

        Raises:
            RequestError: if there is no such slot or position.
        """
        self._require_room(slots, positions)
        if self._captured is None:
            return None
        return self._captured.decode(*self._padded(slots, positions, bucket(len(slots), 1)), rows=len(slots))

    @torch.inference_mode()
    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Let a slot begin with what the first positions of another hold."""
        if source != target:
            for tensor in self._cache.tensors():
                tensor[target, :, :length] = tensor[source, :, :length]

    def warm_up(self) -> int:
        """Compile each step that will be needed, over slots that hold nothing yet; how many there are.

        Log-probabilities of a prompt need steps of their own, which are compiled when they are asked for.
        """
        self.acquire()
        steps = self._sizes() if self._compiled else []
        for step in steps * (2 if self.model.device.type == "cuda" else 1):  # the second is recorded
            slots, positions = zip(*step, strict=True)
            self.step(self._numbers([0] * len(step)), slots, positions, [0])
        if self._captured is None:
            return len(steps)
        return len(steps) + sum(self._captured.prepare(count) for count in _buckets(1, self.slots))

    def _sizes(self) -> list[list[tuple[int, int]]]:
        """A step of each bucket: slots and positions of its rows."""
        steps = [[(slot, 0) for slot in range(min(count, self.slots))] for count in _buckets(1, self.slots)]
        if self.model.ops.ragged:
            most = min(self.chunk + self.slots, self.slots * self.length)
            rows = list(islice(product(range(self.slots), range(self.length)), most))
            return steps + [rows[:count] for count in _buckets(LEAST_BUCKET, most)]
        for start in (0, 1):  # attention among themselves, and over what is stored
            rows = [(0, position) for position in range(start, min(start + self.chunk, self.length))]
            steps += [rows[:count] for count in _buckets(LEAST_BUCKET, len(rows)) if len(rows) > 1]
        return steps

    def _run(
        self, tokens: Tensor, slots: Sequence[int], positions: Sequence[int], wanted: Sequence[int],
        lengths: Sequence[int],
    ) -> Tensor:  # fmt: skip
        """`step` for rows that run together: of one sequence, or one of each, or, with ragged kernels, any."""
        rows, ragged = len(slots), self.model.ops.ragged
        several = rows > len(set(slots))
        in_line = self.slots == 1 or (several and not ragged)  # as [1, T], else as [N, 1]
        first = several and not ragged and positions[0] == 0
        step, asked = (_many if several else _few), list(wanted)
        if self._compiled:
            step = _compile(step, tokens.device.type)
            size = bucket(rows, LEAST_BUCKET if several else 1)
            idle, heads = size - rows, min(size, bucket(self.slots, 1))
            tokens = torch.nn.functional.pad(tokens, (0, idle))
            slots, positions = self._padded(slots, positions, size)
            lengths = [*lengths, *[lengths[-1]] * idle]
            asked += [0] * ((heads if len(asked) <= heads else size) - len(asked))
        shape = (1, -1) if in_line else (-1, 1)
        place = self._numbers(positions)
        logits: Tensor = step(
            self.model, tokens.view(shape), place if in_line else place.view(shape),
            None if self.slots == 1 else self._numbers(slots[:1] if in_line else slots),
            self._numbers(lengths).view(shape) if self._follows_length else None,
            self._numbers(asked) if asked else None, self._cache, first,
        )  # fmt: skip
        # A recorded step writes its logits where it wrote the last ones.
        return logits[: len(wanted)].clone() if self._compiled else logits[: len(wanted)]

    def _padded(self, slots: Sequence[int], positions: Sequence[int], size: int) -> tuple[list[int], list[int]]:
        """Rows up to so many; those that are added follow the last one."""
        idle = size - len(slots)
        after = (min(positions[-1] + more, self.length) for more in range(1, idle + 1))
        return [*slots, *[slots[-1]] * idle], [*positions, *after]

    def _numbers(self, values: Sequence[int]) -> Tensor:
        return numbers(values, self.model.device)

    def _require_room(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Writes beyond the cache would be lost on some devices without a word."""
        if (most := max(positions)) >= self.length:
            raise RequestError("the cache is full", found=most + 1, expected=f"at most {self.length} positions")
        if not all(0 <= slot < self.slots for slot in slots):
            raise RequestError("there is no such slot", found=max(slots), expected=f"0 to {self.slots - 1}")


def _at_least_one(name: str, value: object) -> int:
    found = as_whole(name, value)
    if found < 1:
        raise RequestError(f"`{name}` must be at least 1", found=found)
    return found


def _cached_type(dtype: CacheName | torch.dtype | None) -> torch.dtype | None:
    if dtype == "int8" or dtype is torch.int8:
        return torch.int8
    try:
        return float_type(dtype)
    except RequestError as error:
        raise RequestError(
            "`cache_dtype` is no type that a cache can have", found=shown(dtype), expected=f"int8, {error.expected}"
        ) from error


def _require_memory(size: int, slots: int, length: int, device: torch.device) -> None:
    """Systems promise more than they have, and end who takes it."""
    if size > (free := free_bytes(device)):
        raise RequestError(
            "the cache does not fit in memory",
            found=f"{size_text(size)} for {slots} x {length} positions", expected=f"at most {size_text(free)}",
            hint=f"ask for fewer {'sequences at once with `batch_size`' if slots > 1 else 'tokens'}",
        )  # fmt: skip


def _rectangles(slots: Sequence[int]) -> list[list[int]]:
    """Rows that can run together: single ones of several sequences, then those of each other sequence."""
    starts = [0, *(row for row in range(1, len(slots)) if slots[row] != slots[row - 1]), len(slots)]
    runs = [list(range(*pair)) for pair in pairwise(starts)]
    single = [run[0] for run in runs if len(run) == 1]
    return [*([single] if single else []), *(run for run in runs if len(run) > 1)]


def bucket(count: int, least: int) -> int:
    """The smallest power of two, `least` or above, that holds `count`."""
    return max(least, 1 << (count - 1).bit_length())


def _buckets(least: int, most: int) -> list[int]:
    """Buckets from the least on to that which holds the most."""
    return [least << power for power in range((bucket(most, least) // least).bit_length())]


def _few(
    model: Decoder, tokens: Tensor, positions: Tensor, slots: Tensor | None, lengths: Tensor | None,
    wanted: Tensor | None, cache: KVCache, first: bool,
) -> Tensor:  # fmt: skip
    """Logits [M, V] of the wanted rows of [B, T] tokens."""
    hidden = model.hidden(tokens, positions, cache, slots=slots, lengths=lengths, first=first).flatten(0, 1)
    if wanted is None:
        return hidden.new_empty(0, model.config.vocab_size)
    return model.head(hidden.index_select(0, wanted))


def _many(
    model: Decoder, tokens: Tensor, positions: Tensor, slots: Tensor | None, lengths: Tensor | None,
    wanted: Tensor | None, cache: KVCache, first: bool,
) -> Tensor:  # fmt: skip
    """As `_few`, with several tokens of a sequence."""
    return _few(model, tokens, positions, slots, lengths, wanted, cache, first)


@functools.cache
def _compile(step: Callable[..., Any], device: str) -> Callable[..., Any]:
    """One graph for each set of shapes; on GPUs recorded and replayed where it is of one token of each sequence.

    What is compiled is kept for the next process, in ``TORCHINDUCTOR_CACHE_DIR`` or the cache of kernels.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
    options: dict[str, str | int | bool | Callable[..., Any]] | None
    if device == "cuda":
        # The second makes a reduction of a float weight's product with one token, which can read as fast as a copy.
        options = {"triton.cudagraphs": step is _few, "coordinate_descent_tuning": step is not _many}
    else:
        options = _SINGLE_THREADED if device == "cpu" else None
    return torch._dynamo.config.patch(recompile_limit=_GRAPHS)(  # type: ignore[no-any-return]
        torch.compile(step, fullgraph=True, dynamic=False, options=options)
    )
