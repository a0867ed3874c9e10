"""GPTQ for a model that transformers runs, on the inputs that the model's own code passes to each
product.

The samples pass in lockstep (`quantkit.via_transformers`), each batch through the quantized model
and some of them through the float model too, whose difference is the drift. Where products share
their inputs, their weights are solved together, by `GroupSolver`, and the samples go on with what
was found.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.base.memory import malloc_trim, set_mmap_threshold
from quantkit.base.progress import Progress, silent
from quantkit.calibration.block_quantizer import MIN_TOKENS_PER_INPUT
from quantkit.calibration.data import Calibration
from quantkit.calibration.effort import Effort, batch_samples
from quantkit.calibration.group_solver import GroupSolver, Result
from quantkit.calibration.hessian import HessianAccumulator
from quantkit.calibration.quantizers import MMAP_THRESHOLD, RtnQuantizer, Solved, TensorBlock
from quantkit.calibration.scale_range import choose_scale_dtype
from quantkit.distributed.group import SINGLE
from quantkit.errors import NonFiniteError
from quantkit.formats.container import Written
from quantkit.formats.output.staging import SCRATCH
from quantkit.passes.passage import Inputs, Passage, Routed, Survey
from quantkit.passes.site import Site
from quantkit.passes.spill import Spill
from quantkit.tensors.products import exact_float32, times
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme
from quantkit.via_transformers.lazy_model import LazyModel, set_parameter


@dataclass
class LockstepQuantizer(RtnQuantizer):
    """Computes the tensors of an output, block after block, by GPTQ.

    Attributes:
        schemes: by module on disk.
        passage, survey: the model, and how samples reach its products.
        memory_bytes: of activations in memory; more go to disk.
        effort: how many batches go through the float model too.
        progress: called with the number of linears that the samples have passed.
    """

    calibration: Calibration
    schemes: Mapping[str, QuantScheme]
    passage: Passage[LazyModel]
    survey: Survey
    _: KW_ONLY
    memory_bytes: int
    effort: Effort
    progress: Progress = silent
    _results: dict[str, Result] = field(default_factory=dict, init=False)

    @contextmanager
    def running(self, blocks: Sequence[TensorBlock], written: Written) -> Iterator[None]:
        set_mmap_threshold(MMAP_THRESHOLD)
        self._done = written.names
        stored = set()
        for block in blocks:
            if block.is_quantized_in(written):
                for spec in block.tensors:
                    if spec.scheme is not None:
                        stored.add(spec.name.removesuffix(".weight"))
        open_ = {module for module in self._find_calibrated_modules() if module not in stored}
        dtype = choose_scale_dtype(
            self.source, (spec for block in blocks for spec in block.tensors)
        )
        solver = GroupSolver(
            schemes=self.schemes,
            scale_dtype=dtype,
            group=SINGLE,
            kernels=self.kernels_of(_CPU),
            shared=self.shared,
        )
        streams = _Streams(self, solver, written, stored)
        spill = Spill(written.folder / SCRATCH, self.memory_bytes)
        try:
            with exact_float32(), torch.no_grad():
                results = streams.results(spill, open_)
                # Which leaves the model without weights.
                with closing(results):
                    self._rounds = results
                    yield
        finally:
            spill.close()
            self._results.clear()

    def solve(self, block: TensorBlock) -> Iterator[Solved]:
        modules = set()
        for spec in block.tensors:
            if spec.name not in self._done:
                modules.add(spec.name.removesuffix(".weight"))
        wanted = modules & self._find_calibrated_modules()
        try:
            while not wanted <= self._results.keys():
                self._results |= next(self._rounds)
        except NonFiniteError as error:
            raise self._explain_error(error, block) from error
        return self._tensors(block, {module: self._results.pop(module) for module in wanted})

    def _find_calibrated_modules(self) -> set[str]:
        """Return the modules on disk that samples reach and that have a scheme."""
        reached = (
            module
            for group in self.survey.groups
            for site in group.sites
            for module, _, _ in site.rows
        )
        return {module for module in reached if module in self.schemes}


_CPU = torch.device("cpu")
_Rows = tuple[Tensor, Tensor | None, Tensor | None]
"""Inputs of a product; to an expert's, the numbers of the tokens, and the shares of its output."""


class _Streams:
    """The batches on their way: each through the quantized model, and right after it, for some,
    the float model.
    """

    def __init__(
        self, quantizer: LockstepQuantizer, solver: GroupSolver, written: Written, stored: set[str]
    ) -> None:
        self._passage = quantizer.passage
        self._survey = quantizer.survey
        self._solver = solver
        self._schemes = quantizer.schemes
        self._progress = quantizer.progress
        self._written = written
        self._stored = stored
        samples = quantizer.calibration.tokens
        batches = torch.split(samples, batch_samples(quantizer.source.config, samples.shape[1]))
        self._batches: list[Tensor] = []
        self._is_float: list[bool] = []
        for index, batch in enumerate(batches):
            followed = quantizer.effort.follows(index, len(batches))
            self._batches += [batch] * (1 + followed)
            self._is_float += [False, True][: 1 + followed]
        self._pairs = {index - 1 for index, own in enumerate(self._is_float) if own}
        # By parameter: quantized, and its floats.
        self._versions: dict[str, tuple[Tensor, Tensor]] = {}
        self._active = (
            # The stream whose parameters the model has: whether it is the float one.
            False
        )
        # Tokens by expert, of the experts' modules.
        self._counts: dict[str, Counter[int]] = defaultdict(Counter)
        self._sums: HessianAccumulator | None = None
        self._waiting: _Rows | None = None  # of the quantized batch of a pair
        self._drifted = False
        self._every = samples.numel()

    def results(self, spill: Spill, modules: Collection[str]) -> Generator[dict[str, Result]]:
        """Yield the results, by module on disk, of group after group, up to the last of some
        modules.
        """
        groups = [
            group
            for group in self._survey.groups
            if any(self._select_modules(site) for site in group.sites)
        ]
        while groups and not any(
            module in modules for site in groups[-1].sites for module in self._select_modules(site)
        ):
            groups.pop()
        total = sum(len(self._select_modules(site)) for group in groups for site in group.sites)
        passed = 0
        if not groups:
            return
        self._progress("quantize", 0, total, "linears")
        arrived = self._passage.iterate_inputs(
            groups,
            self._batches,
            spill,
            self._accumulate_inputs,
            self._switch_stream,
            self._free_part,
        )
        with closing(arrived):
            for group in arrived:
                results = self._solve_group(group)
                passed += sum(len(self._select_modules(site)) for site in group.sites)
                self._progress("quantize", passed, total, "linears")
                yield results

    def _select_modules(self, site: Site) -> list[str]:
        """Return the modules on disk of a site that have a scheme."""
        return [module for module, _, _ in site.rows if module in self._schemes]

    def _switch_stream(self, index: int) -> None:
        """Give the model the parameters of a batch's stream."""
        if self._is_float[index] == self._active:
            return
        self._active = self._is_float[index]
        for name, versions in self._versions.items():
            set_parameter(self._passage.partwise.model, name, versions[self._active])

    def _free_part(self, part: str) -> None:
        """Free what a part had in either stream."""
        for name in list(self._versions):
            if self._passage.partwise.part_of(name) == part:
                del self._versions[name]
        malloc_trim()

    def _accumulate_inputs(self, index: int, place: Hashable, value: Any) -> None:
        if isinstance(place, Routed):
            if not self._is_float[index]:
                self._counts[place.module].update(dict(enumerate(value)))
            return
        if not isinstance(place, Inputs) or all(map(self._is_stored, place.sites)):
            return
        site = place.sites[0]
        brought = value
        if self._sums is None:
            width = brought.inputs.shape[-1]
            if self._by_outputs(place, width):
                drift_width = self._rows(place)
            else:
                drift_width = width
            self._sums = HessianAccumulator(width, drift_width, brought.inputs.device)
            malloc_trim()
        if self._is_float[index]:
            assert self._waiting is not None
            inputs, tokens, shares = self._waiting
            floats = (brought.inputs if brought.at is None else brought.at(tokens)).float()
            others = (
                tokens is not None
                and brought.at is None
                and not torch.equal(tokens, brought.tokens)
            )
            # The model sends other tokens there.
            if others or floats.shape != inputs.shape:
                floats = inputs
            if self._drifted:
                difference = _apply_shares(floats - inputs, shares)
            else:
                difference = None
            if difference is not None and self._by_outputs(place, inputs.shape[-1]):
                # Of this batch's stream.
                floats = self._passage.partwise.model.get_parameter(site.parameter)
                difference = times(difference.flatten(0, -2), site.of(floats).t())
            self._sums.add_pair(_apply_shares(inputs, shares), difference)
            self._waiting = None
            return
        own: _Rows = brought.inputs.float(), brought.tokens, brought.shares
        if brought.at is not None and self._is_starved(site, brought.inputs.shape[-1]):
            own = brought.at(None).float(), None, None
        if index in self._pairs:
            self._waiting = own[0].clone(), _clone_optional(own[1]), _clone_optional(own[2])
        else:
            self._sums.add(_apply_shares(own[0], own[2]))

    def _by_outputs(self, group: Inputs, width: int) -> bool:
        """Return whether the drift is that of the outputs: where these are one product's, and fewer
        than its inputs.
        """
        return len(group.sites) == 1 and len(group.sites[0].rows) == 1 and self._rows(group) < width

    def _rows(self, group: Inputs) -> int:
        return sum(stop - start for site in group.sites for _, start, stop in site.rows)

    def _is_starved(self, site: Site, width: int) -> bool:
        """Return whether an expert gets too few tokens, so that its weights are solved for all."""
        assert site.expert is not None
        return self._counts[site.module][site.expert] < MIN_TOKENS_PER_INPUT * width

    def _is_stored(self, site: Site) -> bool:
        return all(module in self._stored for module in self._select_modules(site))

    def _solve_group(self, group: Inputs) -> dict[str, Result]:
        """Solve the weights of a group, and let the quantized stream have them."""
        model = self._passage.partwise.model
        sums = self._sums
        self._sums = None
        weights = dict[str, Tensor]()
        linears = dict[str, nn.Linear]()
        for site in group.sites:
            name = site.parameter
            if name in self._versions:
                floats = self._versions[name][1]
            else:
                floats = model.get_parameter(name)
            for module, start, stop in site.rows:
                if module in self._schemes:
                    weights[module] = site.of(floats)[start:stop].contiguous()
        results: dict[str, Result] = {}
        if sums is not None:
            for module, weight in weights.items():
                linears[module] = nn.Linear(
                    weight.shape[1], weight.shape[0], bias=False, device="meta"
                )
                linears[module].weight = nn.Parameter(weight, requires_grad=False)
            record = self._tokens(group.sites[0])
            outputs = self._by_outputs(group, len(sums.paired))
            for module, result in self._solver.solve(linears, sums, outputs=outputs).items():
                results[module] = self._accept_or_round(
                    module, replace(result, record={**result.record, **record}), weights
                )
        found = {module: result.weight for module, result in results.items()}
        for module in weights.keys() - found.keys():
            stored = self._written.load(f"{module}.weight")
            assert isinstance(stored, QuantTensor)
            found[module] = stored
        for site in group.sites:
            self._install(site, found)
        self._drifted = True
        malloc_trim()
        return results

    def _tokens(self, site: Site) -> dict[str, object]:
        """Return what the manifest says of the tokens that an expert was solved for."""
        if site.expert is None:
            return {}
        sent = self._counts[site.module][site.expert]
        every = self._every
        if self._is_starved(
            site, site.of(self._passage.partwise.model.get_parameter(site.parameter)).shape[1]
        ):
            return {"tokens": every, "tokens_from": "all", "routed_tokens": sent}
        return {"tokens": sent, "tokens_from": "routed"}

    def _accept_or_round(
        self, module: str, result: Result, weights: Mapping[str, Tensor]
    ) -> Result:
        """Return a result, or the weight rounded, if the result has changed by more than its scheme
        explains.
        """
        bound = self._solver.error_bound(result.weight, weights[module])
        if result.error <= bound or "fallback" in result.record:
            return result
        reason = f"GPTQ changed it by {result.error:.3g}, expected at most {bound:.3g}"
        kept = {key: value for key, value in result.record.items() if "tokens" in key}
        return self._solver.round(module, weights[module], {**kept, "tokens_reason": reason})

    def _install(self, site: Site, weights: Mapping[str, QuantTensor]) -> None:
        model = self._passage.partwise.model
        name = site.parameter
        if name not in self._versions:
            floats = model.get_parameter(name)
            self._versions[name] = nn.Parameter(floats.clone(), requires_grad=False), floats
        quantized = self._versions[name][0]
        for module, start, stop in site.rows:
            if module in weights:
                site.of(quantized.data)[start:stop] = weights[module].dequantize()
        if not self._active:
            set_parameter(model, name, quantized)


def _clone_optional(value: Tensor | None) -> Tensor | None:
    if value is None:
        return None
    return value.clone()


def _apply_shares(rows: Tensor, shares: Tensor | None) -> Tensor:
    """Rows [N, I] times the shares [N] of an expert's output, if there are any."""
    if shares is None:
        return rows
    return rows * shares.unsqueeze(-1)
