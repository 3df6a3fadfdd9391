// The form of a new run: its data are uploaded, previewed and counted before anything is trained.

import { PreviewRows, previewOf, Report } from "./details.js";
import { fieldOfRun, Form, FormButton, RunFields, runOf } from "./form.js";
import { duration, Facts, html, money, mount, number, post, useEffect, useRef, useState } from "./page.js";

/** As the command line does if nothing is given: one pass, eight examples a step. */
const withDefaults = (run) => (run.kind === "rl" ? run
  : { ...(run.steps ? {} : { epochs: 1 }), ...(run.batch_tokens ? {} : { batch_size: 8 }), ...run });

/** Steps, tokens, time and cost of a run before it is started. */
function Estimate({ found }) {
  const { dtype, reason, notice } = found.precision, isRl = found.samples !== null;
  const about = found.is_exact || isRl ? "" : "about ";
  const facts = [
    ["Steps", `${about}${number(found.steps)}`],
    [isRl ? "Prompts" : "Examples", `${number(found.examples)} of ${number(found.rows)} rows`],
    isRl && ["Samples", number(found.samples)],
    ["Tokens", `${isRl ? "at most " : about}${number(found.tokens)}`],
    ["Training", found.seconds === null ? "not measured yet" : `about ${duration(found.seconds)}`],
    ["Precision", reason ? `${dtype}: ${reason}` : dtype],
    found.cost !== null && ["Cost", `about ${money(found.cost, found.currency)}`],
  ];
  const other = found.same_layout ? "" : ", with another layout, engine or precision; the estimate may be far off";
  return html`
    <h2>Estimate</h2>
    <${Facts} id="estimate" pairs=${facts} />
    ${found.problem && html`<p class="problem" role="alert">A run would refuse this dataset: ${found.problem}</p>`}
    ${notice && html`<p class="notice">${notice}</p>`}
    ${found.measured_on.length > 0 && html`<p class="muted small">Measured on ${found.measured_on.join(", ")}${other}.
      Waiting, loading and evaluation are not included.</p>`}
    ${found.not_measured !== null && html`<p class="muted small">The duration is unknown because ${found.not_measured}.
      The run estimates it itself after its second step.</p>`}
    ${!found.is_complete && html`<p class="muted small">
      Only the first ${number(found.rows)} rows were counted; the dataset has more.</p>`}`;
}

function NewRun() {
  const [looked, setLooked] = useState(null), place = useRef();
  useEffect(() => { if (looked) place.current.scrollIntoView({ block: "nearest" }); }, [looked]);
  const start = async ({ elements }, key) => {
    const { kind, ...run } = runOf(elements);
    const started = await post(`/runs/${kind}`, run, { "idempotency-key": key });
    location.assign(`/runs/${started.run_id}`);
  };
  const look = async ({ elements }) => {
    const run = runOf(elements);
    const estimate = await post("/estimate", withDefaults(run));
    setLooked({ estimate, preview: run.kind === "rl" ? null : await previewOf(run) });
  };
  return html`
    <div class="heading run-heading"><div><p class="crumb"><a href="/">Runs</a></p><h1>New run</h1></div></div>
    <${Form} id="new-run" look="card" send=${start} fieldOf=${fieldOfRun}>
      <fieldset><legend>What is trained</legend><${RunFields} takesFiles /></fieldset>
      <div class="actions"><button class="strong" type="submit">Start run</button>
        <${FormButton} id="look" work=${look}>Preview and estimate<//></div>
    <//>
    <section id="preview" class="card" aria-label="Preview" hidden=${!looked} ref=${place}>
      ${looked && html`<${Estimate} found=${looked.estimate} />`}
      ${looked?.preview && html`<${Report} found=${looked.preview.report} /><${PreviewRows} found=${looked.preview} />`}
    </section>`;
}

mount(html`<${NewRun} />`);
