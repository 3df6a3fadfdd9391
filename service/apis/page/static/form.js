// Forms: their fields, what the service refuses about them, and the fields of a run, which new runs, sweeps and
// schedules share. A run's settings are one JSON text, which the fields of the service's models read and write.

import { acting, createContext, FRAME, get, html, nameOf, Problem, toast, upload, useContext, useEffect, useRef,
  useState, words } from "./page.js";
import { KINDS } from "./status.js";

const NOTHING = { fields: {}, left: "" };
const InForm = createContext({ id: "", refused: NOTHING });

/** An Idempotency-Key. */
const newKey = () => `page-${Array.from(crypto.getRandomValues(new Uint32Array(4)), (n) => n.toString(16)).join("")}`;

/** The places and rules of a refusal. The service joins those after the first: `rule; place: rule`. */
function rulesOf(error) {
  const [first, ...rest] = error.rule.split(/; (?=(?:the request|[a-z_]+(?:\.\w+)*): )/);
  const others = rest.map((text) => /^(.+?): (.*)$/s.exec(text).slice(1));
  return [[error.place, first], ...others.map(([place, rule]) => [place === "the request" ? null : place, rule])];
}

/** Each broken rule by its field, and those without a field in one text. */
function sorted(error, { elements }, fieldOf) {
  if (!(error instanceof Problem)) throw error;
  const fields = {}, left = [];
  for (const [place, rule] of rulesOf(error)) {
    const field = place && fieldOf(place, elements);
    if (!field || !elements[field]) left.push(place ? `${place}: ${rule}` : rule);
    else {
      const text = field === "settings" && place !== field ? `${place}: ${rule}` : rule;
      fields[field] = fields[field] ? `${fields[field]}; ${text}` : text;
    }
  }
  return { fields, left: left.join("; ") };
}

/**
 * A form. `send(form, key)` gets a key for repeated requests: an unchanged form that is sent again, because no answer
 * came, starts one thing. What the service refuses is shown at the field that `fieldOf(place, elements)` names.
 */
export function Form({ id, look = "", send, fieldOf = (place) => place, children }) {
  const [refused, setRefused] = useState(NOTHING), form = useRef(), key = useRef(newKey());
  const attempt = async (work) => {
    setRefused(NOTHING);
    try {
      await work(form.current, key.current);
    } catch (error) {
      setRefused(sorted(error, form.current, fieldOf));
    }
  };
  useEffect(() => {
    const [first] = form.current.querySelectorAll("[aria-invalid]");
    for (const said of form.current.querySelectorAll(".field-problem")) {
      for (let fold = said.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    }
    if (first) first.focus();
    else if (refused.left) form.current.querySelector(".problem").scrollIntoView({ block: "nearest" });
  }, [refused]);
  const changed = () => { key.current = newKey(); };
  return html`<${InForm.Provider} value=${{ id, form, refused, attempt }}>
    <form id=${id} class=${`form ${look}`} novalidate ref=${form} onInput=${changed}
      onSubmit=${acting(() => attempt(send))}>
      <p class="problem" role="alert" hidden=${!refused.left}>${refused.left}</p>
      ${children}
    </form><//>`;
}

/** A fold with a form, which is folded and empty again when it has made something. `made` gets its name. */
export function FormFold({ title, form: Inner, made }) {
  const [round, setRound] = useState(0), fold = useRef();
  const done = (name) => {
    fold.current.open = false;
    setRound(round + 1);
    made(name);
  };
  return html`<details id="new" class="card" ref=${fold}><summary>${title}</summary>
    <${Inner} key=${round} made=${done} /></details>`;
}

/** A button in a form that does something else than to send it. */
export function FormButton({ id, work, children }) {
  const { attempt } = useContext(InForm);
  return html`<button type="button" id=${id} onClick=${acting(() => attempt(work))}>${children}</button>`;
}

function Refusal({ name }) {
  const { id, refused: { fields } } = useContext(InForm);
  return fields[name] && html`
    <span class="field-problem" id=${`${id}-${name}-problem`} role="alert">${fields[name]}</span>`;
}

/** A field with its label: a select if it has `options` ([value, text] each), a text area if it has `rows`. */
export function Field({ name, label, look, hidden, options, rows, children, ...rest }) {
  const { id, refused } = useContext(InForm), control = useRef(), isRefused = name in refused.fields;
  const told = { name, autocomplete: "off", spellcheck: false, ref: control, ...rest,
    "aria-invalid": isRefused ? "true" : null, "aria-describedby": isRefused ? `${id}-${name}-problem` : null };
  // What was typed stays if it is the same number in another notation.
  const typed = rest.type === "number" && control.current?.value;
  if ("value" in rest) told.value = typed && Number(typed) === rest.value ? typed : rest.value ?? "";
  const shown = options ? html`<select ...${told}>${options.map(([value, text, isChosen]) => html`
      <option value=${value} selected=${isChosen}>${text}</option>`)}</select>`
    : rows ? html`<textarea ...${told} rows=${rows} />` : html`<input ...${told} />`;
  const text = rest.type === "checkbox" ? [shown, " ", label] : [label, " ", shown];
  if (children) return html`<label hidden=${hidden}>${label} <span class="pair">${shown}${children}</span>
    <${Refusal} name=${name} /></label>`;
  return html`<label class=${look ?? (rest.type === "checkbox" ? "tick" : null)} hidden=${hidden}>
    ${text}<${Refusal} name=${name} /></label>`;
}

/** A number with a unit beside it, whose field is called `name`_unit. */
export const Span = ({ units, unitLabel, ...rest }) => html`<${Field} ...${rest} type="number" min="0" step="any">
  <select name=${`${rest.name}_unit`} aria-label=${unitLabel}>${units.map(([size, unit, isChosen]) => html`
    <option value=${size} selected=${isChosen}>${unit}</option>`)}</select><//>`;

/** The values of the boxes of a name that are ticked. */
export const ticked = (form, name) => [...form.querySelectorAll(`[name=${name}]:checked`)].map((box) => box.value);
export const textOf = (elements, name) => elements[name]?.value.trim() ?? "";

/** Show the name of what lies at an address in a field; the field stands for the address until it is edited. */
function showAddress(field, address) {
  field.value = nameOf(address);
  field.title = field.dataset.address = address;
}

function addressIn({ value, dataset: { address } }) {
  return address && nameOf(address) === value.trim() ? address : value.trim();
}

/** The field of an address, and one to upload a file, for which the first then stands. */
function Address({ name, label, placeholder, file, uploadLabel }) {
  const { attempt } = useContext(InForm);
  const picked = ({ target: picker }) => attempt(async ({ elements }) => {
    const [chosen] = picker.files;
    if (!chosen) return;
    picker.disabled = true;
    try {
      showAddress(elements[name], (await upload(chosen)).uri);
      toast(`${chosen.name} is uploaded`);
    } catch (error) {
      throw error instanceof Problem ? new Problem(error.status, error.message, picker.name) : error;
    } finally {
      picker.disabled = false;
    }
  });
  return html`<div class="picked"><${Field} name=${name} label=${label} placeholder=${placeholder} />
    ${file && html`<input name=${file} type="file" aria-label=${uploadLabel} onChange=${picked} />
      <${Refusal} name=${file} />`}</div>`;
}

const MODELS = { sft: "SFTRun", dpo: "DPORun", distill: "DistillRun", reward: "RewardRun", rl: "RLRun" };
const ROWS_START = { epochs: 1, batch_size: 8 };
const GRADER = { type: "string_check", name: "same", input: "{{sample.output_text}}", operation: "eq",
  reference: "{{item.answer}}" };
const STARTS = {
  sft: ROWS_START, dpo: ROWS_START, distill: { ...ROWS_START, teacher: "" }, reward: ROWS_START,
  rl: { epochs: 1, mini_batches: 1, rollouts: { steps: 50, prompts_per_step: 8, group_size: 8, grader: GRADER } },
};
const lengthOf = (kind) => (kind === "rl" ? ["rollouts", "steps"] : ["epochs"]);
const pretty = (settings) => JSON.stringify(settings, null, 2);

/** The settings of a form as an object. Raises Problem if they are none. */
function settingsOf({ settings }) {
  const found = parsedJson(settings.value);
  if (found instanceof Error) throw new Problem(0, `This is not valid JSON: ${found.message}`, "settings");
  return found;
}

function parsedJson(text) {
  try {
    const found = JSON.parse(text || "{}");
    const isObject = found !== null && typeof found === "object" && !Array.isArray(found);
    return isObject ? found : new SyntaxError("expected an object, in braces");
  } catch (error) {
    return error;
  }
}

/** The run that a form asks for. Raises Problem if its settings are not JSON. */
export function runOf(elements) {
  const settings = settingsOf(elements), { rollouts } = settings, name = textOf(elements, "run_name");
  const kind = textOf(elements, "kind"), uri = addressIn(elements.dataset), held = addressIn(elements.eval_dataset);
  const withUri = (own, address) => (Array.isArray(own) ? [...(address ? [{ uri: address }] : []), ...own]
    : { ...own, uri: address });
  const withPrompts = (part, address) => ({ ...part, prompts: withUri(part?.prompts, address) });
  const heldOut = held ? { held_out: withPrompts(rollouts?.held_out, held) } : {};
  const data = kind === "rl" ? { rollouts: { ...withPrompts(rollouts, uri), ...heldOut } } : {
    dataset: withUri(settings.dataset, uri),
    ...(held ? { eval_dataset: { ...settings.eval_dataset, uri: held } } : {}),
  };
  return { kind, model: addressIn(elements.model), ...(name ? { name } : {}), ...settings, ...data };
}

/** The field of the form for a place in a run. */
export function fieldOfRun(place, { kind: { value: kind } }) {
  const rest = place.split("."), inner = rest[0] in MODELS ? rest.slice(1) : rest, path = inner.join(".");
  if (path === "name") return "run_name";
  if (inner[0] === "model" || inner[0] === "model_uri") return "model";
  if (inner.at(-1) === "uri" && (inner[0] === "eval_dataset" || inner[1] === "held_out")) return "eval_dataset";
  if (path === lengthOf(kind).join(".")) return "duration";
  if (path === "learning_rate" || path === "trainable.rank") return inner.at(-1);
  if (path === "file" || path === "eval_file") return path;
  const isUri = inner.at(-1) === "uri" && (["dataset", "source"].includes(inner[0]) || inner[1] === "prompts");
  return isUri ? "dataset" : "settings";
}

/** The fields of a run, named like the options of the command line. */
export function RunFields({ hasName = true, takesFiles = false }) {
  const [kind, setKind] = useState("sft"), [text, setText] = useState(pretty(STARTS.sft));
  const [isOpen, setOpen] = useState(false), valid = useRef({}), { form } = useContext(InForm);
  const found = parsedJson(text), isRl = kind === "rl";
  const settings = found instanceof Error ? valid.current : found;
  valid.current = settings;
  const change = (path, value) => found instanceof Error || setText(pretty(changed(found, path, value)));
  const choose = ({ target: { value } }) => {
    if (text === pretty(STARTS[kind])) setText(pretty(STARTS[value]));
    setKind(value);
  };
  useEffect(() => {
    for (const [name, value] of new URLSearchParams(location.search)) {
      if (["model", "dataset"].includes(name)) showAddress(form.current.elements[name], value);
    }
  }, []);
  const numeric = (path, rest) => ({ type: "number", value: valueAt(settings, path), ...rest,
    onInput: ({ target: { value } }) => change(path, value === "" ? undefined : Number(value)) });
  return html`
    <${Field} name="kind" label="Kind" options=${KINDS} onChange=${choose} />
    ${hasName && html`<${Field} name="run_name" label="Name" placeholder="its id, if empty"
      title="the name under which its result is published" />`}
    <${Field} name="model" label="Model" placeholder="folder, URI, hub id, name"
      title="a folder, a file:// or s3:// URI, a hub id, or the name of what you published" />
    <${Field} name="duration" label=${isRl ? "Steps" : "Epochs"}
      ...${numeric(lengthOf(kind), { min: 0, step: "any" })} />
    <${Field} name="learning_rate" label="Learning rate" placeholder=${FRAME.rates[kind]}
      ...${numeric(["learning_rate"], { min: 0, step: "any" })} />
    <${Field} name="rank" label="Rank" placeholder=${FRAME.rank} title="of the trained adapter; full training has none"
      disabled=${(settings.trainable?.kind ?? "lora") !== "lora"}
      ...${numeric(["trainable", "rank"], { min: 1, step: 1 })} />
    <${Address} name="dataset" label=${isRl ? "Prompts" : "Dataset"} placeholder="s3://…, https://…, or a file's URI"
      file=${takesFiles && "file"} uploadLabel="Upload the dataset" />
    <${Address} name="eval_dataset" label=${isRl ? "Eval prompts" : "Eval dataset"} placeholder="none"
      file=${takesFiles && "eval_file"} uploadLabel="Upload the eval dataset" />
    <details class="settings wide" onToggle=${(event) => setOpen(event.currentTarget.open)}>
      <summary>Settings, field by field</summary>
      <div>${isOpen && html`<${SettingsFields} kind=${kind} settings=${settings} change=${change} />`}</div>
    </details>
    <details class="as-json wide"><summary>Settings as JSON</summary>
      <${Field} name="settings" label="Other settings of the run, as JSON" rows="6" value=${text}
        onInput=${(event) => setText(event.target.value)} />
    </details>`;
}

const IN_THE_FORM = ["kind", "schema_version", "name", "model", "dataset", "rollouts.prompts", "eval_dataset",
  "rollouts.held_out.prompts"];
const SCALARS = ["boolean", "integer", "number", "string"];
const PREFIXES = { held_out: "eval_", weight_sync: "sync_" };  // as the command line's options have them
const DEEPEST = 3;

/** Follow a reference, and leave null out of what may be absent. */
function resolved(schemas, schema) {
  const [first, ...others] = (schema.anyOf ?? []).filter(({ type }) => type !== "null");
  const only = first && !others.length ? resolved(schemas, first) : schema;
  const { description, default: usual } = schema;
  const own = { ...(description ? { description } : {}), ...("default" in schema ? { default: usual } : {}) };
  return { ...(schema.$ref ? schemas[schema.$ref.split("/").pop()] : only), ...own };
}

/** The fields of an object, each with its path; those of a choice between objects are of the chosen one. */
function* walk(schemas, object, path, settings, prefix = "") {
  for (const [name, given] of Object.entries(object.properties ?? {})) {
    const inner = [...path, name], schema = resolved(schemas, given);
    if (IN_THE_FORM.includes(inner.join(".")) || "const" in schema) continue;
    const kinds = schema.discriminator?.propertyName === "kind" ? schema.discriminator.mapping : null;
    if (kinds) {
      const usual = schema.default?.kind, chosen = valueAt(settings, inner)?.kind ?? usual;
      const choice = { enum: Object.keys(kinds), default: usual, description: schema.description };
      yield { path: [...inner, "kind"], label: name, schema: choice, isChoice: true };
      const object = kinds[chosen] && inner.length < DEEPEST && resolved(schemas, { $ref: kinds[chosen] });
      if (object) yield* walk(schemas, object, inner, settings, `${chosen}_`);
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

let described;

/** The settings of a run, from the service's own description of its models. Lists and graders have the JSON alone. */
function SettingsFields({ kind, settings, change }) {
  const [schemas, setSchemas] = useState(null);
  useEffect(() => {
    described ??= get("/openapi.json").then(({ components }) => components.schemas);
    described.then(setSchemas, (error) => toast(error.message, true));
  }, []);
  if (!schemas) return null;
  const groups = new Map([["", []]]);
  for (const field of walk(schemas, resolved(schemas, { $ref: MODELS[kind] }), [], settings)) {
    const group = field.path.slice(0, field.isChoice ? -2 : -1).join(" · ");
    groups.set(group, [...(groups.get(group) ?? []), field]);
  }
  return [...groups].map(([group, fields]) => html`<fieldset key=${group}>
    <legend>${group ? words(group) : "run"}</legend>
    ${fields.map((field) => html`<${SettingField} key=${field.path.join(".")} ...${field}
      value=${valueAt(settings, field.path)} change=${change} />`)}
  </fieldset>`);
}

function SettingField({ path, label, schema, isChoice, value, change }) {
  const set = ({ target: { value: text } }) => {
    const read = { boolean: (told) => told === "true", integer: Number, number: Number }[schema.type] ?? String;
    const found = text === "" ? undefined : read(text);
    if (isChoice) change(path.slice(0, -1), found && { kind: found });
    else change(path, found);
  };
  const names = schema.type === "boolean" ? ["true", "false"] : schema.enum;
  const usual = String(schema.default ?? ""), type = schema.type === "string" ? "text" : "number";
  const control = names ? {
    options: [["", usual ? `${words(usual)} (default)` : "default"], ...names.map((one) => [one, words(one)])],
    value: String(value ?? ""),
  } : { type, placeholder: usual, value, step: type === "number" ? "any" : null };
  return html`<div><${Field} label=${words(label)} ...${control} onInput=${set} />
    ${schema.description && html`<small class="muted">${schema.description}</small>`}</div>`;
}
