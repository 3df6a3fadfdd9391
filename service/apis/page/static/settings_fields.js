// The settings of a run, field by field, from the service's own description of its models. They write the JSON beside
// them, which stays the form's one truth: what no field shows (lists, graders) is written there.

import { get, make, words } from "./page.js";

const MODELS = { sft: "SFTRun", dpo: "DPORun", distill: "DistillRun", reward: "RewardRun", rl: "RLRun" };
const IN_THE_FORM = ["kind", "schema_version", "name", "model", "dataset", "rollouts.prompts", "eval_dataset", "rollouts.held_out.prompts"];
const FRONT = { duration: (kind) => LENGTHS[kind], learning_rate: () => ["learning_rate"], rank: () => ["trainable", "rank"] };
export const LENGTHS = { sft: ["epochs"], dpo: ["epochs"], distill: ["epochs"], reward: ["epochs"], rl: ["rollouts", "steps"] };
const SCALARS = ["boolean", "integer", "number", "string"];
const PREFIXES = { held_out: "eval_", weight_sync: "sync_" };  // as the command line's options have them
const DEEPEST = 3;

let described;
const schemas = () => (described ??= get("/openapi.json").then(({ components }) => components.schemas));

/** Follow a reference, and leave null out of what may be absent. */
function resolved(schemas, schema) {
  const [first, ...others] = (schema.anyOf ?? []).filter(({ type }) => type !== "null");
  const inner = schema.$ref ? schemas[schema.$ref.split("/").pop()] : first && !others.length ? resolved(schemas, first) : schema;
  return { ...inner, ...(schema.description ? { description: schema.description } : {}), ...("default" in schema ? { default: schema.default } : {}) };
}

/** The fields of an object, each with its path; those of a choice between objects are of the chosen one. */
function* walk(schemas, object, path, settings, prefix = "") {
  for (const [name, given] of Object.entries(object.properties ?? {})) {
    const inner = [...path, name], schema = resolved(schemas, given);
    if (IN_THE_FORM.includes(inner.join(".")) || "const" in schema) continue;
    const kinds = schema.discriminator?.propertyName === "kind" ? schema.discriminator.mapping : null;
    if (kinds) {
      const usual = schema.default?.kind;
      const chosen = valueAt(settings, inner)?.kind ?? usual;
      yield { path: [...inner, "kind"], label: name, schema: { enum: Object.keys(kinds), default: usual, description: schema.description }, isChoice: true };
      if (kinds[chosen] && inner.length < DEEPEST) yield* walk(schemas, resolved(schemas, { $ref: kinds[chosen] }), inner, settings, `${chosen}_`);
    } else if (SCALARS.includes(schema.type)) {
      yield { path: inner, label: prefix + name, schema };
    } else if (schema.properties && inner.length < DEEPEST) {
      yield* walk(schemas, schema, inner, settings, PREFIXES[name] ?? "");
    }
  }
}

const valueAt = (settings, path) => path.reduce((inner, name) => inner?.[name], settings);

/** The settings with another value in one place; undefined takes it out, and objects that nothing is left in. */
function changed(settings, [name, ...rest], value) {
  const inner = rest.length ? changed(settings?.[name], rest, value) : value;
  const { [name]: _, ...others } = settings ?? {};
  const isGone = inner === undefined || (rest.length && !Object.keys(inner).length);
  return isGone ? others : { ...settings, [name]: inner };
}

function control({ path, schema }, value) {
  const options = schema.type === "boolean" ? ["true", "false"] : schema.enum;
  const usual = schema.default === undefined || schema.default === null ? "" : String(schema.default);
  if (!options) {
    const type = schema.type === "string" ? "text" : "number";
    const input = make("input", { type, placeholder: usual, autocomplete: "off", ...(type === "number" ? { step: "any" } : {}) });
    input.value = value ?? "";
    return input;
  }
  const select = make("select", {}, make("option", { value: "" }, usual ? `${words(usual)} (default)` : "default"), options.map((one) => make("option", { value: one }, words(one))));
  select.value = value === undefined || value === null ? "" : String(value);
  return select;
}

/** The value that a field's text stands for; undefined where it is empty. */
function parsed({ schema }, text) {
  if (text === "") return undefined;
  if (schema.type === "boolean") return text === "true";
  return ["integer", "number"].includes(schema.type) ? Number(text) : text;
}

const read = (form) => {
  try {
    return JSON.parse(form.elements.settings.value || "{}");
  } catch {
    return null;  // said when the form is sent
  }
};

/** Show the fields in the form's place for them, as soon as that is opened. `write`: of settings as text. */
export function prepareFields(form, write) {
  const more = form.querySelector("details.settings"), place = more.querySelector("div");
  const { elements } = form, pathOf = (name) => FRONT[name](elements.kind.value);
  for (const name of Object.keys(FRONT)) elements[name].addEventListener("input", ({ target: { value } }) => {
    const now = read(form);
    if (now) elements.settings.value = write(changed(now, pathOf(name), value === "" ? undefined : Number(value)));
    draw();
  });
  const showFront = (settings) => {
    for (const name of Object.keys(FRONT)) if (document.activeElement !== elements[name]) elements[name].value = valueAt(settings, pathOf(name)) ?? "";
    elements.learning_rate.placeholder = JSON.parse(elements.learning_rate.dataset.usual)[elements.kind.value];
    elements.rank.disabled = (settings.trainable?.kind ?? "lora") !== "lora";
  };
  async function draw() {
    const settings = read(form);
    if (settings) showFront(settings);
    if (!more.open || !settings) return;
    const all = await schemas(), groups = new Map([["", []]]);
    for (const field of walk(all, resolved(all, { $ref: MODELS[elements.kind.value] }), [], settings)) {
      const group = field.path.slice(0, field.isChoice ? -2 : -1).join(" · ");
      groups.set(group, [...(groups.get(group) ?? []), field]);
    }
    place.replaceChildren(...[...groups].map(([group, fields]) => make("fieldset", {}, make("legend", {}, group ? words(group) : "run"), fields.map((field) => labelled(field, settings)))));
  }
  function labelled(field, settings) {
    const input = control(field, valueAt(settings, field.path));
    input.addEventListener("input", () => {
      const now = read(form), value = parsed(field, input.value);
      if (!now) return;
      const path = field.isChoice ? field.path.slice(0, -1) : field.path;
      elements.settings.value = write(changed(now, path, field.isChoice && value !== undefined ? { kind: value } : value));
      showFront(read(form));
      if (field.isChoice) draw();
    });
    return make("div", {}, make("label", {}, words(field.label), " ", input), field.schema.description && make("small.muted", {}, field.schema.description));
  }
  more.addEventListener("toggle", draw);
  elements.settings.addEventListener("change", draw);
  return draw;
}
