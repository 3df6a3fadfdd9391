// Published models: a conversation with one or with two side by side, whose answers come as they are drawn; the list.

import { Act, acting, bytes, events, get, Heading, html, Loaded, moment, mount, named, nameOf, number, post, Problem,
  removing, runLink, Table, useData, useReducer, useRef, useState } from "./page.js";

const downloadOf = (id) => `/api/v1/models/${encodeURIComponent(id)}/download`;
const FORMATS = { merged: "Merged safetensors", gguf: "GGUF for llama.cpp", fp8: "FP8 for vLLM", mlx: "MLX" };

/** A button by which the service writes a whole model for another program; then a link to it takes its place. */
function Export({ id, format, name }) {
  const [view, setView] = useState(null), path = `/models/${encodeURIComponent(id)}/exports`;
  const write = async () => {
    let found = await post(path, { format });
    for (; found.state === "running"; found = await get(`${path}/${found.label}`)) {
      await new Promise((done) => setTimeout(done, 1000));
    }
    if (found.error) throw new Problem(400, found.error);
    setView(found);
  };
  const href = `/api/v1${path}/${view?.label}/download`;
  return view ? html`<a class="button" href=${href} download>${name}: ${bytes(view.num_bytes)}</a>`
    : html`<${Act} label=${name} name=${`Export ${id}: ${name}`} work=${write} />`;
}

const Exports = ({ id, kind }) => html`<details><summary aria-label=${`Export ${id}`}>Export</summary>
  <ul class="plain">${Object.entries(FORMATS).filter(([format]) => kind === "adapter" || format !== "merged").map(
    ([format, name]) => html`<li><${Export} id=${id} format=${format} name=${name} /></li>`)}</ul></details>`;

/** The newest version, and those before it, each to be downloaded. */
const Versions = ({ name, version, versions }) => (versions.length === 1 ? `v${version}` : html`
  <details><summary>v${version} of ${versions.length}</summary>
    <ul class="plain">${versions.toReversed().map((n) => html`
    <li><a href=${downloadOf(`${name}:v${n}`)} download>v${n}</a></li>`)}</ul></details>`);

function row(one, reload) {
  const { id, name } = one, path = encodeURIComponent(name);
  const question = `Delete every version of ${name}? Runs that were started from it continue, but it can no longer `
    + "answer questions.";
  return [
    html`<strong>${name}</strong><span class="under muted small">${one.kind}</span>`,
    html`<${Versions} key=${id} ...${one} />`,
    one.base ? named(one.base) : "–", html`<td class="mono">${runLink(one.run_id)}</td>`, moment(one.created_at),
    html`<td class="number"><div class="actions">
      <a class="button" href=${`/new?model=${path}`} aria-label=${`Train on from ${name}`}>Train on</a>
      <a class="button" href=${downloadOf(id)} download aria-label=${`Download ${id}`}>Download</a>
      <${Exports} key=${id} id=${id} kind=${one.kind} />
      <${Act} label="Delete" name=${`Delete ${name}`} look="danger"
        work=${removing(question, `/models/${path}`, `${name} is deleted`, reload)} />
    </div></td>`,
  ];
}

const mark = (text, look = "mark") => html`<span class=${look}>${text}</span>`;

/** Ask one model; its answer goes into `turn` as it is drawn. What was asked stays only if an answer came. */
async function ask(model, { turns, turn, system, settings, signal, redraw }) {
  const said = turns.filter(({ isDone }) => isDone).flatMap(({ question, answer }) => (
    [{ role: "user", content: question }, { role: "assistant", content: answer }]
  ));
  const first = system ? [{ role: "system", content: system }] : [];
  const messages = [...first, ...said, { role: "user", content: turn.question }];
  turns.push(turn);
  try {
    const body = { model, messages, stream: true, ...settings };
    for await (const { choices, error } of events("/v1/chat/completions", body, signal)) {
      if (error) throw new Problem(503, error.message);
      for (const { delta, finish_reason: finish } of choices ?? []) {
        turn.answer += delta.content ?? "";
        if (finish === "length") turn.mark = mark("cut off", "mark calm");
      }
      redraw();
    }
    turn.isDone = true;
  } catch (error) {
    if (turn.answer) turn.mark = mark(error.name === "AbortError" ? "stopped" : "interrupted");
    else turns.splice(turns.indexOf(turn), 1);
    if (error.name !== "AbortError") throw error;
  } finally {
    redraw();
  }
}

const bubble = (who, text, more) => html`<article class="sample"><div class="who">${who}${more}</div>
  <pre>${text}</pre></article>`;

const Column = ({ model, turns }) => html`<div><h3>${model}</h3>
  <div role="log" aria-label=${`Conversation with ${model}`}>${turns.map(({ question, answer, isDone, mark: more }) => [
    bubble("you", question), bubble(model, answer || (isDone ? "(empty)" : "…"), more),
  ])}</div></div>`;

function Playground({ data }) {
  const [problem, setProblem] = useState(""), [shown, setShown] = useState([]);
  const [, redraw] = useReducer((n) => n + 1, 0), form = useRef(), hangUp = useRef(null), talks = useRef(new Map());
  const wanted = new URLSearchParams(location.search).get("ask");
  const send = acting(async () => {
    const { elements } = form.current, text = elements.message.value.trim(), system = elements.system.value.trim();
    setProblem("");
    if (!text) return;
    const models = [...new Set([elements.model.value, elements.other.value].filter(Boolean))];
    const numberOf = (name) => (elements[name].value === "" ? {} : { [name]: Number(elements[name].value) });
    const settings = { ...numberOf("temperature"), ...numberOf("max_tokens") };
    setShown(models);
    hangUp.current = new AbortController();
    elements.stop.disabled = false;
    elements.message.value = "";
    const ended = await Promise.allSettled(models.map((model) => {
      if (!talks.current.has(model)) talks.current.set(model, []);
      const turns = talks.current.get(model), turn = { question: text, answer: "" };
      return ask(model, { turns, turn, system, settings, signal: hangUp.current.signal, redraw });
    }));
    elements.stop.disabled = true;
    const broken = ended.filter(({ status }) => status === "rejected").map(({ reason }) => reason.message);
    setProblem(broken.join("; "));
    if (broken.length && !elements.message.value) elements.message.value = text;  // to be sent again
    elements.message.focus();
  });
  const begin = () => {
    hangUp.current?.abort();
    talks.current = new Map();
    setShown([]);
    form.current.elements.message.focus();
  };
  const choices = (chosen) => [
    ...data.map(({ name }) => html`<option key=${name} value=${name} selected=${name === chosen}>${name}</option>`),
    ...data.filter(({ base }) => base).map(({ name, base }) => html`
      <option key=${name} value=${`${name}:base`}>${`${nameOf(base)}: the base model of ${name}`}</option>`),
  ];
  return html`<section class="card" aria-labelledby="ask-h">
    <div class="section-head"><h2 id="ask-h">Playground</h2>
      <button type="button" id="anew" onClick=${begin}>New conversation</button></div>
    <div id="columns" class="two">${shown.map((model) => html`
      <${Column} key=${model} model=${model} turns=${talks.current.get(model) ?? []} />`)}</div>
    <form id="ask" class="form" onSubmit=${send} ref=${form}>
      <p class="problem" role="alert" hidden=${!problem}>${problem}</p>
      <fieldset><legend class="unseen">Your question</legend>
        <label>Model <select name="model" required>${choices(wanted)}</select></label>
        <label>Compare with <select name="other"><option value="">no other model</option>${choices()}</select></label>
        <label>Temperature
          <input name="temperature" type="number" min="0" max="2" step="0.1" defaultValue="0.7" /></label>
        <label>Max tokens <input name="max_tokens" type="number" min="1" step="1" defaultValue="256" /></label>
        <label class="wide">System message <input name="system" autocomplete="off" placeholder="none" /></label>
        <label class="wide">Message <textarea name="message" rows="3" required /></label>
      </fieldset>
      <div class="actions"><button class="strong" type="submit" disabled=${!data.length}>Send</button>
        <button type="button" id="stop" disabled onClick=${() => hangUp.current?.abort()}>Stop</button></div>
    </form>
  </section>`;
}

function Models() {
  const [data, reload, failed] = useData(() => get("/models"));
  const none = "Nothing is published yet. When a run succeeds, it publishes its result under its name.";
  return html`
    <${Heading} title="Models" more=${data?.length ? `${number(data.length)} published` : ""} />
    <${Playground} data=${data ?? []} />
    <section class="card flush" aria-label="Published models"><div id="models">
      <${Loaded} data=${data} failed=${failed} none=${none} draw=${(all) => html`<${Table} rows=${all.map(
        (one) => row(one, reload))} names=${["Model", "Version", "Base model", "Run", "Published", ""]} />`} />
    </div></section>`;
}

mount(html`<${Models} />`);
