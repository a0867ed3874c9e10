"""A Hugging Face folder, and what it should hold according to its config.json."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import DiskTensor, match_stored_tensors
from quantkit.architectures.families import FAMILIES
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
# MLX stacks experts under these names.
_OTHER_EXPERTS = re.compile(r".*\.switch_mlp\..*")
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
        self.on_disk: dict[str, DiskTensor] = {}
        for tensor in self.expected.values():
            for place in tensor.places:
                self.on_disk[place.name] = tensor

    @property
    def has_known_tensors(self) -> bool:
        """Return whether the tensors that the model needs are known."""
        return bool(self.expected)

    @property
    def without_head(self) -> str | None:
        """Return the class that the config names, if it is a model without a head, whose tensors
        have other names.
        """
        architectures = self.folder.config.get("architectures")
        if not isinstance(architectures, list) or not architectures:
            return None
        name = architectures[0]
        if isinstance(name, str) and _WITHOUT_HEAD.fullmatch(name):
            return name[:60]
        return None

    @property
    def is_read(self) -> bool:
        """Return whether models of its family are read by quantkit's jobs."""
        return (
            self.has_known_tensors
            and self.config is not None
            and FAMILIES[self.config.architecture].runs
        )

    def rows_of_embedding(self) -> int | None:
        """Read the number of rows of the embedding from its tensors' shapes."""
        for name, tensor in self.stored.items():
            module, _, leaf = name.rpartition(".")
            if (
                is_embedding(module)
                and leaf in ("weight", "weight_packed", "weight_shape")
                and tensor.shape
            ):
                # The values of this tensor are the shape, and they are not in the header.
                if leaf == "weight_shape":
                    return None
                return tensor.shape[0]
        return None

    def scheme(self, module: str) -> tuple[tuple[object, ...], str]:
        """Describe the scheme of a weight, from its tensors and the config: for comparisons, and in
        words.
        """
        coded = self.coded.get(module)
        if coded is None:
            return ("floats",), "floats"
        claim = self.claims.modules.get(module)
        if claim is not None and claim.bits != coded.bits:
            bits = f" ({claim.bits} bits by the config)"
        else:
            bits = ""
        return (*coded.signature, claim and claim.bits), coded.scheme + bits

    def all_linears(self) -> dict[str, tuple[int, ...] | None]:
        """Find the shapes of all modules that runtimes may build as linears, by name; None if a
        shape is not known.
        """
        linears = dict(self.linears)
        # A module that only its codes show has no known shape.
        for module in self.coded:
            linears.setdefault(module)
        return find_linear_shapes(self.stored, linears, str(self.folder.config.get("model_type")))

    @functools.cached_property
    def hints(self) -> Hints:
        """Infer the kinds of modules from the names and shapes of the tensors."""
        return Hints.of(
            self.folder.config, {name: tensor.shape for name, tensor in self.stored.items()}
        )

    def _read_claims(self) -> Claims:
        folder = self.folder
        method = self.method
        # A single file has no config.
        if folder.kind == "file":
            return Claims()
        if folder.settings is None:
            return Claims(certain=True)
        modules = list(dict.fromkeys([*self.linears, *self.coded]))
        if method is not None:
            settings = Settings(folder.settings, folder.root / CONFIG, SETTINGS)
            try:
                return method.claims(settings, modules, self.coded)
            except CheckpointError as error:
                if error.found:
                    problem = f"{error.problem}: found {error.found}"
                else:
                    problem = error.problem
                return Claims(problems=(problem,))
        # A method that is not read here may still be valid: nothing is claimed of its modules.
        method_name = folder.settings.get("quant_method")
        if isinstance(method_name, str):
            return Claims()
        if any(folder.settings.get(key) for key in _UNNAMED):
            return Claims()
        return Claims(problems=(f"quant_method is {format_value(method_name)}",))

    def _model(self) -> ModelConfig | None:
        raw = self.folder.config
        family = FAMILIES.get(str(raw.get("model_type")))
        if not raw or family is None or self.folder.kind == "file":
            return None
        try:
            # Rules about text compare ids of tokens with the vocabulary.
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
            tensors = match_stored_tensors(self.config, shapes, self.folder.root)
        except CheckpointError as error:
            self.problem = error
            return {}
        return {tensor.name: tensor for tensor in tensors}

    def _find_linears(self) -> dict[str, tuple[int, ...] | None]:
        linears: dict[str, tuple[int, ...] | None] = {}
        if self.expected:
            for expected_tensor in self.expected.values():
                if expected_tensor.quantizable:
                    linears[expected_tensor.module] = expected_tensor.shape
            return linears
        # Nothing says which tensors an unknown family has: names and shapes tell its linears.
        floats: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, stored_tensor in self.stored.items():
            floats[name] = (stored_tensor.shape, str(stored_tensor.dtype))
        tensors = opaque_config(self.folder.config, floats).tensors or ()
        roles = infer_roles_by_name(self.folder.config, tensors)
        for tensor in tensors:
            role = roles.get(tensor.name, ("",))[0]
            if role in ("linear", "recurrent"):
                linears[tensor.module] = tensor.shape
        for module, coded in self.coded.items():
            if coded.layout:
                linears[module] = None
        return linears
