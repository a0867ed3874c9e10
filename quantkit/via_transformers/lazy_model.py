"""A model of transformers without weights, whose parts have their weights only while they are
needed.

A *part* is an element of an outermost list of modules, such as a decoder block, or any other module
with parameters. Transformers' own loader renames, merges, splits and transposes the tensors on
disk, so that a part gets the same weights as from `from_pretrained`, in float32.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.architectures.config import OpaqueTensor, Stack
from quantkit.architectures.disk import group_stacked_experts
from quantkit.base.foreign_errors import describe_foreign_error
from quantkit.base.json_values import format_value
from quantkit.base.messages import Message, Option
from quantkit.errors import CheckpointError, QuantkitError, UnsupportedError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.passes.partwise_model import set_parameter
from quantkit.passes.site import Visitor
from quantkit.tensors.qtensor import QuantTensor
from quantkit.via_transformers.experts import set_visitor, use_experts
from quantkit.via_transformers.linears import NotKnown, model_class, quiet, targets
from quantkit.via_transformers.passing_cache import leave_out_cache

_Shape = tuple[int, ...]
# Other modules outside of lists are small, and stay loaded.
_LARGE_TYPES = (nn.Embedding, nn.Linear)
# Elements of a small module, which stays loaded too, because models may use its weight without
# calling it.
_SMALL = 1 << 16
_ANOTHER = "a weight file is missing, or the config belongs to another model"


class LazyModel:
    """A model of transformers. Its buffers are in memory, and its parameters are on the meta device
    between `unload` and `load`.

    Attributes:
        model: the model.
        targets: the parameter that each tensor on disk is, or is part of, and the pattern that
            merges or splits it; see `targets`.
        loaded: the parts whose weights are in memory.
        device: where the weights are loaded to, and the model computes; see `move_to`.
        is_repeatable: whether its blocks are known to do the same when they are called again.
    """

    # Its code may do anything.
    is_repeatable = False

    def __init__(self, source: Checkpoint) -> None:
        """
        Args:
            source: known by its tensors only; the model is the one that its config.json describes.

        Raises:
            UnsupportedError: if the model cannot be built with transformers.
            RequestError: if the code of its folder is trusted, and cannot be imported.
            CheckpointError: if tensors are missing, or have other shapes.
        """
        self._source = source
        self.device = torch.device("cpu")
        self.model: Any = _built(source)
        self._mapping = mapping_of(self.model)
        self._stacked = group_stacked_experts(source.config)
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        # The names of tied parameters, such as those of the embedding and the head.
        names_of_parameter: dict[int, list[str]] = defaultdict(list)
        for name, parameter in parameters.items():
            names_of_parameter[id(parameter)].append(name)
        self._shared: dict[str, list[str]] = {}
        for name, parameter in parameters.items():
            self._shared[name] = names_of_parameter[id(parameter)]
        # Prefixes of the names in lists of modules.
        self._lists: list[str] = []
        for name, module in self.model.named_modules():
            if isinstance(module, nn.ModuleList):
                self._lists.append(f"{name}.")
        # The state has the saved buffers too.
        state = self.model.state_dict()
        self._parts = {name: _part_of(name, self._lists) for name in (*parameters, *state)}
        # Linears of experts that are one tensor on disk are loaded as that tensor.
        names_in_stacks: set[str] = set()
        for stacked_linears in self._stacked.values():
            names_in_stacks.update(linear.name for linear, _ in stacked_linears)
        names_on_disk = [name for name in source.names() if name not in names_in_stacks]
        self.targets = targets(self.model, [*names_on_disk, *self._stacked], self._mapping)
        # Tensors on disk, by part. A tied tensor belongs to several parts.
        self._tensors: dict[str, list[str]] = defaultdict(list)
        self.loaded: set[str] = set()
        for name, (target, _) in self.targets.items():
            tied_names = self._shared.get(target, [target])
            for part in dict.fromkeys(self._parts[tied_name] for tied_name in tied_names):
                self._tensors[part].append(name)
        self._require_all()
        self._resident_parts: set[str] = set()
        for part in self._tensors:
            if not self.is_listed(part) and not _is_large(self.model.get_submodule(part)):
                self._resident_parts.add(part)

    def part_of(self, module: str) -> str | None:
        """Find the part that a module is, or is in; None for a module that contains parts."""
        while module and module not in self._tensors:
            module = module.rpartition(".")[0]
        return module or None

    @property
    def parts(self) -> list[str]:
        """List the names of all parts."""
        return list(self._tensors)

    def is_listed(self, part: str) -> bool:
        """Check that a part is an element of a list of modules."""
        return part.startswith(tuple(self._lists))

    @property
    def first_parts(self) -> list[str]:
        """Find the parts that tokens enter first: models look at the devices of their weights
        before they run.
        """
        embedding = self.embedding
        if embedding is None:
            return []
        part = self.part_of(embedding[0])
        return [] if part is None else [part]

    @property
    def resident_parts(self) -> set[str]:
        """Find the parts that stay loaded for a complete pass: those outside of lists that are
        small.
        """
        return self._resident_parts

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Read the tokens that end a text from the config; generation_config.json may have
        others.
        """
        end_token_ids = getattr(self.model.config.get_text_config(), "eos_token_id", None)
        if isinstance(end_token_ids, list):
            return tuple(end_token_ids)
        if end_token_ids is None:
            return ()
        return (int(end_token_ids),)

    @property
    def body(self) -> nn.Module:
        """Find the model without its head."""
        body: nn.Module = self.model.base_model
        children = dict(body.named_children())
        # The decoder's wrapper is not called itself, so a hook on it would see nothing.
        if list(children) == ["decoder"]:
            return children["decoder"]
        return body

    def same_as(self, name: str) -> list[str]:
        """List the names of all parameters that are tied to a parameter, its own among them."""
        return list(self._shared[name])

    @property
    def embedding(self) -> tuple[str, nn.Module] | None:
        """Find the module that looks tokens up, with its name; None if the model has none."""
        input_embeddings = self.model.get_input_embeddings()
        for name, module in self.model.named_modules():
            if module is input_embeddings:
                return name, module
        return None

    def open_head(self) -> None:
        """Return None: the head is in the model."""

    def set_visitor(self, visitor: Visitor | None) -> None:
        """Set what sees the inputs of all of the model's experts."""
        set_visitor(self.model, visitor)

    def silence(self) -> contextlib.AbstractContextManager[None]:
        """Silence the logs, warnings and progress bars of transformers."""
        return quiet()

    def move_to(self, device: torch.device) -> None:
        """Let the model compute on a device; no part may be loaded."""
        assert not self.loaded
        self.device = device
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)

    def load(self, part: str) -> None:
        """Load the weights of a part's modules."""
        self.loaded.add(part)
        tensors: dict[str, _OnDisk] = {}
        for name in self._tensors[part]:
            tensors[name] = _OnDisk(self._source, name, self._stacked.get(name, ()))
        self._convert(tensors, str(self.device))
        self._share(part)
        # The loader makes parameters that are trained.
        for name, part_of_name in self._parts.items():
            if part_of_name == part and name in self._shared:
                self.model.get_parameter(name).requires_grad_(False)

    def unload(self, part: str) -> None:
        """Free the weights of a part, except those that are tied to a part that is loaded."""
        self.loaded.discard(part)
        for name, part_of_name in self._parts.items():
            if part_of_name != part:
                continue
            # Buffers have no entry, and stay.
            tied_names = self._shared.get(name, [])
            if any(self._parts[tied_name] in self.loaded for tied_name in tied_names):
                continue
            for tied_name in tied_names:
                parameter = self.model.get_parameter(tied_name)
                # A caller may have replaced it by one of another type.
                set_parameter(self.model, tied_name, parameter.to("meta", torch.float32))

    def shape(self, name: str) -> tuple[int, ...]:
        """Read the shape of a tensor on disk."""
        if name in self._stacked:
            return self._stacked[name][0][1].shape
        return self._source.info(name).shape

    def list_stacked_linears(self, name: str) -> list[tuple[OpaqueTensor, Stack]]:
        """List the linears in a tensor on disk that contains all experts, and their places; empty
        for other tensors.
        """
        return self._stacked.get(name, [])

    def convert_tensors(self, target: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Make parameters of tensors, as of those on disk with the same names and shapes: by name,
        the one that they are merged into, or all that one is split into.
        """
        values: dict[str, tuple[str | None, Tensor]] = {}
        for name, value in tensors.items():
            values[name] = (self.targets[name][1], value)
        return convert_tensors(self.model, self._mapping, target, values)

    def _share(self, part: str) -> None:
        """Tie parameters again: the loader replaces only one of them."""
        for name, part_of_name in self._parts.items():
            tied_names = self._shared.get(name, [])
            if part_of_name == part and len(tied_names) > 1:
                value = self.model.get_parameter(tied_names[0])
                for tied_name in tied_names:
                    parameter = self.model.get_parameter(tied_name)
                    if parameter.device.type != "meta":
                        value = parameter
                        break
                for tied_name in tied_names:
                    set_parameter(self.model, tied_name, value)

    def _convert(self, tensors: Mapping[str, Any], device: str) -> Any:
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        loading = LoadStateDictConfig(
            dtype=torch.float32, device_map={"": device}, weight_mapping=self._mapping
        )
        with quiet():
            info, _ = convert_and_load_state_dict_in_model(self.model, dict(tensors), loading)
        return info

    def _require_all(self) -> None:
        """Raise a `CheckpointError` unless all parameters and saved buffers get tensors of their
        shapes.
        """
        # The loader runs on tensors without memory, so the check reads no values.
        tensors: dict[str, Tensor] = {}
        for name in self.targets:
            tensors[name] = torch.empty(self.shape(name), device="meta")
        buffers = dict(self.model.named_buffers())
        info = self._convert(tensors, "meta")
        # The loader has replaced buffers by tensors on the meta device. Those that are on disk are
        # loaded with their part.
        for name, buffer in buffers.items():
            owner, _, leaf = name.rpartition(".")
            self.model.get_submodule(owner)._buffers[leaf] = buffer
        mismatched: dict[str, tuple[_Shape, _Shape]] = {}
        for name, shape, expected_shape in info.mismatched_keys:
            mismatched[str(name)] = (tuple(shape), tuple(expected_shape))
        # Sorted, so that the error names the same parameter each time.
        unfit_names = [*sorted(mismatched), *info.conversion_errors]
        if unfit_names:
            unfit_name = unfit_names[0]
            reason = info.conversion_errors.get(unfit_name)
            if reason:
                reason = format_value(reason.splitlines()[-1])
            raise self._unfit(unfit_name, mismatched.get(unfit_name), reason)
        for name in self._parts:
            # It is enough that one of tied parameters is on disk.
            if all(tied in info.missing_keys for tied in self._shared.get(name, [name])):
                raise CheckpointError(
                    f"no tensor on disk is named '{name}'", path=self._source.path, hint=_ANOTHER
                )

    def _unfit(
        self, target: str, mismatch: tuple[_Shape, _Shape] | None, reason: str | None
    ) -> CheckpointError:
        """Make the error for tensors on disk that do not make a parameter. It names the tensor that
        has a different shape, if that is known.

        Args:
            mismatch: the shapes that they make, and that the parameter has; None if they make none,
                for the `reason`.
        """
        shapes: dict[str, _Shape] = {}
        for name, (parameter, _) in self.targets.items():
            if parameter == target:
                shapes[name] = self.shape(name)
        first = next(iter(shapes), target)
        odd = _odd(shapes)
        # A single tensor, which the loader does not change.
        if mismatch is not None and list(shapes.values()) == [mismatch[0]]:
            problem = f"tensor '{first}' has a different shape"
        elif odd is not None:
            odd_name, common_shape = odd
            problem = f"tensor '{odd_name}' has a different shape"
            mismatch = (shapes[odd_name], common_shape)
        elif len(shapes) > 1:
            problem = (
                f"tensors '{first}' and {len(shapes) - 1} more do not make '{target}' of the model"
            )
        else:
            problem = f"tensor '{first}' does not make '{target}' of the model"
        if mismatch is None:
            return CheckpointError(problem, path=self._source.path, found=reason, hint=_ANOTHER)
        return CheckpointError(
            problem,
            path=self._source.path,
            found=f"shape {list(mismatch[0])}",
            expected=f"shape {list(mismatch[1])}",
            hint=_ANOTHER,
        )


def _is_large(module: nn.Module) -> bool:
    if not isinstance(module, _LARGE_TYPES):
        return False
    return sum(parameter.numel() for parameter in module.parameters()) > _SMALL


def _odd(shapes: Mapping[str, _Shape]) -> tuple[str, _Shape] | None:
    """Find a tensor whose shape differs from that of most tensors whose names differ only in
    numbers, and their shape; None if there is none.
    """
    groups: dict[str, dict[str, _Shape]] = defaultdict(dict)
    for name, shape in shapes.items():
        groups[re.sub(r"\d+", "*", name)][name] = shape
    for group in groups.values():
        common, count = Counter(group.values()).most_common(1)[0]
        # A majority, but not all.
        if 2 * count > len(group) > count:
            return next(name for name, shape in group.items() if shape != common), common
    return None


class _OnDisk:
    """A tensor that is read, or made of its parts, when transformers' loader takes its values."""

    def __init__(
        self, source: Checkpoint, name: str, parts: Sequence[tuple[OpaqueTensor, Stack]]
    ) -> None:
        self._source = source
        self._name = name
        self._parts = parts

    # The loader takes the values of a slice of safetensors as ``slice[...]``.
    def __getitem__(self, _: object) -> Tensor:
        if not self._parts:
            return self._floats(self._name)
        stacked: Tensor | None = None
        for part, stack in self._parts:
            value = self._floats(part.name)
            if stacked is None:
                stacked = torch.empty(stack.shape, dtype=value.dtype)
            rows_of(stacked, stack, part.shape).copy_(value)
        assert stacked is not None
        return stacked

    def _floats(self, name: str) -> Tensor:
        value = self._source.load(name)
        if isinstance(value, QuantTensor):
            return value.dequantize()
        return value


def rows_of(whole: Tensor, stack: Stack, shape: tuple[int, ...]) -> Tensor:
    """Select the weight [O, I] of a linear, given its shape, in the tensor that contains it, not
    copied.
    """
    rows, columns = shape
    if stack.expert is None and stack.transposed:
        return whole[stack.first :][:columns].t()
    if stack.expert is None:
        matrix = whole
    else:
        matrix = whole[stack.expert]
    if stack.transposed:
        matrix = matrix.t()
    return matrix[stack.first :: stack.step][:rows]


def convert_tensors(
    model: Any,
    mapping: Iterable[Any],
    target: str,
    tensors: Mapping[str, tuple[str | None, Tensor]],
) -> dict[str, Tensor]:
    """Make the parameters that transformers makes of tensors on disk, each given with the pattern
    that merges or splits it and their first parameter; see `targets`.
    """
    first_pattern, _ = next(iter(tensors.values()))
    # Renamings, which are in the mapping too, have no operations.
    converters = [rule for rule in mapping if hasattr(rule, "operations")]
    matching = next(rule for rule in converters if first_pattern in rule.source_patterns)
    # A copy, because a converter collects the tensors that are added to it.
    converter = copy.deepcopy(matching)
    for name, (pattern, value) in tensors.items():
        converter.add_tensor(target, name, pattern, lambda value=value: value)
    parameters: dict[str, Tensor] = {}
    for name, value in converter.convert(target, model=model, config=model.config).items():
        parameters[name] = value[0] if isinstance(value, list) else value
    return parameters


def _part_of(name: str, lists: Iterable[str]) -> str:
    """Find the part of a parameter: its name up to the number after the outermost list, or else
    its module.
    """
    enclosing = [prefix for prefix in lists if name.startswith(prefix)]
    if not enclosing:
        return name.rpartition(".")[0]
    outermost = min(enclosing, key=len)
    return outermost + name[len(outermost) :].partition(".")[0]


def _built(source: Checkpoint) -> Any:
    """Build the model that a config.json describes: parameters on the meta device, and buffers
    with their values.
    """
    transformers: Any = importlib.import_module("transformers")
    try:
        with quiet():
            cls, config = model_class(source.extra_config, source.config.code)
            with _without_weights():
                model = cls(config)
            model.tie_weights()
            use_experts(model)
            leave_out_cache(model)
    except NotKnown as reason:
        version = source.extra_config.get("transformers_version")
        if isinstance(version, str):
            saved = f"; the folder was saved by {format_value(version)}"
        else:
            saved = ""
        problem = f"{reason}, as of version {transformers.__version__}{saved}"
        raise UnsupportedError(
            problem,
            path=source.path,
            hint=Message(
                Option("tensors_only", value=True), " copies or quantizes it without running it"
            ),
        ) from None
    except QuantkitError:
        raise
    # The code of a model, given any config, can raise anything.
    except Exception as error:
        why = f"{describe_foreign_error(error)}, with transformers {transformers.__version__}"
        problem = f"the model cannot be built from its config ({why})"
        raise UnsupportedError(
            problem, path=source.path, found=source.config.architecture
        ) from error
    return model.eval().requires_grad_(False)


def mapping_of(model: Any) -> list[Any]:
    """List what transformers' loader renames, merges and splits for a model."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model))


@contextlib.contextmanager
def _without_weights() -> Iterator[None]:
    """Put the parameters of modules made within on the meta device, not initialized."""
    # Not `torch.device("meta")`, because buffers, such as rotary frequencies, need their values.
    from transformers.initialization import no_init_weights

    patched: Any = nn.Module
    register = patched.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    patched.register_parameter = on_meta
    try:
        with no_init_weights():
            yield
    finally:
        patched.register_parameter = register
