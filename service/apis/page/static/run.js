// One run: its status and its parts, each brought up to date where it has changed, and its comparison with another run.

import { comparison } from "./comparison.js";
import { Logs, showData, showFiles, showRequest } from "./details.js";
import { Charts, RunMetrics } from "./series.js";
import { SampleViewer } from "./samples.js";
import { drawTimeline } from "./timeline.js";
import { act, ago, byId, clock, duration, get, isSure, make, money, named, now, number, post, Problem, repeat, show, showIfNew, toast } from "./page.js";
import { canResume, etaSeconds, phaseText, progressBar, shownState, stateBadge, stoppedSeconds, tookSeconds } from "./status.js";

const RUN = document.body.dataset.run;
const { temporal, wandb } = document.body.dataset;
let run, metrics, charts, samples, other = null, place = null, owners = {};

const hasEnded = (one) => one.state === "failed" || one.state === "cancelled";
const AGAIN = "Start the same request as a new run, from the beginning?";
const ACTIONS = [
  { verb: "pause", label: "Pause", when: (one) => one.state === "running", done: "The run pauses after the current step and saves a checkpoint." },
  { verb: "cancel", label: "Cancel", look: ".danger", when: (one) => one.state === "running", sure: cancelQuestion, done: "The run is being cancelled." },
  { verb: "resume", label: "Resume", look: ".strong", when: canResume, done: "The run continues from its last checkpoint." },
  { verb: "retry", label: "Run again", when: (one) => hasEnded(one) && canResume(one), sure: () => AGAIN, done: "A new run was started." },
  { verb: "retry", label: "Run again", look: ".strong", when: (one) => hasEnded(one) && !canResume(one), sure: () => `${AGAIN} It will fail again unless you have fixed the cause.`, done: "A new run was started." },
];
const SOURCES = { native: "API or CLI", page: "this page", tinker: "Tinker", openai: "OpenAI's API", art: "ART" };

function cancelQuestion() {
  return run.step ? "Cancel this run? It saves a checkpoint after the current step, and can be resumed." : "Cancel this run? It has not completed a step yet.";
}

function drawHead() {
  const state = shownState(run);
  byId("name").textContent = run.run.name ?? run.run_id;
  document.title = `${state} · ${run.run.name ?? run.run_id} · Longshore`;
  showIfNew(byId("problem"), [run.problem, run.notices, run.paused_by, run.state], () => [
    run.paused_by && ["running", "paused"].includes(run.state) && make("p.notice", {}, `Paused by a limit: ${run.paused_by}. The run continues by itself when the limit is raised.`),
    run.problem && make("p.problem", { role: "alert" }, run.problem.message),
    ...(run.notices ?? []).map((notice) => make("p.notice", {}, notice)),
  ]);
  showIfNew(byId("actions"), [run.state, run.problem], () => [...ACTIONS.filter((one) => one.when(run)).map(button), ...links()]);
  showIfNew(byId("facts"), [run, place, owners, Math.floor(now())], () => summary(state).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  const eta = etaSeconds(run);
  const none = run.state === "running" ? "no step yet" : "no step completed";
  const done = run.num_steps ? `step ${number(run.step)} of ${number(run.num_steps)}` : run.step ? `step ${number(run.step)}` : none;
  const evaluated = run.state === "running" ? metrics?.evaluating ?? null : null;
  const doing = evaluated !== null ? `evaluation: ${Math.round(100 * evaluated.fraction)} % of the ${evaluated.part === "samples" ? "samples" : "held-out rows"}` : run.state === "running" && run.step === run.num_steps ? phaseText(run) : "";
  show(byId("progress"), progressBar(run, evaluated?.fraction ?? null), make("div.progress-text", {}, make("span", {}, [done, doing].filter(Boolean).join(" · ")), make("span", {}, eta === null ? "" : `about ${duration(eta)} left`)));
}

/** Names and values of the summary; those that a run does not have are left out. */
function summary(state) {
  const { schedule, api, metadata } = run.source;
  const [measure, value] = run.kind === "rl" ? ["Reward", run.metrics.reward_mean] : ["Loss", run.metrics.loss];
  const name = schedule?.split("/").pop(), stopped = run.started_at ? stoppedSeconds(run) : 0;
  return [
    ["State", stateBadge(state)],
    ...(run.state === "running" && (run.phase !== state || place) ? [["Phase", phaseText(run) + (place ? `, position ${place} in the queue` : "")]] : []),
    ...(Number.isFinite(value) ? [[measure, number(value)]] : []),
    ...(run.metrics.broken_trajectories ? [["Trajectories dropped in the last step", dropped(run.metrics)]] : []),
    ["Duration", [duration(tookSeconds(run)), stopped > 1 && make("span.muted.small.under", {}, `${duration(stopped)} of it paused or stopped`)]],
    ["GPU time", run.gpu_seconds ? duration(run.gpu_seconds) : "–"],
    ...(run.cost ? [["Cost", cost()]] : []),
    ...(run.epoch ? [["Workers", workers()]] : []),
    ["Submitted", make("span", { title: clock(run.created_at) }, ago(run.created_at))],
    ["Owner", owners[run.owner] ?? run.owner ?? "–"],
    ["Source", name ? `schedule ${name}` : SOURCES[api]],
    ["Model", named(run.run.model)],
    ...(run.precision?.reason ? [["Precision", [run.precision.dtype, make("span.muted.small.under", {}, run.precision.reason)]]] : []),
    ...(run.version ? [["Published", `${run.name} v${run.version}`]] : []),
    ...Object.entries(metadata),
  ];
}

/** The number of trajectories that could not be trained, and the rules that dropped them. */
function dropped(metrics) {
  const rules = Object.entries(metrics).filter(([name]) => name.startsWith("dropped_for_"));
  const reasons = rules.map(([name, count]) => `${reasonOf(name)}: ${number(count)}`).join(", ");
  return [make("span.mark", {}, `${number(metrics.broken_trajectories)} of ${number(metrics.trajectories)}`), make("span.muted.small.under", {}, reasons)];
}

function reasonOf(metric) {
  const rule = metric.replace("dropped_for_", "").replaceAll("_", " ");
  return rule === "differs" ? "text differs from the sampled tokens" : rule;
}

/** What it has cost, and will at its end by its own estimate. */
function cost() {
  const { currency, so_far, estimated } = run.cost;
  const isOpen = run.state === "running" && estimated !== null;
  return [money({ amount: so_far, currency }), isOpen && make("span.muted.small.under", {}, `about ${money({ amount: estimated, currency })} at its end`)];
}

/** The number of workers it had, one after another: a pause gives one back, and a resumed run has another. */
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

function drawMetrics() {
  charts.draw(metrics, other?.metrics ?? null, { log: byId("log").checked, smooth: byId("smooth").checked });
  samples.draw(metrics);
  show(byId("differences"), other && make("div.card", {}, comparison([run, other.run])));
}

async function compareWith(id) {
  const address = new URL(location.href);
  id ? address.searchParams.set("with", id) : address.searchParams.delete("with");
  history.replaceState(null, "", address);
  other = null;
  byId("chart-grid").replaceChildren();
  charts = new Charts(byId("chart-grid"), run.kind);
  if (id) {
    const found = { run: await get(`/runs/${id}`), metrics: new RunMetrics(id, run.kind) };
    await found.metrics.read();
    other = found;
  }
  drawMetrics();
}

async function begin() {
  metrics = new RunMetrics(RUN, run.kind);
  charts = new Charts(byId("chart-grid"), run.kind);
  samples = new SampleViewer(byId("samples-body"), RUN);
  const [page, wanted] = [await get(`/runs?limit=100&kind=${run.kind}`), new URLSearchParams(location.search).get("with")];
  const others = page.runs.filter((one) => one.run_id !== RUN);
  const option = (id, name) => make("option", { value: id, selected: id === wanted }, name);
  byId("compare").append(...others.map((one) => option(one.run_id, `${one.run.name ?? one.run_id} · ${one.state} · ${ago(one.created_at)}`)));
  if (wanted && !others.some((one) => one.run_id === wanted)) byId("compare").append(option(wanted, wanted));
  byId("compare").addEventListener("change", (event) => compareWith(event.target.value).catch(say));
  for (const id of ["log", "smooth"]) byId(id).addEventListener("change", drawMetrics);
  showRequest(byId("request-body"), run);
  if (wanted) await compareWith(wanted).catch(say);
}

byId("compare-more").href = `/compare?run=${encodeURIComponent(RUN)}`;
const say = (error) => { if (error instanceof Problem) toast(error.message, true); else throw error; };
const logs = new Logs(RUN);
let filesStamp = "";

async function turn() {
  try {
    run = await get(`/runs/${RUN}`);
  } catch (error) {
    if (error.status !== 404) throw error;
    show(byId("main"), make("div.card.empty", {}, make("h1", {}, "No such run"), make("p", {}, "It may belong to another tenant. ", make("a", { href: "/" }, "All runs"))));
    return 0;
  }
  if (run.state === "running" && ["queued", "waiting_for_worker"].includes(run.phase) || !metrics) {
    const overview = await get("/overview");
    place = overview.waiting[RUN] ?? null;
    owners = overview.owners;
  } else place = null;
  drawHead();
  showIfNew(byId("timeline-body"), [run.timeline, Math.floor(now() / (run.state === "running" ? 1 : 1e9))], () => drawTimeline(run));
  if (!metrics) await begin();
  const isNew = await metrics.read();
  if (isNew || !charts.isDrawn) drawMetrics();
  charts.isDrawn = true;
  const isOver = run.state !== "running";
  if (!metrics.steps.size && !metrics.trainSteps.size) showIfNew(byId("chart-grid"), ["none", isOver], () => make("p.muted", {}, !isOver ? "Charts appear after the first step." : run.step ? "This run recorded no metrics." : "The run completed no step, so there is nothing to draw."));
  else if (byId("chart-grid").dataset.stamp) { delete byId("chart-grid").dataset.stamp; byId("chart-grid").querySelector("p.muted")?.remove(); }
  if (!samples.steps.length) showIfNew(byId("samples-body"), ["none", isOver], () => make("p.muted", {}, isOver ? "There were none." : "None yet."));
  const stamp = [run.state, run.dataset_report, run.adapter, run.epoch, metrics.saved, metrics.steps.size > 0].join();
  if (stamp !== filesStamp) {
    filesStamp = stamp;
    await Promise.all([showData(byId("data-body"), byId("preview"), run), showFiles(byId("checkpoints-body"), run), logs.read(run)]);
    showRequest(byId("request-body"), run);
  } else if (isNew) await logs.read(run);
  return run.state === "running" ? 1500 : 15000;
}

const refresh = repeat(turn);
