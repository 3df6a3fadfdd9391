// Charts of series over steps, drawn by uPlot. Charts with the same x axis share cursor and zoom.

import { byteUnit, bytes, html, number, useLayoutEffect, useRef, useState } from "./page.js";

const HEIGHT = 190;
const FEW = 24;  // points of a series, up to which each has a dot
const FAINT = "48";  // the opacity of a colour, in hexadecimal
const plots = new Set();
const colorOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const seriesColor = (one) => colorOf(`s${one.color}`);

/** An exponential moving average without the pull of its start (as by Adam's correction). `weight`: 0 to 1. */
export function smoothed(points, weight) {
  let mean = 0, sum = 0;
  return points.map(([x, y]) => {
    mean = weight * mean + (1 - weight) * y;
    sum = weight * sum + (1 - weight);
    return [x, mean / sum];
  });
}

/** The lower and the upper end of a linear axis for values between two bounds. */
export function axisRange(low, high, fromZero = false) {
  if (!Number.isFinite(low) || (fromZero && low === 0 && high === 0)) return [0, 1];
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (high - low <= size * 1e-9) return [low - (size * 0.1 || 1), high + (size * 0.1 || 1)];  // rounding is no course
  const room = (high - low) * 0.03;
  return [low >= 0 && (fromZero || low < high * 0.35) ? 0 : low - room, high + room];
}

/** Columns stand upon those before them. */
function stacked(columns) {
  const heights = new Map();
  return columns.map(({ points }) => points.map(([x, y]) => {
    heights.set(x, (heights.get(x) ?? 0) + y);
    return [x, heights.get(x)];
  }));
}

/** What uPlot draws: points and options of each of its series, bands first. `log` leaves out what is not positive. */
function layersOf({ series, bands, log, smooth }) {
  const columns = series.filter((one) => one.columns), tops = stacked(columns);
  const area = { label: "band", width: 0, points: { show: false } };
  const edges = bands.flatMap(({ points }) => [2, 1].map((edge) => (
    { points: points.map((point) => [point[0], point[edge]]), options: area }
  )));
  const bars = columns.map((one, n) => ({ points: tops[n], options: {
    ...area, label: one.name, fill: () => seriesColor(one), paths: uPlot.paths.bars({ size: [0.8, 22] }),
  } })).reverse();  // the highest is drawn first, and the lower ones over it
  const lines = series.filter((one) => !one.columns).flatMap((one) => {
    const points = log ? one.points.filter(([, y]) => y > 0) : one.points;
    const isSmooth = smooth > 0 && points.length > 2 && !one.exact;
    const hasDots = points.length === 1 || (points.length <= FEW && !one.other);
    const line = (isRaw) => ({
      label: one.name, isRaw, width: isRaw ? 1.1 : 1.8, dash: one.other ? [5, 4] : [],
      stroke: () => `${seriesColor(one)}${isRaw ? FAINT : ""}`,
      points: { show: hasDots && isRaw === isSmooth, size: 5, fill: () => seriesColor(one) },
    });
    const raw = { points, options: line(isSmooth) };
    return isSmooth ? [raw, { points: smoothed(points, smooth), options: line(false) }] : [raw];
  });
  return [...edges, ...bars, ...lines];
}

const ROUND = [...Array(10).keys()].flatMap((power) => [1, 2, 5].map((n) => n * 10 ** (power - 2)));
const byteIncrements = (_, __, low, high) => ROUND.map((n) => n * byteUnit(high).size);

function tickNames(format, values) {
  const shown = values.filter((value) => value !== null), unit = byteUnit(Math.max(...shown));
  const isCoarse = new Set(shown.map(format)).size < shown.length;
  const name = format === bytes ? (value) => `${number(value / unit.size)} ${unit.name}`
    : isCoarse ? (value) => String(Number(value.toPrecision(7))) : format;
  return values.map((value) => (value === null ? "" : name(value)));
}

/** The options of uPlot. `told` are the props of the chart; `hooks` follow its cursor, its scales and its drawing. */
function optionsOf(width, { format, xName, fromZero, log, bands, series }, layers, hooks) {
  const look = { stroke: () => colorOf("muted"), font: "11px system-ui", ticks: { show: false } };
  const half = series.some((one) => one.columns) ? 0.6 : 0;
  return {
    width, height: HEIGHT, legend: { show: false }, padding: [10, 10, 0, 0], hooks,
    scales: {
      x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low - half, high + half]) },
      y: log ? { distr: 3, range: (_, low, high) => uPlot.rangeLog(low ?? 0.1, high ?? 1, 10, false) }
        : { range: (_, low, high) => axisRange(low ?? NaN, high, fromZero) },
    },
    axes: [
      { ...look, grid: { show: false }, size: 24, gap: 4, space: 60, incrs: ROUND.filter(Number.isInteger),
        values: (_, at) => at.map(number) },
      { ...look, grid: { stroke: () => colorOf("line"), width: 1 }, gap: 5, space: log ? 22 : 28,
        values: (_, at) => tickNames(format, at), ...(format === bytes && !log ? { incrs: byteIncrements } : {}),
        size: (_, names) => 12 + 6.2 * Math.max(3, ...(names ?? []).map((name) => name?.length ?? 0)) },
    ],
    series: [{ label: xName }, ...layers.map(({ options }) => options)],
    bands: bands.map((band, n) => ({ series: [2 * n + 1, 2 * n + 2], fill: () => `${seriesColor(band)}${FAINT}` })),
    cursor: { sync: { key: xName }, y: false, points: { show: false } },
  };
}

/** Lines where another worker went on. */
function drawMarks({ over, scales: { x }, valToPos }, marks) {
  over.querySelectorAll(".restart").forEach((node) => node.remove());
  for (const { step } of marks.filter((mark) => mark.step >= x.min && mark.step <= x.max)) {
    const title = `another worker continued from step ${step}`;
    const line = Object.assign(document.createElement("i"), { className: "restart", title });
    line.style.left = `${valToPos(step, "x")}px`;
    over.append(line);
  }
}

const isZoomedIn = ({ data: [xs], scales: { x } }) => x.min > xs[0] || x.max < xs.at(-1);

/** Draw in a node, whose `plot` it is then; what is drawn in it already gets new data if nothing else has changed. */
function draw(node, told, hooks) {
  const layers = layersOf(told), { plot } = node;
  const data = uPlot.join(layers.map(({ points }) => [points.map(([x]) => x), points.map(([, y]) => y)]));
  const form = JSON.stringify([told.log, layers.map(({ options }) => options)]);  // without functions
  if (plot?.form === form) {
    const { min, max } = plot.scales.x, isZoomed = isZoomedIn(plot);
    plot.batch(() => {
      plot.setData(data);
      if (isZoomed) plot.setScale("x", { min, max });
    });
    return;
  }
  plot?.destroy();
  plots.delete(plot);
  node.plot = new uPlot(optionsOf(node.clientWidth || 380, told, layers, hooks), data, node);
  node.plot.form = form;
  plots.add(node.plot);
}

/**
 * A chart in a figure. A series is {name, points: [[x, y]], color, other, columns, exact}: `columns` are stacked in the
 * order given, an `exact` one is not smoothed, and an `other` one is of another run. `smooth` is the average's weight.
 */
export function Chart({ title, series, bands, marks, format = number, xName = "step", fromZero, log, smooth }) {
  const node = useRef(), tip = useRef(), [x, setX] = useState(null), [isZoomed, setZoomed] = useState(false);
  useLayoutEffect(() => draw(node.current, { series, bands, format, xName, fromZero, log, smooth }, {
    setCursor: [({ cursor: { idx }, data: [xs] }) => setX(xs[idx] ?? null)],
    setScale: [(plot) => setZoomed(isZoomedIn(plot))],
    draw: [(plot) => drawMarks(plot, marks)],
  }), [series, log, smooth]);
  useLayoutEffect(() => {
    const place = node.current, sized = new ResizeObserver(() => {
      if (place.clientWidth) place.plot.setSize({ width: place.clientWidth, height: HEIGHT });  // none in a closed fold
    });
    sized.observe(place);
    return () => {
      sized.disconnect();
      plots.delete(place.plot);
      place.plot.destroy();
    };
  }, []);
  const pointOf = (one) => (x === null ? undefined : one.points.find((point) => point[0] === x));
  const here = series.map((one) => [one, pointOf(one)]).filter(([, point]) => point);
  const isSpoken = here.length > 0 && node.current.matches(":hover, :focus-visible");
  useLayoutEffect(() => { if (isSpoken) beside(tip.current, node.current); });

  const moveTo = (left) => node.current.plot.setCursor({ left, top: Math.min(left, 0) }, true, true);
  const key = (event) => {
    const { data: [xs], cursor: { idx }, scales, valToPos } = node.current.plot, { min, max } = scales.x;
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") moveTo(-10);
    if (!by) return;
    event.preventDefault();
    const first = xs.findIndex((each) => each >= min), last = xs.findLastIndex((each) => each <= max);
    const to = (idx ?? (by > 0 ? first - 1 : last + 1)) + by;
    moveTo(valToPos(xs[Math.max(first, Math.min(last, to))], "x"));
  };
  const touch = ({ pointerType, clientX }) => {
    if (pointerType === "touch") moveTo(clientX - node.current.plot.over.getBoundingClientRect().left);
  };
  const reset = () => plots.forEach(({ series: [{ label }], data: [xs], setScale }) => {
    if (label === xName) setScale("x", { min: xs[0], max: xs.at(-1) });
  });

  const lines = series.filter((one) => !one.columns);
  const latest = here[0] ?? lines.map((one) => [one, one.points.at(-1)])[0];
  const ends = (lines.length ? lines : series).map(({ name, points }) => [name, ...points.at(-1)]);
  const told = ends.map(([name, at, y]) => `${name} ${format(y)} at ${xName} ${at}`).join(", ");
  const nameOf = (one) => (one.other ? `${one.name} (compared)` : one.name);
  return html`<figure class="chart card">
    <figcaption>${title}
      ${isZoomed && html`<button type="button" class="plain" onClick=${reset}>Reset zoom</button>`}
      <span class="latest">${latest ? format(latest[1][1]) : ""}</span></figcaption>
    <div class="plot" ref=${node} tabindex="0" role="img" onKeyDown=${key} onBlur=${() => moveTo(-10)}
      onPointerMove=${touch} aria-label=${`${title}: ${told}. Arrow keys read single steps.`} />
    ${series.length > 1 && html`<ul class="legend">${series.map((one) => html`
      <li><i class=${`b${one.color} ${one.other ? "dashed" : ""}`} />${nameOf(one)}</li>`)}</ul>`}
    <div class="tip" role="status" hidden=${!isSpoken} ref=${tip}><b>${xName} ${x}</b>
      ${here.map(([one, [, y]]) => html`<div>${nameOf(one)} ${format(y)}</div>`)}</div>
  </figure>`;
}

/** Put a tip beside the cursor, within its figure. */
function beside(tip, { parentElement: figure, offsetLeft, offsetTop, plot: { cursor, over } }) {
  const wide = tip.offsetWidth, tall = tip.offsetHeight;
  const x = offsetLeft + over.offsetLeft + cursor.left, y = offsetTop + over.offsetTop + (cursor.top || 8);
  const left = x + 14 + wide <= figure.clientWidth ? x + 14 : x - 14 - wide;
  tip.style.left = `${Math.max(4, Math.min(left, figure.clientWidth - wide - 4))}px`;
  tip.style.top = `${Math.max(4, Math.min(y - tall / 2, figure.clientHeight - tall - 4))}px`;
}

const repaint = () => plots.forEach((plot) => plot.redraw());
new MutationObserver(repaint).observe(document.documentElement, { attributeFilter: ["data-theme"] });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
