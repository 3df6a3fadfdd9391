// What a run measured, gathered from its events as they come, and which charts show it.

import { Chart } from "./chart.js";
import { bytes, duration, get, make, number, show } from "./page.js";

/** A run's events and train steps so far. `read` asks for those that are new, and says whether there were any. */
export class RunMetrics {
  constructor(runId, kind) {
    Object.assign(this, { runId, kind, cursor: null, after: null, evaluating: null });
    this.steps = new Map();
    this.evaluations = new Map();
    this.trainSteps = new Map();
    this.starts = [];
    this.saved = 0;
  }

  async read() {
    let isNew = false;
    for (;;) {
      const page = await get(`/runs/${this.runId}/events?limit=5000${this.cursor ? `&after=${encodeURIComponent(this.cursor)}` : ""}`);
      this.cursor = page.next ?? this.cursor;
      page.events.forEach(({ event }) => this.take(event));
      isNew ||= page.events.length > 0;
      if (page.events.length < 5000) break;
    }
    while (this.kind === "rl") {
      const page = await get(`/runs/${this.runId}/steps?limit=500${this.after === null ? "" : `&after=${this.after}`}`);
      page.steps.filter((step) => step.same_as === null).forEach((step) => this.trainSteps.set(step.step, step));
      this.after = page.next;
      isNew ||= page.steps.length > 0;
      if (!page.has_more) break;
    }
    return isNew;
  }

  take(event) {
    // In order of fence: where two workers did a step, what comes later replaces what came before.
    if (event.event === "step") this.steps.set(event.step, event.metrics);
    if (event.event === "evaluated") this.evaluations.set(event.step, event);
    if (event.event === "started" && event.first_step > 0 && this.kind !== "rl") this.starts.push({ step: event.first_step });
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

  trained(name) {
    return points(this.trainSteps, (step) => step.metrics[name]);
  }

  band(middle, half) {
    const found = [...this.trainSteps].filter(([, step]) => half in step.metrics).sort(([a], [b]) => a - b);
    return found.map(([x, { metrics }]) => [x, metrics[middle] - metrics[half], metrics[middle] + metrics[half]]);
  }

  names() {
    return new Set([...this.steps.values()].flatMap((metrics) => Object.keys(metrics)));
  }
}

function points(rows, value) {
  return [...rows].map(([x, row]) => [x, value(row)]).filter(([, y]) => Number.isFinite(y)).sort(([a], [b]) => a - b);
}

const step = (name, label = name) => [label, (run) => run.of(name)];
const held = (name, label) => [label, (run) => run.evaluated(name), { exact: true }];
const train = (name, label) => [label, (run) => run.trained(name), { exact: name.startsWith("eval_") }];
const seconds = (name) => [name, (run) => run.trained(`${name}_seconds`), { columns: true }];

const BY_STEP = [
  { title: "Learning rate", lines: [[...step("learning_rate", "rate"), { exact: true }]] },
  { title: "Gradient norm", lines: [step("grad_norm", "norm")] },
  { title: "Throughput, tokens/s", lines: [step("tokens_per_s", "tokens/s")] },
  { title: "Device memory", lines: [[...step("memory_bytes", "memory"), { exact: true }]], format: bytes, fromZero: true },
];
const FIRST = matchMedia("(max-width: 760px)").matches ? 4 : Infinity;  // charts that are not folded
const PLANS = {
  sft: [{ title: "Loss", lines: [step("loss", "train"), held("loss", "held out")] }, ...BY_STEP],
  distill: [
    { title: "Divergence from the teacher", lines: [step("loss", "train"), held("loss", "held out")] },
    { title: "Negative log-likelihood of the rows", lines: [step("nll", "train"), held("nll", "held out")] },
    ...BY_STEP,
  ],
  dpo: [
    { title: "Loss", lines: [step("loss", "train"), held("loss", "held out")] },
    { title: "Reward margin", lines: [step("reward_margin", "margin"), held("reward_margin", "held out")] },
    { title: "Preference accuracy", lines: [step("preference_accuracy", "train"), held("preference_accuracy", "held out")] },
    { title: "Rewards of the answers", lines: [step("reward_chosen", "chosen"), step("reward_rejected", "rejected")] },
    ...BY_STEP,
  ],
  reward: [
    { title: "Loss", lines: [step("loss", "train"), held("loss", "held out")] },
    { title: "Preference accuracy", lines: [step("preference_accuracy", "train"), held("preference_accuracy", "held out")] },
    { title: "Reward margin", lines: [step("reward_margin", "margin"), held("reward_margin", "held out")] },
    { title: "Calibration error", lines: [held("calibration_error", "held out")], fromZero: true },
    ...BY_STEP,
  ],
  rl: [
    { title: "Reward", xName: "train step", lines: [train("reward_mean", "mean"), train("eval_reward_mean", "held out")], band: ["reward_mean", "reward_std"] },
    { title: "Spread within groups", xName: "train step", lines: [train("reward_spread_mean", "standard deviation"), train("zero_variance_share", "share of groups with none")] },
    { title: "KL", lines: [step("kl_reference", "to the reference"), step("kl_sampler_trainer", "sampler to trainer"), step("kl_old_new", "old to new")] },
    { title: "Entropy", lines: [step("entropy")] },
    { title: "Clipped tokens", lines: [step("clip_high_fraction", "high"), step("clip_low_fraction", "low"), step("clip_dual_fraction", "dual")], fromZero: true },
    { title: "Length of answers, tokens", xName: "train step", lines: [train("response_tokens_mean", "mean"), train("response_tokens_max", "longest")] },
    { title: "Cut off at the limit", xName: "train step", lines: [train("truncation_rate", "share"), train("eval_truncation_rate", "held out")], fromZero: true },
    { title: "Where the time goes", xName: "train step", format: duration, lines: ["sampling", "grading", "training", "publishing", "evaluating"].map(seconds) },
    { title: "Loss", lines: [step("loss")] },
    ...BY_STEP,
  ],
};

/** Charts that are folded away on a phone. */
const foldedCharts = () => make("details.more", {}, make("summary", {}, "More charts"), make("div.chart-grid"));

/** The charts of several runs in an element: one for each of their measures, with a line for each run. */
export class OverlaidCharts {
  constructor(place) {
    Object.assign(this, { place, charts: new Map(), isDrawn: false, more: foldedCharts() });
  }

  /** `runs`: their names and their RunMetrics, in the order of their colours. */
  draw(runs, { log, smooth }) {
    const kinds = [...new Set(runs.map((run) => run.metrics.kind))];
    const found = new Map();
    for (const kind of kinds) {
      for (const plan of PLANS[kind] ?? []) {
        for (const [label, values, more] of plan.lines) {
          if (more?.columns) continue;
          const title = plan.lines.length > 1 ? `${plan.title}: ${label}` : plan.title;
          if (!found.has(title)) found.set(title, { plan, lines: [] });
          found.get(title).lines.push({ kind, values, more });
        }
      }
    }
    const shown = [];
    for (const [title, { plan, lines }] of found) {
      const series = runs.flatMap(({ name, metrics }, color) => lines.filter(({ kind }) => kind === metrics.kind).map(({ values, more }) => ({ name, color, points: values(metrics), ...more }))).filter((one) => one.points.length);
      if (!series.length) continue;
      if (!this.charts.has(title)) this.charts.set(title, new Chart(title, { format: plan.format ?? number, xName: plan.xName ?? "step", fromZero: plan.fromZero }));
      shown.push([this.charts.get(title), { series, log: log && !plan.xName, smooth }]);
    }
    const none = make("p.muted", {}, runs.length ? "These runs recorded no steps." : "Choose runs to compare, here or in the list of runs.");
    const figures = shown.map(([chart]) => chart.figure);
    show(this.more.lastChild, figures.slice(FIRST));
    show(this.place, figures.length ? figures.slice(0, FIRST) : none, figures.length > FIRST && this.more);
    for (const [chart, data] of shown) chart.draw(data);
    this.isDrawn = true;
  }
}

/** The charts of a run in an element: those that have something to show, in a fixed order. */
export class Charts {
  constructor(place, kind) {
    this.place = place;
    this.folded = foldedCharts();
    this.more = this.folded.lastChild;
    this.plans = PLANS[kind].map((plan) => ({ ...plan, chart: null }));
  }

  draw(run, other, { log, smooth }) {
    for (const plan of this.plans) {
      const series = [...seriesOf(plan, run), ...(other ? seriesOf(plan, other).filter((one) => !one.columns).map((one) => ({ ...one, other: true })) : [])];
      if (!series.length) continue;
      const isNew = !plan.chart;
      plan.chart ??= new Chart(plan.title, { format: plan.format ?? number, xName: plan.xName ?? "step", fromZero: plan.fromZero });
      if (isNew) this.put(plan);
      const bands = plan.band ? [{ color: 0, points: run.band(...plan.band) }] : [];
      plan.chart.draw({ series, bands, marks: plan.xName ? [] : run.starts, log: log && !plan.xName, smooth });
    }
  }

  /** The first charts stand by themselves; on a phone those behind them are folded away. */
  put(plan) {
    const isMore = this.plans.indexOf(plan) >= FIRST;
    if (isMore && !this.folded.isConnected) this.place.append(this.folded);
    const place = isMore ? this.more : this.place;
    place.insertBefore(plan.chart.figure, this.behind(plan) ?? (isMore || !this.folded.isConnected ? null : this.folded));
  }

  behind(plan) {
    const at = this.plans.indexOf(plan), isMore = at >= FIRST;
    return this.plans.find((one, n) => n > at && n >= FIRST === isMore && one.chart)?.chart.figure ?? null;
  }
}

function seriesOf(plan, run) {
  return plan.lines.map(([name, values, more], color) => ({ name, color, points: values(run), ...more })).filter((one) => one.points.length);
}
