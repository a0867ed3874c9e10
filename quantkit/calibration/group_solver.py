"""GPTQ for linears that share their inputs: those of one scheme together, by all processes together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from quantkit.calibration.hessian import HessianAccumulator
from quantkit.distributed.group import ProcessGroup
from quantkit.quality.bounds import REPEATABLE, coarsest, weight_bound
from quantkit.solver.columns import TORCH, ColumnKernels
from quantkit.solver.gptq import DAMPING, Damped, GptqReport, SingularError, solve
from quantkit.solver.portions import divided_at_once
from quantkit.tensors.products import times
from quantkit.tensors.qtensor import ROUNDING, QuantTensor, quantize_rtn, relative_error, row_chunks
from quantkit.tensors.scheme import QuantScheme

_NOISE = 3.0  # damping, in mean diagonals, where there is one token for each input

Result = tuple[QuantTensor, dict[str, object]]
"""Codes, and what the manifest says of how they were found."""


@dataclass(frozen=True)
class GroupSolver:
    """Quantizes linears, given sums over the inputs that they share.

    Attributes:
        schemes: by name of the linear.
        scale_dtype: dtype the scales are stored in.
        group: the processes; each solves its share of the rows, and all get all of them.
        kernels: of the device where the linears are.
    """

    schemes: Mapping[str, QuantScheme]
    scale_dtype: torch.dtype
    group: ProcessGroup
    kernels: ColumnKernels = TORCH

    def solve(
        self, linears: Mapping[str, nn.Linear], statistics: HessianAccumulator, *, outputs: bool
    ) -> dict[str, Result]:
        """Results on the CPU, by name; a Hessian that stays singular leaves the linears rounded to nearest.

        Args:
            linears: by name; float32.
            statistics: of all processes; used up.
            outputs: whether the drift is that of the outputs.

        Raises:
            NonFiniteError: if a weight or the Hessian holds NaN or Inf.
        """
        by_scheme: dict[QuantScheme, list[str]] = defaultdict(list)
        for name in linears:
            by_scheme[self.schemes[name]].append(name)
        weights = {scheme: _stacked([linears[name] for name in names]) for scheme, names in by_scheme.items()}
        try:
            solved = self._solve_rows(weights, statistics, outputs=outputs)
        except SingularError as error:
            return {
                name: (self.rounded(name, linear.weight), {"solver": ROUNDING, "fallback": str(error)})
                for name, linear in linears.items()
            }
        results: dict[str, Result] = {}
        for scheme, names in by_scheme.items():
            start = 0
            for name in names:
                rows = start, start + len(linears[name].weight)
                quantized, report = solved[scheme]
                results[name] = quantized.rows(*rows), _record(report.rows(*rows))
                start = rows[1]
        return results

    def rounded(self, name: str, weight: Tensor) -> QuantTensor:
        """A linear's weight [O, I] rounded to nearest, on the CPU."""
        return quantize_rtn(weight, self.schemes[name], self.scale_dtype).to("cpu")

    def change(self, quantized: QuantTensor, weight: Tensor) -> tuple[float, float]:
        """How much codes change a weight [O, I], relative to it, and what `verify` allows wherever it measures."""
        error = relative_error(quantized.to(weight.device), weight)
        return error, weight_bound(quantized, weight, self._coarsest) / (1 + REPEATABLE)

    @cached_property
    def _coarsest(self) -> QuantScheme:
        return coarsest(self.schemes.values())

    def _solve_rows(
        self, weights: Mapping[QuantScheme, Tensor], statistics: HessianAccumulator, *, outputs: bool
    ) -> dict[QuantScheme, tuple[QuantTensor, GptqReport]]:
        """GPTQ on all rows [O, I] of each scheme."""
        parts = {scheme: (rows[self.group.share(len(rows))], len(rows)) for scheme, rows in weights.items()}
        hessian, paired, drift = statistics.release()
        targets: dict[QuantScheme, Tensor] = {}
        if drift.any():
            diagonal = paired.diagonal().clone()
            move = self._divided(drift, Damped.of_(paired, drift_damping(len(paired), statistics.pairs)))
            for scheme, (part, _) in parts.items():
                own = move if outputs else times(part, self.group.join(move, len(drift)))
                targets[scheme] = own.add_(part)
            del move
            paired.diagonal().copy_(diagonal)
        del drift
        hessian = paired if hessian is None else hessian
        del paired
        damped = Damped.of_(hessian)
        found = {}
        for scheme, (part, total) in parts.items():
            target = targets.pop(scheme, None)
            solved = solve(part, damped, scheme, self.scale_dtype, target=target, kernels=self.kernels)
            found[scheme] = self._joined(*solved, total)
        return found

    def _divided(self, drift: Tensor, followed: Damped) -> Tensor:
        """This process's rows of a drift [R, I], used up, divided by the Hessian of the samples that show it."""
        own = drift[self.group.share(len(drift))]
        for start, stop in row_chunks(len(own), own.shape[1], divided_at_once(own.device)):
            own[start:stop] = followed.divide(own[start:stop])
        return own

    def _joined(self, quantized: QuantTensor, report: GptqReport, total: int) -> tuple[QuantTensor, GptqReport]:
        """The rows of all processes, on the CPU."""
        codes, error, energy = (self.group.join(rows, total) for rows in (quantized.codes, report.error, report.energy))
        scale = self.group.join(quantized.scale.float(), total).to(self.scale_dtype)
        zero = None if quantized.zero is None else self.group.join(quantized.zero, total)
        return (
            QuantTensor(codes, scale, zero, quantized.scheme).to("cpu"),
            GptqReport(report.damping, report.dead_columns, error.cpu(), energy.cpu()),
        )


def drift_damping(inputs: int, tokens: int) -> float:
    """Damping, as a share of the mean diagonal, of the Hessian by which drift is divided.

    That is a regression of the drift on the inputs: the fewer tokens it rests on for each of them, the more of what it
    finds is noise.
    """
    return max(DAMPING, _NOISE * inputs / tokens)


def _stacked(linears: Sequence[nn.Linear]) -> Tensor:
    """The rows of some linears, one below the other; the linears' own weights become views of them."""
    if len(linears) == 1:
        return linears[0].weight
    rows = torch.cat([linear.weight for linear in linears])
    start = 0
    for linear in linears:
        stop = start + len(linear.weight)
        linear.weight = nn.Parameter(rows[start:stop], requires_grad=False)
        start = stop
    return rows


def _record(report: GptqReport) -> dict[str, object]:
    return {
        "solver": "gptq",
        "output_error": float(f"{report.output_error:.4g}"),
        "damping": report.damping,
        "dead_columns": report.dead_columns,
    }
