// Samples by step: greedy completions of evaluations, and the groups of an RL run's train steps with their rewards.

import { get, make, number, show } from "./page.js";
import { lastLine, spoken } from "./texts.js";

const OPEN = 1;  // samples that are not folded

export class SampleViewer {
  constructor(place, runId) {
    Object.assign(this, { place, runId, chosen: null, steps: [] });
    this.texts = new Map();
  }

  draw(run) {
    this.run = run;
    const evaluated = [...run.evaluations.values()].filter((event) => event.samples.length).map((event) => event.step);
    const steps = run.kind === "rl" ? [...run.trainSteps.keys()].filter((step) => step > 0) : evaluated;
    steps.sort((a, b) => a - b);
    if (String(steps) === String(this.steps)) return;
    const wasLast = this.chosen === null || this.chosen === this.steps.at(-1);
    this.steps = steps;
    if (wasLast) this.chosen = steps.at(-1);
    this.paint();
  }

  paint() {
    const at = this.steps.indexOf(this.chosen);
    const range = make("input", { type: "range", min: 0, max: this.steps.length - 1, value: at, "aria-label": "Step", "aria-valuetext": `step ${this.chosen}`, input: (event) => this.choose(Number(event.target.value)) });
    const name = this.run.kind === "rl" ? "train step" : "after step";
    this.label = make("strong", {}, `${name} ${this.chosen}`);
    this.body = make("div");
    show(this.place, this.steps.length > 1 && make("div.stepper", {}, this.label, range, make("span.muted.small", {}, `${this.steps.length} steps`)), this.steps.length === 1 && make("p", {}, this.label), this.body);
    this.range = range;
    this.fill();
  }

  choose(at) {
    this.chosen = this.steps[at];
    const name = this.run.kind === "rl" ? "train step" : "after step";
    this.label.textContent = `${name} ${this.chosen}`;
    this.range.setAttribute("aria-valuetext", `step ${this.chosen}`);
    this.fill();
  }

  async fill() {
    if (this.run.kind !== "rl") return show(this.body, make("div.two", {}, this.run.evaluations.get(this.chosen).samples.map(completion)));
    const step = this.chosen;
    try {
      if (!this.texts.has(step)) this.texts.set(step, await get(`/runs/${this.runId}/steps/${step}/rollouts`));
      if (step === this.chosen) show(this.body, this.texts.get(step).map(group));
    } catch (error) {
      show(this.body, make("p.muted", {}, error.message));
    }
    return undefined;
  }
}

/** A sample under one line, which opens it. */
const folded = (line, facts, n, ...inner) => make("details.sample", { open: n < OPEN }, make("summary", {}, make("span.line", {}, line), make("span.muted.small", {}, facts)), inner);

function completion(sample, n) {
  return folded(lastLine(sample.prompt), "", n, spoken("prompt", sample.prompt), spoken("completion", sample.completion), sample.reference !== null && spoken("reference", sample.reference));
}

function group({ prompt, samples, place }, n) {
  const best = [...samples].sort((a, b) => b.reward - a.reward);
  const answers = best.map((one) => {
    const facts = [`reward ${number(one.reward)}`, one.num_tokens !== null && `${one.num_tokens} tokens`, one.finish_reason === "length" && "cut off", one.is_cut && "shown in part"];
    return make("div", {}, spoken(facts.filter(Boolean).join(" · "), one.text));
  });
  const [first, ...others] = answers;
  const facts = `${number(samples.length)} samples, best ${number(best[0]?.reward)}${place ? `, ${place}` : ""}`;
  return folded(lastLine(prompt), facts, n, spoken("prompt", prompt), first, others.length > 0 && make("details", {}, make("summary", {}, `${number(others.length)} more, by reward`), make("div.two", {}, others)));
}
