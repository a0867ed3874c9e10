"""Tables of figures in every style, and what they call models."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from quantkit.evals.table import NONE, Table, parse_named_paths, render, short_names

TABLE = Table(
    "Made of A & B:",
    ("model", "MB", "KL", "backend"),
    [
        ("bf16", "2.57", NONE, "torch"),
        ("int4_g64", "1.02", "0.0123 ± 0.0004", "cpu-fast"),
        ("a|b", "11.02", "(1.2 ± 0.3)e-06", "cpu"),
    ],
)


def test_on_a_terminal_columns_are_aligned_without_bars() -> None:
    assert render([TABLE], "terminal") == [
        "Made of A & B:",
        "model        MB               KL  backend",
        "--------  -----  ---------------  --------",
        "bf16       2.57                -  torch",
        "int4_g64   1.02  0.0123 ± 0.0004  cpu-fast",
        "a|b       11.02  (1.2 ± 0.3)e-06  cpu",
    ]


def test_a_table_that_is_too_wide_is_split_with_the_first_column_in_each_part() -> None:
    heads = ("model", *(f"figure {index}" for index in range(20)))
    wide = Table(
        "All:",
        heads,
        [(f"model {row}", *(f"{row}.{index:06}" for index in range(20))) for row in range(3)],
    )
    lines = render([wide], "terminal")
    assert max(map(len, lines)) <= 100
    parts = "\n".join(lines[1:]).split("\n\n")
    assert len(parts) == 3
    assert [line.split()[0] for line in parts[2].splitlines()] == [
        "model",
        "-------",
        "model",
        "model",
        "model",
    ]
    assert re.findall(r"figure \d+", "\n".join(lines)) == list(heads[1:])
    assert render([wide], "terminal", width=400)[1].endswith("figure 19")


def test_long_names_are_broken_and_nothing_of_them_is_lost() -> None:
    long = "/".join(["a-very-long-folder"] * 10)
    lines = render(
        [Table(None, ("model", "MB", "why"), [(long, "1.5", "words " * 40)])], "terminal", width=60
    )
    assert max(map(len, lines)) <= 60
    assert (
        "".join(line[:24].strip() for line in lines if "-/" not in line).count("a-very-long-folder")
        >= 10
    )
    assert " ".join(lines).count("words") == 40


def test_several_tables_have_a_blank_line_between() -> None:
    assert render([TABLE, TABLE], "terminal")[6:8] == ["", "Made of A & B:"]
    assert render([], "terminal") == []


def test_in_markdown_the_source_is_aligned_and_bars_are_escaped() -> None:
    assert render([TABLE], "markdown") == [
        "Made of A & B:",
        "",
        "| model    |    MB |              KL | backend  |",
        "| -------- | ----: | --------------: | -------- |",
        "| bf16     |  2.57 |               - | torch    |",
        "| int4_g64 |  1.02 | 0.0123 ± 0.0004 | cpu-fast |",
        r"| a\|b     | 11.02 | (1.2 ± 0.3)e-06 | cpu      |",
    ]


def test_in_latex_names_are_escaped_and_figures_are_mathematics() -> None:
    assert render([TABLE], "latex") == [
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        r"\caption{Made of A \& B:}",
        r"\begin{tabular}{lrrl}",
        r"\toprule",
        r"model & MB & KL & backend \\",
        r"\midrule",
        r"bf16 & 2.57 & -- & torch \\",
        r"int4\_g64 & 1.02 & $0.0123 \pm 0.0004$ & cpu-fast \\",
        r"a\textbar{}b & 11.02 & $(1.2 \pm 0.3) \times 10^{-6}$ & cpu \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    assert "table" not in "".join(render([Table(None, ("a",), [])], "latex")).replace("tabular", "")
    (row,) = (
        line
        for line in render([Table(None, ("a",), [(r"50%_#$&{}~^\<",)])], "latex")
        if "50" in line
    )
    assert (
        row == r"50\%\_\#\$\&\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}\textless{} \\"
    )
    assert r"a & $-1.5$ & 12 $\pm$ 3 \% \\" in render(
        [Table(None, ("", "", ""), [("a", "-1.5", "12 ± 3 %")])], "latex"
    )


def test_in_csv_errors_have_columns_of_their_own() -> None:
    rows = list(
        csv.reader(
            render([Table(None, TABLE.head, [*TABLE.rows, ("x, y", "1", "0.5", '"')])], "csv")
        )
    )
    assert rows == [
        ["model", "mb", "kl", "kl_error", "backend"],
        ["bf16", "2.57", "", "", "torch"],
        ["int4_g64", "1.02", "0.0123", "0.0004", "cpu-fast"],
        ["a|b", "11.02", "1.2e-06", "0.3e-06", "cpu"],
        ["x, y", "1", "0.5", "", '"'],
    ]


def test_in_csv_heads_are_for_programs_and_hold_the_unit() -> None:
    head = ("model", "MB a token", "decode 1", "share", "gsm8k exact_match,strict-match")
    rows = [("50%", "1.5", "10 ± 5%", "45%", "0.5 ± 0.1"), ("b", "2", "9 ± 12%", NONE, "0.25")]
    found = list(csv.reader(render([Table(None, head, rows)], "csv")))
    assert found == [
        [
            "model",
            "mb_a_token",
            "decode_1",
            "decode_1_spread_percent",
            "share_percent",
            "gsm8k_exact_match_strict_match",
            "gsm8k_exact_match_strict_match_error",
        ],
        ["50%", "1.5", "10", "5", "45", "0.5", "0.1"],
        ["b", "2", "9", "12", "", "0.25", ""],
    ]


@pytest.mark.parametrize("style", ["terminal", "markdown", "latex", "csv"])
def test_a_line_is_one_line_whatever_a_name_holds(style: str) -> None:
    lines = render([Table("t", ("model", "MB"), [("two\nlines\x1c", "1")])], style)  # type: ignore[arg-type]
    assert not any("\n" in line for line in lines)
    assert sum("two lines" in line for line in lines) == 1


def test_models_are_called_by_the_shortest_ends_that_distinguish_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert short_names(["runs/a/int8", "runs/a/int4"]) == ["int8", "int4"]
    assert short_names(["runs/a/int4", "runs/b/int4", "runs/b/int8"]) == [
        "a/int4",
        "b/int4",
        "int8",
    ]
    assert short_names(["a/x/int4", "b/x/int4"]) == ["a/x/int4", "b/x/int4"]
    assert short_names(["int4", Path("old/int4")]) == [f"{tmp_path.name}/int4", "old/int4"]
    assert short_names(["a/../b/", "./b"]) == ["b", "b"]  # one path, spelled twice
    assert short_names(["."]) == [tmp_path.name]
    assert short_names(["/", "/x"]) == ["/", "x"]


def test_a_name_before_the_path_is_taken_unless_such_a_path_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_named_paths(["ours=runs/7", Path("runs/7")]) == [
        ("ours", Path("runs/7")),
        (None, Path("runs/7")),
    ]
    assert parse_named_paths(["lr=0.1"]) == [("lr", Path("0.1"))]
    (tmp_path / "lr=0.1").mkdir()
    assert parse_named_paths(["lr=0.1"]) == [(None, Path("lr=0.1"))]
    assert parse_named_paths(["ours=runs/lr=0.1"]) == [("ours", Path("runs/lr=0.1"))]
    assert parse_named_paths(["runs/lr=0.2", "=a", "a="]) == [
        (None, Path("runs/lr=0.2")),
        (None, Path("=a")),
        (None, Path("a=")),
    ]
