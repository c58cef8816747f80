"""The parts of a timeline's page that are the same for every timeline: its style and its script.

The page is one file that asks nothing of any other place, readable without the script, which only adds
what moves: a reading of the time under the pointer, what a bar is, and phases that can be switched off.
"""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #ffffff; --card: #f6f8fa; --ink: #1f2630; --soft: #687385; --line: #e6eaef;
  --task: #a3b1c2; --fetch: #2f81f7; --refine: #8dc1ff; --verify: #0ea5a0; --decode: #8b5cf6; --place: #b0469b;
  --execute: #f97316; --prefill: #fdba74; --queued: #ccd4de; --exact: #16a34a; --token: #e11d48;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #0e1116; --card: #171c24; --ink: #e4eaf2; --soft: #8d99aa; --line: #232a34;
    --task: #5d6b7e; --fetch: #3b82f6; --refine: #1f4f94; --verify: #2dd4bf; --decode: #a78bfa; --place: #d783c6;
    --execute: #fb923c; --prefill: #9a5a22; --queued: #39424f; --exact: #4ade80; --token: #fb7185;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; padding: 32px 28px 48px; background: var(--ground); color: var(--ink);
  font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}
main { max-width: 1240px; margin: 0 auto; }
h1 { margin: 0 0 2px; font-size: 30px; font-weight: 650; letter-spacing: -.02em; }
h1 em { color: var(--token); font-style: normal; font-variant-numeric: tabular-nums; }
h1.failed { color: var(--token); font-size: 22px; overflow-wrap: anywhere; }
.lead, footer { margin: 0; color: var(--soft); }
dl { display: flex; flex-wrap: wrap; gap: 10px; margin: 20px 0 22px; }
dl div { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 8px 16px 9px; }
dt { color: var(--soft); font-size: 12px; }
dd { margin: 0; font-size: 19px; font-weight: 600; font-variant-numeric: tabular-nums; }
.legend { display: flex; flex-wrap: wrap; gap: 6px; margin: 0 0 10px; }
.legend button {
  display: inline-flex; align-items: center; gap: 7px; padding: 3px 11px 3px 9px; cursor: pointer;
  font: inherit; font-size: 12.5px; color: var(--ink); background: none;
  border: 1px solid var(--line); border-radius: 99px;
}
.legend button:hover { background: var(--card); }
.legend button[aria-pressed="false"] { opacity: .4; text-decoration: line-through; }
.legend i { width: 12px; height: 12px; border-radius: 3px; }
.legend i.exact { width: 3px; border-radius: 1px; }
.legend i.first-token { width: 9px; height: 9px; border-radius: 1px; transform: rotate(45deg); }
.chart { position: relative; overflow-x: auto; border: 1px solid var(--line); border-radius: 12px; }
svg { display: block; width: 100%; min-width: 760px; }
svg text { font: 11px ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace; fill: var(--ink); }
svg text.note, svg text.tick { fill: var(--soft); }
svg text.head, svg text.moment { font-family: system-ui, -apple-system, sans-serif; font-weight: 600; }
svg text.head { letter-spacing: .06em; fill: var(--soft); }
.grid { stroke: var(--line); stroke-width: 1; }
.band { fill: transparent; }
.row:hover .band { fill: var(--line); opacity: .5; }
.task { fill: var(--task); background: var(--task); }
.fetch { fill: var(--fetch); background: var(--fetch); }
.fetch.refine { fill: var(--refine); background: var(--refine); }
.verify { fill: var(--verify); background: var(--verify); }
.decode { fill: var(--decode); background: var(--decode); }
.place { fill: var(--place); background: var(--place); }
.execute, .generate { fill: var(--execute); background: var(--execute); }
.queued { fill: var(--queued); background: var(--queued); }
.prefill { fill: var(--prefill); background: var(--prefill); }
.draft, .exact { fill: var(--exact); background: var(--exact); }
rect.draft { opacity: .5; }
.first-token { fill: var(--token); background: var(--token); }
.last-token { fill: var(--soft); }
.network { fill: var(--fetch); opacity: .28; }
.network-line { fill: none; stroke: var(--fetch); stroke-width: 1.5; }
.moment-line { stroke-width: 1.2; stroke-dasharray: 3 3; }
line.answer { stroke: var(--soft); } text.answer { fill: var(--soft); }
line.all-exact { stroke: var(--exact); } text.all-exact { fill: var(--exact); }
line.token { stroke: var(--token); } text.token { fill: var(--token); }
#pointer { stroke: var(--ink); stroke-width: .8; opacity: .55; pointer-events: none; }
#tip {
  position: fixed; z-index: 2; max-width: 420px; padding: 6px 11px; pointer-events: none; visibility:
  hidden; background: var(--ink); color: var(--ground); border-radius: 8px; font-size: 12.5px;
  overflow-wrap: anywhere; box-shadow: 0 6px 20px rgb(0 0 0 / .25); } #tip b { font-variant-numeric:
  tabular-nums; } footer { margin-top: 14px; font-size: 12.5px; }
"""

SCRIPT = """
const svg = document.querySelector('svg'), tip = document.getElementById('tip');
const pointer = document.getElementById('pointer');
const { left, right, end } = svg.dataset;
for (const title of svg.querySelectorAll('title')) {  // ours come at once, the browser's own after a second
  title.parentNode.dataset.title = title.textContent;
  title.remove();
}
const seconds = s => s < 0.0995 ? `${Math.round(s * 1e3)} ms` : `${s.toFixed(2)} s`;
svg.addEventListener('mousemove', event => {
  const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  const inside = at.x >= +left && at.x <= +right;
  pointer.setAttribute('visibility', inside ? 'visible' : 'hidden');
  tip.style.visibility = inside ? 'visible' : 'hidden';
  if (!inside) return;
  pointer.setAttribute('x1', at.x);
  pointer.setAttribute('x2', at.x);
  const time = document.createElement('b');
  time.textContent = seconds((at.x - left) / (right - left) * end);
  const title = event.target.dataset.title;
  tip.replaceChildren(time, title ? `  ${title}` : '');
  const flip = event.clientX > innerWidth - tip.offsetWidth - 30;
  tip.style.left = `${event.clientX + (flip ? -tip.offsetWidth - 14 : 14)}px`;
  tip.style.top = `${Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8)}px`;
});
svg.addEventListener('mouseleave', () => {
  tip.style.visibility = 'hidden';
  pointer.setAttribute('visibility', 'hidden');
});
for (const button of document.querySelectorAll('.legend button')) {
  button.addEventListener('click', () => {
    const shown = button.getAttribute('aria-pressed') === 'false';
    button.setAttribute('aria-pressed', shown);
    const display = shown ? '' : 'none';
    for (const shape of svg.querySelectorAll(button.dataset.shapes)) shape.style.display = display;
  });
}
"""
