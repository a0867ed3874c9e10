"""Scales that fit given codes best, by least squares."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.solver.grid import refit_bytes
from quantkit.tensors.products import times


def refit_scales(
    gradient: Tensor, codes: Tensor, hessian: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Fit the scales [G, O] to given codes, by least squares over an output's groups.

    A group whose fitted scale is not finite or changes sign keeps its old one.

    Args:
        gradient: [I, O] float32, Hessian times what the values of the codes lack of the target.
        codes: [I, O] float32, less their zero points.
        hessian: [I, I] float32, positive definite.
        scale: [G, O] the scales so far, in the dtype they are stored in.

    Returns:
        The scales; by how much the squared output error of each row is less, [O]; and by how much
        the target's squared outputs exceed the squared output error before the fit, [O].
    """
    groups, rows = scale.shape
    size = codes.shape[0] // groups
    refitted = torch.empty_like(scale)
    gain = scale.new_empty(rows).float()
    explained = scale.new_empty(rows).float()
    # Of each row, the system and the parts of the products that make it up.
    step = max(1, refit_bytes(codes.device) // (4 * groups * (groups + 3 * size)))
    for start in range(0, rows, step):
        part = codes[:, start : start + step].contiguous()
        count = part.shape[1]
        normal = torch.empty(groups, groups, count, device=codes.device)
        for group in range(groups):
            first = group * size
            last = (group + 1) * size
            products = times(hessian[first:, first:last], part[first:last]).mul_(part[first:])
            # The system is symmetric: each pair of groups is multiplied once.
            sums = products.view(groups - group, size, count).sum(1)
            normal[group:, group] = sums
            normal[group, group:] = sums
        right = (part * gradient[:, start : start + step]).view(groups, size, count).sum(1)
        system = normal.permute(2, 0, 1).contiguous()
        del normal
        # A group whose codes are all zero has a zero row, which Cholesky would reject.
        diagonal = system.diagonal(dim1=1, dim2=2)
        diagonal += 1e-6 * diagonal.mean(-1, keepdim=True) + 1e-20
        rows_part = slice(start, start + step)
        stored = scale[:, rows_part]
        # By Cholesky: torch 2.13's LU of a batch on two threads fails for 172 groups and more (its
        # MKL's SLASWP).
        factor, failed = torch.linalg.cholesky_ex(system)
        solved = torch.cholesky_solve(right.t().unsqueeze(-1), factor).squeeze(-1).t()
        fitted = solved.add_(stored).to(scale.dtype)
        usable = torch.isfinite(fitted) & (fitted * stored.sign() > 0) & (failed == 0)
        refitted[:, rows_part] = torch.where(usable, fitted, stored)
        before = stored.float()
        # The change as stored, which rounding makes different from the solution.
        stored_change = refitted[:, rows_part].float() - stored.float()
        gain[rows_part] = _twice_less_square(stored_change, right, system)
        explained[rows_part] = -_twice_less_square(-before, right, system)
    return refitted, gain, explained


def _twice_less_square(change: Tensor, right: Tensor, system: Tensor) -> Tensor:
    """Compute ``2 * change @ right - change @ system @ change`` for each of N, with [G, N], [G, N]
    and [N, G, G].
    """
    products = torch.bmm(system, change.t().unsqueeze(-1)).squeeze(-1).t()
    return (change * (2 * right - products)).sum(0)
