"""Style sheet of the report page."""

from leviathan.analysis.figure import COLORS, FONT, GRID, INK, MUTED

_DARK_COLORS = (
    "#9aa4af",
    "#58b0f0",
    "#ff9455",
    "#3fc79a",
    "#d68fc4",
    "#e0b040",
    "#9cc9ec",
    "#c89a78",
)


def _variables(ink: str, muted: str, grid: str, paper: str, colors: tuple[str, ...]) -> str:
    series = "".join(f"--series-{number}: {color};" for number, color in enumerate(colors))
    return f"--ink: {ink}; --muted: {muted}; --grid: {grid}; --paper: {paper}; {series}"


_LIGHT = _variables(INK, MUTED, GRID, "#ffffff", COLORS)
_DARK = _variables("#e6e9ed", "#9aa4af", "#343b44", "#14181d", _DARK_COLORS)
_SERIES = "".join(
    f"thead .series-{number} {{ color: var(--series-{number}); }}" for number in range(len(COLORS))
)

CSS = f"""
:root {{ {_LIGHT} color-scheme: light dark; }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
@media print {{ :root {{ {_LIGHT} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 {FONT}; }}
main {{ max-width: 54rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }}
.eyebrow {{ margin: 0; color: var(--muted); font-size: .85rem; }}
h1 {{ font-size: 2rem; line-height: 1.2; margin: .2rem 0 .8rem; letter-spacing: -.015em; }}
h2 {{ font-size: 1.2rem; margin: 0 0 .8rem; }}
h3 {{ font-size: .95rem; margin: 1.6rem 0 .4rem; }}
section {{ margin-top: 2.75rem; }}
p, li, figcaption {{ max-width: 44rem; }}
.question {{ font-size: 1.15rem; margin: 0 0 .9rem; color: var(--muted); }}
h2.group {{ font-size: 1.5rem; margin: 3.5rem 0 -1.5rem; padding-top: 1rem;
  border-top: 2px solid var(--grid); }}
summary {{ cursor: pointer; font-size: .95rem; }}
.summary {{ font-size: 1.08rem; margin: 0; }}
figure {{ margin: 0; }}
figcaption, .note {{ color: var(--muted); font-size: .86rem; }}
figcaption {{ margin-top: .5rem; }}
figure svg {{ display: block; width: 100%; height: auto; }}
.narrow {{ display: none; }}
.scroll {{ overflow-x: auto; }}
.scroll + .scroll {{ margin-top: 1.4rem; }}
table {{ border-collapse: collapse; width: 100%; font-size: .92rem;
  font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: .34rem 0 .34rem .8rem; border-bottom: 1px solid var(--grid);
  vertical-align: baseline; white-space: nowrap; }}
th:first-child {{ text-align: left; padding-left: 0; font-weight: 400; }}
thead th {{ border-bottom: 1px solid var(--muted); color: var(--muted); font-weight: 600; }}
{_SERIES}
.section th {{ color: var(--muted); font-size: .8rem; padding-top: 1.1rem; }}
.change {{ display: block; color: var(--muted); font-size: .8rem; line-height: 1.2; }}
td.text {{ white-space: normal; overflow-wrap: anywhere; }}
.no {{ font-weight: 700; color: var(--series-2); }}
.yes {{ color: var(--muted); }}
code {{ font-size: .9em; overflow-wrap: anywhere; }}
@media (max-width: 40rem) {{
  .wide {{ display: none; }} .narrow {{ display: block; }}
  main {{ padding: 1.5rem 1rem 3rem; }} h1 {{ font-size: 1.6rem; }}
  tbody th:first-child {{ white-space: normal; }}
  .buckets tbody th:first-child {{ white-space: nowrap; }}
  th, td {{ padding-left: .7rem; }} .buckets td, .buckets th {{ font-size: .84rem; }}
  .buckets td, .buckets th:not(:first-child) {{ padding-left: .45rem; }}
}}
@media print {{
  body {{ font-size: 10.5pt; }} main {{ max-width: none; padding: 0; }}
  .wide {{ display: block; }} .narrow {{ display: none; }}
  section {{ margin-top: 1.6rem; }} figure, tr {{ break-inside: avoid; }}
  h2, h3 {{ break-after: avoid; }} .scroll {{ overflow: visible; }}
  table {{ font-size: 8.5pt; }} th, td {{ padding: .2rem 0 .2rem .5rem; }}
  h2.group {{ break-before: page; border-top: 0; margin-top: 0; }}
}}
"""
