// A run's status: its state, durations, progress and time left, its trend, and whether it can be resumed.

import { html, now, number, words } from "./page.js";

// Going on from a checkpoint would meet the same data, model or numbers again.
const BEYOND_RESUMING = new Set(["invalid_input", "corrupt_artifact", "sampler_mismatch", "not_finite"]);
/** Kinds of runs that forms start, and their names. */
export const KINDS = [
  ["sft", "SFT"], ["dpo", "DPO"], ["distill", "Distillation"], ["reward", "Rewards"], ["rl", "RL"],
];
const MARKS = { queued: "○", running: "●", paused: "❚❚", succeeded: "✓", failed: "✕", cancelled: "⊘", pruned: "⊘" };

export const canResume = (run) =>
  ["paused", "failed", "cancelled"].includes(run.state) && !BEYOND_RESUMING.has(run.problem?.kind);

/** A run that waits for its first worker has not begun, though its workflow goes on. */
export function shownState(run) {
  const hasTrained = run.step || run.timeline.some((span) => span.phase === "training");
  const isWaiting = run.phase === "queued" || (run.phase === "waiting_for_worker" && !hasTrained);
  return run.state === "running" && isWaiting ? "queued" : run.state;
}

/** A state and its mark. `text` is shown if the state has another name there. */
export const stateBadge = (state, text = state) =>
  html`<span class=${`state ${state}`}><span aria-hidden="true">${MARKS[state] ?? ""}</span>${text}</span>`;

/** Seconds since a run first began, until now if it goes on; paused time included. */
export const tookSeconds = (run) => (run.started_at ? (run.ended_at ?? now()) - run.started_at : null);

/** Seconds of these in which nobody worked on it: it was paused, or had failed, until it was resumed. */
export const stoppedSeconds = (run) =>
  run.timeline.slice(1).reduce((sum, span, n) => sum + span.began - (run.timeline[n].ended ?? span.began), 0);

/** Seconds to the last step, by the run's own estimate; null if it has none, or the moment has passed. */
export function etaSeconds(run) {
  const left = run.state === "running" && run.estimated_end ? run.estimated_end - now() : 0;
  return left > 0 ? left : null;
}

const hasAllSteps = (run) => run.state === "running" && run.num_steps > 0 && run.step >= run.num_steps;

/** What a run does now. After its last step a worker still evaluates and saves. */
export function phaseText(run) {
  const isLast = hasAllSteps(run) && run.phase === "training";
  const isEvaluated = run.run.eval_dataset || run.run.eval_datasets;
  return isLast ? (isEvaluated ? "evaluating and saving" : "saving") : words(run.phase);
}

/**
 * Steps done; after the last step the share of the evaluation, or a bar without an end while it is unknown. Null for a
 * run that ended before it knew how many steps it has.
 */
export function progressBar(run, evaluated = null) {
  if (!run.num_steps && run.state !== "running" && run.state !== "succeeded") return null;
  if (hasAllSteps(run)) return html`<progress max=1 value=${evaluated} aria-label=${phaseText(run)} />`;
  const done = run.num_steps ? run.step : run.state === "running" ? null : 1;
  return html`<progress max=${run.num_steps || 1} value=${done} aria-label="Steps done" />`;
}

const FEWEST = 5;  // points of a sparkline: fewer show no course

/** A small line without axes. */
export function sparkline({ name, values }) {
  if (values.length < FEWEST) return "";
  const wide = 96, tall = 28, low = Math.min(...values), span = Math.max(...values) - low || 1;
  const x = (n) => ((n / (values.length - 1)) * (wide - 4) + 1).toFixed(1);
  const y = (value) => (tall - 3 - ((value - low) / span) * (tall - 6)).toFixed(1);
  const text = `${name} from ${number(values[0])} to ${number(values.at(-1))}`;
  return html`
    <svg class=${`spark ${name}`} viewBox=${`0 0 ${wide} ${tall}`} role="img" aria-label=${text}>
      <title>${text}</title>
      <path d=${values.map((value, n) => `${n ? "L" : "M"}${x(n)} ${y(value)}`).join("")} />
      <circle cx=${x(values.length - 1)} cy=${y(values.at(-1))} r="2.2" />
    </svg>`;
}
