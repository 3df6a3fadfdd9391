// Runs side by side: what became of them, and the fields in which their requests differ.

import { duration, make, money, named, number, table } from "./page.js";
import { stateBadge, shownState, tookSeconds } from "./status.js";

/** Fields by their dotted path. */
function flat(value, path = "", found = new Map()) {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) for (const [name, inner] of Object.entries(value)) flat(inner, path ? `${path}.${name}` : name, found);
  else found.set(path, value);
  return found;
}

const fieldText = (value) => (value === undefined || value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value));
/** A text that lines may break at slashes and commas: a long one does not push the other runs off the screen. */
const breakable = (text) => text.split(/(?<=[/,])/).flatMap((part) => [part, make("wbr")]);
const shown = (value) => (/^[a-z0-9+]+:\/\/\S+$/i.test(value) ? named(value) : breakable(fieldText(value)));
export const runName = (run) => run.run.name ?? run.run_id;

/** The names of runs, by which they are told apart: two of one name have the end of their ids, too. */
export function namesOf(runs) {
  const names = runs.map(runName);
  return names.map((name, n) => (names.indexOf(name) === names.lastIndexOf(name) ? name : `${name} …${runs[n].run_id.slice(-6)}`));
}

/** A table with a column for each run. */
export function comparison(runs) {
  const requests = runs.map((run) => flat(run.run));
  const names = [...new Set(requests.flatMap((fields) => [...fields.keys()]))].filter((name) => new Set(requests.map((fields) => fieldText(fields.get(name)))).size > 1);
  const measured = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].filter((name) => /loss|reward|accuracy|tokens_per_s/.test(name)).sort();
  const row = (name, cells) => make("tr", {}, make("th", { scope: "row" }, name), cells.map((cell) => make("td", {}, cell)));
  const titles = namesOf(runs);
  const framed = table(["", ...titles], [
    row("state", runs.map((run) => stateBadge(shownState(run)))),
    row("steps", runs.map((run) => (run.num_steps ? `${number(run.step)} of ${number(run.num_steps)}` : number(run.step)))),
    row("duration", runs.map((run) => duration(tookSeconds(run)))),
    row("GPU time", runs.map((run) => (run.gpu_seconds ? duration(run.gpu_seconds) : "–"))),
    runs.some((run) => run.cost) && row("cost", runs.map((run) => (run.cost ? money({ amount: run.cost.so_far, currency: run.cost.currency }) : "–"))),
    ...measured.map((name) => row(name, runs.map((run) => number(run.metrics[name])))),
    ...names.map((name) => row(name, requests.map((fields) => shown(fields.get(name))))),
  ].filter(Boolean));
  framed.querySelector("table").classList.add("beside");
  [...framed.querySelectorAll("thead th")].slice(1).forEach((cell, n) => cell.replaceChildren(make("a", { href: `/runs/${encodeURIComponent(runs[n].run_id)}` }, titles[n])));
  return [make("h3", {}, `${names.length} fields of the request differ`), framed];
}
