// A run's status: its state, model, durations, time left, and whether it can be resumed.

import { make, now, words } from "./page.js";

// Going on from a checkpoint would meet the same data, model or numbers again.
const BEYOND_RESUMING = new Set(["invalid_input", "corrupt_artifact", "sampler_mismatch", "not_finite"]);
const MARKS = { queued: "○", running: "●", paused: "❚❚", succeeded: "✓", failed: "✕", cancelled: "⊘", pruned: "⊘" };

export const canResume = (run) => ["paused", "failed", "cancelled"].includes(run.state) && !BEYOND_RESUMING.has(run.problem?.kind);

/** A run that waits for its first worker has not begun, though its workflow goes on. */
export function shownState(run) {
  const isWaiting = run.phase === "queued" || (run.phase === "waiting_for_worker" && !run.step && !run.timeline.some((span) => span.phase === "training"));
  return run.state === "running" && isWaiting ? "queued" : run.state;
}

export function stateBadge(state) {
  return make(`span.state.${state}`, {}, make("span", { "aria-hidden": "true" }, MARKS[state] ?? ""), state);
}

/** Seconds since a run first began, until now if it goes on; paused time included. */
export const tookSeconds = (run) => (run.started_at ? (run.ended_at ?? now()) - run.started_at : null);

/** Seconds of these in which nobody worked on it: it was paused, or had failed, until it was resumed. */
export const stoppedSeconds = (run) => run.timeline.slice(1).reduce((sum, span, n) => sum + span.began - (run.timeline[n].ended ?? span.began), 0);

/** Seconds to the last step, by the run's own estimate; null while nobody can say, and behind that moment. */
export function etaSeconds(run) {
  const left = run.state === "running" && run.estimated_end ? run.estimated_end - now() : 0;
  return left > 0 ? left : null;
}

const hasAllSteps = (run) => run.state === "running" && run.num_steps > 0 && run.step >= run.num_steps;

/** What a run does now. After its last step a worker still evaluates and saves. */
export function phaseText(run) {
  const isLast = hasAllSteps(run) && run.phase === "training";
  return isLast ? (run.run.eval_dataset ? "evaluating and saving" : "saving") : words(run.phase);
}

/**
 * Steps done; behind the last step the share of the evaluation, or a bar without an end while nobody knows it. Null for a
 * run that ended before it knew how many steps it has.
 */
export function progressBar(run, evaluated = null) {
  if (!run.num_steps && run.state !== "running" && run.state !== "succeeded") return null;
  if (hasAllSteps(run)) {
    const rest = make("progress", { max: 1, "aria-label": phaseText(run) });
    if (evaluated !== null) rest.value = evaluated;
    return rest;
  }
  const bar = make("progress", { max: run.num_steps || 1, "aria-label": "Steps done" });
  if (run.num_steps) bar.value = run.step;
  else if (run.state !== "running") bar.value = 1;
  return bar;
}
