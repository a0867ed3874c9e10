"""A Hugging Face folder, and what it should hold according to its config.json."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import DiskTensor, found_tensors
from quantkit.architectures.families import families
from quantkit.architectures.families.opaque import Hints, infer_roles_by_name, opaque_config
from quantkit.architectures.names import is_embedding
from quantkit.base.json_values import Settings, format_value
from quantkit.doctor.folder import Folder
from quantkit.doctor.side_files import CONFIG
from quantkit.errors import CheckpointError, QuantkitError
from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.codecs.layout import Claims
from quantkit.formats.codecs.table import METHODS, describe_modules
from quantkit.formats.codecs.vllm import find_linear_shapes
from quantkit.formats.containers.hf_settings import SETTINGS

_UNNAMED = ("load_in_4bit", "load_in_8bit", "quant_algo", "producer", "quantization")
"""Keys of known settings that do not name their method."""
_OTHER_EXPERTS = re.compile(r".*\.switch_mlp\..*")  # as MLX stacks them
_WITHOUT_HEAD = re.compile(
    r".*(?<!LMHead)Model|.*For(SequenceClassification|TokenClassification|QuestionAnswering|Reward)"
)


class View:
    """The modules and tensors of a folder, and those that its config calls for.

    Attributes:
        stored: all tensors of the folder.
        config: of the model; None for an unknown family, and for an invalid config.
        problem: why there is no config.
        expected: the tensors that the model needs, by name; empty for an unknown family.
        on_disk: the tensor on disk that holds each canonical one.
        linears: the modules that may be quantized, and the shapes [O, I] of their weights; empty if
            unknown.
        method: of the quantization; None for floats, and for unknown methods.
        coded: what lies on disk for the modules whose weights are stored as codes.
        claims: what the config says of each linear.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.stored: Mapping[str, StoredTensor] = folder.stored
        self.problem: QuantkitError | None = None
        self.config = self._model()
        self.method = METHODS.get(folder.method or "")
        self.coded = describe_modules(
            folder.stored, self.method, has_method=folder.method is not None
        )
        self.expected = self._find_expected_tensors()
        self.linears = self._find_linears()
        self.claims = self._read_claims()
        self.on_disk = {
            place.name: tensor for tensor in self.expected.values() for place in tensor.places
        }

    @property
    def has_known_tensors(self) -> bool:
        """Return whether the tensors that the model needs are known."""
        return bool(self.expected)

    @property
    def without_head(self) -> str | None:
        """Return the class that the config names, if it is a model without a head, whose tensors
        have other names.
        """
        stated = self.folder.config.get("architectures")
        if isinstance(stated, list) and stated:
            name = stated[0]
        else:
            name = None
        if isinstance(name, str) and _WITHOUT_HEAD.fullmatch(name):
            return name[:60]
        return None

    @property
    def is_read(self) -> bool:
        """Return whether models of its family are read by quantkit's jobs."""
        return (
            self.has_known_tensors
            and self.config is not None
            and families()[self.config.architecture].runs
        )

    def rows_of_embedding(self) -> int | None:
        """Return the number of rows of the embedding, from its tensors."""
        for name, tensor in self.stored.items():
            module, _, leaf = name.rpartition(".")
            if (
                is_embedding(module)
                and leaf in ("weight", "weight_packed", "weight_shape")
                and tensor.shape
            ):
                if leaf == "weight_shape":
                    return None
                return tensor.shape[0]
        return None

    def scheme(self, module: str) -> tuple[tuple[object, ...], str]:
        """Return the scheme of a weight, from its tensors and from the config: for comparisons, and
        for messages.
        """
        if (coded := self.coded.get(module)) is None:
            return ("floats",), "floats"
        claim = self.claims.modules.get(module)
        if claim is not None and claim.bits != coded.bits:
            bits = f" ({claim.bits} bits by the config)"
        else:
            bits = ""
        return (*coded.signature, claim and claim.bits), coded.scheme + bits

    def all_linears(self) -> dict[str, tuple[int, ...] | None]:
        """Return the shapes of all modules that runtimes may build as linears, by name; None if a
        shape is not known.
        """
        coded = {module: self.linears.get(module) for module in self.coded}
        return find_linear_shapes(
            self.stored, {**self.linears, **coded}, str(self.folder.config.get("model_type"))
        )

    @functools.cached_property
    def hints(self) -> Hints:
        """Return the kinds of modules, by the names and shapes of the tensors."""
        return Hints.of(
            self.folder.config, {name: tensor.shape for name, tensor in self.stored.items()}
        )

    def _read_claims(self) -> Claims:
        folder = self.folder
        method = self.method
        if folder.kind == "file":
            return Claims()  # without a config
        if folder.settings is None:
            return Claims(certain=True)
        modules = list(dict.fromkeys([*self.linears, *self.coded]))
        if method is not None:
            try:
                return method.claims(
                    Settings(folder.settings, folder.root / CONFIG, SETTINGS), modules, self.coded
                )
            except CheckpointError as error:
                return Claims(
                    problems=(
                        f"{error.problem}: found {error.found}" if error.found else error.problem,
                    )
                )
        stated = folder.settings.get("quant_method")
        known = isinstance(stated, str) or any(folder.settings.get(key) for key in _UNNAMED)
        if known:
            return Claims()
        return Claims(problems=(f"quant_method is {format_value(stated)}",))

    def _model(self) -> ModelConfig | None:
        raw = self.folder.config
        family = families().get(str(raw.get("model_type")))
        if not raw or family is None or self.folder.kind == "file":
            return None
        try:
            # other rules compare ids of tokens with the vocabulary
            without = {**raw, "bos_token_id": None, "eos_token_id": None}
            return family.read(Settings(without, self.folder.root / CONFIG))
        except QuantkitError as error:
            self.problem = error
            return None

    def _find_expected_tensors(self) -> dict[str, DiskTensor]:
        if (
            self.config is None
            or self.without_head
            or any(_OTHER_EXPERTS.fullmatch(name) for name in self.stored)
        ):
            return {}
        shapes = {name: tensor.shape for name, tensor in self.stored.items()}
        try:
            found = found_tensors(self.config, shapes, self.folder.root)
        except CheckpointError as error:
            self.problem = error
            return {}
        return {tensor.name: tensor for tensor in found}

    def _find_linears(self) -> dict[str, tuple[int, ...] | None]:
        if self.expected:
            linears: dict[str, tuple[int, ...] | None] = {}
            for one in self.expected.values():
                if one.quantizable:
                    linears[one.module] = one.shape
            return linears
        floats = {name: (one.shape, str(one.dtype)) for name, one in self.stored.items()}
        tensors = opaque_config(self.folder.config, floats).tensors or ()
        roles = infer_roles_by_name(self.folder.config, tensors)
        own = {
            tensor.module: tensor.shape
            for tensor in tensors
            if roles.get(tensor.name, ("",))[0] in ("linear", "recurrent")
        }
        return {**own, **{module: None for module, one in self.coded.items() if one.layout}}
