"""Tables of codes' numbers, against rounding number by number."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from quantkit.tensors import code_table
from quantkit.tensors.code_table import CodeTable, find_table
from quantkit.tensors.float_codes import round_to_code_values
from quantkit.tensors.scheme import TABLE, Codes

CPU = torch.device("cpu")
TABLES = [kind for kind in Codes if kind is not Codes.INTEGERS]
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def table_of(kind: Codes) -> CodeTable:
    table = find_table(kind, CPU)
    assert table is not None
    return table


def quotients_of(table: CodeTable) -> Tensor:
    """Numbers within and beyond a table, its own, the middles between them and what is next to
    these.
    """
    middles = (table.values[1:] + table.values[:-1]) / 2
    up = torch.nextafter(middles, torch.tensor(torch.inf))
    down = torch.nextafter(middles, torch.tensor(-torch.inf))
    scattered = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * table.values[-1]
    far = torch.tensor([1e-30, -1e-30, 1e30, -1e30, torch.inf, -torch.inf])
    return torch.cat([table.values, middles, up, down, scattered, far])


@pytest.mark.parametrize("kind", TABLES)
def test_no_number_of_a_table_is_nearer_than_the_one_found(kind: Codes) -> None:
    table = table_of(kind)
    assert len(table.bounds) == len(table.values) - 1
    assert (table.bounds.diff() > 0).all()
    quotients = quotients_of(table)
    finite = quotients[quotients.isfinite()]
    distances = (finite.double().unsqueeze(1) - table.values.double()).abs()
    rounded = table.round(finite).double()
    assert torch.equal((finite.double() - rounded).abs(), distances.amin(1))


def test_small_floats_are_rounded_as_torch_and_the_standard_do() -> None:
    e4m3 = quotients_of(table_of(Codes.E4M3))
    limited = e4m3.clamp(-448, 448)
    expected = limited.to(torch.float8_e4m3fn).float()
    assert torch.equal(table_of(Codes.E4M3).round(e4m3), expected)
    # Half way between two numbers of e2m1, the one with an even code is taken.
    for lower, (first, second) in enumerate(pairwise(E2M1)):
        middle = torch.tensor([(first + second) / 2])
        even = E2M1[lower if lower % 2 == 0 else lower + 1]
        assert table_of(Codes.E2M1).round(middle).item() == even
        assert table_of(Codes.E2M1).round(-middle).item() == -even


@pytest.mark.parametrize("kind", [Codes.E2M1, Codes.E4M3])
def test_tables_round_small_floats_to_the_values_of_their_codes(kind: Codes) -> None:
    quotients = quotients_of(table_of(kind))
    rounded = table_of(kind).round(quotients)
    expected = round_to_code_values(quotients, kind)
    assert torch.equal(rounded, expected)
    negative = quotients < 0
    assert torch.equal(rounded.signbit()[negative], expected.signbit()[negative])


def test_the_index_in_the_integer_table_is_the_code() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = code_table.look_up(codes)
    assert values.tolist() == list(TABLE)
    assert torch.equal(code_table.find_nearest(values), codes)


def test_integers_have_no_table() -> None:
    assert find_table(Codes.INTEGERS, CPU) is None
