"""The page's style sheet. Its hash is in the page's content security policy, so nothing else can style the page."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #60646c; --paper: #fcfcfd; --card: #fff; --edge: #e0e1e6; --link: #0d66d0;
  --heat: 24, 134, 84; --c0: #0d74ce; --c1: #c2410c; --c2: #18794e; --c3: #8e4ec6; --c4: #b4820a; --c5: #ca244d; }
@media (prefers-color-scheme: dark) { :root { --ink: #edeef0; --soft: #a0a4ab; --paper: #111113; --card: #18191b; --edge: #2e3135;
  --link: #70b8ff; --heat: 60, 190, 130; --c0: #70b8ff; --c1: #ffa057; --c2: #3dd68c; --c3: #d19dff; --c4: #ffca16; --c5: #ff92ad; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 24px 20px 40px; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 4px 14px; margin-bottom: 16px; }
h1 { font-size: 22px; margin: 0; letter-spacing: -.01em; } header p { margin: 0; color: var(--soft); }
header .at { margin-left: auto; } nav { margin: 0 2px 16px; color: var(--soft); }
header a, nav a { color: var(--link); text-decoration: underline; }
h2 { font-size: 13px; font-weight: 600; color: var(--soft); margin: 0 0 10px; }
section { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 16px 18px; margin-bottom: 16px; }
section:has(> .board) { padding: 4px 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { font-weight: 500; font-size: 13px; color: var(--soft); text-align: left; }
small { color: var(--soft); font-size: 12.5px; } b { font-weight: 600; }
code { font: 12.5px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; color: var(--soft); }
a { color: inherit; text-decoration: none; } a:hover, a:focus-visible { text-decoration: underline; } footer a { color: var(--link); }
.board th, .board td { padding: 10px 12px; vertical-align: middle; } .board tbody tr { border-top: 1px solid var(--edge); }
.board th:first-child, .board td:first-child { padding-left: 20px; width: 44px; }
.board td:last-child, .board th:last-child { padding-right: 20px; }
.rank { color: var(--soft); } .node .model, .number small { display: block; overflow-wrap: anywhere; }
.seen { color: var(--soft); } .pass, .curve, .seen, .number { white-space: nowrap; }
svg { display: block; } svg text { fill: var(--soft); font-size: 11px; }
.whisker { width: 130px; height: 14px; margin-top: 2px; } .spark { width: 120px; height: 24px; }
.chart { width: 100%; height: auto; } .chart polyline { vector-effect: non-scaling-stroke; }
.axis { stroke: var(--edge); stroke-width: 1; } .range { stroke: var(--c0); stroke-width: 3; stroke-linecap: round; opacity: .4; }
.dot { fill: var(--c0); } .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; vector-effect: non-scaling-stroke; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); } .c3 { stroke: var(--c3); } .c4 { stroke: var(--c4); }
.c5 { stroke: var(--c5); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 10px 0 0; padding: 0; font-size: 13px; }
.legend i { display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin-right: 6px; vertical-align: middle; }
.k0 { background: var(--c0); } .k1 { background: var(--c1); } .k2 { background: var(--c2); } .k3 { background: var(--c3); }
.k4 { background: var(--c4); } .k5 { background: var(--c5); }
.scroll { overflow-x: auto; margin: 0 -18px; padding: 0 18px; }
.skills td, .skills thead th { text-align: center; padding: 6px 4px; min-width: 74px; font-size: 13px; vertical-align: bottom; }
.skills td { border: 2px solid var(--card); border-radius: 8px; } .skills td small { display: block; font-size: 11px; color: inherit; }
.skills tbody th { white-space: nowrap; padding-right: 12px; font-weight: 400; color: var(--ink); }
.skills thead th:first-child { text-align: left; }
.none { color: var(--soft); } .h0 { background: rgba(var(--heat), .03); } .h1 { background: rgba(var(--heat), .08); }
.h2 { background: rgba(var(--heat), .13); } .h3 { background: rgba(var(--heat), .18); } .h4 { background: rgba(var(--heat), .23); }
.h5 { background: rgba(var(--heat), .28); } .h6 { background: rgba(var(--heat), .33); } .h7 { background: rgba(var(--heat), .38); }
.h8 { background: rgba(var(--heat), .43); } .h9 { background: rgba(var(--heat), .48); } .h10 { background: rgba(var(--heat), .54); }
.empty { padding: 40px 0; text-align: center; color: var(--soft); } footer { color: var(--soft); font-size: 13px; max-width: 76ch; }
@media (max-width: 680px) { main { padding: 16px 12px 32px; } .board thead { display: none; }
  .board tr { display: grid; grid-template-columns: 32px 1fr auto; gap: 4px 10px; padding: 12px 14px; align-items: start; }
  .board td, .board td:first-child, .board td:last-child { padding: 0; width: auto; }
  .pass { text-align: right; } .whisker { width: 110px; margin-left: auto; }
  .number { grid-column: 2; } .curve { grid-column: 3; text-align: right; } .number small { display: inline; margin-left: 6px; }
  .number b::after, .curve b::after { content: " answers"; color: var(--soft); font-weight: 400; font-size: 12.5px; }
  .curve b::after { content: " reward"; } .spark { width: 110px; margin-left: auto; } .chart text { font-size: 19px; }
  .curve { grid-row: 2 / 4; } .seen { grid-column: 2; font-size: 12.5px; } .board tbody tr:first-child { border-top: 0; }
  .skills tbody th code { display: block; } }
"""
