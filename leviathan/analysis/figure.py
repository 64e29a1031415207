"""A figure as SVG with CSS colors for a page, as a standalone SVG file and as PNG.

Every figure of a page is drawn twice, wide and narrow: text in an SVG that is scaled to the width
of a phone is not legible.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from leviathan.files import write_atomic

# Okabe and Ito's palette, distinguishable with color blindness; the baseline is gray
COLORS = ("#6a737d", "#0072b2", "#d55e00", "#009e73", "#a6518b", "#b8860b", "#56a3d9", "#7d5a3c")
INK, MUTED, GRID = "#1f2328", "#656d77", "#d8dee4"
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid"} | {
    color: f"--series-{number}" for number, color in enumerate(COLORS)
}
FONT = "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"
DOT: dict[str, Any] = {"markersize": 5, "markeredgecolor": "white", "markeredgewidth": 0.7}
PNG_DPI = 160

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "lines.solid_capstyle": "round",
    "savefig.transparent": True,
}


@dataclass(frozen=True)
class ReportFigure:
    """One figure in every form.

    Attributes:
        name: file name without suffix.
        wide, narrow: `<svg>` elements for a page, colors by CSS variable.
        svg: standalone SVG for a white background.
        png: the same as PNG.
    """

    name: str
    wide: str
    narrow: str
    svg: str
    png: bytes

    def save(self, folder: Path) -> list[Path]:
        """Writes `NAME.svg` and `NAME.png`; returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"{self.name}.svg", folder / f"{self.name}.png"]
        write_atomic(files[0], self.svg.encode())
        write_atomic(files[1], self.png)
        return files


def draw_figure(name: str, draw: Callable[[bool], Figure]) -> ReportFigure:
    """Draws twice; `draw(narrow)` returns a figure 8 inches wide, or 4 inches if `narrow`."""
    forms = []
    png = b""
    for narrow in (False, True):
        # Ids in the SVG are derived from the name of the figure and therefore unique on a page.
        settings: Any = _STYLE | {"svg.hashsalt": f"{name}{narrow}"}
        with matplotlib.rc_context(settings):
            figure = draw(narrow)
            forms.append(_svg(figure))
            if not narrow:
                buffer = io.BytesIO()
                figure.savefig(
                    buffer, format="png", dpi=PNG_DPI, facecolor="white", transparent=False
                )
                png = buffer.getvalue()
    return ReportFigure(name, forms[0], forms[1], standalone(forms[0]), png)


def size(narrow: bool, height: float) -> tuple[float, float]:
    """Height in inches of a figure whose wide form is `height` inches high."""
    return (4.0, height * 0.92) if narrow else (8.0, height)


def standalone(svg: str) -> str:
    """A standalone SVG: with namespaces, and colors for a white background."""
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return re.sub(r"var\(--[a-z0-9-]+, (#\w+)\)", r"\1", svg).replace("<svg ", f"<svg {names} ", 1)


def color(number: int) -> str:
    """Color of the series with this index; index 0 is the baseline."""
    return COLORS[number % len(COLORS)]


def signed(value: float) -> str:
    """Formats an axis tick with its sign: `+0.1` or `−0.1`."""
    return "0" if abs(value) < 1e-9 else f"{value:+.3g}".replace("-", "−")


def label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Labels lines (value, name, color) at their right end, without overlaps."""
    low, high = axes.get_ylim()
    height = axes.get_window_extent().height / axes.figure.dpi  # inches
    apart = (high - low) * 0.16 / max(height, 0.5)
    placed: list[float] = []
    for value, label, shade in sorted(ends):
        y = value if not placed else max(value, placed[-1] + apart)
        placed.append(y)
        axes.annotate(
            label,
            (1, y),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            color=shade,
            va="center",
            fontweight="bold",
            annotation_clip=False,
        )


def note(axes: Axes, x: float, y: float, text: str, **where: Any) -> None:
    """Writes a note inside the axes; the position is in axes coordinates."""
    axes.text(
        x, y, text, transform=axes.transAxes, color=MUTED, fontsize=7.5, linespacing=1.5, **where
    )


def _svg(figure: Figure) -> str:
    """The figure as an `<svg>` element for a page: no prologue or metadata, colors by name."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # would style the page
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| (width|height)="[\d.]+pt"', "", svg, count=4)
    svg = svg.replace("'DejaVu Sans'", FONT).replace("<svg ", '<svg stroke-linejoin="round" ', 1)
    for shade, name in VARIABLES.items():
        svg = svg.replace(shade, f"var({name}, {shade})")
    return svg.replace("#ffffff", "var(--paper, #ffffff)")
