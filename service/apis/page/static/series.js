// What a run measured, gathered from its events as they come, and which charts show it.

import { Chart } from "./chart.js";
import { bytes, duration, get, html, useMemo, useState } from "./page.js";

/** A run's events and train steps so far. `read` asks for new ones, and returns whether there were any. */
export class RunMetrics {
  constructor(runId, kind) {
    Object.assign(this, { runId, kind, cursor: null, after: null, evaluating: null, version: 0 });
    this.steps = new Map();
    this.evaluations = new Map();
    this.trainSteps = new Map();
    this.starts = [];
    this.saved = 0;
  }

  async read() {
    let isNew = false;
    for (;;) {
      const after = this.cursor ? `&after=${encodeURIComponent(this.cursor)}` : "";
      const page = await get(`/runs/${this.runId}/events?limit=5000${after}`);
      this.cursor = page.next ?? this.cursor;
      page.events.forEach(({ event }) => this.take(event));
      isNew ||= page.events.length > 0;
      if (page.events.length < 5000) break;
    }
    while (this.kind === "rl") {
      const after = this.after === null ? "" : `&after=${this.after}`;
      const page = await get(`/runs/${this.runId}/steps?limit=500${after}`);
      for (const step of page.steps) if (step.same_as === null) this.trainSteps.set(step.step, step);
      this.after = page.next;
      isNew ||= page.steps.length > 0;
      if (!page.has_more) break;
    }
    this.version += isNew;
    return isNew;
  }

  take(event) {
    // In order of fence: if two workers did a step, what comes later replaces what came before.
    if (event.event === "step") this.steps.set(event.step, event.metrics);
    if (event.event === "evaluated") this.evaluations.set(event.step, event);
    const isRestart = event.event === "started" && event.first_step > 0 && this.kind !== "rl";
    if (isRestart) this.starts.push({ step: event.first_step });
    if (event.event === "saved") this.saved += 1;
    this.evaluating = event.event === "evaluating" ? event : null;  // any other event comes after its end
  }

  /** Points [step, value] of a metric of optimizer steps. */
  of(name) {
    return points(this.steps, (metrics) => metrics[name]);
  }

  evaluated(name) {
    return points(this.evaluations, (event) => event.metrics[name]);
  }

  /** [step, metrics] of each evaluation, in order of step; their names without `eval_`. */
  allEvaluated() {
    const ofPrompts = ([step, { metrics }]) => [step, Object.fromEntries(Object.entries(metrics)
      .filter(([name]) => name.startsWith("eval_")).map(([name, value]) => [name.slice("eval_".length), value]))];
    const found = this.kind === "rl" ? [...this.trainSteps].map(ofPrompts)
      : [...this.evaluations].map(([step, { metrics }]) => [step, metrics]);
    return found.filter(([, metrics]) => Object.keys(metrics).length).sort(([a], [b]) => a - b);
  }

  trained(name) {
    return points(this.trainSteps, (step) => step.metrics[name]);
  }

  band(middle, half) {
    const found = [...this.trainSteps].filter(([, step]) => half in step.metrics).sort(([a], [b]) => a - b);
    return found.map(([x, { metrics }]) => [x, metrics[middle] - metrics[half], metrics[middle] + metrics[half]]);
  }
}

function points(rows, value) {
  return [...rows].map(([x, row]) => [x, value(row)]).filter(([, y]) => Number.isFinite(y)).sort(([a], [b]) => a - b);
}

const step = (name, label = name) => [label, (run) => run.of(name)];
const held = (name, label) => [label, (run) => run.evaluated(name), { exact: true }];
const train = (name, label) => [label, (run) => run.trained(name), { exact: name.startsWith("eval_") }];
const seconds = (name) => [name, (run) => run.trained(`${name}_seconds`), { columns: true }];

const TRAIN_STEP = "train step";
const BY_STEP = [
  { title: "Learning rate", lines: [[...step("learning_rate", "rate"), { exact: true }]] },
  { title: "Gradient norm", lines: [step("grad_norm", "norm")] },
  { title: "Throughput, tokens/s", lines: [step("tokens_per_s", "tokens/s")] },
  { title: "Device memory", format: bytes, fromZero: true,
    lines: [[...step("memory_bytes", "memory"), { exact: true }]] },
];
const both = (name, label = "train") => [step(name, label), held(name, "held out")];
const LOSS = { title: "Loss", lines: both("loss") };
const GRADED = { title: "Reward of held-out prompts", lines: [held("reward_mean", "held out")] };
const ACCURACY = { title: "Preference accuracy", lines: both("preference_accuracy") };
const MARGIN = { title: "Reward margin", lines: both("reward_margin", "margin") };
const PLANS = {
  sft: [LOSS, GRADED, ...BY_STEP],
  distill: [
    { title: "Divergence from the teacher", lines: both("loss") },
    { title: "Negative log-likelihood of the rows", lines: both("nll") },
    GRADED,
    ...BY_STEP,
  ],
  dpo: [
    LOSS,
    MARGIN,
    ACCURACY,
    { title: "Rewards of the answers", lines: [step("reward_chosen", "chosen"), step("reward_rejected", "rejected")] },
    GRADED,
    ...BY_STEP,
  ],
  reward: [
    LOSS,
    ACCURACY,
    MARGIN,
    { title: "Calibration error", lines: [held("calibration_error", "held out")], fromZero: true },
    ...BY_STEP,
  ],
  rl: [
    { title: "Reward", xName: TRAIN_STEP, band: ["reward_mean", "reward_std"],
      lines: [train("reward_mean", "mean"), train("eval_reward_mean", "held out")] },
    { title: "Spread within groups", xName: TRAIN_STEP, lines: [
      train("reward_spread_mean", "standard deviation"), train("zero_variance_share", "share of groups with none"),
    ] },
    { title: "KL", lines: [
      step("kl_reference", "to the reference"), step("kl_sampler_trainer", "sampler to trainer"),
      step("kl_old_new", "old to new"),
    ] },
    { title: "Entropy", lines: [step("entropy")] },
    { title: "Clipped tokens", fromZero: true, lines: [
      step("clip_high_fraction", "high"), step("clip_low_fraction", "low"), step("clip_dual_fraction", "dual"),
    ] },
    { title: "Length of answers, tokens", xName: TRAIN_STEP,
      lines: [train("response_tokens_mean", "mean"), train("response_tokens_max", "longest")] },
    { title: "Cut off at the limit", xName: TRAIN_STEP, fromZero: true,
      lines: [train("truncation_rate", "share"), train("eval_truncation_rate", "held out")] },
    { title: "Where the time goes", xName: TRAIN_STEP, format: duration,
      lines: ["sampling", "grading", "training", "publishing", "evaluating"].map(seconds) },
    { title: "Loss", lines: [step("loss")] },
    ...BY_STEP,
  ],
};

const seriesOf = (plan, run) =>
  plan.lines.map(([name, values, more], color) => ({ name, color, points: values(run), ...more })).filter(hasPoints);
const hasPoints = (one) => one.points.length > 0;

/** Props of the charts of a run, and beside it of another one, in a fixed order. */
function chartsOf(run, other) {
  return (PLANS[run.kind] ?? PLANS.sft).map((plan) => {
    const compared = other ? seriesOf(plan, other).filter((one) => !one.columns) : [];
    return {
      ...plan,
      series: [...seriesOf(plan, run), ...compared.map((one) => ({ ...one, other: true }))],
      bands: plan.band ? [{ color: 0, points: run.band(...plan.band) }] : [],
      marks: plan.xName ? [] : run.starts,
    };
  });
}

/** Props of the charts of several runs, {name, metrics}: a chart for each of their measures, a line for each run. */
function overlaidCharts(runs) {
  const found = new Map();
  for (const kind of new Set(runs.map((run) => run.metrics.kind))) {
    for (const plan of PLANS[kind] ?? []) {
      for (const [label, values, more] of plan.lines.filter(([, , given]) => !given?.columns)) {
        const title = plan.lines.length > 1 ? `${plan.title}: ${label}` : plan.title;
        if (!found.has(title)) found.set(title, { ...plan, title, bands: [], marks: [], series: [] });
        runs.forEach(({ name, metrics }, color) => {
          const one = { name, color, points: metrics.kind === kind ? values(metrics) : [], ...more };
          found.get(title).series.push(one);
        });
      }
    }
  }
  return [...found.values()];
}

const FIRST = matchMedia("(max-width: 760px)").matches ? 4 : Infinity;  // charts that are not folded

/** How charts are drawn: the fields for it, and the charts of `runs` or of `run` beside `other`. */
export function useChartOptions() {
  const [smooth, setSmooth] = useState(0.6), [log, setLog] = useState(false);
  return [{ smooth, log }, html`
    <label class="field">Smoothing <input type="range" id="smooth" min="0" max="0.98" step="0.02" value=${smooth}
      onInput=${(event) => setSmooth(Number(event.target.value))} /></label>
    <label class="check"><input type="checkbox" id="log" checked=${log}
      onChange=${(event) => setLog(event.target.checked)} /> log scale</label>`];
}

/** The charts that have something to show, or the text `none`. On a phone all but the first are folded. */
export function Charts({ run, other, runs, smooth, log, none }) {
  const versions = [run, other, ...(runs ?? []).map(({ metrics }) => metrics)].map((one) => one?.version);
  const found = useMemo(() => {
    const all = runs ? overlaidCharts(runs) : chartsOf(run, other);
    return all.map((one) => ({ ...one, series: one.series.filter(hasPoints) })).filter(({ series }) => series.length);
  }, [String(versions), other, runs?.length]);
  const charts = found.map((one) => html`
    <${Chart} key=${one.title} ...${one} smooth=${smooth} log=${log && !one.xName} />`);
  return html`<div id="chart-grid" class="chart-grid">
    ${charts.length ? charts.slice(0, FIRST) : html`<p class="muted">${none}</p>`}
    ${charts.length > FIRST && html`<details class="more"><summary>More charts</summary>
      <div class="chart-grid">${charts.slice(FIRST)}</div></details>`}
  </div>`;
}
