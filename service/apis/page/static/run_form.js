// What the forms of runs and of schedules share: the fields of a run, and refusals shown at their field.

import { byId, make, nameOf, Problem, toast, upload } from "./page.js";
import { LENGTHS, prepareFields } from "./settings_fields.js";

const RL_START = { epochs: 1, mini_batches: 1, rollouts: { steps: 50, prompts_per_step: 8, group_size: 8, grader: { type: "string_check", name: "same", input: "{{sample.output_text}}", operation: "eq", reference: "{{item.answer}}" } } };
export const STARTS = { sft: { epochs: 1, batch_size: 8 }, dpo: { epochs: 1, batch_size: 8 }, distill: { epochs: 1, batch_size: 8, teacher: "" }, reward: { epochs: 1, batch_size: 8 }, rl: RL_START };
// Names of the main fields, as the command line's options have them.
const WORDS = { rows: { rows: "Dataset", "eval-rows": "Eval dataset", length: "Epochs" }, rl: { rows: "Prompts", "eval-rows": "Eval prompts", length: "Steps" } };
export const pretty = (settings) => JSON.stringify(settings, null, 2);

/** Say at its field what is wrong there; false where there is no such field. */
export function complain(form, field, rule) {
  const control = form.elements[field];
  if (!control) return false;
  const id = `${form.id}-${field}-problem`;
  const said = byId(id);
  if (said) said.textContent += `; ${rule}`;
  else {
    for (let fold = control.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    control.closest("label, .picked").append(make("span.field-problem", { id, role: "alert" }, rule));
  }
  control.setAttribute("aria-invalid", "true");
  control.setAttribute("aria-describedby", id);
  form.querySelector("[aria-invalid]").focus();
  return true;
}

export function forget(form) {
  for (const said of form.querySelectorAll(".field-problem")) said.remove();
  for (const control of form.querySelectorAll("[aria-invalid]")) {
    control.removeAttribute("aria-invalid");
    control.removeAttribute("aria-describedby");
  }
  form.querySelector(".problem").hidden = true;
}

/** Each broken rule at its field; what has none above the form. */
export function refuse(form, error, fieldOf) {
  if (!(error instanceof Problem)) throw error;
  const left = rulesOf(error).filter(([place, rule]) => {
    const field = place && fieldOf(place, form.elements.kind?.value);
    return !field || !complain(form, field, field === "settings" ? `${place}: ${rule}` : rule);
  });
  if (!left.length) return;
  const said = form.querySelector(".problem");
  said.textContent = left.map(([place, rule]) => (place ? `${place}: ${rule}` : rule)).join("; ");
  said.hidden = false;
  said.scrollIntoView({ block: "nearest" });
}

/** The places and rules of a refusal. The service joins those behind the first: `rule; place: rule`. */
function rulesOf(error) {
  const [first, ...rest] = error.rule.split(/; (?=(?:the request|[a-z_]+(?:\.\w+)*): )/);
  const others = rest.map((text) => /^(.+?): (.*)$/s.exec(text).slice(1));
  return [[error.place, first], ...others.map(([place, rule]) => [place === "the request" ? null : place, rule])];
}

/** Fill the settings of each kind of run with a beginning, unless they were edited. Returns what does that anew. */
export function prepareSettings(form) {
  const { elements } = form;
  let untouched;
  const label = () => {
    const words = WORDS[elements.kind.value === "rl" ? "rl" : "rows"];
    for (const [name, text] of Object.entries(words)) form.querySelector(`[data-${name}]`).textContent = text;
  };
  const drawFields = prepareFields(form, pretty);
  const begin = () => {
    untouched = elements.settings.value = pretty(STARTS[elements.kind.value]);
    drawFields();
  };
  elements.kind.addEventListener("change", () => { label(); if (elements.settings.value === untouched) begin(); else drawFields(); });
  label();
  begin();
  return begin;
}

/** An Idempotency-Key. */
export function newKey() {
  return `page-${Array.from(crypto.getRandomValues(new Uint32Array(4)), (n) => n.toString(16)).join("")}`;
}

/** Upload the files that are chosen in a form; the fields beside them then stand for the uploads. */
export function takeFiles(form) {
  for (const picker of form.querySelectorAll("[data-into]")) picker.addEventListener("change", async () => {
    const [file] = picker.files;
    if (!file) return;
    forget(form);
    picker.disabled = true;
    try {
      showAddress(form.elements[picker.dataset.into], (await upload(file)).uri);
      toast(`${file.name} is uploaded`);
    } catch (error) {
      refuse(form, error, () => picker.name);
    } finally {
      picker.disabled = false;
    }
  });
}

/** The settings as an object; null where they are none, which is said at their field. */
export function settingsOf(form) {
  try {
    const found = JSON.parse(form.elements.settings.value || "{}");
    if (found === null || typeof found !== "object" || Array.isArray(found)) throw new SyntaxError("expected an object, in braces");
    return found;
  } catch (error) {
    complain(form, "settings", `This is not valid JSON: ${error.message}`);
    return null;
  }
}

/** Show the name of what lies at an address in a field; the field stands for the address until it is edited. */
export function showAddress(field, address) {
  field.value = nameOf(address);
  field.title = field.dataset.address = address;
}

const addressIn = ({ value, dataset: { address } }) => (address && nameOf(address) === value.trim() ? address : value.trim());

/** The run that a form asks for. */
export function runOf(elements, settings) {
  const value = (name) => elements[name]?.value.trim() ?? "";
  const kind = value("kind"), uri = addressIn(elements.dataset), held = addressIn(elements.eval_dataset), { rollouts } = settings;
  const heldOut = held ? { held_out: { ...rollouts?.held_out, prompts: { ...rollouts?.held_out?.prompts, uri: held } } } : {};
  const data = kind === "rl"
    ? { rollouts: { ...rollouts, prompts: { ...rollouts?.prompts, uri }, ...heldOut } }
    : { dataset: { ...settings.dataset, uri }, ...(held ? { eval_dataset: { ...settings.eval_dataset, uri: held } } : {}) };
  return { kind, model: addressIn(elements.model), ...(value("run_name") ? { name: value("run_name") } : {}), ...settings, ...data };
}

/** The field of the form for a place in a run. */
export function fieldOfRun(place, kind) {
  const rest = place.split(".");
  const inner = ["sft", "dpo", "distill", "reward", "rl"].includes(rest[0]) ? rest.slice(1) : rest;
  if (inner[0] === "name") return "run_name";
  if (inner[0] === "model" || inner[0] === "model_uri") return "model";
  if (inner.at(-1) === "uri" && (inner[0] === "eval_dataset" || inner[1] === "held_out")) return "eval_dataset";
  if (inner.join(".") === LENGTHS[kind].join(".")) return "duration";
  if (inner.join(".") === "learning_rate" || inner.join(".") === "trainable.rank") return inner.at(-1);
  const isUri = inner.at(-1) === "uri" && (["dataset", "source"].includes(inner[0]) || inner[1] === "prompts");
  return isUri ? "dataset" : "settings";
}
