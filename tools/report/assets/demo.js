// SPDX-License-Identifier: Apache-2.0
'use strict';
const D = JSON.parse(document.getElementById('data').textContent);
const $ = id => document.getElementById(id);
const NS = 'http://www.w3.org/2000/svg';
const num = n => Math.round(n).toLocaleString('en-US');
function bytes(n) {
  const units = ['B', 'kB', 'MB', 'GB'];
  let i = 0;
  for (; n >= 1000 && i < 3; ++i) n /= 1000;
  return n.toFixed(i ? (n < 10 ? 2 : 1) : 0) + ' ' + units[i];
}
const sum = list => list.reduce((a, b) => a + b, 0);
const nice = v => { // the smallest of 1, 2, 5, 10, 20, ... that is >= v
  const power = Math.pow(10, Math.floor(Math.log10(v)));
  return [1, 2, 5, 10].map(m => m * power).find(m => m >= v * 0.999999);
};
const times = f => f.toFixed(2) + ' \u00d7';
const plural = (n, noun) => `${num(n)} ${noun}${n === 1 ? '' : 's'}`;
const time = us => us < 1000 ? us.toFixed(us < 10 ? 2 : 1) + ' \u00b5s' : (us / 1000).toFixed(us < 10000 ? 3 : 2) + ' ms';
function el(parent, tag, attrs, text) {
  const svg = ['svg', 'g', 'rect', 'line', 'text', 'path', 'clipPath', 'defs'].includes(tag);
  const node = svg ? document.createElementNS(NS, tag) : document.createElement(tag);
  for (const [k, v] of Object.entries(attrs || {})) node.setAttribute(k, v);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}
function clear(node) { while (node.firstChild) node.removeChild(node.firstChild); return node; }
function svg(parent, height) {
  const width = Math.max(280, parent.clientWidth);
  const s = el(parent, 'svg', {viewBox: `0 0 ${width} ${height}`, height, role: 'img'});
  s.W = width;
  return s;
}

// Tooltips of any element with data-tip.
document.addEventListener('mousemove', e => {
  const hit = e.target.closest && e.target.closest('[data-tip]');
  const tip = $('tip');
  if (!hit) { tip.style.opacity = 0; return; }
  tip.textContent = hit.getAttribute('data-tip');
  tip.style.opacity = 1;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.min(e.clientX + 14, innerWidth - box.width - 8) + 'px';
  tip.style.top = (e.clientY + 18 + box.height > innerHeight ? e.clientY - box.height - 10 : e.clientY + 18) + 'px';
});

function switcher(parent, names, chosen, act) {
  const buttons = names.map((name, i) => {
    const b = el(parent, 'button', {type: 'button', 'aria-pressed': i === chosen}, name);
    b.onclick = () => { buttons.forEach(o => o.setAttribute('aria-pressed', o === b)); act(i); };
    return b;
  });
  return i => buttons.forEach((o, j) => o.setAttribute('aria-pressed', i === j));
}

// ------------------------------------------------------------------------------------- head, tiles, checks, meta
$('verdict').textContent = D.passed ? 'PASS' : 'FAIL';
$('verdict').className = D.passed ? 'good' : 'bad';
for (const t of D.tiles) {
  const tile = el($('tiles'), 'div', {class: 'tile'});
  el(tile, 'div', {class: 'label'}, t.label);
  el(tile, 'div', {class: 'value'}, t.value);
  el(tile, 'p', {class: 'note'}, t.note);
}
for (const c of D.checks) {
  const line = el($('checks'), 'div', {class: 'check'});
  el(line, 'b', {class: c.passed ? 'good' : 'bad'}, c.passed ? 'PASS' : 'FAIL');
  const text = el(line, 'div', {}, c.name);
  el(text, 'small', {}, c.detail);
}
const meta = el($('meta'), 'table');
for (const k of ['Layer', 'Ranks', 'Routing', 'Exchange', 'Expert compute', 'Fused layer', 'Machine', 'Build', 'Date']) {
  if (!D.meta[k]) continue;
  const row = el(meta, 'tr');
  el(row, 'td', {}, k);
  el(row, 'td', {}, D.meta[k]);
}

// ------------------------------------------------------------------------------------------------ traffic matrix
function dark() {
  const t = document.documentElement.getAttribute('data-theme');
  return t ? t === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
}
function mix(f) {
  const style = getComputedStyle(document.documentElement);
  const color = name => style.getPropertyValue(name).split(',').map(Number), a = color('--heat0'), b = color('--heat1');
  return a.map((v, i) => Math.round(v + (b[i] - v) * f));
}
let trafficKind = 0;
function drawTraffic() {
  const box = clear($('traffic')), W = D.world;
  const M = trafficKind ? D.traffic.routes : D.traffic.rows;
  const max = Math.max(1, ...M.flat()), left = 52, top = 36, s = svg(box, 10);
  const size = Math.min((s.W - left - 8) / W, 54), height = top + size * W + 8;
  s.setAttribute('viewBox', `0 0 ${s.W} ${height}`);
  s.setAttribute('height', height);
  el(s, 'text', {x: left + size * W / 2, y: 12, 'text-anchor': 'middle'}, 'to rank');
  const middle = top + size * W / 2;
  el(s, 'text', {x: 12, y: middle, 'text-anchor': 'middle', transform: `rotate(-90 12 ${middle})`}, 'from rank');
  const every = Math.ceil(W / 16), unit = trafficKind ? 'routes' : 'rows';
  for (let i = 0; i < W; ++i) {
    if (i % every) continue;
    el(s, 'text', {x: left + size * (i + 0.5), y: 29, 'text-anchor': 'middle'}, i);
    el(s, 'text', {x: left - 8, y: top + size * (i + 0.5) + 4, 'text-anchor': 'end'}, i);
  }
  for (let a = 0; a < W; ++a) for (let b = 0; b < W; ++b) {
    const n = M[a][b], c = mix(n / max), light = 0.299 * c[0] + 0.587 * c[1] + 0.114 * c[2] > 140;
    const tip = `rank ${a} \u2192 rank ${b}\n${num(n)} ${unit}` + (trafficKind ? '' : `, ${bytes(n * D.traffic.row_bytes)}`) +
      (a === b ? '\nown rank: a local copy' : '') +
      `\n(${num(D.traffic.rows[a][b])} rows for ${num(D.traffic.routes[a][b])} routes)`;
    const g = el(s, 'g', {'data-tip': tip});
    const side = Math.max(1, size - 2), x = left + size * b + 1, y = top + size * a + 1;
    el(g, 'rect', {x, y, width: side, height: side, rx: Math.min(4, size / 6), fill: `rgb(${c})`});
    if (size < 34) continue;
    const at = {x: x + side / 2, y: y + side / 2 + 4, 'text-anchor': 'middle', style: `fill:${light ? '#1c1c1a' : '#fff'}`};
    el(g, 'text', at, n >= 10000 ? (n / 1000).toFixed(0) + 'k' : num(n));
  }
  const rows = sum(D.traffic.rows.flat()), routes = sum(D.traffic.routes.flat());
  $('traffic-note').textContent = `${num(rows)} rows carried ${num(routes)} routes in ${plural(D.steps, 'step')}: a token ` +
    `is sent to a rank once, regardless of how many of its experts are there (${(routes / Math.max(1, rows)).toFixed(2)} routes per row). ` +
    'The diagonal stays on its rank.';
}
switcher($('traffic-switch'), ['rows sent', 'routes'], 0, i => { trafficKind = i; drawTraffic(); });

// ------------------------------------------------------------------------------------------------- time of a step
function drawTimes() {
  const box = clear($('times')), items = D.times, s = svg(box, 10);
  const left = 92, right = 84, step = 34, max = Math.max(...items.map(i => i.us)) || 1, height = step * items.length;
  s.setAttribute('viewBox', `0 0 ${s.W} ${height}`);
  s.setAttribute('height', height);
  items.forEach((it, i) => {
    const w = Math.max(2, (s.W - left - right) * it.us / max), y = i * step;
    el(s, 'rect', {x: left, y: y + 6, width: w, height: 22, rx: 4, style: `fill:var(--${it.category})`});
    el(s, 'text', {x: left - 10, y: y + 21, 'text-anchor': 'end', class: 'strong'}, it.name);
    el(s, 'text', {x: left + w + 8, y: y + 21}, time(it.us));
  });
}

// --------------------------------------------------------------------------------------------------- expert load
function drawExperts() {
  const box = clear($('experts')), C = D.experts.counts, F = D.experts.first, E = C.length, s = svg(box, 220);
  const left = 52, right = 78, bottom = 28, top = 14, h = 220 - top - bottom, w = s.W - left - right;
  const max = Math.max(1, ...C), mean = sum(C) / E, x = e => left + w * e / E, y = n => top + h * (1 - n / max);
  const of_mean = n => times(mean ? n / mean : 0);  // nothing is routed if every route is dropped
  for (let r = 0; r + 1 < F.length; ++r) {
    const a = x(F[r]), b = x(F[r + 1]);
    if (r % 2 === 0) el(s, 'rect', {x: a, y: top, width: Math.max(0, b - a), height: h, style: 'fill:var(--band)'});
    if (b - a < 20 && r % 4) continue;
    el(s, 'text', {x: (a + b) / 2, y: 220 - 8, 'text-anchor': 'middle'}, (b - a > 46 ? 'rank ' : '') + r);
  }
  const tick = Math.max(1, nice(max / 6));
  for (let v = 0; v <= max; v += tick) {
    el(s, 'line', {x1: left, x2: s.W - right, y1: y(v), y2: y(v), class: 'axis'});
    el(s, 'text', {x: left - 8, y: y(v) + 4, 'text-anchor': 'end'}, num(v));
  }
  const busiest = C.indexOf(Math.max(...C)), gap = w / E > 3 ? 1 : 0;
  for (let e = 0; e < E; ++e) {
    const rank = F.findIndex((f, i) => e >= f && e < F[i + 1]);
    const g = el(s, 'g', {'data-tip': `expert ${e} on rank ${rank}\n${num(C[e])} routes, ${of_mean(C[e])} the mean`});
    el(g, 'rect', {x: x(e), y: top, width: w / E, height: h, fill: 'transparent'});
    const bar = {x: x(e) + gap / 2, y: y(C[e]), width: Math.max(0.6, w / E - gap), height: Math.max(0, top + h - y(C[e]))};
    el(g, 'rect', {...bar, style: `fill:var(${e === busiest ? '--peak' : '--bar'})`});
  }
  const dashes = 'stroke:var(--ink);stroke-dasharray:5 4;stroke-width:1.2';
  el(s, 'line', {x1: left, x2: s.W - right, y1: y(mean), y2: y(mean), style: dashes});
  el(s, 'text', {x: s.W - right + 8, y: y(mean) + 4, class: 'strong'}, `mean ${num(mean)}`);
  const per = F.slice(0, -1).map((f, r) => sum(C.slice(f, F[r + 1]))), heavy = per.indexOf(Math.max(...per));
  $('experts-note').textContent = `Routes to each expert over ${plural(D.steps, 'step')}. Busiest: expert ${busiest} with ` +
    `${of_mean(C[busiest])} the mean; ${C.filter(c => c === 0).length} of ${E} experts got nothing. ` +
    `Busiest rank: ${heavy} with ${times(per[heavy] * per.length / Math.max(1, sum(per)))} the mean.`;
}

// ------------------------------------------------------------------------------------------------------ timeline
const KINDS = [['call', 'whole call'], ['move', 'moving rows'], ['compute', 'experts and gate'], ['plan', 'bookkeeping'],
  ['wait', 'waiting'], ['user', 'other']];
function legend(parent, categories) {
  for (const [k, text] of KINDS) if (categories.has(k)) {
    const item = el(parent, 'span');
    el(item, 'i', {style: `background:var(--${k})`});
    item.appendChild(document.createTextNode(text));
  }
}
const S = D.timeline.slices.map(a => ({rank: a[0], track: a[1], name: a[2], cat: a[3], begin: a[4], dur: a[5], arg: a[6]}));
legend($('timeline-legend'), new Set(S.map(s => s.cat)));
legend($('phases-legend'), new Set(D.phases.map(p => p.category)));
const lastStep = D.timeline.steps[D.timeline.steps.length - 1];
const all = S.length ? [Math.min(...S.map(s => s.begin)), Math.max(...S.map(s => s.begin + s.dur))] : [0, 1];
let view = lastStep ? [lastStep[1], lastStep[2]] : all.slice();
// A rank's first lane holds its own thread and worker 0, which is the same thread; further workers have separate lanes.
const lanes = Math.max(1, D.timeline.workers), laneH = 15, callH = 13, rankH = callH + lanes * laneH + 7;
const axisH = 24, labelW = 58;
function drawTimeline() {
  const box = clear($('timeline')), height = axisH + rankH * D.world, s = svg(box, height);
  const [t0, t1] = view, w = s.W - labelW - 2, x = t => labelW + w * (t - t0) / (t1 - t0);
  const clip = el(el(s, 'defs'), 'clipPath', {id: 'plot'});
  el(clip, 'rect', {x: labelW, y: 0, width: w, height});
  const tick = nice((t1 - t0) / Math.max(3, w / 110)), digits = tick < 10 ? 3 : tick < 100 ? 2 : tick < 1000 ? 1 : 0;
  const zero = D.timeline.steps.length ? (D.timeline.steps.filter(m => m[1] <= t0 + 1e-6).pop() || D.timeline.steps[0])[1] : 0;
  for (let t = Math.ceil((t0 - zero) / tick) * tick + zero; t <= t1; t += tick) {
    el(s, 'line', {x1: x(t), x2: x(t), y1: axisH - 4, y2: height, class: 'axis'});
    if (x(t) < s.W - 50) el(s, 'text', {x: x(t) + 3, y: 13}, ((t - zero) / 1000).toFixed(digits) + ' ms');
  }
  for (let r = 0; r < D.world; ++r) {
    const y = axisH + r * rankH;
    el(s, 'line', {x1: 0, x2: s.W, y1: y - 3.5, y2: y - 3.5, class: 'axis'});
    el(s, 'text', {x: 2, y: y + callH + laneH - 3, class: 'strong'}, 'rank ' + r);
  }
  const plot = el(s, 'g', {'clip-path': 'url(#plot)'});
  for (const q of S) {
    const a = Math.max(x(q.begin), labelW - 5), b = Math.min(x(q.begin + q.dur), s.W + 5);
    if (b < labelW || a > s.W || b - a < 0.15) continue;
    const unit = D.timeline.units[q.name] || '';
    const arg = unit === 'rank' ? (q.arg < 0 ? 'for several ranks' : `for rank ${q.arg}`) : unit ? `${num(q.arg)} ${unit}` : '';
    const where = q.track < 0 ? 'own thread' : `worker ${q.track}`;
    const call = q.cat === 'call', y = axisH + q.rank * rankH + (call ? 0 : callH + Math.max(0, q.track) * laneH);
    const g = el(plot, 'g', {'data-tip': `${q.name}\nrank ${q.rank}, ${where}\n${time(q.dur)}${arg ? ', ' + arg : ''}`});
    if (call) {
      const foot = y + callH - 1, bracket = `M${a + 0.5} ${foot}V${foot - 4}H${Math.max(a + 0.5, b - 0.5)}V${foot}`;
      el(g, 'path', {d: bracket, style: 'fill:none;stroke:var(--call)'});
      if (b - a > 60) el(g, 'text', {x: Math.max(a, labelW) + 4, y: y + 8, style: 'font-size:11px'}, q.name);
      el(g, 'rect', {x: a, y, width: Math.max(0.5, b - a), height: callH, fill: 'transparent'});
    } else {
      const bar = {x: a, y, width: Math.max(0.5, b - a), height: laneH - 2, rx: b - a > 6 ? 2.5 : 0};
      el(g, 'rect', {...bar, style: `fill:var(--${q.cat})`});
      if (b - a < 8 * q.name.length) continue;
      const ink = q.cat === 'wait' ? 'var(--ink)' : '#fff';
      el(g, 'text', {x: Math.max(a, labelW) + 4, y: y + 10.5, style: `font-size:11px;fill:${ink}`}, q.name);
    }
  }
  interact(s, w);
}
function setView(a, b) {
  const least = 1, span = Math.max(least, Math.min(b - a, all[1] - all[0]));
  a = Math.max(all[0], Math.min(a, all[1] - span));
  view = [a, a + span];
  drawTimeline();
}
let drag = null;
function interact(s, w) {
  s.addEventListener('wheel', e => {
    if (!e.ctrlKey && !e.shiftKey) return;
    e.preventDefault();
    const at = view[0] + (view[1] - view[0]) * (e.offsetX - labelW) / w, f = Math.pow(1.0015, e.deltaY || e.deltaX);
    press(-1);
    setView(at - (at - view[0]) * f, at + (view[1] - at) * f);
  }, {passive: false});
  s.addEventListener('mousedown', e => { drag = {x: e.clientX, view: view.slice(), w}; s.classList.add('dragging'); });
}
addEventListener('mousemove', e => {
  if (!drag || Math.abs(e.clientX - drag.x) < 3) return;
  const d = (drag.x - e.clientX) * (drag.view[1] - drag.view[0]) / drag.w;
  setView(drag.view[0] + d, drag.view[1] + d);
});
addEventListener('mouseup', () => {
  drag = null;
  document.querySelectorAll('.dragging').forEach(n => n.classList.remove('dragging'));
});
const zoom = f => { const m = (view[0] + view[1]) / 2, h = (view[1] - view[0]) / 2 * f; press(-1); setView(m - h, m + h); };
const ranges = D.timeline.steps.slice(0, 12);
const press = switcher($('timeline-switch'), ranges.map(m => 'step ' + (m[0] + 1)).concat('all'), ranges.length - 1,
  i => i < ranges.length ? setView(ranges[i][1], ranges[i][2]) : setView(all[0], all[1]));
el($('timeline-switch'), 'button', {type: 'button', 'aria-label': 'zoom in'}, '+').onclick = () => zoom(0.5);
el($('timeline-switch'), 'button', {type: 'button', 'aria-label': 'zoom out'}, '\u2212').onclick = () => zoom(2);
$('timeline-note').textContent = 'Drag to move, Ctrl or Shift with the wheel to zoom, point at a bar for details. Between ' +
  'steps the demo checks its results, which is not shown. trace.json next to this file contains the same for Perfetto.' +
  (D.timeline.lost ? ` ${num(D.timeline.lost)} events did not fit.` : '');

// -------------------------------------------------------------------------------------------------------- phases
function drawPhases() {
  const table = el(clear($('phases')), 'table'), head = el(el(table, 'thead'), 'tr');
  el(head, 'th', {}, 'phase');
  el(head, 'th', {class: 'meaning'}, 'what a worker does');
  for (let r = 0; r < D.world; ++r) el(head, 'th', {}, 'rank ' + r);
  const body = el(table, 'tbody'), max = Math.max(...D.phases.filter(p => p.category !== 'call').flatMap(p => p.ms), 1e-9);
  const heat = getComputedStyle(document.documentElement).getPropertyValue('--heat1');
  for (const p of D.phases) {
    const row = el(body, 'tr'), name = el(row, 'td', {'data-tip': `${p.count} spans on all ranks and steps`});
    el(name, 'span', {class: 'swatch', style: `background:var(--${p.category})`});
    name.appendChild(document.createTextNode(p.name));
    el(row, 'td', {class: 'meaning'}, p.meaning);
    for (const v of p.ms) {
      const strength = p.category === 'call' ? 0 : Math.min(0.55, 0.55 * v / max);
      const shade = strength > 0.02 ? `background:rgba(${heat},${strength.toFixed(3)})` : '';
      el(row, 'td', {style: shade}, v ? v.toFixed(3) : '\u2013');
    }
  }
}

// ---------------------------------------------------------------------------------------------- the fused layer
if (D.fused.length) {
  $('fused-card').hidden = false;
  const us = v => `${v.toFixed(1)} us`, share = v => `${(100 * v).toFixed(1)} %`;
  const columns = [['rank', 'rank', String], ['layer', 'call_us', us], ['before up', 'before_up_us', us], ['up', 'up_share', share],
    ['down', 'down_share', share], ['sums', 'sum_share', share], ['waits', 'wait_share', share], ['after down', 'after_down_us', us],
    ['communication', 'communication_us', us], ['hidden', 'hidden_share', share]];
  const table = el($('fused'), 'table'), head = el(el(table, 'thead'), 'tr'), body = el(table, 'tbody');
  for (const [title] of columns) el(head, 'th', {}, title);
  for (const rank of D.fused) {
    const row = el(body, 'tr');
    for (const [, key, text] of columns) el(row, 'td', {}, text(rank[key]));
  }
}

function drawAll() { drawTraffic(); drawTimes(); drawExperts(); drawTimeline(); drawPhases(); }
$('theme').onclick = () => { document.documentElement.setAttribute('data-theme', dark() ? 'light' : 'dark'); drawAll(); };
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', drawAll);
let timer = 0;
addEventListener('resize', () => { clearTimeout(timer); timer = setTimeout(drawAll, 120); });
drawAll();
