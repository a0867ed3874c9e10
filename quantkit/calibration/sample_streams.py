"""Solve the linears of a model group by group, while calibration samples pass through it.

All samples pass in lockstep (`quantkit.passes`), each batch through the quantized model and some of
them through the float model too, whose difference is the drift: part of each linear's target. Where
linears share their inputs, all batches stop, the linears are solved together by `GroupSolver` for
the sums over these inputs, and the batches go on with the weights that were found.

The experts of a mixture are solved one after the other, each on the tokens that are sent to it. If
an expert gets few tokens for a linear's inputs, that linear's Hessian is singular, or close to it,
and its errors may grow on other tokens. It is then calibrated on all tokens, whose states are
similar to those it is sent. So is a linear whose weights change by more on its own tokens than its
scheme explains. If they do on all tokens too, it is rounded.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Collection,
    Generator,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.base.memory import malloc_trim
from quantkit.calibration.effort import Effort
from quantkit.calibration.group_solver import GroupSolver, Result
from quantkit.calibration.hessian import HessianAccumulator
from quantkit.passes.activation_store import ActivationStore
from quantkit.passes.cache_recorder import CacheRecorder
from quantkit.passes.partwise_model import PartwiseModel, set_parameter
from quantkit.passes.passage import Inputs, Observer, Passage, Routed
from quantkit.passes.site import Brought, Site, gather_weights
from quantkit.tensors.products import bfloat16_linear, times
from quantkit.tensors.qtensor import QuantTensor

_BATCHES_BETWEEN_TRIMS = 4
MIN_TOKENS_PER_INPUT = 2
"""Tokens sent to an expert per input of a linear; with fewer it is calibrated on all tokens."""


@dataclass(frozen=True)
class Batches:
    """The passes of calibration samples, in order.

    Attributes:
        tokens: of each pass, [B, T].
        is_float: whether each pass goes through the float model; then it has the tokens of the one
            before it, which goes through the quantized model.
        total_tokens: of all samples, those of other processes too.
        is_ghost: whether the only pass is not counted: this process has no samples, but solves
            with the others.
    """

    tokens: Sequence[Tensor]
    is_float: list[bool]
    total_tokens: int
    is_ghost: bool = False

    @classmethod
    def of(
        cls, samples: Tensor, share: slice, batch_size: int, effort: Effort, device: torch.device
    ) -> Batches:
        """Split a process's share of all samples [N, T] into batches; `effort` determines which of
        them go through the float model too.
        """
        local_samples = samples[share].to(device)
        if not len(local_samples):
            return cls([samples[:1].to(device)], [False], samples.numel(), is_ghost=True)
        tokens: list[Tensor] = []
        is_float: list[bool] = []
        batches = torch.split(local_samples, batch_size)
        for index, batch in enumerate(batches):
            tokens.append(batch)
            is_float.append(False)
            if effort.follows(index, len(batches)):
                tokens.append(batch)
                is_float.append(True)
        return cls(tokens, is_float, samples.numel())

    def is_paired(self, index: int) -> bool:
        """Return whether the tokens of a pass go through the float model next."""
        return index + 1 < len(self.is_float) and self.is_float[index + 1]


@dataclass
class _ExpertInputs:
    """What the quantized pass of a pair has brought: inputs [N, I]; of an expert, the numbers of
    the tokens, and the shares of its output.
    """

    inputs: Tensor
    tokens: Tensor | None
    shares: Tensor | None

    def clone(self) -> _ExpertInputs:
        return _ExpertInputs(
            self.inputs.clone(), _clone_optional(self.tokens), _clone_optional(self.shares)
        )


class SampleStreams(Observer):
    """The batches on their way: each through the quantized model, and right after it, for some,
    the float model.
    """

    def __init__(
        self,
        passage: Passage[PartwiseModel],
        batches: Batches,
        solver: GroupSolver,
        *,
        load_stored: Callable[[str], QuantTensor],
        stored: Collection[str],
        compute_dtype: torch.dtype = torch.float32,
        recorder: CacheRecorder | None = None,
        embedding: tuple[str, Tensor] | None = None,
    ) -> None:
        """
        Args:
            passage: the model.
            solver: solves the linears that have a scheme there.
            load_stored: loads the weight of a module on disk that an earlier run has solved.
            stored: the modules that an earlier run has solved.
            compute_dtype: multiplies samples by the weights of linears.
            recorder: records keys and values of the quantized model.
            embedding: the parameter of the embedding, and its value in the quantized model; None
                if both models have the same.
        """
        self._passage = passage
        self._batches = batches
        self._solver = solver
        self._load_stored = load_stored
        self._stored = stored
        self._compute_dtype = compute_dtype
        self._recorder = recorder
        self._embedding = embedding
        # By parameter: quantized, and its floats.
        self._versions: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        # By the name of a parameter that is tied to that of a solved site: the site by that name,
        # and the weights, by module on disk, that it is made of.
        self._tied: dict[str, tuple[Site, Mapping[str, QuantTensor]]] = {}
        # Whether the model has the parameters of the float model.
        self._is_float = False
        # Tokens by expert, of the experts' modules.
        self._counts: dict[str, Tensor] = {}
        self._sums: HessianAccumulator | None = None
        # Of the quantized pass of a pair.
        self._waiting: _ExpertInputs | None = None
        # Whether an expert's inputs are those of all tokens.
        self._all_tokens = False
        self._has_other_inputs = True
        # Else both models are the same up to the first quantized linear.
        self._drifted = embedding is not None
        self._trial = _ExpertTrial()
        # By parameter: linears that multiply samples in the compute dtype.
        self._linears: dict[str, nn.Linear] = {}

    def solve_groups(
        self, groups: Sequence[Inputs], store: ActivationStore, *, to_end: bool = False
    ) -> Generator[tuple[int, dict[str, Result]]]:
        """Pass all batches through the model, and solve group after group.

        Args:
            to_end: whether batches go on to the end of the model after the last group.

        Yields:
            For each group with linears that have a scheme, their number, and the results by module
            on disk; none for those that an earlier run has solved.

        Raises:
            NonFiniteError: if a weight or the inputs of a linear contain NaN or Inf.
        """
        solved_groups = [group for group in groups if self._list_solved(group)]
        # A cache has scales even if only the head is quantized, which is no group.
        if not solved_groups and not to_end:
            return
        self._linears = self._find_linears(groups)
        arrived = self._passage.iterate_inputs(
            solved_groups, self._batches.tokens, store, self, to_end=to_end
        )
        try:
            with (
                _multiplying(self._linears.values(), self._compute_dtype),
                closing(arrived),
            ):
                for place in arrived:
                    if isinstance(place, Routed):
                        self._sum_counts(place.module)
                        continue
                    results = self._solve_group(place)
                    # Groups that batches reach several times are solved before.
                    if results is not None and not place.is_repeated:
                        yield len(self._list_solved(place)), results
        finally:
            self._versions.clear()
            self._tied.clear()

    # What the passage reports

    def resume(self, index: int) -> None:
        """Give the model the parameters of a batch's stream."""
        # What batches free between the tensors of others.
        if index % _BATCHES_BETWEEN_TRIMS == 0:
            malloc_trim()
        is_float = self._batches.is_float[index]
        if self._recorder is not None:
            self._recorder.active = not is_float
        if is_float == self._is_float:
            return
        self._is_float = is_float
        for name, versions in self._versions.items():
            set_parameter(self._passage.partwise.model, name, versions[is_float])

    def runs_ahead(self, index: int, place: Hashable) -> bool:
        """Let batches of the float model, which needs no solution, leave the inputs that they have
        shown; but those of an expert may be needed again.
        """
        if not self._batches.is_float[index] or not isinstance(place, Inputs):
            return False
        return place.sites[0].expert is None

    def enter_part(self, part: str) -> None:
        """Give the quantized model its own embedding, and weights that it shares with parts that
        the samples have passed.
        """
        partwise = self._passage.partwise
        for site, weights in self._tied.values():
            if partwise.part_of(site.owner) == part:
                self._install(site, weights)
        if self._embedding is None:
            return
        name, quantized = self._embedding
        if partwise.part_of(name.rpartition(".")[0]) == part:
            floats = partwise.model.get_parameter(name)
            self._keep_versions(name, _make_parameter(quantized.to(floats.device)), floats)

    def leave_part(self, part: str) -> None:
        """Free what a part had in either stream."""
        for name in list(self._versions):
            if self._passage.partwise.part_of(name.rpartition(".")[0]) == part:
                del self._versions[name]
        malloc_trim()

    def arrive(self, index: int, place: Hashable, value: Any) -> None:
        """Add up the inputs of a batch at a group, or how many tokens it sends to each expert."""
        if isinstance(place, Routed):
            counts = torch.tensor(value, dtype=torch.int64)
            if self._batches.is_float[index] or self._batches.is_ghost:
                counts.zero_()
            self._counts[place.module] = self._counts.get(place.module, 0) + counts
        elif isinstance(place, Inputs) and not self._is_stored(place):
            self._accumulate(index, place, value)

    def _accumulate(self, index: int, group: Inputs, brought: Brought) -> None:
        site = group.sites[0]
        width = brought.inputs.shape[-1]
        # Some experts know the inputs of their own tokens only.
        self._has_other_inputs = brought.at is not None
        if self._sums is None:
            drift_width = _count_rows(group) if _is_by_outputs(group, width) else width
            self._sums = HessianAccumulator(width, drift_width, brought.inputs.device)
            malloc_trim()
        if self._batches.is_ghost:
            return
        if self._batches.is_float[index]:
            self._add_pair(site, group, brought)
            return
        current = _ExpertInputs(brought.inputs.float(), brought.tokens, brought.shares)
        if brought.at is not None and self._takes_all_tokens(site, width):
            current = _ExpertInputs(brought.at(None).float(), None, None)
        if self._batches.is_paired(index):
            # The batch may change or lose its tensors before the float model arrives.
            self._waiting = current.clone()
        else:
            assert self._sums is not None
            self._sums.add(_apply_shares(current.inputs, current.shares))

    def _add_pair(self, site: Site, group: Inputs, brought: Brought) -> None:
        """Add the inputs of a quantized pass, and the difference of the float pass from them."""
        assert self._waiting is not None
        assert self._sums is not None
        quantized = self._waiting
        self._waiting = None
        if brought.at is None:
            floats = brought.inputs.float()
            sends_others = (
                quantized.tokens is not None
                and brought.tokens is not None
                and not torch.equal(quantized.tokens, brought.tokens)
            )
        else:
            floats = brought.at(quantized.tokens).float()
            sends_others = False
        # The float model sends other tokens there, whose inputs are not known.
        if sends_others or floats.shape != quantized.inputs.shape:
            floats = quantized.inputs
        difference = None
        if self._drifted:
            difference = _apply_shares(floats - quantized.inputs, quantized.shares)
            if _is_by_outputs(group, quantized.inputs.shape[-1]):
                # The product of a difference is more precise than the difference of two products.
                weight = site.of(self._passage.partwise.model.get_parameter(site.parameter))
                if self._multiplies_narrow(site):
                    weight = weight.to(self._compute_dtype)
                difference = multiply(difference, weight)
        self._sums.add_pair(_apply_shares(quantized.inputs, quantized.shares), difference)

    # Experts

    def _sum_counts(self, module: str) -> None:
        """Add up the tokens of experts over all processes."""
        counts = self._counts[module]
        if self._solver.group.device is not None:
            counts = counts.to(self._solver.group.device)
        self._solver.group.sum_(counts)
        self._counts[module] = counts.cpu()

    def _takes_all_tokens(self, site: Site, width: int) -> bool:
        """Return whether a linear of an expert is calibrated on all tokens."""
        if site.expert is None or not self._has_other_inputs:
            return False
        return self._all_tokens or self._is_starved(site, width)

    def _is_starved(self, site: Site, width: int) -> bool:
        """Return whether an expert gets few tokens for the inputs of a linear."""
        assert site.expert is not None
        return int(self._counts[site.module][site.expert]) < MIN_TOKENS_PER_INPUT * width

    def _is_unreached(self, site: Site) -> bool:
        """Return whether no inputs of an expert are known."""
        return not self._has_other_inputs and not self._counts[site.module][site.expert]

    def _round_unreached(self, site: Site, linears: Mapping[str, nn.Linear]) -> dict[str, Result]:
        """Round the linears of an expert of which no inputs are known."""
        record = self._describe_tokens(site, all_tokens=False)
        record["tokens_reason"] = "it gets no tokens, and its inputs for others are not known"
        results: dict[str, Result] = {}
        for name, linear in linears.items():
            results[name] = self._solver.round(name, linear.weight, record)
        return results

    def _describe_tokens(self, site: Site, *, all_tokens: bool) -> dict[str, object]:
        """Describe for the manifest which tokens an expert was solved for."""
        if site.expert is None:
            return {}
        sent = int(self._counts[site.module][site.expert])
        if all_tokens:
            return {
                "tokens": self._batches.total_tokens,
                "tokens_from": "all",
                "routed_tokens": sent,
            }
        return {"tokens": sent, "tokens_from": "routed"}

    # Groups

    def _solve_group(self, group: Inputs) -> dict[str, Result] | None:
        """Solve the weights of a group, and let the quantized model have them; None if all batches
        are to show their inputs once more.
        """
        linears = self._collect_linears(group)
        results: dict[str, Result] = {}
        sums = self._sums
        self._sums = None
        if sums is not None:
            site = group.sites[0]
            is_by_outputs = _is_by_outputs(group, len(sums.paired))
            if site.expert is None:
                results = self._solver.solve(linears, sums, outputs=is_by_outputs, bounded=True)
            elif self._is_unreached(site):
                results = self._round_unreached(site, linears)
            else:
                all_tokens = self._takes_all_tokens(site, len(sums.paired))
                unsolved = {name: linears[name] for name in self._trial.select_unsolved(linears)}
                solved = self._solver.solve(unsolved, sums, outputs=is_by_outputs)
                record = self._describe_tokens(site, all_tokens=all_tokens)
                self._trial.judge(
                    self._solver,
                    solved,
                    unsolved,
                    record,
                    tokens="all tokens" if all_tokens else "the tokens sent to it",
                    is_last=all_tokens or not self._has_other_inputs,
                )
                if self._trial.select_unsolved(linears):
                    self._all_tokens = True
                    self._passage.repeat_inputs()
                    return None
                results = self._trial.results
                self._trial = _ExpertTrial()
                self._all_tokens = False
        del sums
        weights = {module: result.weight for module, result in results.items()}
        for module in linears.keys() - weights.keys():
            weights[module] = self._load_stored(module)
        for site in group.sites:
            self._install(site, weights)
            self._install_tied(site, weights)
        del linears
        self._drifted = True
        malloc_trim()
        return results

    def _collect_linears(self, group: Inputs) -> dict[str, nn.Linear]:
        """Collect the float32 linears of a group that have a scheme, by module on disk."""
        model = self._passage.partwise.model
        linears: dict[str, nn.Linear] = {}
        other_sites: list[Site] = []
        for site in group.sites:
            owner = model.get_submodule(site.owner)
            # The solver may replace the weight by a view, which saves a copy of it.
            if site.is_linear and len(site.rows) == 1 and isinstance(owner, nn.Linear):
                for module in self._select_modules(site):
                    linears[module] = owner
            else:
                other_sites.append(site)
        weights = gather_weights(other_sites, self._solver.schemes, self._get_floats)
        for module, weight in weights.items():
            linears[module] = nn.Linear(weight.shape[1], weight.shape[0], False, device="meta")
            linears[module].weight = _make_parameter(weight)
        return linears

    def _get_floats(self, name: str) -> Tensor:
        """Look up the value of a parameter in the float model."""
        if name in self._versions:
            return self._versions[name][1]
        parameter: Tensor = self._passage.partwise.model.get_parameter(name)
        return parameter

    def _install(self, site: Site, weights: Mapping[str, QuantTensor]) -> None:
        """Let the quantized model have the weights, by module on disk, that a site is made of."""
        if not self._select_modules(site):
            return
        model = self._passage.partwise.model
        name = site.parameter
        if name in self._versions:
            quantized, floats = self._versions[name]
        else:
            floats = model.get_parameter(name)
            quantized = floats
        if site.is_linear and len(site.rows) == 1:
            weight = weights[site.rows[0][0]]
            quantized = _make_parameter(weight.to(floats.device).dequantize())
        else:
            if quantized is floats:
                quantized = _make_parameter(floats.clone())
            for module, rows_here, rows_of_module in site.parts():
                if module in weights:
                    rows = weights[module].to(floats.device).dequantize()
                    site.of(quantized.data)[rows_here] = rows[rows_of_module]
        # Only the weights that multiply samples are kept.
        if self._multiplies_narrow(site):
            quantized = _make_parameter(quantized.to(self._compute_dtype))
            floats = _make_parameter(floats.to(self._compute_dtype))
        self._keep_versions(name, quantized, floats)

    def _install_tied(self, site: Site, weights: Mapping[str, QuantTensor]) -> None:
        """Let other modules whose parameter is tied to that of a site have its weights: now, or
        when their part is loaded, with the floats on disk.
        """
        partwise = self._passage.partwise
        names = partwise.same_as(site.parameter)
        own_weights = {module: weights[module] for module in self._select_modules(site)}
        for name in names:
            if name == site.parameter or not own_weights:
                continue
            tied_site = replace(site, module=name.removesuffix(f".{site.leaf}"))
            self._tied[name] = tied_site, own_weights
            if partwise.part_of(tied_site.owner) in partwise.loaded:
                self._install(tied_site, own_weights)

    def _keep_versions(self, name: str, quantized: nn.Parameter, floats: nn.Parameter) -> None:
        """Keep a parameter's value in either model, and give the model the current one."""
        versions = quantized, floats
        self._versions[name] = versions
        set_parameter(self._passage.partwise.model, name, versions[self._is_float])

    def _multiplies_narrow(self, site: Site) -> bool:
        """Return whether samples are multiplied by the weight of a site in the compute dtype."""
        return self._compute_dtype != torch.float32 and site.parameter in self._linears

    def _find_linears(self, groups: Sequence[Inputs]) -> dict[str, nn.Linear]:
        """Find the plain linears of groups, by the name of the weight."""
        model = self._passage.partwise.model
        linears: dict[str, nn.Linear] = {}
        for group in groups:
            for site in group.sites:
                owner = model.get_submodule(site.owner)
                # Other classes may do more in their forward.
                if site.is_linear and type(owner) is nn.Linear:
                    linears[site.parameter] = owner
        return linears

    def _select_modules(self, site: Site) -> list[str]:
        """Select the modules on disk of a site that have a scheme."""
        return [module for module, _, _ in site.rows if module in self._solver.schemes]

    def _list_solved(self, group: Inputs) -> list[str]:
        """List the modules on disk of a group that have a scheme."""
        # A linear may be split into several sites.
        modules: dict[str, None] = {}
        for site in group.sites:
            modules |= dict.fromkeys(self._select_modules(site))
        return list(modules)

    def _is_stored(self, group: Inputs) -> bool:
        return all(module in self._stored for module in self._list_solved(group))


@dataclass
class _ExpertTrial:
    """The linears of an expert while they are solved for the tokens that are sent to it, and then,
    where they change by more than their schemes explain, for all tokens.

    Attributes:
        results: of the linears that are solved, by module on disk.
        reasons: why the tokens that were tried first are not used, by module.
    """

    results: dict[str, Result] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def select_unsolved(self, linears: Iterable[str]) -> list[str]:
        """Select the linears that have no result yet."""
        return [name for name in linears if name not in self.results]

    def judge(
        self,
        solver: GroupSolver,
        solved: Mapping[str, Result],
        linears: Mapping[str, nn.Linear],
        record: Mapping[str, object],
        *,
        tokens: str,
        is_last: bool,
    ) -> None:
        """Accept solved linears, each with the record of its tokens, unless they change by more
        than their schemes explain: these are rounded if there are no other tokens.

        Args:
            tokens: names the tokens that they are solved for.
            is_last: whether there are no other tokens.
        """
        excesses = solver.find_excesses(solved, linears)
        for name, result in solved.items():
            reason = self.reasons.get(name)
            if name not in excesses:
                explained = {} if reason is None else {"tokens_reason": reason}
                accepted = {**result.record, **record, **explained}
                self.results[name] = replace(result, record=accepted)
                continue
            error, bound = excesses[name]
            excess = f"changed by {error:.3g} on {tokens}, expected at most {bound:.3g}"
            reason = excess if reason is None else f"{reason}; {excess}"
            self.reasons[name] = reason
            if is_last:
                rounded = {**record, "tokens_reason": reason}
                self.results[name] = solver.round(name, linears[name].weight, rounded)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply samples ``x @ weight.T + bias`` in float32, or with factors of bfloat16 if the
    weight is, [..., I] and [O, I] to [..., O].
    """
    if weight.dtype == torch.bfloat16:
        out = bfloat16_linear(x, weight)
    else:
        out = times(x.flatten(0, -2), weight.t()).view(*x.shape[:-1], len(weight))
    if bias is None:
        return out
    return out.add_(bias)


@contextmanager
def _multiplying(linears: Iterable[nn.Linear], dtype: torch.dtype) -> Iterator[None]:
    """Let linears multiply samples in a dtype within the context."""

    replaced = list(linears)
    for linear in replaced:
        # An attribute of the instance hides the method of its class.
        vars(linear)["forward"] = partial(_multiply_by, linear, dtype)
    try:
        yield
    finally:
        for linear in replaced:
            del vars(linear)["forward"]


def _multiply_by(linear: nn.Linear, dtype: torch.dtype, x: Tensor) -> Tensor:
    # A linear that is solved later still has the float32 weight that the solver needs.
    return multiply(x, linear.weight.to(dtype), linear.bias)


def _is_by_outputs(group: Inputs, width: int) -> bool:
    """Return whether the drift is that of the outputs: where these are one linear's, and not more
    than its inputs.
    """
    is_one = len(group.sites) == 1 and len(group.sites[0].rows) == 1
    return is_one and _count_rows(group) <= width


def _count_rows(group: Inputs) -> int:
    return sum(stop - start for site in group.sites for _, start, stop in site.rows)


def _make_parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def _clone_optional(value: Tensor | None) -> Tensor | None:
    if value is None:
        return None
    return value.clone()


def _apply_shares(rows: Tensor, shares: Tensor | None) -> Tensor:
    """Multiply rows [N, I] by the shares [N] of an expert's output, if there are any."""
    if shares is None:
        return rows
    return rows * shares.unsqueeze(-1)
