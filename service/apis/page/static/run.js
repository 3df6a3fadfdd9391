// One run: its status and its parts, and its comparison with another run.

import { Comparison } from "./comparison.js";
import { Data, Files, Logs, Request } from "./details.js";
import { acting, ago, clock, duration, Facts, FRAME, get, getText, html, isSure, money, mount, named, number, post,
  toast, under, useData, useEffect, useState } from "./page.js";
import { Evaluations, Samples } from "./samples.js";
import { Charts, RunMetrics, useChartOptions } from "./series.js";
import { canResume, etaSeconds, phaseText, progressBar, shownState, stateBadge, stoppedSeconds, tookSeconds,
} from "./status.js";
import { Timeline } from "./timeline.js";

const { run: RUN, temporal, wandb } = FRAME;
const PATH = `/runs/${RUN}`;
const SOURCES = { native: "API or CLI", page: "this page", tinker: "Tinker", openai: "OpenAI's API", art: "ART" };
const isRunning = (run) => run.state === "running";
const hasEnded = (run) => run.state === "failed" || run.state === "cancelled";
const AGAIN = "Start the same request as a new run, from the beginning?";
const again = { verb: "retry", label: "Run again", done: "A new run was started." };
const ACTIONS = [
  { verb: "pause", label: "Pause", when: isRunning,
    done: "The run pauses after the current step and saves a checkpoint." },
  { verb: "cancel", label: "Cancel", look: "danger", when: isRunning, done: "The run is being cancelled.",
    sure: (run) => (run.step ? "Cancel this run? It saves a checkpoint after the current step, and can be resumed."
      : "Cancel this run? It has not completed a step yet.") },
  { verb: "resume", label: "Resume", look: "strong", when: canResume,
    done: "The run continues from its last checkpoint." },
  { ...again, when: (run) => hasEnded(run) && canResume(run), sure: () => AGAIN },
  { ...again, look: "strong", when: (run) => hasEnded(run) && !canResume(run),
    sure: () => `${AGAIN} It will fail again unless you have fixed the cause.` },
];

function Actions({ run, refresh }) {
  const press = ({ verb, done, sure }) => acting(async () => {
    if (sure && !(await isSure(sure(run)))) return;
    const answer = await post(`${PATH}/${verb}`);
    toast(done);
    if (answer.run_id !== RUN) location.assign(`/runs/${answer.run_id}`);
    refresh();
  });
  const at = run.source.wandb;
  const links = [
    temporal && ["Temporal ↗", `${temporal}/${encodeURIComponent(RUN)}`],
    wandb === "online" && at?.entity && ["W&B ↗",
      `https://wandb.ai/${[at.entity, at.project, "runs", RUN].map(encodeURIComponent).join("/")}`],
  ].filter(Boolean);
  return [
    ...ACTIONS.filter(({ when }) => when(run)).map((one) => html`<button type="button" key=${one.label}
      class=${one.look} data-verb=${one.verb} onClick=${press(one)}>${one.label}</button>`),
    ...links.map(([name, href]) => html`<a class="button" href=${href} rel="noreferrer">${name}</a>`),
  ];
}

const Notices = ({ run }) => html`
  ${run.paused_by && ["running", "paused"].includes(run.state) && html`<p class="notice">
    Paused by a limit: ${run.paused_by}. The run continues by itself when the limit is raised.</p>`}
  ${run.problem && html`<p class="problem" role="alert">${run.problem.message}</p>`}
  ${(run.notices ?? []).map((notice) => html`<p class="notice">${notice}</p>`)}`;

function Summary({ run, place, owners, evaluated }) {
  const eta = etaSeconds(run), isOver = isRunning(run) && run.num_steps > 0 && run.step === run.num_steps;
  const none = isRunning(run) ? "no step yet" : "no step completed";
  const done = run.num_steps ? `step ${number(run.step)} of ${number(run.num_steps)}`
    : run.step ? `step ${number(run.step)}` : none;
  const part = evaluated?.part === "samples" ? "samples" : "held-out rows";
  const doing = evaluated ? `evaluation: ${Math.round(100 * evaluated.fraction)} % of the ${part}`
    : isOver ? phaseText(run) : "";
  return html`
    <${Facts} id="facts" look="overview" pairs=${factsOf(run, place, owners)} />
    <div id="progress">${progressBar(run, evaluated?.fraction ?? null)}
      <div class="progress-text"><span>${[done, doing].filter(Boolean).join(" · ")}</span>
        <span>${eta === null ? "" : `about ${duration(eta)} left`}</span></div></div>`;
}

/** Names and values of the summary; false for those that a run does not have. */
function factsOf(run, place, owners) {
  const state = shownState(run), { schedule, api, metadata } = run.source, { cost, metrics, precision } = run;
  const [measure, value] = run.kind === "rl" ? ["Reward", metrics.reward_mean] : ["Loss", metrics.loss];
  const name = schedule?.split("/").pop(), stopped = run.started_at ? stoppedSeconds(run) : 0;
  const queue = place ? `, position ${place} in the queue` : "";
  const isOpen = isRunning(run) && cost?.estimated !== null;
  return [
    ["State", stateBadge(state)],
    isRunning(run) && (run.phase !== state || place) && ["Phase", phaseText(run) + queue],
    Number.isFinite(value) && [measure, number(value)],
    metrics.broken_trajectories > 0 && ["Trajectories dropped in the last step", dropped(metrics)],
    isRunning(run) && run.samples_now && ["Samples", samplesNow(run.samples_now)],
    ["Duration", [duration(tookSeconds(run)), stopped > 1 && under(`${duration(stopped)} of it paused or stopped`)]],
    ["GPU time", duration(run.gpu_seconds || null)],
    cost && ["Cost", [money(cost.so_far, cost.currency),
      isOpen && under(`about ${money(cost.estimated, cost.currency)} at its end`)]],
    // One after another: a pause gives a worker back, and a resumed run has another.
    run.epoch > 0 && ["Workers", [number(run.epoch),
      run.workers_lost > 0 && html` <span class="mark">${run.workers_lost} lost</span>`]],
    ["Submitted", html`<span title=${clock(run.created_at)}>${ago(run.created_at)}</span>`],
    ["Owner", owners[run.owner] ?? run.owner ?? "–"],
    ["Source", name ? `schedule ${name}` : SOURCES[api]],
    ["Model", named(run.run.model)],
    precision?.reason && ["Precision", [precision.dtype, under(precision.reason)]],
    run.version && ["Published", `${run.name} v${run.version}`],
    ...Object.entries(metadata),
  ];
}

/** How many samples or episodes run, wait and have ended, and why. */
function samplesNow({ running, waiting, before, ended, errors }) {
  const ends = Object.entries(ended), all = ends.reduce((sum, [, num]) => sum + num, 0);
  const reasons = ends.sort().map(([end, num]) => `${end.replaceAll("_", " ")} ${number(num)}`).join(", ");
  return [`${number(running)} running, ${number(waiting)} waiting, ${number(all)} ended`, reasons && under(reasons),
    before > 0 && under(`${number(before)} from before an interruption`), ...errors.map((error) => under(error))];
}

/** The number of trajectories that could not be trained, and the rules that dropped them. */
function dropped(metrics) {
  const rules = Object.entries(metrics).filter(([name]) => name.startsWith("dropped_for_"));
  const reason = (rule) => (rule === "differs" ? "text differs from the sampled tokens" : rule.replaceAll("_", " "));
  const told = rules.map(([name, count]) => `${reason(name.replace("dropped_for_", ""))}: ${number(count)}`);
  return html`<span class="mark">${number(metrics.broken_trajectories)} of ${number(metrics.trajectories)}</span>
    ${under(told.join(", "))}`;
}

/** The run that this one is compared with, by the address: {id, run, metrics}, and a function that takes another id. */
function useOther(kind) {
  const [other, setOther] = useState({ id: new URLSearchParams(location.search).get("with") });
  useEffect(() => {
    const address = new URL(location.href), { id } = other;
    id ? address.searchParams.set("with", id) : address.searchParams.delete("with");
    history.replaceState(null, "", address);
    if (!id || !kind) return;
    const metrics = new RunMetrics(id, kind);
    Promise.all([get(`/runs/${encodeURIComponent(id)}`), metrics.read()]).then(
      ([run]) => setOther((now) => (now.id === id ? { id, run, metrics } : now)),
      (error) => toast(error.message, true),
    );
  }, [other.id, kind]);
  return [other, (id) => setOther({ id })];
}

function CompareWith({ kind, other, choose }) {
  const [page] = useData(() => get(`/runs?limit=100&kind=${kind}`));
  const others = page?.runs.filter((one) => one.run_id !== RUN) ?? [];
  const isListed = !other.id || others.some((one) => one.run_id === other.id);
  const told = (one) => `${one.run.name ?? one.run_id} · ${one.state} · ${ago(one.created_at)}`;
  return html`<label class="field">Compare with
    <select id="compare" value=${other.id ?? ""} onChange=${(event) => choose(event.target.value)}>
      <option value="">nothing</option>
      ${others.map((one) => html`<option key=${one.run_id} value=${one.run_id}>${told(one)}</option>`)}
      ${!isListed && html`<option value=${other.id}>${other.id}</option>`}
    </select></label>`;
}

let metrics = null, overview = { owners: {} }, left = null, leftStamp;

/** What a run left behind, read again if something has changed. */
async function readLeft(run, isNew) {
  const stamp = String([run.state, run.dataset_report, run.adapter, run.epoch, metrics.saved, metrics.version > 0]);
  if (stamp !== leftStamp) {
    const [report, checkpoints, files, jobs, logs] = await Promise.all([
      get(`${PATH}/report`), get(`${PATH}/checkpoints`), run.adapter ? get(`${PATH}/files`) : [], get(`${PATH}/jobs`),
      getText(`${PATH}/logs`),
    ]);
    left = { report, checkpoints, files, jobs, logs };
  } else if (isNew) left = { ...left, logs: await getText(`${PATH}/logs`) };
  leftStamp = stamp;
  return left;
}

function RunPage() {
  const [run, setRun] = useState(null), [other, choose] = useOther(run?.kind), [options, fields] = useChartOptions();
  const [found, refresh] = useData(async () => {
    const status = await get(PATH).catch((error) => {
      if (error.status === 404) return null;
      throw error;
    });
    if (!status) return { isMissing: true };
    const isWaiting = isRunning(status) && ["queued", "waiting_for_worker"].includes(status.phase);
    if (isWaiting || !metrics) overview = await get("/overview");
    setRun({ ...status, place: isWaiting ? overview.waiting[RUN] : null });
    metrics ??= new RunMetrics(RUN, status.kind);
    const isNew = await metrics.read();
    return { isRunning: isRunning(status), ...await readLeft(status, isNew) };
  }, (data) => (data.isMissing ? 0 : data.isRunning ? 1500 : 15000));
  if (found?.isMissing) {
    return html`<div class="card empty"><h1>No such run</h1>
      <p>It may belong to another tenant. <a href="/">All runs</a></p></div>`;
  }
  const name = run?.run.name ?? RUN;
  if (run) document.title = `${shownState(run)} · ${name} · Longshore`;
  const isOver = run && !isRunning(run);
  const evaluated = run && isRunning(run) ? metrics?.evaluating : null;
  const noCharts = !isOver ? "Charts appear after the first step."
    : run.step ? "This run recorded no metrics." : "The run completed no step, so there is nothing to draw.";
  const part = (id, title, body) => html`<section id=${id} class="card" aria-labelledby=${`${id}-h`}>
    <h2 id=${`${id}-h`}>${title}</h2><div id=${`${id}-body`}>${body}</div></section>`;
  return html`
    <div class="heading run-heading">
      <div><p class="crumb"><a href="/">Runs</a> / <code>${RUN}</code></p><h1 id="name">${name}</h1></div>
      <div class="actions" id="actions" role="group" aria-label="Actions">
        ${run && html`<${Actions} run=${run} refresh=${refresh} />`}</div>
    </div>
    <div id="problem">${run && html`<${Notices} run=${run} />`}</div>
    <section class="card" aria-label="Summary">
      ${run && html`<${Summary} run=${run} place=${run.place} owners=${overview.owners} evaluated=${evaluated} />`}
    </section>
    <nav class="sections" aria-label="Parts of this page">
      ${["Charts", "Evaluations", "Timeline", "Samples", "Data", "Logs", "Checkpoints", "Request"].map((title) => html`
        <a href=${`#${title.toLowerCase()}`}>${title}</a>`)}
    </nav>
    <section id="charts" aria-labelledby="charts-h">
      <div class="section-head"><h2 id="charts-h">Charts</h2>
        ${run && html`<${CompareWith} kind=${run.kind} other=${other} choose=${choose} />`}
        <a id="compare-more" href=${`/compare?run=${encodeURIComponent(RUN)}`}>Compare several</a>
        ${fields}
      </div>
      ${found && html`<${Charts} run=${metrics} other=${other.metrics} ...${options} none=${noCharts} />`}
      <div id="differences">${run && other.run && html`<${Comparison} runs=${[run, other.run]} />`}</div>
    </section>
    ${part("evaluations", "Evaluations", found && html`<${Evaluations} metrics=${metrics} best=${run.metrics.best_step}
      none=${isOver ? "There were none." : "None yet."} />`)}
    ${part("timeline", "Timeline", run && html`<${Timeline} run=${run} />`)}
    ${part("samples", "Samples", found && html`
      <${Samples} metrics=${metrics} none=${isOver ? "There were none." : "None yet."} />`)}
    ${part("data", "Data", found && html`<${Data} run=${run} report=${found.report} />`)}
    <section id="logs" class="card" aria-labelledby="logs-h"><${Logs} text=${found?.logs ?? ""} /></section>
    ${part("checkpoints", "Checkpoints and files", found && html`
      <${Files} run=${run} checkpoints=${found.checkpoints} files=${found.files} />`)}
    ${part("request", "Request and job files", found && html`<${Request} run=${run} jobs=${found.jobs} />`)}`;
}

mount(html`<${RunPage} />`);
