"""Models side by side: the figures, the report, its data and its picture."""

from __future__ import annotations

import csv
import html
import json
import math
import re
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path

import oracle
import pytest

import quantkit
from quantkit.cli.files import Outputs
from quantkit.data.files import EXCERPT, excerpt
from quantkit.errors import CheckpointError, DestinationError, NonFiniteError, RequestError
from quantkit.evals.evaluate import evaluate
from quantkit.evals.evaluation import Evaluation
from quantkit.evals.models import open_models
from quantkit.evals.plot import picture
from quantkit.evals.report import build_sheet, build_tables, method, render_markdown
from quantkit.evals.table import render
from quantkit.evals.texts import DocumentScore
from quantkit.files.source import SourceFile
from quantkit.formats.detect import open_checkpoint
from quantkit.quality.figures import Estimate
from quantkit.quality.measures import compare, perplexity_estimates, text_windows
from quantkit.text.tokenizer import load_tokenizer

WINDOW = 128


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> dict[str, Path]:
    """The demo model in bfloat16, int8 and int4, and two texts."""
    target = tmp_path_factory.mktemp("models")
    quantkit.convert(demo_model, target / "bf16")
    for scheme in ("int8", "int4-g64"):
        quantkit.quantize(target / "bf16", target / scheme, scheme, method="rtn")
    lines = excerpt().splitlines(keepends=True)
    (target / "first.txt").write_text("".join(lines[:20]))
    (target / "wiki.txt").write_text(f" = A title = \n \n {lines[25].strip()} <unk> @-@ like .\n")
    return {path.name: path for path in target.iterdir()}


@pytest.fixture(scope="module")
def found(folders: dict[str, Path]) -> Evaluation:
    models, texts = (
        [folders["int8"], folders["int4-g64"]],
        [folders["first.txt"], folders["wiki.txt"]],
    )
    return evaluate(models, texts=texts, against=folders["bf16"], window=WINDOW, speed=True)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.slow
def test_the_figures_are_those_of_the_measures(found: Evaluation, folders: dict[str, Path]) -> None:
    assert [row.name for row in found.rows] == ["bf16", "int8", "int4-g64"]
    assert found.reference == "bf16"
    whole, int8, int4 = (row.texts["first"] for row in found.rows)
    ids = load_tokenizer(folders["bf16"]).encode(folders["first.txt"].read_text())
    windows = text_windows(ids, [], WINDOW)
    assert whole.tokens == len(ids)
    assert whole.divergence is None
    alone = perplexity_estimates(open_checkpoint(folders["bf16"]), [windows])[0].value
    assert whole.token_perplexity == pytest.approx(alone, rel=1e-6)
    reference, other = open_checkpoint(folders["bf16"]), open_checkpoint(folders["int4-g64"])
    assert int4.divergence == compare(reference, [other], windows)[0].divergence
    assert int8.divergence is not None
    assert int4.divergence is not None
    assert 0 < int8.divergence.kl < int4.divergence.kl
    assert (
        found.perplexity_ratio(found.rows[2], "first")
        == int4.token_perplexity / whole.token_perplexity
    )
    assert found.rows[2].bits_per_weight == quantkit.inspect(folders["int4-g64"]).bits_per_weight
    facts = found.texts["first"]
    assert facts.sha256 == SourceFile(folders["first.txt"]).sha256()
    score = whole.documents
    assert math.log(score.word_perplexity) * facts.words == pytest.approx(
        math.log(score.byte_perplexity) * facts.bytes
    )
    assert 2**score.bits_per_byte == pytest.approx(score.byte_perplexity)
    assert [found.texts[name].is_wikitext for name in ("wiki", "first")] == [True, False]
    assert not any(one.in_template for one in found.texts.values())
    assert all(row.speed is not None and row.speed.tokens_per_second > 0 for row in found.rows)


def test_a_meta_folder_is_read_as_its_conversion_is(
    folders: dict[str, Path], demo_model: Path
) -> None:
    """A text that spells a special token is the test: sentencepiece by itself takes it for
    letters.
    """
    mini = evaluate(
        [folders["bf16"]], texts=[folders["wiki.txt"]], against=demo_model, window=WINDOW
    )
    assert mini.rows[1].texts["wiki"].divergence is not None
    assert mini.rows[1].texts["wiki"].divergence.largest_logit_difference == 0


def test_the_report_says_what_was_measured_and_how(
    found: Evaluation, folders: dict[str, Path]
) -> None:
    text = render_markdown(found)
    heads = [_cells(line) for line in text.splitlines() if line.startswith("| model")]
    shared = ["model", "MB", "bits/weight", "word ppl", "bits/byte", "token ppl"]
    apart = ["KL, nats/token", "KL median", "KL 99 %", "top-1, %", "ppl ratio"]
    assert heads == [[*shared, "tok/s"], shared, ["model", "text", *apart]]
    rows = [_cells(line) for line in text.splitlines() if line.startswith("| int4-g64")]
    measured = found.rows[2].texts["first"]
    assert rows[0][5] == f"{measured.token_perplexity:.4g}"
    assert len(rows) == 4
    assert measured.divergence is not None
    assert rows[2][1:3] == [
        "first",
        str(Estimate(measured.divergence.kl, measured.divergence.kl_error)),
    ]
    ratio = found.perplexity_ratio(found.rows[2], "first")
    assert ratio is not None
    assert rows[2][6] == str(Estimate(ratio, measured.perplexity_ratio_error))
    assert all(" ± " in rows[2][place] for place in (2, 5, 6))
    for fact in (
        SourceFile(folders["wiki.txt"]).sha256(),
        "nats",
        "BOS",
        f"windows of {WINDOW} tokens, stride {WINDOW}",
        "float32",
        "backend reference",
        "bfloat16",
        "batch means",
        "delta method",
        "another text may differ by several times",
        "WikiText, detokenized",
        "median of 3",
        f"torch {found.versions['torch']}",
    ):
        assert fact in text, fact
    assert "None" not in text


def test_the_data_hold_every_figure(found: Evaluation, tmp_path: Path) -> None:
    outputs = Outputs(str(tmp_path / "out.json"), report=tmp_path / "out.md")
    outputs.write(found.to_json(), report=lambda: render_markdown(found))
    assert (tmp_path / "out.md").read_text() == render_markdown(found)
    value = json.loads((tmp_path / "out.json").read_text())
    one = value["rows"][2]["texts"]["first"]
    assert one["divergence"]["kl_p99"] == found.rows[2].texts["first"].divergence.kl_p99  # type: ignore[union-attr]
    assert one["perplexity_ratio"] == found.perplexity_ratio(found.rows[2], "first")
    assert value["layer_error"] in ("output_error", "relative_error")
    assert value["rows"][2]["layer_errors"] == value["layer_errors"]
    errors = list(value["layer_errors"].values())
    assert errors == sorted(errors, reverse=True)
    assert len(errors) == 28
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.md"]


def test_errors_are_in_the_data_next_to_their_values(found: Evaluation) -> None:
    whole, _, int4 = (row["texts"]["first"] for row in found.to_json()["rows"])
    assert (whole["divergence"], whole["perplexity_ratio_error"]) == (None, None)
    for value, error in (
        (int4["divergence"]["kl"], int4["divergence"]["kl_error"]),
        (int4["divergence"]["top1_agreement"], int4["divergence"]["top1_error"]),
        (int4["perplexity_ratio"], int4["perplexity_ratio_error"]),
        (int4["token_perplexity"], int4["token_perplexity_error"]),
    ):
        assert 0 < error < value
    # Token by token, most of what makes a text hard is the same for both.
    assert int4["perplexity_ratio_error"] < 0.1 * int4["token_perplexity_error"]
    assert whole["token_perplexity_error"] == pytest.approx(int4["token_perplexity_error"], rel=0.2)


def test_several_texts_have_a_mean_with_the_error_of_their_spread(found: Evaluation) -> None:
    """Errors on one text say nothing of the next; of fewer than three there is no spread to
    speak of.
    """
    assert [row["over_texts"] for row in found.to_json()["rows"]] == [None, None, None]
    wide = []
    for row in found.rows:
        one = row.texts["first"]
        kls = (
            (one.divergence, *(replace(one.divergence, kl=kl) for kl in (0.01, 0.02)))
            if one.divergence
            else [None] * 3
        )
        texts = {name: replace(one, divergence=kl) for name, kl in zip("abc", kls, strict=True)}
        wide.append(replace(row, texts=texts))
    three = replace(found, rows=wide, texts=dict.fromkeys("abc", found.texts["first"]))
    kls = [text.divergence.kl for text in wide[2].texts.values() if text.divergence is not None]
    over = three.over_texts(three.rows[2])
    assert over is not None
    assert over.kl.value == pytest.approx(sum(kls) / 3)
    assert over.kl.error == pytest.approx(
        (sum((kl - sum(kls) / 3) ** 2 for kl in kls) / 2 / 3) ** 0.5
    )
    assert over.perplexity_ratio.value == pytest.approx(three.perplexity_ratio(three.rows[2], "a"))
    assert over.perplexity_ratio.error == pytest.approx(0, abs=1e-12)
    assert three.over_texts(three.rows[0]) is None
    assert three.to_json()["rows"][2]["over_texts"]["kl"] == {
        "value": over.kl.value,
        "error": over.kl.error,
    }
    apart = build_tables(three)[-1]
    assert apart.rows[-1][:5] == ("int4-g64", "mean of 3", str(over.kl), "-", "-")
    assert [row[1] for row in apart.rows].count("mean of 3") == 2
    assert apart.title is not None
    assert "spread between the texts" in apart.title
    assert "spread between the texts" not in str(build_tables(found)[-1].title)


def test_for_programs_there_is_one_table_of_all_rows(found: Evaluation) -> None:
    lines = list(csv.DictReader(render([build_sheet(found)], "csv")))
    assert [(line["model"], line["text"]) for line in lines] == [
        (row.name, text) for text in ("first", "wiki") for row in found.rows
    ]
    apart = found.rows[2].texts["first"].divergence
    assert apart is not None
    assert apart.kl_error is not None
    assert list(lines[0]) == [
        "model",
        "text",
        "size_mb",
        "bits_per_weight",
        "word_ppl",
        "bits_per_byte",
        "token_ppl",
        "kl",
        "kl_error",
        "kl_median",
        "kl_p99",
        "top1",
        "top1_error",
        "ppl_ratio",
        "ppl_ratio_error",
        "tokens_per_second",
    ]
    assert float(lines[2]["kl"]) == pytest.approx(apart.kl, rel=0.05)
    assert float(lines[2]["kl_error"]) == pytest.approx(apart.kl_error, rel=0.3)
    assert float(lines[2]["top1"]) == pytest.approx(apart.top1_agreement, rel=0.05)
    assert lines[0]["kl"] == lines[0]["kl_error"] == lines[0]["ppl_ratio"] == ""
    assert all(line["tokens_per_second"] for line in lines)


def test_each_table_says_what_it_is_of(found: Evaluation) -> None:
    """Text, tokens, window, reference, unit and what ± is, so that it can stand alone in a
    paper.
    """
    first, wiki, apart = build_tables(found)
    counts = {name: found.rows[0].texts[name].tokens for name in ("first", "wiki")}
    assert first.title == f"On first ({counts['first']} tokens); token ppl in windows of {WINDOW}."
    assert wiki.title == f"On wiki ({counts['wiki']} tokens); token ppl in windows of {WINDOW}."
    assert apart.title is not None
    for reported in (
        (
            f"on first ({counts['first']} tokens), wiki ({counts['wiki']} tokens) in windows of"
            f" {WINDOW}"
        ),
        "KL(bf16 || model)",
        "± is one standard error for these tokens",
        "another text may differ by several times",
    ):
        assert reported in apart.title
    assert "nats/token" in apart.head[2]
    alone = build_tables(replace(found, texts={"first": found.texts["first"]}))
    assert alone[0].title == first.title
    measures = found.rows[2].texts["first"]
    longer = replace(
        found.rows[2], texts={**found.rows[2].texts, "first": replace(measures, tokens=99999)}
    )
    other = build_tables(replace(found, rows=[found.rows[0], longer]))[0]
    assert (
        other.title
        == f"On first ({counts['first']} to 99999 tokens); token ppl in windows of {WINDOW}."
    )


def test_what_is_infinite_is_null_in_the_data(found: Evaluation) -> None:
    measures = found.rows[0].texts["first"]
    endless = replace(measures, documents=DocumentScore(math.inf, 2.0, 1.0))
    changed = replace(
        found, rows=[replace(found.rows[0], texts={**found.rows[0].texts, "first": endless})]
    )
    assert changed.to_json()["rows"][0]["texts"]["first"]["documents"]["word_perplexity"] is None


def _named(found: Evaluation, names: list[str]) -> Evaluation:
    """Another evaluation: the last model's row under several names, after the reference's."""
    more = [replace(found.rows[-1], name=name) for name in names]
    return replace(found, rows=[found.rows[0], *more])


@pytest.mark.slow
def test_the_picture_is_as_high_as_what_there_is_to_show(found: Evaluation) -> None:
    pytest.importorskip("matplotlib")

    def size(shown: Evaluation) -> tuple[int, int]:
        png = picture(shown)
        assert png.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", png[16:24])
        return width, height

    bare = [replace(row, layer_errors={}) for row in found.rows]
    whole, costs = size(found), size(replace(found, rows=bare))
    layers = size(replace(found, rows=found.rows[2:], reference=None))
    assert whole[0] == costs[0] == layers[0] == 1200
    assert whole[1] == costs[1] + layers[1]
    assert size(_named(found, list("abc"))) == whole
    assert size(_named(found, list("abcd"))) == costs  # too many to compare by their layers
    assert {row.method for row in found.rows[1:]} == {"rtn"}
    mixed = [
        *found.rows[:2],
        replace(found.rows[2], method="gptq"),
    ]  # errors of weights mislead there
    assert size(replace(found, rows=mixed)) == costs
    with pytest.raises(RequestError, match="nothing to draw"):
        picture(replace(found, rows=bare[2:], reference=None))


def test_the_picture_names_each_model_once_and_knows_no_stray_texts(found: Evaluation) -> None:
    """All that the SVG says, with text kept as text: names, figures of the axes, layers."""
    pytest.importorskip("matplotlib")
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        drawn = picture(found, "svg").decode()
    said = [html.unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", drawn)]
    assert said.count("int8") == said.count("int4-g64") == 2  # a label and the title of a panel
    assert not [
        text for text in said if "bf16" in text and text != "KL from bf16 (16.0 bits a weight)"
    ]
    assert "KL from bf16 (16.0 bits a weight)" in said
    assert sum(text in said for text in ("first", "wiki")) == 2
    layers = [text for text in said if re.fullmatch(r"\d+ (mlp|self_attn)\.\w+", text)]
    assert len(layers) == 16
    assert layers[:8] != layers[8:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a" * 300, "$x_1$ & \\frac", "模型", "_hidden"])
def test_the_picture_takes_any_name(name: str, found: Evaluation) -> None:
    pytest.importorskip("matplotlib")
    assert picture(_named(found, [name, f"{name} again", f"{name} and again"]))


def test_a_model_that_does_not_differ_is_at_the_end_of_the_axis(found: Evaluation) -> None:
    pytest.importorskip("matplotlib")
    import matplotlib

    text = found.rows[2].texts["first"]
    assert text.divergence is not None
    same = replace(text, divergence=replace(text.divergence, kl=0.0, kl_error=0.0))
    rows = [found.rows[0], replace(found.rows[2], texts={"first": same}, layer_errors={})]
    shown = replace(found, rows=rows, texts={"first": found.texts["first"]})
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert ">int4-g64: 0</text>" in picture(shown, "svg").decode()


@pytest.mark.parametrize("kind", ["png", "pdf", "svg"])
def test_a_picture_has_equal_bytes_each_time(kind: str, found: Evaluation) -> None:
    pytest.importorskip("matplotlib")
    assert picture(found, kind) == picture(found, kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "start"),
    [("", b"\x89PNG"), (".PNG", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")],
)
def test_the_suffix_decides_the_kind_of_picture(
    suffix: str, start: bytes, found: Evaluation, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    Outputs(None, plot=tmp_path / f"out{suffix}").write({}, picture=partial(picture, found))
    assert (tmp_path / f"out{suffix}").read_bytes().startswith(start)


@pytest.mark.slow
def test_without_a_text_the_excerpt_is_measured_on_and_said_to_be(folders: dict[str, Path]) -> None:
    alone = evaluate([folders["int8"]], window=WINDOW)
    assert list(alone.texts) == ["excerpt"]
    assert alone.texts["excerpt"].sha256 == SourceFile(EXCERPT).sha256()
    assert "excerpt that ships with quantkit" in alone.notes[0]
    assert alone.notes[0] in "\n".join(method(alone))
    assert alone.rows[0].texts["excerpt"].divergence is None
    (table,) = build_tables(alone)
    assert "KL" not in table.head
    assert alone.rows[0].texts["excerpt"].token_perplexity_error is not None


def test_models_and_texts_of_one_name_get_distinct_names(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    oracle.copy(folders["int8"], tmp_path / "int8")
    (tmp_path / "first.txt").write_text(folders["wiki.txt"].read_text())
    models, texts = (
        [folders["int8"], tmp_path / "int8"],
        [folders["first.txt"], tmp_path / "first.txt"],
    )
    both = evaluate(models, texts=texts, window=WINDOW)
    assert [row.name for row in both.rows] == [f"{path.parent.name}/int8" for path in models]
    assert list(both.texts) == [f"{path.parent.name}/first.txt" for path in texts]


def test_a_text_that_is_given_twice_is_refused(folders: dict[str, Path]) -> None:
    text = folders["first.txt"]
    with pytest.raises(RequestError, match=r"the same text is given twice \(found .*first\.txt\)"):
        evaluate(
            folders["int8"],
            texts=[text, text.parent / ".." / text.parent.name / text.name],
            window=WINDOW,
        )


def test_the_lines_are_the_tables(found: Evaluation) -> None:
    assert found.lines() == render(build_tables(found), "terminal")


def test_models_are_called_as_one_likes(folders: dict[str, Path]) -> None:
    int8, bf16 = folders["int8"], folders["bf16"]
    names = [
        [model.name for model in open_models(paths, against, WINDOW)]
        for paths, against in (
            ([f"ours={int8}", bf16], None),
            ([f"ours={int8}"], f"theirs={bf16}"),
            ([int8, f"theirs={bf16}"], bf16),
        )
    ]
    assert names == [["ours", "bf16"], ["theirs", "ours"], ["theirs", "int8"]]
    for paths in ([f"bf16={int8}", bf16], [int8, int8]):
        with pytest.raises(
            RequestError, match=r"two models have the same name \(found (bf16|int8)\); .*NAME=PATH"
        ):
            open_models(paths, None, WINDOW)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"window": 1},
            r"the window does not fit the model's context \(found 1, expected 2 to \d+ tokens\)",
        ),
        ({"window": 10**6}, "the window does not fit the model's context"),
        ({"cache_logits": Path("cache")}, "caching logits requires a reference"),
        ({"task_data": Path("data")}, "task data requires tasks"),
        ({"texts": [Path("absent.txt")]}, "absent.txt: the text cannot be read"),
    ],
)
def test_what_makes_no_sense_is_refused(
    options: dict[str, object], problem: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(RequestError, match=problem):
        evaluate([folders["int8"]], **options)  # type: ignore[arg-type]


def test_a_reference_alone_or_one_that_reads_otherwise_is_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="the reference is the only model"):
        evaluate([folders["int8"]], against=folders["int8"])
    other = oracle.copy(folders["int8"], tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(RequestError, match="other and bf16 tokenize the text 'first' differently"):
        evaluate([other], texts=[folders["first.txt"]], against=folders["bf16"])
    (other / "tokenizer.json").unlink()
    for name in ("tokenizer.model", "tokenizer_config.json"):
        (other / name).unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        evaluate([other])


@pytest.mark.slow
def test_a_model_that_is_broken_gives_no_table(folders: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = oracle.copy(folders["bf16"], tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    for options in ({}, {"against": folders["bf16"]}):
        with pytest.raises(NonFiniteError, match="broken: the model's logits are NaN or Inf"):
            evaluate([broken], window=WINDOW, **options)  # type: ignore[arg-type]


def test_files_that_cannot_be_written_are_reported_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(DestinationError, match=re.escape(str(tmp_path / "none" / "out.md"))):
        Outputs(None, report=tmp_path / "none" / "out.md")
