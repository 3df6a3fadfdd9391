// The phases of a run in time: a bar in proportion, and a list in words, which says where a worker was lost.

import { clock, duration, html, now, words } from "./page.js";

const KINDS = {
  data: ["checking", "downloading", "tokenizing", "packing"],
  roll: ["sampling", "grading", "evaluating"],
  train: ["training"],
  end: ["publishing", "done"],
};

const WITH_WORKER = ["waiting_for_worker", "training"];
const OF_DATA = ["downloading", "tokenizing", "packing"];

const kindOf = (phase) => Object.keys(KINDS).find((kind) => KINDS[kind].includes(phase));
const classOf = (phase) => (kindOf(phase) ? `phase-${kindOf(phase)}` : "wait");
const seconds = (span) => (span.ended ?? now()) - span.began;
const nameOf = (span) => words(span.phase) + (span.split ? ` (${span.split})` : "");

/** A host that shuts down hands its run to another: nothing was lost. */
function markOf(span, isLost) {
  if (span.isAnother && isLost) return html`<span class="mark">worker lost: lease ${span.lease}</span>`;
  const text = span.isAnother ? `another host: lease ${span.lease}` : span.isResumed ? "resumed" : "";
  return html`<span class=${text && "mark calm"}>${text}</span>`;
}

export function Timeline({ run }) {
  const spans = spansOf(run), isLost = run.workers_lost > 0;
  const none = run.state === "running" ? "Nothing has begun yet." : "There is no record of its phases.";
  if (!spans.length) return html`<p class="muted">${none}</p>`;
  const total = spans.reduce((sum, span) => sum + seconds(span), 0);
  const list = html`<ol class="spans">${spans.map((span) => html`<li>
    <i class=${classOf(span.phase)} />
    <span title=${clock(span.began)}>${nameOf(span)}${span.ended === null && run.state === "running" ? " …" : ""}</span>
    ${markOf(span, isLost)}
    <span class="number">${duration(seconds(span))}</span></li>`)}</ol>`;
  const told = `${spans.length} phases in ${duration(total)}; the list below names them`;
  return html`
    <div class="phases" role="img" aria-label=${told}>${spans.map((span) => html`
      <i class=${`${classOf(span.phase)} ${span.isAnother && isLost ? "retry" : ""}`}
        title=${`${nameOf(span)}: ${duration(seconds(span))}`}
        style=${{ flexGrow: `${Math.max(seconds(span), total / 400)}` }} />`)}</div>
    ${spans.length > 14 ? html`<details><summary>All ${spans.length} phases</summary>${list}</details>` : list}`;
}

/**
 * A run's phases for its list. One wait is one span, and waits of no time are left out. A span has its `split` if there
 * is a held-out set, `isResumed` if somebody resumed the run, and `isAnother` if another worker went on in its middle.
 */
function spansOf(run) {
  const found = [];
  const seen = new Set();
  let live = 0;  // the lease that a worker had, or was waited for, within this stretch of waiting and training
  run.timeline.forEach((span, n) => {
    const last = found.at(-1);
    const isStretch = WITH_WORKER.includes(span.phase);
    const goesOn = isStretch && n > 0 && WITH_WORKER.includes(run.timeline[n - 1].phase);
    const isAnother = goesOn && live > 0 && span.lease > live;
    if (!isStretch) live = 0;
    else if (span.phase === "training" || goesOn) live = span.lease;
    if (span.phase === "checking") seen.clear();
    const isResumed = span.phase === "checking" && last !== undefined && !["queued", "checking"].includes(last.phase);
    const hasTwo = Boolean(run.run.eval_dataset || run.run.eval_datasets) && OF_DATA.includes(span.phase);
    const split = hasTwo ? (seen.has(span.phase) ? "held out" : "train") : "";
    seen.add(span.phase);
    if (last?.phase === span.phase && !split) {
      Object.assign(last, { ended: span.ended, lease: span.lease, isAnother: last.isAnother || isAnother });
    } else found.push({ ...span, ended: span.ended ?? run.ended_at, isAnother, isResumed, split });
  });
  return withoutEmptyWaits(found);
}

function withoutEmptyWaits(spans) {
  let isAnother = false;
  return spans.filter((span) => {
    span.isAnother ||= isAnother;
    const isEmpty = span.phase === "waiting_for_worker" && span.ended !== null && seconds(span) < 0.5;
    isAnother = isEmpty && span.isAnother;
    return !isEmpty;
  });
}
