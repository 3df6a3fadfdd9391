// Two runs side by side: what was asked for otherwise, and how they stand.

import { duration, make, number, show } from "./page.js";
import { tookSeconds } from "./standing.js";

/** Fields by their dotted path. */
function flat(value, path = "", found = new Map()) {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) for (const [name, inner] of Object.entries(value)) flat(inner, path ? `${path}.${name}` : name, found);
  else found.set(path, value);
  return found;
}

const text = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));

export function showCompared(place, run, other) {
  const [mine, theirs] = [flat(run.run), flat(other.run)];
  const names = [...new Set([...mine.keys(), ...theirs.keys()])].filter((name) => text(mine.get(name)) !== text(theirs.get(name)));
  const measured = [...new Set([...Object.keys(run.metrics), ...Object.keys(other.metrics)])].filter((name) => /loss|reward|accuracy|tokens_per_s/.test(name)).sort();
  const outcomes = [["state", run.state, other.state], ["duration", duration(tookSeconds(run)), duration(tookSeconds(other))], ["GPU time", duration(run.gpu_seconds), duration(other.gpu_seconds)], ...measured.map((name) => [name, number(run.metrics[name]), number(other.metrics[name])])];
  const row = ([name, a, b]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, a), make("td", {}, b));
  const title = (one) => make("th", { scope: "col" }, make("a", { href: `/runs/${one.run_id}` }, one.run.name ?? one.run_id));
  show(place, make("div.card", {}, make("h3", {}, `${names.length} fields of the request differ`), make("div.scroll", {}, make("table", {},
    make("thead", {}, make("tr", {}, make("th", { scope: "col" }, ""), title(run), title(other))),
    make("tbody", {}, outcomes.map(row), names.map((name) => row([name, text(mine.get(name)), text(theirs.get(name))])))))));
}
