// Charts: drawn when they come into view, in the colours of the page, and again when those change.

const FEWEST_TO_SMOOTH = 24;
const LONGEST_LABEL = 26;  // Characters of a run or metric beside its line.
const drawn = new Set();
let drawing = Promise.resolve();
let plotlyReady = null;
let chartData = null;

function loadPlotly() {
  plotlyReady ??= unpackText("plotly").then((code) => {
    const script = document.createElement("script");
    script.textContent = code;
    document.head.append(script);
  });
  return plotlyReady;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function fade(hex, share) {
  const [red, green, blue] = [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
  return `rgba(${red}, ${green}, ${blue}, ${share})`;
}

function plain(name) {
  // Names of runs are data: plotly reads a few tags.
  return name.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function smooth(values, width) {
  // The mean of the records around each, fewer at the ends; what is not there plays no part.
  const half = Math.floor(width / 2);
  return values.map((_, place) => {
    const near = values.slice(Math.max(place - half, 0), place + half + 1).filter((value) => value !== null);
    return near.length ? near.reduce((sum, each) => sum + each, 0) / near.length : null;
  });
}

function traceLine(line, many) {
  const name = plain(chartData.runs[line.run]), ink = colour(`--run-${line.run % 6}`);
  const x = chartData.steps[line.steps], y = line.values;
  const few = x.length < 60, base = { x, hovertemplate: "%{y:.4~g}" };
  // Entries of one group stand above each other in a legend.
  if (many) base.legendgroup = name;
  const raw = {
    ...base, y, name: many ? name : "each record", mode: few ? "lines+markers" : "lines",
    line: { color: ink, width: 1.6 }, marker: { size: 4 },
  };
  if (x.length < FEWEST_TO_SMOOTH) return [raw];
  const width = Math.max(5, 2 * Math.floor(x.length / 40) + 1);
  const mean = {
    ...base, y: smooth(y, width), mode: "lines", line: { color: ink, width: 2.4 },
    name: many ? name : `mean of ${width} records`,
  };
  Object.assign(raw, { line: { color: fade(ink, x.length > 1000 || many ? 0.45 : 0.7), width: x.length > 1000 ? 0.7 : 1.1 }, mode: "lines" });
  return [many ? { ...raw, showlegend: false, hoverinfo: "skip" } : raw, mean];
}

function besides(run, many) {
  // Of several runs, only the lines stand in the legend: it would outgrow the chart.
  return many ? { legendgroup: run, showlegend: false } : {};
}

function traceEvaluated(line, many) {
  const run = plain(chartData.runs[line.run]), sampled = chartData.evaluated[line.run];
  return {
    x: chartData.steps[line.steps], y: line.values, mode: "markers",
    name: many ? `${run}, evaluation` : `evaluation, ${sampled}`, ...besides(run, many),
    hovertemplate: `%{y:.4~g} sampled ${sampled}`,
    marker: { color: colour(`--run-${line.run % 6}`), size: 7, symbol: "square-open" },
  };
}

function barsOf(ends) {
  // 95 % intervals; none where there is no interval.
  const length = (one, other) => (one === null || other === null ? 0 : one - other);
  return {
    type: "data", symmetric: false, thickness: 1.4, width: 4,
    array: ends.map((each) => length(each.high, each.value)),
    arrayminus: ends.map((each) => length(each.value, each.low)),
  };
}

function sayEnds(each) {
  const [value, low, high] = [each.value, each.low, each.high].map((end) => end?.toPrecision(3));
  return low === undefined ? value : `${value} (${low} to ${high})`;
}

function traceMarks(marks, many) {
  const runs = [...new Set(marks.map((mark) => mark.run))];
  return runs.map((run) => {
    const own = marks.filter((mark) => mark.run === run), name = plain(chartData.runs[run]);
    const sampling = own[0].sampled ?? chartData.held_out[run], sampled = sampling ? `, ${sampling}` : "";
    return {
      x: own.map((mark) => mark.step), y: own.map((mark) => mark.value), error_y: barsOf(own),
      text: own.map((mark) => `${sayEnds(mark)} ${mark.when}`), hovertemplate: `%{text}${sampled}`, mode: "markers",
      name: many ? `${name}, held-out` : `held-out${sampled}`, ...besides(name, many),
      marker: { color: colour(many ? `--run-${run % 6}` : "--accent"), size: 9, symbol: "diamond" },
      // The one before training stands on the axis.
      cliponaxis: false,
    };
  });
}

function layoutOf(chart) {
  const dim = colour("--dim"), grid = colour("--grid"), band = colour("--band");
  const bands = chart?.bands ?? [];
  // A short run has no ticks between two steps.
  const dtick = chartData.steps.every((steps) => steps.every((step) => step < 10)) ? 1 : undefined;
  const axis = {
    gridcolor: grid, linecolor: grid, zerolinecolor: grid, automargin: true, tickfont: { size: 11 },
  };
  return {
    height: 260, margin: { l: 46, r: 8, t: 8, b: 34 }, hovermode: "x unified",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: dim, size: 12, family: "system-ui, sans-serif" },
    hoverlabel: { bgcolor: colour("--back"), bordercolor: grid, font: { color: colour("--text") } },
    legend: { orientation: "h", traceorder: "normal", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } },
    // A finger that moves over a chart scrolls the page.
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    xaxis: { ...axis, title: { text: "optimizer step", font: { size: 11 } }, tickformat: "~s", rangemode: "tozero", dtick },
    yaxis: { ...axis, tickformat: chart ? ".4~g" : "" },
    shapes: bands.map((each) => ({
      type: "rect", x0: each.from, x1: each.to, y0: each.low, y1: each.high,
      fillcolor: band, line: { width: 0 }, layer: "below",
    })),
    annotations: bands.map((each) => ({
      x: each.to, y: each.high, text: "expected", showarrow: false, yshift: 8, xanchor: "right",
      font: { size: 11, color: dim },
    })),
  };
}

const CONFIG = {
  responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset+autosize",
};

function specify(box) {
  if (box.dataset.heldOut !== undefined) return specifyHeldOut();
  const chart = chartData.charts[Number(box.dataset.chart)], many = chartData.runs.length > 1;
  // Charts of a sweep have lines alone.
  const { evaluated = [], marks = [] } = chart;
  const traces = [
    ...chart.lines.flatMap((line) => traceLine(line, many)),
    ...evaluated.map((line) => traceEvaluated(line, many)),
    ...traceMarks(marks, many),
  ];
  // The ranking above the first chart names the runs and their colours.
  const named = many ? !box.closest("#result") : traces.length > 1;
  return [traces, { ...layoutOf(chart), showlegend: named }];
}

function specifyHeldOut() {
  // A line a run, or of one run a line a metric: the earlier above the later, so that the bars do not cover each other.
  const SHIFTS = { before: -0.15, "after the warm-up": 0, after: 0.15 };
  const rows = chartData.held_out_rows, many = chartData.runs.length > 1, layout = layoutOf(null);
  const traces = rows.flatMap((row, place) => Object.entries(row.ends).map(([when, ends], _, all) => {
    const shift = all.length > 1 ? SHIFTS[when] : 0;
    const ink = colour(many ? `--run-${row.run % 6}` : "--accent"), color = when === "after" ? ink : fade(ink, 0.6);
    return {
      x: [ends.value], y: [place + shift], error_x: { ...barsOf([ends]), color }, mode: "markers",
      hovertemplate: `${plain(row.label)}<br>${sayEnds(ends)} ${when}<extra></extra>`,
      marker: { color, size: 9, symbol: when === "after" ? "diamond" : "diamond-open" },
    };
  }));
  const label = (text) => plain(text.length > LONGEST_LABEL ? `…${text.slice(1 - LONGEST_LABEL)}` : text);
  layout.yaxis = {
    ...layout.yaxis, range: [rows.length - 0.5, -0.5], tickvals: rows.map((_, place) => place),
    ticktext: rows.map((row) => label(row.label)), zeroline: false, fixedrange: true,
  };
  layout.xaxis = { ...layout.xaxis, title: undefined, tickformat: ".4~g", rangemode: "normal", dtick: undefined };
  return [traces, { ...layout, hovermode: "closest", showlegend: false }];
}

async function draw(box) {
  await loadPlotly();
  chartData ??= await unpackJson("chart-data");
  await Plotly.newPlot(box, ...specify(box), CONFIG);
  drawn.add(box);
}

function drawSoon(box) {
  // One after the other, and the page may answer in between.
  const breathe = () => new Promise((go) => setTimeout(go, 0));
  drawing = drawing.then(() => draw(box)).then(breathe);
}

function redrawAll() {
  for (const box of drawn) Plotly.react(box, ...specify(box), CONFIG);
}

function startCharts() {
  const watcher = new IntersectionObserver((seen) => {
    for (const each of seen) {
      if (!each.isIntersecting) continue;
      watcher.unobserve(each.target);
      drawSoon(each.target);
    }
  }, { rootMargin: "300px" });
  document.querySelectorAll(".chart").forEach((box) => watcher.observe(box));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
}
