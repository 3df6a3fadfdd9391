// One run: how it stands, and its parts, each brought up to date where it has changed.

import { showCompared } from "./compare.js";
import { showData } from "./data.js";
import { showFiles, showRequest } from "./files.js";
import { Logs } from "./logs.js";
import { Charts, Course } from "./series.js";
import { SampleViewer } from "./samples.js";
import { drawTimeline } from "./timeline.js";
import { act, ago, byId, clock, duration, get, isSure, make, now, number, post, Problem, repeat, show, showIfNew, toast, words } from "./page.js";
import { canResume, etaSeconds, modelName, progressBar, shownState, stateBadge, stoppedSeconds, tookSeconds } from "./standing.js";

const RUN = document.body.dataset.run;
const { temporal, wandb } = document.body.dataset;
let run, course, charts, samples, other = null, place = null, owners = {};

const hasEnded = (one) => one.state === "failed" || one.state === "cancelled";
const AGAIN = "Start the same request as a new run, from the beginning?";
const ACTIONS = [
  { verb: "pause", label: "Pause", when: (one) => one.state === "running", done: "It pauses at its next step boundary, with a checkpoint." },
  { verb: "cancel", label: "Cancel", look: ".danger", when: (one) => one.state === "running", sure: cancelQuestion, done: "It is being cancelled." },
  { verb: "resume", label: "Resume", look: ".strong", when: canResume, done: "It goes on from its last checkpoint." },
  { verb: "retry", label: "Run again", when: (one) => hasEnded(one) && canResume(one), sure: () => AGAIN, done: "A new run was started." },
  { verb: "retry", label: "Run again", look: ".strong", when: (one) => hasEnded(one) && !canResume(one), sure: () => `${AGAIN} It fails again unless what it failed on was mended.`, done: "A new run was started." },
];
const DOORS = { native: "API or CLI", openai: "OpenAI's API", art: "ART" };

function cancelQuestion() {
  return run.step ? "Cancel this run? It ends at its next step boundary, with a checkpoint, and can be resumed." : "Cancel this run? It has done no step yet.";
}

function drawHead() {
  const state = shownState(run);
  byId("name").textContent = run.run.name ?? run.run_id;
  document.title = `${state} · ${run.run.name ?? run.run_id} · Longshore`;
  showIfNew(byId("problem"), [run.problem, run.notices], () => [
    run.problem && make("p.problem", { role: "alert" }, run.problem.message),
    ...(run.notices ?? []).map((notice) => make("p.notice", {}, notice)),
  ]);
  showIfNew(byId("actions"), [run.state, run.problem], () => [...ACTIONS.filter((one) => one.when(run)).map(button), ...links()]);
  showIfNew(byId("glance"), [run, place, owners, Math.floor(now())], () => glance(state).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  const eta = etaSeconds(run);
  const none = run.state === "running" ? "no step yet" : "no step was done";
  const done = run.num_steps ? `step ${number(run.step)} of ${number(run.num_steps)}` : run.step ? `step ${number(run.step)}` : none;
  show(byId("progress"), progressBar(run), make("div.progress-text", {}, make("span", {}, done), make("span", {}, eta === null ? "" : `about ${duration(eta)} left`)));
}

/** Names and values. What a run does not have is left out. */
function glance(state) {
  const { schedule, api, metadata } = run.source;
  const [measure, value] = run.kind === "rl" ? ["Reward", run.metrics.reward_mean] : ["Loss", run.metrics.loss];
  const name = schedule?.split("/").pop(), stopped = run.started_at ? stoppedSeconds(run) : 0;
  return [
    ["State", stateBadge(state)],
    ...(run.state === "running" && (run.phase !== state || place) ? [["Phase", words(run.phase) + (place ? `, place ${place} in the queue` : "")]] : []),
    ...(Number.isFinite(value) ? [[measure, number(value)]] : []),
    ...(run.metrics.broken_trajectories ? [["Left out of its newest step", leftOut(run.metrics)]] : []),
    ["Duration", [duration(tookSeconds(run)), stopped > 1 && make("span.muted.small.under", {}, `${duration(stopped)} of it stopped`)]],
    ["GPU time", run.gpu_seconds ? duration(run.gpu_seconds) : "–"],
    ...(run.epoch ? [["Workers", workers()]] : []),
    ["Submitted", make("span", { title: clock(run.created_at) }, ago(run.created_at))],
    ["Owner", owners[run.owner] ?? run.owner ?? "–"],
    ["Came in by", name ? `schedule ${name}` : DOORS[api]],
    ["Model", make("span", { title: run.run.model }, modelName(run.run.model))],
    ...(run.version ? [["Published", `${run.name} v${run.version}`]] : []),
    ...Object.entries(metadata),
  ];
}

/** How many trajectories could not be trained, and by which rules. */
function leftOut(metrics) {
  const rules = Object.entries(metrics).filter(([name]) => name.startsWith("dropped_for_"));
  const reasons = rules.map(([name, count]) => `${name.replace("dropped_for_", "")} ${number(count)}`).join(", ");
  return [make("span.mark", {}, `${number(metrics.broken_trajectories)} of ${number(metrics.trajectories)}`), make("span.muted.small.under", {}, reasons)];
}

/** How many it had, one after another: a pause gives one back, and a resumed run has another. */
function workers() {
  return [number(run.epoch), run.workers_lost > 0 && [" ", make("span.mark", {}, `${run.workers_lost} lost`)]];
}

function links() {
  const found = [];
  if (temporal) found.push(make("a.button", { href: `${temporal}/${encodeURIComponent(RUN)}`, rel: "noreferrer" }, "Temporal ↗"));
  const place = run.source.wandb;
  if (wandb === "online" && place?.entity) {
    const path = [place.entity, place.project, "runs", RUN].map(encodeURIComponent).join("/");
    found.push(make("a.button", { href: `https://wandb.ai/${path}`, rel: "noreferrer" }, "W&B ↗"));
  }
  return found;
}

function button({ verb, label, look = "", sure, done }) {
  return make(`button${look}`, { type: "button", "data-verb": verb, click: async (event) => {
    if (sure && !(await isSure(sure()))) return;
    await act(event.target, async () => {
      const answer = await post(`/runs/${RUN}/${verb}`);
      toast(done);
      if (answer.run_id !== RUN) location.assign(`/runs/${answer.run_id}`);
      refresh();
    });
  } }, label);
}

function drawCourse() {
  charts.draw(course, other?.course ?? null, { log: byId("log").checked, smooth: byId("smooth").checked });
  samples.draw(course);
  if (other) showCompared(byId("differences"), run, other.run);
  else show(byId("differences"));
}

async function compareWith(id) {
  const address = new URL(location.href);
  id ? address.searchParams.set("with", id) : address.searchParams.delete("with");
  history.replaceState(null, "", address);
  other = null;
  byId("chart-grid").replaceChildren();
  charts = new Charts(byId("chart-grid"), run.kind);
  if (id) {
    const found = { run: await get(`/runs/${id}`), course: new Course(id, run.kind) };
    await found.course.read();
    other = found;
  }
  drawCourse();
}

async function begin() {
  course = new Course(RUN, run.kind);
  charts = new Charts(byId("chart-grid"), run.kind);
  samples = new SampleViewer(byId("samples-body"), RUN);
  const [page, wanted] = [await get(`/runs?limit=100&kind=${run.kind}`), new URLSearchParams(location.search).get("with")];
  const others = page.runs.filter((one) => one.run_id !== RUN);
  const option = (id, name) => make("option", { value: id, selected: id === wanted }, name);
  byId("compare").append(...others.map((one) => option(one.run_id, `${one.run.name ?? one.run_id} · ${one.state} · ${ago(one.created_at)}`)));
  if (wanted && !others.some((one) => one.run_id === wanted)) byId("compare").append(option(wanted, wanted));
  byId("compare").addEventListener("change", (event) => compareWith(event.target.value).catch(say));
  for (const id of ["log", "smooth"]) byId(id).addEventListener("change", drawCourse);
  showRequest(byId("request-body"), run);
  if (wanted) await compareWith(wanted).catch(say);
}

const say = (error) => { if (error instanceof Problem) toast(error.message, true); else throw error; };
const logs = new Logs(RUN);
let filesStamp = "";

async function turn() {
  try {
    run = await get(`/runs/${RUN}`);
  } catch (error) {
    if (error.status !== 404) throw error;
    show(byId("main"), make("div.card.empty", {}, make("h1", {}, "No such run"), make("p", {}, "It may be another tenant's. ", make("a", { href: "/" }, "All runs"))));
    return 0;
  }
  if (run.state === "running" && ["queued", "waiting_for_worker"].includes(run.phase) || !course) {
    const overview = await get("/overview");
    place = overview.waiting[RUN] ?? null;
    owners = overview.owners;
  } else place = null;
  drawHead();
  showIfNew(byId("timeline-body"), [run.timeline, Math.floor(now() / (run.state === "running" ? 1 : 1e9))], () => drawTimeline(run));
  if (!course) await begin();
  const isNew = await course.read();
  if (isNew || !charts.isDrawn) drawCourse();
  charts.isDrawn = true;
  const isOver = run.state !== "running";
  if (!course.steps.size && !course.trainSteps.size) showIfNew(byId("chart-grid"), ["none", isOver], () => make("p.muted", {}, !isOver ? "Charts come with the first step." : run.step ? "What its steps measured is not on record." : "No step was done: there is nothing to draw."));
  else if (byId("chart-grid").dataset.stamp) { delete byId("chart-grid").dataset.stamp; byId("chart-grid").querySelector("p.muted")?.remove(); }
  if (!samples.steps.length) showIfNew(byId("samples-body"), ["none", isOver], () => make("p.muted", {}, isOver ? "There were none." : "None yet."));
  const stamp = [run.state, run.dataset_report, run.adapter, run.epoch, course.saved, course.steps.size > 0].join();
  if (stamp !== filesStamp) {
    filesStamp = stamp;
    await Promise.all([showData(byId("data-body"), byId("preview"), run), showFiles(byId("checkpoints-body"), run), logs.read(run)]);
    showRequest(byId("request-body"), run);
  } else if (isNew) await logs.read(run);
  return run.state === "running" ? 1500 : 15000;
}

const refresh = repeat(turn);
