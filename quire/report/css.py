"""The look of the page: light and dark paper, print, and screens as narrow as a phone's."""

from __future__ import annotations

CSS = """
:root {
  color-scheme: light dark;
  --paper: #fff; --text: #1c2127; --soft: #5a6270; --line: #dde1e6; --tint: #f5f6f8; --link: #0b62a3;
  --good: #00734f; --good-tint: #e3f4ed; --bad: #a83c00; --bad-tint: #fdeee4;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15181c; --text: #e4e7eb; --soft: #a0a8b4; --line: #323841; --tint: #1d2127; --link: #78b9ec;
    --good: #4fcba0; --good-tint: #12302a; --bad: #ff9d5c; --bad-tint: #3a2414;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--text); -webkit-text-size-adjust: 100%;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
}
main { max-width: 66rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
h1 { font-size: 1.15rem; margin: 0; font-weight: 600; overflow-wrap: anywhere; }
h2 {
  font-size: 1.25rem; margin: 0 0 .75rem; padding-top: 1.1rem; border-top: 1px solid var(--line);
  overflow-wrap: anywhere;
}
h3 { font-size: 1rem; margin: 1.4rem 0 .5rem; }
section { margin-top: 2rem; }
p { margin: .4rem 0 .8rem; max-width: 44rem; overflow-wrap: anywhere; }
a { color: var(--link); text-decoration: none; }
a:hover { text-decoration: underline; }
.soft, figcaption { color: var(--soft); }

.results { display: flex; flex-wrap: wrap; gap: .25rem 2.5rem; align-items: baseline; margin: .6rem 0 .4rem; }
.results b {
  font-size: 3.2rem; line-height: 1.15; font-weight: 650; letter-spacing: -.02em; margin-right: .6rem;
  font-variant-numeric: tabular-nums;
}
.results span { font-size: 1.15rem; overflow-wrap: anywhere; }
.verdict {
  display: inline-block; padding: .25rem .75rem; border-radius: 1rem; font-weight: 600;
  background: var(--tint); color: var(--soft);
}
.verdict.good { background: var(--good-tint); color: var(--good); }
.verdict.bad { background: var(--bad-tint); color: var(--bad); }
.warnings { list-style: none; padding: 0; margin: 1rem 0; }
.warnings li {
  background: var(--bad-tint); border-left: 4px solid var(--bad); border-radius: 0 4px 4px 0;
  padding: .5rem .8rem; margin: .4rem 0; overflow-wrap: anywhere;
}
nav { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; font-size: .92rem; margin-top: 1rem; }

.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: .92rem; margin: .2rem 0 1rem; }
th, td {
  text-align: left; vertical-align: top; padding: .32rem 1.1rem .32rem 0; max-width: 26rem;
  border-bottom: 1px solid var(--line); overflow-wrap: break-word; font-variant-numeric: tabular-nums;
}
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
th.n, td.n { text-align: right; padding-right: 1.4rem; }
td.n { white-space: nowrap; }
tfoot td { font-weight: 650; border-bottom: 0; }

.pictures {
  display: grid; gap: 1.2rem; margin: .6rem 0 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr));
}
figure { margin: 0; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figure.tall { grid-row: span 2; }
figure svg { display: block; max-width: 100%; height: auto; }
figure.wide svg { max-width: none; }
figure svg text { font-family: inherit !important; }
figure img { display: block; max-width: 100%; height: auto; background: #fff; padding: .5rem; }
figcaption { font-size: .88rem; margin-top: .3rem; max-width: 44rem; overflow-wrap: anywhere; }

.facts {
  display: grid; gap: .7rem 1.5rem; margin: .2rem 0 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 12rem), 1fr));
}
.facts div { min-width: 0; }
dt { color: var(--soft); font-size: .86rem; }
dd { margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
pre {
  background: var(--tint); border: 1px solid var(--line); border-radius: 6px; padding: .7rem .9rem;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: .9rem;
}
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
summary { cursor: pointer; color: var(--link); margin: .3rem 0; }

@media (max-width: 30rem) {
  main { padding: 1rem .9rem 3rem; }
  .results b { font-size: 2.6rem; }
  th, td { padding-right: .8rem; }
  th.n, td.n { padding-right: .9rem; }
}
@media print {
  :root {
    --paper: #fff; --text: #000; --soft: #444; --line: #bbb; --tint: #f5f6f8;
    --good: #00573c; --bad: #8a3200; --good-tint: #fff; --bad-tint: #fff;
  }
  body { font-size: 10.5pt; }
  main { max-width: none; padding: 0; }
  nav { display: none; }
  figure, tr, .warnings li { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  section { margin-top: 1rem; }
  .pictures { grid-template-columns: 1fr 1fr; }
  figure.wide svg { max-width: 100%; }
  details::details-content { display: block; content-visibility: visible; height: auto; }
}
"""
