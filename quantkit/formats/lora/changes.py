"""What adapters do to each canonical tensor of a base: names and shapes are compared before
anything is computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import DiskTensor, Place, disk_tensors
from quantkit.architectures.families.opaque import HEADS
from quantkit.architectures.names import CANONICAL, EMBEDDING, is_embedding
from quantkit.architectures.topology import parameters
from quantkit.errors import CheckpointError, QuantkitError, UnsupportedError
from quantkit.formats.checkpoint import Checkpoint, resolve_stored_name
from quantkit.formats.lora.adapter import Adapter, LoraModule
from quantkit.formats.lora.adapter_config import NAME
from quantkit.formats.lora.conv1d import has_own_code, is_conv1d
from quantkit.tensors.late import qtensor, torch
from quantkit.tensors.tensor_slice import TensorSlice

HEAD = CANONICAL["head"]
_PREFIXES = frozenset({"model", "language_model", "transformer"})
"""Parts of names that differ between a folder and transformers' modules."""
_MERGE_ALONE = "merge the adapters one after the other"


@dataclass(frozen=True)
class Update:
    """A product of two matrices that is added to rows of a weight.

    Attributes:
        module: the adapter's tensors.
        place: where the canonical tensor is in the tensor that the adapter changes.
        swapped: whether the product is transposed: of embeddings, and of weights that are [inputs,
            outputs].
        scaling: the factor of the product.
    """

    adapter: Adapter
    module: LoraModule
    place: Place
    swapped: bool
    scaling: float


@dataclass(frozen=True)
class Vector:
    """Values of an adapter that replace a tensor, or are added to a bias.

    Attributes:
        key: the name in the adapter.
        place: where the canonical tensor is in it.
        scaling: the factor of what is added; 1 for a replacement.
    """

    adapter: Adapter
    key: str
    place: Place
    scaling: float = 1.0


@dataclass
class Changes:
    """What adapters do to one canonical tensor: it is replaced first, then updated."""

    replacement: Vector | None = None
    updates: list[Update] = field(default_factory=list)
    added: list[Vector] = field(default_factory=list)


def untie_head(config: ModelConfig) -> ModelConfig:
    """Return the same model with a separate output head."""
    if config.runnable:
        return replace(config, tied_embeddings=False)
    return config


def find_changes(adapters: Sequence[Adapter], source: Checkpoint) -> dict[str, Changes]:
    """Return what adapters do to a base, by canonical name. Of a tied base, the head is a separate
    tensor.

    Raises:
        CheckpointError: if a tensor of an adapter does not fit the base.
        UnsupportedError: if what adapters do to a tensor cannot be combined.
    """
    bases = _Bases(source)
    changes: dict[str, Changes] = defaultdict(Changes)
    for adapter in adapters:
        seen = set[str]()
        for module in adapter.modules.values():
            base = bases.find(f"{module.name}.weight", adapter, module.down, seen)
            swapped = _require_shape(adapter, module, base, source)
            scaling = adapter.config.scaling(module.name) * adapter.weight
            for place in base.places:
                changes[place.name].updates.append(Update(adapter, module, place, swapped, scaling))
            if module.bias is not None:
                bias = bases.find(f"{module.name}.bias", adapter, module.bias, seen)
                _require_same_shape(adapter, module.bias, bias)
                for place in bias.places:
                    changes[place.name].added.append(Vector(adapter, module.bias, place, scaling))
        replaced = set[str]()
        for name, key in adapter.replaced.items():
            base = bases.find(name, adapter, key, replaced)
            _require_same_shape(adapter, key, base)
            if _is_copy(adapter, key, base, source):
                continue
            for place in base.places:
                if changes[place.name].replacement is not None or adapter.weight != 1:
                    raise UnsupportedError(
                        f"tensor '{key}' replaces one of the base, which has no weight and works"
                        " for one adapter only",
                        path=adapter.file,
                        found=f"weight {adapter.weight:g}, {len(adapters)} adapters",
                        hint="leave the weight out, and " + _MERGE_ALONE,
                    )
                changes[place.name].replacement = Vector(adapter, key, place)
        _require_all_saved(adapter, bases)
        if source.config.runnable:
            _require_all_targets(adapter, bases, seen)
    for change in changes.values():
        _require_combinable(change)
    return dict(changes)


class _Bases:
    """The tensors of a base under the names that adapters use."""

    def __init__(self, source: Checkpoint) -> None:
        config = untie_head(source.config)
        self.path = source.path
        self._config = config
        apart = disk_tensors(config, {parameter.module for parameter in parameters(config)})
        self.tensors_by_name: dict[str, DiskTensor] = {}
        for tensor in (*disk_tensors(config), *apart):
            self.tensors_by_name.setdefault(tensor.name, tensor)
        for tensor in (*self.tensors_by_name.values(),):
            if tensor.whole:
                self.tensors_by_name.setdefault(tensor.places[0].name, tensor)
        self._short: dict[str, list[DiskTensor]] = defaultdict(list)
        for name, tensor in self.tensors_by_name.items():
            if tensor not in self._short[_short(name)]:
                self._short[_short(name)].append(tensor)
        ties = not config.runnable and source.extra_config.get("tie_word_embeddings") is not False
        self._is_tied = ties and not any(_is_head(name) for name in self.tensors_by_name)

    def find(self, name: str, adapter: Adapter, key: str, changed_names: set[str]) -> DiskTensor:
        """Return a tensor by the name that an adapter uses, which is added to `seen`."""
        result = self.tensors_by_name.get(name)
        if result is None and len(near := self._short.get(_short(name), [])) == 1:
            result = near[0]
        if result is None:
            if self._is_tied and _is_head(name):
                raise UnsupportedError(
                    "changes an output head that is tied to the embedding, in a model known by its"
                    " tensors only",
                    path=adapter.file,
                    found=f"'{key}'",
                    hint="merge it with PEFT",
                )
            raise CheckpointError(
                f"tensor '{key}' changes '{name}', which the base does not have",
                path=adapter.file,
                found=f"base {self.path}",
                expected=f"tensors such as '{next(iter(self.tensors_by_name))}'",
                hint=_other_base(adapter),
            )
        if result.name in changed_names:
            raise CheckpointError(
                f"two tensors of the adapter change '{result.name}'", path=adapter.file
            )
        if self._is_tied and is_embedding(result.module):
            raise UnsupportedError(
                "changes an embedding that the output head may share, in a model known by its"
                " tensors only",
                path=adapter.file,
                found=f"'{key}'",
                hint="merge it with PEFT",
            )
        changed_names.add(result.name)
        return result


def _is_head(name: str) -> bool:
    return name.rpartition(".")[0].rpartition(".")[2] in HEADS


def _short(name: str) -> str:
    """Return a name without the parts that differ between folders and modules."""
    return ".".join(part for part in name.split(".") if part not in _PREFIXES)


def _require_shape(
    adapter: Adapter, module: LoraModule, base: DiskTensor, source: Checkpoint
) -> bool:
    """Check that a product has the shape of a weight; return whether the product is transposed
    for that.
    """
    (_, columns), (rows, _) = adapter.shape(module.down), adapter.shape(module.up)
    swapped = module.is_embedding or _is_transposed(adapter, base, (rows, columns), source)
    if swapped:
        shape = (columns, rows)
    else:
        shape = (rows, columns)
    if base.shape != shape:
        raise _misfit(adapter, f"module '{module.name}' does not fit the base", shape, base)
    if swapped and not module.is_embedding and module.magnitude is not None:
        raise UnsupportedError(
            "DoRA of a weight that is [inputs, outputs] is not merged",
            path=adapter.file,
            found=f"'{module.magnitude}'",
            hint="merge it with PEFT",
        )
    return swapped


def _is_transposed(
    adapter: Adapter, base: DiskTensor, shape: tuple[int, int], source: Checkpoint
) -> bool:
    """Return whether the weight of a linear is [inputs, outputs], where a product has this shape.

    Raises:
        UnsupportedError: if the adapter says so of a square weight of a class that is not known.
    """
    if is_conv1d(base.module, source):
        return True
    if not (adapter.config.transposed and has_own_code(source)):
        return False
    if shape == shape[::-1]:
        raise UnsupportedError(
            f"'fan_in_fan_out' is true, and the class of '{base.module}' is not known: its weight"
            " may be stored either way",
            path=adapter.config.path,
            hint="merge it with PEFT's `merge_and_unload()`",
        )
    return base.shape == shape[::-1]


def _require_same_shape(adapter: Adapter, key: str, base: DiskTensor) -> None:
    if adapter.shape(key) != base.shape:
        raise _misfit(adapter, f"tensor '{key}' does not fit the base", adapter.shape(key), base)


def _is_copy(adapter: Adapter, key: str, base: DiskTensor, source: Checkpoint) -> bool:
    """Return whether a tensor of an adapter is the base's: PEFT saves the embedding and the head
    with some adapters. Only these are read.
    """
    name = base.places[0].name
    may_be_tied = source.config.tied_embeddings and base.module in (HEAD, EMBEDDING)
    if not (base.whole and len(base.shape) == 2 and (may_be_tied or ".base_layer." in key)):
        return False
    for start, stop in qtensor.row_chunks(*base.shape):
        part = TensorSlice(0, ((start, stop),))
        rows = qtensor.float_rows(
            source.load(resolve_stored_name(source, name), part), 0, stop - start
        )
        if not torch.equal(adapter.load(key, part).float(), rows):
            return False
    return True


def _misfit(
    adapter: Adapter, problem: str, shape: tuple[int, ...], base: DiskTensor
) -> QuantkitError:
    hint = _other_base(adapter)
    by_token = base.module == HEAD or is_embedding(base.module) or _is_head(base.name)
    if by_token and len(shape) == len(base.shape) and shape[1:] == base.shape[1:]:
        hint = (
            "the vocabulary was resized before training: resize that of the base with"
            f" transformers' `model.resize_token_embeddings({shape[0]})`, save it with the"
            " adapter's tokenizer, and merge into that"
        )
    return CheckpointError(
        problem,
        path=adapter.file,
        found=list(shape),
        expected=f"{list(base.shape)}, of '{base.name}'",
        hint=hint,
    )


def _other_base(adapter: Adapter) -> str:
    """Return the next step if an adapter does not fit its base."""
    named = adapter.config.base_model
    return "pass the base that the adapter was made for" + (
        "" if named is None else f": {NAME} names {named}"
    )


def _require_all_targets(adapter: Adapter, bases: _Bases, changed_names: set[str]) -> None:
    """Check that a list of targets has tensors for every linear that it names: a file may lack
    some.
    """
    targets = adapter.config.targets
    if targets.listed is None:
        return
    linears = [
        tensor
        for name, tensor in bases.tensors_by_name.items()
        if name == tensor.name and tensor.linear is not None
    ]
    # Exclusions match whole names, those of modules in transformers. Some folders have other
    # prefixes.
    if targets.is_partial and not any(tensor.module in adapter.modules for tensor in linears):
        return
    for tensor in linears:
        if tensor.stacked is not None or ".experts." in tensor.name or tensor.name in changed_names:
            continue
        if targets.find_exclusion(tensor.module) is None and tensor.name not in adapter.replaced:
            raise CheckpointError(
                f"lacks tensors of module '{tensor.module}', which 'target_modules' names",
                path=adapter.file,
                found=f"{len(adapter.modules)} modules",
                hint="the file is incomplete; copy or download it again",
            )


def _require_all_saved(adapter: Adapter, bases: _Bases) -> None:
    """Check that there is a tensor for each of ``modules_to_save`` that the base has."""
    for module in adapter.config.saved:
        if any(f".{module}." in f".{name}" for name in bases.tensors_by_name) and not any(
            f".{module}." in f".{name}" for name in adapter.replaced
        ):
            raise CheckpointError(
                f"lacks the tensors of '{module}', which 'modules_to_save' names",
                path=adapter.file,
                hint="the file is incomplete; copy or download it again",
            )


def _require_combinable(changes: Changes) -> None:
    """Refuse DoRA along with other updates, as its magnitudes are those of one adapter at full
    weight.
    """
    for update in changes.updates:
        if update.module.magnitude is not None and (
            len(changes.updates) > 1 or update.adapter.weight != 1
        ):
            raise UnsupportedError(
                "DoRA has no weight, and works for one adapter of a module only",
                path=update.adapter.file,
                found=(
                    f"{len(changes.updates)} adapters of '{update.module.name}', weight"
                    f" {update.adapter.weight:g}"
                ),
                hint="leave the weight out, and " + _MERGE_ALONE,
            )


def base_notes(adapter: Adapter, path: Path, names: Sequence[str]) -> list[str]:
    """Return a note if an adapter names another base; `names` are those by which the base is
    known.
    """
    named = adapter.config.base_model
    if not named or not names or _last_part(named) in map(_last_part, names):
        return []
    known = " or ".join(names)
    return [
        f"{adapter.path}: was made for {named}, and {path} is {known}; names and shapes of all"
        " tensors fit"
    ]


def _last_part(name: str) -> str:
    """Return the name of a model without its owner or folder."""
    return name.rstrip("/").rpartition("/")[2].lower()
