// Several runs: their charts laid over each other, and a table of results and settings. The address names the runs.

import { comparison, namesOf, runName } from "./comparison.js";
import { ago, byId, get, make, Problem, repeat, show, showIfNew, toast } from "./page.js";
import { OverlaidCharts, RunMetrics } from "./series.js";
import { shownState, stateBadge } from "./status.js";

const MOST = 6;  // as many as there are colours
const ids = [...new Set(new URLSearchParams(location.search).getAll("run"))].slice(0, MOST);
const metrics = new Map();
const charts = new OverlaidCharts(byId("chart-grid"));
let runs = [];

const go = (chosen) => location.assign(`/compare?${chosen.map((id) => `run=${encodeURIComponent(id)}`).join("&")}`);

function draw() {
  const names = namesOf(runs);
  charts.draw(runs.map((run, n) => ({ name: names[n], metrics: metrics.get(run.run_id) })), { log: byId("log").checked, smooth: byId("smooth").checked });
}

function chip(run, n) {
  const name = namesOf(runs)[n];
  return make("li", {}, make(`i.b${n}`), make("a", { href: `/runs/${encodeURIComponent(run.run_id)}`, title: name }, name), stateBadge(shownState(run)),
    make("button.plain", { type: "button", "aria-label": `Leave out ${name}`, click: () => go(ids.filter((id) => id !== run.run_id)) }, "✕"));
}

async function found(id) {
  try {
    return await get(`/runs/${encodeURIComponent(id)}`);
  } catch (error) {
    if (!(error instanceof Problem) || error.status === 401) throw error;
    toast(`${id}: ${error.message}`, true);
    return null;
  }
}

async function turn() {
  runs = (await Promise.all(ids.map(found))).filter(Boolean);
  showIfNew(byId("compared"), runs.map((run) => [run.run_id, run.state, run.phase]), () => (runs.length ? runs.map(chip) : make("li.muted", {}, "No run is chosen yet.")));
  for (const run of runs) if (!metrics.has(run.run_id)) metrics.set(run.run_id, new RunMetrics(run.run_id, run.kind));
  const isNew = await Promise.all(runs.map((run) => metrics.get(run.run_id).read()));
  if (isNew.some(Boolean) || !charts.isDrawn) draw();
  showIfNew(byId("table"), [runs.map((run) => [run.state, run.step, run.metrics])], () => runs.length && make("div.card", {}, comparison(runs)));
  return runs.some((run) => run.state === "running") ? 2500 : 0;
}

async function offer() {
  const page = await get("/runs?limit=200");
  const others = page.runs.filter((run) => !ids.includes(run.run_id) && run.kind !== "session");
  byId("add").append(...others.map((run) => make("option", { value: run.run_id }, `${runName(run)} · ${run.kind} · ${run.state} · ${ago(run.created_at)}`)));
  byId("add").disabled = ids.length >= MOST;
}

byId("add").addEventListener("change", (event) => event.target.value && go([...ids, event.target.value]));
for (const id of ["log", "smooth"]) byId(id).addEventListener("change", draw);
offer().catch((error) => toast(error.message, true));
repeat(turn);
