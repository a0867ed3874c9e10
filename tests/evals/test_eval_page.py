"""The page that `quantkit eval --report out.html` writes: what is on it, and that it opens."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import chromium
import pytest
import torch
from command import Capture, run

import quantkit
from quantkit.cli.files import Outputs
from quantkit.data.files import excerpt
from quantkit.errors import RequestError
from quantkit.evals.drawing import (
    NUM_COLORS,
    PALETTE,
    Box,
    choose_range,
    format_tick,
    new_figure,
    place_label,
    set_range,
    shorten,
    spread,
    text_width,
)
from quantkit.evals.evaluation import Evaluation
from quantkit.evals.html.charts import Line, position_chart
from quantkit.evals.html.heatmap import STEPS, error_scale, heat_maps, log_scale
from quantkit.evals.html.page import headline
from quantkit.evals.html.tokens import in_list, in_text
from quantkit.evals.report import build_full_tables, build_tables
from quantkit.evals.samples import LIKELIEST, SAMPLE_TOKENS, Predictions, TextSample
from quantkit.formats.detect import open_checkpoint
from quantkit.quality.measures import NOT_SCORED, compare, text_windows
from quantkit.quality.positions import PositionDivergence

pytest.importorskip("matplotlib")
WINDOW = 128
CHROMIUM = chromium.executable()
VOID = {"meta", "link", "input"}
STYLE = Path(quantkit.__file__).parent.parent / "evals" / "html" / "style.css"
HOSTILE = '"><img src=x onerror=alert(1)></script><script>alert(2)</script>'


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> dict[str, Path]:
    target = tmp_path_factory.mktemp("page")
    for scheme in ("int8", "int4-g64"):
        quantkit.quantize(demo_model, target / scheme, scheme, method="rtn")
    (target / "short.txt").write_text(excerpt()[:700])
    (target / "long.txt").write_text(excerpt()[:4000])
    return {"whole": demo_model, **{path.name: path for path in target.iterdir()}}


@pytest.fixture(scope="module")
def found(folders: dict[str, Path]) -> Evaluation:
    return quantkit.evaluate(
        [folders["int8"], folders["int4-g64"]],
        texts=[folders["short.txt"], folders["long.txt"]],
        against=f"whole={folders['whole']}",
        window=WINDOW,
        positions=300,
        details=True,
    )


class _Read(HTMLParser):
    """A page's elements, each closed where it should be, and its texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.cells: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs)
        if tag not in VOID:
            self.open.append(tag)
            if tag in ("td", "th"):
                self.cells.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if {"td", "th"} & set(self.open):
            self.cells[-1] += data


@pytest.mark.slow
def test_the_page_is_whole_and_loads_nothing(found: Evaluation) -> None:
    page = found.to_html()
    assert page.startswith("<!doctype html>\n<html")
    read = _Read(page)
    ids = [attributes["id"] for _, attributes in read.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) > 3
    assert {attributes.get("for") for tag, attributes in read.tags if tag == "label"} <= set(ids)
    outside = [
        attributes
        for _, attributes in read.tags
        if "src" in attributes or not str(attributes.get("href", "data:")).startswith("data:")
    ]
    assert not outside
    assert "@import" not in page
    assert "url(" not in page
    policy = next(
        attributes["content"]
        for _, attributes in read.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert str(policy).startswith("default-src 'none';")


@pytest.mark.slow
def test_the_figures_are_those_of_the_tables(found: Evaluation) -> None:
    page = found.to_html()
    read = _Read(page)
    assert {table.title for table in build_full_tables(found)} <= set(read.texts)
    assert {f"By position on {text}, as a table" for text in ("short", "long")} <= set(read.texts)
    for table in build_tables(found):
        assert {cell for row in table.rows for cell in row} - set(read.texts) <= set(read.cells)
    kls = sorted(
        one.kl for text in found.texts if (one := found.rows[2].texts[text].divergence) is not None
    )
    ratio = found.rows[0].megabytes / found.rows[2].megabytes
    title = next(text for text in read.texts if "int4-g64 is" in text)
    said = re.fullmatch(
        r"int4-g64 is (\S+)\s\S smaller \(.* MB\); per token it diverges by (\S+) to (\S+) nats",
        title,
    )
    assert said is not None
    assert [float(one) for one in said.groups()] == pytest.approx([ratio, *kls], rel=0.05)
    columns = [
        dict(zip(table.head, row, strict=True))
        for table in build_full_tables(found)
        for row in table.rows
    ]
    assert {said[2], said[3]} <= {row["KL, nats/token"].split(" ")[0] for row in columns}
    for line in ("sha256 " + found.texts["long"].sha256, "torch " + found.versions["torch"]):
        assert any(line in text for text in read.texts)


def test_details_change_no_figure_and_stay_out_of_the_data(
    found: Evaluation, folders: dict[str, Path]
) -> None:
    plain = quantkit.evaluate(
        [folders["int8"], folders["int4-g64"]],
        texts=[folders["short.txt"]],
        against=f"whole={folders['whole']}",
        window=WINDOW,
    )
    assert plain.details == {}
    for one, other in zip(plain.rows, found.rows, strict=True):
        assert one.texts["short"].divergence == other.texts["short"].divergence
    assert found.to_json().keys() == plain.to_json().keys()
    assert "details" not in found.to_json()
    assert "Token by token" not in plain.to_html()
    _Read(plain.to_html())


def test_what_is_kept_of_a_token_is_what_the_models_expect_there(
    found: Evaluation, folders: dict[str, Path]
) -> None:
    (sample,) = found.details["short"].samples
    assert sample.start == 0
    tokens = found.rows[0].texts["short"].tokens
    assert len(sample.tokens) == tokens // WINDOW * WINDOW
    ids = torch.tensor(sample.tokens).view(-1, WINDOW)
    model, _ = quantkit.load(folders["whole"], dtype="float32")
    with torch.inference_mode():
        expected = model(ids[:1], torch.arange(WINDOW))[0].softmax(-1)
    for place in (1, 7, WINDOW - 1):
        guess = sample.reference[place]
        assert guess is not None
        likeliest = expected[place - 1].topk(LIKELIEST)
        assert guess.tokens == tuple(likeliest.indices.tolist())
        assert guess.probabilities == pytest.approx(likeliest.values.tolist(), rel=1e-3)
        assert guess.right == pytest.approx(
            expected[place - 1, sample.tokens[place]].item(), rel=1e-3
        )
    assert [place for place, one in enumerate(sample.reference) if one is None] == list(
        range(0, tokens - WINDOW, WINDOW)
    )


def test_by_position_the_whole_is_the_mean(found: Evaluation) -> None:
    for name, row in zip(("int8", "int4-g64"), found.rows[1:], strict=True):
        buckets = found.details["long"].positions[name]
        whole = row.texts["long"].divergence
        assert whole is not None
        assert sum(one.tokens for one in buckets) == whole.tokens
        assert sum(one.tokens * one.kl for one in buckets) / whole.tokens == pytest.approx(
            whole.kl, rel=1e-9
        )
        agreed = sum(one.tokens * one.top1_agreement for one in buckets) / whole.tokens
        assert agreed == pytest.approx(whole.top1_agreement)
        assert [(one.start, one.stop) for one in buckets] == [
            (0, 16),
            (16, 32),
            (32, 64),
            (64, 128),
        ]


def test_a_long_text_is_shown_from_its_beginning_and_where_it_is_worst(found: Evaluation) -> None:
    first, worst = found.details["long"].samples
    assert (first.start, len(first.tokens), len(worst.tokens)) == (0, SAMPLE_TOKENS, SAMPLE_TOKENS)
    assert worst.start >= SAMPLE_TOKENS

    def mean(sample: TextSample) -> float:
        kls = [one.kl for one in sample.models["int4-g64"] if one is not None]
        return sum(kls) / len(kls)

    whole = found.rows[2].texts["long"].divergence
    assert whole is not None
    assert mean(worst) > whole.kl


def test_a_listener_gets_all_tokens_in_their_order(folders: dict[str, Path]) -> None:
    """Also where windows are run in several batches; the KLs are those of the figures."""
    kept = Predictions()
    ids = torch.randint(3, 500, (700,), generator=torch.Generator().manual_seed(1)).tolist()
    windows = text_windows(ids, [], 32)
    others = [open_checkpoint(folders["int4-g64"])]
    (found,) = compare(open_checkpoint(folders["whole"]), others, windows, listeners=[kept])
    kl, first, *_ = kept.concatenate()
    assert kl.mean().item() == pytest.approx(found.divergence.kl)
    assert len(first) == windows.numel()
    few = Predictions()
    log = torch.randn(3, 4).log_softmax(-1)
    few(log, log, torch.zeros(3), torch.tensor([1, NOT_SCORED, 3]))
    _, tokens, _, right, *_ = few.concatenate()
    assert tokens.shape == (3, 4)
    assert right[[0, 2]].tolist() == pytest.approx(log.exp()[[0, 2], [1, 3]].tolist())


def _spelled(found: Evaluation, pieces: list[bytes | str]) -> Evaluation:
    """With other pieces for the tokens, one after the other, and other names of models and
    texts.
    """
    samples = []
    for sample in found.details["short"].samples:
        named = {token: pieces[index % len(pieces)] for index, token in enumerate(sample.pieces)}
        models = {f"{HOSTILE} {name}": of_model for name, of_model in sample.models.items()}
        samples.append(replace(sample, pieces=named, models=models))
    positions = {
        f"{HOSTILE} {name}": of_model for name, of_model in found.details["short"].positions.items()
    }
    rows = [
        replace(row, name=f"{HOSTILE} {row.name}", texts={HOSTILE: row.texts["short"]})
        for row in found.rows
    ]
    return replace(
        found,
        rows=rows,
        reference=rows[0].name,
        texts={HOSTILE: found.texts["short"]},
        notes=[HOSTILE],
        details={HOSTILE: replace(found.details["short"], samples=samples, positions=positions)},
    )


def test_hostile_names_and_tokens_stay_text(found: Evaluation) -> None:
    pieces: list[bytes | str] = [
        HOSTILE.encode(),
        HOSTILE,
        b"\xf0\x9f",
        b"\x98\x80",
        b"</script>",
        b"\x00",
        b"<!--",
    ]
    page = _spelled(found, pieces).to_html()
    read = _Read(page)
    assert not [tag for tag, _ in read.tags if tag == "img"]
    assert [attributes for tag, attributes in read.tags if tag == "script"] == [
        {"type": "application/json", "id": "data"},
        {},
    ]
    assert not [name for _, attributes in read.tags for name in attributes if name.startswith("on")]
    assert HOSTILE in read.texts
    data = json.loads(
        re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[0]
    )
    assert {HOSTILE.replace(" ", "·"), f"⟨{HOSTILE}⟩", "⟨F0 9F⟩", "⟨98 80⟩", "⟨U+0000⟩"} <= set(
        data["pieces"]
    )
    strange = replace(
        found,
        rows=[replace(row, name=f"{row.name}\udcff") for row in found.rows],
        reference="x\udcff",
        details={},
        notes=[],
    )
    assert strange.to_html().encode()


@pytest.mark.parametrize(
    ("piece", "alone", "within"),
    [
        (b" word", "·word", " word"),
        (b"  ", "··", "<b>·</b><b>·</b>"),
        (b"a\nb", "a↵b", "a<b>↵</b>\nb"),
        (b"\t", "⇥", "<b>⇥</b>"),
        (b"<b>", "<b>", "&lt;b&gt;"),
        (b"\xe2\x82", "⟨E2 82⟩", "<b>E2 82</b>"),
        ("\u202eabc".encode(), "⟨U+202E⟩abc", "<b>⟨U+202E⟩</b>abc"),
        ("\u0301".encode(), "⟨U+0301⟩", "\u0301"),
        ("שלום".encode(), "שלום", "שלום"),
        ("👨\u200d👩".encode(), "👨\u200d👩", "👨\u200d👩"),
        ("\u200d".encode(), "⟨U+200D⟩", "<b>⟨U+200D⟩</b>"),
        ("\u00a0".encode(), "⟨U+00A0⟩", "<b>⟨U+00A0⟩</b>"),
        ("BOS", "⟨BOS⟩", "<b>BOS</b>"),
    ],
)
def test_every_token_can_be_seen(piece: bytes | str, alone: str, within: str) -> None:
    assert in_list(piece) == alone
    assert in_text(piece) == within


def test_steps_of_colour_begin_at_round_values() -> None:
    assert log_scale([0.3, 0.001]).limits == pytest.approx(
        (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
    )
    assert log_scale([]).limits[-1] < math.inf
    scale = error_scale([0.11, 0.12])
    assert {scale.color(0.11), scale.color(0.12)} <= set(
        range(3, 7)
    )  # close: neither pale nor dark
    wide = error_scale([0.02, 0.05, 0.1])
    assert wide.color(0.02) == 1
    assert wide.color(0.1) > 6
    assert error_scale([1e-4, 0.1]).color(1e-4) == 0
    assert len(error_scale([0.0]).limits) == STEPS


def test_labels_of_an_axis_are_distinct_and_true() -> None:
    generator = random.Random(1)
    axes = new_figure(4, 3).subplots()
    for _ in range(300):
        low = 10 ** generator.uniform(-9, 9) * generator.choice((1, 1, 1, 0))
        high = low + (low or 1) * 10 ** generator.uniform(-6, 3)
        axis_range = choose_range([low, high])
        axes.clear()
        set_range(axes, "y", axis_range)
        ticks = [
            value
            for value in axes.yaxis.get_majorticklocs()
            if axis_range.low <= value <= axis_range.high
        ]
        labels = [format_tick(value) for value in ticks]
        assert len(labels) == len(set(labels)) >= 2, labels
        assert len(labels) <= 9, labels
        assert [float(label) for label in labels] == pytest.approx(
            ticks, rel=1e-8, abs=1e-12 * high
        )
        assert max(map(len, labels)) <= 11, labels


def test_an_axis_has_two_ends_and_shows_a_zero_only_where_it_can() -> None:
    assert choose_range([0.0, 0.001, 1.0]) == (0.001 / 1.6, 1.6, True)
    assert choose_range([0.0]) == (0.0, 1.0, False)
    assert choose_range([2.0, 4.0]) == pytest.approx((1.7, 4.3, False))
    assert choose_range([0.1, 0.2]).low >= 0


def test_names_are_shortened_to_a_width_in_every_script() -> None:
    assert shorten("int4-g64", 20) == "int4-g64"
    assert shorten("a" * 300, 11) == "aaaaa…aaaa"
    for name in ("W" * 40, "世界模型量化" * 4, "m" * 40, "i" * 200):
        short = shorten(name, 20)
        assert text_width(short) <= 20 * 0.6 < text_width(name)
        assert (short[0], short[-1]) == (name[0], name[-1])
    assert text_width("世界") >= 2 * text_width("n")
    assert shorten("a\x01\n\udcff", 20) == "a\ufffd\ufffd\ufffd"


def test_labels_cover_neither_marks_nor_each_other() -> None:
    occupied = [Box(-5, -5, 5, 5)]
    within = Box(-100, -100, 100, 100)
    for _ in range(6):
        place_label((0, 0), (40, 12), (7, 20, 40), within, occupied)
    for index, box in enumerate(occupied):
        assert all(box.overlap(other) == 0 for other in occupied[:index])
    assert place_label((95, 0), (40, 12), (7,), within, []).right <= 100


def test_names_that_are_too_close_move_apart_around_their_middle() -> None:
    assert spread([0.0, 50.0], 10) == [0.0, 50.0]
    assert spread([50.0, 0.0, 4.0], 10) == [50.0, -3.0, 7.0]
    moved = spread([0.0, 1.0, 9.0, 30.0], 10)
    gaps = [high - low for low, high in pairwise(moved)]
    assert min(gaps) == pytest.approx(10)
    assert moved[-1] == 30.0


def _light(color: str) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return sum(share * one for share, one in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(one: str, other: str) -> float:
    high, low = sorted((_light(one), _light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_everything_can_be_read_on_its_ground(dark: bool) -> None:
    roots = re.findall(r":root \{(.*?)\}", STYLE.read_text(), re.S)
    colors = PALETTE | dict(re.findall(r"--(\w+): (#\w{6})", roots[0]))
    if dark:
        dark_colors = dict(re.findall(r"--(\w+): (#\w{6})", roots[1]))
        assert dark_colors.keys() >= PALETTE.keys()
        colors |= dark_colors
    for name in ("ink", "muted", "accent", *(f"m{index}" for index in range(NUM_COLORS))):
        assert _contrast(colors[name], colors["paper"]) >= 4.5, name
    assert _contrast(colors["ink"], colors["soft"]) >= 4.5
    steps = [_light(colors[f"k{index}"]) for index in range(1, STEPS + 1)]
    assert steps == sorted(steps, reverse=not dark)  # one direction, also without colours
    for index in range(1, STEPS + 1):
        assert _contrast(colors[f"k{index}"], colors[f"t{index}"]) >= 4.5, index


def test_errors_stand_by_kind_and_layer_and_experts_are_summed_up(found: Evaluation) -> None:
    assert list(heat_maps(found)[0].rows) == ["q", "k", "v", "o", "gate", "up", "down"]
    page = found.to_html()
    assert re.findall(r'<th scope="row">([a-z]+)</th>', page)[:7] == [
        "q",
        "k",
        "v",
        "o",
        "gate",
        "up",
        "down",
    ]
    bank = {f"model.layers.1.mlp.experts.{index}.up_proj": 0.01 * (index + 1) for index in range(4)}
    errors = {**bank, "model.layers.0.self_attn.q_proj": 0.02, "lm_head": 0.005}
    rows = [
        replace(found.rows[1], layer_errors=dict(sorted(errors.items(), key=lambda item: -item[1])))
    ]
    read = _Read(replace(found, rows=rows, reference=None, texts={}, details={}).to_html())
    titles = [attributes["title"] for _, attributes in read.tags if "title" in attributes]
    assert titles == [
        "layer 0, q: 2.0 %",
        "layer 1, expert up: 2.5 % on average of 4; expert 3 4.0 %",
    ]
    assert "worst: layer 1, expert up 3: 4.0 %" in read.texts
    assert "Outside the layers: head 0.50 %." in read.texts
    mixed = [found.rows[0], found.rows[1], replace(found.rows[2], method="gptq")]
    assert (
        "errors of weights do not compare between the two" in replace(found, rows=mixed).to_html()
    )
    assert "errors of weights do not compare between the two" not in page
    for rows in (mixed, found.rows):
        assert len({map.scale for map in heat_maps(replace(found, rows=rows))}) == 1
        assert replace(found, rows=rows).to_html().count("error of weights, %, from") == 1


def _exact(found: Evaluation) -> Evaluation:
    """With a first model that is the reference's equal, but for an int8 cache."""
    row = found.rows[1]
    texts = {}
    for name, one in row.texts.items():
        assert one.divergence is not None
        zeros = [replace(bucket, kl=0.0, kl_error=0.0) for bucket in one.positions["float"]]
        texts[name] = replace(
            one,
            divergence=replace(one.divergence, kl=0.0, kl_error=0.0),
            positions={**one.positions, "float": zeros},
        )
    return replace(found, rows=[found.rows[0], replace(row, texts=texts), found.rows[2]])


def _chart_texts(page: str) -> list[str]:
    charts = re.findall(r'<svg class="chart".*?</svg>', page, re.S)
    return [text for chart in charts for text in re.findall(r"<text[^>]*>([^<]*)</text>", chart)]


def test_a_model_without_any_divergence_is_in_the_charts(found: Evaluation) -> None:
    exact = _exact(found)
    # Each name in the chart of sizes, and with its mark in those of the two texts.
    texts = _chart_texts(exact.to_html())
    for model, mark in (("int8: 0", "■"), ("int4-g64", "▲")):
        assert (texts.count(model), texts.count(f"{mark} {model}")) == (1, 2)
    alone = replace(exact, rows=exact.rows[:2], details={})
    texts = _chart_texts(alone.to_html())
    assert (texts.count("int8: 0"), texts.count("■ int8: 0")) == (1, 2)


def test_charts_have_the_colors_of_the_theme_and_equal_bytes(found: Evaluation) -> None:
    page = found.to_html()
    assert found.to_html() == page
    charts = re.findall(r'<svg class="chart".*?</svg>', page, re.S)
    assert len(charts) == 3
    for chart in charts:
        assert re.findall(r"#[0-9a-f]{6}", chart) == []
        assert {"var(--m1)", "var(--m2)", "var(--muted)"} <= set(re.findall(r"var\(.*?\)", chart))
        assert " id=" not in chart
    for name, color in PALETTE.items():
        assert f"--{name}:{color};" in page


def test_marks_and_charts_are_described(found: Evaluation) -> None:
    read = _Read(found.to_html())
    described = [attributes for tag, attributes in read.tags if tag == "svg"]
    assert [attributes["role"] for attributes in described] == ["img"] * 3
    measures = found.rows[1].texts["short"]
    assert measures.divergence is not None
    point = f"int8 on short: {found.rows[1].megabytes:.2f} MB, "
    assert sum(text.startswith(point) for text in read.texts) == 1
    assert point in str(described[0]["aria-label"])
    for bucket in measures.positions["float"]:
        title = f"int8, positions {bucket.name}: {bucket.estimate}"
        assert title in read.texts
        assert f"{bucket.name}: {bucket.estimate}" in str(described[1]["aria-label"])


def test_lines_differ_by_more_than_colour_and_are_named_though_only_dashed(
    found: Evaluation,
) -> None:
    buckets = found.rows[1].texts["short"].positions["int8"]
    chart = position_chart([Line(1, "one", True, buckets), Line(2, "two", True, buckets)], "KL")
    assert chart is not None
    marks = re.findall(r'<path d="([^"]*)" transform', chart.svg)
    assert len(marks) == 2 * len(buckets)
    assert len(set(marks)) == 2
    assert chart.svg.count("stroke-dasharray") == 2
    assert {"■ one", "▲ two"} <= set(_chart_texts(chart.svg))
    assert chart.keys == ["dashed: with the int8 cache"]


@pytest.mark.parametrize(
    "name", ["世界模型量化" * 4, "👩‍🚀" * 9, "WWWWMMMMWWWWMMMMWWWW", "مرحبا بالعالم كله" * 2]
)
def test_names_fit_whatever_their_script(
    name: str, found: Evaluation, tmp_path: Path, browser: chromium.Page
) -> None:
    rows = [found.rows[0], replace(found.rows[1], name=name), found.rows[2]]
    path = tmp_path / "names.html"
    path.write_text(replace(found, rows=rows, details={}).to_html(), encoding="utf-8")
    out = (
        "[...document.querySelectorAll('svg text')].filter(one => { const at ="
        " one.getBoundingClientRect(), whole = one.ownerSVGElement.getBoundingClientRect(); return"
        " at.width && (at.right > whole.right + 1 || at.left < whole.left - 1) }).map(one =>"
        " one.textContent)"
    )
    for width in (360, 1180):
        browser.open(path, width=width, phone=width == 360)
        assert browser.value(out) == []


def test_a_model_of_the_same_size_is_as_large(found: Evaluation) -> None:
    same = replace(found.rows[1], megabytes=found.rows[0].megabytes * 1.01)
    said, *_ = headline(replace(found, rows=[found.rows[0], same]))
    assert said.startswith(f"int8 is as large as whole ({same.megabytes:.2f} MB); per token")


def test_the_headline_is_the_model_that_diverges_least(found: Evaluation) -> None:
    for rows in (found.rows, [found.rows[0], *found.rows[:0:-1]]):
        said, _, others = headline(replace(found, rows=rows))
        assert said.startswith("int8 is")
        assert f"({found.rows[1].megabytes:.2f} MB)" in said
        assert re.search(
            r"diverges by [\d.]+e\u2011\d\d .*nats, the least of 2 models$", said
        )  # never broken at the hyphen
        assert [other.split()[0] for other in others] == ["int4-g64"]


def test_without_a_reference_there_is_no_divergence(found: Evaluation) -> None:
    texts = {
        name: replace(one, divergence=None, positions={})
        for name, one in found.rows[1].texts.items()
    }
    rows = [replace(found.rows[1], texts=texts), replace(found.rows[2], texts=texts)]
    alone = replace(found, rows=rows, reference=None, details={})
    page = alone.to_html()
    _Read(page)
    assert "Size against word perplexity" in page
    assert "Divergence by position" not in page
    assert "smaller (" not in page
    bare = replace(alone, rows=[replace(rows[0], texts={}, layer_errors={})], texts={}, window=None)
    _Read(bare.to_html())


def test_a_page_of_many_models_and_texts_stays_small(found: Evaluation) -> None:
    """Five models of 80 layers on five texts; their figures need not make sense."""
    texts = [f"text {index}" for index in range(5)]
    names = [f"model {index}" for index in range(5)]
    layers = {
        name.replace("layers.0", f"layers.{layer}"): error
        for layer in range(80)
        for name, error in found.rows[1].layer_errors.items()
        if "layers.0." in name
    }
    details = found.details["long"]
    samples = [
        replace(one, models=dict.fromkeys(names, one.models["int4-g64"])) for one in details.samples
    ]
    buckets = [
        PositionDivergence(
            start=2**at, stop=2 ** (at + 1), tokens=9, kl=0.001, kl_error=1e-4, top1_agreement=0.9
        )
        for at in range(4, 15)
    ]
    row = found.rows[2]
    rows = [replace(found.rows[0], texts=dict.fromkeys(texts, found.rows[0].texts["long"]))]
    rows += [
        replace(row, name=name, texts=dict.fromkeys(texts, row.texts["long"]), layer_errors=layers)
        for name in names
    ]
    many = replace(
        found,
        rows=rows,
        texts=dict.fromkeys(texts, found.texts["long"]),
        details=dict.fromkeys(
            texts, replace(details, samples=samples, positions=dict.fromkeys(names, buckets))
        ),
    )
    page = many.to_html()
    _Read(page)
    assert len(page.encode()) < 1_500_000


def test_the_suffix_decides_the_kind_of_report(
    folders: dict[str, Path], tmp_path: Path, capfd: Capture
) -> None:
    given = [
        "eval",
        folders["int8"],
        "--text",
        folders["short.txt"],
        "--against",
        folders["whole"],
        "--window",
        "64",
    ]
    code, _, err = run(capfd, *given, "--report", tmp_path / "out.html")
    assert (code, err) == (0, "")
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert "Token by token" in page
    _Read(page)
    assert run(capfd, *given, "--report", tmp_path / "out.md")[0] == 0
    assert (tmp_path / "out.md").read_text().startswith("# Evaluation\n")
    assert Outputs(None, report=tmp_path / "OUT.HTM").wants_page
    with pytest.raises(
        RequestError,
        match=r"out\.pdf: unknown report format \(found \.pdf, expected \.md or \.html\)",
    ):
        Outputs(None, report=tmp_path / "out.pdf")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    if CHROMIUM is None:
        pytest.skip("no Chromium: neither on PATH nor named by CHROMIUM")
    with chromium.opened(CHROMIUM, tmp_path_factory.mktemp("browser") / "profile") as page:
        yield page


@pytest.fixture
def written(found: Evaluation, tmp_path: Path) -> Path:
    path = tmp_path / "out.html"
    path.write_text(found.to_html(), encoding="utf-8")
    return path


_OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1180])
def test_the_page_opens_on_phones_and_desks(
    width: int, dark: bool, written: Path, browser: chromium.Page
) -> None:
    browser.errors.clear()
    browser.requests.clear()
    browser.open(written, width=width, dark=dark, phone=width == 360)
    assert browser.errors == []
    assert browser.requests == [written.resolve().as_uri()]
    assert browser.value(_OVERFLOW) == 0
    ground = browser.value("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 23, 26)" if dark else "rgb(255, 255, 255)")
    if width == 360:
        low = "one => (at => at && at.width && at.height < 23.9)(one.getClientRects()[0])"
        assert (
            browser.value(
                f"[...document.querySelectorAll('label, summary, .map td')].filter({low}).length"
            )
            == 0
        )
    # Texts of charts are as large as a phone's reader needs, and nothing is cut off.
    sizes = (
        "[...document.querySelectorAll('.chart text')].map(one =>"
        " parseFloat(getComputedStyle(one).fontSize) * one.getScreenCTM().a)"
    )
    assert min(browser.value(sizes)) >= 9.5
    fonts = "new Set([...document.querySelectorAll('.chart text, body')].map(one =>"
    fonts += " getComputedStyle(one).fontFamily)).size"
    assert browser.value(fonts) == 1


def test_pointing_at_a_token_shows_what_both_models_expected(
    found: Evaluation, written: Path, browser: chromium.Page
) -> None:
    browser.errors.clear()
    browser.open(written, width=1180, height=900)
    (sample,) = found.details["short"].samples
    said = "document.querySelector('.guess').innerText"

    def expected(place: int, model: str) -> list[str]:
        one = sample.models[model][place]
        assert one is not None
        return [in_list(sample.pieces[token]) for token in one.tokens]

    browser.click("label[for=t0m1]")
    browser.hover(".m1 .stretch i:nth-child(9)")
    assert [name for name in expected(8, "int4-g64") if name not in browser.value(said)] == []
    assert browser.value(said).startswith(in_list(sample.pieces[sample.tokens[8]]))
    assert "whole" in browser.value(said)
    browser.click(".m1 .stretch i:nth-child(12)")
    browser.press("ArrowRight")
    assert browser.value(said).startswith(in_list(sample.pieces[sample.tokens[12]]))
    assert browser.value("document.activeElement.matches('.m1 .stretch i:nth-child(13)')")
    browser.click("label[for=t0m0]")
    browser.hover(".m0 .stretch i:nth-child(21)")
    assert [name for name in expected(20, "int8") if name not in browser.value(said)] == []
    assert "int8" in browser.value(said)
    browser.hover(".map td[title]")
    title = browser.value("document.querySelector('.map td[title]').title")
    assert browser.value("document.querySelector('.readout').textContent") == title
    assert browser.errors == []


def test_without_scripts_the_page_can_be_read(written: Path, browser: chromium.Page) -> None:
    browser.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(written, width=360, phone=True)
    finally:
        browser.send("Emulation.setScriptExecutionDisabled", value=False)
    visible = (
        "[...document.querySelectorAll('.stretch, .figures, .map, .chart')].filter(one =>"
        " one.checkVisibility()).length"
    )
    assert browser.value(visible) > 6
    assert browser.value("document.querySelector('.guess').checkVisibility()") is False


def test_hostile_names_run_nothing_and_fit(
    found: Evaluation, tmp_path: Path, browser: chromium.Page
) -> None:
    path = tmp_path / "hostile.html"
    path.write_text(
        _spelled(found, [HOSTILE.encode(), "\u202e".encode(), b"\xf0\x9f"]).to_html(),
        encoding="utf-8",
    )
    browser.errors.clear()
    browser.open(path, width=360, phone=True)
    assert browser.value("document.querySelectorAll('img').length") == 0
    assert browser.value(_OVERFLOW) == 0
    assert browser.errors == []
