// Sweeps: each with its trials as a table, and as lines over one axis for each parameter and one for the metric; and a
// form for a new one, which is that of a run and the fields in which its trials differ.

import { Field, fieldOfRun, Form, FormFold, RunFields, runOf, textOf } from "./form.js";
import { Act, ago, clock, get, Heading, html, isSure, Loaded, mount, nameOf, number, post, runLink, Table, toast,
  useData, useLayoutEffect, useRef, useState } from "./page.js";
import { stateBadge } from "./status.js";

const HEIGHT = 190, TOP = 26, BOTTOM = 22, SIDE = 54, LEAST = 110;  // LEAST: pixels between two axes

function text(value) {
  if (typeof value === "number") return number(value);
  return typeof value !== "string" ? JSON.stringify(value) : value.includes("://") ? nameOf(value) : value;
}

/** An axis: where a trial is on it, from 0 (bottom) to 1, and the names of some places. */
function axisOf(path, space) {
  if (space.choices) {
    const all = space.choices.map((choice) => JSON.stringify(choice));
    const at = (n) => (all.length > 1 ? n / (all.length - 1) : 0.5);
    return { name: path, at: ({ values }) => at(all.indexOf(JSON.stringify(values[path]))),
      places: space.choices.map((choice, n) => [at(n), text(choice)]) };
  }
  const scale = space.log ? Math.log : (value) => value, low = scale(space.min), high = scale(space.max);
  return { name: path, at: ({ values }) => (scale(values[path]) - low) / (high - low),
    places: [[0, number(space.min)], [1, number(space.max)]] };
}

function metricAxis(name, found) {
  const low = Math.min(...found), high = Math.max(...found);
  if (low === high) return { name, at: () => 0.5, places: [[0.5, number(low)]] };
  return { name, at: ({ value }) => (value - low) / (high - low), places: [[0, number(low)], [1, number(high)]] };
}

function Coordinates({ view }) {
  const measured = view.trials.filter((trial) => trial.value !== null), frame = useRef(), [room, setRoom] = useState(0);
  useLayoutEffect(() => setRoom(frame.current?.clientWidth ?? 0), [measured.length]);
  if (!measured.length) return null;
  const axes = Object.entries(view.sweep.parameters).map(([path, space]) => axisOf(path, space));
  axes.push(metricAxis(view.metric, measured.map((trial) => trial.value)));
  const width = Math.max(room - 1, 2 * SIDE + LEAST * (axes.length - 1));
  const x = (n) => SIDE + (n / (axes.length - 1)) * (width - 2 * SIDE);
  const y = (at) => HEIGHT - BOTTOM - at * (HEIGHT - TOP - BOTTOM);
  const short = (name) => (name.length > 14 ? `${name.slice(0, 13)}…` : name);
  const axis = ({ name, places }, n) => html`
    <line class="grid" x1=${x(n)} x2=${x(n)} y1=${TOP} y2=${HEIGHT - BOTTOM} />
    <text x=${x(n)} y="12" text-anchor="middle">${name}</text>
    ${places.map(([at, told]) => html`<text x=${x(n) + 5} y=${y(at) + 4}>${short(told)}</text>`)}`;
  const line = (trial) => {
    const look = trial.number === view.best ? "c0" : trial.state === "succeeded" ? "c1 raw" : "c1 raw other";
    const path = axes.map(({ at }, n) => `${n ? "L" : "M"}${x(n).toFixed(1)} ${y(at(trial)).toFixed(1)}`).join("");
    const told = `trial ${trial.number}: ${view.metric} ${number(trial.value)}`;
    return html`<path key=${trial.number} class=${`line ${look}`} d=${path}><title>${told}</title></path>`;
  };
  const order = [...measured].sort((a, b) => (a.number === view.best) - (b.number === view.best));  // the best is last
  const names = axes.map(({ name }) => name).join(", ");
  const told = `Parallel coordinates of ${measured.length} trials: ${names}. The table below shows the same values.`;
  return html`<figure class="chart"><figcaption>Trials by their values
      <span class="latest">${view.best === null ? "" : `best: trial ${view.best}`}</span></figcaption>
    <div class="scroll" tabindex="0" role="region" aria-label="Trials by their values" ref=${frame}>
      <svg role="img" aria-label=${told} viewBox=${`0 0 ${width} ${HEIGHT}`} style=${{ width: `${width}px` }}>
        ${axes.map(axis)}${order.map(line)}</svg></div></figure>`;
}

function Sweep({ view, refresh }) {
  const { sweep, trials, best } = view, paths = Object.keys(sweep.parameters);
  const ended = trials.filter((trial) => !["running", "paused"].includes(trial.state)).length;
  const told = [`${ended} of ${view.num_trials} trials finished`, sweep.sampler,
    sweep.halving && "successive halving", `${view.direction} ${view.metric}`, ago(view.created_at)];
  const cancel = async () => {
    if (!(await isSure(`Cancel the sweep ${sweep.name} and its unfinished runs?`))) return;
    await post(`/sweeps/${view.sweep_id}/cancel`);
    toast(`${sweep.name}: cancelled.`);
    refresh();
  };
  const row = (trial) => [
    trial.number === best ? html`<strong>${trial.number} (best)</strong>` : `${trial.number}`, stateBadge(trial.state),
    number(trial.value), number(trial.step), ...paths.map((path) => text(trial.values[path])),
    trial.run_id ? runLink(trial.run_id) : "",
  ];
  return html`<section class="card" aria-label=${`Sweep ${sweep.name}`}>
    <div class="schedule-head">
      <div><h2>${sweep.name} <span class="kind">${sweep.run.kind}</span> ${stateBadge(view.state)}</h2>
        <span class="muted" title=${clock(view.created_at)}>${told.filter(Boolean).join(" · ")}</span></div>
      ${view.state === "running" && html`<div class="actions">
        <${Act} label="Cancel" name=${`Cancel: ${sweep.name}`} look="danger" work=${cancel} /></div>`}
    </div>
    ${view.problem && html`<p class="problem">${view.problem}</p>`}
    ${view.adapter && html`<p>Published as <a href="/models">${`${sweep.name}:v${view.version}`}</a></p>`}
    <${Coordinates} view=${view} />
    ${trials.length > 0 && html`
      <${Table} names=${["Trial", "State", view.metric, "Step", ...paths, "Run"]} rows=${trials.map(row)} />`}
  </section>`;
}

/** The values of a field, in the notation of `longshore sweep create --parameter`. */
function space(told) {
  const [, min, max, look] = /^([^,[/]+?)\.\.([^,:/]+)((?::(?:log|int))*)$/.exec(told) ?? [];
  if (max) return { min: Number(min), max: Number(max), log: look.includes("log"), integer: look.includes("int") };
  return { choices: told.startsWith("[") ? valueOf(told) : told.split(",").map((each) => valueOf(each.trim())) };
}

/** A JSON value; other text stands for itself. */
function valueOf(told) {
  try {
    return JSON.parse(told);
  } catch {
    return told;
  }
}

/** The fields in which trials differ: {n, path, told}. Rows without either are left out. */
function variedIn(elements) {
  const found = [];
  for (let n = 0; elements[`path_${n}`]; n += 1) {
    found.push({ n, path: textOf(elements, `path_${n}`), told: textOf(elements, `values_${n}`) });
  }
  return found.filter(({ path, told }) => path || told);
}

function fieldOf(place, elements) {
  const [first, ...rest] = place.split("."), path = rest.join(".");
  if (first === "run") return fieldOfRun(path, elements);
  if (first !== "parameters") return first;
  const row = variedIn(elements).find((one) => path === one.path || path.startsWith(`${one.path}.`));
  return row ? `values_${row.n}` : "path_0";
}

const SAMPLERS = [["tpe", "by TPE, which learns from trials"], ["random", "at random"],
  ["grid", "as a grid: every combination"]];
const DIRECTIONS = [["", "as the metric suggests"], ["minimize", "the lowest"], ["maximize", "the highest"]];
const PATHS = ["learning_rate", "trainable.rank", "batch_size", "epochs", "seed"];

function NewSweep({ made }) {
  const [count, setCount] = useState(1), [sampler, setSampler] = useState("tpe"), rows = useRef();
  useLayoutEffect(() => { if (count > 1) rows.current.lastElementChild.querySelector("input").focus(); }, [count]);
  const send = async ({ elements }, key) => {
    const given = (name, to = String) => (textOf(elements, name) ? { [name]: to(textOf(elements, name)) } : {});
    const { sweep } = await post("/sweeps", {
      name: textOf(elements, "name"), run: runOf(elements),
      parameters: Object.fromEntries(variedIn(elements).map(({ path, told }) => [path, space(told)])),
      ...given("sampler"), ...given("trials", Number), ...given("parallel", Number), ...given("metric"),
      ...given("direction"),
    }, { "idempotency-key": key });
    made(sweep.name);
  };
  return html`<${Form} id="new-sweep" send=${send} fieldOf=${fieldOf}>
    <fieldset><legend>Search</legend>
      <${Field} name="name" label="Name of the sweep" placeholder="tides" title="what the best trial is published as" />
      <${Field} name="sampler" label="Values are chosen" options=${SAMPLERS}
        onChange=${(event) => setSampler(event.target.value)} />
      <${Field} name="trials" label="Trials" type="number" min="1" step="1" defaultValue="12"
        placeholder=${sampler === "grid" ? "every combination" : ""} />
      <${Field} name="parallel" label="Trials at once" type="number" min="1" step="1" defaultValue="4" />
      <${Field} name="metric" label="Metric" placeholder="held-out loss or reward"
        title="a metric of the last step, such as loss" />
      <${Field} name="direction" label="Best is" options=${DIRECTIONS} />
    </fieldset>
    <fieldset class="one"><legend>Fields that differ between trials</legend>
      <p class="muted small">Values are a list (<code>8, 16, 32</code>) or a range (<code>1e-5..1e-3</code>);
        <code>:log</code> behind a range draws on a log scale, <code>:int</code> whole numbers.</p>
      <div id="varied" class="rows" ref=${rows}>${[...Array(count).keys()].map((n) => html`<fieldset key=${n}>
        <${Field} name=${`path_${n}`} label=${`Field ${n + 1}`} list="paths" placeholder="trainable.rank"
          defaultValue=${n ? "" : "learning_rate"} />
        <${Field} name=${`values_${n}`} label=${`Values of field ${n + 1}`} placeholder="8, 16, 32 or 4..64:log:int"
          defaultValue=${n ? "" : "1e-5..1e-3:log"} /></fieldset>`)}</div>
      <div class="actions">
        <button type="button" id="vary" onClick=${() => setCount(count + 1)}>Add a field</button></div>
      <datalist id="paths">${PATHS.map((path) => html`<option value=${path} />`)}</datalist>
    </fieldset>
    <fieldset><legend>Run of each trial</legend><${RunFields} hasName=${false} takesFiles /></fieldset>
    <div class="actions"><button class="strong" type="submit">Start sweep</button></div>
  <//>`;
}

function Sweeps() {
  const pause = (found) => (found.some((view) => view.state === "running") ? 2500 : 10000);
  const [views, refresh] = useData(() => get("/sweeps"), pause);
  const made = (name) => {
    toast(`${name}: started.`);
    refresh();
  };
  return html`
    <${Heading} title="Sweeps" more=${views?.length || ""} />
    <${FormFold} title="New sweep" form=${NewSweep} made=${made} />
    <div id="sweeps">
      <${Loaded} data=${views} none="No sweeps." look="card empty" draw=${(all) => all.map((view) => html`
        <${Sweep} key=${view.sweep_id} view=${view} refresh=${refresh} />`)} />
    </div>`;
}

mount(html`<${Sweeps} />`);
