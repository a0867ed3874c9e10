"""The tensors of a quantized model, block after block, by GPTQ on calibration samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from quantkit.architectures.names import EMBEDDING
from quantkit.architectures.topology import count_head_layers
from quantkit.base.late import LateFunction
from quantkit.base.memory import malloc_trim, set_mmap_threshold
from quantkit.calibration.cache_scales import make_unreached_error, scales_of
from quantkit.calibration.data import Calibration
from quantkit.calibration.effort import Effort, batch_samples, uses_factor
from quantkit.calibration.estimate import gpu_activation_bytes
from quantkit.calibration.group_solver import GroupSolver, Result
from quantkit.calibration.quantizers import MMAP_THRESHOLD, RtnQuantizer, Solved, TensorBlock
from quantkit.calibration.sample_streams import Batches, SampleStreams
from quantkit.calibration.scale_range import choose_scale_dtype
from quantkit.distributed.group import ProcessGroup
from quantkit.errors import NonFiniteError
from quantkit.formats.container import Written
from quantkit.formats.kv_scales import is_scale
from quantkit.formats.output.staging import SCRATCH
from quantkit.model.column_kernels import select_column_kernels
from quantkit.model.load import narrow_to_floats
from quantkit.passes.activation_store import ActivationStore
from quantkit.passes.cache_recorder import CacheRecorder
from quantkit.passes.partwise_model import PartwiseModel
from quantkit.passes.passage import Inputs, Passage
from quantkit.solver.rounding import round_to_nearest
from quantkit.tensors.dtypes import DType
from quantkit.tensors.products import compute_dtype, exact_float32
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec

# Only the thorough effort has a backward pass, and few models use a linear several times.
if TYPE_CHECKING:
    from quantkit.calibration.factor_pass import measure_factors
    from quantkit.calibration.output_factors import OutputFactors
    from quantkit.calibration.repeated import solve_repeated
else:
    solve_repeated = LateFunction("quantkit.calibration.repeated:solve_repeated")
    measure_factors = LateFunction("quantkit.calibration.factor_pass:measure_factors")

# Of an embedding whose error is too small to be followed.
_EXACT_BITS = 8


@dataclass
class GptqQuantizer(RtnQuantizer):
    """GPTQ for the linears that samples reach, on the inputs that the quantized model passes to
    them; rounding for other tensors.

    With several processes each has a share of the samples and of the rows; all of them solve the
    same groups of linears.

    Attributes:
        schemes: by module on disk.
        passage: the model, by quantkit's decoder or by transformers.
        groups: the linears by shared input, in the order in which samples reach them.
        recording_cache: makes a context in which the model's keys and values are recorded.
        embedding_parameter: the name of the model's embedding; None if it is not followed.
        device: where the model and the solver compute.
        memory_bytes: of activations in memory; more go to disk.
        effort: how many batches go through the float model too.
        group: the processes that share the work.
        progress: called with the number of linears that the samples have passed.
    """

    calibration: Calibration
    schemes: Mapping[str, QuantScheme]
    passage: Passage[PartwiseModel]
    groups: Sequence[Inputs]
    _: KW_ONLY
    recording_cache: Callable[[CacheRecorder], AbstractContextManager[None]]
    embedding_parameter: str | None
    device: torch.device
    memory_bytes: int
    effort: Effort
    group: ProcessGroup
    _results: dict[str, Result] = field(default_factory=dict, init=False)
    # By module on disk: of linears that a forward pass uses several times.
    _repeated_weights: dict[str, QuantTensor] = field(default_factory=dict, init=False)

    @contextmanager
    def running(self, blocks: Sequence[TensorBlock], written: Written) -> Iterator[None]:
        set_mmap_threshold(MMAP_THRESHOLD)
        self._written = replace(written, count=self.group.broadcast_from_rank0(written.count))
        self._begin(blocks, self._written)
        self._calibrated = self._list_calibrated()
        self._remaining_uses = Counter(
            module for block in blocks for module in self._list_wanted(block)
        )
        unsolved = set(self._remaining_uses)
        self._recorder = CacheRecorder()
        lacks_scales = any(self._list_lacking_scales(block) for block in blocks)
        store = self._make_store(written)
        recording: AbstractContextManager[None] = nullcontext()
        if lacks_scales:
            recording = self.recording_cache(self._recorder)
        try:
            with exact_float32(), torch.no_grad(), recording:
                if unsolved or lacks_scales:
                    solver = self._make_solver(blocks, unsolved, store)
                    batches = self._make_batches()
                    streams = self._make_streams(blocks, unsolved, solver, batches)
                    self._solved_groups = self._solve_groups(
                        streams,
                        self._solve_repeated(unsolved, solver, batches, store),
                        unsolved,
                        store,
                        to_end=lacks_scales,
                    )
                    # Which leaves the model without weights.
                    with closing(self._solved_groups):
                        yield
                else:
                    yield
        finally:
            store.close()
            self._results.clear()
            self._repeated_weights.clear()
            malloc_trim()
        # Until no process has anything left on disk.
        self.group.wait()

    def solve(self, block: TensorBlock) -> Iterator[Solved]:
        """As `RtnQuantizer.solve`; but the call itself solves the linears of the block, with all
        processes of the group.
        """
        wanted = self._list_wanted(block)
        try:
            while not self._results.keys() >= set(wanted):
                self._results |= next(self._solved_groups)
            self._measure_scales(block)
        except NonFiniteError as error:
            raise self._explain_error(error, block) from error
        results: dict[str, Result] = {}
        for module in wanted:
            # The results of an output in several formats share those of a linear.
            self._remaining_uses[module] -= 1
            if self._remaining_uses[module]:
                results[module] = self._results[module]
            else:
                results[module] = self._results.pop(module)
        return self._tensors(block, results)

    def _list_calibrated(self) -> set[str]:
        """List the modules on disk that samples reach and that have a scheme."""
        calibrated: set[str] = set()
        for group in self.groups:
            for site in group.sites:
                calibrated.update(module for module, _, _ in site.rows if module in self.schemes)
        return calibrated

    def _list_wanted(self, block: TensorBlock) -> list[str]:
        """List the modules of a block that are solved; none if an earlier run has written all."""
        if block.is_quantized_in(self._written):
            return []
        modules = (spec.name.removesuffix(".weight") for spec in block.tensors)
        return [module for module in modules if module in self._calibrated]

    def _list_lacking_scales(self, block: TensorBlock) -> list[TensorSpec]:
        """List the scales of the KV cache in a block that are not written yet."""
        lacking: list[TensorSpec] = []
        for spec in block.tensors:
            if is_scale(spec.name) and block.to_output_name(spec.name) not in self._done:
                lacking.append(spec)
        return lacking

    def _make_store(self, written: Written) -> ActivationStore:
        gpu_bytes = gpu_activation_bytes(
            self.source.config, self.calibration.tokens.shape, self.device
        )
        return ActivationStore(
            # Several processes may share one disk.
            written.folder / f"{SCRATCH}-{self.group.rank}",
            self.memory_bytes,
            # And one GPU.
            gpu_bytes // self.group.size,
        )

    def _make_solver(
        self, blocks: Sequence[TensorBlock], unsolved: set[str], store: ActivationStore
    ) -> GroupSolver:
        specs = (spec for block in blocks for spec in block.tensors)
        return GroupSolver(
            schemes=self.schemes,
            scale_dtype=choose_scale_dtype(self.source, specs),
            group=self.group,
            kernels=self.kernels_of(self.device),
            shared=self.shared,
            factors=self._measure_output_factors(unsolved, store),
        )

    def _make_batches(self) -> Batches:
        tokens = self.calibration.tokens
        batches = Batches.of(
            tokens,
            self.group.share(len(tokens)),
            batch_samples(self.source.config, tokens.shape[1]),
            self.effort,
            self.device,
        )
        self._quantized_passes = batches.is_float.count(False)
        return batches

    def _make_streams(
        self,
        blocks: Sequence[TensorBlock],
        unsolved: set[str],
        solver: GroupSolver,
        batches: Batches,
    ) -> SampleStreams:
        stored = self._calibrated - unsolved
        # They are solved before the samples pass.
        for group in self._list_repeated():
            stored.update(self._calibrated.intersection(_list_modules(group)))
        output_names: dict[str, str] = {}
        for block in blocks:
            for spec in block.tensors:
                module = spec.name.removesuffix(".weight")
                output_names.setdefault(module, block.to_output_name(spec.name))

        def load_stored(module: str) -> QuantTensor:
            if module in self._repeated_weights:
                return self._repeated_weights[module]
            weight = self._written.load(output_names[module])
            assert isinstance(weight, QuantTensor)
            return weight

        return SampleStreams(
            self.passage,
            batches,
            solver,
            load_stored=load_stored,
            stored=stored,
            compute_dtype=compute_dtype(self.device),
            recorder=self._recorder,
            embedding=self._round_embedding(),
        )

    def _measure_output_factors(
        self, unsolved: set[str], store: ActivationStore
    ) -> OutputFactors | None:
        """Measure the factors of outputs' errors for the linears that are not solved yet; None if
        no scheme or effort uses them. A note says why there are none of a model.
        """
        tokens = self.calibration.tokens
        count = self.effort.gradient_samples(self.source.config, tokens.shape)
        used_once = [group for group in self.groups if not group.is_repeated]
        modules_used_once = {module for group in used_once for module in _list_modules(group)}
        wanted = set()
        for name in unsolved & modules_used_once:
            if uses_factor(self.schemes[name]):
                wanted.add(name)
        if not count or not wanted:
            return None
        factors, reason = measure_factors(
            self.passage,
            used_once,
            tokens[:count],
            wanted,
            store,
            samples_at_once=batch_samples(self.source.config, tokens.shape[1]),
            head_layers=count_head_layers(self.source.config),
            group=self.group,
            progress=self.progress,
        )
        if reason is not None:
            self.notes.append(
                f"{self.source.path}: how errors of outputs add up is not known: {reason}"
            )
        return factors

    def _round_embedding(self) -> tuple[str, torch.Tensor] | None:
        """Round the embedding, if it has so few bits that the linears should make up for its
        error; with the name of its parameter.
        """
        scheme = self.schemes.get(EMBEDDING)
        if self.embedding_parameter is None or scheme is None or scheme.bits >= _EXACT_BITS:
            return None
        weight = narrow_to_floats(self.source.load(f"{EMBEDDING}.weight"))
        rounded = round_to_nearest(weight, scheme, torch.float16, select_column_kernels)[0]
        return self.embedding_parameter, rounded.dequantize()

    def _solve_groups(
        self,
        streams: SampleStreams,
        solved_repeated: Generator[tuple[Inputs, dict[str, Result]]],
        unsolved: set[str],
        store: ActivationStore,
        *,
        to_end: bool,
    ) -> Generator[dict[str, Result]]:
        """Yield the results of group after group, and report progress.

        Args:
            unsolved: the modules on disk that are to be solved.
            to_end: let samples pass to the end of the model; otherwise up to the last linear that
                is not solved yet.
        """
        repeated = self._list_repeated()
        groups = list(self.groups)
        if not to_end:
            groups = _cut_groups(groups, unsolved)
        order = [*repeated, *(group for group in groups if not group.is_repeated)]
        resumed = 0
        for group in order:
            if not unsolved.isdisjoint(_list_modules(group)):
                break
            resumed += self._count_calibrated(group)
        total = sum(self._count_calibrated(group) for group in order)
        passed = 0
        self._report(passed, resumed, total)
        with closing(solved_repeated):
            for group, results in solved_repeated:
                passed += self._count_calibrated(group)
                self._report(passed, resumed, total)
                yield results
        if not groups:
            return
        # An earlier run may have solved some of them.
        passed = sum(self._count_calibrated(group) for group in repeated)
        solved = streams.solve_groups(groups, store, to_end=to_end)
        with closing(solved):
            for count, results in solved:
                passed += count
                self._report(passed, resumed, total)
                yield results

    def _solve_repeated(
        self,
        unsolved: set[str],
        solver: GroupSolver,
        batches: Batches,
        store: ActivationStore,
    ) -> Generator[tuple[Inputs, dict[str, Result]]]:
        """Yield the groups that a batch reaches several times and that are not solved yet, with
        their results, and keep their weights for the quantized model.
        """
        unsolved_groups: list[Inputs] = []
        for group in self._list_repeated():
            if not unsolved.isdisjoint(_list_modules(group)):
                unsolved_groups.append(group)
        if not unsolved_groups:
            return
        solved = solve_repeated(
            self.passage,
            unsolved_groups,
            batches,
            solver,
            store=store,
            # The other half is for the samples.
            memory_bytes=self.memory_bytes // 2,
        )
        with closing(solved):
            for group, results in solved:
                for module, result in results.items():
                    self._repeated_weights[module] = result.weight
                yield group, results

    def _list_repeated(self) -> list[Inputs]:
        """List the groups that a batch reaches several times."""
        return [group for group in self.groups if group.is_repeated]

    def _count_calibrated(self, group: Inputs) -> int:
        return len(self._calibrated.intersection(_list_modules(group)))

    def _report(self, passed: int, resumed: int, total: int) -> None:
        """Report how many linears the samples have passed: of all, or of those that an earlier run
        has written.
        """
        if resumed and passed <= resumed:
            self.progress("calibrate", passed, resumed, "linears")
        if passed >= resumed:
            self.progress("quantize", passed, total, "linears")

    def _measure_scales(self, block: TensorBlock) -> None:
        """Let the samples pass the attention of a block, and compute the scales of its cache.
        Raises `UnsupportedError` if they do not reach it.
        """
        dtypes: dict[str, DType] = {}
        for spec in self._list_lacking_scales(block):
            dtypes[spec.name.rpartition(".")[0]] = spec.dtype
        for attention, dtype in dtypes.items():
            # All batches stop at the next linear after the attention, or at the model's end.
            while self._recorder.counts[attention] < self._quantized_passes:
                results = next(self._solved_groups, None)
                if results is None:
                    break
                self._results |= results
            if self._recorder.counts[attention] < self._quantized_passes:
                raise make_unreached_error(attention, self.source.path)
            largest = self._recorder.find_largest(attention).unsqueeze(0)
            joined = self.group.join(largest, self.group.size).amax(0)
            self._scales |= scales_of(attention, joined, dtype, self.source.path)


def _cut_groups(groups: Sequence[Inputs], unsolved: set[str]) -> list[Inputs]:
    """Leave out the groups after the last one that the streams solve; empty if they solve none."""
    for index in range(len(groups), 0, -1):
        group = groups[index - 1]
        if not group.is_repeated and not unsolved.isdisjoint(_list_modules(group)):
            return list(groups[:index])
    return []


def _list_modules(group: Inputs) -> list[str]:
    """List the modules on disk of a group."""
    modules: list[str] = []
    for site in group.sites:
        modules += [module for module, _, _ in site.rows]
    return modules
