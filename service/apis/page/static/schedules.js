// Schedules: their next times, their last actions, what can be done with one, and a form for a new one.

import { Field, fieldOfRun, Form, FormFold, RunFields, runOf, Span, textOf } from "./form.js";
import { Act, clock, Facts, get, Heading, html, isSure, Loaded, moment, mount, now, post, remove, runLink, Table, toast,
  until, useData, useLayoutEffect, useRef, useState, words } from "./page.js";
import { stateBadge } from "./status.js";

const OVERLAPS = [["skip", "skip the new one"], ["buffer_one", "queue one"], ["buffer_all", "queue all"],
  ["allow_all", "start in parallel"], ["cancel_other", "cancel the previous one"]];
const UNITS = [[60, "minutes"], [3600, "hours"], [86400, "days"]];
const chosen = (options, value) => options.map(([one, text]) => [one, text, one === value]);
const ZONES = ["UTC", ...(Intl.supportedValuesOf?.("timeZone") ?? [])];

// Actions are asked for when a schedule's counts have changed, and for a while after: Temporal reports them late.
const LOOKS_S = 15;
const known = new Map();

async function read() {
  const views = await get("/schedules"), names = views.map((view) => view.scheduled.name);
  for (const name of known.keys()) if (!names.includes(name)) known.delete(name);
  await Promise.all(views.filter(isDue).map((view) => readActions(view.scheduled.name)));
  return views.map((view) => ({ ...view, actions: known.get(view.scheduled.name)?.actions ?? [] }));
}

function isDue({ scheduled: { name }, created_at: at, num_actions, num_overlapped, num_missed }) {
  const stamp = String([at, num_actions, num_overlapped, num_missed]), before = known.get(name) ?? { actions: null };
  if (before.stamp !== stamp) known.set(name, { ...before, stamp, until: now() + (before.stamp ? LOOKS_S : 0) });
  const { actions, until: end } = known.get(name);
  return !actions || now() < end || actions.some((action) => action.state === "preparing");
}

async function readActions(name) {
  try {
    known.get(name).actions = (await get(`/schedules/${encodeURIComponent(name)}`)).actions;
  } catch (error) {
    if (error.status !== 404) throw error;  // it was removed since it was listed
    known.delete(name);
  }
}

function length(seconds) {
  const [size, unit] = UNITS.toReversed().find(([each]) => seconds % each === 0) ?? [1, "s"];
  return `${seconds / size} ${seconds === size && size > 1 ? unit.slice(0, -1) : unit}`;
}

const BADGES = { started: "succeeded", failed: "failed", skipped: "cancelled", preparing: "running" };
const actionRow = ({ at, state, run_id: run, reason }) =>
  [moment(at), stateBadge(BADGES[state], state), run ? runLink(run) : reason ?? ""];

function Schedule({ view, refresh, backfill }) {
  const { scheduled, paused, note, next_times: times, actions } = view, { name } = scheduled;
  const path = `/schedules/${encodeURIComponent(name)}`, call = (verb) => () => post(`${path}/${verb}`);
  const next = paused ? `paused${note && note !== "paused" ? `: ${note}` : ""}`
    : times.length ? `next ${until(times[0])}` : "no more times";
  // `work` returns nothing if the question was answered with no.
  const button = (label, work, done, look) => html`<${Act} label=${label} name=${`${label}: ${name}`} look=${look}
    work=${async () => {
    if (!(await work())) return;
    toast(`${name}: ${done}`);
    known.delete(name);
    refresh();
  }} />`;
  const question = `Remove the schedule ${name}? Its runs are kept, and a running one continues.`;
  return html`<section class="card" aria-label=${`Schedule ${name}`}>
    <div class="schedule-head">
      <div><h2>${name} <span class="kind">${scheduled.run.kind}</span></h2>
        <span class="muted" title=${times.length ? clock(times[0]) : ""}>${next}</span></div>
      <div class="actions">
        ${paused ? button("Resume", call("resume"), "resumed.") : button("Pause", call("pause"), "paused.")}
        ${button("Trigger", call("trigger"), "triggered.")}
        ${button("Backfill", () => backfill(name), "runs for that period are being started.")}
        ${button("Remove", async () => (await isSure(question)) && remove(path), "removed.", "danger")}
      </div>
    </div>
    <${Facts} pairs=${[
      ["When", scheduled.cron ? `${scheduled.cron} (${scheduled.timezone})` : `every ${length(scheduled.every_s)}`],
      ["Overlap", words(scheduled.overlap)], ["Skipped if late by", `more than ${length(scheduled.catch_up_s)}`],
      ["Continues from the last version", scheduled.continues ? "yes" : "no"], ["Triggered", `${view.num_actions}`],
      ["Skipped", `${view.num_overlapped} overlapping, ${view.num_missed} missed`],
    ]} />
    ${actions.length > 0 && html`<${Table} names=${["When", "Result", ""]} rows=${actions.map(actionRow)} />`}
  </section>`;
}

function NewSchedule({ made }) {
  const [when, setWhen] = useState("cron");
  const send = async ({ elements }) => {
    const value = (name) => textOf(elements, name);
    // An empty number is sent as it is, for the service to say that it is none.
    const seconds = (name) => (value(name) && Math.round(Number(value(name)) * Number(elements[`${name}_unit`].value)));
    const { scheduled } = await post("/schedules", {
      name: value("name"),
      ...(when === "every" ? { every_s: seconds("every") }
        : { cron: value("cron"), timezone: value("timezone") || "UTC" }),
      overlap: value("overlap"),
      catch_up_s: seconds("catch_up"),
      continues: elements.continues.checked,
      even_unchanged: elements.even_unchanged.checked,
      run: runOf(elements),
    });
    made(scheduled.name);
  };
  const fieldOf = (place, elements) => {
    const [first, ...rest] = place.split(".");
    if (first === "run") return fieldOfRun(rest.join("."), elements);
    return { every_s: "every", catch_up_s: "catch_up" }[first] ?? first;
  };
  return html`<${Form} id="new-schedule" send=${send} fieldOf=${fieldOf}>
    <fieldset><legend>When it starts runs</legend>
      <${Field} name="name" label="Name of the schedule" placeholder="nightly" />
      <${Field} name="when" label="When" options=${[["cron", "at fixed times (cron)"], ["every", "at an interval"]]}
        onChange=${(event) => setWhen(event.target.value)} />
      <${Field} name="cron" label="Cron, in five fields" placeholder="0 2 * * *" title="minute hour day month weekday"
        hidden=${when !== "cron"} />
      <${Field} name="timezone" label="Time zone" list="zones" placeholder="UTC" hidden=${when !== "cron"} />
      <${Span} name="every" label="Every" units=${chosen(UNITS, 3600)} unitLabel="Unit of every"
        hidden=${when !== "every"} />
      <${Field} name="overlap" label="If the previous run is still going" options=${OVERLAPS} />
      <${Span} name="catch_up" label="Skip if late by more than" defaultValue="10" units=${chosen(UNITS, 60)}
        unitLabel="Unit of missed by" />
      <${Field} name="continues" type="checkbox" label="continue from the last published version" />
      <${Field} name="even_unchanged" type="checkbox" label="also when the data has not changed" />
    </fieldset>
    <fieldset><legend>Run</legend><${RunFields} /></fieldset>
    <datalist id="zones">${ZONES.map((value) => html`<option value=${value} />`)}</datalist>
    <div class="actions"><button class="strong" type="submit">Create schedule</button></div>
  <//>`;
}

/** Ask for a span of time, and send it. `done` gets the answer, or nothing if the dialog was closed. */
function Backfill({ name, done }) {
  const dialog = useRef(), answer = useRef();
  useLayoutEffect(() => dialog.current.showModal(), []);
  const send = async ({ elements }) => {
    const at = (field) => new Date(elements[field].value).getTime() / 1000;
    const span = { begin: at("begin"), end: at("end"), overlap: elements.overlap.value };
    answer.current = await post(`/schedules/${encodeURIComponent(name)}/backfill`, span);
    dialog.current.close();
  };
  return html`<dialog id="backfill" aria-labelledby="backfill-h" ref=${dialog} onClose=${() => done(answer.current)}>
    <${Form} id="backfill-form" send=${send}>
      <h2 id="backfill-h">Backfill ${name}</h2>
      <p class="muted">Starts the runs that a past period would have had, for at most 31 days. Times are in this
        browser's time zone.</p>
      <${Field} name="begin" label="From" type="datetime-local" step="1" />
      <${Field} name="end" label="To" type="datetime-local" step="1" />
      <${Field} name="overlap" label="If the previous run is still going" options=${chosen(OVERLAPS, "buffer_all")} />
      <div class="actions"><button type="button" onClick=${() => dialog.current.close()}>No, go back</button>
        <button class="strong" type="submit">Backfill</button></div>
    <//></dialog>`;
}

function Schedules() {
  const [views, refresh] = useData(read, () => 5000), [asked, setAsked] = useState(null);
  const made = (name) => {
    toast(`${name}: created.`);
    refresh();
  };
  const backfill = (name) => new Promise((resolve) => {
    setAsked({ name, done: (answer) => {
      setAsked(null);
      resolve(answer);
    } });
  });
  return html`
    <${Heading} title="Schedules" more=${views?.length || ""} />
    <${FormFold} title="New schedule" form=${NewSchedule} made=${made} />
    <div id="schedules">
      <${Loaded} data=${views} none="No schedules." look="card empty" draw=${(all) => all.map((view) => html`
        <${Schedule} key=${view.scheduled.name} view=${view} refresh=${refresh} backfill=${backfill} />`)} />
    </div>
    ${asked && html`<${Backfill} ...${asked} />`}`;
}

mount(html`<${Schedules} />`);
