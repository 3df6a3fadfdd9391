// Published models: a conversation with one, or with two side by side, whose answers come as they are drawn; and the list.

import { act, ago, byId, bytes, clock, events, get, isSure, make, named, nameOf, number, post, Problem, remove, show, table, toast } from "./page.js";

const form = byId("ask"), { elements } = form, stop = byId("stop");
const columns = new Map();  // by model: what was said to it and by it, and where that is shown
let hangUp = null;

async function load() {
  const data = await get("/models");
  byId("summary").textContent = data.length ? `${number(data.length)} published` : "";
  const options = () => data.map(({ name }) => make("option", { value: name }, name));
  const bases = () => data.filter(({ base }) => base).map(({ name, base }) => make("option", { value: `${name}:base` }, `${nameOf(base)}: the base model of ${name}`));
  const chosen = elements.model.value || new URLSearchParams(location.search).get("ask");
  show(elements.model, options(), bases());
  if (data.some(({ name }) => name === chosen)) elements.model.value = chosen;
  show(elements.other, make("option", { value: "" }, "no other model"), options(), bases());
  form.querySelector("[type=submit]").disabled = !data.length;
  show(byId("models"), data.length ? modelTable(data) : make("p.empty", {}, "Nothing is published yet. When a run succeeds, it publishes its result under its name."));
}

function modelTable(data) {
  const rows = data.map((one) => make("tr", {},
    make("td", {}, make("strong", {}, one.name), make("span.under.muted.small", {}, one.kind)),
    make("td", {}, one.versions.length > 1 ? versions(one) : `v${one.version}`),
    make("td", {}, one.base ? named(one.base) : "–"),
    make("td", {}, make("a.mono", { href: `/runs/${encodeURIComponent(one.run_id)}` }, one.run_id)),
    make("td", { title: clock(one.created_at) }, ago(one.created_at)),
    make("td.number", {}, make("div.actions", {},
      make("a.button", { href: `/new?model=${encodeURIComponent(one.name)}`, "aria-label": `Train on from ${one.name}` }, "Train on"),
      make("a.button", { href: downloadOf(one.id), download: true, "aria-label": `Download ${one.id}` }, "Download"),
      exportsOf(one),
      make("button.danger", { type: "button", "aria-label": `Delete ${one.name}`, click: (event) => act(event.target, () => forgetModel(one.name)) }, "Delete")))));
  return table(["Model", "Version", "Base model", "Run", "Published", ""], rows);
}

const downloadOf = (id) => `/api/v1/models/${encodeURIComponent(id)}/download`;

const FORMATS = { merged: "Merged safetensors", gguf: "GGUF for llama.cpp", fp8: "FP8 for vLLM", mlx: "MLX" };

/** Buttons by which the service writes a whole model for another program; then a link to it takes the button's place. */
function exportsOf({ id, kind }) {
  const formats = Object.entries(FORMATS).filter(([format]) => kind === "adapter" || format !== "merged");
  const items = formats.map(([format, name]) => {
    const button = make("button", { type: "button", "aria-label": `Export ${id}: ${name}`, click: () => act(button, () => exported(button, id, format, name)) }, name);
    return make("li", {}, button);
  });
  return make("details", {}, make("summary", { "aria-label": `Export ${id}` }, "Export"), make("ul.plain", {}, items));
}

async function exported(button, id, format, name) {
  const path = `/models/${encodeURIComponent(id)}/exports`;
  let view = await post(path, { format });
  for (; view.state === "running"; view = await get(`${path}/${view.label}`)) await new Promise((done) => setTimeout(done, 1000));
  if (view.error) throw new Problem(400, view.error);
  button.replaceWith(make("a.button", { href: `/api/v1${path}/${view.label}/download`, download: true }, `${name}: ${bytes(view.num_bytes)}`));
}

/** The newest version, and those before it, each to be downloaded. */
function versions({ name, version, versions: all }) {
  const links = all.toReversed().map((n) => make("li", {}, make("a", { href: downloadOf(`${name}:v${n}`), download: true }, `v${n}`)));
  return make("details", {}, make("summary", {}, `v${version} of ${all.length}`), make("ul.plain", {}, links));
}

async function forgetModel(name) {
  if (!await isSure(`Delete every version of ${name}? Runs that were started from it continue, but it can no longer answer questions.`)) return;
  await remove(`/models/${encodeURIComponent(name)}`);
  toast(`${name} is deleted`);
  await load();
}

function column(model) {
  if (!columns.has(model)) {
    const said = make("div", { role: "log", "aria-label": `Conversation with ${model}` });
    columns.set(model, { messages: [], said, node: make("div", {}, make("h3", {}, model), said) });
  }
  return columns.get(model);
}

const bubble = (who, text) => {
  const body = make("pre", {}, text);
  return { node: make("article.sample", {}, make("div.who", {}, who), body), body };
};

/** Ask one model, and show its answer while it is drawn. What was asked stays only where an answer came. */
async function ask(model, text, settings, signal) {
  const { messages, said } = column(model);
  const question = { role: "user", content: text };
  const asked = bubble("you", text), answer = bubble(model, "…");
  said.append(asked.node, answer.node);
  const system = elements.system.value.trim();
  const body = { model, messages: [...(system ? [{ role: "system", content: system }] : []), ...messages, question], stream: true, ...settings };
  let content = "", end = "";
  try {
    for await (const { choices, error } of events("/v1/chat/completions", body, signal)) {
      if (error) throw new Problem(503, error.message);
      for (const { delta, finish_reason } of choices ?? []) {
        content += delta.content ?? "";
        end = finish_reason ?? end;
      }
      answer.body.textContent = content || "…";
    }
    answer.body.textContent = content || "(empty)";
    if (end === "length") answer.node.firstChild.append(make("span.mark.calm", {}, "cut off"));
    messages.push(question, { role: "assistant", content });
  } catch (error) {
    if (!content) { asked.node.remove(); answer.node.remove(); }
    else answer.node.firstChild.append(make("span.mark", {}, error.name === "AbortError" ? "stopped" : "interrupted"));
    if (error.name !== "AbortError") throw error;
  }
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const problem = form.querySelector(".problem"), text = elements.message.value.trim();
  problem.hidden = true;
  if (!text) return;
  const models = [...new Set([elements.model.value, elements.other.value].filter(Boolean))];
  const numberOf = (name) => (elements[name].value === "" ? {} : { [name]: Number(elements[name].value) });
  show(byId("columns"), models.map((model) => column(model).node));
  hangUp = new AbortController();
  event.submitter.disabled = true;
  stop.disabled = false;
  elements.message.value = "";
  const settings = { ...numberOf("temperature"), ...numberOf("max_tokens") };
  const ended = await Promise.allSettled(models.map((model) => ask(model, text, settings, hangUp.signal)));
  event.submitter.disabled = false;
  stop.disabled = true;
  const broken = ended.filter(({ status }) => status === "rejected").map(({ reason }) => reason.message);
  problem.textContent = broken.join("; ");
  problem.hidden = !broken.length;
  if (broken.length && !elements.message.value) elements.message.value = text;  // to be sent again
  elements.message.focus();
});

stop.addEventListener("click", () => hangUp?.abort());
byId("anew").addEventListener("click", () => {
  hangUp?.abort();
  columns.clear();
  show(byId("columns"));
  elements.message.focus();
});

load().catch((error) => show(byId("models"), make("p.problem", { role: "alert" }, error.message)));
