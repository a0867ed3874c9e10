"""What adapters do to each canonical tensor of a base: names and shapes are compared before
anything is computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
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
_PREFIXES = frozenset({"model", "language_model", "transformer", "backbone"})
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
    """Describe the same model with a separate output head."""
    # Of a model that is known by its tensors only, the tensors are all that describes it.
    if config.runnable:
        return replace(config, tied_embeddings=False)
    return config


def find_changes(adapters: Sequence[Adapter], source: Checkpoint) -> dict[str, Changes]:
    """Match every tensor of the adapters with the base, and collect the changes by canonical name.
    Of a tied base, the head is a separate tensor.

    Raises:
        CheckpointError: if a tensor of an adapter does not match the base.
        UnsupportedError: if what adapters do to a tensor cannot be combined.
    """
    bases = _Bases(source)
    changes: dict[str, Changes] = defaultdict(Changes)
    for adapter in adapters:
        changed_names = set[str]()
        for module in adapter.modules.values():
            base = bases.find(f"{module.name}.weight", adapter, module.down, changed_names)
            swapped = _require_shape(adapter, module, base, source)
            scaling = adapter.config.scaling(module.name) * adapter.weight
            for place in base.places:
                changes[place.name].updates.append(
                    Update(
                        adapter=adapter,
                        module=module,
                        place=place,
                        swapped=swapped,
                        scaling=scaling,
                    )
                )
            if module.bias is not None:
                bias = bases.find(f"{module.name}.bias", adapter, module.bias, changed_names)
                _require_same_shape(adapter, module.bias, bias)
                for place in bias.places:
                    changes[place.name].added.append(Vector(adapter, module.bias, place, scaling))
        # A set of its own: an adapter may both replace an embedding and update it.
        replaced_names = set[str]()
        for name, key in adapter.replaced.items():
            base = bases.find(name, adapter, key, replaced_names)
            _require_same_shape(adapter, key, base)
            if _is_copy(adapter, key, base, source):
                continue
            for place in base.places:
                change = changes[place.name]
                if change.replacement is not None or adapter.weight != 1:
                    raise UnsupportedError(
                        f"tensor '{key}' replaces one of the base, so it supports neither adapter"
                        " weights nor other adapters",
                        path=adapter.file,
                        found=f"weight {adapter.weight:g}, {len(adapters)} adapters",
                        hint="leave the weight out, and " + _MERGE_ALONE,
                    )
                change.replacement = Vector(adapter, key, place)
        _require_all_saved(adapter, bases)
        # Which tensors are linears is certain only for a known architecture.
        if source.config.runnable:
            _require_all_targets(adapter, bases, changed_names)
    for change in changes.values():
        _require_combinable(change)
    return dict(changes)


class _Bases:
    """The tensors of a base under the names that adapters use."""

    def __init__(self, source: Checkpoint) -> None:
        config = untie_head(source.config)
        self.path = source.path
        self._config = config
        # A folder stores the experts of a quantized layer one by one, and some architectures stack
        # them otherwise. An adapter may use the names of either form.
        every_module = {parameter.module for parameter in parameters(config)}
        separate_experts = disk_tensors(config, every_module)
        self.tensors_by_name: dict[str, DiskTensor] = {}
        for tensor in (*disk_tensors(config), *separate_experts):
            self.tensors_by_name.setdefault(tensor.name, tensor)
        # Canonical names are added during the loop, so it needs a copy of the tensors.
        for tensor in (*self.tensors_by_name.values(),):
            if tensor.whole:
                self.tensors_by_name.setdefault(tensor.places[0].name, tensor)
        # Adapters name modules as transformers does, which renames some when it loads them.
        for opaque_tensor in config.tensors or ():
            if opaque_tensor.alias is not None and opaque_tensor.name in self.tensors_by_name:
                renamed = self.tensors_by_name[opaque_tensor.name]
                self.tensors_by_name.setdefault(f"{opaque_tensor.alias}.weight", renamed)
        self._short: dict[str, list[DiskTensor]] = defaultdict(list)
        for name, tensor in self.tensors_by_name.items():
            same_short = self._short[_strip_prefixes(name)]
            # The same tensor under two names is no ambiguity.
            if tensor not in same_short:
                same_short.append(tensor)
        # The config of a model known by its tensors only may leave out the setting, so a missing
        # head counts as tied unless the config denies it.
        ties = not config.runnable and source.extra_config.get("tie_word_embeddings") is not False
        has_head = any(_is_head(name) for name in self.tensors_by_name)
        self._is_tied = ties and not has_head

    def find(self, name: str, adapter: Adapter, key: str, changed_names: set[str]) -> DiskTensor:
        """Find a tensor by the name that an adapter uses, and add its own name to
        `changed_names`.
        """
        tensor = self.tensors_by_name.get(name)
        if tensor is None:
            candidates = self._short.get(_strip_prefixes(name), [])
            # Several would differ in prefixes only, so the name does not tell which is meant.
            if len(candidates) == 1:
                tensor = candidates[0]
        if tensor is None:
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
                hint=_write_base_hint(adapter),
            )
        if tensor.name in changed_names:
            raise CheckpointError(
                f"two tensors of the adapter change '{tensor.name}'", path=adapter.file
            )
        if self._is_tied and is_embedding(tensor.module):
            raise UnsupportedError(
                "changes an embedding that may be tied to the output head, in a model known by"
                " its tensors only",
                path=adapter.file,
                found=f"'{key}'",
                hint="merge it with PEFT",
            )
        changed_names.add(tensor.name)
        return tensor


def _is_head(name: str) -> bool:
    """Tell whether a tensor's name is that of a parameter of an output head."""
    module = name.rpartition(".")[0]
    return module.rpartition(".")[2] in HEADS


def _strip_prefixes(name: str) -> str:
    """Remove the parts of a name that differ between folders and modules."""
    return ".".join(part for part in name.split(".") if part not in _PREFIXES)


def _require_shape(
    adapter: Adapter, module: LoraModule, base: DiskTensor, source: Checkpoint
) -> bool:
    """Check that a product has the shape of a weight; return whether the product is transposed
    for that.
    """
    _, columns = adapter.shape(module.down)
    rows, _ = adapter.shape(module.up)
    # PEFT's A of an embedding is [rank, tokens], and the embedding itself [tokens, width].
    swapped = module.is_embedding or _is_transposed(adapter, base, (rows, columns), source)
    if swapped:
        shape = (columns, rows)
    else:
        shape = (rows, columns)
    if _read_shape(base) != shape:
        raise _build_shape_error(
            adapter, f"module '{module.name}' does not match the base", shape, base
        )
    # The norms of DoRA are those of outputs, which are columns of such a weight.
    if swapped and not module.is_embedding and module.magnitude is not None:
        raise UnsupportedError(
            "DoRA of a weight stored as [inputs, outputs] is not supported",
            path=adapter.file,
            found=f"'{module.magnitude}'",
            hint="merge it with PEFT",
        )
    return swapped


def _read_shape(base: DiskTensor) -> tuple[int, ...]:
    """Return the shape in which a tensor is read; its shape on disk may be the reverse."""
    if base.places[0].transposed:
        return base.places[0].shape
    return base.shape


def _is_transposed(
    adapter: Adapter, base: DiskTensor, shape: tuple[int, int], source: Checkpoint
) -> bool:
    """Decide whether the weight of a linear is [inputs, outputs], where a product has this shape.

    Raises:
        UnsupportedError: if the adapter says so of a square weight of a class that is not known.
    """
    if is_conv1d(base.module, source):
        # Unless it is read as [outputs, inputs].
        return not base.places[0].transposed
    # PEFT corrects `fan_in_fan_out` by the class of a module, so the setting tells something only
    # if the class is not known.
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
        raise _build_shape_error(
            adapter, f"tensor '{key}' does not match the base", adapter.shape(key), base
        )


def _is_copy(adapter: Adapter, key: str, base: DiskTensor, source: Checkpoint) -> bool:
    """Compare a tensor of an adapter with the base's: PEFT saves the embedding and the head
    with some adapters. Only these are read.
    """
    name = base.places[0].name
    may_be_tied = source.config.tied_embeddings and base.module in (HEAD, EMBEDDING)
    may_be_copy = may_be_tied or ".base_layer." in key
    if not (base.whole and len(base.shape) == 2 and may_be_copy):
        return False
    stored_name = resolve_stored_name(source, name)
    # A float32 copy of a whole embedding can take gigabytes.
    for start, stop in qtensor.row_chunks(*base.shape):
        part = TensorSlice(0, ((start, stop),))
        base_rows = qtensor.float_rows(source.load(stored_name, part), 0, stop - start)
        if not torch.equal(adapter.load(key, part).float(), base_rows):
            return False
    return True


def _build_shape_error(
    adapter: Adapter, problem: str, shape: tuple[int, ...], base: DiskTensor
) -> QuantkitError:
    """Build the error for a tensor of another shape than the base's."""
    hint = _write_base_hint(adapter)
    by_token = base.module == HEAD or is_embedding(base.module) or _is_head(base.name)
    # If only the number of tokens differs, the base is the right one, with tokens added to it.
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
        expected=f"{list(_read_shape(base))}, of '{base.name}'",
        hint=hint,
    )


def _write_base_hint(adapter: Adapter) -> str:
    """Write the next step if an adapter does not fit its base."""
    hint = "pass the base that the adapter was made for"
    expected_base = adapter.config.base_model
    if expected_base is not None:
        hint += f": {NAME} names {expected_base}"
    return hint


def _require_all_targets(adapter: Adapter, bases: _Bases, changed_names: set[str]) -> None:
    """Check that a list of targets has tensors for every linear that it names: a file may lack
    some.
    """
    targets = adapter.config.targets
    if targets.listed is None:
        return
    linears: list[DiskTensor] = []
    for name, tensor in bases.tensors_by_name.items():
        # Tensors are in the table under their canonical names too.
        if name == tensor.name and tensor.linear is not None:
            linears.append(tensor)
    # Exclusions match whole names, those of modules in transformers. Some folders have other
    # prefixes.
    if targets.is_partial and not any(tensor.module in adapter.modules for tensor in linears):
        return
    for tensor in linears:
        # Experts are linears in some versions of transformers, and one parameter in others, which
        # target modules do not match.
        if tensor.stacked is not None or ".experts." in tensor.name:
            continue
        if tensor.name in changed_names:
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
        is_in_base = _has_module(bases.tensors_by_name, module)
        if is_in_base and not _has_module(adapter.replaced, module):
            raise CheckpointError(
                f"lacks the tensors of '{module}', which 'modules_to_save' names",
                path=adapter.file,
                hint="the file is incomplete; copy or download it again",
            )


def _has_module(names: Iterable[str], module: str) -> bool:
    """Tell whether tensors with these names include one inside a module, at any depth."""
    return any(f".{module}." in f".{name}" for name in names)


def _require_combinable(changes: Changes) -> None:
    """Refuse DoRA along with other updates, as its magnitudes are those of one adapter at full
    weight.
    """
    for update in changes.updates:
        is_combined = len(changes.updates) > 1 or update.adapter.weight != 1
        if update.module.magnitude is not None and is_combined:
            raise UnsupportedError(
                "DoRA supports neither adapter weights nor several adapters of one module",
                path=update.adapter.file,
                found=(
                    f"{len(changes.updates)} adapters of '{update.module.name}', weight"
                    f" {update.adapter.weight:g}"
                ),
                hint="leave the weight out, and " + _MERGE_ALONE,
            )


def note_other_base(adapter: Adapter, path: Path, names: Sequence[str]) -> list[str]:
    """Write a note if an adapter names another base; `names` are those by which the base is
    known.
    """
    expected_base = adapter.config.base_model
    if not expected_base or not names:
        return []
    # A copy of the base in another folder, or of another owner on a hub, is the same base.
    if _last_part(expected_base) in [_last_part(name) for name in names]:
        return []
    actual_base = " or ".join(names)
    return [
        f"{adapter.path}: was made for {expected_base}, and {path} is {actual_base}; names and"
        " shapes of all tensors fit"
    ]


def _last_part(name: str) -> str:
    """Remove the owner or the folder from the name of a model."""
    return name.rstrip("/").rpartition("/")[2].lower()
