// Runs side by side: what became of them, and the fields in which their requests differ.

import { duration, html, money, named, number, Table } from "./page.js";
import { stateBadge, shownState, tookSeconds } from "./status.js";

/** Fields by their dotted path. */
function flat(value, path = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return [[path, value]];
  return Object.entries(value).flatMap(([name, inner]) => flat(inner, path ? `${path}.${name}` : name));
}

const fieldText = (value) => (value ?? null) === null ? "–" : typeof value === "string" ? value : JSON.stringify(value);
/** A text that lines may break at slashes and commas: a long one does not push the other runs off the screen. */
const breakable = (text) => text.split(/(?<=[/,])/).flatMap((part) => [part, html`<wbr />`]);
const shown = (value) => (/^[a-z0-9+]+:\/\/\S+$/i.test(value) ? named(value) : breakable(fieldText(value)));
export const runName = (run) => run.run.name ?? run.run_id;

/** The names of runs, by which they are told apart: two of one name have the end of their ids, too. */
export function namesOf(runs) {
  const names = runs.map(runName), isOnly = (name) => names.indexOf(name) === names.lastIndexOf(name);
  return names.map((name, n) => (isOnly(name) ? name : `${name} …${runs[n].run_id.slice(-6)}`));
}

/** A table with a column for each run. */
export function Comparison({ runs }) {
  const requests = runs.map((run) => new Map(flat(run.run))), titles = namesOf(runs);
  const differ = (name) => new Set(requests.map((fields) => fieldText(fields.get(name)))).size > 1;
  const names = [...new Set(requests.flatMap((fields) => [...fields.keys()]))].filter(differ);
  const measured = new Set(runs.flatMap((run) => Object.keys(run.metrics)));
  const metrics = [...measured].filter((name) => /loss|reward|accuracy|tokens_per_s/.test(name)).sort();
  const row = (name, cell) => [html`<th scope="row">${name}</th>`, ...runs.map(cell)];
  const steps = (run) => (run.num_steps ? `${number(run.step)} of ${number(run.num_steps)}` : number(run.step));
  const rows = [
    row("state", (run) => stateBadge(shownState(run))),
    row("steps", steps),
    row("duration", (run) => duration(tookSeconds(run))),
    row("GPU time", (run) => duration(run.gpu_seconds || null)),
    runs.some((run) => run.cost) && row("cost", ({ cost }) => (cost ? money(cost.so_far, cost.currency) : "–")),
    ...metrics.map((name) => row(name, (run) => number(run.metrics[name]))),
    ...names.map((name) => row(name, (_, n) => shown(requests[n].get(name)))),
  ];
  const heads = runs.map((run, n) => html`<a href=${`/runs/${encodeURIComponent(run.run_id)}`}>${titles[n]}</a>`);
  return html`<div class="card">
    <h3>${names.length} fields of the request differ</h3>
    <${Table} names=${["", ...titles]} heads=${["", ...heads]} rows=${rows.filter(Boolean)} look="beside" />
  </div>`;
}
