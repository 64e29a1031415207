"""Draws data_flow.svg and lev.svg beside this file (`make docs`). Text is written as SVG text."""

from dataclasses import dataclass
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1f2328; text-anchor: middle }
  .name { font-weight: 600 }
  .note { font-size: 12px; fill: #59636e }
  .left { text-anchor: start }
  .box { fill: #f6f8fa; stroke: #59636e; stroke-width: 1.2 }
  .ours { fill: #ddf4ff; stroke: #0969da; stroke-width: 1.2 }
  .frame { fill: none; stroke: #59636e; stroke-dasharray: 5 4 }
  .line { fill: none; stroke: #59636e; stroke-width: 1.4 }
  .curve { fill: none; stroke: #0969da; stroke-width: 1.6 }
  .dot { fill: #0969da }
  .head { fill: #59636e }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .note { fill: #9198a1 }
    .box { fill: #151b23; stroke: #9198a1 } .ours { fill: #0c2d4f; stroke: #4493f8 }
    .frame, .line { stroke: #9198a1 } .head { fill: #9198a1 }
    .curve { stroke: #4493f8 } .dot { fill: #4493f8 }
  }
"""


@dataclass(frozen=True)
class Box:
    """A rectangle with a name and notes below it, in pixels."""

    x: float
    y: float
    width: float
    name: str
    notes: tuple[str, ...] = ()
    kind: str = "box"

    @property
    def height(self) -> float:
        """Height for the name and the notes."""
        return 34 + 17 * len(self.notes)

    @property
    def right(self) -> tuple[float, float]:
        """Middle of the right edge."""
        return self.x + self.width, self.y + self.height / 2

    @property
    def left(self) -> tuple[float, float]:
        """Middle of the left edge."""
        return self.x, self.y + self.height / 2

    @property
    def bottom(self) -> tuple[float, float]:
        """Middle of the lower edge."""
        return self.x + self.width / 2, self.y + self.height

    @property
    def top(self) -> tuple[float, float]:
        """Middle of the upper edge."""
        return self.x + self.width / 2, self.y

    def draw(self) -> str:
        """Returns the SVG of the box."""
        middle = self.x + self.width / 2
        lines = [
            f'<rect class="{self.kind}" x="{self.x}" y="{self.y}" width="{self.width}" '
            f'height="{self.height}" rx="6"/>',
            text(middle, self.y + 22, self.name, "name"),
        ]
        lines += [text(middle, self.y + 41 + 17 * i, n, "note") for i, n in enumerate(self.notes)]
        return "\n".join(lines)


def text(x: float, y: float, content: str, kind: str = "note") -> str:
    """One line of text."""
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(content)}</text>'


def arrow(*points: tuple[float, float]) -> str:
    """A line through the points, with a head."""
    path = " L".join(f"{x} {y}" for x, y in points)
    return f'<path class="line" marker-end="url(#head)" d="M{path}"/>'


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    """Returns the complete SVG document."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n"
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path class="head" d="M0 0 8 4 0 8z"/></marker></defs>\n'
        f"{body}\n</svg>\n"
    )


def data_flow() -> str:
    """Draws the data flow from text to a served model."""
    shards = Box(20, 20, 190, "text", ("jsonl, zst, gz, parquet", "files, URLs, the Hub"))
    prep = Box(260, 20, 200, "prep", ("tokenize, pack samples", "of seq_len + 1 ids"))
    data = Box(510, 20, 210, "dataset", ("MDS shards, dataset.json,", "token counts, tokenizer"))
    stream = Box(
        770, 20, 210, "loader", ("sample = f(data, seed, step)", "distinct ids of a batch")
    )
    embedding = Box(770, 190, 190, "input embedding", ("tied, leviathan, …", "[B, T, D]"), "ours")
    body = Box(530, 190, 190, "transformer blocks", ("Llama names", "[B, T, D]"))
    head = Box(
        290, 190, 190, "output head and loss", ("in chunks; gradient in", "the forward pass")
    )
    step = Box(60, 190, 180, "optimizer step", ("AdamW, lr(step)", "skipped if not finite"))
    frame = '<rect class="frame" x="40" y="148" width="940" height="134" rx="8"/>'
    engine = text(56, 170, "engine.train_step: DeepSpeed ZeRO 0–3 or FSDP2, tp, any world size")
    engine = engine.replace('class="note"', 'class="note left"')
    saved = Box(60, 340, 180, "checkpoint", ("chunks of full tensors,", "manifest, one rename"))
    scores = Box(290, 340, 190, "evaluate", ("perplexity, lm-eval,", "loss by frequency"))
    report = Box(530, 340, 190, "report", ("one HTML page, CSV,", "plots"))
    export = Box(290, 440, 190, "export", ("E as an ordinary table,", "model card"))
    served = Box(530, 440, 190, "any Llama engine", ("transformers,", "llama.cpp, …"))
    boxes = [shards, prep, data, stream, embedding, body, head, step, saved, scores, report]
    boxes += [export, served]
    arrows = [
        arrow(shards.right, prep.left),
        arrow(prep.right, data.left),
        arrow(data.right, stream.left),
        arrow((865, stream.bottom[1]), (865, embedding.y)),
        arrow(embedding.left, body.right),
        arrow(body.left, head.right),
        arrow(head.left, step.right),
        arrow((170, step.bottom[1]), (170, saved.y)),
        arrow((120, saved.y), (120, step.bottom[1])),
        text(66, 318, "resume in"),
        text(66, 333, "any layout"),
        arrow(saved.right, scores.left),
        arrow(scores.right, report.left),
        arrow((150, saved.bottom[1]), (150, export.left[1]), export.left),
        arrow(export.right, served.left),
    ]
    return svg(1000, 510, "Data flow: from text to a served model", [
        frame, engine, *arrows, *(box.draw() for box in boxes),
    ])  # fmt: skip


def basis(u: float) -> float:
    """Quadratic B-spline at distance u from its knot, in units of the knot spacing."""
    return 0.75 - u * u if u < 0.5 else 0.5 * (1.5 - u) ** 2 if u < 1.5 else 0.0


def lev() -> str:
    """Draws how LEV computes one vector of the input table."""
    token = Box(20, 60, 130, "token id", ("i = 100,000", "of V = 200,376"))
    digits = Box(190, 60, 150, "k = 3 digits", ("in base b = 59:", "28 · 42 · 54"))
    books = Box(
        380,
        20,
        200,
        "codebooks  3 × 59 × 128",
        ("vector 28 of the first", "+ vector 42 of the second", "+ vector 54 of the third"),
    )
    seed = Box(630, 60, 150, "seed", ("sum of the vectors:", "d = 128 numbers"))
    frame = '<rect class="frame" x="20" y="150" width="940" height="252" rx="8"/>'
    each = text(165, 174, "separate for each of h = 8 heads").replace('"note"', '"note left"')
    latent = Box(
        40, 195, 230, "latent", ("σ( ½ · LayerNorm( W · seed + c ) )", "128 numbers in (0, 1)")
    )
    spline = Box(
        300,
        195,
        250,
        "splines",
        ("quadratic, κ = 16 knots in [0, 1]", "128 × 64 curves, one value each"),
    )
    product = Box(595, 195, 180, "product over the 128", ("curves of each rank:", "r = 64 numbers"))
    out = Box(810, 195, 130, "W out", ("linear,", "64 → D"))
    row = Box(810, 440, 130, "vector E_i", ("D numbers",), "ours")
    boxes = [token, digits, books, seed, latent, spline, product, out, row]
    x0, y0, width, tall = 330, 385, 190, 70
    curves = []
    for knot in range(7):
        points = [
            f"{x0 + width * t / 60:.1f} {y0 - tall * basis(abs(t / 10 - knot)):.1f}"
            for t in range(61)
        ]
        curves.append(f'<path class="curve" d="M{" L".join(points)}"/>')
    curves.append(f'<path class="line" d="M{x0} {y0} H{x0 + width}"/>')
    curves.append(f'<circle class="dot" cx="{x0 + 0.62 * width}" cy="{y0}" r="4"/>')
    curves.append(text(425, 298, "curve = Σ weight × B-spline (7 of 16 shown)"))
    arrows = [
        arrow(token.right, digits.left),
        arrow(digits.right, (380, digits.right[1])),
        arrow((580, seed.left[1]), seed.left),
        arrow((705, seed.bottom[1]), (705, 135), (145, 135), (145, latent.y)),
        arrow(latent.right, spline.left),
        arrow(spline.right, product.left),
        arrow(product.right, out.left),
        arrow(out.bottom, row.top),
        text(795, 428, "sum over the heads"),
        text(
            400,
            440,
            "All 200,376 ids share the same few parameters: all ids share the splines, and",
        ),
        text(
            400, 458, "many share a digit, so the gradient of one token also updates others. After"
        ),
        text(400, 476, "training, the vectors are materialized once as an ordinary table."),
    ]
    return svg(980, 510, "LEV: one vector of the input embedding from the digits of a token id", [
        frame, each, *arrows, *curves, *(box.draw() for box in boxes),
    ])  # fmt: skip


if __name__ == "__main__":
    (HERE / "data_flow.svg").write_text(data_flow(), encoding="utf-8")
    (HERE / "lev.svg").write_text(lev(), encoding="utf-8")
