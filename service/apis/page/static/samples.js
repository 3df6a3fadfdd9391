// Samples by step: greedy completions of evaluations, and the groups of an RL run's train steps with their rewards.

import { get, html, number, useEffect, useRef, useState } from "./page.js";
import { drawn, lastLine, spoken } from "./texts.js";

const OPEN = 1;  // samples that are not folded

function stepsWithSamples({ kind, evaluations, trainSteps }) {
  const evaluated = [...evaluations.values()].filter(({ samples }) => samples.length).map(({ step }) => step);
  const steps = kind === "rl" ? [...trainSteps.keys()].filter((step) => step > 0) : evaluated;
  return steps.sort((a, b) => a - b);
}

/** The samples of a step, which is the last one until another is chosen. `none`: the text if there are no samples. */
export function Samples({ metrics, none }) {
  const [chosen, setChosen] = useState(null), [, setRead] = useState(), texts = useRef(new Map());
  const steps = stepsWithSamples(metrics), isRl = metrics.kind === "rl", step = chosen ?? steps.at(-1);
  useEffect(() => {
    if (!isRl || step === undefined || texts.current.has(step)) return;
    const asked = get(`/runs/${metrics.runId}/steps/${step}/rollouts`).then(
      (groups) => texts.current.set(step, groups.map(group)),
      (error) => texts.current.set(step, html`<p class="muted">${error.message}</p>`),
    );
    asked.then(() => setRead(step));
  }, [step]);
  if (!steps.length) return html`<p class="muted">${none}</p>`;
  const label = html`<strong>${isRl ? "train step" : "after step"} ${step}</strong>`;
  const choose = (event) => {
    const at = Number(event.target.value);
    setChosen(at === steps.length - 1 ? null : steps[at]);
  };
  const shown = isRl ? texts.current.get(step)
    : html`<div class="two">${metrics.evaluations.get(step).samples.map(completion)}</div>`;
  return html`
    ${steps.length === 1 ? html`<p>${label}</p>` : html`<div class="stepper">${label}
      <input type="range" min="0" max=${steps.length - 1} value=${steps.indexOf(step)} aria-label="Step"
        aria-valuetext=${`step ${step}`} onInput=${choose} />
      <span class="muted small">${steps.length} steps</span></div>`}
    <div key=${step}>${shown}</div>`;
}

/** A sample under one line, which opens it. */
const folded = (line, facts, n, inner) => html`<details class="sample" open=${n < OPEN}>
  <summary><span class="line">${line}</span><span class="muted small">${facts}</span></summary>${inner}</details>`;

const completion = ({ prompt, completion: text, reference }, n) => folded(lastLine(prompt), "", n, [
  spoken("prompt", prompt), spoken("completion", text), reference !== null && spoken("reference", reference),
]);

/** A trajectory of several answers: each with what it earned, and what the policy was told between them. */
function conversation({ parts, turn_rewards: earned }) {
  const numbers = parts.map((_, n) => parts.slice(0, n).filter((part) => part.is_drawn).length);
  return parts.map(({ text, is_drawn: isDrawn }, n) => (isDrawn
    ? drawn(earned ? `answer · earned ${number(earned[numbers[n]])}` : "answer", text) : spoken("told", text)));
}

function group({ prompt, samples, place }, n) {
  const best = [...samples].sort((a, b) => b.reward - a.reward);
  const [first, ...others] = best.map((sample) => {
    const { reward, num_tokens: tokens, finish_reason: finish, is_cut: isCut, text, parts, end } = sample;
    const ends = [finish === "length" && "cut off", end?.replaceAll("_", " "), isCut && "shown in part"];
    const facts = [`reward ${number(reward)}`, tokens !== null && `${tokens} tokens`, ...ends].filter(Boolean);
    if (!parts?.length) return html`<div>${spoken(facts.join(" · "), text)}</div>`;
    return html`<div><div class="who">${facts.join(" · ")}</div>${conversation(sample)}</div>`;
  });
  const facts = `${number(samples.length)} samples, best ${number(best[0]?.reward)}${place ? `, ${place}` : ""}`;
  return folded(lastLine(prompt), facts, n, [spoken("prompt", prompt), first, others.length > 0 && html`
    <details><summary>${number(others.length)} more, by reward</summary><div class="two">${others}</div></details>`]);
}
