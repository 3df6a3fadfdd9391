// The list of runs: filters and pages in the address, rows that are brought up to date while they are looked at.

import { sparkline } from "./chart.js";
import { ago, byId, clock, duration, get, make, nameOf, repeat, show, showIfNew } from "./page.js";
import { etaSeconds, phaseText, progressBar, shownState, stateBadge, tookSeconds } from "./status.js";

const STATES = ["running", "paused", "succeeded", "failed", "cancelled"];
const PAGE = 50;  // as the frame asks for it beforehand (templates/runs.html)
const query = new URLSearchParams(location.search);
const rows = new Map();
let sparklines = {};
let next = null;
const MOST_COMPARED = 6;
const picked = new Map();  // runs to compare, by id: in the order in which they were chosen

function remember(changes, keepsPage = false) {
  for (const [name, value] of Object.entries(changes)) value ? query.set(name, value) : query.delete(name);
  if (!keepsPage) query.delete("after");
  const text = query.toString();
  history.pushState(null, "", text ? `/?${text}` : "/");
  refresh();
}

function cells(run, place, owners) {
  const lost = run.workers_lost;
  return [
    make("td", {}, make("div.titled", {}, picker(run), make("a.title", { href: `/runs/${run.run_id}`, title: run.run.name ?? run.run_id }, run.run.name ?? run.run_id), make("span.kind", {}, run.kind)),
      make("span.under", { title: run.run.model }, `${run.run.name ? `${run.run_id} · ` : ""}${nameOf(run.run.model)}`)),
    make("td.state-cell", {}, stateBadge(shownState(run)), lost > 0 && make("span.mark", {}, lost > 1 ? `${lost} workers lost` : "worker lost")),
    make("td.progress", {}, progressBar(run), progress(run, place)),
    make("td.trend", {}, sparklines[run.run_id] ? sparkline(sparklines[run.run_id]) : ""),
    make(`td.number${run.started_at ? "" : ".none"}`, { "data-label": "duration" }, duration(tookSeconds(run))),
    make(`td.number${run.gpu_seconds ? "" : ".none"}`, { "data-label": "GPU" }, run.gpu_seconds ? duration(run.gpu_seconds) : "–"),
    owner(owners[run.owner] ?? run.owner ?? ""),
    make("td.number.submitted", { title: clock(run.created_at) }, ago(run.created_at)),
  ];
}

function picker(run) {
  const box = make("input", { type: "checkbox", "aria-label": `Compare ${run.run.name ?? run.run_id}`, change: () => {
    box.checked ? picked.set(run.run_id, run) : picked.delete(run.run_id);
    showPicked();
  } });
  box.checked = picked.has(run.run_id);
  return run.kind === "session" ? null : box;
}

/** The way to the comparison of the runs that are chosen, once there are two. */
function showPicked() {
  const link = byId("compare"), ids = [...picked.keys()].slice(0, MOST_COMPARED);
  link.hidden = ids.length < 2;
  link.textContent = `Compare ${ids.length} runs`;
  link.href = `/compare?${ids.map((id) => `run=${encodeURIComponent(id)}`).join("&")}`;
}

const owner = (name) => make("td.owner", { title: name }, make("span", {}, name));

function progress(run, place) {
  const eta = etaSeconds(run);
  const doing = run.state === "running" ? (place ? `${place === 1 ? "next" : `position ${place}`} in the queue` : phaseText(run)) : "";
  const steps = run.num_steps ? `${run.step} / ${run.num_steps}` : run.step ? `step ${run.step}` : "";
  return [
    make("div.progress-text", {}, make("span", {}, [doing, steps].filter(Boolean).join(" · ")), eta !== null && make("span", {}, `${duration(eta)} left`)),
    run.state === "failed" && run.problem && make("div.why", { title: run.problem.message }, run.problem.message),
  ];
}

function draw(page, overview) {
  const body = byId("rows");
  const seen = new Set(page.runs.map((run) => run.run_id));
  for (const [id, row] of rows) if (!seen.has(id)) { row.remove(); rows.delete(id); }
  page.runs.forEach((run, n) => {
    const row = rows.get(run.run_id) ?? make("tr");
    rows.set(run.run_id, row);
    const hadFocus = row.contains(document.activeElement);
    const fresh = run.state === "running" ? Math.floor(Date.now() / 2000) : Math.floor(Date.now() / 60000);
    const isNew = showIfNew(row, [run, overview.waiting[run.run_id], sparklines[run.run_id], fresh], () => cells(run, overview.waiting[run.run_id], overview.owners));
    if (hadFocus && isNew) row.querySelector("a").focus();
    if (body.children[n] !== row) body.insertBefore(row, body.children[n] ?? null);
  });
  const isFiltered = query.get("state") || query.get("kind") || query.get("words");
  byId("empty").hidden = page.runs.length > 0;
  show(byId("empty"), isFiltered ? "No run matches these filters." : make("span", {}, "No runs yet. ", make("a", { href: "/new" }, "Start one here"), ", or see ", make("code", {}, "longshore submit sft --help"), "."));
  const total = Object.values(overview.counts).reduce((sum, count) => sum + count, 0);
  const hidden = page.num_hidden_sessions;
  byId("summary").textContent = `${total.toLocaleString("en")} in total${hidden ? ` (${hidden.toLocaleString("en")} idle ${hidden > 1 ? "sessions are" : "session is"} hidden)` : ""}`;
  showIfNew(byId("states"), [overview.counts, query.get("state")], () => chips(overview.counts, total));
}

function chips(counts, total) {
  const chip = (name, count) => make("button", { type: "button", "aria-pressed": String((query.get("state") ?? "") === name), click: () => remember({ state: name }) }, name || "all", make("span", {}, count.toLocaleString("en")));
  return [chip("", total), ...STATES.map((state) => chip(state, counts[state] ?? 0))];
}

async function load() {
  const asked = new URLSearchParams({ limit: PAGE });
  for (const name of ["state", "kind", "words", "after"]) if (query.get(name)) asked.set(name, query.get(name));
  const [page, overview] = await Promise.all([get(`/runs?${asked}`), get("/overview")]);
  next = page.next;
  byId("older").disabled = !page.has_more;
  byId("newer").disabled = !query.get("after");
  draw(page, overview);
  if (page.runs.length) {
    sparklines = await get(`/sparklines?${page.runs.map((run) => `run_id=${run.run_id}`).join("&")}`);
    draw(page, overview);
  }
  return page.runs.some((run) => run.state === "running") ? 2500 : 10000;
}

byId("kind").value = query.get("kind") ?? "";
byId("words").value = query.get("words") ?? "";
byId("kind").addEventListener("change", (event) => remember({ kind: event.target.value }));
let typing;
byId("words").addEventListener("input", (event) => {
  clearTimeout(typing);
  typing = setTimeout(() => remember({ words: event.target.value.trim() }), 250);
});
byId("filters").addEventListener("submit", (event) => event.preventDefault());
byId("older").addEventListener("click", () => { if (next) remember({ after: next }, true); });
byId("newer").addEventListener("click", () => remember({}));
// A step back in history, but not the skip link.
addEventListener("popstate", () => { if (location.search !== (query.size ? `?${query}` : "")) location.reload(); });
const refresh = repeat(load);

async function loadHosts() {
  const lacking = (await get("/hosts")).flatMap(({ role, lacking }) => lacking.map((told) => `${role} host ${told}`));
  byId("hosts").hidden = !lacking.length;
  byId("hosts").textContent = `Some hosts take no runs: ${lacking.join("; ")}`;
}

loadHosts().catch(() => {});  // the list itself says what is away
