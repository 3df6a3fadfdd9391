// Sweeps: each with its trials as a table, and as lines over one axis for each parameter and one for the metric.

import { act, ago, byId, clock, get, isSure, make, nameOf, number, post, repeat, showIfNew, svg, table, toast } from "./page.js";
import { stateBadge } from "./status.js";
import { prepareForm } from "./sweep_form.js";

const HEIGHT = 190, TOP = 26, BOTTOM = 22, SIDE = 54, LEAST = 110;  // LEAST: pixels between two axes
const text = (value) => (typeof value === "string" ? (value.includes("://") ? nameOf(value) : value) : typeof value === "number" ? number(value) : JSON.stringify(value));

/** What stands on an axis: where a trial is, from 0 (bottom) to 1, and the names of some places. */
function axisOf(path, space) {
  if (space.choices) {
    const all = space.choices.map((choice) => JSON.stringify(choice)), at = (n) => (all.length > 1 ? n / (all.length - 1) : 0.5);
    return { name: path, at: (trial) => at(all.indexOf(JSON.stringify(trial.values[path]))), places: space.choices.map((choice, n) => [at(n), text(choice)]) };
  }
  const scale = space.log ? Math.log : (value) => value, low = scale(space.min), high = scale(space.max);
  return { name: path, at: (trial) => (scale(trial.values[path]) - low) / (high - low), places: [[0, number(space.min)], [1, number(space.max)]] };
}

function metricAxis(view, measured) {
  const found = measured.map((trial) => trial.value), low = Math.min(...found), high = Math.max(...found);
  return { name: view.metric, at: (trial) => (high > low ? (trial.value - low) / (high - low) : 0.5), places: high > low ? [[0, number(low)], [1, number(high)]] : [[0.5, number(low)]] };
}

function coordinates(view) {
  const measured = view.trials.filter((trial) => trial.value !== null);
  if (!measured.length) return null;
  const axes = [...Object.entries(view.sweep.parameters).map(([path, space]) => axisOf(path, space)), metricAxis(view, measured)];
  const width = Math.max(byId("sweeps").clientWidth - 80, 2 * SIDE + LEAST * (axes.length - 1));
  const x = (n) => SIDE + (n / (axes.length - 1)) * (width - 2 * SIDE), y = (at) => HEIGHT - BOTTOM - at * (HEIGHT - TOP - BOTTOM);
  const parts = axes.flatMap((axis, n) => [
    svg("line", { class: "grid", x1: x(n), x2: x(n), y1: TOP, y2: HEIGHT - BOTTOM }),
    svg("text", { x: x(n), y: 12, "text-anchor": "middle" }, axis.name),
    ...axis.places.map(([at, name]) => svg("text", { x: x(n) + 5, y: y(at) + 4 }, name.length > 14 ? `${name.slice(0, 13)}…` : name)),
  ]);
  const order = [...measured].sort((a, b) => (a.number === view.best) - (b.number === view.best));  // the best is drawn last
  for (const trial of order) {
    const isBest = trial.number === view.best, look = isBest ? "line c0" : trial.state === "succeeded" ? "line c1 raw" : "line c1 raw other";
    const path = axes.map((axis, n) => `${n ? "L" : "M"}${x(n).toFixed(1)} ${y(axis.at(trial)).toFixed(1)}`).join("");
    parts.push(svg("path", { class: look, d: path }, svg("title", {}, `trial ${trial.number}: ${view.metric} ${number(trial.value)}`)));
  }
  const told = `Parallel coordinates of ${measured.length} trials: ${axes.map((axis) => axis.name).join(", ")}. The table below shows the same values.`;
  const picture = svg("svg", { role: "img", "aria-label": told, viewBox: `0 0 ${width} ${HEIGHT}` }, parts);
  picture.style.width = `${width}px`;
  return make("figure.chart", {}, make("figcaption", {}, "Trials by their values", make("span.latest", {}, view.best === null ? "" : `best: trial ${view.best}`)), make("div.scroll", { tabindex: "0", role: "region", "aria-label": "Trials by their values" }, picture));
}

function row(view, trial) {
  const run = trial.run_id ? make("a", { href: `/runs/${encodeURIComponent(trial.run_id)}` }, trial.run_id) : "";
  const name = trial.number === view.best ? make("strong", {}, `${trial.number} (best)`) : `${trial.number}`;
  const cells = [name, stateBadge(trial.state), number(trial.value), number(trial.step), ...Object.keys(view.sweep.parameters).map((path) => text(trial.values[path])), run];
  return make("tr", {}, cells.map((cell) => make("td", {}, cell)));
}

function card(view) {
  const { sweep } = view, ended = view.trials.filter((trial) => !["running", "paused"].includes(trial.state)).length;
  const told = [`${ended} of ${view.num_trials} trials finished`, sweep.sampler, sweep.halving && "successive halving", `${view.direction} ${view.metric}`, ago(view.created_at)];
  return make("section.card", { "aria-label": `Sweep ${sweep.name}` },
    make("div.schedule-head", {}, make("div", {}, make("h2", {}, sweep.name, " ", make("span.kind", {}, sweep.run.kind), " ", stateBadge(view.state)), make("span.muted", { title: clock(view.created_at) }, told.filter(Boolean).join(" · "))),
      view.state === "running" && make("div.actions", {}, make("button.danger", { type: "button", "aria-label": `Cancel: ${sweep.name}`, click: (event) => cancel(event.target, view) }, "Cancel"))),
    view.problem && make("p.problem", {}, view.problem),
    view.adapter && make("p", {}, "Published as ", make("a", { href: "/models" }, `${sweep.name}:v${view.version}`)),
    coordinates(view),
    view.trials.length > 0 && table(["Trial", "State", view.metric, "Step", ...Object.keys(sweep.parameters), "Run"], view.trials.map((trial) => row(view, trial))));
}

const cancel = (button, view) => act(button, async () => {
  if (!(await isSure(`Cancel the sweep ${view.sweep.name} and its unfinished runs?`))) return;
  await post(`/sweeps/${view.sweep_id}/cancel`);
  toast(`${view.sweep.name}: cancelled.`);
  refresh();
});

const refresh = repeat(async () => {
  const views = await get("/sweeps");
  byId("summary").textContent = views.length ? `${views.length}` : "";
  showIfNew(byId("sweeps"), [views, Math.floor(Date.now() / 30000)], () => (views.length ? views.map(card) : make("div.card.empty", {}, "No sweeps.")));
  return views.some((view) => view.state === "running") ? 2500 : 10000;
});

prepareForm((name) => {
  toast(`${name}: started.`);
  refresh();
});
