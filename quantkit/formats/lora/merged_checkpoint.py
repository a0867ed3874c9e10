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
        """Find what the adapters change; headers only.

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
        changes_tied = bool({_HEAD, _EMBEDDING} & self._changes.keys())
        self._unties = source.config.tied_embeddings and changes_tied
        tying_adapters = [adapter for adapter in adapters if adapter.config.ties_weights]
        if self._unties and tying_adapters:
            raise UnsupportedError(
                "'ensure_weight_tying' is not supported where the base ties its head to the"
                " embedding",
                path=tying_adapters[0].config.path,
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
        """Look up the size of a tensor of the base on disk."""
        return self._base.count_stored_bytes(resolve_stored_name(self._base, name))

    def info(self, name: str) -> TensorSpec:
        spec = self._base.info(resolve_stored_name(self._base, name))
        if name not in self._changes:
            return TensorSpec(
                name=name,
                shape=spec.shape,
                dtype=spec.dtype,
                scheme=spec.scheme,
                stored_as=spec.stored_as,
            )
        if self._floats_as is not None:
            return TensorSpec(name, spec.shape, self._floats_as)
        # The dtype of a quantized tensor is not that of its weights.
        is_quantized = spec.scheme is not None or spec.stored_as is not None
        if is_quantized:
            return TensorSpec(name, spec.shape, DType(self.config.dtype))
        return TensorSpec(name, spec.shape, spec.dtype)

    def load(
        self, name: str, part: TensorSlice | None = None
    ) -> torch.Tensor | qtensor.QuantTensor:
        """Read one tensor, or a part of it, and merge what adapters change; then in floats."""
        changes = self._changes.get(name)
        if changes is None:
            return self._base.load(resolve_stored_name(self._base, name), part)
        if part is not None and part.axis == 1:
            # The norms of DoRA's rows need all columns.
            return part.of(self._merge_rows(name, changes, None)).contiguous()
        return self._merge_rows(name, changes, part)

    def _merge_rows(self, name: str, changes: Changes, part: TensorSlice | None) -> torch.Tensor:
        """Merge all updates into some rows of a tensor, and round the sum to the tensor's type."""
        spec = self.info(name)
        rows = _list_row_indices(spec.shape[0], part)
        base = self._before(name, changes, part)
        products = [_Product(update, rows) for update in changes.updates]
        added_rows: list[torch.Tensor] = []
        for vector in changes.added:
            added_rows.append(_read_rows(vector, rows) * vector.scaling)
        merged = torch.empty((len(rows), *spec.shape[1:]), dtype=spec.dtype.torch)
        row_size = merged[0].numel() if len(rows) else 1
        # Only a chunk of the weight is in float32 at a time, and it is rounded once, after all
        # updates.
        for start, stop in qtensor.row_chunks(len(rows), row_size):
            chunk = qtensor.float_rows(base, start, stop)
            for product in products:
                norms = self._embedding_norms(name, changes, product)
                chunk = product.apply_to(chunk, start, stop, norms)
            for values in added_rows:
                chunk = chunk + values[start:stop]
            merged[start:stop] = chunk
        return merged

    def _before(
        self, name: str, changes: Changes, part: TensorSlice | None
    ) -> torch.Tensor | qtensor.QuantTensor:
        """Read a tensor before updates: the base's, or the one that replaces it."""
        new = changes.replacement
        if new is not None:
            # A tensor that needs no other order of rows is read in part, and in its own type.
            if new.place.shape == new.adapter.shape(new.key) and new.place.head_order is None:
                return new.adapter.load(new.key, part)
            return _read_rows(new, _list_row_indices(self.info(name).shape[0], part))
        return self._base.load(resolve_stored_name(self._base, name), part)

    def _embedding_norms(
        self, name: str, changes: Changes, product: _Product
    ) -> torch.Tensor | None:
        """Compute the norms of the columns of an embedding with its update, over all tokens, which
        DoRA divides by; None for other weights.
        """
        if product.magnitude is None or not product.is_embedding:
            return None
        # An embedding is read in parts, and each part needs the norms over all of its rows.
        if name not in self._column_norms:
            rows, columns = self.info(name).shape
            base = self._before(name, changes, None)
            # DoRA is refused along with other updates of a tensor.
            (update,) = changes.updates
            complete = _Product(update, torch.arange(rows))
            # In float32, a sum over all tokens would have ten times the error for 4000 tokens.
            squares = torch.zeros(columns, dtype=torch.float64)
            for start, stop in qtensor.row_chunks(rows, columns):
                total = qtensor.float_rows(base, start, stop) + complete.compute_delta(start, stop)
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
        if update.swapped:
            # (B @ A)^T = A^T @ B^T, of which rows can be computed alone.
            all_left_rows = down.t()
            self._right_factor = up.t()
        else:
            all_left_rows = up
            self._right_factor = down
        disk_rows = _disk_rows(update.place)[rows]
        self._left_factor = all_left_rows[disk_rows]
        self._scaling = update.scaling
        self.is_embedding = module.is_embedding
        self.magnitude: torch.Tensor | None = None
        if module.magnitude is not None:
            magnitude = adapter.read(module.magnitude)
            # A linear has a magnitude per row, an embedding one per column.
            self.magnitude = magnitude if self.is_embedding else magnitude[disk_rows]

    def compute_delta(self, start: int, stop: int) -> torch.Tensor:
        """Compute what is added to some of the rows."""
        return (self._left_factor[start:stop] @ self._right_factor) * self._scaling

    def apply_to(
        self, chunk: torch.Tensor, start: int, stop: int, norms: torch.Tensor | None
    ) -> torch.Tensor:
        """Add the update to some of the rows, and scale them for DoRA; `norms` are those of
        columns, see `_embedding_norms`.
        """
        total = chunk + self.compute_delta(start, stop)
        if self.magnitude is None:
            return total
        if norms is not None:
            return total * (self.magnitude / norms)
        # The paper's norms of columns are those of rows here, as a row has one output's weights.
        scale: torch.Tensor = self.magnitude[start:stop] / torch.linalg.norm(total, dim=1)
        return total * scale.unsqueeze(1)


def _list_row_indices(count: int, part: TensorSlice | None) -> torch.Tensor:
    """List the indices of rows in a part."""
    indices = torch.arange(count)
    if part is None:
        return indices
    return part.of(indices)


def _disk_rows(place: Place) -> torch.Tensor:
    """Find the row on disk of each row of a canonical tensor."""
    shape = place.shape
    first = place.first
    step = place.step
    order = place.head_order
    rows = torch.arange(shape[0])
    if order is not None:
        # Families pair rotary rows differently, so a head's rows can have another order on disk.
        rows = rows.reshape(-1, len(order))[:, list(order)].reshape(-1)
    return first + step * rows


def _read_rows(vector: Vector, rows: torch.Tensor) -> torch.Tensor:
    """Read some rows of a canonical tensor from an adapter's."""
    return vector.adapter.read(vector.key)[_disk_rows(vector.place)[rows]]
