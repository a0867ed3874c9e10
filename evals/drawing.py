"""The drawing layer of all charts: matplotlib figures, written as files or into the HTML page."""

from __future__ import annotations

import io
import re
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple
from xml.etree import ElementTree

from quantkit.evals import optional

NUM_COLORS = 6
PALETTE = {
    "ink": "#1b1f24",
    "muted": "#59636e",
    "line": "#d8dee4",
    "m0": "#1f5fa8",
    "m1": "#8e44ad",
    "m2": "#00796b",
    "m3": "#b0305c",
    "m4": "#5d6d1e",
    "m5": "#9a5a12",
}
"""Colors on white. The page has a style variable for each, with other values in its dark theme."""
# Sizes of fonts in points.
SIZE = 9
SMALL = 7.5
LOG_RATIO = 8
"""An axis whose values differ by a larger factor is logarithmic."""
# Over more than this factor, ticks at 2 and 5 of each decade would be too many.
_DECADES_RATIO = 100
# The least margin of an axis, as a share of the largest value: equal values need one too.
_MIN_SPAN = 0.05
_MAX_TICKS = 6
# The width of an average letter, and the height of a line, in sizes of the font.
_LETTER = 0.6
_LINE = 1.4
# From a point to its label, in points; the nearest place without overlap is used.
_LABEL_DISTANCES = (7, 13, 22, 33, 50)
# From a point to the sides of the square that its mark covers, in points.
_MARK_RADIUS = 5


class Mark(NamedTuple):
    """A mark of points: its name in matplotlib, and the character that explains it in texts."""

    marker: str
    character: str


_MARKS = (
    Mark("o", "●"),
    Mark("s", "■"),
    Mark("^", "▲"),
    Mark("D", "◆"),
    Mark("v", "▼"),
    Mark("P", "✚"),
)


def choose_color(index: int) -> str:
    """Choose the color of a model by its row."""
    return PALETTE[f"m{index % NUM_COLORS}"]


def choose_mark(index: int) -> Mark:
    """Choose the mark of a text or of a line by its index."""
    return _MARKS[index % len(_MARKS)]


def theme_color(color: str) -> str:
    """Return the page's style variable for a color of `PALETTE`."""
    for name, value in PALETTE.items():
        if value == color:
            return f"var(--{name})"
    raise KeyError(color)


# Figures and axes


def new_figure(width: float, height: float) -> Any:
    """Create an empty figure, sizes in inches.

    Raises `RequestError` if matplotlib is not installed.
    """
    # pyplot would choose a backend by the display, and keep every figure in memory.
    return optional("matplotlib.figure").Figure(
        figsize=(width, height), dpi=150, layout="constrained"
    )


def style_axes(axes: Any, grid: str) -> None:
    """Draw a light grid along ``x``, ``y`` or ``both``, and no frame at the top and the right."""
    axes.grid(axis=grid, color=PALETTE["line"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(PALETTE["muted"])
    axes.tick_params(length=0, labelcolor=PALETTE["muted"], labelsize=SIZE)


class AxisRange(NamedTuple):
    """The ends of an axis, and whether it is logarithmic."""

    low: float
    high: float
    log: bool


def choose_range(values: Sequence[float]) -> AxisRange:
    """Choose the range of an axis for values; a logarithmic axis shows 0 at its low end."""
    positive = [value for value in values if value > 0]
    if min(values) >= 0 and positive and max(positive) > LOG_RATIO * min(positive):
        # The marks of the outermost points would be cut off without a margin.
        return AxisRange(min(positive) / 1.6, max(positive) * 1.6, True)
    low = min(values)
    high = max(values)
    # Values that are all 0 have a margin too, because an axis has two ends.
    margin = max(0.15 * (high - low), _MIN_SPAN * abs(high)) or 1.0
    axis_low = low - margin
    # An axis of values that cannot be negative does not show negative ticks.
    if low >= 0:
        axis_low = max(0.0, axis_low)
    return AxisRange(axis_low, high + margin, False)


def set_range(axes: Any, name: str, axis_range: AxisRange) -> None:
    """Set the ends, the scale and round ticks of the axis ``x`` or ``y``."""
    ticker = optional("matplotlib.ticker")
    axis = {"x": axes.xaxis, "y": axes.yaxis}[name]
    if axis_range.log:
        axes.set(**{f"{name}scale": "log"})
        steps: tuple[float, ...] = (1.0, 2.0, 5.0)
        if axis_range.high / axis_range.low > _DECADES_RATIO:
            steps = (1.0,)
        axis.set_major_locator(ticker.LogLocator(subs=steps, numticks=_MAX_TICKS + 1))
        # Minor ticks would have labels too.
        axis.set_minor_locator(ticker.NullLocator())
    else:
        locator = ticker.MaxNLocator(nbins=_MAX_TICKS, steps=[1, 2, 2.5, 5, 10])
        axis.set_major_locator(locator)
    axis.set_major_formatter(lambda value, _: format_tick(value))
    axes.set(**{f"{name}lim": (axis_range.low, axis_range.high)})


def format_tick(value: float) -> str:
    """Write a round value with all its digits, but without the noise of a float."""
    return f"{value:.9g}"


# Names

# Control characters, and what XML cannot contain: surrogates and noncharacters.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def shorten(name: str, letters: int) -> str:
    """Shorten a name to the width of a number of average letters, by keeping its two ends.
    Characters that an SVG file cannot contain are replaced.
    """
    printable = _UNPRINTABLE.sub("\ufffd", name)
    if text_width(printable) <= letters * _LETTER:
        return printable
    for length in range(len(printable) - 1, 1, -1):
        start = printable[: (length + 1) // 2]
        end = printable[len(printable) - length // 2 :]
        if text_width(f"{start}…{end}") <= letters * _LETTER:
            return f"{start}…{end}"
    return "…"


def text_width(content: str) -> float:
    """Measure the width of a line of text, in sizes of its font."""
    text_to_path = optional("matplotlib.textpath").text_to_path
    font = optional("matplotlib.font_manager").FontProperties(size=SIZE)
    widths = []
    # A browser has the glyphs that matplotlib's font lacks, so the wider of the two is needed.
    for measured in (content, "".join(map(_replace_wide, content))):
        with ignore_missing_glyphs():
            width, _, _ = text_to_path.get_text_width_height_descent(measured, font, ismath=False)
        widths.append(float(width) / SIZE)
    return max(widths)


def _replace_wide(character: str) -> str:
    """Replace a wide character of East Asian scripts by a letter of its width."""
    if unicodedata.east_asian_width(character) in "WF":
        return "W"
    return character


@contextmanager
def ignore_missing_glyphs() -> Iterator[None]:
    """Suppress warnings for names in scripts that the font lacks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        yield


# Labels of points


class Label(NamedTuple):
    """The name of a point, in the point's color; coordinates are those of the axes."""

    name: str
    x: float
    y: float
    color: str


def lay_out(figure: Any) -> Any:
    """Fix the positions of all axes, and return a renderer that measures in pixels."""
    canvas = optional("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    with ignore_missing_glyphs():
        canvas.draw()
    figure.set_layout_engine("none")
    return canvas.get_renderer()


def draw_labels(
    axes: Any,
    labels: Sequence[Label],
    points: Sequence[tuple[float, float]],
    obstacles: Sequence[Any],
    renderer: Any,
) -> None:
    """Write names next to their points, where they cover neither the marks of `points` nor
    `obstacles` nor each other.

    Labels are placed by pixels: `renderer` comes from `lay_out`.
    """

    def measure_box(artist: Any) -> Box:
        extent = artist.get_window_extent(renderer)
        return Box(extent.x0, extent.y0, extent.x1, extent.y1)

    pixels_per_point = renderer.points_to_pixels(1.0)
    distances = [distance * pixels_per_point for distance in _LABEL_DISTANCES]
    radius = _MARK_RADIUS * pixels_per_point
    occupied_boxes = [measure_box(artist) for artist in obstacles]
    for x, y in axes.transData.transform(points):
        occupied_boxes.append(Box(x - radius, y - radius, x + radius, y + radius))
    within = measure_box(axes)
    for label in labels:
        x, y = axes.transData.transform((label.x, label.y))
        width = text_width(label.name) * SIZE * pixels_per_point
        height = _LINE * SIZE * pixels_per_point
        label_box = place_label((x, y), (width, height), distances, within, occupied_boxes)
        # The annotation is placed by the middle of its left side.
        offset = (
            (label_box.left - x) / pixels_per_point,
            ((label_box.low + label_box.high) / 2 - y) / pixels_per_point,
        )
        # A label further away than the nearest distance needs a line to its mark.
        gap = max(label_box.left - x, x - label_box.right, label_box.low - y, y - label_box.high)
        arrow: dict[str, Any] | None = None
        if gap > distances[0] + 1:
            arrow = {
                "arrowstyle": "-",
                "color": label.color,
                "linewidth": 0.6,
                "shrinkA": 1,
                "shrinkB": 4,
            }
        axes.annotate(
            label.name,
            (label.x, label.y),
            offset,
            textcoords="offset points",
            fontsize=SIZE,
            color=label.color,
            parse_math=False,
            verticalalignment="center",
            arrowprops=arrow,
        )


# From a point to its label: first beside it and above it, then diagonally.
_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))


@dataclass(frozen=True)
class Box:
    """A rectangle; `low` and `high` are the ends of its vertical side."""

    left: float
    low: float
    right: float
    high: float

    def overlap(self, other: Box) -> float:
        """Compute the area that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.high, other.high) - max(self.low, other.low)
        return max(0.0, width) * max(0.0, height)


def place_label(
    point: tuple[float, float],
    size: tuple[float, float],
    distances: Iterable[float],
    within: Box,
    occupied_boxes: list[Box],
) -> Box:
    """Choose the box for a label of this width and height, at one of the distances from a point,
    that overlaps `occupied_boxes` the least and stays within an area if it can. If several do, the
    nearest is used. It is added to `occupied_boxes`.
    """

    def cost(box: Box) -> float:
        overlap = sum(box.overlap(occupied_box) for occupied_box in occupied_boxes)
        # What is outside cannot be read at all, so it counts more than an overlap.
        outside = size[0] * size[1] - box.overlap(within)
        # Rounded, so that costs are equal where only the rounding of floats differs: the nearest
        # box is then chosen.
        return round(overlap + 10 * outside, 3)

    candidates = []
    for distance, (right, up) in product(distances, _DIRECTIONS):
        box_left = point[0] + right * distance - size[0] * (1 - right) / 2
        box_low = point[1] + up * distance - size[1] * (1 - up) / 2
        candidates.append(Box(box_left, box_low, box_left + size[0], box_low + size[1]))
    place = min(candidates, key=cost)
    occupied_boxes.append(place)
    return place


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move heights that are closer than `gap` apart, each group around its mean."""

    def place(group: list[int]) -> list[float]:
        lowest = fmean(heights[index] for index in group) - gap * (len(group) - 1) / 2
        return [lowest + gap * number for number in range(len(group))]

    groups: list[list[int]] = []
    for index in sorted(range(len(heights)), key=heights.__getitem__):
        groups.append([index])
        # A group that reaches the one below joins it.
        while len(groups) > 1 and place(groups[-1])[0] - place(groups[-2])[-1] < gap:
            last = groups.pop()
            groups[-1] += last
    moved = list(heights)
    for group in groups:
        for index, height in zip(group, place(group), strict=True):
            moved[index] = height
    return moved


# Files


def picture_bytes(figure: Any, kind: str, **options: Any) -> bytes:
    """Write the figure as a file: ``png``, ``pdf`` or ``svg``. Equal figures have equal bytes.
    `options` are matplotlib's settings.
    """
    # The time of writing is left out.
    metadata = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}[kind]
    file = io.BytesIO()
    # Without a salt, names within an SVG file are random.
    settings = {"svg.hashsalt": "quantkit", **options}
    with ignore_missing_glyphs(), optional("matplotlib").rc_context(settings):
        figure.savefig(file, format=kind, metadata=metadata)
    return file.getvalue()


_SVG = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"
_DECIMAL = re.compile(r"-?\d+\.\d+")
# All families of a text's font but the first; the page's style sheet replaces that one.
_FAMILIES = re.compile(r", '[^;]*")


def inline_svg(figure: Any, description: str, titles: Mapping[str, Sequence[str]]) -> str:
    """Write the figure as an SVG element for the HTML page: it has the page's fonts and, through
    style variables, the colors of its light or dark theme.

    Args:
        figure: whose colors are those of `PALETTE`.
        description: for screen readers.
        titles: what is shown at the pointer: by the `gid` of an artist, a text for each of its
            marks.
    """
    for frame in (figure, *figure.axes):
        frame.patch.set_visible(False)
    for artist in figure.findobj():
        # Clip paths need names, which would have to be unique in the page.
        artist.set_clip_on(False)
    root = ElementTree.fromstring(picture_bytes(figure, "svg", **{"svg.fonttype": "none"}))
    attributes = {
        "class": "chart",
        "viewBox": root.attrib["viewBox"],
        "role": "img",
        "aria-label": description,
    }
    drawing = ElementTree.Element("svg", attributes)
    titles_by_mark: dict[ElementTree.Element, str] = {}
    for element in root.iter():
        mark_titles = titles.get(element.get("id", ""), ())
        if mark_titles:
            titles_by_mark.update(zip(element.iter(f"{_SVG}use"), mark_titles, strict=True))
    # Groups are left out: matplotlib's are named, and have no attributes of shapes.
    mark_paths: dict[str, str] = {}
    for element in root.iter():
        tag = element.tag.removeprefix(_SVG)
        if tag == "path" and "id" in element.attrib:
            mark_paths[f"#{element.attrib['id']}"] = element.attrib["d"]
        elif tag == "path":
            path = element.attrib["d"]
            _add_shape(drawing, "path", {"d": _round_decimals(path)}, element)
        elif tag == "use":
            # A reference to the mark would need its name; a copy needs none.
            place = f"translate({element.attrib['x']} {element.attrib['y']})"
            mark = {
                "d": _round_decimals(mark_paths[element.attrib[_LINK]]),
                "transform": _round_decimals(place),
            }
            shape = _add_shape(drawing, "path", mark, element)
            if element in titles_by_mark:
                ElementTree.SubElement(shape, "title").text = titles_by_mark[element]
        elif tag == "text":
            position = {name: _round_decimals(element.attrib[name]) for name in ("x", "y")}
            _add_shape(drawing, "text", position, element).text = element.text
    return ElementTree.tostring(drawing, encoding="unicode")


def _add_shape(
    drawing: ElementTree.Element,
    tag: str,
    attributes: dict[str, str],
    source: ElementTree.Element,
) -> ElementTree.Element:
    """Add a shape with the style of a source element."""
    style = _FAMILIES.sub("", source.attrib["style"])
    for color in PALETTE.values():
        style = style.replace(color, theme_color(color))
    return ElementTree.SubElement(drawing, tag, {**attributes, "style": style})


def _round_decimals(content: str) -> str:
    """Round coordinates: a tenth of a point cannot be seen, and short numbers make the page
    smaller.
    """
    joined = " ".join(content.split())
    return _DECIMAL.sub(lambda match: f"{float(match[0]):.1f}".removesuffix(".0"), joined)
