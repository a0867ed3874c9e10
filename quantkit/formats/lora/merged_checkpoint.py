"""A base model with LoRA adapters merged into its weights: one tensor at a time, in float32,
each rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.architectures.disk import Place
from quantkit.architectures.names import EMBEDDING
from quantkit.errors import UnsupportedError
from quantkit.formats.checkpoint import CheckpointView, resolve_stored_name
from quantkit.formats.container import StoredCheckpoint
from quantkit.formats.lora.adapter import Adapter
from quantkit.formats.lora.changes import HEAD, Changes, Update, Vector, find_changes, untie_head
from quantkit.tensors.dtypes import DType
from quantkit.tensors.late import qtensor, torch
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

_HEAD = f"{HEAD}.weight"
_EMBEDDING = f"{EMBEDDING}.weight"


class MergedCheckpoint(CheckpointView):
    """A `StoredCheckpoint` with adapters merged into it.

    For a weight W of the base and adapters with weights w, scalings s and matrices A [r, I] and B
    [O, r], a merged weight is ``W + sum(w * s * B @ A)``. With DoRA, its rows are then scaled to
    the norms that the adapter has learned divided by those of this sum
    (https://arxiv.org/abs/2402.09353, section 4.3). A base that ties its head to the embedding is
    untied if an adapter changes one of them.
    """

    def __init__(
        self, source: StoredCheckpoint, adapters: Sequence[Adapter], floats_as: DType | None = None
    ) -> None:
        """
        Args:
            floats_as: the type of changed tensors; None is the type of the base's, or the model's
                if it is quantized.

        Raises:
            CheckpointError: if a tensor of an adapter does not fit the base.
            UnsupportedError: if what adapters do cannot be combined.
        """
        self._changes = find_changes(adapters, source)
        self._base = source
        self._floats_as = floats_as
        self._unties = source.config.tied_embeddings and bool(
            {_HEAD, _EMBEDDING} & self._changes.keys()
        )
        if self._unties and (
            tying := [adapter for adapter in adapters if adapter.config.ties_weights]
        ):
            raise UnsupportedError(
                "'ensure_weight_tying' is not supported where the base ties its head to the"
                " embedding",
                path=tying[0].config.path,
                found="true",
                hint="merge it with PEFT's `merge_and_unload()`",
            )
        super().__init__(source, untie_head(source.config) if self._unties else None)
        self.adapters = list(adapters)
        self.method = source.method
        self.layout = source.layout
        self.readers = source.readers
        self._column_norms: dict[str, torch.Tensor] = {}
        if self._unties:
            self.notes.append(
                f"{self.path}: the output head becomes a separate tensor, as an adapter changes the"
                " embedding or the head, which the base ties"
            )

    def names(self) -> list[str]:
        if self._unties:
            return [*self._base.names(), _HEAD]
        return self._base.names()

    def count_stored_bytes(self, name: str) -> int:
        """Return the size of a tensor of the base on disk."""
        return self._base.count_stored_bytes(resolve_stored_name(self._base, name))

    def info(self, name: str) -> TensorSpec:
        spec = self._base.info(resolve_stored_name(self._base, name))
        if name not in self._changes:
            return TensorSpec(name, spec.shape, spec.dtype, spec.scheme, spec.stored_as)
        coded = spec.scheme is not None or spec.stored_as is not None
        return TensorSpec(
            name, spec.shape, self._floats_as or (DType(self.config.dtype) if coded else spec.dtype)
        )

    def load(
        self, name: str, part: TensorSlice | None = None
    ) -> torch.Tensor | qtensor.QuantTensor:
        """Return one tensor, or a part of it, in floats if an adapter changes it."""
        changes = self._changes.get(name)
        if changes is None:
            return self._base.load(resolve_stored_name(self._base, name), part)
        if part is not None and part.axis == 1:
            return part.of(self._merge_rows(name, changes, None)).contiguous()
        return self._merge_rows(name, changes, part)

    def _merge_rows(self, name: str, changes: Changes, part: TensorSlice | None) -> torch.Tensor:
        spec = self.info(name)
        rows = _indices(spec.shape[0], part)
        base = self._before(name, changes, part)
        updates = [_Product(one, rows) for one in changes.updates]
        added = [_read_rows(one, rows) * one.scaling for one in changes.added]
        merged = torch.empty((len(rows), *spec.shape[1:]), dtype=spec.dtype.torch)
        for start, stop in qtensor.row_chunks(len(rows), merged[0].numel() if len(rows) else 1):
            chunk = qtensor.float_rows(base, start, stop)
            for update in updates:
                chunk = update.apply_to(
                    chunk, start, stop, self._embedding_norms(name, changes, update)
                )
            for one in added:
                chunk = chunk + one[start:stop]
            merged[start:stop] = chunk
        return merged

    def _before(
        self, name: str, changes: Changes, part: TensorSlice | None
    ) -> torch.Tensor | qtensor.QuantTensor:
        """Return a tensor before updates: the base's, or the one that replaces it."""
        if (new := changes.replacement) is not None:
            if new.place.shape == new.adapter.shape(new.key) and new.place.head_order is None:
                return new.adapter.load(new.key, part)
            return _read_rows(new, _indices(self.info(name).shape[0], part))
        return self._base.load(resolve_stored_name(self._base, name), part)

    def _embedding_norms(
        self, name: str, changes: Changes, product: _Product
    ) -> torch.Tensor | None:
        """Return the norms of the columns of an embedding with its update, over all tokens, which
        DoRA divides by; None for other weights.
        """
        if product.magnitude is None or not product.is_embedding:
            return None
        if name not in self._column_norms:
            rows, columns = self.info(name).shape
            base = self._before(name, changes, None)
            (update,) = changes.updates
            complete = _Product(update, torch.arange(rows))
            squares = torch.zeros(columns, dtype=torch.float64)
            for start, stop in qtensor.row_chunks(rows, columns):
                total = qtensor.float_rows(base, start, stop) + complete.delta(start, stop)
                squares += total.double().square().sum(0)
            self._column_norms[name] = squares.sqrt().float()
        return self._column_norms[name]


class _Product:
    """An update of some rows, in float32."""

    def __init__(self, update: Update, rows: torch.Tensor) -> None:
        adapter = update.adapter
        module = update.module
        down = adapter.read(module.down)
        up = adapter.read(module.up)
        left, self._right_factor = (down.t(), up.t()) if update.swapped else (up, down)
        chosen = _disk_rows(update.place)[rows]
        self._left_factor = left[chosen]
        self._scaling = update.scaling
        self.is_embedding = module.is_embedding
        if module.magnitude is None:
            self.magnitude = None
        else:
            self.magnitude = adapter.read(module.magnitude)
        if self.magnitude is not None and not self.is_embedding:
            self.magnitude = self.magnitude[chosen]

    def delta(self, start: int, stop: int) -> torch.Tensor:
        """Return what is added to some of the rows."""
        return (self._left_factor[start:stop] @ self._right_factor) * self._scaling

    def apply_to(
        self, chunk: torch.Tensor, start: int, stop: int, norms: torch.Tensor | None
    ) -> torch.Tensor:
        """Some of the rows with the update; `norms` are those of columns, see
        `_embedding_norms`.
        """
        total = chunk + self.delta(start, stop)
        if self.magnitude is None:
            return total
        if norms is not None:
            return total * (self.magnitude / norms)
        scale: torch.Tensor = self.magnitude[start:stop] / torch.linalg.norm(total, dim=1)
        return total * scale.unsqueeze(1)


def _indices(count: int, part: TensorSlice | None) -> torch.Tensor:
    """Return the indices of rows in a part."""
    every = torch.arange(count)
    if part is None:
        return every
    return part.of(every)


def _disk_rows(place: Place) -> torch.Tensor:
    """Return the row on disk of each row of a canonical tensor."""
    shape = place.shape
    first = place.first
    step = place.step
    order = place.head_order
    rows = torch.arange(shape[0])
    if order is not None:
        rows = rows.reshape(-1, len(order))[:, list(order)].reshape(-1)
    return first + step * rows


def _read_rows(vector: Vector, rows: torch.Tensor) -> torch.Tensor:
    """Some rows of a canonical tensor from an adapter's."""
    return vector.adapter.read(vector.key)[_disk_rows(vector.place)[rows]]
