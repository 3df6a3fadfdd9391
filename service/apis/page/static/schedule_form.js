// Forms of schedules: a new schedule, and a backfill. What the API refuses is shown at its field.

import { byId, make, post, Problem } from "./page.js";

const RL_START = { epochs: 1, mini_batches: 1, rollouts: { steps: 50, prompts_per_step: 8, group_size: 8, grader: { type: "string_check", name: "same", input: "{{sample.output_text}}", operation: "eq", reference: "{{item.answer}}" } } };
const STARTS = { sft: { epochs: 1, batch_size: 8 }, dpo: { epochs: 1, batch_size: 8 }, rl: RL_START };
const pretty = (settings) => JSON.stringify(settings, null, 2);

/** Say at its field what is wrong there; false where there is no such field. */
function complain(form, field, rule) {
  const control = form.elements[field];
  if (!control) return false;
  const id = `${form.id}-${field}-problem`;
  const said = byId(id);
  if (said) said.textContent += `; ${rule}`;
  else control.closest("label").append(make("span.field-problem", { id, role: "alert" }, rule));
  control.setAttribute("aria-invalid", "true");
  control.setAttribute("aria-describedby", id);
  form.querySelector("[aria-invalid]").focus();
  return true;
}

function forget(form) {
  for (const said of form.querySelectorAll(".field-problem")) said.remove();
  for (const control of form.querySelectorAll("[aria-invalid]")) {
    control.removeAttribute("aria-invalid");
    control.removeAttribute("aria-describedby");
  }
  form.querySelector(".problem").hidden = true;
}

/** Each broken rule at its field; what has none above the form. */
function refuse(form, error, fieldOf) {
  if (!(error instanceof Problem)) throw error;
  const left = rulesOf(error).filter(([place, rule]) => {
    const field = place && fieldOf(place);
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

/** The form of a new schedule. `made` is called with its name. */
export function prepareForm(made) {
  const form = byId("new-schedule"), { elements } = form;
  const zones = Intl.supportedValuesOf?.("timeZone") ?? [];
  byId("zones").append(...["UTC", ...zones].map((value) => make("option", { value })));
  let untouched = elements.settings.value = pretty(STARTS.sft);
  elements.kind.addEventListener("change", () => {
    if (elements.settings.value === untouched) untouched = elements.settings.value = pretty(STARTS[elements.kind.value]);
  });
  const byTheClock = () => { for (const part of form.querySelectorAll("[data-when]")) part.hidden = part.dataset.when !== elements.when.value; };
  elements.when.addEventListener("change", byTheClock);
  byTheClock();
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    forget(form);
    const settings = settingsOf(form);
    if (!settings) return;
    event.submitter.disabled = true;
    try {
      const { scheduled } = await post("/schedules", asked(elements, settings));
      form.reset();
      untouched = elements.settings.value = pretty(STARTS.sft);
      byTheClock();
      byId("new").open = false;
      made(scheduled.name);
    } catch (error) {
      refuse(form, error, fieldOf);
    } finally {
      event.submitter.disabled = false;
    }
  });
}

function settingsOf(form) {
  try {
    const found = JSON.parse(form.elements.settings.value || "{}");
    if (found === null || typeof found !== "object" || Array.isArray(found)) throw new SyntaxError("an object is wanted, in braces");
    return found;
  } catch (error) {
    complain(form, "settings", `This is no JSON: ${error.message}`);
    return null;
  }
}

/** The body of the request. An empty number is sent as it is, for the service to say that it is none. */
function asked(elements, settings) {
  const value = (name) => elements[name].value.trim();
  const seconds = (name) => (value(name) === "" ? "" : Math.round(Number(value(name)) * Number(elements[`${name}_unit`].value)));
  const kind = value("kind"), uri = value("dataset");
  const data = kind === "rl" ? { rollouts: { ...settings.rollouts, prompts: { ...settings.rollouts?.prompts, uri } } } : { dataset: { ...settings.dataset, uri } };
  const isCron = value("when") === "cron";
  return {
    name: value("name"),
    ...(isCron ? { cron: value("cron"), timezone: value("timezone") || "UTC" } : { every_s: seconds("every") }),
    overlap: value("overlap"),
    catch_up_s: seconds("catch_up"),
    continues: elements.continues.checked,
    even_unchanged: elements.even_unchanged.checked,
    run: { kind, model: value("model"), ...(value("run_name") ? { name: value("run_name") } : {}), ...settings, ...data },
  };
}

/** The field of the form for a place in the request. */
function fieldOf(place) {
  const [first, ...rest] = place.split(".");
  if (first !== "run") return { every_s: "every", catch_up_s: "catch_up" }[first] ?? first;
  const inner = ["sft", "dpo", "rl"].includes(rest[0]) ? rest.slice(1) : rest;
  if (inner[0] === "name") return "run_name";
  if (inner[0] === "model") return "model";
  const isUri = inner.at(-1) === "uri" && (inner[0] === "dataset" || inner[1] === "prompts");
  return isUri ? "dataset" : "settings";
}

/** Ask for a span of time and send it; the answer, or nothing where nobody sent it. */
export function askForSpan(name, send) {
  const dialog = byId("backfill"), form = byId("backfill-form"), { elements } = form;
  byId("backfill-h").textContent = `Backfill ${name}`;
  form.reset();
  forget(form);
  let answer = null;
  const submit = async (event) => {
    event.preventDefault();
    forget(form);
    try {
      const at = (field) => new Date(elements[field].value).getTime() / 1000;
      answer = await send({ begin: at("begin"), end: at("end"), overlap: elements.overlap.value });
      dialog.close();
    } catch (error) {
      refuse(form, error, (place) => place);
    }
  };
  form.addEventListener("submit", submit);
  byId("backfill-no").onclick = () => dialog.close();
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => {
    form.removeEventListener("submit", submit);
    resolve(answer);
  }, { once: true }));
}
