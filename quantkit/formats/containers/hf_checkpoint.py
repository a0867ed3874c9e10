"""Reading Hugging Face folders: canonical tensors from those that the family has on disk; codecs
read quantized modules.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.architectures.config import OpaqueTensor
from quantkit.architectures.disk import (
    DiskTensor,
    Place,
    describe_unread_experts,
    disk_name,
    is_unread,
    match_stored_tensors,
)
from quantkit.architectures.families import (
    FAMILIES,
    config_from_hf,
    config_to_hf,
    list_ignored_rope_settings,
)
from quantkit.architectures.names import is_embedding
from quantkit.architectures.topology import parameters
from quantkit.base.json_values import Settings, format_value, read_settings
from quantkit.base.late import LateModule
from quantkit.base.messages import Message, Option
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files.source import SourceFile
from quantkit.files.tensor_file import StoredTensor, TensorFile, same_tensor
from quantkit.formats.checkpoint import require_tensors, require_unquantized, schemes
from quantkit.formats.codecs.codec import QuantMethod, ReadAsFloats, ReadCodec, Runtime, Weight
from quantkit.formats.codecs.compressed_floats import SmallFloats, float8_codes
from quantkit.formats.codecs.compressed_tensors import (
    CompressedTensors,
    is_read_by_quantkit_only,
)
from quantkit.formats.codecs.dequantized import (
    Float64Tensor,
    describe_float_weights,
    narrow_float64,
    replace_quantized_tensors,
)
from quantkit.formats.codecs.float_methods import uses_small_floats
from quantkit.formats.codecs.layouts import SCALE
from quantkit.formats.codecs.raw_module import RawModule
from quantkit.formats.codecs.small_floats import (
    DequantizedTensor,
    Float8Weight,
    Mxfp4Codes,
    Mxfp4Weight,
)
from quantkit.formats.containers.hf_files import read_headers
from quantkit.formats.containers.hf_parts import Decodes, decode_place, read_floats, share
from quantkit.formats.containers.hf_settings import (
    NOT_CARRIED,
    SETTINGS,
    find_settings,
    read_codecs,
    read_weight_layout,
    without_settings,
)
from quantkit.formats.folder import QUANTIZED_ELSEWHERE
from quantkit.formats.kv_cache import KvCache, extract_kv_cache, states_scheme
from quantkit.tensors.dtypes import FLOATS, DType
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

# Only other methods, and models without a family, need these.
if TYPE_CHECKING:
    from quantkit.architectures import text_part as text_parts
    from quantkit.architectures.families import opaque
    from quantkit.formats.codecs import mlx, vllm
else:
    mlx = LateModule("quantkit.formats.codecs.mlx")
    vllm = LateModule("quantkit.formats.codecs.vllm")
    opaque = LateModule("quantkit.architectures.families.opaque")
    text_parts = LateModule("quantkit.architectures.text_part")


class HFCheckpoint:
    """A Hugging Face folder, read lazily."""

    format = layout = "hf"

    def __init__(
        self,
        path: Path,
        kind: str,
        methods: Mapping[str, QuantMethod],
        *,
        tensors_only: bool = False,
        text_part: bool = False,
        floats_as: DType | None = None,
    ) -> None:
        """Open a folder's ``safetensors`` or ``bin`` weights; headers only.

        Args:
            methods: of quantization that are read, by ``quant_method``.
            tensors_only: whether to accept any tensors, of whatever architecture.
            text_part: whether to take the text part of a model that also reads images alone.
            floats_as: see `Container.open`.

        Raises:
            CheckpointError: if files are missing, damaged or contradict each other.
            UnsupportedError: for unknown architectures and quantization schemes.
        """
        self.path = path
        self.notes: list[str] = []
        self._requested_floats = floats_as
        self._config_path = path / "config.json"
        settings = read_settings(self._config_path)
        raw = find_settings(settings, None if tensors_only else path)
        self._stated_config: Mapping[str, Any] = raw
        self._text: text_parts.TextNames | None = None
        # Of a model that is known by its tensors only.
        self._coded_modules: frozenset[str] = frozenset()
        self._settings = [SourceFile(self._config_path)]
        self._stored: dict[str, StoredTensor] = {}
        self._files: dict[str, TensorFile] = {}
        self._home: dict[str, TensorFile] = {}
        self.kv_cache: KvCache | None = None
        self.extra_config: Mapping[str, Any]
        if tensors_only:
            self._read_headers(kind, derived=True)
            self._take_tensors(raw, settings, methods)
        else:
            if text_part and text_parts.text_family(raw) is not None:
                raw = self._take_text_part(raw, kind)
            self.config = config_from_hf(raw, self._config_path)
            if self._text is not None:
                self.config = replace(self.config, media_tokens=text_parts.media_tokens(settings))
            for ignored_rope_setting in list_ignored_rope_settings(raw):
                self.notes.append(f"{self._config_path}: {ignored_rope_setting}")
            written_keys = set(config_to_hf(self.config)) | NOT_CARRIED
            extra_config: dict[str, Any] = {}
            for key, value in raw.items():
                if key not in written_keys:
                    extra_config[key] = value
            self.extra_config = extra_config
            if self._text is None:
                self._read_headers(kind)
                self._leave_out_prediction(is_run=text_part)
                self._take_head_for_embedding()
                self._take_kv_cache(raw)
            if raw.get("dtype") is None and raw.get("torch_dtype") is None:
                dtypes = {tensor.dtype for tensor in self._stored.values()}
                if len(dtypes) == 1 and dtypes <= {*FLOATS}:
                    self.config = self.config.with_dtype(dtypes.pop().value)
            self._drop_unread_tensors()
            # After the config's float type is settled: dequantized weights are rounded to it.
            self._dequantize(raw)
        tensors = {tensor.name: tensor for tensor in self._found_tensors()}
        # A model that is known by its tensors only has tensors of any dtype, which are copied.
        if not tensors_only:
            for note in narrow_float64(tensors, self._stored, self._home, self._floats_as):
                self.notes.append(Message(f"{self.path}: ", note))
        self._modules = {name.rpartition(".")[0] for name in self._stored}
        modules = {}
        for name, tensor in tensors.items():
            if self._may_have_codec(tensor):
                modules[tensor.module] = name
        self._method, codecs = read_codecs(raw, modules, self._config_path, methods, self._stored)
        if self.kv_cache is not None:
            has_dequantized = any(
                isinstance(home, DequantizedTensor) for home in self._home.values()
            )
            is_compressed_tensors = isinstance(self._method, CompressedTensors)
            rewritable = is_compressed_tensors and not has_dequantized
            self.kv_cache = replace(self.kv_cache, rewritable=rewritable)
        self._codecs: dict[str, ReadCodec] = {}
        for module, codec in codecs.items():
            tensor = tensors[modules[module]]
            # Other tensors, such as routers, are computed in floats.
            keeps_codes = (
                tensor.quantizable
                or tensor.stacked is not None
                or not self.config.runnable
                or is_embedding(module)
            )
            # There are no kernels for small floats.
            if codec.scheme is not None and codec.scheme.of_small_floats:
                keeps_codes = False
            self._codecs[tensor.name] = codec if keeps_codes else ReadAsFloats(codec)
        # Before the stored tensors are compared with those of the config, which has no such head.
        self._drop_tied_head()
        self._disk_specs = self._join_coded(tensors)
        if tensors_only:
            self._require_unquantized(raw.get(SETTINGS))
        else:
            shapes = {name: tensor.shape for name, tensor in tensors.items()}
            require_tensors(self._disk_specs, shapes, path)
        self._place(tensors.values())

    def _found_tensors(self) -> list[DiskTensor]:
        """Derive the tensors that the folder should contain, by their names on disk."""
        shapes = {name: tensor.shape for name, tensor in self._stored.items()}
        text = self._text
        if text is None:
            return match_stored_tensors(self.config, shapes, self.path)
        # Families are described by the names of a model of text alone.
        plain_shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes.items():
            plain_name = text.plain(name)
            if plain_name is not None:
                plain_shapes[plain_name] = shape
        disk_tensors: list[DiskTensor] = []
        for tensor in match_stored_tensors(self.config, plain_shapes, self.path):
            disk_tensors.append(text.on_disk(tensor))
        return disk_tensors

    def _take_text_part(self, raw: Mapping[str, Any], kind: str) -> dict[str, Any]:
        """Leave out all tensors of other parts, and extract the config.json of the text part."""
        self._read_headers(kind)
        self._text = text = text_parts.TextNames.of(self._stored, self.path)
        other_names = [name for name in self._stored if text.plain(name) is None]
        for name in other_names:
            del self._stored[name]
            del self._files[name]
        note = f"only the text part of {format_value(raw['model_type'])} is run, without images"
        self.notes.append(Message(f"{self.path}: ", note))
        return {
            **text_parts.text_settings(raw, self._config_path),
            "tie_word_embeddings": text_parts.is_tied(raw, text),
        }

    def with_codes(self) -> HFCheckpoint:
        """Copy this checkpoint to one that reads all codes of compressed-tensors and of MLX, and
        MXFP4 of gpt-oss, as such; see `Container.with_codes`.
        """
        codecs: dict[str, ReadCodec] = {}
        outdated_notes: set[str] = set()
        if isinstance(self._method, CompressedTensors):
            codecs |= dict(self.small_floats())
        elif self._method is None:
            for name, home in self._home.items():
                # The tensors of a model without a decoder keep their form in every output.
                if isinstance(home, Mxfp4Weight) and self.config.runnable:
                    codecs[name] = Mxfp4Codes(home)
            note = describe_float_weights(Mxfp4Weight.kind, len(codecs), self._floats_as)
            outdated_notes.add(f"{self.path}: {note}")
        elif isinstance(self._method, mlx.Mlx):
            for name, affine_codec in self._codecs.items():
                if isinstance(affine_codec, mlx.Affine):
                    codecs[name] = replace(affine_codec, minima=True)
        if not codecs:
            return self
        # The containers that change below are copied, the rest is shared with this checkpoint.
        coded = copy.copy(self)
        coded._codecs = dict(self._codecs)
        coded._home = dict(self._home)
        coded._disk_specs = dict(self._disk_specs)
        for tensor, _ in self._places.values():
            codec = codecs.get(tensor.name)
            if codec is None:
                continue
            for part in codec.parts(self._raw(tensor), self._disk_specs[tensor.name]):
                coded._home[part.name] = self._files[part.name]
            coded._codecs[tensor.name] = codec
            expected = TensorSpec(tensor.name, tensor.shape, self._floats_as)
            coded._disk_specs[tensor.name] = codec.spec(coded._raw(tensor), expected)
        # Notes on codes that this checkpoint reads as floats are not true of the copy.
        coded_notes = self._float_notes(coded._disk_specs)
        outdated_notes |= set(self._float_notes(self._disk_specs)) - set(coded_notes)
        coded.notes = [note for note in self.notes if note not in outdated_notes]
        return coded

    def small_floats(self) -> Iterator[tuple[str, SmallFloats]]:
        """Yield the codecs of weights that are stored in small floats and read as floats, by name
        on disk.
        """
        for name, codec in self._codecs.items():
            if isinstance(codec, ReadAsFloats) and isinstance(codec.codec, SmallFloats):
                yield name, codec.codec
        for name, home in self._home.items():
            if not isinstance(home, Float8Weight):
                continue
            weight, scale = home.parts
            small_floats = float8_codes(weight, scale)
            # compressed-tensors names the scales of FP8 weights this way.
            if small_floats is not None and scale.name == f"{name}_scale":
                yield name, small_floats

    def regroup(self, tensors: tuple[OpaqueTensor, ...]) -> None:
        """Describe a model that is known by its tensors by other tensors with the same values on
        disk: instead of one with all experts, each of their linears, and linears whose floats are
        transposed, see `Stack`.
        """
        self.config = replace(self.config, tensors=tensors)
        transposed = set[str]()
        for tensor in tensors:
            if tensor.stack is not None and tensor.stack.name == tensor.name:
                transposed.add(tensor.name)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, spec in self._disk_specs.items():
            # All formats store the codes of such a linear with outputs first.
            if name not in transposed or not self.is_coded(name):
                shapes[name] = spec.shape
        self._place(match_stored_tensors(self.config, shapes, self.path))

    def is_coded(self, name: str) -> bool:
        """Return whether a tensor on disk is stored as codes of any format."""
        return name in self._codecs or isinstance(self._home.get(name), DequantizedTensor)

    @property
    def has_codes(self) -> bool:
        """Return whether any tensor on disk is stored as codes."""
        return any(self.is_coded(tensor.name) for tensor, _ in self._places.values())

    def list_kinds_read_as_floats(self) -> list[str]:
        """List the kinds of small floats, such as FP8, that weights are stored in, each once."""
        kinds: dict[str, None] = {}
        for home in self._home.values():
            if isinstance(home, DequantizedTensor) and not isinstance(home, Float64Tensor):
                kinds[home.kind] = None
        return list(kinds)

    def _place(self, tensors: Iterable[DiskTensor]) -> None:
        self._places: dict[str, tuple[DiskTensor, Place]] = {}
        for tensor in tensors:
            for place in tensor.places:
                self._places[place.name] = (tensor, place)
        self._order = [parameter.name for parameter in parameters(self.config)]

    def names(self) -> list[str]:
        return list(self._order)

    def info(self, name: str) -> TensorSpec:
        tensor, place = self._places[name]
        stored = self._disk_specs[tensor.name]
        return TensorSpec(
            name=name,
            shape=place.shape,
            dtype=stored.dtype,
            scheme=stored.scheme,
            stored_as=stored.stored_as,
        )

    def files(self) -> list[SourceFile]:
        scales = () if self.kv_cache is None else self.kv_cache.tensors.values()
        # Many tensors share a file.
        sources = {file.source for file in (*self._files.values(), *scales)}
        return [*sorted(sources, key=lambda source: source.path), *self._settings]

    def load(self, name: str, part: TensorSlice | None = None) -> Weight:
        """Load one tensor, or a part of it."""
        tensor, place = self._places[name]
        home = self._home.get(tensor.name)
        codec: Decodes | None = self._codecs.get(tensor.name)
        # A tensor that was replaced by its floats decodes itself.
        if codec is None and isinstance(home, DequantizedTensor):
            codec = home
        if codec is not None:
            spec = self._disk_specs[tensor.name]
            return decode_place(codec, self._raw(tensor), spec, tensor, place, part)
        file = self._files[tensor.name]
        return read_floats(file, file.view(tensor.name), tensor, place, part)

    @property
    def method(self) -> str | None:
        if self._method is None or not self._codecs:
            return None
        return self._method.name

    def count_stored_bytes(self, name: str) -> int:
        tensor, place = self._places[name]
        codec = self._codecs.get(tensor.name)
        spec = self._disk_specs[tensor.name]
        home = self._home.get(tensor.name)
        if isinstance(home, DequantizedTensor):
            return share(home.nbytes, tensor, place)
        if codec is None:
            return StoredTensor(name, spec.dtype, place.shape).nbytes
        size = 0
        for stored in codec.parts(self._raw(tensor), spec):
            size += stored.nbytes
        return share(size, tensor, place)

    def readers(self) -> str:
        coded = self.with_codes()
        if self._method is None or not coded._codecs:
            if self.config.runnable:
                return "quantkit, transformers, vLLM"
            return "what runs this architecture"
        problem = vllm.describe_problems(coded._vllm_problems())
        problem_note = "" if problem is None else f"; {problem}"
        if not self.config.runnable:
            return f"what runs this architecture and {self._method.name}{problem_note}"
        linear_schemes: dict[str, QuantScheme | None] = {}
        for tensor, _ in self._places.values():
            if tensor.quantizable or tensor.name in coded._codecs:
                linear_schemes[tensor.module] = coded._disk_specs[tensor.name].scheme
        if is_read_by_quantkit_only(self._method, linear_schemes, tied=self.config.tied_embeddings):
            return "quantkit"
        unread: set[Runtime] = set()
        if problem is not None:
            unread.add("vllm")
        if describe_unread_experts(self.config, schemes(coded)):
            unread.add("transformers")
        readers = self._method.readers(linear_schemes, without=unread)
        # A note on the method comes before the note on vLLM's problem.
        other_readers, separator, method_note = readers.partition("; ")
        if not method_note:
            separator = ""
        programs = f"quantkit, {other_readers}" if other_readers else "quantkit"
        return f"{programs}{separator}{method_note}{problem_note}"

    def _vllm_problems(self) -> list[vllm.VllmProblem]:
        """List what vLLM does not load of the linears."""
        assert self._method is not None
        coded = {}
        for name, codec in self._codecs.items():
            if codec.scheme is not None:
                coded[name.removesuffix(".weight")] = self._disk_specs[name].shape
        config = self._stated_config
        shapes = vllm.find_linear_shapes(self._stored, coded, str(config.get("model_type")))
        linears = vllm.Linears.of(self._method, config.get(SETTINGS, {}), shapes, coded, config)
        return vllm.vllm_problems(linears)

    @property
    def _floats_as(self) -> DType:
        """Return the type of weights that are read as floats and stored otherwise."""
        return self._requested_floats or DType(self.config.dtype)

    def _float_notes(self, specs: Mapping[str, TensorSpec]) -> list[str]:
        """Write a note for each kind of codes that are read as floats."""
        kinds: Counter[str] = Counter()
        for name in self._codecs:
            stored_as = specs[name].stored_as
            if stored_as is not None:
                kinds[stored_as] += 1
        float_notes: list[str] = []
        for kind, count in kinds.items():
            float_notes.append(
                f"{self.path}: {count} weights in {kind} are read as {self._floats_as}"
            )
        return float_notes

    def _raw(self, tensor: DiskTensor) -> RawModule:
        return RawModule(tensor.module, self._home, self.path, self.notes)

    def _may_have_codec(self, tensor: DiskTensor) -> bool:
        """Return whether a codec may decode a tensor: a linear's weight, or one that is not stored
        as floats, such as all experts, an embedding or a router.
        """
        stored = self._stored.get(tensor.name)
        if not self.config.runnable:
            is_coded = tensor.module in self._coded_modules
            return is_coded or stored is None or f"{tensor.module}.{SCALE}" in self._stored
        if tensor.quantizable:
            return True
        if stored is None:
            # Without its plain name, a matrix is missing or stored as codes in the same module.
            has_module = len(tensor.shape) == 2 and tensor.module in self._modules
            return has_module or tensor.stacked is not None
        return stored.dtype not in FLOATS

    def _take_tensors(
        self,
        raw: Mapping[str, Any],
        original_config: Mapping[str, Any],
        methods: Mapping[str, QuantMethod],
    ) -> None:
        """Accept all tensors as the model's: floats, those that codecs may decode, and others.

        Args:
            raw: what `find_settings` makes of the config.json.
            original_config: the config.json as it is.
            methods: of quantization that are read, by ``quant_method``.
        """
        # Read twice: dequantization needs the model's float type, and adds and removes tensors.
        stored_layouts: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, tensor in self._stored.items():
            stored_layouts[name] = (tensor.shape, tensor.dtype)
        self.config = opaque.opaque_config(raw, stored_layouts)
        settings = self._read_quantization_settings(raw)
        # In other folders such names mean anything.
        if settings is not None and states_scheme(settings):
            self._take_kv_cache(raw)
        self._dequantize(raw)
        shapes: dict[str, tuple[int, ...]] = {}
        code_leaves: set[str] = set()
        leaves: set[str] = set()
        if settings is not None:
            shapes, module_layouts = read_weight_layout(
                settings, methods, self._stored, self._files
            )
            for layout in module_layouts:
                code_leaves.add(layout.codes)
                leaves |= layout.suffixes
        self._coded_modules = frozenset(shapes)
        layouts: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, tensor in self._stored.items():
            module, _, leaf = name.rpartition(".")
            if module not in shapes or leaf not in leaves:
                layouts[name] = (tensor.shape, tensor.dtype)
            elif leaf in code_leaves:
                layouts[f"{module}.weight"] = (shapes[module], self.config.dtype)
        self.config = replace(opaque.opaque_config(raw, layouts), dtype=self.config.dtype)
        # Only codes are copied with the settings that describe them.
        if shapes:
            self.extra_config = original_config
        else:
            self.extra_config = without_settings(original_config)

    def _take_kv_cache(self, raw: Mapping[str, Any]) -> None:
        self.kv_cache = extract_kv_cache(
            self._stored, self._files, self._read_quantization_settings(raw), self.config, self.path
        )
        if self.kv_cache is not None:
            self.notes.append(f"{self.path}: {self.kv_cache.note(run_here=self.config.runnable)}")

    def _read_quantization_settings(self, raw: Mapping[str, Any]) -> Settings | None:
        """Read the settings of a quantization in a config, see `find_settings`, if there are
        any.
        """
        settings = raw.get(SETTINGS)
        if isinstance(settings, dict):
            return Settings(settings, self._config_path, SETTINGS)
        return None

    def _dequantize(self, raw: Mapping[str, Any]) -> None:
        settings = self._read_quantization_settings(raw)
        self._stored, self._home, notes = replace_quantized_tensors(
            self._stored, self._files, settings, self._floats_as
        )
        for note in notes:
            self.notes.append(Message(f"{self.path}: ", note))

    def _require_unquantized(self, settings: Mapping[str, Any] | None) -> None:
        """Refuse remains of a quantization, with settings in the config or elsewhere; see
        `require_unquantized`.
        """
        if settings is None:
            method = None
        else:
            method = str(settings.get("quant_method"))
        floats = settings is not None and uses_small_floats(settings)
        require_unquantized(self._disk_specs, self.path, method=method, floats=floats)
        if method is not None:
            return
        for file_name in QUANTIZED_ELSEWHERE:
            if (self.path / file_name).is_file():
                raise UnsupportedError(
                    "the source is quantized already, in a scheme that its config does not name",
                    path=self.path,
                    found=file_name,
                    hint="start from the float model; if this is one, remove the file",
                )

    def _read_headers(self, kind: str, *, derived: bool = False) -> None:
        """Open all files of weights; `derived` is whether to include buffers that the config
        determines.
        """
        headers = read_headers(self.path, kind, derived=derived)
        self._stored = headers.tensors
        self._files = headers.files
        self._settings = [*headers.settings, *self._settings]
        self.notes += headers.notes

    def _leave_out_prediction(self, *, is_run: bool) -> None:
        """Leave out layers for multi-token prediction of a model that is only run, as transformers
        does. Raises `UnsupportedError` for them otherwise: the decoder does not have them.
        """
        prefix = FAMILIES[self.config.architecture].prediction
        if prefix is None:
            return
        names = [name for name in self._stored if name.startswith(prefix)]
        if not names:
            return
        if not is_run:
            raise UnsupportedError(
                "has layers for multi-token prediction, which the decoder does not",
                path=self.path,
                found=f"'{names[0]}' and {len(names) - 1} more",
                hint=Message(
                    "to copy them, add ",
                    Option("tensors_only", value=True),
                    " or ",
                    Option("via", value="transformers"),
                ),
            )
        for name in names:
            del self._stored[name]
            del self._files[name]
        self.notes.append(f"{self.path}: layers for multi-token prediction are not used")

    def _take_head_for_embedding(self) -> None:
        """Read a tied model's embedding from its head if only the head is stored, as transformers
        does.

        Writers that store a shared tensor once, such as safetensors' ``save_model``, may keep the
        name of the head.
        """
        if not self.config.tied_embeddings:
            return
        head = disk_name(self.config, "head")
        embedding = disk_name(self.config, "embedding")
        stored_head = self._stored.get(head)
        if stored_head is None or stored_head.dtype not in FLOATS or embedding in self._stored:
            return
        file = self._files.pop(head)
        del self._stored[head]
        self._stored[embedding] = file.add_name(head, embedding)
        self._files[embedding] = file
        self.notes.append(
            f"{self.path}: the embedding is stored as {head}, to which the config ties it"
        )

    def _drop_unread_tensors(self) -> None:
        """Drop stored keys and values of layers that take those of another one."""
        if not any(layer.shares_kv for layer in self.config.layers):
            return
        for name in list(self._stored):
            plain_name = name if self._text is None else self._text.plain(name)
            if plain_name is not None and is_unread(self.config, plain_name):
                del self._stored[name]
                del self._files[name]

    def _drop_tied_head(self) -> None:
        """Drop a tied model's stored head, which must equal the embedding."""
        if not self.config.tied_embeddings:
            return
        head = disk_name(self.config, "head")
        embedding = disk_name(self.config, "embedding")
        if head not in self._stored or embedding not in self._stored:
            return
        if not same_tensor(self._home[head], head, self._home[embedding], embedding):
            problem = f"tie_word_embeddings is true, but {head} differs from the embedding"
            hint = "set tie_word_embeddings to false if the head was trained separately"
            raise CheckpointError(problem, path=self._config_path, hint=hint)
        del self._stored[head]

    def _join_coded(self, tensors: Mapping[str, DiskTensor]) -> dict[str, TensorSpec]:
        """Describe every tensor on disk, with the tensors of a module with a codec as one
        weight.
        """
        dtype = self._floats_as
        stored = dict(self._stored)
        joined = {}
        for name, codec in self._codecs.items():
            raw = self._raw(tensors[name])
            spec = codec.spec(raw, TensorSpec(name, tensors[name].shape, dtype))
            for part in codec.parts(raw, spec):
                raw.require(part, spec.scheme or spec.stored_as)
                stored.pop(part.name, None)
            if name in stored:
                problem = f"'{raw.name}' is stored both unquantized and quantized"
                expected = "only its quantized weights and scales"
                raise CheckpointError(problem, path=self.path, found=f"'{name}'", expected=expected)
            joined[name] = spec
        self.notes += self._float_notes(joined)
        # Early AutoGPTQ added a bias to every linear.
        zero_biases = []
        for name in joined:
            bias_name = f"{tensors[name].module}.bias"
            if bias_name not in self._home or bias_name in tensors:
                continue
            if not any(self._home[bias_name].read_bytes(bias_name)):
                zero_biases.append(bias_name)
        if zero_biases:
            self.notes.append(
                f"{self.path}: {len(zero_biases)} biases that are all zero are left out:"
                f" {zero_biases[0]}"
            )
        for name in zero_biases:
            del stored[name]
        specs = {}
        for name, tensor in stored.items():
            home = self._home[name]
            if isinstance(home, DequantizedTensor):
                stored_as = home.stored_as
            else:
                stored_as = None
            specs[name] = TensorSpec(
                name=name, shape=tensor.shape, dtype=tensor.dtype, scheme=None, stored_as=stored_as
            )
        return specs | joined
