// Schedules: their next times, their last actions, and buttons for what can be done with one.

import { act, ago, byId, clock, get, isSure, make, now, post, remove, repeat, showIfNew, table, toast, until, words } from "./page.js";
import { askForSpan, prepareForm } from "./schedule_form.js";
import { stateBadge } from "./status.js";

// Actions are asked for when a schedule's counts have changed, and for a while after: Temporal reports them late.
const LOOKS_S = 15;
const known = new Map();

async function load() {
  const views = await get("/schedules");
  byId("summary").textContent = views.length ? `${views.length}` : "";
  draw(views);
  const due = views.filter((view) => isDue(view));
  for (const name of known.keys()) if (!views.some((view) => view.scheduled.name === name)) known.delete(name);
  const found = await Promise.all(due.map((view) => actionsOf(view.scheduled.name)));
  if (found.length) draw(views);
  return 5000;
}

function isDue(view) {
  const { name } = view.scheduled, stamp = JSON.stringify([view.created_at, view.num_actions, view.num_overlapped, view.num_missed]);
  const before = known.get(name) ?? { actions: null };
  if (before.stamp !== stamp) known.set(name, { ...before, stamp, until: now() + (before.stamp ? LOOKS_S : 0) });
  const { actions, until: end } = known.get(name);
  return !actions || now() < end || actions.some((action) => action.state === "preparing");
}

async function actionsOf(name) {
  try {
    known.get(name).actions = (await get(`/schedules/${encodeURIComponent(name)}`)).actions;
  } catch (error) {
    if (error.status !== 404) throw error;  // it was removed since it was listed
    known.delete(name);
  }
}

function draw(views) {
  const all = views.map((view) => ({ ...view, actions: known.get(view.scheduled.name)?.actions ?? [] }));
  showIfNew(byId("schedules"), [all, Math.floor(Date.now() / 30000)], () => (all.length ? all.map(card) : make("div.card.empty", {}, "No schedules.")));
}

function card(view) {
  const { scheduled } = view;
  const next = view.paused ? `paused${view.note && view.note !== "paused" ? `: ${view.note}` : ""}` : view.next_times.length ? `next ${until(view.next_times[0])}` : "no more times";
  const fact = (name, value) => make("div", {}, make("dt", {}, name), make("dd", {}, value));
  return make("section.card", { "aria-label": `Schedule ${scheduled.name}` },
    make("div.schedule-head", {}, make("div", {}, make("h2", {}, scheduled.name, " ", make("span.kind", {}, scheduled.run.kind)), make("span.muted", { title: view.next_times.length ? clock(view.next_times[0]) : "" }, next)),
      make("div.actions", {}, buttons(view))),
    make("dl.facts", {}, fact("When", scheduled.cron ? `${scheduled.cron} (${scheduled.timezone})` : `every ${length(scheduled.every_s)}`), fact("Overlap", words(scheduled.overlap)), fact("Skipped if late by", `more than ${length(scheduled.catch_up_s)}`), fact("Continues from the last version", scheduled.continues ? "yes" : "no"), fact("Triggered", String(view.num_actions)), fact("Skipped", `${view.num_overlapped} overlapping, ${view.num_missed} missed`)),
    view.actions.length > 0 && table(["When", "Result", ""], view.actions.map(row)));
}

function length(seconds) {
  for (const [unit, size] of [["days", 86400], ["hours", 3600], ["minutes", 60]]) if (seconds % size === 0) return seconds === size ? `1 ${unit.slice(0, -1)}` : `${seconds / size} ${unit}`;
  return `${seconds} s`;
}

function row(action) {
  const badge = { started: "succeeded", failed: "failed", skipped: "cancelled", preparing: "running" }[action.state];
  const shown = stateBadge(badge);
  shown.lastChild.textContent = action.state;
  return make("tr", {}, make("td", { title: clock(action.at) }, ago(action.at)), make("td", {}, shown), make("td", {}, action.run_id ? make("a", { href: `/runs/${action.run_id}` }, action.run_id) : action.reason ?? ""));
}

function buttons({ scheduled: { name }, paused }) {
  const path = `/schedules/${encodeURIComponent(name)}`;
  const call = (verb) => () => post(`${path}/${verb}`);
  return [
    paused ? button(name, "Resume", call("resume"), `${name}: resumed.`) : button(name, "Pause", call("pause"), `${name}: paused.`),
    button(name, "Trigger", call("trigger"), `${name}: triggered.`),
    button(name, "Backfill", () => askForSpan(name, (span) => post(`${path}/backfill`, span)), `${name}: runs for that period are being started.`),
    button(name, "Remove", async () => (await isSure(`Remove the schedule ${name}? Its runs are kept, and a running one continues.`)) && remove(path), `${name}: removed.`, ".danger"),
  ];
}

/** `work` answers nothing where the question was answered with no. */
function button(name, label, work, done, look = "") {
  return make(`button${look}`, { type: "button", "aria-label": `${label}: ${name}`, click: (event) => act(event.target, async () => {
    if (!(await work())) return;
    toast(done);
    known.delete(name);
    refresh();
  }) }, label);
}

const refresh = repeat(load);
prepareForm((name) => {
  toast(`${name}: created.`);
  refresh();
});
