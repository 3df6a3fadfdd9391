// The form of a new run: its data are uploaded, previewed and counted before anything is trained.

import { preview, report } from "./details.js";
import { act, byId, make, number, post, toast, upload } from "./page.js";
import { complain, fieldOfRun, forget, prepareSettings, refuse, runOf, settingsOf } from "./run_form.js";

const form = byId("new-run"), { elements } = form, place = byId("preview");
let key = newKey();  // what is sent again unchanged, as no answer came, is one run
prepareSettings(form);

form.addEventListener("input", () => { key = newKey(); });

function newKey() {
  return `page-${Array.from(crypto.getRandomValues(new Uint32Array(4)), (n) => n.toString(16)).join("")}`;
}

elements.file.addEventListener("change", async () => {
  const [file] = elements.file.files;
  if (!file) return;
  forget(form);
  elements.file.disabled = true;
  try {
    const record = await upload(file);
    elements.dataset.value = record.uri;
    toast(`${file.name} is uploaded`);
  } catch (error) {
    refuse(form, error, () => "file");
  } finally {
    elements.file.disabled = false;
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
  if (run.kind === "rl") {
    complain(form, "kind", "Prompts of RL are sampled and graded, and not trained on as they are: there is no preview of them.");
    return;
  }
  await preview(place, run, (found) => [report(found.report), counted(found, run)]);
  place.hidden = false;
  place.scrollIntoView({ block: "nearest" });
})));

/** Steps and tokens of a run that counts in epochs and examples. */
function counted({ report: found, is_complete }, run) {
  const { epochs = run.steps ? null : 1, batch_size } = run;
  if (!is_complete) return make("p.muted", {}, `Of the first ${number(found.num_rows)} rows: there are more.`);
  if (!epochs) return null;
  const steps = batch_size ? `${number(Math.ceil(found.num_kept / batch_size) * epochs)} steps, ` : "";
  return make("p", {}, "This run: ", make("strong", {}, `${steps}${number(found.num_tokens * epochs)} tokens`), `, of which ${number(found.num_targets * epochs)} are trained.`);
}
