// The form of a new sweep: a run, and the fields in which its trials differ.

import { act, byId, make, post, words } from "./page.js";
import { fieldOfRun, forget, newKey, prepareSettings, refuse, runOf, settingsOf, takeFiles } from "./run_form.js";

const form = byId("new-sweep"), { elements } = form, varied = byId("varied");

/** Prepare the form. `made` is called with the name of a sweep that has begun. */
export function prepareForm(made) {
  let key = newKey();  // a request that is sent again unchanged, because no answer came, starts one sweep
  const beginAnew = prepareSettings(form);
  const begin = () => {
    varied.replaceChildren();
    vary("learning_rate", "1e-5..1e-3:log");
  };
  begin();
  takeFiles(form);
  byId("vary").addEventListener("click", () => vary().querySelector("input").focus());
  elements.sampler.addEventListener("change", () => { elements.trials.placeholder = elements.sampler.value === "grid" ? "every combination" : ""; });
  form.addEventListener("input", () => { key = newKey(); });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    forget(form);
    const settings = settingsOf(form);
    if (settings) act(event.submitter, async () => {
      try {
        const { sweep } = await post("/sweeps", asked(settings), { "idempotency-key": key });
        form.reset();
        beginAnew();
        begin();
        byId("new").open = false;
        made(sweep.name);
      } catch (error) {
        refuse(form, error, fieldOf);
      }
    });
  });
}

/** Add a row for a field that differs between trials; the row. */
function vary(path = "", values = "") {
  const n = varied.childElementCount;
  const input = (what, label, value, placeholder) => {
    const field = make("input", { name: `${what}_${n}`, placeholder, autocomplete: "off", spellcheck: "false", list: what === "path" && "paths" });
    field.value = value;
    return make("label", {}, `${label} ${n + 1}`, field);
  };
  varied.append(make("fieldset", {}, input("path", "Field", path, "trainable.rank"), input("values", "Values of field", values, "8, 16, 32 or 4..64:log:int")));
  return varied.lastChild;
}

const inRows = () => [...varied.children].map((_, n) => ({ n, path: elements[`path_${n}`].value.trim(), text: elements[`values_${n}`].value.trim() })).filter(({ path, text }) => path || text);

/** The values of a field, in the notation of `longshore sweep create --parameter`. */
function space(text) {
  const range = /^([^,[/]+?)\.\.([^,:/]+)((?::(?:log|int))*)$/.exec(text);
  if (range) return { min: Number(range[1]), max: Number(range[2]), log: range[3].includes("log"), integer: range[3].includes("int") };
  return { choices: text.startsWith("[") ? valueOf(text) : text.split(",").map((each) => valueOf(each.trim())) };
}

/** A JSON value; other text stands for itself. */
function valueOf(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** The body of the request. */
function asked(settings) {
  const given = (name, to = String) => (elements[name].value.trim() ? { [name]: to(elements[name].value.trim()) } : {});
  const parameters = Object.fromEntries(inRows().map(({ path, text }) => [path, space(text)]));
  return { name: elements.name.value.trim(), run: runOf(elements, settings), parameters, ...given("sampler"), ...given("trials", Number), ...given("parallel", Number), ...given("metric"), ...given("direction") };
}

/** The field of the form for a place in the request. */
function fieldOf(place, kind) {
  const [first, ...rest] = place.split(".");
  if (first === "run") return fieldOfRun(rest.join("."), kind);
  if (first !== "parameters") return first;
  const row = inRows().find(({ path }) => rest.join(".") === path || rest.join(".").startsWith(`${path}.`));
  return row ? `values_${row.n}` : "path_0";
}
