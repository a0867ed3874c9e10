"""The tensors of a family's Hugging Face folder, and the canonical tensors that each of them
contains.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from quantkit.architectures.config import ModelConfig, OpaqueTensor, Stack
from quantkit.architectures.families import FAMILIES
from quantkit.architectures.families.family import Family, Ranges, StackedExperts
from quantkit.architectures.names import CANONICAL
from quantkit.architectures.topology import Linear, Parameter, parameters
from quantkit.errors import CheckpointError

EXPERT_ROLES = ("expert.gate", "expert.up", "expert.down")
# One tensor for all experts has no number of an expert in its name.
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
        expert: its index along the first axis, if the tensor on disk has all experts.
        transposed: whether its transpose is on disk: without experts, in rows from `first`.
        head_order: the row on disk for each row of a head, if the order of rotary rows differs.
        row_ranges, column_ranges: of GGUF, the canonical rows and columns that are on disk, in the
            order on disk; None for all of them in canonical order. `shape` is that of all.
    """

    name: str
    shape: tuple[int, ...]
    first: int = 0
    step: int = 1
    expert: int | None = None
    transposed: bool = False
    head_order: tuple[int, ...] | None = None
    row_ranges: Ranges | None = None
    column_ranges: Ranges | None = None

    @property
    def rearranged(self) -> bool:
        """Return whether some rows or columns are elsewhere on disk than in canonical order."""
        return self.row_ranges is not None or self.column_ranges is not None


@dataclass(frozen=True)
class DiskTensor:
    """One tensor on disk.

    Attributes:
        places: the canonical tensors that it contains, in order: the rows of several linears of a
            block, or those of each expert in turn.
        stacked: how it stores experts, if it contains all of a layer.
        linear: the linear whose weight it is; the first one if there are several.
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
        if len(self.places) > 1 or self.stacked is not None:
            return False
        place = self.places[0]
        return place.head_order is None and not place.transposed and not place.rearranged


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
    """List the tensors of a folder in the order of writing.

    Args:
        quantized: canonical names of quantized modules; a layer with such an expert stores each
            expert separately.
        joins_experts: whether all experts of a layer are one module for each role instead, as in
            mlx-lm.
    """
    if config.tensors is not None:
        separate = set(quantized)
        for tensor in config.tensors:
            # Once any weight is quantized, readers want every linear of such a stack by itself.
            if quantized and tensor.stack is not None and tensor.stack.apart:
                separate.add(tensor.module)
        return _opaque_tensors(config, separate)
    if joins_experts:
        family = FAMILIES[config.architecture]
        gate = family.names.get("expert.gate", CANONICAL["expert.gate"])
        joined = ExpertForm(stacked=_list_mlx_experts(family, gate))
        return _list_family_tensors(config, dict.fromkeys(range(config.num_layers), joined))
    # Codes of different experts are not stored in one tensor, so one quantized expert separates
    # all experts of its layer.
    separate_layers = set()
    for parameter in parameters(config):
        if parameter.expert is not None and parameter.module in quantized:
            separate_layers.add(parameter.layer)
    forms = _expert_forms(FAMILIES[config.architecture])
    separate_form = next(form for form in forms if form.names)
    form_by_layer = {}
    for layer in range(config.num_layers):
        form_by_layer[layer] = separate_form if layer in separate_layers else forms[0]
    return _list_family_tensors(config, form_by_layer)


def parameters_as_written(
    config: ModelConfig, quantized: Collection[str] = (), *, joins_experts: bool = False
) -> list[Parameter]:
    """List every tensor of a model, in the order of `disk_tensors`."""
    by_name = {parameter.name: parameter for parameter in parameters(config)}
    ordered: list[Parameter] = []
    for tensor in disk_tensors(config, quantized, joins_experts=joins_experts):
        for name in tensor.parts:
            ordered.append(by_name[name])
    return ordered


def match_stored_tensors(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], path: object
) -> list[DiskTensor]:
    """List the tensors that a folder should contain, with its experts in the form that it uses.
    `shapes` are those of the existing tensors by name; those of a quantized module under the
    module's name. Raises `CheckpointError` if a layer has its experts in two forms, or more than
    the config says.
    """
    if config.tensors is not None:
        # The folder splits a stack whose joint tensor is missing.
        separate = []
        for tensor in config.tensors:
            if tensor.stack is not None and tensor.stack.name not in shapes:
                separate.append(tensor.module)
        return _opaque_tensors(config, separate)
    if config.experts is None:
        return _list_family_tensors(config, {})
    family = FAMILIES[config.architecture]
    possible_forms = _expert_forms(family)
    # Encoded weights have suffixes: `q_proj.weight_packed` as well as `gate_up_proj_blocks`.
    stems = set()
    for name in shapes:
        stems.add(name)
        stems.add(name.rpartition(".")[0])
        stems.add(name.rpartition("_")[0])
    count = config.experts.count
    form_by_layer = {}
    for layer, features in enumerate(config.layers):
        if not features.experts:
            continue
        stored_names: dict[int, list[str]] = {}
        for number, form in enumerate(possible_forms):
            form_names = [name for name in _list_expert_names(form, layer, count) if name in stems]
            if form_names:
                stored_names[number] = form_names
        stored_names = _drop_explained_forms(stored_names)
        if len(stored_names) > 1:
            first_form, second_form, *_ = stored_names.values()
            raise CheckpointError(
                f"the experts of layer {layer} are stored in two forms",
                path=str(path),
                found=f"'{first_form[0]}' and '{second_form[0]}'",
                expected="a tensor for each expert, or one for all",
                hint="the folder has weight files of two versions of the model",
            )
        # Without any expert on disk, errors name the tensors of the family's own form.
        form_by_layer[layer] = possible_forms[next(iter(stored_names), 0)]
    _require_no_more_experts(shapes, possible_forms, count, path)
    family_router = family.names.get("router", CANONICAL["router"])
    renamed = set()
    for layer in form_by_layer:
        has_canonical = CANONICAL["router"].format(layer=layer) in stems
        if has_canonical and family_router.format(layer=layer) not in stems:
            renamed.add(layer)
    return _orient_experts(_list_family_tensors(config, form_by_layer, renamed), shapes)


def _drop_explained_forms(stored_names: Mapping[int, list[str]]) -> dict[int, list[str]]:
    """Drop forms of which a folder only seems to have tensors: one whose tensors are named as the
    modules of another form, as gpt-oss's experts are in mlx-lm.
    """
    kept = {}
    for number, names in stored_names.items():
        is_explained = False
        for other, other_names in stored_names.items():
            if other != number and all(f"{name}.weight" in other_names for name in names):
                is_explained = True
        if not is_explained:
            kept[number] = names
    return kept


_UNREAD_EXPERTS = ("nvfp4", "fp8-block")
"""The schemes of experts with which transformers gives other logits, or fails."""


def describe_unread_experts(config: ModelConfig, schemes: Mapping[str, object]) -> str | None:
    """Describe what transformers loads wrongly from a folder with quantized modules; None if
    nothing.

    It expects all experts to be quantized by one scheme, in families that store each float expert
    separately and in some others (seen in 5.23). `schemes` are those of quantized modules by
    canonical name.
    """
    expert_schemes = set()
    for parameter in parameters(config):
        if parameter.expert is not None and parameter.is_linear_weight:
            expert_schemes.add(schemes.get(parameter.module))
    if not schemes or not expert_schemes:
        return None
    family = FAMILIES[config.architecture]
    if family.stacked and not family.loads_split_experts:
        if expert_schemes == {None}:
            return None
        return f"quantized experts of {config.architecture}"
    if len(expert_schemes) > 1:
        return "experts of several schemes"
    scheme = str(next(iter(expert_schemes)))
    if scheme in _UNREAD_EXPERTS:
        return f"experts in {scheme}"
    if None in expert_schemes:
        return "float experts along with quantized layers"
    return None


def is_unread(config: ModelConfig, name: str) -> bool:
    """Return whether a tensor, by its name on disk, is one that a folder may have and nothing
    reads: of the keys and values of a layer that takes those of another one.
    """
    family = FAMILIES[config.architecture]
    for number, layer in enumerate(config.layers):
        if not layer.shares_kv:
            continue
        for role in ("attention.k", "attention.v", "attention.k_norm"):
            module = family.names.get(role, CANONICAL[role]).format(layer=number)
            if name.startswith(f"{module}."):
                return True
    return False


def disk_name(config: ModelConfig, role: str) -> str:
    """Build the name on disk of the weight of a role outside the layers."""
    return FAMILIES[config.architecture].names.get(role, CANONICAL[role]) + ".weight"


def rotary_order(
    head_dim: int, rotary_dim: int | None, *, interleaved: bool
) -> tuple[int, ...] | None:
    """Map each row of a head in canonical order to its row on disk; None if they are the same.

    Canonical heads pair each row with that half a head away (rotate-half), also with partial rotary
    positions: the first halves of the rotated rows and of the others, then the second halves.

    Args:
        rotary_dim: the dimensions of a head that are rotated; None for all.
        interleaved: whether the two rows of a pair are adjacent on disk.
    """
    rotated = rotary_dim or head_dim
    firsts = range(rotated // 2)
    seconds = range(rotated // 2, rotated)
    if interleaved:
        firsts = range(0, rotated, 2)
        seconds = range(1, rotated, 2)
    middle = rotated + (head_dim - rotated) // 2
    order = (*firsts, *range(rotated, middle), *seconds, *range(middle, head_dim))
    if order == tuple(range(head_dim)):
        return None
    return order


def _expert_forms(family: Family) -> list[ExpertForm]:
    """List the forms in which a family's experts are read, its own form first."""
    family_names = {role: family.names.get(role, CANONICAL[role]) for role in EXPERT_ROLES}
    canonical_names = {role: CANONICAL[role] for role in EXPERT_ROLES}
    forms: list[ExpertForm] = []
    if family.stacked:
        forms.append(ExpertForm(stacked=family.stacked))
    forms.append(ExpertForm(family_names))
    if canonical_names != family_names:
        forms.append(ExpertForm(canonical_names))
    if not family.stacked:
        forms.append(ExpertForm(stacked=_STACKED))
    # A dict drops the second form if both names of the gate lead to the same one, and keeps the
    # order.
    mlx_forms = dict.fromkeys(
        (
            _list_mlx_experts(family, family_names["expert.gate"]),
            _list_mlx_experts(family, canonical_names["expert.gate"]),
        )
    )
    for stacked in mlx_forms:
        forms.append(ExpertForm(stacked=stacked))
    return forms


def _list_mlx_experts(family: Family, gate: str) -> tuple[StackedExperts, ...]:
    """List the experts of a layer in mlx-lm: one module of all experts for each role. `gate` is
    the name of an expert's gate where each expert is a separate module.
    """
    # mlx-lm calls the module `switch_mlp`, except in families that stack their experts themselves.
    bank = gate.partition("experts.{expert}")[0] + ("experts" if family.stacked else "switch_mlp")
    stacked_experts = []
    for role in EXPERT_ROLES:
        module = f"{bank}.{CANONICAL[role].rpartition('.')[2]}"
        stacked_experts.append(StackedExperts(f"{module}.weight", (role,), bias=f"{module}.bias"))
    return tuple(stacked_experts)


def _list_expert_names(form: ExpertForm, layer: int, count: int) -> list[str]:
    """List the possible names of a layer's experts in a form."""
    templates = [*form.names.values()]
    templates += [stacked.name for stacked in form.stacked]
    templates += [stacked.bias for stacked in form.stacked if stacked.bias is not None]
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
    patterns = []
    for form in forms:
        for template in form.names.values():
            # `re.escape` also escapes the braces of the placeholders.
            pattern = re.escape(template).replace(r"\{layer\}", r"\d+")
            pattern = pattern.replace(r"\{expert\}", r"(\d+)")
            patterns.append(rf"(?:{pattern})\..*")
    expert_name = re.compile("|".join(patterns))
    for name in sorted(names):
        match = expert_name.fullmatch(name)
        if match is None or match.lastindex is None:
            continue
        # Python refuses to parse very long numbers; 18 digits are beyond any count of experts.
        expert = int(match[match.lastindex][:18])
        if expert >= count:
            raise CheckpointError(
                f"tensor '{name}' belongs to an expert beyond those of the config",
                path=str(path),
                found=f"expert {expert}",
                expected=f"experts 0 to {count - 1}",
                hint="the config belongs to another model",
            )


def group_stacked_experts(config: ModelConfig) -> dict[str, list[tuple[OpaqueTensor, Stack]]]:
    """Group the linears with a `Stack` of a model that is known by its tensors by the tensor that
    contains them, expert by expert.
    """
    groups: dict[str, list[tuple[OpaqueTensor, Stack]]] = defaultdict(list)
    for tensor in config.tensors or ():
        if tensor.stack is not None:
            groups[tensor.stack.name].append((tensor, tensor.stack))
    for parts in groups.values():
        parts.sort(key=lambda part: (part[1].expert or 0, part[1].first))
    return dict(groups)


def _opaque_tensors(config: ModelConfig, quantized: Collection[str]) -> list[DiskTensor]:
    """List the tensors of a model of unknown architecture: their names on disk are canonical,
    except of linears in a tensor of which none is quantized.
    """
    stacks = {}
    for name, parts in group_stacked_experts(config).items():
        if not any(tensor.module in quantized for tensor, _ in parts):
            stacks[name] = parts
    disk: dict[str, DiskTensor] = {}
    for tensor, parameter in zip(config.tensors or (), parameters(config), strict=True):
        stack = tensor.stack
        if stack is None or stack.name not in stacks:
            place = Place(parameter.name, parameter.shape)
            disk[parameter.name] = DiskTensor(
                parameter.name, parameter.shape, (place,), linear=parameter.linear
            )
        # All parts of a stack go to the position of its first part in the file.
        elif stack.name not in disk:
            built = _build_stacked_tensor(stack, stacks[stack.name])
            # A transposed weight by itself.
            if len(built.places) == 1:
                built = replace(built, linear=parameter.linear)
            disk[stack.name] = built
    return list(disk.values())


def _build_stacked_tensor(stack: Stack, parts: Sequence[tuple[OpaqueTensor, Stack]]) -> DiskTensor:
    """Describe the tensor on disk that contains all linears of `parts`."""
    places = []
    interleaved = False
    for tensor, place in parts:
        places.append(
            Place(
                name=tensor.name,
                shape=tensor.shape,
                first=place.first,
                step=place.step,
                expert=place.expert,
                transposed=place.expert is None and place.transposed,
            )
        )
        # Rows of several linears alternate where a linear's rows are not adjacent.
        interleaved = interleaved or place.step > 1
    if stack.expert is None:
        stacked = None
    else:
        stacked = StackedExperts(stack.name, (), stack.transposed, interleaved)
    return DiskTensor(stack.name, stack.shape, tuple(places), stacked)


def _orient_experts(
    tensors: Sequence[DiskTensor], shapes: Mapping[str, tuple[int, ...]]
) -> list[DiskTensor]:
    """Turn stacked experts to the orientation that the folder uses.

    Shapes show which axis comes first; a square tensor follows the other one of its layer. Encoded
    ones, which have no tensor under their own name, have outputs first.
    """
    transposed_tensors = {}
    transposed_layers = set()
    for tensor in tensors:
        if tensor.stacked is None or len(tensor.shape) != 3:
            continue
        experts, rows, columns = tensor.shape
        stacked = replace(tensor.stacked, transposed=not tensor.stacked.transposed)
        transposed_shape = (experts, columns, rows)
        transposed_tensors[tensor.name] = replace(tensor, shape=transposed_shape, stacked=stacked)
        # The shape of a square matrix does not tell its orientation.
        if rows != columns and shapes.get(tensor.name) == transposed_shape:
            transposed_layers.add(_stack_prefix(tensor.name))
    oriented = []
    for tensor in tensors:
        transposed = transposed_tensors.get(tensor.name, tensor)
        shape = shapes.get(tensor.name)
        if shape is None:
            use_transposed = tensor.stacked is not None and tensor.stacked.transposed
        else:
            use_transposed = (
                shape == transposed.shape and _stack_prefix(tensor.name) in transposed_layers
            )
        oriented.append(transposed if use_transposed else tensor)
    return oriented


def _stack_prefix(name: str) -> str:
    """Cut the common prefix of a layer's stacked tensors out of a name."""
    return name.rpartition(".")[0]


def _list_family_tensors(
    config: ModelConfig, forms: Mapping[int, ExpertForm], renamed: Collection[int] = ()
) -> list[DiskTensor]:
    """List the tensors on disk, in the order of their first parts among a model's parameters.
    `forms` are those of the experts by layer; in the layers of `renamed`, the router has its
    canonical name.
    """
    family = FAMILIES[config.architecture]

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
        if parameter.role == "router" and parameter.layer in renamed:
            return parameter.name, None
        return _build_disk_name(family, form, parameter), None

    return build_disk_tensors(config, locate_parameter, interleaved=family.interleaved_rotary)


def build_disk_tensors(
    config: ModelConfig,
    locate_parameter: Callable[[Parameter], tuple[str, StackedExperts | None]],
    *,
    interleaved: bool,
) -> list[DiskTensor]:
    """Group a model's canonical tensors into those on disk, in the order of their first parts.

    Args:
        locate_parameter: returns the name of the tensor on disk that contains a canonical one, and
            how it stores experts, if it does.
        interleaved: whether the two rows of a rotary pair are adjacent.
    """
    # Rotary dimensions may differ between layers with and without a window.
    orders = []
    for layer in range(config.num_layers):
        rope = config.rope_of(layer)
        rotary_dim = rope.rotary_dim
        head_dim = config.head_dim_of(layer)
        if config.leading_rotary and rotary_dim is not None:
            # The decoder reads the rotated dimensions like a head of their own before the others.
            order = rotary_order(rotary_dim, None, interleaved=interleaved)
            if order is not None:
                order = (*order, *range(rotary_dim, head_dim))
            orders.append(order)
            continue
        if rope.type == "proportional":
            # The decoder reads such heads as they are on disk.
            rotary_dim = None
        orders.append(rotary_order(head_dim, rotary_dim, interleaved=interleaved))
    groups: dict[str, tuple[StackedExperts | None, list[Parameter]]] = {}
    for parameter in parameters(config):
        name, stacked = locate_parameter(parameter)
        groups.setdefault(name, (stacked, []))[1].append(parameter)
    tensors = []
    for name, (stacked, parts) in groups.items():
        part_layer = parts[0].layer
        order = None if part_layer is None else orders[part_layer]
        tensors.append(_disk_tensor(name, stacked, parts, order))
    return tensors


def _build_disk_name(family: Family, form: ExpertForm | None, parameter: Parameter) -> str:
    """Build the name on disk of a tensor that does not contain all experts."""
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
    """Describe the tensor on disk that contains some canonical ones; `order` is that of its layer's
    rotary rows, see `rotary_order`.
    """
    if stacked is None:
        rows = 0
        places = []
        for part in parts:
            # Norms of queries and keys multiply rotated dimensions, so their weights are permuted
            # with the rows.
            rotary = part.rotary or part.role in ("attention.q_norm", "attention.k_norm")
            places.append(Place(part.name, part.shape, rows, head_order=order if rotary else None))
            rows += part.shape[0]
        # A tensor with a single part may have any number of dimensions, even none.
        if len(parts) == 1:
            shape = parts[0].shape
        else:
            shape = (rows, *parts[0].shape[1:])
        linear = parts[0].linear if parts[0].is_linear_weight else None
        return DiskTensor(name, shape, tuple(places), linear=linear)
    expert_parts = [part for part in parts if part.expert == parts[0].expert]
    firsts = {}
    rows = 0
    for number, part in enumerate(expert_parts):
        firsts[part.role] = number if stacked.interleaved else rows
        rows += part.shape[0]
    step = len(expert_parts) if stacked.interleaved else 1
    places = []
    for part in parts:
        places.append(
            Place(
                name=part.name,
                shape=part.shape,
                first=firsts[part.role],
                step=step,
                expert=part.expert,
            )
        )
    matrix: tuple[int, ...] = (rows, *parts[0].shape[1:])
    experts = len(parts) // len(expert_parts)
    # Biases are vectors, which have no orientation.
    if len(matrix) == 1:
        unoriented = replace(stacked, transposed=False)
        return DiskTensor(name, (experts, rows), tuple(places), unoriented)
    if stacked.transposed:
        matrix = matrix[::-1]
    return DiskTensor(name, (experts, *matrix), tuple(places), stacked)
