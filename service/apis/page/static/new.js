// The form of a new run: its data are uploaded, previewed and counted before anything is trained.

import { preview, report } from "./details.js";
import { act, byId, duration, make, money, number, post, show } from "./page.js";
import { fieldOfRun, forget, newKey, prepareSettings, refuse, runOf, settingsOf, showAddress, takeFiles } from "./run_form.js";

const form = byId("new-run"), { elements } = form, place = byId("preview");
let key = newKey();  // a request that is sent again unchanged, because no answer came, starts one run
prepareSettings(form);
for (const [name, value] of new URLSearchParams(location.search)) if (["model", "dataset"].includes(name)) showAddress(elements[name], value);

form.addEventListener("input", () => { key = newKey(); });

takeFiles(form);

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
    found.measured_on.length > 0 && make("p.muted.small", {}, `Measured on ${found.measured_on.join(", ")}${found.same_layout ? "" : ", with another layout, engine or precision; the estimate may be far off"}. Waiting, loading and evaluation are not included.`),
    found.not_measured !== null && make("p.muted.small", {}, `The duration is unknown because ${found.not_measured}. The run estimates it itself after its second step.`),
    !found.is_complete && make("p.muted.small", {}, `Only the first ${number(found.rows)} rows were counted; the dataset has more.`),
  ];
}
