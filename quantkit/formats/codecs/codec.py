"""The interfaces of codecs: they read and write one quantized linear, and translate the settings
of a folder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, cast

from quantkit.base.json_values import Settings
from quantkit.errors import NotRepresentableError, UnsupportedError
from quantkit.files.tensor_file import StoredTensor, TensorFile
from quantkit.formats.codecs.layout import Claims
from quantkit.formats.codecs.raw_module import RawModule
from quantkit.tensors.dtypes import DType
from quantkit.tensors.late import qtensor, torch
from quantkit.tensors.scheme import EMBEDDING_SCHEME, Codes, QuantScheme, Scales
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

Weight: TypeAlias = "qtensor.QuantTensor | torch.Tensor"
Schemes: TypeAlias = Mapping[str, QuantScheme]
"""The scheme of each quantized module."""
DAMAGED_FILE = "a weight file is missing or damaged; download it again"
FLOAT_MODEL = "start from the float model"
Runtime = Literal["vllm", "transformers", "llama.cpp", "mlx"]
"""A program that loads models."""
Reader: TypeAlias = Runtime | Literal["gptqmodel"]
"""A program that loads the folders of a method, for notes."""


@dataclass(frozen=True)
class Reason:
    """Why a tensor cannot be stored exactly: the text of an error.

    Attributes:
        scale_types: the float types to which its scales can be rounded, one after the other, so
            that it can be stored; none if the reason is not its scales.
    """

    problem: str
    found: object = None
    expected: object = None
    scale_types: tuple[DType, ...] = ()

    def error(self, name: str, method: str) -> NotRepresentableError:
        return NotRepresentableError(
            f"tensor '{name}' cannot be held exactly as {method}: {self.problem}",
            found=self.found,
            expected=self.expected,
            hint="choose another format or scheme",
            by_scales=bool(self.scale_types),
        )


NO_EMBEDDING = Reason(
    "the format quantizes only linear layers, and this is the embedding",
    expected="an unquantized embedding",
)


def exact_scale(scale: torch.Tensor, dtype: DType) -> torch.Tensor | Reason:
    """Convert scales to another float type, if it has all of them; every type has NaN and Inf."""
    result = scale.to(dtype.torch)
    # NaN is equal to nothing, so it needs a comparison of its own; Inf is equal to itself.
    lost = ~((result.float() == scale.float()) | (result.isnan() & scale.isnan()))
    if not lost.any():
        return result
    first = f"{scale[lost][0].item():.9g}"
    return Reason(f"a scale is not representable in {dtype}", first, f"{dtype} scales", (dtype,))


def make_unread_settings_error(
    settings: Settings,
    problem: str,
    found: object = None,
    expected: object = None,
    hint: str | None = None,
) -> UnsupportedError:
    """Return the error for settings that quantkit does not read."""
    return UnsupportedError(problem, path=settings.path, found=found, expected=expected, hint=hint)


class HoldsCodes(Protocol):
    """Encodes codes for storage."""

    def misfit(self, shape: tuple[int, ...]) -> Reason | None:
        """Explain why no weight of a shape [O, I] can be stored; None if one can."""
        ...

    def encode(self, value: qtensor.QuantTensor) -> Any | Reason:
        """Encode a weight for storage, or explain why there is no exact form."""
        ...


class ReadCodec(Protocol):
    """Reads the weight of one module: its tensors, and what they mean."""

    @property
    def scheme(self) -> QuantScheme | None:
        """Return the scheme of its codes, as the settings state it; None for floats."""
        ...

    def spec(self, raw: RawModule, expected: TensorSpec) -> TensorSpec:
        """Describe the weight of a module, from the headers of its tensors and from the small ones
        among them (zero points, offsets, group indices): codes of a scheme, or floats.

        Args:
            expected: the weight [O, I] of the architecture, in the model's float type; if the
                tensors differ, they decide.

        Raises:
            CheckpointError, UnsupportedError: if a tensor is missing, or its shape does not fit the
                codec.
        """
        ...

    def parts(self, raw: RawModule, spec: TensorSpec) -> list[StoredTensor]:
        """List the tensors on disk of a weight, with optional ones."""
        ...

    def decode(self, raw: RawModule, spec: TensorSpec, part: TensorSlice | None = None) -> Weight:
        """Read the weight, or some of its rows or columns; no more than necessary is read.

        Raises:
            CheckpointError: if the tensors contradict each other.
            RequestError: see `QuantTensor.columns`.
        """
        ...


class Codec(ReadCodec, HoldsCodes, Protocol):
    """Reads and writes the weight of one module."""

    def list_stored_tensors(self, spec: TensorSpec) -> list[StoredTensor]:
        """List the tensors that a weight occupies, in the order they are written."""
        ...

    def encode(self, value: qtensor.QuantTensor) -> list[torch.Tensor] | Reason:
        """Encode a weight as the tensors of `list_stored_tensors`, in its order; codes, scales and
        zero points do not change.
        """
        ...


class GroupedCodec:
    """Decodes any part of a weight from rows, or from groups of columns that are stored
    together.
    """

    def misfit(self, shape: tuple[int, ...]) -> Reason | None:
        return None

    def decode(self, raw: RawModule, spec: TensorSpec, part: TensorSlice | None = None) -> Weight:
        columns = spec.shape[-1]
        if part is None or part.axis == 0:
            return self.read(raw, spec, part, (0, columns))
        start, stop = part.ranges[0]
        unit = self.columns_per_unit(raw, spec)
        # Words and groups cannot be cut: read all columns that they cover, and drop the margins.
        first = start // unit * unit
        last = min(-(-stop // unit) * unit, columns)
        value = self.read(raw, spec, None, (first, last))
        if (first, last) == (start, stop):
            return value
        margins_removed = TensorSlice(1, ((start - first, stop - first),))
        inside = margins_removed.of_weight(value)
        if spec.scheme is not None:
            return inside
        # A slice of columns is a view whose rows are not adjacent in memory.
        return cast("torch.Tensor", inside).contiguous()

    def columns_per_unit(self, raw: RawModule, spec: TensorSpec) -> int:
        """Return how many columns are stored together: whole words, and whole groups."""
        raise NotImplementedError

    def read(
        self, raw: RawModule, spec: TensorSpec, rows: TensorSlice | None, columns: tuple[int, int]
    ) -> Weight:
        """Read some rows with all columns, or all rows with some groups of columns."""
        raise NotImplementedError

    @staticmethod
    def columns_slice(
        rows: TensorSlice | None, start: int, stop: int, count: int
    ) -> TensorSlice | None:
        """Select what to read of a matrix with `count` columns: some rows, or some columns; None
        for all.
        """
        if (start, stop) == (0, count):
            return rows
        return TensorSlice(1, ((start, stop),))


class ReadAsFloats:
    """Decodes the codes of another codec to floats, for a tensor that models have in floats
    only, such as a router.
    """

    scheme = None

    def __init__(self, codec: ReadCodec) -> None:
        self.codec = codec
        # The other codec needs the description of the codes again; callers get that of the floats.
        self._coded: TensorSpec | None = None

    def spec(self, raw: RawModule, expected: TensorSpec) -> TensorSpec:
        result = self.codec.spec(raw, expected)
        if result.scheme is None:
            return result
        self._coded = result
        return TensorSpec(result.name, result.shape, expected.dtype, stored_as=str(result.scheme))

    def parts(self, raw: RawModule, spec: TensorSpec) -> list[StoredTensor]:
        return self.codec.parts(raw, self._coded or spec)

    def decode(
        self, raw: RawModule, spec: TensorSpec, part: TensorSlice | None = None
    ) -> torch.Tensor:
        value = self.codec.decode(raw, self._coded or spec, part)
        if isinstance(value, qtensor.QuantTensor):
            return value.floats(spec.dtype.torch)
        return value


class CodeFormat:
    """A format of quantized weights.

    Attributes:
        name: its name for ``--to``.
        schemes: the schemes to which a weight is rounded if the format cannot store it exactly;
            none if it is only read.
        scale_dtype: the type of all scales; None if they may have the model's.
        scales: how scales may be held in what is quantized for it.
        carried_scales: how the scales of a source in the same format may be held in addition.
        embeddings: what an embedding may be quantized to, if it may be; the first one by default.
        codes: what codes may be.
    """

    name: str
    schemes: tuple[QuantScheme, ...] = ()
    scale_dtype: DType | None = None
    scales: frozenset[Scales] = frozenset({Scales.FLOATS})
    carried_scales: frozenset[Scales] = frozenset()
    embeddings: tuple[QuantScheme, ...] = (EMBEDDING_SCHEME,)
    codes: frozenset[Codes] = frozenset({Codes.INTEGERS})

    def explain_unsupported_kinds(
        self, scheme: QuantScheme, *, is_carried: bool = False
    ) -> Reason | None:
        """Explain why the format cannot represent a scheme's kind of codes and scales; None if it
        can. For `is_carried` see `choose_codec`.
        """
        if scheme.codes not in self.codes:
            if scheme.codes is Codes.TABLE:
                problem = "its codes would stand for the numbers of a table"
            else:
                problem = "its quantized weights are small floats"
            return Reason(
                problem,
                found=scheme,
                expected=", ".join(map(str, self.schemes)),
            )
        if scheme.scales in self.scales:
            return None
        if is_carried and scheme.scales in self.carried_scales:
            return None
        return Reason(
            "its scales are those of GGUF's blocks",
            found=scheme,
            expected=", ".join(map(str, self.schemes)),
        )

    def codec(self, scheme: QuantScheme, *, embedding: bool = False) -> HoldsCodes | Reason:
        """Choose the codec of linears, or of an embedding, in a scheme with kinds of codes and
        scales that the format has, see `choose_codec`.
        """
        return Reason("the format can only be read, not written")


def choose_codec(
    codes: CodeFormat, scheme: QuantScheme, *, embedding: bool = False, is_carried: bool = False
) -> HoldsCodes | Reason:
    """Choose the codec of a format for linears in a scheme, or for an embedding; or explain why it
    has no such codes or scales.

    Args:
        is_carried: whether the codes are those of a source, not what `quantize` makes.
    """
    reason = codes.explain_unsupported_kinds(scheme, is_carried=is_carried)
    return reason or codes.codec(scheme, embedding=embedding)


class QuantMethod(CodeFormat):
    """A method of quantization: its settings in config.json state the codecs of modules.

    Attributes:
        name: ``quant_method`` in config.json.
        keys: of config.json under which its settings are written.
        joins_experts: whether all experts of a layer are one module for each role.
        read_as_floats: whether all its weights are read as floats, see `dequantized`.
        runtimes: those of vLLM, transformers and mlx-lm that load it.
    """

    keys: tuple[str, ...] = ("quantization_config",)
    joins_experts = False
    read_as_floats = False
    runtimes: tuple[Runtime, ...] = ("vllm", "transformers")

    def claims(self, settings: Settings, modules: Iterable[str], coded: Collection[str]) -> Claims:
        """Determine what settings state of each module, whether or not quantkit reads it.

        Args:
            modules: all that may be quantized.
            coded: those whose weights are stored as codes.

        Raises:
            CheckpointError: if a value has the wrong type or is out of range.
        """
        return Claims()

    def resolve(self, settings: Settings) -> tuple[str, Settings]:
        """Translate settings for the method that reads them: its name, and the settings in its
        terms; see `read_settings`.
        """
        return self.name, settings

    def read_settings(
        self, settings: Settings, modules: Iterable[str], stored: Collection[str]
    ) -> Mapping[str, ReadCodec]:
        """Choose the codec of each module that is quantized.

        Args:
            settings: from config.json, or from a file next to it.
            modules: all that may be quantized.
            stored: the names of all tensors on disk; empty if only the config is read.

        Raises:
            UnsupportedError: for what quantkit does not read.
            CheckpointError: for settings of the wrong type, or that contradict each other.
        """
        return {}

    def read_weight_shapes(
        self,
        settings: Settings,
        stored: Mapping[str, StoredTensor],
        files: Mapping[str, TensorFile],
    ) -> dict[str, tuple[int, ...]]:
        """Read the shapes [O, I] of the weights of quantized modules from their tensors, for a
        model of unknown architecture; none of modules whose tensors do not show it.

        Args:
            settings: see `read_settings`.
            stored, files: a folder's tensors, and their files.
        """
        return {}

    def explain_unread_model(self, model_type: object) -> Reason | None:
        """Explain why no reader loads a model for which there is no decoder here, by its
        ``model_type``; None if one may.
        """
        return None

    def write_settings(
        self, schemes: Schemes, modules: Mapping[str, int], *, every: bool = True
    ) -> dict[str, Any]:
        """Build the settings of a folder.

        Args:
            schemes: of the modules that are quantized.
            modules: all linear modules, and the number of inputs of each; 0 if unknown, for one
                without a scheme.
            every: whether these are all linear modules that its readers know.

        Raises:
            UnsupportedError: if the settings cannot state these schemes.
        """
        raise UnsupportedError(
            f"{self.name} can only be read, not written", hint="write compressed-tensors"
        )

    def list_quantized(self, modules: Iterable[str]) -> dict[str, Any]:
        """Build settings that list the quantized modules, for readers of models of which some
        linears are floats; none if readers need no list.
        """
        return {}

    def side_files(self, settings: Mapping[str, Any]) -> dict[str, bytes]:
        """Build the files next to config.json that repeat the settings."""
        return {}

    def codec(self, scheme: QuantScheme, *, embedding: bool = False) -> Codec | Reason:
        return Reason("the format can only be read, not written")

    def readers(
        self, schemes: Mapping[str, QuantScheme | None], *, without: Collection[Reader] = ()
    ) -> str:
        """Name the other programs that load a folder, with commas; notes follow a semicolon.

        Args:
            schemes: of linear modules; None for floats.
            without: the programs to leave out.
        """
        return "nothing"
