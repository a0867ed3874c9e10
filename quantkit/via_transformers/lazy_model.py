"""A model of transformers without weights, whose parts get theirs while they are needed.

A *part* is an element of an outermost list of modules, such as a decoder block, or any other module
with parameters. Names of tensors on disk become those of parameters, and tensors are merged, split
and turned, by transformers' own loader, so that a part gets what `from_pretrained` would give it,
in float32.
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
from quantkit.base.json_values import format_value
from quantkit.errors import CheckpointError, QuantkitError, UnsupportedError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.tensors.qtensor import QuantTensor
from quantkit.via_transformers.experts import use_experts
from quantkit.via_transformers.linears import NotKnown, model_class, quiet, targets

_Shape = tuple[int, ...]
_ANOTHER = "a weight file is missing, or the config is another model's"


class LazyModel:
    """A model of transformers; its buffers are there, and its parameters on the meta device between
    `unload` and `load`.

    Attributes:
        model: the model.
        targets: the parameter that each tensor on disk is, or is part of, and what merges or splits
            it; see `targets`.
        loaded: the parts whose weights are there.
    """

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
        self.model: Any = _built(source)
        self._mapping = mapping_of(self.model)
        self._stacked = group_stacked_experts(source.config)
        named = dict(self.model.named_parameters(remove_duplicate=False))
        same: dict[int, list[str]] = defaultdict(list)
        for name, parameter in named.items():
            same[id(parameter)].append(name)
        self._shared = {name: same[id(parameter)] for name, parameter in named.items()}
        self._lists = [
            f"{name}." for name, one in self.model.named_modules() if isinstance(one, nn.ModuleList)
        ]
        state = self.model.state_dict()
        self._parts = {name: _part_of(name, self._lists) for name in (*named, *state)}
        parts = {part.name for own in self._stacked.values() for part, _ in own}
        found = targets(
            self.model,
            [*(name for name in source.names() if name not in parts), *self._stacked],
            self._mapping,
        )
        self.targets = found
        self._tensors: dict[str, list[str]] = defaultdict(list)  # on disk, by part
        self.loaded: set[str] = set()
        for name, (target, _) in found.items():
            for part in dict.fromkeys(
                self._parts[one] for one in self._shared.get(target, [target])
            ):
                self._tensors[part].append(name)
        self._require_all()

    def part_of(self, module: str) -> str | None:
        """Return the part that a module is, or is in; None for one around parts."""
        while module and module not in self._tensors:
            module = module.rpartition(".")[0]
        return module or None

    @property
    def parts(self) -> list[str]:
        """Return the names of all parts."""
        return list(self._tensors)

    def is_listed(self, part: str) -> bool:
        """Return whether a part is an element of a list of modules."""
        return part.startswith(tuple(self._lists))

    @property
    def first_parts(self) -> list[str]:
        """Return the parts that tokens enter first: models look at their devices before."""
        if self.embedding is None:
            part = None
        else:
            part = self.part_of(self.embedding[0])
        return [] if part is None else [part]

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Return the tokens that end a text, as the config says; those of generation_config.json
        are others.
        """
        stated = getattr(self.model.config.get_text_config(), "eos_token_id", None)
        if isinstance(stated, list):
            return tuple(stated)
        if stated is None:
            return ()
        return (int(stated),)

    @property
    def body(self) -> nn.Module:
        """Return the model without its head."""
        body: nn.Module = self.model.base_model
        children = dict(body.named_children())
        # a wrapper that is not called itself
        if list(children) == ["decoder"]:
            return children["decoder"]
        return body

    def same_as(self, name: str) -> list[str]:
        """Return the names of all parameters that are one with a parameter, its own among them."""
        return list(self._shared[name])

    @property
    def embedding(self) -> tuple[str, nn.Module] | None:
        """Return the module that looks tokens up, with its name; None if the model has none."""
        input_embeddings = self.model.get_input_embeddings()
        return next(
            ((name, one) for name, one in self.model.named_modules() if one is input_embeddings),
            None,
        )

    def load(self, part: str) -> None:
        """Give the modules of a part their weights."""
        self.loaded.add(part)
        tensors = {}
        for name in self._tensors[part]:
            tensors[name] = _OnDisk(self._source, name, self._stacked.get(name, ()))
        self._convert(tensors, "cpu")
        self._share(part)

    def unload(self, part: str) -> None:
        """Free the weights of a part, except those that are tied to a part that is loaded."""
        self.loaded.discard(part)
        for name, own in self._parts.items():
            if own == part:
                names = self._shared.get(name, [])
            else:
                names = []
            if all(self._parts[one] not in self.loaded for one in names):
                for one in names:
                    set_parameter(self.model, one, self.model.get_parameter(one).to("meta"))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor on disk."""
        if name in self._stacked:
            return self._stacked[name][0][1].shape
        return self._source.info(name).shape

    def list_stacked_linears(self, name: str) -> list[tuple[OpaqueTensor, Stack]]:
        """Return the linears in a tensor on disk that holds all experts, and their places; none in
        any other.
        """
        return self._stacked.get(name, [])

    def merge_tensors(self, target: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a parameter made of other tensors than those on disk, given by their names, of the
        same shapes.
        """
        return merge_into_parameter(
            self.model,
            self._mapping,
            target,
            {name: (self.targets[name][1], value) for name, value in tensors.items()},
        )

    def _share(self, part: str) -> None:
        """Give tied parameters the tensor that one of them was given."""
        for name, own in self._parts.items():
            names = self._shared.get(name, [])
            if own == part and len(names) > 1:
                given = [self.model.get_parameter(one) for one in names]
                value = next((one for one in given if one.device.type != "meta"), given[0])
                for one in names:
                    set_parameter(self.model, one, value)

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
        shapes = {name: self.shape(name) for name in self.targets}
        buffers = dict(self.model.named_buffers())
        info = self._convert(
            {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}, "meta"
        )
        for name, buffer in buffers.items():
            owner, _, leaf = name.rpartition(".")
            self.model.get_submodule(owner)._buffers[leaf] = (
                # Those on disk are given with their part.
                buffer
            )
        missing = [
            name
            for name in self._parts
            if all(one in info.missing_keys for one in self._shared.get(name, [name]))
        ]
        mismatched = {
            str(name): (tuple(shape), tuple(wanted)) for name, shape, wanted in info.mismatched_keys
        }
        if name := next(iter(sorted(mismatched)), None) or next(iter(info.conversion_errors), None):
            reason = info.conversion_errors.get(name)
            raise self._unfit(
                name, mismatched.get(name), reason and format_value(reason.splitlines()[-1])
            )
        if missing:
            raise CheckpointError(
                f"no tensor on disk is '{missing[0]}'", path=self._source.path, hint=_ANOTHER
            )

    def _unfit(
        self, target: str, mismatch: tuple[_Shape, _Shape] | None, reason: str | None
    ) -> CheckpointError:
        """Return the error for tensors on disk that do not make a parameter: the one with another
        shape, if that is known.

        Args:
            mismatch: the shapes that they make, and that the parameter has; None if they make none,
                for the `reason`.
        """
        shapes = {}
        for name, (parameter, _) in self.targets.items():
            if parameter == target:
                shapes[name] = self.shape(name)
        first = next(iter(shapes), target)
        if mismatch is not None and list(shapes.values()) == [mismatch[0]]:
            problem = f"tensor '{first}' has another shape"
        elif (odd := _odd(shapes)) is not None:
            problem = f"tensor '{odd[0]}' has another shape"
            mismatch = (shapes[odd[0]], odd[1])
        elif len(shapes) > 1:
            problem = (
                f"tensors '{first}' and {len(shapes) - 1} more do not make '{target}' of the model"
            )
        else:
            problem = f"tensor '{first}' does not make '{target}' of the model"
        found, expected = (
            (reason, None) if mismatch is None else (f"shape {list(one)}" for one in mismatch)
        )
        return CheckpointError(
            problem, path=self._source.path, found=found, expected=expected, hint=_ANOTHER
        )


def _odd(shapes: Mapping[str, _Shape]) -> tuple[str, _Shape] | None:
    """Return the tensor that has another shape than most of those with the same name but for
    numbers, and their shape; None if there is none.
    """
    groups: dict[str, dict[str, _Shape]] = defaultdict(dict)
    for name, shape in shapes.items():
        groups[re.sub(r"\d+", "*", name)][name] = shape
    for group in groups.values():
        common, count = Counter(group.values()).most_common(1)[0]
        if 2 * count > len(group) > count:
            return next(name for name, shape in group.items() if shape != common), common
    return None


class _OnDisk:
    """A tensor that is read where transformers takes its values, or made of its parts."""

    def __init__(
        self, source: Checkpoint, name: str, parts: Sequence[tuple[OpaqueTensor, Stack]]
    ) -> None:
        self._source = source
        self._name = name
        self._parts = parts

    def __getitem__(self, _: object) -> Tensor:
        if not self._parts:
            return self._floats(self._name)
        whole: Tensor | None = None
        for part, stack in self._parts:
            value = self._floats(part.name)
            if whole is None:
                whole = torch.empty(stack.shape, dtype=value.dtype)
            else:
                whole = whole
            rows_of(whole, stack, part.shape[0]).copy_(value)
        assert whole is not None
        return whole

    def _floats(self, name: str) -> Tensor:
        value = self._source.load(name)
        if isinstance(value, QuantTensor):
            return value.dequantize()
        return value


def rows_of(whole: Tensor, stack: Stack, rows: int) -> Tensor:
    """Return the weight [O, I] of a linear of an expert in the tensor for all, not copied."""
    if stack.transposed:
        matrix = whole[stack.expert].t()
    else:
        matrix = whole[stack.expert]
    return matrix[stack.first :: stack.step][:rows]


def merge_into_parameter(
    model: Any,
    mapping: Iterable[Any],
    target: str,
    tensors: Mapping[str, tuple[str | None, Tensor]],
) -> Tensor:
    """Return the parameter that transformers makes of tensors on disk, each with the pattern of
    what merges or splits it; see `targets`.
    """
    first = next(pattern for pattern, _ in tensors.values())
    converters = [one for one in mapping if hasattr(one, "operations")]
    converter = copy.deepcopy(next(one for one in converters if first in one.source_patterns))
    for name, (pattern, value) in tensors.items():
        converter.add_tensor(target, name, pattern, lambda value=value: value)
    made = converter.convert(target, model=model, config=model.config)[target]
    if isinstance(made, list):
        whole: Tensor = made[0]
    else:
        whole = made
    return whole


def set_parameter(model: nn.Module, name: str, value: Tensor) -> None:
    """Give a model a parameter that is not trained."""
    owner, _, leaf = name.rpartition(".")
    if isinstance(value, nn.Parameter):
        parameter = value
    else:
        parameter = nn.Parameter(value, requires_grad=False)
    setattr(model.get_submodule(owner), leaf, parameter)


def _part_of(name: str, lists: Iterable[str]) -> str:
    """Return the part that has a parameter: up to the number behind the first list, or else the
    module itself.
    """
    around = [one for one in lists if name.startswith(one)]
    if not around:
        return name.rpartition(".")[0]
    first = min(around, key=len)
    return first + name[len(first) :].partition(".")[0]


def _built(source: Checkpoint) -> Any:
    """Return the model that a config.json describes: parameters on the meta device, and buffers
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
    except NotKnown as reason:
        by = source.extra_config.get("transformers_version")
        if isinstance(by, str):
            saved = f"; the folder was saved by {format_value(by)}"
        else:
            saved = ""
        problem = f"{reason}, as of version {transformers.__version__}{saved}"
        raise UnsupportedError(
            problem, path=source.path, hint="`tensors_only=True` copies or rounds it"
        ) from None
    except QuantkitError:
        raise
    except Exception as error:  # of the code of any model, given any config
        message = format_value(" ".join(str(error).split()))
        why = f"{type(error).__name__}: {message}, with transformers {transformers.__version__}"
        problem = f"the model cannot be built from its config ({why})"
        raise UnsupportedError(
            problem, path=source.path, found=source.config.architecture
        ) from error
    return model.eval().requires_grad_(False)


def mapping_of(model: Any) -> list[Any]:
    """Return what transformers' loader renames, merges and splits for a model."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model))


@contextlib.contextmanager
def _without_weights() -> Iterator[None]:
    """Modules made within have their parameters on the meta device, not initialized."""
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
