// Line charts and stacked columns as SVG. They share one cursor: pointing at a step in one chart shows it in all.

import { byteUnit, bytes, make, number, svg } from "./page.js";

const LEFT = 48, RIGHT = 10, TOP = 12, BOTTOM = 22, HEIGHT = 190;
const charts = new Set();

/** Round numbers between two bounds, about so many. */
export function ticks(low, high, about) {
  const span = high - low || Math.abs(high) || 1;
  const power = 10 ** Math.floor(Math.log10(span / about));
  const unit = [1, 2, 5, 10].map((n) => n * power).find((step) => span / step <= about) ?? power * 10;
  const found = [];
  for (let at = Math.ceil(low / unit - 1e-9) * unit; at <= high + unit * 1e-6; at += unit) found.push(Math.abs(at) < unit * 1e-9 ? 0 : at);
  return found;
}

/** Numbers of bytes that are round in the unit of the highest, and their names. */
function byteTicks(low, high, about) {
  const { name, size } = byteUnit(high);
  return { rows: ticks(low / size, high / size, about).map((y) => y * size), name: (y) => `${number(y / size)} ${name}` };
}

/** The lowest and the highest point of each piece of a long line, so that no peak is lost. */
export function thinned(points, most) {
  if (points.length <= most) return points;
  const size = Math.ceil(points.length / (most / 2));
  const found = [];
  for (let start = 0; start < points.length; start += size) {
    const piece = points.slice(start, start + size);
    const low = piece.reduce((a, b) => (b[1] < a[1] ? b : a));
    const high = piece.reduce((a, b) => (b[1] > a[1] ? b : a));
    found.push(...(low[0] <= high[0] ? [low, high] : [high, low]));
  }
  return found;
}

/** The mean of each point's neighbours on both sides: it neither lags behind the line nor runs ahead of it. */
export function smoothed(points) {
  const sums = [0];
  for (const [, y] of points) sums.push(sums.at(-1) + y);
  const wide = Math.max(2, Math.round(points.length / 40));
  return points.map(([x], n) => {
    const reach = Math.min(wide, n, points.length - 1 - n);
    return [x, (sums[n + reach + 1] - sums[n - reach]) / (2 * reach + 1)];
  });
}

/**
 * A chart in a figure. `draw({series, bands, marks, log, smooth})` as often as there is something new;
 * a series is {name, points: [[x, y]], color, other, columns}: `columns` are stacked in the order given.
 */
export class Chart {
  constructor(title, { format = number, xName = "step", fromZero = false } = {}) {
    Object.assign(this, { title, format, xName, fromZero, data: null, at: null });
    this.latest = make("span.latest");
    this.picture = svg("svg", { tabindex: "0", role: "img", "aria-label": title });
    this.legend = make("ul.legend");
    this.tip = make("div.tip", { hidden: true, role: "status" });
    this.figure = make("figure.chart.card", {}, make("figcaption", {}, title, this.latest), this.picture, this.legend, this.tip);
    this.pointer = null;  // where it is in the figure, in pixels; null where keys move the cursor
    this.picture.addEventListener("pointermove", (event) => this.point(event));
    this.picture.addEventListener("pointerleave", () => setCursor(null, this.xName));
    this.picture.addEventListener("keydown", (event) => this.key(event));
    this.picture.addEventListener("blur", () => setCursor(null, this.xName));
    new ResizeObserver(() => this.data && this.paint()).observe(this.figure);
    charts.add(this);
  }

  draw(data) {
    this.data = data;
    this.paint();
  }

  paint() {
    const { series, bands = [], marks = [], log = false } = this.data;
    this.width = Math.max(220, this.picture.clientWidth || 380);
    const lines = series.filter((one) => !one.columns), columns = series.filter((one) => one.columns);
    const stacked = stack(columns);
    const xs = series.flatMap((one) => [one.points[0]?.[0], one.points.at(-1)?.[0]]).filter(Number.isFinite);
    const ys = [...lines.flatMap((one) => one.points.map((p) => p[1])), ...bands.flatMap((b) => b.points.flatMap((p) => [p[1], p[2]])), ...stacked.flatMap((c) => [0, c.top])].filter((y) => Number.isFinite(y) && (!log || y > 0));
    this.scale(xs, ys, log);
    this.picture.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.picture.setAttribute("aria-label", this.spoken(lines.length ? lines : columns));
    const most = this.width - LEFT - RIGHT;
    const body = [...this.axes(log)];
    for (const { step } of marks) body.push(svg("line", { class: "restart", x1: this.x(step), x2: this.x(step), y1: TOP, y2: HEIGHT - BOTTOM }, svg("title", {}, `another worker continued from step ${step}`)));
    for (const band of bands) body.push(svg("path", { class: `band f${band.color}`, d: this.area(band.points) }));
    const wide = Math.max(1, Math.min(22, (most / Math.max(1, new Set(columns.flatMap((c) => c.points.map((p) => p[0]))).size)) * 0.8));
    for (const c of stacked) body.push(svg("rect", { class: `f${c.color}`, x: this.x(c.x) - wide / 2, y: this.y(c.top), width: wide, height: Math.max(0, this.y(c.bottom) - this.y(c.top)) }));
    for (const one of lines) body.push(...this.line(one, most, log));
    this.cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.picture.replaceChildren(...body, this.cursor);
    this.latest.textContent = lines.filter((one) => !one.other && one.points.length).map((one) => this.format(one.points.at(-1)[1])).slice(0, 1).join("");
    this.legend.replaceChildren(...(series.length > 1 ? series.map((one) => make("li", {}, make(`i.b${one.color}${one.other ? ".dashed" : ""}`), one.other ? `${one.name} (compared)` : one.name)) : []));
    this.moveCursor();
  }

  scale(xs, ys, log) {
    let [left, right] = extent(xs);
    if (!xs.length) [left, right] = [0, 1];
    if (left === right) [left, right] = [left - 1, right + 1];
    let [low, high] = extent(ys);
    if (!ys.length) [low, high] = log ? [0.1, 1] : [0, 1];
    if (!log && this.fromZero && low === 0 && high === 0) high = 1;
    if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) * 0.1 || 1), high + (Math.abs(high) * 0.1 || 1)];
    if (!log && low > 0 && (this.fromZero || low < high * 0.35)) low = 0;
    this.bounds = { left, right, low, high };
    const span = right - left, tall = HEIGHT - TOP - BOTTOM;
    this.x = (x) => LEFT + ((x - left) / span) * (this.width - LEFT - RIGHT);
    const [a, b] = log ? [Math.log(low), Math.log(high)] : [low, high];
    this.y = (y) => TOP + (1 - ((log ? Math.log(Math.max(y, low)) : y) - a) / (b - a)) * tall;
  }

  axes(log) {
    const { left, right, low, high } = this.bounds;
    const { rows, name } = this.rows(low, high, log);
    const steps = ticks(left, right, this.width < 360 ? 4 : 6).filter(Number.isInteger);
    return [
      ...rows.flatMap((y) => [svg("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: this.y(y), y2: this.y(y) }), svg("text", { x: LEFT - 6, y: this.y(y) + 4, "text-anchor": "end" }, name(y))]),
      ...steps.map((x) => svg("text", { x: this.x(x), y: HEIGHT - 5, "text-anchor": "middle" }, number(x))),
    ];
  }

  rows(low, high, log) {
    if (this.format === bytes && !log) return byteTicks(low, high, 5);
    const rows = log ? [low, Math.sqrt(low * high), high] : ticks(low, high, 5);
    const isCoarse = new Set(rows.map(this.format)).size < rows.length;
    return { rows, name: isCoarse ? (y) => String(Number(y.toPrecision(7))) : this.format };
  }

  line(one, most, log) {
    const kind = one.other ? " other" : "";
    const isSmooth = this.data.smooth && one.points.length > 2 && !one.exact;
    const usable = log ? one.points.filter((p) => p[1] > 0) : one.points;
    const path = (points, extra) => svg("path", { class: `line c${one.color}${extra}`, d: this.path(thinned(points, most)) });
    if (usable.length === 1) return [svg("circle", { class: `f${one.color}`, cx: this.x(usable[0][0]), cy: this.y(usable[0][1]), r: 3 })];
    const dots = usable.length <= 24 && !one.other ? usable.map(([x, y]) => svg("circle", { class: `f${one.color}${isSmooth ? " raw" : ""}`, cx: this.x(x), cy: this.y(y), r: 2.2 })) : [];
    return isSmooth ? [path(usable, `${kind} raw`), ...dots, path(smoothed(usable), kind)] : [path(usable, kind), ...dots];
  }

  path(points) {
    return points.map(([x, y], n) => `${n ? "L" : "M"}${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`).join("");
  }

  area(points) {
    const edge = (n) => points.map((p) => [p[0], p[n]]);
    return points.length ? `${this.path(edge(2))}${this.path(edge(1).reverse()).replace("M", "L")}Z` : "";
  }

  spoken(series) {
    const parts = series.filter((one) => one.points.length).map((one) => `${one.name} ${this.format(one.points.at(-1)[1])} at ${this.xName} ${one.points.at(-1)[0]}`);
    return `${this.title}: ${parts.join(", ") || "nothing yet"}. Arrow keys read single steps.`;
  }

  point(event) {
    const box = this.picture.getBoundingClientRect();
    const frame = this.figure.getBoundingClientRect();
    this.pointer = { x: event.clientX - frame.left, y: event.clientY - frame.top };
    const part = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    setCursor(this.nearest(this.bounds.left + part * (this.bounds.right - this.bounds.left)), this.xName, this);
  }

  key(event) {
    const places = this.places();
    this.pointer = null;
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") setCursor(null, this.xName);
    if (!by || !places.length) return;
    event.preventDefault();
    const here = this.at === null ? (by > 0 ? -1 : places.length) : places.indexOf(this.nearest(this.at));
    setCursor(places[Math.max(0, Math.min(places.length - 1, here + by))], this.xName, this);
  }

  places() {
    return [...new Set(this.data.series.flatMap((one) => one.points.map((p) => p[0])))].sort((a, b) => a - b);
  }

  nearest(x) {
    return this.places().reduce((best, one) => (best === null || Math.abs(one - x) < Math.abs(best - x) ? one : best), null);
  }

  moveCursor(speaks = false) {
    const isShown = this.at !== null && this.data && this.at >= this.bounds.left && this.at <= this.bounds.right;
    this.cursor?.setAttribute("visibility", isShown ? "visible" : "hidden");
    this.tip.hidden = !(isShown && speaks);
    if (!isShown) return;
    this.cursor.setAttribute("x1", this.x(this.at));
    this.cursor.setAttribute("x2", this.x(this.at));
    const rows = this.data.series.map((one) => [one, one.points.find((p) => p[0] === this.at)]).filter(([, p]) => p);
    this.latest.textContent = rows.length ? this.format(rows[0][1][1]) : "";
    if (!speaks) return;
    this.tip.replaceChildren(make("b", {}, `${this.xName} ${this.at}`), ...rows.map(([one, p]) => make("div", {}, `${one.name}${one.other ? " (compared)" : ""} ${this.format(p[1])}`)));
    const { x, y } = this.pointer ?? { x: this.picture.offsetLeft + this.x(this.at), y: this.picture.offsetTop + 8 };
    const wide = this.tip.offsetWidth, tall = this.tip.offsetHeight;
    const left = x + 14 + wide <= this.figure.clientWidth ? x + 14 : x - 14 - wide;
    this.tip.style.left = `${Math.max(4, Math.min(left, this.figure.clientWidth - wide - 4))}px`;
    this.tip.style.top = `${Math.max(4, Math.min(y - tall / 2, this.figure.clientHeight - tall - 4))}px`;
  }
}

const extent = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

function setCursor(x, xName, speaker = null) {
  for (const chart of charts) {
    if (chart.xName !== xName || !chart.data || !chart.figure.isConnected) continue;
    chart.at = x;
    if (x === null) chart.paint();
    else chart.moveCursor(chart === speaker);
  }
}

function stack(columns) {
  const heights = new Map();
  return columns.flatMap((one) => one.points.map(([x, y]) => {
    const bottom = heights.get(x) ?? 0;
    heights.set(x, bottom + y);
    return { x, bottom, top: bottom + y, color: one.color };
  }));
}

const FEWEST = 5;  // points: fewer are no course

/** A small line without axes. */
export function sparkline({ name, values }) {
  if (values.length < FEWEST) return "";
  const wide = 96, tall = 28, low = Math.min(...values), span = Math.max(...values) - low || 1;
  const places = values.map((value, n) => [(n / (values.length - 1)) * (wide - 4) + 1, tall - 3 - ((value - low) / span) * (tall - 6)]);
  const text = `${name} from ${number(values[0])} to ${number(values.at(-1))}`;
  return svg("svg", { class: `spark ${name}`, viewBox: `0 0 ${wide} ${tall}`, role: "img", "aria-label": text },
    svg("title", {}, text),
    svg("path", { d: places.map(([x, y], n) => `${n ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("") }),
    svg("circle", { cx: places.at(-1)[0], cy: places.at(-1)[1], r: 2.2 }));
}
