"""Schemes: their spelling, and how they fit a row."""

from __future__ import annotations

import re

import pytest
from case_names import case
from error_parts import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT
from schemes import any_scheme

from quantkit.errors import RequestError
from quantkit.tensors.scheme import GGUF_SCHEMES, SCHEMES, SPELLINGS, QuantScheme


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
    # Q8_0 of GGUF is offered by the name int8-g32.
    if scheme in (*SCHEMES.values(), *GGUF_SCHEMES.values()):
        assert QuantScheme.parse(str(scheme)) == scheme
    else:
        with raises(RequestError, "int4-g128"):
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
    with pytest.raises(RequestError, match=rf" {hint}$"):
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


def test_bad_spellings_are_refused_with_the_good_ones() -> None:
    for text in BAD:
        with case(text):
            with raises(RequestError, found=repr(text)) as caught:
                QuantScheme.parse(text)
            assert str(caught.value.expected).startswith(SPELLINGS)


@pytest.mark.parametrize(
    ("text", "near"),
    [("int4_g64", "int4-g64"), ("q4k", "q4_k"), ("float", None)],
)
def test_a_similar_scheme_is_named(text: str, near: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        QuantScheme.parse(text)
    hint = caught.value.hint
    if near is None:
        assert hint is None
    else:
        assert hint is not None
        assert f" {near}?" in hint


@pytest.mark.parametrize("size", [-8, 0, 12, 1, 100])
def test_group_sizes_that_are_no_multiple_of_eight_are_refused(size: int) -> None:
    with raises(RequestError, found=size):
        QuantScheme(4, size)


@pytest.mark.parametrize("bits", [0, 2, 3, 16])
def test_other_bits_are_refused(bits: int) -> None:
    with raises(RequestError, found=bits, expected="4 or 8"):
        QuantScheme(bits, None)


# A scheme, the columns of a row, and the scheme that the row gets.
FITTED = [
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
]


def test_the_policy_for_rows_that_do_not_fit() -> None:
    for requested, columns, expected in FITTED:
        fitted = any_scheme(requested).fit_to_columns(columns)
        assert str(fitted) == expected, (requested, columns)
        group_size = fitted.group_size or columns
        assert fitted.groups(columns) * group_size == columns, (requested, columns)


@settings(deadline=None, derandomize=True)
@given(
    st.sampled_from(["int4-g32", "int4-g128", "int4-g64-asym", "int8-g32"]), st.integers(1, 5000)
)
def test_a_fitted_scheme_fits_and_stays(text: str, columns: int) -> None:
    fitted = any_scheme(text).fit_to_columns(columns)
    assert fitted.groups(columns) >= 1
    assert fitted.fit_to_columns(columns) == fitted
