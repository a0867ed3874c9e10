"""The tensors of a family's Hugging Face folder, and the canonical tensors that each of them
holds.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from quantkit.architectures.config import ModelConfig, OpaqueTensor, Stack
from quantkit.architectures.families import families
from quantkit.architectures.families.family import Family, StackedExperts
from quantkit.architectures.names import CANONICAL
from quantkit.architectures.topology import Linear, Parameter, parameters
from quantkit.errors import CheckpointError

EXPERT_ROLES = ("expert.gate", "expert.up", "expert.down")
_STACKED = (
    StackedExperts(
        CANONICAL["expert.gate_up"].replace(".{expert}", ""), ("expert.gate", "expert.up")
    ),
    StackedExperts(CANONICAL["expert.down"].replace(".{expert}", ""), ("expert.down",)),
)
"""How transformers 5 keeps the experts of most families: outputs first, gate above up."""


@dataclass(frozen=True)
class Place:
    """The place of a canonical tensor in a tensor on disk.

    Attributes:
        name: the canonical name.
        shape: the canonical shape.
        first, step: its first row on disk, and the distance between rows.
        expert: its index along the first axis, if the tensor on disk holds all experts.
        head_order: the row on disk for each row of a head, if the order of rotary rows differs.
    """

    name: str
    shape: tuple[int, ...]
    first: int = 0
    step: int = 1
    expert: int | None = None
    head_order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class DiskTensor:
    """One tensor on disk.

    Attributes:
        places: the canonical tensors that it holds, in order: the rows of several linears of a
            block, or those of each expert in turn.
        stacked: how it holds experts, if it does.
        linear: the linear whose weight it is; the first one if it holds several.
    """

    name: str
    shape: tuple[int, ...]
    places: tuple[Place, ...]
    stacked: StackedExperts | None = None
    linear: Linear | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the canonical names, in order."""
        return tuple(place.name for place in self.places)

    @property
    def module(self) -> str:
        """Return the name of its module; its own name if all experts are one tensor."""
        return self.name.removesuffix(".weight")

    @property
    def quantizable(self) -> bool:
        """Return whether it is the weight of a linear that may be quantized."""
        return self.linear is not None and self.linear.quantizable

    @property
    def whole(self) -> bool:
        """Return whether it is a canonical tensor without changes."""
        return len(self.places) == 1 and self.stacked is None and self.places[0].head_order is None


@dataclass(frozen=True)
class ExpertForm:
    """A form in which the experts of a layer are stored.

    Attributes:
        names: the linears of one expert by role, if each is a separate tensor.
        stacked: the tensors that hold all experts, otherwise.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    stacked: tuple[StackedExperts, ...] = ()


def disk_tensors(
    config: ModelConfig, quantized: Collection[str] = (), *, joins_experts: bool = False
) -> list[DiskTensor]:
    """Return the tensors of a folder in the order of writing.

    Args:
        quantized: canonical names of quantized modules; a layer with such an expert stores each
            expert separately.
        joins_experts: whether all experts of a layer are one module for each role instead, as in
            mlx-lm.
    """
    if config.tensors is not None:
        alone = []
        for tensor in config.tensors:
            if quantized and tensor.stack is not None and tensor.stack.apart:
                alone.append(tensor.module)
        return _opaque_tensors(config, {*quantized, *alone})
    if joins_experts:
        family = families()[config.architecture]
        gate = family.names.get("expert.gate", CANONICAL["expert.gate"])
        return _tensors(
            config,
            dict.fromkeys(
                range(config.num_layers), ExpertForm(stacked=_list_mlx_experts(family, gate))
            ),
        )
    apart = set()
    for p in parameters(config):
        if p.expert is not None and p.module in quantized:
            apart.add(p.layer)
    forms = _expert_forms(families()[config.architecture])
    single = next(form for form in forms if form.names)
    return _tensors(
        config,
        {layer: single if layer in apart else forms[0] for layer in range(config.num_layers)},
    )


def parameters_as_written(
    config: ModelConfig, quantized: Collection[str] = (), *, joins_experts: bool = False
) -> list[Parameter]:
    """Every tensor of a model, in the order of `disk_tensors`."""
    known = {parameter.name: parameter for parameter in parameters(config)}
    tensors = disk_tensors(config, quantized, joins_experts=joins_experts)
    result: list[Parameter] = []
    for tensor in tensors:
        for name in tensor.parts:
            result.append(known[name])
    return result


def found_tensors(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], path: object
) -> list[DiskTensor]:
    """Return the tensors that a folder should hold, with its experts in the form that it uses.
    `shapes` are those of the existing tensors by name; those of a quantized module under the
    module's name. Raises `CheckpointError` if a layer has its experts in two forms, or more than
    the config says.
    """
    if config.tensors is not None:
        apart = [
            tensor.module
            for tensor in config.tensors
            if tensor.stack is not None and tensor.stack.name not in shapes
        ]
        return _opaque_tensors(config, apart)
    if config.experts is None:
        return _tensors(config, {})
    family = families()[config.architecture]
    known = _expert_forms(family)
    there = set()
    for name in shapes:
        for stem in (name, name.rpartition(".")[0], name.rpartition("_")[0]):
            there.add(stem)
    count = config.experts.count
    forms = {}
    for layer, features in enumerate(config.layers):
        if not features.experts:
            continue
        present = {
            number: found
            for number, form in enumerate(known)
            if (found := [name for name in _names(form, layer, count) if name in there])
        }
        if len(present) > 1:
            one, other, *_ = present.values()
            raise CheckpointError(
                f"the experts of layer {layer} are stored in two forms",
                path=str(path),
                found=f"'{one[0]}' and '{other[0]}'",
                expected="a tensor for each expert, or one for all",
                hint="the folder has weight files of two versions of the model",
            )
        forms[layer] = known[next(iter(present), 0)]
    _require_no_more_experts(shapes, known, count, path)
    own_router = family.names.get("router", CANONICAL["router"])
    renamed = {
        layer
        for layer in forms
        if CANONICAL["router"].format(layer=layer) in there
        and own_router.format(layer=layer) not in there
    }
    return _as_oriented(_tensors(config, forms, renamed), shapes)


_UNREAD_EXPERTS = ("nvfp4", "fp8-block")
"""The schemes of experts with which transformers gives other logits, or fails."""


def unread_experts(config: ModelConfig, schemes: Mapping[str, object]) -> str | None:
    """Return what transformers loads wrongly from a folder with quantized modules, in words; None
    if nothing.

    It expects all experts to be quantized by one scheme, in families that store each float expert
    separately (seen in 5.23). `schemes` are those of quantized modules by canonical name.
    """
    found = set()
    for p in parameters(config):
        if p.expert is not None and p.is_linear_weight:
            found.add(schemes.get(p.module))
    if not schemes or not found:
        return None
    if families()[config.architecture].stacked:
        if found == {None}:
            return None
        return f"quantized experts of {config.architecture}"
    if len(found) > 1:
        return "experts of several schemes"
    if (scheme := str(next(iter(found)))) in _UNREAD_EXPERTS:
        return f"experts in {scheme}"
    if None in found:
        return "float experts along with quantized layers"
    return None


def disk_name(config: ModelConfig, role: str) -> str:
    """Return the name on disk of the weight of a role outside the layers."""
    return families()[config.architecture].names.get(role, CANONICAL[role]) + ".weight"


def rotary_order(
    head_dim: int, rotary_dim: int | None, *, interleaved: bool
) -> tuple[int, ...] | None:
    """Return the row on disk for each row of a head in canonical order; None if they are the same.

    Canonical heads pair each row with that half a head away (rotate-half), also with partial rotary
    positions: the first halves of the rotated rows and of the others, then the second halves.

    Args:
        rotary_dim: the dimensions of a head that are rotated; None for all.
        interleaved: whether the two rows of a pair are adjacent on disk.
    """
    turned = rotary_dim or head_dim
    firsts = range(turned // 2)
    seconds = range(turned // 2, turned)
    if interleaved:
        firsts = range(0, turned, 2)
        seconds = range(1, turned, 2)
    middle = turned + (head_dim - turned) // 2
    order = (*firsts, *range(turned, middle), *seconds, *range(middle, head_dim))
    if order == tuple(range(head_dim)):
        return None
    return order


def _expert_forms(family: Family) -> list[ExpertForm]:
    """Return the forms in which a family's experts are read, its own form first."""
    own = {role: family.names.get(role, CANONICAL[role]) for role in EXPERT_ROLES}
    canonical = {role: CANONICAL[role] for role in EXPERT_ROLES}
    if family.stacked:
        forms = [ExpertForm(stacked=family.stacked)]
    else:
        forms = []
    forms += [ExpertForm(own)] + ([ExpertForm(canonical)] if canonical != own else [])
    joined = dict.fromkeys(
        _list_mlx_experts(family, names["expert.gate"]) for names in (own, canonical)
    )
    if family.stacked:
        forms += []
    else:
        forms += [ExpertForm(stacked=_STACKED)]
    return [*forms, *(ExpertForm(stacked=stacked) for stacked in joined)]


def _list_mlx_experts(family: Family, gate: str) -> tuple[StackedExperts, ...]:
    """Return the experts of a layer in mlx-lm: one module of all experts for each role. `gate` is
    the name of an expert's gate where each expert is a separate module.
    """
    bank = gate.partition("experts.{expert}")[0] + ("experts" if family.stacked else "switch_mlp")
    modules = [f"{bank}.{CANONICAL[role].rpartition('.')[2]}" for role in EXPERT_ROLES]
    pairs = zip(EXPERT_ROLES, modules, strict=True)
    return tuple(
        StackedExperts(f"{module}.weight", (role,), bias=f"{module}.bias") for role, module in pairs
    )


def _names(form: ExpertForm, layer: int, count: int) -> list[str]:
    """Return the possible names of a layer's experts in a form."""
    biases = [stacked.bias for stacked in form.stacked if stacked.bias is not None]
    templates = [*form.names.values(), *(stacked.name for stacked in form.stacked), *biases]
    if form.names:
        experts = range(count)
    else:
        experts = range(1)
    names: list[str] = []
    for template in templates:
        for expert in experts:
            names.append(template.format(layer=layer, expert=expert))
    return names


def _require_no_more_experts(
    names: Collection[str], forms: Sequence[ExpertForm], count: int, path: object
) -> None:
    """Refuse a tensor of an expert beyond those of the config."""
    templates = [re.escape(name) for form in forms for name in form.names.values()]
    patterns = [
        name.replace(r"\{layer\}", r"\d+").replace(r"\{expert\}", r"(\d+)") for name in templates
    ]
    numbered = re.compile("|".join(rf"(?:{pattern})\..*" for pattern in patterns))
    for name in sorted(names):
        match = numbered.fullmatch(name)
        if match:
            expert = next((int(number[:18]) for number in match.groups() if number), 0)
        else:
            expert = 0
        if expert >= count:
            raise CheckpointError(
                f"tensor '{name}' belongs to an expert beyond those of the config",
                path=str(path),
                found=f"expert {expert}",
                expected=f"experts 0 to {count - 1}",
                hint="the config is another model's",
            )


def group_stacked_experts(config: ModelConfig) -> dict[str, list[tuple[OpaqueTensor, Stack]]]:
    """Return the linears of experts of a model that is known by its tensors, expert by expert, by
    the tensor for all.
    """
    found: dict[str, list[tuple[OpaqueTensor, Stack]]] = defaultdict(list)
    for tensor in config.tensors or ():
        if tensor.stack is not None:
            found[tensor.stack.name].append((tensor, tensor.stack))
    return {
        name: sorted(parts, key=lambda part: (part[1].expert, part[1].first))
        for name, parts in found.items()
    }


def _opaque_tensors(config: ModelConfig, quantized: Collection[str]) -> list[DiskTensor]:
    """Return the tensors of a model of unknown architecture: their names on disk are canonical,
    except of experts that are one tensor, because none of them is quantized.
    """
    stacks = {
        name: parts
        for name, parts in group_stacked_experts(config).items()
        if not any(tensor.module in quantized for tensor, _ in parts)
    }
    found: dict[str, DiskTensor] = {}
    for tensor, parameter in zip(config.tensors or (), parameters(config), strict=True):
        stack = tensor.stack
        if stack is None or stack.name not in stacks:
            place = Place(parameter.name, parameter.shape)
            found[parameter.name] = DiskTensor(
                parameter.name, parameter.shape, (place,), linear=parameter.linear
            )
        elif stack.name not in found:
            parts = stacks[stack.name]
            places = tuple(
                Place(one.name, one.shape, at.first, at.step, at.expert) for one, at in parts
            )
            held = StackedExperts(
                stack.name, (), stack.transposed, any(at.step > 1 for _, at in parts)
            )
            found[stack.name] = DiskTensor(stack.name, stack.shape, places, held)
    return list(found.values())


def _as_oriented(
    tensors: Sequence[DiskTensor], shapes: Mapping[str, tuple[int, ...]]
) -> list[DiskTensor]:
    """Tensors with the orientation of stacked experts that the folder uses.

    Shapes show which axis comes first; a square tensor follows the other one of its layer. Encoded
    ones, which have no tensor under their own name, have outputs first.
    """
    turned = {}
    for tensor in tensors:
        if tensor.stacked is not None and len(tensor.shape) == 3:
            experts, rows, columns = tensor.shape
            stacked = replace(tensor.stacked, transposed=not tensor.stacked.transposed)
            turned[tensor.name] = replace(tensor, shape=(experts, columns, rows), stacked=stacked)
    oblong = {name: other for name, other in turned.items() if other.shape[-1] != other.shape[-2]}
    others = {_layer(name) for name, other in oblong.items() if shapes.get(name) == other.shape}
    result = []
    for tensor in tensors:
        other = turned.get(tensor.name, tensor)
        shape = shapes.get(tensor.name)
        encoded = shape is None and tensor.stacked is not None and tensor.stacked.transposed
        result.append(
            other if encoded or (shape == other.shape and _layer(tensor.name) in others) else tensor
        )
    return result


def _layer(name: str) -> str:
    """Return the common prefix of a layer's stacked tensors."""
    return name.rpartition(".")[0]


def _tensors(
    config: ModelConfig, forms: Mapping[int, ExpertForm], renamed: Collection[int] = ()
) -> list[DiskTensor]:
    """Return the tensors on disk, in the order of their first parts among a model's parameters.
    `forms` are those of the experts by layer; in the layers of `renamed`, the router has its
    canonical name.
    """
    family = families()[config.architecture]

    def locate_parameter(parameter: Parameter) -> tuple[str, StackedExperts | None]:
        if parameter.layer is None:
            form = None
        else:
            form = forms.get(parameter.layer)
        if form is not None and parameter.expert is not None:
            for stacked in form.stacked:
                if parameter.role in stacked.roles:
                    if parameter.leaf == "weight":
                        template = stacked.name
                    else:
                        template = stacked.bias or stacked.name + "_bias"
                    return template.format(layer=parameter.layer), stacked
        own = parameter.role == "router" and parameter.layer in renamed
        return parameter.name if own else _name(family, form, parameter), None

    return build_disk_tensors(config, locate_parameter, interleaved=family.interleaved_rotary)


def build_disk_tensors(
    config: ModelConfig,
    locate_parameter: Callable[[Parameter], tuple[str, StackedExperts | None]],
    *,
    interleaved: bool,
) -> list[DiskTensor]:
    """Return the tensors on disk that hold a model's canonical ones, in the order of their first
    parts.

    Args:
        held: the tensor on disk that holds a canonical one, and how it holds experts, if it does.
        interleaved: whether the two rows of a rotary pair are adjacent.
    """
    dims = [config.rope_of(layer).rotary_dim for layer in range(config.num_layers)]
    orders = []
    for turned in dims:
        orders.append(rotary_order(config.head_dim, turned, interleaved=interleaved))
    groups: dict[str, tuple[StackedExperts | None, list[Parameter]]] = {}
    for parameter in parameters(config):
        name, stacked = locate_parameter(parameter)
        groups.setdefault(name, (stacked, []))[1].append(parameter)
    return [
        _disk_tensor(
            name, stacked, parts, None if parts[0].layer is None else orders[parts[0].layer]
        )
        for name, (stacked, parts) in groups.items()
    ]


def _name(family: Family, form: ExpertForm | None, parameter: Parameter) -> str:
    """Return the name of a tensor that does not hold all experts."""
    linear = parameter.linear
    if form is not None and parameter.role in form.names:
        template = form.names[parameter.role]
    elif linear is not None and linear.fused is not None and linear.fused in family.fused:
        template = family.fused[linear.fused]
    elif parameter.role in family.names:
        template = family.names[parameter.role]
    else:
        return parameter.name
    module = template.format(layer=parameter.layer, expert=parameter.expert)
    if parameter.leaf:
        return f"{module}.{parameter.leaf}"
    return module


def _disk_tensor(
    name: str,
    stacked: StackedExperts | None,
    parts: Sequence[Parameter],
    order: tuple[int, ...] | None,
) -> DiskTensor:
    """Return the tensor on disk that holds some canonical ones; `order` is that of its layer's
    rotary rows, see `rotary_order`.
    """
    if stacked is None:
        rows = 0
        places = []
        for part in parts:
            rotary = part.rotary or part.role in ("attention.q_norm", "attention.k_norm")
            places.append(Place(part.name, part.shape, rows, head_order=order if rotary else None))
            rows += part.shape[0]
        if len(parts) == 1:
            shape = parts[0].shape
        else:
            shape = (rows, *parts[0].shape[1:])
        return DiskTensor(
            name,
            shape,
            tuple(places),
            linear=parts[0].linear if parts[0].is_linear_weight else None,
        )
    roles = [part for part in parts if part.expert == parts[0].expert]
    firsts = {}
    rows = 0
    for number, part in enumerate(roles):
        firsts[part.role] = number if stacked.interleaved else rows
        rows += part.shape[0]
    step = len(roles) if stacked.interleaved else 1
    found = tuple(
        Place(part.name, part.shape, firsts[part.role], step, part.expert) for part in parts
    )
    matrix = (rows, *parts[0].shape[1:])
    experts = len(parts) // len(roles)
    if len(matrix) == 1:
        return DiskTensor(name, (experts, rows), found, replace(stacked, transposed=False))
    return DiskTensor(
        name, (experts, *(matrix[::-1] if stacked.transposed else matrix)), found, stacked
    )
