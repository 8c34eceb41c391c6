"""The report page's stylesheet; it takes its colours from `style`, as the figures do."""

from qkattn.report.figures.style import GRID, HUES, HUES_DARK, INK, MUTED, SURFACE


def _variables(ink: str, muted: str, grid: str, surface: str, hues: tuple[str, ...]) -> str:
    named = {'ink': ink, 'muted': muted, 'grid': grid, 'surface': surface}
    named |= {f'hue-{index}': hue for index, hue in enumerate(hues)}
    return ''.join(f'--{name}:{colour};' for name, colour in named.items())


_LIGHT = _variables(INK, MUTED, GRID, SURFACE, HUES) + '--band:#f4f6f8;--warn:#fff4e0;'
_DARK = _variables('#e6e9ed', '#9aa4b0', '#343b45', '#15181d', HUES_DARK)
_DARK += '--band:#1d2229;--warn:#3a2d14;'
_GROUPS = ''.join(f'.group-{index}{{background:var(--hue-{index})}}' for index in range(len(HUES)))

STYLESHEET = f"""
:root{{color-scheme:light dark;{_LIGHT}}}
@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}
@media print{{:root{{color-scheme:light;{_LIGHT}}}}}
*{{box-sizing:border-box}}
body{{margin:0 auto;padding:1.1rem clamp(1rem,3vw,2.5rem) 4rem;max-width:1480px;
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;
 color:var(--ink);background:var(--surface)}}
h1{{font-size:1.7rem;line-height:1.2;margin:0 0 .3rem;overflow-wrap:anywhere}}
h2{{font-size:1.2rem;margin:2.2rem 0 .7rem;padding-top:.6rem;border-top:1px solid var(--grid)}}
h3{{font-size:.95rem;margin:0 0 .3rem}}
.question{{font-size:1.05rem;color:var(--muted);margin:0 0 .6rem;max-width:70rem}}
.verdict{{border-left:4px solid var(--ink);padding:.1rem 0 .1rem .9rem;margin:0 0 .8rem;
 max-width:78rem;font-size:1.05rem;line-height:1.42;overflow-wrap:anywhere}}
.verdict.many{{font-size:.92rem}}
.verdict p{{margin:0 0 .25rem}}
.equal{{font-size:.86rem;color:var(--muted);margin:.3rem 0 0;max-width:52rem}}
.screen{{display:grid;grid-template-columns:minmax(0,1fr) 15.5rem;gap:1rem 2rem;
 align-items:start;margin-top:.6rem}}
.screen.wide{{grid-template-columns:minmax(0,1fr)}}
.facts{{display:grid;grid-template-columns:repeat(auto-fill,minmax(9.5rem,1fr));gap:.45rem 1.4rem;
 margin:0}}
.screen:not(.wide) .facts{{grid-template-columns:1fr}}
dt{{font-size:.78rem;color:var(--muted);line-height:1.25}}
dd{{margin:0;font-size:.9rem;font-weight:600;line-height:1.3;overflow-wrap:anywhere}}
nav{{display:flex;flex-wrap:wrap;gap:.3rem 1.1rem;margin-top:1rem;font-size:.9rem}}
a{{color:var(--hue-0)}}
.pair{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(36rem,100%),1fr));gap:1.5rem}}
.stack{{display:grid;gap:1.8rem}}
.pair>*,.stack>*{{min-width:0}}
figure{{margin:0}}
.scroll{{overflow-x:auto;-webkit-overflow-scrolling:touch}}
.scroll:focus-visible{{outline:2px solid var(--hue-0)}}
svg{{display:block;width:100%;height:auto}}
figcaption{{font-size:.86rem;color:var(--muted);margin-top:.3rem;max-width:46rem}}
table{{border-collapse:collapse;font-size:.82rem;font-variant-numeric:tabular-nums}}
th,td{{padding:.28rem .55rem;text-align:right;white-space:nowrap;
 border-bottom:1px solid var(--grid)}}
thead th{{vertical-align:bottom;font-weight:600}}
thead span{{display:block;font-weight:400;color:var(--muted)}}
tbody th{{font-weight:600}}
.long{{display:inline-block;width:18rem;white-space:normal;overflow-wrap:anywhere}}
th:first-child{{text-align:left;position:sticky;left:0;background:var(--surface)}}
.left{{text-align:left}}
.wrap{{white-space:normal;overflow-wrap:anywhere}}
tr.baseline td,tr.baseline th{{background:var(--band)}}
.plain th{{font-weight:400;color:var(--muted);vertical-align:top}}
.notes{{font-size:.88rem;color:var(--muted);padding-left:1.2rem;max-width:60rem}}
.problems{{background:var(--warn);padding:.5rem 1rem;border-radius:6px;margin:0 0 .7rem;
 font-size:.92rem;overflow-wrap:anywhere}}
ul.problems{{padding-left:2rem}}
.problems ul{{margin:.1rem 0 0;padding-left:1.1rem}}
.pair+.scroll,.stack+.scroll{{margin-top:1rem}}
.blocks{{color:var(--ink)}}
.reasons td:last-child{{white-space:normal;min-width:16rem}}
.legend{{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;font-size:.88rem;margin:.2rem 0 .6rem}}
.legend i{{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin-right:.4rem}}
.bar{{display:flex;width:18rem;height:.9rem}}
.bar i{{display:block;height:100%;border-right:1px solid var(--surface)}}
{_GROUPS}
@media (max-width:64rem){{.screen{{grid-template-columns:minmax(0,1fr)}}
 .screen:not(.wide) .facts{{grid-template-columns:repeat(auto-fill,minmax(9.5rem,1fr))}}}}
@media (max-width:40rem){{h1{{font-size:1.4rem}}
 th:first-child{{min-width:9rem;max-width:11rem;overflow-wrap:anywhere;
 white-space:normal}}th,td{{padding:.28rem .5rem}}.plain th:first-child{{min-width:5rem;
 position:static}}.bar{{width:11rem}}.long{{width:auto}}}}
@media print{{body{{max-width:none;padding:0;font-size:11px}}nav{{display:none}}
 .scroll{{overflow:visible}}th:first-child{{position:static}}svg{{min-width:0!important}}
 table{{font-size:7px}}th,td{{padding:.1rem .2rem}}thead th{{white-space:normal}}
 figure,tr{{break-inside:avoid}}
 h2{{break-after:avoid}}.bar{{height:.6rem}}*{{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
 @page{{size:A4 landscape;margin:1.2cm}}}}
"""
