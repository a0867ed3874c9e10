"""Schemes: their spelling, and how they fit a row."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT
from schemes import any_scheme

from quantkit.errors import RequestError
from quantkit.tensors.scheme import SCHEMES, SPELLINGS, QuantScheme


@settings(deadline=None, derandomize=True)
@given(
    st.builds(
        QuantScheme,
        st.sampled_from([4, 8]),
        st.none() | st.integers(1, 99).map(lambda n: 8 * n),
        st.booleans(),
    )
)
def test_what_is_offered_is_read_by_its_name_and_nothing_else(scheme: QuantScheme) -> None:
    assert any_scheme(str(scheme)) == scheme
    if scheme in SCHEMES.values():
        assert QuantScheme.parse(str(scheme)) == scheme
    else:
        with pytest.raises(RequestError, match=r"int4-g128"):
            QuantScheme.parse(str(scheme))


def test_the_schemes_offered_are_those_of_the_documents() -> None:
    assert (
        " ".join(SCHEMES)
        == "int8 int4-g32 int4-g64 int4-g128 int4-g32-asym int4-g64-asym int4-g128-asym"
    )
    assert set(re.split(", | or ", SPELLINGS)) == {name for name in SCHEMES if "asym" not in name}
    spelled = re.compile(r"\bint[48](?:-g\d+)?(?:-asym)?\b(?!-|\.partial)")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for line in page.read_text().splitlines():
            if requested := re.search(r"--scheme (\S+)", line):
                assert set(spelled.findall(requested[1].replace("[-asym]", ""))) <= set(SCHEMES), (
                    page,
                    line,
                )


@pytest.mark.parametrize(
    ("text", "hint"), [("int4", "int4-g128"), ("INT4-asym ", "int4-g128-asym")]
)
def test_int4_per_row_is_reported_to_take_groups(text: str, hint: str) -> None:
    with pytest.raises(RequestError, match=rf"needs a group size: {hint}$"):
        QuantScheme.parse(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int8", QuantScheme(8, None)),
        ("int4-g128", QuantScheme(4, 128)),
        ("int4-g64-asym", QuantScheme(4, 64, symmetric=False)),
        (" INT4-G32\n", QuantScheme(4, 32)),
    ],
)
def test_schemes_are_read(text: str, expected: QuantScheme) -> None:
    assert QuantScheme.parse(text) == expected
    assert expected.levels == 2**expected.bits


BAD = [
    "",
    "int",
    "int2",
    "int16",
    "int4-",
    "int4-g",
    "int4g128",
    "int4-128",
    "g128",
    "int4-g-8",
    "int4-asym-g32",
    "int4-g32-sym",
    "int4-g32 asym",
    "fp4",
    "int4-g1e2",
    "w4a16",
    "int8 int4",
    "int8-asym",
    "int8-g128",
    "int4-g16",
    "int4-g256",
]


@pytest.mark.parametrize("text", BAD)
def test_bad_spellings_are_refused_with_the_good_ones(text: str) -> None:
    with pytest.raises(
        RequestError, match=r"unknown quantization scheme .*expected int8, int4-g32"
    ) as caught:
        QuantScheme.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "near"),
    [("int4_g64", "int4-g64"), ("q4k", "q4_k"), ("float", None)],
)
def test_a_similar_scheme_is_named(text: str, near: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        QuantScheme.parse(text)
    assert caught.value.hint == (near and f"did you mean {near}?")


@pytest.mark.parametrize("size", [-8, 0, 12, 1, 100])
def test_group_sizes_that_are_no_multiple_of_eight_are_refused(size: int) -> None:
    with pytest.raises(RequestError, match="expected a positive multiple of 8"):
        QuantScheme(4, size)


@pytest.mark.parametrize("bits", [0, 2, 3, 16])
def test_other_bits_are_refused(bits: int) -> None:
    with pytest.raises(RequestError, match=f"found {bits}, expected 4 or 8"):
        QuantScheme(bits, None)


@pytest.mark.parametrize(
    ("requested", "columns", "used"),
    [
        ("int4-g128", 11008, "int4-g128"),
        ("int4-g128", 96, "int4-g32"),
        ("int4-g128", 192, "int4-g64"),
        ("int4-g64", 96, "int4-g32"),
        ("int4-g256", 384, "int4-g128"),
        ("int4-g128", 48, "int8"),
        ("int4-g32", 80, "int8"),
        ("int4-g32-asym", 80, "int8"),
        ("int4-g128-asym", 96, "int4-g32-asym"),
        ("int8-g64", 96, "int8-g32"),
        ("int4-g24", 96, "int4-g24"),
        ("int4-g24", 128, "int8"),
        ("int4", 7, "int4"),
        ("int8", 7, "int8"),
        ("int8-asym", 7, "int8-asym"),
        ("q4_k", 512, "q4_k"),
        ("q3_k", 96, "int4-g32"),
        ("q4_k", 96, "q5_0"),
        ("q5_k", 96, "q5_1"),
        ("q6_k", 96, "int8-g32"),
        ("q6_k", 80, "int8"),
    ],
)
def test_the_policy_for_rows_that_do_not_fit(requested: str, columns: int, used: str) -> None:
    fitted = any_scheme(requested).fit_to_columns(columns)
    assert str(fitted) == used
    assert fitted.groups(columns) * (fitted.group_size or columns) == columns


@settings(deadline=None, derandomize=True)
@given(
    st.sampled_from(["int4-g32", "int4-g128", "int4-g64-asym", "int8-g32"]), st.integers(1, 5000)
)
def test_a_fitted_scheme_fits_and_stays(text: str, columns: int) -> None:
    fitted = any_scheme(text).fit_to_columns(columns)
    assert fitted.groups(columns) >= 1
    assert fitted.fit_to_columns(columns) == fitted
