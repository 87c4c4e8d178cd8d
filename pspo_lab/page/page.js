"use strict";
// The page of pspo view. All text from runs goes in by textContent, so nothing that a model wrote can run.

const COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8a6d3b", "#7f7f7f"];
const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];
const CHARTS = [
  ["reward", "mean of a rollout", ["reward"]],
  ["validation", "reward and greedy accuracy",
    ["validation_reward", "validation_accuracy", "validation_greedy_reward"]],
  ["KL(old || new)", "nats per token", ["kl_old_new"]],
  ["entropy", "nats per token", ["entropy"]],
  ["effective sample size", "of tokens, of completions", ["ess", "ess_sequence"]],
  ["ratio, 1st and 99th percentile", "new / old probability", ["ratio_p1", "ratio_p99"]],
  ["completion length", "tokens", ["completion_tokens", "completion_tokens_max"]],
  ["shares", "of completions", ["truncated_share", "zero_advantage_share", "format_share"]],
  ["tokens without gradient", "share, by the sign of A",
    ["zero_weight_share", "zero_weight_share_positive", "zero_weight_share_negative"]],
  ["gradient norm", "before clipping", ["grad_norm"]],
  ["loss", "of the last step", ["loss"]],
  ["KL to the reference", "nats per token", ["kl_reference"]],
  ["KL(sampler || old)", "nats per token", ["kl_sampler_old"]],
  ["time", "seconds per rollout", ["seconds/generate", "seconds/reward", "seconds/train", "seconds/validate"]],
];
const TABS = { curves: "Curves", runs: "Runs", groups: "Groups",
  tokens: "Tokens", tests: "Tests", findings: "Findings" };
const state = { tab: "curves", axis: "step", run: 0, step: 0, shown: null, filter: "", search: "", mixed: false,
  truncated: false, changed: false, completion: null, visit: Infinity, color: null, surrogate: "", minus: "none",
  page: 0, sort: "method", down: false };
const TESTS_ON_A_PAGE = 20;
const main = document.getElementById("main"), tip = document.getElementById("tip");
let data, charts = [];

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, part] of Object.entries(value)) element.style.setProperty(key, part);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

const decoded = new Map();
function numbers(text) { // base64 float32, NaN as null
  if (!decoded.has(text)) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    decoded.set(text, Array.from(new Float32Array(bytes.buffer), (x) => (Number.isNaN(x) ? null : x)));
  }
  return decoded.get(text);
}

const short = (x) => (x == null ? "–" : x === 0 || (Math.abs(x) >= 1e-3 && Math.abs(x) < 1e6)
  ? String(Number(x.toPrecision(4))) : x.toExponential(2));
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const label = (text, control) => h("label", {}, text, control);
const choice = (options, value, set, id) => h("select", {
  id, onchange: (event) => { set(event.target.value); render(); } },
  options.map(([key, text]) => h("option", { value: key, selected: String(key) === String(value) }, text)));
const toggle = (text, name) => label("", h("span", {}, h("input", { type: "checkbox", id: name, checked: state[name],
  onchange: (event) => { state[name] = event.target.checked; render(); } }), ` ${text}`));

// Curves

function plot(options, table, host) {
  const grid = { stroke: css("--line"), width: 1 }, axis = { stroke: css("--soft"), grid, ticks: grid };
  const chart = new uPlot({ width: host.clientWidth || 400, height: 210, legend: { show: false }, ...options,
    pxAlign: 0, axes: [{ ...axis, size: 30, ...options.xAxis }, { ...axis, size: 68, values: shortTicks }],
    scales: { x: { time: false }, y: { range: yRange } } }, table, host);
  charts.push(chart);
  new ResizeObserver(() => host.clientWidth && chart.setSize({ width: host.clientWidth, height: 210 })).observe(host);
  return chart;
}

const shortTicks = (_, ticks) => ticks.map(short);

function yRange(_, low, high) { // without a spread uPlot draws 0 to 100; at a spread of float32's rounding it hangs
  if (low == null) return [0, 1];
  const flat = high - low <= 1e-6 * Math.max(Math.abs(low), Math.abs(high));
  return flat ? [low - 0.5, high + 0.5] : uPlot.rangeNum(low, high, 0.1, true);
}

function xOf(curve) {
  return state.axis === "step" ? numbers(curve.step) : numbers(curve.mean[state.axis] ?? curve.step);
}

function drawCurves() {
  const settings = data.curves;
  state.shown ??= new Set(settings.slice(0, COLORS.length).map((curve) => curve.setting));
  const listed = settings.filter((curve) => curve.label.toLowerCase().includes(state.filter.toLowerCase()));
  main.append(h("div", { class: "controls" },
    label("x axis", choice([["step", "optimizer steps"], ["tokens", "tokens"], ["time", "seconds"]], state.axis,
      (value) => { state.axis = value; }, "axis")),
    settings.length > 1 ? label("find", h("input", { type: "search", value: state.filter, placeholder: "setting",
      onchange: (event) => { state.filter = event.target.value; render(); } })) : null,
    settings.length > 1 ? h("button", { onclick: () => {
      state.shown = new Set(listed.slice(0, 16).map((curve) => curve.setting)); render(); } },
    `show ${Math.min(listed.length, 16)} of ${listed.length}`) : null));
  const shown = settings.filter((curve) => state.shown.has(curve.setting)), host = h("div", { class: "charts" });
  const colors = shown.map((curve) => {
    const own = shown.filter((other) => other.color === curve.color);
    return shaded(curve.color, own.length > 1 ? 0.6 * own.indexOf(curve) / (own.length - 1) - 0.3 : 0);
  });
  if (settings.length > 1) { // the legend of all charts
    main.append(h("div", { class: "settings" }, listed.slice(0, 300).map((curve) => h("label", {},
      h("input", { type: "checkbox", checked: state.shown.has(curve.setting), onchange: (event) => {
        state.shown[event.target.checked ? "add" : "delete"](curve.setting); render(); } }), " ",
      state.shown.has(curve.setting) ? h("span", {
        class: "key", style: { "--color": colors[shown.indexOf(curve)] } }) : null,
      `${curve.label}${curve.seeds > 1 ? ` (${curve.seeds} seeds)` : ""}`))));
  }
  main.append(host);
  const charted = new Set(["time", "tokens", ...CHARTS.flatMap(([, , metrics]) => metrics)]);
  const others = new Set(shown.flatMap((curve) => Object.keys(curve.mean)).filter((name) => !charted.has(name)));
  const rest = [...others].sort().map((name) => [name.replaceAll("_", " "), "", [name]]);
  for (const [title, unit, metrics] of [...CHARTS, ...rest]) {
    const lines = shown.flatMap((curve, i) => metrics.filter((name) => curve.mean[name]).map((name) => ({
      curve, name, text: curve.label,
      color: shown.length > 1 || name === metrics[0] ? colors[i] : COLORS[metrics.indexOf(name) % COLORS.length],
      dash: DASHES[metrics.indexOf(name) % DASHES.length] })));
    if (lines.length) drawChart(host, title, unit, lines, metrics.length > 1, shown.length > 1);
  }
  const validated = data.runs.filter((run) => run.best_step !== null);
  if (validated.length) {
    main.append(h("h2", {}, "Best models"), h("ul", {}, validated.slice(0, 60).map((run) =>
      h("li", {}, `step ${run.best_step}${data.runs.length > 1 ? ` · ${run.name}` : ""}`))));
  }
}

function shaded(color, shade) { // of a method's colour, towards black below 0 and white above it
  const parts =
    [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16) * (1 - Math.abs(shade)) + 255 * Math.max(shade, 0));
  return `#${parts.map((part) => Math.round(part).toString(16).padStart(2, "0")).join("")}`;
}

function drawChart(host, title, unit, lines, byMetric, bySetting) {
  const keys = lines.map((line) => h("span", { class: "key", title: line.text,
    style: { "--color": line.color, "--dash": line.dash.length ? "dashed" : "solid" } }));
  const plain = (name) => name.replace(/^(validation_|seconds\/)/, "").replace(/_/g, " ");
  const names = lines.map(({ name }) => (bySetting ? "" : `${plain(name)} `)); // the page's legend names settings
  const body = h("div"), where = h("span", { class: "note" });
  const dashes = new Map(lines.map(({ name, dash }) => [plain(name), dash])); // of several settings: metrics, once each
  const shownKeys = byMetric && bySetting ? [...dashes].map(([name, dash]) => h("span", { class: "key",
    style: { "--color": css("--soft"), "--dash": dash.length ? "dashed" : "solid" } }, name)) : keys;
  host.append(h("section", { class: "chart" }, h("h3", {}, title, " ", h("span", { class: "note" }, unit)),
    h("div", { class: "keys" }, where, shownKeys), body));
  const table = uPlot.join(lines.map(({ curve, name }) => [xOf(curve), numbers(curve.mean[name]),
    curve.low[name] ? numbers(curve.low[name]) : xOf(curve).map(() => null),
    curve.high[name] ? numbers(curve.high[name]) : xOf(curve).map(() => null)]).map(sorted));
  const series = [{}], bands = [];
  lines.forEach(({ color, dash }) => {
    const at = series.length, few = table[at].filter((y) => y != null).length < 12;
    const hidden = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
    series.push({ stroke: color, width: 1.6, dash, spanGaps: true, points: { show: few, size: 5 } },
      hidden, { ...hidden });
    bands.push({ series: [at + 2, at + 1], fill: `${color}2b` });
  });
  const show = (index) => {
    where.textContent = index == null ? "" : `at ${Number(table[0][index].toPrecision(6))}`;
    keys.forEach((key, i) => {
      const values = table[1 + 3 * i];
      let at = index ?? values.length - 1;
      while (at > 0 && values[at] == null) at -= 1; // the last value known there
      key.textContent = `${names[i]}${short(values[at])}`;
    });
  };
  plot({ series, bands, cursor: { sync: { key: "curves" }, y: false },
    hooks: { setCursor: [(chart) => show(chart.cursor.idx)], draw: [drawBest] } }, table, body);
  show(null);
}

function sorted(table) { // uPlot.join wants x in order and once each
  const order = table[0].map((_, i) => i).filter((i) => table[0][i] != null).sort((a, b) => table[0][a] - table[0][b]);
  const once = order.filter((i, n) => n === 0 || table[0][i] !== table[0][order[n - 1]]);
  return table.map((column) => once.map((i) => column[i]));
}

function drawBest(chart) {
  const curves = data.curves.filter((curve) => state.shown.has(curve.setting));
  const { ctx } = chart, { top, height } = chart.bbox;
  ctx.save();
  ctx.setLineDash([3, 4]);
  for (const run of data.runs) {
    const curve = curves.find((one) => one.label === run.label);
    if (!curve || run.best_step === null) continue;
    const steps = numbers(curve.step), x = xOf(curve);
    const at = steps.findIndex((step) => step >= run.best_step);
    const left = Math.round(chart.valToPos(run.best_step === 0 ? 0 : x[at < 0 ? x.length - 1 : at], "x", true));
    ctx.strokeStyle = curves.length > 1 ? curve.color : css("--good");
    ctx.beginPath();
    ctx.moveTo(left, top);
    ctx.lineTo(left, top + height);
    ctx.stroke();
  }
  ctx.restore();
}

// Groups

const isMixed = (group) => new Set(group.completions.map((one) => one.reward)).size > 1;
const mean = (values) => values.reduce((sum, x) => sum + x, 0) / values.length;

function changedReward(group) { // against the same problem's group before
  const same = data.groups.filter((one) =>
    one.run === group.run && one.problem === group.problem && one.step < group.step);
  const rewards = (one) => mean(one.completions.map((each) => each.reward ?? 0));
  return same.length > 0 && rewards(same[same.length - 1]) !== rewards(group);
}

function runChoice() {
  const options = data.runs.map((run, i) => [i, run.name]);
  return options.length > 1
    ? label("run", choice(options, state.run, (value) => {
      Object.assign(state, { run: +value, completion: null, visit: Infinity });
    }, "run"))
    : null;
}

function drawGroups() {
  const own = data.groups.filter((group) => group.run === state.run);
  if (!own.length) return empty("No groups are recorded: --run.record_tokens 2 records two of every rollout.");
  const steps = [...new Set(own.map((group) => group.step))];
  const at = Math.max(0, steps.findLastIndex((step) => step <= state.step)), words = state.search.toLowerCase();
  const slider = h("input", { type: "range", min: 0, max: steps.length - 1, value: at, id: "step",
    onchange: (event) => { state.step = steps[event.target.value]; render(); },
    oninput: (event) => { event.target.nextSibling.textContent = `step ${steps[event.target.value]}`; } });
  main.append(h("div", { class: "controls" }, runChoice(),
    label("", h("span", {}, slider, h("span", {}, `step ${steps[at]}`))),
    toggle("mixed rewards", "mixed"), toggle("truncated", "truncated"), toggle("reward changed", "changed"),
    label("search all steps", h("input", { type: "search", id: "search", value: state.search,
      onchange: (event) => { state.search = event.target.value; render(); } }))));
  if (data.left_out) main.append(h("p", { class: "note" }, `To keep the page small, ${data.left_out} recorded rollouts `
    + "are not on it, evenly over the run; samples.jsonl and tokens.parquet have them."));
  const filtering = words || state.mixed || state.truncated || state.changed;
  const found = own.filter((group) => (filtering || group.step === steps[at])
    && (!state.mixed || isMixed(group)) && (!state.truncated || group.completions.some((one) => one.truncated))
    && (!state.changed || changedReward(group))
    && (!words
      || [group.prompt, ...group.completions.map((one) => one.text)].some((text) =>
        text.toLowerCase().includes(words))));
  main.append(h("p", { class: "note" }, filtering ? `${found.length} of ${own.length} groups` : ""));
  found.slice(0, 40).forEach((group) => main.append(groupCard(group)));
}

const ending = (one) => (one.truncated == null ? null
  : h("span", { class: one.truncated ? "warn" : "" }, one.truncated ? "hit the limit" : "ended"));

function groupCard(group) {
  return h("section", { class: "card" },
    h("div", { class: "facts" }, h("span", {}, `step ${group.step}`), h("span", {}, `problem ${group.problem}`),
      h("span", {}, `gold ${group.gold ?? "–"}`)),
    h("div", { class: "text" }, group.prompt),
    h("div", { class: "completions" }, group.completions.map((one) => h("div", { class: "completion" },
      h("div", { class: "facts" },
        h("span", { class: one.advantage > 0 ? "good" : one.advantage < 0 ? "bad" : "" },
          `advantage ${short(one.advantage)}`),
        h("span", {}, `reward ${short(one.reward)}`),
        Object.keys(one.rewards).length > 1
          ? Object.entries(one.rewards).map(([name, value]) => h("span", {}, `${name} ${short(value)}`)) : null,
        one.tokens == null ? null : h("span", {}, `${one.tokens} tokens`), ending(one)),
      h("div", { class: "text" }, one.text),
      one.recorded ? h("button", { onclick: () => {
        Object.assign(state, { tab: "tokens", completion: recorded().indexOf(one), visit: Infinity });
        render(); } }, "tokens") : null))));
}

// Tokens

const recorded = () => data.groups.filter((group) => group.run === state.run)
  .flatMap((group) => group.completions.filter((one) => one.recorded).map((one) => Object.assign(one, { group })));

function shownWeights(visit) { // undefined where the run did not record what they depend on
  const [weights, others] = [state.surrogate, state.minus].map((name) => visit.weights[name]);
  if (!weights || !others) return weights && numbers(weights);
  return numbers(weights).map((weight, i) => weight - numbers(others)[i]);
}

function tokenValues(one, visit) { // by name the tokens' numbers, those that were recorded
  const { old_logprob: old, sampler_logprob: sampler, reference_logprob: reference } = one.recorded;
  const minus = (a, b, change) => a && b && numbers(a).map((x, i) => change(x - numbers(b)[i]));
  const values = { logprob: visit.logprob && numbers(visit.logprob), old_logprob: old && numbers(old),
    ratio: minus(visit.logprob, old, (x) => Math.exp(Math.min(20, Math.max(-20, x)))),
    entropy: visit.entropy && numbers(visit.entropy), sampler_logprob: sampler && numbers(sampler),
    "old - sampler": minus(old, sampler, (x) => x), reference_logprob: reference && numbers(reference),
    weight: shownWeights(visit) };
  return Object.fromEntries(Object.entries(values).filter(([, list]) => list));
}

function colour(name, x, extreme) { // diverging around 0 (ratios: 1), sequential for the rest; ink stays readable
  if (x == null) return "transparent";
  const signed = ["weight", "old - sampler"].includes(name), ratio = name === "ratio";
  const share = Math.min(1, Math.abs(ratio ? Math.log(x) : x) / (extreme || 1));
  const [r, g, b] = (signed || ratio ? (ratio ? Math.log(x) : x) > 0 : true) ? [230, 126, 60] : [80, 150, 225];
  const mix = (channel) => Math.round(248 + (channel - 248) * share);
  return `rgb(${mix(r)} ${mix(g)} ${mix(b)})`;
}

function furthest(all) { // the completion with the token whose probability moved most
  const moves = all.map((one) => {
    const { ratio } = tokenValues(one, one.recorded.visits[one.recorded.visits.length - 1]);
    return Math.max(0, ...(ratio ?? []).map((x) => Math.abs(Math.log(x))));
  });
  return moves.indexOf(Math.max(...moves));
}

function drawTokens() {
  const all = recorded();
  if (!all.length) {
    return empty("No tokens are recorded in this run: --run.record_tokens 2 records two groups of every rollout, where "
      + "their rewards differ.");
  }
  state.completion = Math.min(state.completion ?? furthest(all), all.length - 1);
  const one = all[state.completion], visits = one.recorded.visits;
  state.visit = Math.min(state.visit, visits.length - 1);
  const visit = visits[state.visit], names = Object.keys(visit.weights);
  if (!names.includes(state.surrogate)) state.surrogate = names[names.length - 1] ?? "";
  const values = tokenValues(one, visit), [low, high] = [Math.min, Math.max].map((end) => end(...values.weight ?? [0]));
  const varies = high - low > 0.5 * Math.max(high, -low); // otherwise, as of PSPO, the text would have one shade
  const color = [state.color, varies ? "weight" : "ratio", ...Object.keys(values)].find((name) => values[name]);
  const shown = values[color] ?? one.recorded.text.map(() => null);
  const named = names.map((name) => [name, name || "the run's own"]);
  const options = all.map((each, i) => [i, `step ${each.group.step}, problem ${each.group.problem}, `
    + `completion ${each.group.completions.indexOf(each)} (advantage ${short(each.advantage)})`]);
  main.append(h("div", { class: "controls" }, runChoice(),
    label("completion", choice(options, state.completion, (value) => {
      Object.assign(state, { completion: +value, visit: Infinity });
    }, "completion")),
    label("at", choice(visits.map((each, i) => [i, `optimizer step ${each.step} (visit ${i + 1})`]), state.visit,
      (value) => { state.visit = +value; }, "visit")),
    label("colour", choice(Object.keys(values).map((name) => [name, name]), color,
      (value) => { state.color = value; }, "color")),
    named.length ? label("weights of", choice(named, state.surrogate,
      (value) => { state.surrogate = value; }, "surrogate")) : null,
    named.length ? label("minus", choice([["none", "nothing"], ...named], state.minus,
      (value) => { state.minus = value; }, "minus")) : null));
  const extreme = Math.max(1e-9, ...shown.map((x) => Math.abs(color === "ratio" ? Math.log(x) : x ?? 0)));
  const places = one.recorded.position, follows = (i) => i === 0 || places[i] === places[i - 1] + 1;
  const spans = one.recorded.text.flatMap((text, i) => [
    follows(i) ? null : h("span", { class: "note" }, " … observation … "),
    h("span", { class: "token", tabindex: 0, "data-position": places[i],
      style: { background: colour(color, shown[i], extreme) },
      onpointerenter: (event) => showTip(event, i, one, values), onpointerleave: hideTip,
      onfocus: (event) => showTip(event, i, one, values), onblur: hideTip }, text || "·")]);
  const side = h("div"), scale = h("div", { class: "scale" });
  const smallest = Math.exp(-extreme); // ratio
  const ends = color === "ratio" ? [smallest, 1 / smallest] : ["weight", "old - sampler"].includes(color)
    ? [-extreme, extreme] : [0, Math.max(...shown) > 0 ? extreme : -extreme];
  scale.append(`${color} ${short(ends[0])}`, h("span", { style: {
    background: `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map((t) => {
      const x = ends[0] + t * (ends[1] - ends[0]);
      return colour(color, color === "ratio" ? Math.exp((2 * t - 1) * extreme) : x, extreme);
  }).join(", ")})` } }), short(ends[1]));
  main.append(h("div", { class: "split" }, h("div", {},
    h("div", { class: "facts" }, h("span", {}, `advantage ${short(one.advantage)}`),
      h("span", {}, `reward ${short(one.reward)}`),
      h("span", {}, `gold ${one.group.gold ?? "–"}`), ending(one)),
    h("div", { class: "text" }, one.group.prompt), h("div", { class: "text tokens card" }, spans), scale), side));
  if (values.ratio && values.weight) drawPoints(side, one, visit.step);
  if (color) drawHistogram(side, color, shown);
}

function showTip(event, i, one, values) {
  tip.replaceChildren(h("table", {}, h("tr", {}, h("td", {}, JSON.stringify(one.recorded.text[i])),
    h("td", {}, `id ${one.recorded.id[i] ?? "–"}`)), Object.entries(values).map(([name, list]) =>
    h("tr", { "data-name": name, "data-value": list[i] }, h("td", {}, name), h("td", {}, short(list[i]))))));
  tip.hidden = false;
  const box = event.target.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${box.bottom + tip.offsetHeight + 10 < innerHeight
    ? box.bottom + 6 : box.top - tip.offsetHeight - 6}px`;
}

function hideTip() { tip.hidden = true; }

function drawPoints(host, one, step) { // Figure 1: weight by ratio, of the group's tokens at this step
  const own = state.surrogate ? data.surrogates[state.surrogate] : data.runs[state.run].curve;
  const curve = state.minus === "none" ? own : null;
  const points = one.group.completions.filter((each) => each.recorded && each.advantage).flatMap((each) => {
    const visit = each.recorded.visits.find((some) => some.step === step);
    if (!visit) return [];
    const { ratio, weight: weights } = tokenValues(each, visit);
    return weights.map((weight, i) => [
      ratio[i], weight / Math.abs(each.advantage), each.advantage > 0, each === one]);
  });
  const tables = [], series = [{}], ratios = points.map(([ratio]) => ratio);
  const low = Math.min(0.75, ...ratios) * 0.95, high = Math.max(1.3, ...ratios) * 1.05;
  const add = (x, y, options) => { tables.push(sorted([x, y])); series.push(options); };
  if (curve) {
    const ratio = numbers(curve.ratio), inside = ratio.map((x) => low <= x && x <= high);
    for (const [name, color] of [["above", COLORS[1]], ["below", COLORS[0]]]) {
      add(ratio.filter((_, i) => inside[i]), numbers(curve[name]).filter((_, i) => inside[i]),
        { stroke: color, width: 1.5, spanGaps: true, points: { show: false } });
    }
  }
  for (const [above, color] of [[true, COLORS[1]], [false, COLORS[0]]]) {
    for (const chosen of [false, true]) {
      const some = points.filter((point) => point[2] === above && point[3] === chosen);
      if (some.length) {
        add(some.map(([x], i) => x + i * 1e-9), some.map(([, y]) => y), { stroke: color, paths: () => null,
          points: { show: true, size: chosen ? 8 : 4, fill: chosen ? color : "transparent" } });
      }
    }
  }
  const body = h("div");
  host.append(h("section", { class: "chart" }, h("h3", {}, "Tokens on the surrogate's curve ",
    h("span", { class: "note" },
      "dL/dlogprob over |A| against the ratio; negative makes a token likelier; filled: this completion")),
  h("div", { class: "keys" }, h("span", { class: "key", style: { "--color": COLORS[1] } }, "A > 0"),
    h("span", { class: "key", style: { "--color": COLORS[0] } }, "A < 0"),
    curve === null ? h("span", { class: "note" },
      "no curve: a token's weight depends on its whole completion, or it is a difference") : null), body));
  if (tables.length) plot({ series, xAxis: { values: shortTicks } }, uPlot.join(tables), body);
}

function drawHistogram(host, name, shown) {
  const values = shown.filter((x) => x != null), smallest = Math.min(...values), range = Math.max(...values) - smallest;
  const low = range ? smallest : smallest - 0.1, width = (range || 0.2) / 20;
  const counts = Array(20).fill(0), body = h("div");
  for (const x of values) counts[Math.min(19, Math.floor((x - low) / width))] += 1;
  host.append(h("section", { class: "chart" },
    h("h3", {}, name, " ", h("span", { class: "note" }, "tokens of this completion")), body));
  plot({ series: [{}, { stroke: COLORS[0], fill: `${COLORS[0]}66`,
    paths: uPlot.paths.bars({ size: [0.9] }), points: { show: false } }],
    xAxis: { values: shortTicks } }, [counts.map((_, i) => low + (i + 0.5) * width), counts], body);
}

// Tests and findings

function drawTests() {
  const { worse, better, shown: changes } = data.tests[state.run] ?? { shown: [] };
  main.append(h("div", { class: "controls" }, runChoice()));
  if (!changes.length) return empty("No test problem's reward changed, or the run has no test before and after.");
  main.append(h("p", { class: "note" }, `${worse} became worse, ${better} better; the worst first`
    + (changes.length < worse + better ? `, ${changes.length} of them` : "")));
  const pages = Math.ceil(changes.length / TESTS_ON_A_PAGE), first = Math.min(state.page, pages - 1) * TESTS_ON_A_PAGE;
  const turn = (by, text, possible) => h("button", { disabled: !possible, onclick: () => {
    state.page = first / TESTS_ON_A_PAGE + by; scrollTo(0, 0); render(); } }, text);
  if (pages > 1) {
    main.append(h("div", { class: "controls" }, turn(-1, "previous", first > 0),
      `${first + 1} to ${Math.min(first + TESTS_ON_A_PAGE, changes.length)}`,
      turn(1, "next", first + TESTS_ON_A_PAGE < changes.length)));
  }
  changes.slice(first, first + TESTS_ON_A_PAGE).forEach((change) => main.append(h("section", { class: "card" },
    h("div", { class: "text" }, change.prompt),
      h("div", { class: "facts" }, h("span", {}, `gold ${change.gold ?? "–"}`)),
    h("div", { class: "completions" }, ["before", "after"].map((when) => h("div", { class: "completion" },
      h("div", { class: `facts ${change[when].value >=
        change[when === "after" ? "before" : "after"].value ? "good" : "bad"}` },
        `${when}: reward ${short(change[when].value)}`), h("div", { class: "text" }, change[when].text)))))));
}

const CHECKED = "Checked, from five rollouts on: skipped steps and missing rewards, groups without signal, format, "
  + "truncation, length, how far steps move, tokens without gradient, "
  + "entropy, falling rewards, rewards without accuracy.";

function drawFindings() {
  for (const setting of new Set(data.runs.map((run) => run.label))) {
    const runs = data.runs.filter((run) => run.label === setting), found = new Map(); // by advice: of several seeds one
    for (const run of runs) {
      for (const finding of run.findings) {
        if (!found.has(finding.advice)) found.set(finding.advice, { ...finding, seeds: [] });
        found.get(finding.advice).seeds.push(run.seed);
      }
    }
    if (data.runs.length > 1) main.append(h("h2", {}, setting));
    if (!found.size) main.append(h("p", {}, `Nothing stands out. ${CHECKED}`));
    for (const { text, advice, severity, seeds } of found.values()) {
      main.append(h("div", { class: `finding ${severity === 3 ? "worst" : ""}` },
        h("div", {}, text, runs.length > 1 ? h("span", { class: "note" }, ` · seed ${seeds[0]}${seeds.length > 1
          ? `, likewise seeds ${seeds.slice(1).join(", ")}` : ""}`) : null),
            h("div", { class: "note" }, `Try: ${advice}`)));
    }
  }
}

function drawRuns() { // a table, sorted by the column that was clicked
  const columns = Object.keys(data.runs[0].row), text = (x) => (typeof x === "number" ? short(x) : String(x ?? "–"));
  const rank = (x) => (x == null ? [2, 0] : typeof x === "number" ? [0, x] : [1, String(x)]);
  const order = (a, b) => { const [x, y] = [rank(a.row[state.sort]), rank(b.row[state.sort])];
    const less = x[0] - y[0] || (x[1] < y[1] ? -1 : x[1] > y[1] ? 1 : 0); return state.down ? -less : less; };
  main.append(h("div", { class: "wide" }, h("table", { class: "numbers" },
    h("tr", {}, columns.map((name) => h("th", {}, h("button", { onclick: () => {
      Object.assign(state, { down: state.sort === name && !state.down, sort: name }); render(); } },
    `${name.replace(/_/g, " ")}${state.sort === name ? (state.down ? " ↓" : " ↑") : ""}`)))),
    [...data.runs].sort(order).map((run) => h("tr", {}, columns.map((name) => h("td", {}, text(run.row[name]))))))));
}

function empty(text) { main.append(h("p", { class: "note" }, text)); }

// The page

const DRAW = { curves: drawCurves, runs: drawRuns, groups: drawGroups,
  tokens: drawTokens, tests: drawTests, findings: drawFindings };

function render() {
  const top = scrollY, run = data.runs[state.run];
  charts.forEach((chart) => chart.destroy());
  charts = [];
  hideTip();
  const found = data.runs.reduce((sum, run) => sum + run.findings.length, 0);
  const hidden = { groups: !data.groups.length,
    tokens: !data.groups.some((group) => group.completions.some((one) => one.recorded)),
    tests: data.tests.every((tests) => !tests.shown.length) };
  const tabs = Object.entries(TABS).filter(([name]) => !hidden[name]);
  document.getElementById("tabs").replaceChildren(...tabs.map(([name, text]) => h("button", { role: "tab",
    id: `tab-${name}`, "aria-selected": String(state.tab === name), onclick: () => { state.tab = name; render(); } },
  name === "findings" && found ? `${text} (${found})` : text)));
  document.getElementById("about").textContent = data.runs.length === 1 ? run.about
    : `${data.curves.reduce((sum, curve) => sum + curve.seeds, 0)} runs of ${data.curves.length} settings`;
  main.replaceChildren();
  DRAW[state.tab]();
  scrollTo(0, top);
}

async function unpack(text) { // base64 of gzipped JSON
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

(async () => {
  data = await unpack(document.getElementById("data").textContent);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
  render();
  document.body.dataset.ready = "true";
})();
