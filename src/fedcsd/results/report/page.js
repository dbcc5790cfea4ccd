// Text gets into the page by textContent and append() alone, never as markup.

const hidden = new Set();
const chosen = {};
const drawn = new Map();
let data = JSON.parse(document.getElementById("data").textContent);

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const byId = (id) => document.getElementById(id);

function grid(head, rows, { kind = "", strong = [], texts = [], marked = [], swatches = false } = {}) {
  const line = (cells, r) =>
    cells.map((cell, c) => {
      if (c === 0) return el("th", { scope: "row" }, swatches ? el("span", { class: "named" }, swatch(data.methods[r]), cell) : cell);
      const classes = [strong[r]?.[c] ? "best" : "", texts.includes(c) ? "text" : "", marked[r]?.[c] ? "differs" : ""];
      return el("td", { class: classes.join(" ").trim() }, cell);
    });
  return el(
    "div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table" },
    el("table", { class: kind },
      el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, ...rows.map((cells, r) => el("tr", {}, ...line(cells, r))))));
}

// A piece of a method's line with its mark, as the charts draw it.
function swatch(method) {
  const make = (tag, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  };
  const colour = colourOf(method);
  const dashes = { solid: "", dash: "6 4", dashdot: "7 3 2 3", dot: "2 3" };
  const svg = make("svg", { width: 30, height: 14, "aria-hidden": "true", class: "swatch" });
  svg.append(make("line", { x1: 0, x2: 30, y1: 7, y2: 7, stroke: colour, "stroke-width": 2.4, "stroke-dasharray": dashes[method.dash] }));
  const shapes = ["M11 7a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "M11 3h8v8h-8z", "M15 2l5 5l-5 5l-5-5z", "M15 2l5 9h-10z", "M15 12l5-9h-10z",
    "M15 1l2 4l4 1l-3 3l1 4l-4-2l-4 2l1-4l-3-3l4-1z", "M13 2h4v3h3v4h-3v3h-4v-3h-3v-4h3z", "M10 7l3-4h4l3 4l-3 4h-4z"];
  svg.append(make("path", { d: shapes[method.mark % shapes.length], fill: colour }));
  return svg;
}

function legend() {
  const nav = byId("legend");
  nav.hidden = data.methods.length < 2;
  const focused = document.activeElement?.dataset?.label;
  const buttons = data.methods.map((method) => {
    const button = el("button", { type: "button", "aria-pressed": String(!hidden.has(method.label)), title: method.label,
      onclick: () => toggle([method.label]) }, swatch(method), el("span", {}, method.label));
    button.dataset.label = method.label;
    return button;
  });
  const labels = data.methods.map((m) => m.label);
  if (labels.length > 3) {
    buttons.unshift(el("button", { type: "button", class: "every", onclick: () => toggle(labels, false) }, "all"),
      el("button", { type: "button", class: "every", onclick: () => toggle(labels, true) }, "none"));
  }
  nav.replaceChildren(...buttons);
  if (focused !== undefined) buttons.find((b) => b.dataset.label === focused)?.focus({ preventScroll: true });
}

function toggle(labels, hide) {
  for (const label of labels) {
    if (hide ?? !hidden.has(label)) hidden.add(label);
    else hidden.delete(label);
  }
  for (const button of byId("legend").querySelectorAll("[aria-pressed]"))
    button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.label)));
  redraw();
}

function radios(id, name, options, at, change) {
  return el("fieldset", { "aria-label": name }, ...options.map((option, i) =>
    el("label", {}, el("input", { type: "radio", name: id, checked: i === at, onchange: () => change(i) }), el("span", {}, option))));
}

// One chart: where it is drawn when it comes into sight, and again when something changes.
function section(id, title, caption, { wide = false, controls = [], plot, numbers, label }) {
  let node = byId(id);
  if (!node) {
    node = el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }), el("p", { class: "caption" }),
      el("div", { class: "controls" }), el("div", { class: "plot", tabindex: "0", role: "img" }),
      el("details", {}, el("summary", {}, "Numbers"), el("div")));
    node.querySelector(".plot").addEventListener("keydown", keys);
  }
  node.classList.toggle("wide", wide);
  node.querySelector("h2").textContent = title;
  node.querySelector(".caption").textContent = caption;
  const held = node.querySelector(".controls");
  if (!held.contains(document.activeElement)) held.replaceChildren(...controls);
  held.hidden = !controls.length;
  const box = node.querySelector(".plot");
  box.setAttribute("aria-label", `${title}. ${label()} Plus and minus zoom, arrows move, 0 shows all.`);
  const chart = drawn.get(id) || { node, seen: false, busy: false, again: false };
  chart.draw = () => {
    const { traces, layout } = plot();
    const shown = [box, traces, { ...layout, width: printing ? 660 : box.clientWidth }, { ...CONFIG, displayModeBar: TOUCH.matches ? true : "hover" }];
    box.style.minHeight = `${layout.height}px`;
    if (printing) {
      Plotly.purge(box); // a new plot is drawn at once, before the page is laid out for paper
      Plotly.newPlot(...shown);
    } else if (chart.busy) chart.again = true; // one drawing at a time, or they would mix
    else {
      chart.busy = true;
      Plotly.react(...shown).finally(() => {
        chart.busy = false;
        const again = chart.again;
        chart.again = false;
        if (again) chart.draw();
      });
    }
  };
  drawn.set(id, chart);
  if (!chart.seen) {
    box.style.minHeight = "280px";
    sight.observe(node);
  }
  node.querySelector("details > div").replaceChildren(numbers());
  return node;
}

const sight = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const chart = drawn.get(entry.target.id);
    if (!entry.isIntersecting || !chart || chart.seen) continue;
    sight.unobserve(entry.target);
    chart.seen = true;
    if (window.Plotly) chart.draw();
  }
}, { rootMargin: "200px" });

function keys(event) {
  const box = event.currentTarget;
  const steps = { "+": [0.25, -0.25], "=": [0.25, -0.25], "-": [-0.5, 0.5], ArrowLeft: [-0.2, -0.2], ArrowRight: [0.2, 0.2] };
  if (event.ctrlKey || event.metaKey || event.altKey || !box._fullLayout) return;
  if (event.key === "0") Plotly.relayout(box, { "xaxis.autorange": true, "yaxis.autorange": true });
  else if (steps[event.key]) {
    const [low, high] = box._fullLayout.xaxis.range;
    const [a, b] = steps[event.key];
    Plotly.relayout(box, { "xaxis.range": [low + a * (high - low), high + b * (high - low)] });
  } else return;
  event.preventDefault();
}

function redraw() {
  if (window.Plotly) for (const chart of drawn.values()) if (chart.seen) chart.draw();
}

function lineSection(chart) {
  const state = (chosen[chart.id] ??= { measure: chart.measures[0].key, against: chart.against[0].key });
  const pick = (list, key) => list.find((item) => item.key === key) || list[0];
  const measure = () => pick(chart.measures, state.measure);
  const change = (name, list) => (i) => {
    state[name] = list[i].key;
    drawn.get(chart.id).draw();
  };
  const controls = [];
  if (chart.measures.length > 1)
    controls.push(radios(`${chart.id}-y`, "measurement", chart.measures.map((m) => m.short),
      chart.measures.indexOf(measure()), change("measure", chart.measures)));
  if (chart.against.length > 1) {
    const across = radios(`${chart.id}-x`, "against", chart.against.map((x) => ({ round: "rounds", seconds: "time", bytes: "bytes" })[x.key]),
      chart.against.findIndex((x) => x.key === state.against), change("against", chart.against));
    across.prepend(el("span", { class: "against" }, "against"));
    controls.push(across);
  }
  const last = (method, m) => {
    const y = data.series[method.label]?.y[m.key];
    const index = y ? y.mean.findLastIndex((v) => v !== null) : -1;
    return index < 0 ? "–" : number(y.mean[index]) + range(y, index);
  };
  return section(chart.id, chart.title, chart.caption, {
    wide: chart.id === "accuracy",
    controls,
    plot: () => lineChart(data, chart, measure(), pick(chart.against, state.against), hidden),
    label: () => `${measure().axis} in the last round: ${data.methods.map((m) => `${m.label} ${last(m, measure())}`).join(", ")}.`,
    numbers: () => grid(["last round", ...chart.measures.map((m) => m.axis)],
      data.methods.map((method) => [method.label, ...chart.measures.map((m) => last(method, m))]), { swatches: true }),
  });
}

function dropdown(name, options, at, change) {
  return el("label", { class: "against" }, `${name} `, el("select", { onchange: (event) => change(event.target.selectedIndex) },
    ...options.map((option, i) => el("option", { selected: i === at }, option))));
}

function classSection() {
  const found = data.classes;
  const views = [...(found.length > 1 ? [""] : []), ...found.filter((c) => c.rounds.length > 1).map((c) => c.label)];
  const state = (chosen.classes ??= { at: 0 });
  const names = views.map((v) => (v === "" ? "all methods, last round" : `${v}, over rounds`));
  const final = found.map((c) => c.final);
  return section("classes", "Classes", "Test accuracy of each class: under skew some classes are learned late, or forgotten in a round and learned again.", {
    wide: true,
    controls: views.length > 1 ? [dropdown("show", names, state.at, (i) => { state.at = i; drawn.get("classes").draw(); })] : [],
    plot: () => classChart(data, views[state.at] || "", hidden),
    label: () => found.map((c) => `${c.label}: worst class ${number(Math.min(...c.final.filter((v) => v !== null)), 1)} %`).join(", ") + ".",
    numbers: () => grid(["class", ...found.map((c) => c.label)],
      final[0].map((_, k) => [String(k), ...final.map((f) => number(f[k], 1))])),
  });
}

function clientSection() {
  const models = ["global", "personal"].filter((m) => data.clients.some((c) => c.model === m));
  const state = (chosen.clients ??= { at: models.length - 1 });
  const names = { global: "global model", personal: "own models" };
  const value = (c, share) => number(c.accuracy[Math.round(share * (c.accuracy.length - 1))], 1);
  return section("clients", "Clients", "Accuracy on each client's own data, from the worst served client to the best: the left end is who loses by taking part.", {
    controls: models.length > 1 ? [radios("clients-y", "model", models.map((m) => names[m]), state.at, (i) => { state.at = i; drawn.get("clients").draw(); })] : [],
    plot: () => clientChart(data, models[state.at] || models[0], hidden),
    label: () => data.clients.map((c) => `${c.label}, ${names[c.model]}: from ${value(c, 0)} to ${value(c, 1)} %`).join("; ") + ".",
    numbers: () => grid(["method", "model", "worst client", "lower quarter", "median", "upper quarter", "best client"],
      data.clients.map((c) => [c.label, names[c.model], ...[0, 0.25, 0.5, 0.75, 1].map((s) => value(c, s))])),
  });
}

function partitionSection() {
  const state = (chosen.partition ??= { at: 0 });
  const counts = () => (data.partitions[state.at] || data.partitions[0]).counts;
  const line = (row, k) => [String(k), row.reduce((a, b) => a + b, 0).toLocaleString("en"), String(row.filter((n) => n).length)];
  const sizes = () => counts().map((row) => row.reduce((a, b) => a + b, 0));
  return section("partition", "Partition", "Training samples of each class at each client: the skew that all of this is about.", {
    wide: counts().length > 40,
    controls: data.partitions.length > 1 ? [dropdown("of", data.partitions.map((p) => p.name), state.at,
      (i) => { state.at = i; drawn.get("partition").draw(); })] : [],
    plot: () => partitionChart(data, state.at),
    label: () => `${counts().length} clients of ${Math.min(...sizes())} to ${Math.max(...sizes())} samples.`,
    numbers: () => grid(["client", "samples", "classes"], counts().slice(0, 200).map(line)
      .concat(counts().length > 200 ? [[`… and ${counts().length - 200} more`, "", ""]] : [])),
  });
}

function results() {
  const { head, cells, strong, notes } = data.table;
  return el("section", { id: "results", class: "wide", "aria-labelledby": "results-title" }, el("h2", { id: "results-title" }, "Results"),
    grid(head, cells, { kind: "results", strong, swatches: data.methods.length > 1 }),
    el("ul", { class: "notes" }, ...notes.map((note) => el("li", {}, note))));
}

// What is not as in most of the others is marked.
function differing() {
  const { labels, differ } = data.settings;
  const usual = differ.map(({ values }) => {
    const times = (value) => values.filter((v) => v === value).length;
    return values.reduce((best, value) => (value && times(value) > times(best) ? value : best), values.find(Boolean));
  });
  const odd = (d, i) => Boolean(d.values[i]) && d.values[i] !== usual[differ.indexOf(d)];
  const across = differ.length > labels.length; // settings are the longer side, and go down
  const table = across
    ? grid(["setting", ...labels], differ.map((d) => [d.key, ...d.values.map((v) => v || "–")]),
      { texts: labels.map((_, i) => i + 1), marked: differ.map((d) => [false, ...labels.map((_, i) => odd(d, i))]) })
    : grid(["method", ...differ.map((d) => d.key)], labels.map((label, i) => [label, ...differ.map((d) => d.values[i] || "–")]),
      { swatches: true, marked: labels.map((_, i) => [false, ...differ.map((d) => odd(d, i))]) });
  return el("section", { id: "differ", class: "wide", "aria-labelledby": "differ-title" }, el("h2", { id: "differ-title" }, "Settings that differ"),
    el("p", { class: "caption" }, "What sets the methods apart, marked where it is not as in most of them; – is for an option that a method does not have. All else is the same."),
    table);
}

function folded(id, title, table) {
  const open = byId(id)?.querySelector("details").open || false;
  return el("section", { id, class: "wide folded" }, el("details", { open }, el("summary", {}, title), table));
}

function every(lines) {
  const { labels } = data.settings;
  const plain = lines.every((line) => !line.differs);
  const cells = lines.map((line) => [line.key, ...(line.differs || plain ? line.values : labels.map(() => line.values[0]))]);
  return grid(["", ...(plain ? [""] : labels)], cells, { texts: cells[0]?.map((_, i) => i), marked: lines.map((line) => cells[0].map(() => line.differs)) });
}

function render() {
  byId("title").textContent = data.title;
  byId("summary").textContent = data.summary;
  byId("made").textContent = `Made by ${data.made}. The final round counts; bands are the range over seeds.`;
  byId("alerts").hidden = !data.alerts.length || Boolean(data.progress && !data.progress.over);
  byId("alerts").replaceChildren(...data.alerts.map((text) => el("li", {}, text)));
  legend();
  const parts = [];
  if (data.table) parts.push(results());
  parts.push(...data.charts.map(lineSection));
  if (data.clients.length) parts.push(clientSection());
  if (data.partitions.length) parts.push(partitionSection());
  if (data.classes.length) parts.push(classSection());
  if (data.settings.differ.length) parts.push(differing());
  if (data.runs.length) {
    parts.push(folded("runs", "Runs", grid(["run", "method", "seed", "rounds", "accuracy (%)", "time", "state"], data.runs, { texts: [1, 6] })));
    parts.push(folded("settings", "All settings", every(data.settings.settings)));
    parts.push(folded("versions", "Versions and machine", every(data.settings.facts)));
  }
  place(parts);
  redraw();
  status();
}

// Put the parts in order and leave alone those that are in their place: a chart that is moved loses its focus.
function place(parts) {
  const main = byId("main");
  const keep = new Set(parts);
  let beside = 0; // a chart without a neighbour takes the whole width
  [...parts, null].forEach((node, i) => {
    if (node && !node.classList.contains("wide")) beside += 1;
    else {
      if (beside % 2) parts[i - 1].classList.add("wide");
      beside = 0;
    }
  });
  for (const node of [...main.children]) if (!keep.has(node)) node.remove();
  parts.forEach((node, i) => main.children[i] !== node && main.insertBefore(node, main.children[i] || null));
}

function duration(seconds) {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function status(lost = false) {
  const p = data.progress;
  byId("status").hidden = !p;
  if (!p) return;
  const quiet = p.updated ? Date.now() / 1000 - p.updated : 0;
  let said = `${p.run}: round ${p.done} of ${p.rounds}` + (p.left === null ? "" : `, about ${duration(p.left)} left`);
  if (!p.runs) said = "Waiting for the run to begin";
  else if (p.over) said = "Finished";
  else if (!p.run) said = `${p.runs} run${p.runs > 1 ? "s have" : " has"} ended; waiting for more`;
  else if (quiet > Math.max(60, 10 * (p.pace || 30))) said += `; nothing new for ${duration(quiet)}, it may have been stopped`;
  if (lost) said += "; the server does not answer any more";
  byId("said").textContent = said;
  byId("progress").hidden = p.over || !p.rounds;
  byId("progress").value = p.rounds ? p.done / p.rounds : 0;
}

async function follow() {
  let version = "";
  while (data.progress && !data.progress.over) {
    await new Promise((done) => setTimeout(done, 1000));
    try {
      const answer = await fetch("data.json", { headers: { "If-None-Match": version }, cache: "no-store" });
      if (answer.status === 200) {
        version = answer.headers.get("ETag");
        data = await answer.json();
        render();
      } else status();
    } catch {
      status(true);
      await new Promise((done) => setTimeout(done, 3000));
    }
  }
}

const folds = () => [...document.querySelectorAll("details")];
let closed = [];
addEventListener("beforeprint", () => {
  printing = true;
  document.documentElement.classList.add("printing");
  closed = folds().filter((fold) => !fold.open);
  for (const fold of closed) fold.open = true;
  for (const chart of drawn.values()) {
    chart.seen = true;
    chart.draw();
  }
});
addEventListener("afterprint", () => {
  printing = false;
  document.documentElement.classList.remove("printing");
  for (const fold of closed) fold.open = false;
  redraw();
});
for (const query of [NARROW, NIGHT]) query.addEventListener("change", render);
let width = 0;
new ResizeObserver(([{ contentRect }]) => {
  if (width && contentRect.width !== width && !printing) requestAnimationFrame(redraw);
  width = contentRect.width;
}).observe(byId("main"));

// The text is there at once; the charting library, which takes longer to start, comes after the first paint.
function start() {
  document.head.append(el("script", {}, byId("plotly").textContent));
  redraw();
  follow();
}

render();
requestAnimationFrame(() => setTimeout(start));
