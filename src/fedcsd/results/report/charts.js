"use strict";
// What the charts look like. Names come from outside: plotly reads a little markup in what it shows, so all of
// them go through plain().

const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "triangle-down", "star", "cross", "hexagon"];
const DARK = { "#000000": "#f0f0f0", "#0072B2": "#3a9ad9", "#999933": "#b5b54a" };
const NARROW = matchMedia("(max-width: 600px)");
const NIGHT = matchMedia("(prefers-color-scheme: dark)");
const TOUCH = matchMedia("(pointer: coarse)");
const CONFIG = {
  displaylogo: false,
  plotlyServerURL: "",
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "sendChartToCloud", "sendDataToCloud"],
};

let printing = false;

function plain(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/%/g, "&#37;");
}

function brief(text, length) {
  return text.length > length ? text.slice(0, length - 1) + "…" : text;
}

function colourOf(method) {
  return (NIGHT.matches && !printing && DARK[method.colour]) || method.colour;
}

function number(value, digits = 2) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.01 || size >= 1e6)) return value.toExponential(2);
  return value.toFixed(digits);
}

function themed(height) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = { gridcolor: colour("--grid"), linecolor: colour("--line"), zeroline: false, automargin: true };
  return {
    height,
    autosize: false,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: NARROW.matches ? 11 : 12.5, color: colour("--ink") },
    margin: { l: 10, r: 14, t: printing ? 10 : 32, b: 10 },
    showlegend: false,
    dragmode: TOUCH.matches ? false : "zoom",
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--soft"), activecolor: colour("--accent") },
    hoverlabel: { bgcolor: colour("--panel"), bordercolor: colour("--line"), font: { color: colour("--ink") }, align: "left" },
    xaxis: { ...axis },
    yaxis: { ...axis },
    transition: { duration: 0 },
  };
}

function axisTitle(text) {
  return { text: plain(text), standoff: 8 };
}

// Lines of a measurement, a band for the range over seeds, a cross where a run diverged.
function lineChart(data, chart, measure, against, hidden) {
  const traces = [];
  const ends = [];
  const methods = data.methods.filter((m) => !hidden.has(m.label) && data.series[m.label]?.y[measure.key]);
  for (const method of methods) {
    const { x, y } = data.series[method.label];
    const at = x[against.key];
    const found = y[measure.key];
    const colour = colourOf(method);
    if (found.low && methods.length <= 8) traces.push(band(at, found, colour));
    const lone = found.mean.length === 1;
    traces.push({
      x: at, y: found.mean, type: "scatter", mode: "lines+markers", name: plain(brief(method.label, 30)),
      line: { color: colour, dash: method.dash, width: 2.2 },
      marker: { color: colour, symbol: SYMBOLS[method.mark % SYMBOLS.length], size: lone ? 9 : 7, maxdisplayed: 9 },
      customdata: found.mean.map((_, i) => [range(found, i), x.round[i]]),
      hovertemplate: `${plain(brief(method.label, 30))} %{y:.4~g}%{customdata[0]}, round %{customdata[1]}<extra></extra>`,
    });
    for (const [index, value] of found.ends || []) ends.push([at[index], value, colour, method.label, x.round[index]]);
  }
  if (ends.length) traces.push(crosses(ends));
  const layout = themed(printing ? 300 : NARROW.matches ? 280 : chart.id === "accuracy" ? 400 : 320);
  layout.hovermode = against.key === "round" && methods.length <= 8 && !NARROW.matches ? "x" : "closest";
  layout.uirevision = `${measure.key} ${against.key}`;
  Object.assign(layout.xaxis, { title: axisTitle(against.name), rangemode: "tozero" });
  if (against.key === "round") Object.assign(layout.xaxis, { tickformat: "d", ...fewRounds(data) });
  Object.assign(layout.yaxis, { title: axisTitle(measure.axis), type: measure.log ? "log" : "linear" });
  if (measure.log) Object.assign(layout.yaxis, { dtick: 1, exponentformat: "power" });
  if (measure.uniform !== null) {
    layout.shapes = [level(measure.uniform, layout.font.color)];
    layout.yaxis.autorangeoptions = { include: [measure.uniform - 0.01, measure.uniform] }; // closer, all numbers look the same
  }
  return { traces, layout };
}

function band(at, found, colour) {
  const known = at.map((_, i) => i).filter((i) => found.low[i] !== null);
  const back = [...known].reverse();
  return {
    x: [...known, ...back].map((i) => at[i]),
    y: [...known.map((i) => found.high[i]), ...back.map((i) => found.low[i])],
    type: "scatter", mode: "lines", fill: "toself", fillcolor: colour + "2b", line: { width: 0 }, hoverinfo: "skip",
  };
}

function range(found, index) {
  return found.low && found.low[index] !== null ? ` (${number(found.low[index])} to ${number(found.high[index])})` : "";
}

function crosses(ends) {
  return {
    x: ends.map((e) => e[0]), y: ends.map((e) => e[1]), type: "scatter", mode: "markers",
    marker: { symbol: "x", size: 11, color: ends.map((e) => e[2]), line: { width: 1, color: "#fff" } },
    hovertemplate: ends.map((e) => `${plain(brief(e[3], 30))}: a run diverged after round ${e[4]}<extra></extra>`),
  };
}

function level(y, colour) {
  return { type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: colour, width: 1, dash: "dot" } };
}

function fewRounds(data) {
  const longest = Math.max(0, ...Object.values(data.series).map((s) => s.x.round.length));
  return longest <= 10 ? { dtick: 1, rangemode: "normal" } : {};
}

// Classes: methods × classes after the last round, or rounds × classes of one method.
function classChart(data, which, hidden) {
  const one = data.classes.find((c) => c.label === which);
  const rows = data.classes.filter((c) => !hidden.has(c.label));
  const z = one ? one.by_round[0].map((_, k) => one.by_round.map((r) => r[k])) : rows.map((c) => c.final);
  const classes = one ? z.length : Math.max(0, ...z.map((r) => r.length));
  const across = one ? one.rounds.length : classes;
  const down = one ? classes : rows.length;
  const numbers = across <= (NARROW.matches ? 6 : 20) && down <= 24;
  const names = rows.map((c, i) => plain(brief(c.label, NARROW.matches ? 10 : 22)) + "\u200b".repeat(i));
  const trace = {
    z, type: "heatmap", colorscale: "Cividis", zmin: 0, zmax: 100, xgap: Math.max(across, down) > 60 ? 0 : 1, ygap: Math.max(across, down) > 60 ? 0 : 1,
    x: one ? one.rounds : [...Array(classes).keys()], y: one ? [...Array(classes).keys()] : names,
    texttemplate: numbers ? "%{z:.0f}" : "", textfont: { size: NARROW.matches ? 10 : 12 },
    colorbar: { title: { text: "%" }, thickness: 10, outlinewidth: 0, len: 1 },
    hovertemplate: one ? "class %{y}, round %{x}: %{z:.1f} %<extra></extra>" : "%{y}, class %{x}: %{z:.1f} %<extra></extra>",
  };
  const layout = themed(Math.min(620, 120 + Math.max(down * (one && down > 24 ? 6 : 26), 60)));
  layout.uirevision = String(which);
  Object.assign(layout.xaxis, { title: axisTitle(one ? "round" : "class"), showgrid: false, tickformat: "d" });
  Object.assign(layout.yaxis, { showgrid: false, autorange: one ? true : "reversed", title: one ? axisTitle("class") : undefined });
  if (!one) layout.yaxis.type = "category";
  if (across <= 20 && !NARROW.matches) layout.xaxis.dtick = 1;
  return { traces: [trace], layout };
}

// Clients from the worst to the best served, a line for each method.
function clientChart(data, model, hidden) {
  const counts = data.partitions.length === 1 ? data.partitions[0].counts : null;
  const traces = [];
  for (const method of data.methods) {
    const some = data.clients.filter((c) => c.label === method.label);
    const found = some.find((c) => c.model === model) || some[0];
    if (!found || hidden.has(method.label)) continue;
    const colour = colourOf(method);
    const few = found.place.length <= 60;
    const what = found.model === model || model === "global" ? "" : " (global model)";
    traces.push({
      x: found.place, y: found.accuracy, type: "scatter", mode: few ? "lines+markers" : "lines",
      line: { color: colour, dash: method.dash, width: 1.8 },
      marker: { color: colour, symbol: SYMBOLS[method.mark % SYMBOLS.length], size: 7 },
      customdata: found.client.map((k) => [k, counts?.[k] ? held(counts[k]) : ""]),
      hovertemplate: `${plain(brief(method.label, 30))}${what} %{y:.1f} %, client %{customdata[0]}%{customdata[1]}<extra></extra>`,
    });
  }
  const layout = themed(NARROW.matches ? 280 : 320);
  layout.uirevision = model;
  layout.hovermode = "closest";
  Object.assign(layout.xaxis, { title: axisTitle("clients, worst served first"), tickformat: "d" });
  if (data.clients.every((c) => c.place.at(-1) <= 10)) layout.xaxis.dtick = 1;
  Object.assign(layout.yaxis, { title: axisTitle("accuracy on own data (%)") });
  return { traces, layout };
}

function held(row) {
  const classes = row.filter((n) => n > 0).length;
  return ` (${row.reduce((a, b) => a + b, 0)} samples of ${classes} class${classes === 1 ? "" : "es"})`;
}

// Who holds what: circles with the area of the count, or colours where there are many.
function partitionChart(data, which) {
  const { counts } = data.partitions[which] || data.partitions[0];
  const clients = counts.length;
  const classes = counts[0].length;
  const most = Math.max(...counts.map((row) => Math.max(...row)));
  const layout = themed(Math.min(640, 110 + Math.max(90, classes * (classes > 24 ? 5 : 24))));
  const rows = [...Array(classes).keys()];
  let trace;
  if (clients * classes <= 600 && clients <= (NARROW.matches ? 12 : 40)) {
    const cells = counts.flatMap((row, k) => row.map((n, c) => [k, c, n])).filter((cell) => cell[2]);
    const room = Math.min(24, (NARROW.matches ? 270 : 460) / clients, 26);
    trace = {
      x: cells.map((c) => c[0]), y: cells.map((c) => c[1]), customdata: cells.map((c) => c[2]), type: "scatter", mode: "markers",
      marker: { size: cells.map((c) => c[2]), sizemode: "area", sizeref: (2 * most) / room ** 2, sizemin: 1.5,
        color: NIGHT.matches && !printing ? "#56B4E9" : "#0072B2", opacity: 0.9, line: { width: 0 } },
    };
    Object.assign(layout.xaxis, { range: [-0.7, clients - 0.3] });
    Object.assign(layout.yaxis, { range: [-0.7, classes - 0.3] });
  } else {
    const log = rows.map((c) => counts.map((row) => (row[c] ? Math.log10(row[c]) : null)));
    const ticks = [1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 100000].filter((t) => t <= most);
    trace = {
      z: log, type: "heatmap", customdata: rows.map((c) => counts.map((row) => row[c])), colorscale: "Cividis",
      reversescale: !(NIGHT.matches && !printing), hoverongaps: false,
      colorbar: { thickness: 10, outlinewidth: 0, len: 1, tickvals: ticks.map(Math.log10), ticktext: ticks.map(String) },
    };
  }
  trace.hovertemplate = "client %{x}, class %{y}: %{customdata} samples<extra></extra>";
  layout.hovermode = "closest";
  layout.uirevision = String(which);
  Object.assign(layout.xaxis, { title: axisTitle("client"), tickformat: "d", showgrid: clients <= 40 });
  Object.assign(layout.yaxis, { title: axisTitle("class"), tickformat: "d", showgrid: clients <= 40 });
  if (clients <= 20 && !NARROW.matches) layout.xaxis.dtick = 1;
  if (classes <= 20) layout.yaxis.dtick = NARROW.matches && classes > 10 ? 2 : 1;
  return { traces: [trace], layout };
}
