// Evaluations as a table. Samples by step: completions and graded samples of evaluations, and the groups of an RL run's
// train steps with their rewards.

import { get, html, number, Table, useEffect, useRef, useState } from "./page.js";
import { drawn, lastLine, spoken } from "./texts.js";

const OPEN = 1;  // samples that are not folded
const MOST_COLUMNS = 12;

/** A row for each metric, a column for each evaluation: the first and the newest. `best`: the step that is kept. */
export function Evaluations({ metrics, best, none }) {
  const all = metrics.allEvaluated(), names = [...new Set(all.flatMap(([, found]) => Object.keys(found)))].sort();
  if (!all.length) return html`<p class="muted">${none}</p>`;
  const shown = all.length > MOST_COLUMNS ? [all[0], ...all.slice(1 - MOST_COLUMNS)] : all;
  const heads = ["after step", ...shown.map(([step]) => `${number(step)}${step === best ? " (best)" : ""}`)];
  const rows = names.map((name) => [html`<th scope="row">${name}</th>`,
    ...shown.map(([, found]) => (name in found ? number(found[name]) : "–"))]);
  return html`<${Table} names=${heads} rows=${rows} />
    ${shown.length < all.length && html`<p class="muted small">The first and the newest of ${all.length}.</p>`}`;
}

function stepsWithSamples({ kind, evaluations, trainSteps }) {
  const evaluated = [...evaluations.values()].filter(({ samples, drawn = {} }) => samples.length
    || Object.keys(drawn).length).map(({ step }) => step);
  const steps = kind === "rl" ? [...trainSteps.keys()].filter((step) => step > 0) : evaluated;
  return steps.sort((a, b) => a - b);
}

/** The samples of a step, which is the last one until another is chosen. `none`: the text if there are no samples. */
export function Samples({ metrics, none }) {
  const [chosen, setChosen] = useState(null), [, setRead] = useState(), texts = useRef(new Map());
  const steps = stepsWithSamples(metrics), isRl = metrics.kind === "rl", step = chosen ?? steps.at(-1);
  useEffect(() => {
    if (step === undefined || texts.current.has(step)) return;
    const path = `/runs/${metrics.runId}/steps/${step}`;
    const names = Object.keys(metrics.evaluations.get(step)?.drawn ?? {});
    const read = isRl ? get(`${path}/rollouts`).then((groups) => groups.map(group))
      : Promise.all(names.map((of) => get(`${path}/samples?of=${of}&limit=16`).then((found) => found.map(graded))));
    const asked = read.then(
      (shown) => texts.current.set(step, shown),
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
  const shown = isRl ? texts.current.get(step) : [
    html`<div class="two">${metrics.evaluations.get(step).samples.map(completion)}</div>`, texts.current.get(step)];
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

/** A sample of a held-out prompt, or an episode, as a grader saw it. */
function graded({ item, text, num_tokens: tokens, finish_reason: finish, episode }, n) {
  const facts = [episode && `reward ${number(episode.reward)}`, `${number(tokens)} tokens`,
    episode ? episode.end.replaceAll("_", " ") : finish === "length" && "cut off"].filter(Boolean).join(" · ");
  const said = episode ? episode.messages.map(({ role, content }) => (role === "assistant" ? drawn : spoken)(
    role, typeof content === "string" ? content : JSON.stringify(content))) : drawn("answer", text);
  return folded(lastLine(text), facts, n, [spoken("item", JSON.stringify(item, null, 1)), said]);
}

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
