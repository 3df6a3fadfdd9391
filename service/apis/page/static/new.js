// The form of a new run: its data are uploaded, previewed and counted before anything is trained.

import { preview, report } from "./details.js";
import { act, byId, duration, make, money, number, post, show, toast, upload } from "./page.js";
import { complain, fieldOfRun, forget, prepareSettings, refuse, runOf, settingsOf } from "./run_form.js";

const form = byId("new-run"), { elements } = form, place = byId("preview");
let key = newKey();  // what is sent again unchanged, as no answer came, is one run
prepareSettings(form);
for (const [name, value] of new URLSearchParams(location.search)) if (["model", "dataset"].includes(name)) elements[name].value = value;

form.addEventListener("input", () => { key = newKey(); });

function newKey() {
  return `page-${Array.from(crypto.getRandomValues(new Uint32Array(4)), (n) => n.toString(16)).join("")}`;
}

for (const picker of form.querySelectorAll("[type=file]")) picker.addEventListener("change", async () => {
  const [file] = picker.files;
  if (!file) return;
  forget(form);
  picker.disabled = true;
  try {
    const record = await upload(file);
    elements[picker.dataset.into].value = record.uri;
    toast(`${file.name} is uploaded`);
  } catch (error) {
    refuse(form, error, () => picker.name);
  } finally {
    picker.disabled = false;
  }
});

/** Do something with the run that the form asks for; what is refused is said at its field. */
async function withRun(work) {
  forget(form);
  const settings = settingsOf(form);
  if (!settings) return;
  try {
    await work(runOf(elements, settings));
  } catch (error) {
    refuse(form, error, fieldOfRun);
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  act(event.submitter, () => withRun(async ({ kind, ...run }) => {
    const started = await post(`/runs/${kind}`, run, { "idempotency-key": key });
    location.assign(`/runs/${started.run_id}`);
  }));
});

byId("look").addEventListener("click", (event) => act(event.target, () => withRun(async (run) => {
  if (run.kind === "rl" && !run.rollouts) return;
  const found = await post("/estimate", withDefaults(run));
  if (run.kind === "rl") show(place, estimated(found));
  else await preview(place, run, ({ report: rows }) => [estimated(found), report(rows)]);
  place.hidden = false;
  place.scrollIntoView({ block: "nearest" });
})));

/** What the command line says too where nothing is said: one pass, eight examples a step. */
const withDefaults = (run) => (run.kind === "rl" ? run : { ...(run.steps ? {} : { epochs: 1 }), ...(run.batch_tokens ? {} : { batch_size: 8 }), ...run });

/** Steps, tokens, time and cost of the run, before it is started. */
function estimated(found) {
  const about = found.is_exact || found.samples !== null ? "" : "about ";
  const tokens = `${found.samples === null ? about : "at most "}${number(found.tokens)}`;
  const parts = [
    ["Steps", `${about}${number(found.steps)}`],
    [found.samples === null ? "Examples" : "Prompts", `${number(found.examples)} of ${number(found.rows)} rows`],
    ...(found.samples === null ? [] : [["Samples", number(found.samples)]]),
    ["Tokens", tokens],
    ["Training", found.seconds === null ? "not measured yet" : `about ${duration(found.seconds)}`],
    ["Precision", found.precision.reason ? `${found.precision.dtype}: ${found.precision.reason}` : found.precision.dtype],
    ...(found.cost === null ? [] : [["Cost", `about ${money({ amount: found.cost, currency: found.currency })}`]]),
  ];
  return [
    make("h2", {}, "Estimate"),
    make("dl.facts", { id: "estimate" }, parts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))),
    found.problem && make("p.problem", { role: "alert" }, `A run would refuse this dataset: ${found.problem}`),
    found.precision.notice && make("p.notice", {}, found.precision.notice),
    found.measured_on.length > 0 && make("p.muted.small", {}, `Measured on ${found.measured_on.join(", ")}${found.same_layout ? "" : ", of another layout, engine or precision: it may be far off"}. Waiting, loading and evaluation are not in it.`),
    found.not_measured !== null && make("p.muted.small", {}, `How long it takes is not known, because ${found.not_measured}: the run says so itself from its second step on.`),
    !found.is_complete && make("p.muted.small", {}, `Only the first ${number(found.rows)} rows were counted: there are more.`),
  ];
}
