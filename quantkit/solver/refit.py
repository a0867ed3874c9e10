"""Scales that fit given codes best, by least squares."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.solver.grid import refit_bytes
from quantkit.tensors.products import times


def refit_scales(
    gradient: Tensor, codes: Tensor, hessian: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scales [G, O] that fit given codes best, by least squares over an output's groups.

    A group whose fitted scale is not finite or changes sign keeps its old one.

    Args:
        gradient: [I, O] float32, Hessian times what the values of the codes lack of the target.
        codes: [I, O] float32, less their zero points.
        hessian: [I, I] float32, positive definite.
        scale: [G, O] the scales so far, in the dtype they are stored in.

    Returns:
        The scales; by how much the squared output error of each row is less, [O]; and by how much
        the squared outputs of the target are more than that was, [O].
    """
    groups, rows = scale.shape
    size = codes.shape[0] // groups
    found = torch.empty_like(scale)
    gain = scale.new_empty(rows).float()
    explained = scale.new_empty(rows).float()
    step = max(1, refit_bytes(codes.device) // (4 * groups * (groups + 3 * size)))
    for start in range(0, rows, step):
        part = codes[:, start : start + step].contiguous()
        count = part.shape[1]
        normal = torch.empty(groups, groups, count, device=codes.device)
        for group in range(groups):
            first = group * size
            last = (group + 1) * size
            products = times(hessian[first:, first:last], part[first:last]).mul_(part[first:])
            sums = products.view(groups - group, size, count).sum(1)
            normal[group:, group] = sums
            normal[group, group:] = sums
        right = (part * gradient[:, start : start + step]).view(groups, size, count).sum(1)
        system = normal.permute(2, 0, 1).contiguous()
        del normal
        diagonal = system.diagonal(dim1=1, dim2=2)
        diagonal += 1e-6 * diagonal.mean(-1, keepdim=True) + 1e-20
        here = slice(start, start + step)
        stored = scale[:, here]
        # By Cholesky: torch 2.13's LU of a batch on two threads fails for 172 groups and more (its
        # MKL's SLASWP).
        factor, failed = torch.linalg.cholesky_ex(system)
        fitted = (
            torch.cholesky_solve(right.t().unsqueeze(-1), factor)
            .squeeze(-1)
            .t()
            .add_(stored)
            .to(scale.dtype)
        )
        usable = torch.isfinite(fitted) & (fitted * stored.sign() > 0) & (failed == 0)
        found[:, here] = torch.where(usable, fitted, stored)
        before = stored.float()
        change = found[:, here].float() - stored.float()
        gain[here] = _twice_less_square(change, right, system)
        explained[here] = -_twice_less_square(-before, right, system)
    return found, gain, explained


def _twice_less_square(change: Tensor, right: Tensor, system: Tensor) -> Tensor:
    """``2 * change @ right - change @ system @ change`` for each of N, with [G, N], [G, N] and
    [N, G, G].
    """
    products = torch.bmm(system, change.t().unsqueeze(-1)).squeeze(-1).t()
    return (change * (2 * right - products)).sum(0)
