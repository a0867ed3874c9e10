"""GPTQ for linears that share their inputs: those of one scheme together, by all processes
together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quantkit.base.messages import Message, Option
from quantkit.calibration.hessian import HessianAccumulator
from quantkit.distributed.group import ProcessGroup
from quantkit.errors import NonFiniteError
from quantkit.model.shared_scales import SharedScales
from quantkit.quality.bounds import REPEATABLE, coarsest, weight_bound
from quantkit.solver.columns import TORCH, ColumnKernels
from quantkit.solver.gptq import DAMPING, Damped, GptqReport, SingularError, solve
from quantkit.solver.grid import max_divided_elements
from quantkit.solver.rounding import round_to_nearest
from quantkit.solver.two_sided import OutputFactor
from quantkit.tensors.finite import all_finite
from quantkit.tensors.products import times
from quantkit.tensors.qtensor import QuantTensor, concatenate_rows, relative_error, row_chunks
from quantkit.tensors.scheme import QuantScheme

if TYPE_CHECKING:
    from quantkit.calibration.output_factors import OutputFactors

# Damping, in mean diagonals, for one token per input.
_NOISE = 3.0


@dataclass(frozen=True)
class Result:
    """A quantized linear: its weight on the CPU, the weight's error relative to its floats
    (Frobenius norms), and for the manifest how it was found.
    """

    weight: QuantTensor
    error: float
    record: Mapping[str, object]

    @classmethod
    def of(cls, quantized: QuantTensor, weight: Tensor, record: Mapping[str, object]) -> Result:
        """Return the result for a float weight [O, I]."""
        return cls(quantized, relative_error(quantized.to(weight.device), weight), record)


@dataclass(frozen=True)
class GroupSolver:
    """Quantizes linears to schemes by name, given sums over their shared inputs. Each process of a
    group solves its share of the rows, and all receive all rows; the kernels are for the device of
    the linears, `shared` are the outer scales of NVFP4, and `factors` show how the errors of
    outputs add up, where that is known.
    """

    schemes: Mapping[str, QuantScheme]
    scale_dtype: torch.dtype
    group: ProcessGroup
    kernels: ColumnKernels = TORCH
    shared: SharedScales | None = None
    factors: OutputFactors | None = None

    def solve(
        self,
        linears: Mapping[str, nn.Linear],
        statistics: HessianAccumulator,
        *,
        outputs: bool,
        bounded: bool = False,
    ) -> dict[str, Result]:
        """Quantize linears for their inputs. If the Hessian stays singular, they are rounded to
        nearest, with a `fallback` in their records, for which the gate refuses the result.

        Args:
            linears: float32 linears by name.
            statistics: of this process; they are consumed.
            outputs: whether the drift is that of the outputs.
            bounded: solve a linear again without the drift if making up for it changes the weights
                by more than `error_bound`, and round it to nearest if the second solution does so
                too.

        Returns:
            The results by name.

        Raises:
            NonFiniteError: if a weight or the Hessian holds NaN or Inf.
        """
        if not all(all_finite(linear.weight) for linear in linears.values()):
            raise NonFiniteError("a weight contains NaN or Inf")
        by_scheme: dict[QuantScheme, list[str]] = defaultdict(list)
        for name in linears:
            by_scheme[self.schemes[name]].append(name)
        rows_by_scheme = {
            scheme: _stack_weights_([linears[name] for name in names])
            for scheme, names in by_scheme.items()
        }
        try:
            solved, excesses = self._solve_schemes(
                rows_by_scheme, linears, statistics, drift_of_outputs=outputs, bounded=bounded
            )
        except SingularError as error:
            fallback = {"fallback": str(error)}
            return {
                name: self.round(name, linear.weight, fallback) for name, linear in linears.items()
            }
        except NonFiniteError as error:
            raise NonFiniteError(
                f"linear '{next(iter(linears))}': {error.problem}",
                hint=Message(Option("method", value="rtn"), " rounds without it"),
            ) from error
        results: dict[str, Result] = {}
        for scheme, names in by_scheme.items():
            quantized, report = solved[scheme]
            ends = accumulate((len(linears[name].weight) for name in names), initial=0)
            for name, rows in zip(names, pairwise(ends), strict=True):
                weight = linears[name].weight
                own = report.rows(*rows)
                record: dict[str, object] = {
                    "solver": "gptq",
                    "output_error": float(f"{own.output_error:.4g}"),
                    "damping": own.damping,
                    "dead_columns": own.dead_columns,
                }
                if name in excesses:
                    change, bound = excesses[name]
                    record["drift"] = (
                        f"ignored: corrected, it changed by {change:.3g}, expected at most"
                        f" {bound:.3g}"
                    )
                results[name] = Result.of(quantized.rows(*rows), weight, record)
        if bounded:
            for name, (change, bound) in self.find_excesses(results, linears).items():
                record = {
                    "rounding_reason": (
                        f"GPTQ changed it by {change:.3g}, expected at most {bound:.3g}"
                    )
                }
                results[name] = self.round(name, linears[name].weight, record)
        return results

    def find_excesses(
        self, results: Mapping[str, Result], linears: Mapping[str, nn.Linear]
    ) -> dict[str, tuple[float, float]]:
        """Return the error and `error_bound` of each linear that changed by more than that, in
        any process.
        """
        bounds: dict[str, float] = {}
        exceeding: list[float] = []
        for name, result in results.items():
            bounds[name] = self.error_bound(result.weight, linears[name].weight)
            exceeding.append(float(not result.error <= bounds[name]))  # also of NaN
        device = next(iter(linears.values())).weight.device
        votes = torch.tensor(exceeding, device=device)
        self.group.sum_(votes)  # machines may round differently
        excesses: dict[str, tuple[float, float]] = {}
        for (name, bound), vote in zip(bounds.items(), votes.tolist(), strict=True):
            if vote:
                excesses[name] = results[name].error, bound
        return excesses

    def round(self, name: str, weight: Tensor, record: Mapping[str, object]) -> Result:
        """Return a linear's weight [O, I] rounded to nearest."""
        quantized, solver = round_to_nearest(
            weight,
            self.schemes[name],
            self.scale_dtype,
            lambda _: self.kernels,
            outer=self._outer(name),
        )
        return Result.of(quantized.to("cpu"), weight, {"solver": solver, **record})

    def _outer(self, name: str) -> Tensor | None:
        if self.shared is None:
            return None
        return self.shared.of(name)

    def error_bound(self, quantized: QuantTensor, weight: Tensor) -> float:
        """Return the largest relative error of a weight [O, I] that `verify` accepts on every
        machine: the gate's bound, less `REPEATABLE`.
        """
        return weight_bound(quantized.to(weight.device), weight, self._coarsest) / (1 + REPEATABLE)

    @cached_property
    def _coarsest(self) -> QuantScheme:
        return coarsest(self.schemes.values())

    def _solve_schemes(
        self,
        rows_by_scheme: Mapping[QuantScheme, Tensor],
        linears: Mapping[str, nn.Linear],
        statistics: HessianAccumulator,
        *,
        drift_of_outputs: bool,
        bounded: bool,
    ) -> tuple[dict[QuantScheme, tuple[QuantTensor, GptqReport]], dict[str, tuple[float, float]]]:
        """Run GPTQ on all rows [O, I] of each scheme.

        Returns:
            The weight and report of each scheme; and with `bounded`, the linears whose drift was
            ignored, with the error that making up for it caused and their bound.
        """
        parts = {
            scheme: (rows[self.group.share(len(rows))], len(rows))
            for scheme, rows in rows_by_scheme.items()
        }
        hessian, paired, drift, paired_tokens = statistics.release(self.group)
        targets: dict[QuantScheme, Tensor] = {}
        if drift.any():
            diagonal = paired.diagonal().clone()
            damped = Damped.of_(paired, drift_damping(len(paired), paired_tokens))
            move = drift[self.group.share(len(drift))]
            for start, stop in row_chunks(
                len(move), move.shape[1], max_divided_elements(move.device)
            ):
                move[start:stop] = damped.divide(move[start:stop])
            del damped
            for scheme, (part, _) in parts.items():
                if drift_of_outputs:
                    assert len(parts) == 1, "the outputs are those of one linear"
                    change = move
                else:
                    change = times(part, self.group.join(move, len(drift)))
                targets[scheme] = change.add_(part)
            del move, change
            # `Damped.of_` has damped `paired` in place.
            paired.diagonal().copy_(diagonal)
        del drift
        hessian = paired if hessian is None else hessian
        del paired
        damped = Damped.of_(hessian)
        factors = self._output_factors(linears)
        solved = {}
        excesses: dict[str, tuple[float, float]] = {}
        for scheme, (part, total) in parts.items():
            target = targets.pop(scheme, None)
            if scheme.of_small_floats:
                nearest = self._round_share(scheme, linears, damped.diagonal)
            else:
                nearest = None
            factor = factors.pop(scheme, None)
            if factor is not None:
                share = self.group.share(total)
                factor = factor.rows(share.start, share.stop).to(part.device)
            solve_for = partial(self._solve_share, part, total, damped, scheme, nearest, factor)
            quantized, report = solve_for(target)
            if bounded and target is not None:
                excessive, exceeding_rows = self._find_exceeding_rows(quantized, scheme, linears)
                if excessive:
                    # Outlier inputs amplify the errors of earlier layers. The weights that make up
                    # for such a drift fit the calibration samples, but the gate refuses them.
                    without_drift, second_report = solve_for(None)
                    quantized = without_drift.merge_rows(exceeding_rows, quantized)
                    report = second_report.merge_rows(exceeding_rows, report)
                    excesses |= excessive
            solved[scheme] = quantized, report
        return solved, excesses

    def _solve_share(
        self,
        part: Tensor,
        total: int,
        damped: Damped,
        scheme: QuantScheme,
        start: QuantTensor | None,
        output_factor: OutputFactor | None,
        target: Tensor | None,
    ) -> tuple[QuantTensor, GptqReport]:
        """Run GPTQ on this process's rows of a scheme, and join the rows of all processes on the
        CPU.
        """
        rows, report = solve(
            part,
            damped,
            scheme,
            self.scale_dtype,
            target=target,
            kernels=self.kernels,
            start=start,
            output_factor=output_factor,
        )
        error, energy = (self.group.join(one, total).cpu() for one in (report.error, report.energy))
        joined = rows.map(partial(self._join_rows, total))
        return joined.to("cpu"), GptqReport(report.damping, report.dead_columns, error, energy)

    def _find_exceeding_rows(
        self, quantized: QuantTensor, scheme: QuantScheme, linears: Mapping[str, nn.Linear]
    ) -> tuple[dict[str, tuple[float, float]], Tensor]:
        """Return the linears of a scheme that `find_excesses` finds in their stacked rows, and a
        mask [O] of these.
        """
        names = [name for name in linears if self.schemes[name] == scheme]
        counts = [len(linears[name].weight) for name in names]
        results: dict[str, Result] = {}
        for name, rows in zip(names, pairwise(accumulate(counts, initial=0)), strict=True):
            results[name] = Result.of(quantized.rows(*rows), linears[name].weight, {})
        excesses = self.find_excesses(results, linears)
        flags = torch.tensor([name in excesses for name in names])
        return excesses, flags.repeat_interleave(torch.tensor(counts))

    def _output_factors(self, linears: Mapping[str, nn.Linear]) -> dict[QuantScheme, OutputFactor]:
        """Return the factor of the outputs of each scheme's linears together, in their order, as
        far as there is one.
        """
        if self.factors is None:
            return {}
        whole, factor_by_linear = self.factors.take(list(linears))
        if not factor_by_linear:
            return {}
        by_scheme: dict[QuantScheme, list[OutputFactor]] = defaultdict(list)
        for name in linears:
            by_scheme[self.schemes[name]].append(factor_by_linear[name])
        if whole is not None and len(by_scheme) == 1:
            return {next(iter(by_scheme)): whole}
        return {scheme: OutputFactor.concatenate(parts) for scheme, parts in by_scheme.items()}

    def _round_share(
        self, scheme: QuantScheme, linears: Mapping[str, nn.Linear], importance: Tensor
    ) -> QuantTensor:
        """Round this process's share of the rows of a scheme to nearest."""
        rounded = [
            round_to_nearest(
                linear.weight,
                scheme,
                self.scale_dtype,
                lambda _: self.kernels,
                importance,
                self._outer(name),
            )[0]
            for name, linear in linears.items()
            if self.schemes[name] == scheme
        ]
        all_rows = concatenate_rows(rounded)
        share = self.group.share(len(all_rows.codes))
        return all_rows.rows(share.start, share.stop)

    def _join_rows(self, total: int, rows: Tensor) -> Tensor:
        """Return all rows of a tensor, of which each process has its share; floats of 16 bits
        travel as float32.
        """
        if rows.is_floating_point():
            wide = rows.float()
        else:
            wide = rows
        return self.group.join(wide, total).to(rows.dtype)


def drift_damping(inputs: int, tokens: int) -> float:
    """Damping, as a share of the mean diagonal, of the Hessian that drift is divided by: in this
    regression of the drift on the inputs, the fewer tokens there are per input, the more of the
    result is noise.
    """
    return max(DAMPING, _NOISE * inputs / tokens)


def _stack_weights_(linears: Sequence[nn.Linear]) -> Tensor:
    """Return the rows of all linears, one linear below the other; the linears' own weights become
    views of them.
    """
    if len(linears) == 1:
        return linears[0].weight
    rows = torch.cat([linear.weight for linear in linears])
    for linear, part in zip(
        linears, torch.split(rows, [len(linear.weight) for linear in linears]), strict=True
    ):
        linear.weight = nn.Parameter(part, requires_grad=False)
    return rows
