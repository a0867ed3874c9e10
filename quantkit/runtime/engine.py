"""A model over a cache of slots, and its one step for any mixture of sequences; eager, compiled
or captured.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, product
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from quantkit.base.arguments import as_integer, require_flags
from quantkit.base.json_values import format_value
from quantkit.base.late import LateModule
from quantkit.base.memory import enough_memory, size_text
from quantkit.base.messages import Message, Option
from quantkit.errors import RequestError
from quantkit.kernels.build import cache_folder
from quantkit.model.cache import KVCache, cache_bytes
from quantkit.model.decoder import Decoder
from quantkit.model.device import copy_integers, free_bytes, to_torch_dtype
from quantkit.runtime.captured import (
    CapturedDecode,
    EagerRecorder,
    GraphRecorder,
    PendingTokens,
    choose_decode_kind,
    greedy_step,
)
from quantkit.runtime.greedy import draw_greedily
from quantkit.runtime.request import DRAFT_TOKENS, check_draft_tokens, require_model
from quantkit.runtime.slots import SlotTable
from quantkit.tensors.dtypes import FloatName

# Most engines have no draft model, and most models keep no states.
if TYPE_CHECKING:
    from quantkit.runtime import draft_model, saved_states
else:
    draft_model = LateModule("quantkit.runtime.draft_model")
    saved_states = LateModule("quantkit.runtime.saved_states")

CacheName: TypeAlias = FloatName | Literal["int8"]
CompileOptions: TypeAlias = dict[str, str | int | bool | Callable[..., Any]]

# The smallest bucket of a step that has several rows of one sequence.
MIN_BUCKET = 16
# The fewest positions of a slot in compiled mode; each size of the cache is compiled separately.
_MIN_CACHE = 256
# Rows of a prompt in a step; on CPUs they leave room for 16 decoding sequences in a bucket of 256.
_CPU_CHUNK = 240
_CHUNK = 1024
# The same beside sequences that decode, which wait for it: as many as the CPU kernels need to read
# a prompt at full speed.
_SHARED_CHUNK = 64
# The limit of compiled graphs of one function: buckets of rows times sizes of caches.
_GRAPHS = 64


class Engine:
    """Runs sequences, each in a slot of a cache.

    Compiled steps are padded to buckets, powers of two, so only the first step of a bucket compiles
    anything. Padding rows take the positions after the last row's, and are never read: later tokens
    are stored over them first. Each slot has one more position at its end, from which nothing is
    ever read.

    One user at a time: `quantkit.generate`, `stream`, `generate_batch` and a `ChatSession` take
    over all slots when they begin. A conversation that has lost its slots reads its history again;
    a generation that was still running raises an error at its next step. Only one thread may be in
    an engine's methods.
    """

    def __init__(
        self,
        model: Decoder,
        length: int,
        *,
        slots: int = 1,
        cache_dtype: CacheName | torch.dtype | None = None,
        compiled: bool | None = None,
        draft: Decoder | None = None,
        draft_tokens: int | None = None,
    ) -> None:
        """Allocate the cache of all slots.

        Args:
            model: from `quantkit.load`.
            length: positions of a slot, for prompt and new tokens.
            slots: sequences that run at the same time.
            cache_dtype: of keys and values, float or int8; None is the activations'. int8 takes
                about half of 16-bit floats.
            compiled: use `torch.compile`; None is True on GPUs, except for models that keep states.
                On a CPU eager steps are as fast and start at once.
            draft: a smaller model with the same tokens, which proposes what comes next; see
                `quantkit.runtime.speculative`.
            draft_tokens: that are proposed at a time at most, by the draft or from the text itself,
                0 to 15. None is 8 if there is a draft, or if the model is quantized and the CPU
                kernels run it, neither compiled nor captured: then each row of a step has the
                numbers that it has alone. Else 0, as for all models that keep states (see
                `ModelConfig.keeps_states`), which cannot take back a rejected proposal.

        Raises:
            RequestError: for arguments of the wrong type, numbers out of range, a length beyond the
                model's context, a draft with another vocabulary, proposals or compiled steps of a
                model that keeps states, or a cache that does not fit in memory.
        """
        require_model("model", model, Decoder)
        length = as_integer("length", length, 1)
        slots = as_integer("slots", slots, 1)
        if compiled is not None:
            require_flags(compiled=compiled)
        context = model.config.max_positions
        if length > context:
            problem = "prompt and new tokens exceed the model's context"
            hint = "use a shorter prompt, or fewer new tokens"
            raise RequestError(problem, found=length, expected=f"at most {context}", hint=hint)
        on_gpu = model.device.type == "cuda"
        if compiled and model.device.type == "cpu":
            _require_compiler()
        self.model = model
        self.slots = slots
        self._follows_length = model.config.follows_length
        # The maximum number of rows of one prompt in a step.
        if on_gpu:
            self.chunk_rows = _CHUNK
        else:
            self.chunk_rows = _CPU_CHUNK
        # The same while other sequences decode.
        self.shared_chunk_rows = self.chunk_rows
        # The slots of the current user, see `take_over`.
        self.slot_table: SlotTable | None = None
        keeps_states = model.config.keeps_states
        if compiled and keeps_states:
            # Padding rows would change the states.
            raise RequestError(
                "compiled steps do not support models that keep states",
                found=model.config.architecture,
                hint="do not compile",
            )
        if compiled is None:
            self._compiled = on_gpu and not keeps_states
        else:
            self._compiled = compiled
        # Positions of a slot. Rounded lengths let engines share compiled steps.
        if self._compiled:
            self.length = min(bucket(length, _MIN_CACHE), context)
        else:
            self.length = length
        # Processes that share a model exchange activations within a step, so it is not captured.
        if model.group.size == 1 and not keeps_states:
            kind = choose_decode_kind(model.device, self._compiled)
        else:
            kind = "steps"
        has_padding = self._compiled or kind != "steps"
        cache_shape = (
            model.config,
            slots,
            # Padding rows may need the additional position at the end of a full slot.
            self.length + has_padding,
            _parse_cache_dtype(cache_dtype) or model.dtype,
        )
        _require_memory(cache_bytes(*cache_shape), slots, self.length, model.device)
        with enough_memory(None):
            self._cache = KVCache(*cache_shape, model.device)
        if self._compiled and on_gpu:
            # Without this mark, captured steps would copy the cache.
            for tensor in self._cache.tensors():
                torch._dynamo.mark_static_address(tensor, guard=False)
        # None if all layers have keys and values.
        self._states: saved_states.SavedStates | None = None
        if keeps_states:
            self._states = saved_states.SavedStates(self._cache, slots)
        self.draft: draft_model.DraftModel | None = None
        self.num_proposed_tokens = self.num_accepted_tokens = 0
        if draft is not None:
            require_model("draft", draft, Decoder)
            _require_no_states(model)
            _require_no_states(draft)
            draft_model.require_same_tokens(model, draft)
            # Beyond a shorter context of the draft model, it proposes nothing.
            draft_length = min(length, draft.config.max_positions)
            draft_engine = Engine(
                draft, draft_length, slots=slots, compiled=compiled, draft_tokens=0
            )
            self.draft = draft_model.DraftModel(draft_engine, model.config.vocab_size)
        # Elsewhere the rows of a step have other roundings than alone, so that proposals could
        # change a text; there they are made only if a draft model asks for them.
        is_row_alone = not has_padding and _each_row_alone(model)
        if is_row_alone:
            # Elsewhere the numbers of a prompt depend on how it is divided, and so would its text
            # on what else the engine runs.
            self.shared_chunk_rows = _SHARED_CHUNK
        if draft is not None or is_row_alone:
            default = DRAFT_TOKENS
        else:
            default = 0
        if draft_tokens is None:
            self.draft_tokens = default
        else:
            self.draft_tokens = check_draft_tokens(draft_tokens)
        self.require_proposals(self.draft_tokens)
        # The last token drawn in each slot, and one unused element.
        self.last_tokens = torch.zeros(slots + 1, dtype=torch.long, device=model.device)
        self._recorder = GraphRecorder(model.device) if on_gpu else EagerRecorder()
        self._captured: CapturedDecode | None = None
        if kind != "steps":
            if kind == "compiled":
                step = _compile(greedy_step, model.device.type)
            else:
                step = greedy_step
            self._captured = CapturedDecode(
                model, self._cache, self.last_tokens, step, self._recorder
            )

    @property
    def cache_bytes(self) -> int:
        """Compute the memory of keys, values and states."""
        return sum(tensor.nbytes for tensor in self._cache.tensors())

    def take_over(self, *, any_prefix: bool) -> SlotTable:
        """Assign all slots to a new user, who has them as long as `slot_table` is the result."""
        config = self.model.config
        self.slot_table = SlotTable(
            self.slots,
            self.chunk_rows,
            any_prefix=any_prefix,
            windows=any(layer.window or layer.chunk for layer in config.layers),
            max_unscaled_length=config.max_unscaled_context if config.follows_length else None,
            switches_once=config.rope_switch is not None,
            list_lengths=None if self._states is None else self._states.lengths,
        )
        return self.slot_table

    def require_length(self, length: int) -> None:
        """Raise `RequestError` if a slot has fewer positions."""
        if length > self.length:
            expected = f"at most {self.length}"
            raise RequestError(
                "prompt and new tokens exceed the engine's length", found=length, expected=expected
            )

    def require_proposals(self, draft_tokens: int | None) -> None:
        """Raise `RequestError` if tokens are to be proposed for a model that keeps states."""
        if draft_tokens:
            _require_no_states(self.model)

    @torch.inference_mode()
    def step(
        self,
        tokens: Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        logits_indices: Sequence[int],
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Append N tokens to any sequences.

        Args:
            tokens: their ids [N], on the model's device.
            slots: of their sequences [N]; tokens of one sequence are adjacent.
            positions: in their sequences [N], increasing in each. The step first stores the keys
                and values of all tokens, then each token attends to its slot up to its position.
            logits_indices: rows [M] whose logits are returned.
            lengths: of the sequences as each token sees them [N], to which rotary positions may be
                scaled: the whole length of a prompt, also where it is read in parts. None is up to
                each token. Past `rope_switch` of the config, a sequence must be read again from the
                start.

        Returns:
            Logits [M, V].

        Raises:
            RequestError: if there is no such slot or position, or if a layer keeps states and a
                sequence does not continue after the last token of its slot.
        """
        self._require_room(slots, positions)
        if self._states is not None:
            self._states.advance(slots, positions)
        if lengths is None:
            lengths = [position + 1 for position in positions]
        parts = [range(len(slots))] if self.model.ops.ragged else _divide_into_rectangles(slots)
        if len(parts) == 1:
            return self._run(tokens, slots, positions, logits_indices, lengths)
        result_indices = {row: index for index, row in enumerate(logits_indices)}
        logits: list[Tensor] = []
        # For each row of the concatenated logits its index in the result.
        order: list[int] = []
        for part in parts:
            part_slots = [slots[row] for row in part]
            part_positions = [positions[row] for row in part]
            part_lengths = [lengths[row] for row in part]
            part_tokens = tokens[self._to_device(part)]
            part_indices: list[int] = []
            for index, row in enumerate(part):
                if row in result_indices:
                    part_indices.append(index)
                    order.append(result_indices[row])
            logits.append(
                self._run(part_tokens, part_slots, part_positions, part_indices, part_lengths)
            )
        inverse_order = sorted(range(len(order)), key=order.__getitem__)
        return torch.cat(logits)[self._to_device(inverse_order)]

    @torch.inference_mode()
    def decode(self, slots: Sequence[int], positions: Sequence[int]) -> PendingTokens:
        """Append the last tokens of different slots [N], and draw the next ones greedily.

        The tokens are appended at positions [N]. The step reads `last_tokens` and writes the new
        tokens to it. On a GPU this replays a captured step, if one can be captured. Raises the
        errors of `step`.
        """
        self._require_room(slots, positions)
        count = bucket(len(slots), 1)
        captured = self._prepare_captured_decode(count)
        if captured is not None:
            return captured.decode(*self._pad_rows(slots, positions, count), rows=len(slots))
        logits = self.step(
            self.last_tokens[self._to_device(slots)], slots, positions, range(len(slots))
        )
        with self.model.ops.single_threaded():
            tokens, checked_tokens = draw_greedily(logits, self.model.ops.find_likeliest)
            return self.set_last(slots, tokens, checked_tokens)

    def set_last(
        self, slots: Sequence[int], tokens: Tensor, checked_tokens: Tensor
    ) -> PendingTokens:
        """Set the last tokens of slots to those drawn [N]; of several of a slot the last one
        counts. Begin to copy `checked_tokens`, the same with -1 where logits are NaN or Inf, to the
        host.
        """
        # A dictionary keeps the last row of each slot.
        rows = {slot: row for row, slot in enumerate(slots)}
        if len(rows) == len(slots):
            last = tokens
        else:
            last = tokens[self._to_device(list(rows.values()))]
        self.last_tokens[self._to_device(list(rows))] = last
        return self._recorder.fetch(checked_tokens)

    @torch.inference_mode()
    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first positions of a slot to another, which then continues after them. If a
        layer keeps states, a slot may also go back to some of its own first positions.

        Raises:
            RequestError: if the states after these positions were not kept.
        """
        if self._states is not None:
            self._states.restore(source, target, length)
        if source != target:
            self._cache.copy_prefix(source, target, length)

    @torch.inference_mode()
    def keep_states(self, slot: int) -> None:
        """Keep the states of a slot, if a layer has some, so that `copy_prefix` can copy the
        positions so far also when more have followed.
        """
        if self._states is not None:
            self._states.save(slot)

    def warm_up(self) -> int:
        """Compile the steps that read prompts, draw tokens and verify proposed tokens, and those of
        a draft model, over empty slots; returns the number of steps.

        Others are compiled at their first use: those that verify tokens which only a request wants
        proposed, and those for log-probabilities of a prompt.
        """
        # The steps overwrite the slots, so a user that had them must take them over again.
        self.slot_table = None
        # A step may have a chunk of a prompt, and of each sequence a row and its proposals.
        num_steps = self.compile_steps(
            self.chunk_rows + self.slots * (1 + self.draft_tokens),
            num_verified=self.draft_tokens,
        )
        for count in _buckets(1, self.slots):
            num_steps += self._prepare_captured_decode(count) is not None
        if self.draft is not None:
            num_steps += self.draft.warm_up()
        return num_steps

    def compile_steps(self, max_rows: int, *, num_verified: int = 0) -> int:
        """Compile the steps with up to `max_rows` rows, of which each sequence has one or a chunk
        of a prompt, over empty slots; returns the number of steps, 0 if they are eager.

        Args:
            num_verified: the proposals of a sequence at most; if there are any, also compile the
                steps that return the logits of all their rows.
        """
        if not self._compiled:
            return 0
        steps: list[_WarmUpStep] = []
        # Steps with one row for each sequence.
        for count in _buckets(1, self.slots):
            steps.append(_WarmUpStep([(slot, 0) for slot in range(min(count, self.slots))]))
        several = self._list_several_rows(max_rows)
        for rows in several:
            steps.append(_WarmUpStep(rows))
        if num_verified:
            for rows in several:
                # A rectangle has one sequence, which is verified from a position after its prompt.
                is_verified = self.model.ops.ragged or (
                    rows[0] != (0, 0) and len(rows) <= bucket(1 + num_verified, MIN_BUCKET)
                )
                num_logits = self._usual_num_logits(bucket(len(rows), MIN_BUCKET)) + 1
                if is_verified and num_logits <= len(rows):
                    steps.append(_WarmUpStep(rows, num_logits))
        # The first run compiles a step, the second one is captured.
        num_runs = 2 if self.model.device.type == "cuda" else 1
        for step in steps * num_runs:
            slots, positions = zip(*step.rows, strict=True)
            tokens = self._to_device([0] * len(step.rows))
            self.step(tokens, slots, positions, range(step.num_logits))
        return len(steps)

    def _prepare_captured_decode(self, count: int) -> CapturedDecode | None:
        """Capture the greedy step for `count` rows, unless that is done; None if it fails.

        After one failure no more steps are captured.
        """
        if self._captured is not None and not self._captured.prepare(count):
            self._captured = None
        return self._captured

    def _list_several_rows(self, max_rows: int) -> list[list[tuple[int, int]]]:
        """List slots and positions of the rows of a step in which a sequence has several rows, for
        each bucket.
        """
        steps: list[list[tuple[int, int]]] = []
        if self.model.ops.ragged:
            count = min(max_rows, self.slots * self.length)
            rows = list(islice(product(range(self.slots), range(self.length)), count))
            for size in _buckets(MIN_BUCKET, count):
                steps.append(rows[:size])
            return steps
        # Rows from position 0 attend to each other only; later ones also to the cache.
        for start in (0, 1):
            rows = []
            for position in range(start, min(start + self.chunk_rows, self.length)):
                rows.append((0, position))
            if len(rows) > 1:
                for size in _buckets(MIN_BUCKET, len(rows)):
                    steps.append(rows[:size])
        return steps

    def _usual_num_logits(self, size: int) -> int:
        """Compute the number of logits of a compiled step of a size, unless it returns more."""
        return min(size, bucket(self.slots, 1))

    def _run(
        self,
        tokens: Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        logits_indices: Sequence[int],
        lengths: Sequence[int],
    ) -> Tensor:
        """Run `step` for rows that run together: all of one sequence, or one of each; with ragged
        kernels, any rows.
        """
        rows = len(slots)
        ragged = self.model.ops.ragged
        several = rows > len(set(slots))
        # Rows of one sequence have the shape [1, T], others [N, 1].
        in_line = self.slots == 1 or (several and not ragged)
        # Rows from position 0 need no cache: they attend to each other.
        is_prefill = several and not ragged and positions[0] == 0
        step = _compute_logits_of_several_rows if several else _compute_logits
        head_rows = list(logits_indices)
        if self._compiled:
            step = _compile(step, tokens.device.type)
            size = bucket(rows, MIN_BUCKET if several else 1)
            num_padding = size - rows
            # The number of logits has two sizes only, because each one is compiled.
            usual_num_logits = self._usual_num_logits(size)
            tokens = torch.nn.functional.pad(tokens, (0, num_padding))
            slots, positions = self._pad_rows(slots, positions, size)
            lengths = [*lengths, *[lengths[-1]] * num_padding]
            head_rows += [0] * (
                (usual_num_logits if len(head_rows) <= usual_num_logits else size) - len(head_rows)
            )
        shape = (1, -1) if in_line else (-1, 1)
        position_tensor = self._to_device(positions)
        logits: Tensor = step(
            self.model,
            tokens.view(shape),
            position_tensor if in_line else position_tensor.view(shape),
            None if self.slots == 1 else self._to_device(slots[:1] if in_line else slots),
            self._to_device(lengths).view(shape) if self._follows_length else None,
            self._to_device(head_rows) if head_rows else None,
            self._cache,
            is_prefill,
        )
        # A captured step writes its logits over the previous ones.
        if self._compiled:
            return logits[: len(logits_indices)].clone()
        return logits[: len(logits_indices)]

    def _pad_rows(
        self, slots: Sequence[int], positions: Sequence[int], size: int
    ) -> tuple[list[int], list[int]]:
        """Pad rows to a size with the positions that follow the last one."""
        num_padding = size - len(slots)
        # `self.length` is the additional position at the end of a slot.
        following = (min(positions[-1] + step, self.length) for step in range(1, num_padding + 1))
        return [*slots, *[slots[-1]] * num_padding], [*positions, *following]

    def _to_device(self, values: Sequence[int]) -> Tensor:
        return copy_integers(values, self.model.device)

    def _require_room(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Raise `RequestError` if there is no such slot or position.

        Some devices silently drop writes beyond the cache.
        """
        last = max(positions)
        if last >= self.length:
            raise RequestError(
                "the cache is full", found=last + 1, expected=f"at most {self.length} positions"
            )
        if not all(0 <= slot < self.slots for slot in slots):
            raise RequestError(
                "slot is out of range", found=max(slots), expected=f"0 to {self.slots - 1}"
            )


@dataclass(frozen=True)
class _WarmUpStep:
    """A step that is run to compile it.

    Attributes:
        rows: the slot and the position of each row.
        num_logits: of how many rows it returns the logits.
    """

    rows: list[tuple[int, int]]
    num_logits: int = 1


def require_decoder(model: Decoder | Engine) -> Decoder:
    """Require a model or an engine, and return the model.

    Raises `RequestError` for anything else.
    """
    require_model("model", model, (Decoder, Engine))
    if isinstance(model, Engine):
        return model.model
    return model


def _require_no_states(model: Decoder) -> None:
    """Raise `RequestError` if a model keeps states: a rejected proposal would stay in them."""
    if model.config.keeps_states:
        raise RequestError(
            "tokens cannot be proposed for or by a model that keeps states",
            found=model.config.architecture,
            hint=Message("leave out ", Option("draft"), " and ", Option("draft_tokens")),
        )


def _each_row_alone(model: Decoder) -> bool:
    """Tell whether each row of a step has the numbers that it has alone."""
    # Ragged attention is that of the CPU kernels. Other processes' parts are summed elsewhere.
    if not model.ops.ragged or model.device.type != "cpu" or model.group.size > 1:
        return False
    # These kernels sum each row in one order, whatever the other rows are; torch's products, which
    # multiply the float linears of blocks that do not run in one call, do not.
    if model.ops.blocks is not None:
        return True
    return not any(isinstance(module, nn.Linear) for module in model.model.layers.modules())


def _parse_cache_dtype(dtype: CacheName | torch.dtype | None) -> torch.dtype | None:
    """Convert a name to a dtype; raises `RequestError` if it is none for a cache."""
    if dtype == "int8" or dtype is torch.int8:
        return torch.int8
    try:
        return to_torch_dtype(dtype)
    except RequestError as error:
        raise RequestError(
            "unknown `cache_dtype`", found=format_value(dtype), expected=f"int8, {error.expected}"
        ) from error


def _require_memory(size: int, slots: int, length: int, device: torch.device) -> None:
    """Raise `RequestError` if a cache exceeds the free memory.

    Systems grant more memory than they have, and kill the process that uses it.
    """
    free = free_bytes(device)
    if size > free:
        raise RequestError(
            "the cache does not fit in memory",
            found=f"{size_text(size)} for {slots} x {length} positions",
            expected=f"at most {size_text(free)}",
            hint="run fewer sequences at the same time" if slots > 1 else "use fewer tokens",
        )


def _divide_into_rectangles(slots: Sequence[int]) -> list[list[int]]:
    """Divide the rows of a step into groups that can run together as a rectangle.

    The first group has the rows of all sequences with one row; each other sequence is a group.
    """
    bounds = [0]
    for row in range(1, len(slots)):
        if slots[row] != slots[row - 1]:
            bounds.append(row)
    bounds.append(len(slots))
    single_rows: list[int] = []
    sequences: list[list[int]] = []
    for start, stop in pairwise(bounds):
        if stop - start == 1:
            single_rows.append(start)
        elif stop - start > 1:
            sequences.append(list(range(start, stop)))
    if single_rows:
        return [single_rows, *sequences]
    return sequences


def bucket(count: int, smallest: int) -> int:
    """Round `count` up to a power of two, at least `smallest`."""
    return max(smallest, 1 << (count - 1).bit_length())


def _buckets(smallest: int, count: int) -> list[int]:
    """List all buckets up to the one for `count`."""
    buckets: list[int] = []
    for power in range((bucket(count, smallest) // smallest).bit_length()):
        buckets.append(smallest << power)
    return buckets


def _compute_logits(
    model: Decoder,
    tokens: Tensor,
    positions: Tensor,
    slots: Tensor | None,
    lengths: Tensor | None,
    logits_indices: Tensor | None,
    cache: KVCache,
    is_prefill: bool,
) -> Tensor:
    """Compute logits [M, V] of the selected rows of [B, T] tokens: one row of each sequence."""
    hidden = model.hidden(
        tokens, positions, cache, slots=slots, lengths=lengths, is_prefill=is_prefill
    ).flatten(0, 1)
    # A chunk in the middle of a prompt needs no logits.
    if logits_indices is None:
        return hidden.new_empty(0, model.config.vocab_size)
    return model.head(hidden.index_select(0, logits_indices))


def _compute_logits_of_several_rows(*operands: Any) -> Tensor:
    """Run `_compute_logits` for several tokens of a sequence; compiled with other options."""
    return _compute_logits(*operands)


def _require_compiler() -> None:
    """Raise `RequestError` if torch.compile finds no C++ compiler."""
    # Only compiled steps need inductor, which takes long to import.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        hint = (
            "install g++, name another compiler in CXX, or do not compile: that is as fast on a CPU"
        )
        raise RequestError("torch.compile finds no C++ compiler", hint=hint) from None


def cpu_compile_options() -> CompileOptions:
    """Return options of `torch.compile` for CPUs.

    One thread, see `OfferedKernels.single_threaded`. The width of the vectors is stated, although
    it is what torch would choose, because options are part of the key of torch's cache and the
    width otherwise is not: code generated for shorter vectors, by the same user on another
    processor or with another ``ATEN_CPU_CAPABILITY``, would be taken from the cache and write
    beyond its tensors.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    return {"cpp.threads": 1, "cpp.simdlen": pick_vec_isa().bit_width()}


@functools.cache
def _compile(step: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Compile one graph for each set of shapes; on GPUs captured if each sequence has one token.

    Compiled code is cached for the next process, in ``TORCHINDUCTOR_CACHE_DIR`` or the kernel
    cache.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
    if device == "cpu":
        options = cpu_compile_options()
    else:
        options = None
    if device == "cuda":
        # Tuning turns the product of a float weight with one token into a reduction, which reads
        # as fast as a copy.
        options = {
            "triton.cudagraphs": step is _compute_logits,
            "coordinate_descent_tuning": step is not _compute_logits_of_several_rows,
        }
    return torch._dynamo.config.patch(recompile_limit=_GRAPHS)(  # type: ignore[no-any-return]
        torch.compile(step, fullgraph=True, dynamic=False, options=options)
    )
