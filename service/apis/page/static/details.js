// What a run left behind: its data and their report, its log, checkpoints, published files, its request and job files.

import { acting, Alert, bytes, Facts, getText, html, named, number, post, Table, useLayoutEffect, useMemo, useRef,
  useState, words } from "./page.js";
import { withTokenMarks } from "./texts.js";

const percent = (share) => `${(100 * share).toFixed(1)} %`;
const json = (value) => html`<pre class="json" tabindex="0">${value}</pre>`;

export function Data({ run, report }) {
  const source = run.run.dataset ?? run.run.rollouts?.prompts, { dataset, packing } = report;
  const none = run.state === "running" ? "The report appears once the data has been read." : "There is no report.";
  const packed = packing && [["Steps", number(packing.num_steps)], ["Tokens of all steps", number(packing.num_tokens)],
    ["Bins", number(packing.num_bins)], ["Tokens of a bin", number(packing.bin_tokens)],
    ["Filled", percent(packing.packing_efficiency)]];
  return html`
    <p>${source
        ? [source].flat().map(({ uri }) => html`${named(uri)} `)
        : html`<span class="muted">Trajectory groups sent by a client.</span>`}</p>
    ${dataset ? html`<${Report} found=${dataset} />` : html`<p class="muted">${none}</p>`}
    ${packed && html`<h3>Packing</h3><${Facts} pairs=${packed} />`}
    ${run.run.dataset?.uri && html`<div id="preview"><${Preview} run=${run.run} /></div>`}`;
}

export function Report({ found }) {
  if (!("lengths" in found)) {
    const text = JSON.stringify(found, null, 2);
    return html`<details><summary>Report of the last step's groups</summary>${json(text)}</details>`;
  }
  const { lengths, lost } = found, top = Math.max(...lengths.map((one) => one.num_rows), 1);
  const described = lengths.map((one) => `${one.num_rows} of up to ${one.up_to_tokens}`).join(", ");
  const counts = [
    ["Format", found.format], ["Rows", number(found.num_rows)], ["Kept", number(found.num_kept)],
    ["Tokens", number(found.num_tokens)],
    ["Trained tokens", `${number(found.num_targets)} (${percent(found.trained_fraction)})`],
    ["Longest", `${number(found.longest_tokens)} of ${number(found.max_tokens)}`],
    ["Truncated", number(found.num_truncated)], ["Too long", number(found.num_too_long)],
    ["Nothing to train", number(found.num_fully_masked)],
    ["Refused by the template", number(found.num_refused || 0)],
  ];
  const column = ({ num_rows: rows, up_to_tokens: tokens }) => html`
    <div class=${tokens / 2 >= found.max_tokens ? "long" : ""}
      title=${`${number(rows)} rows of up to ${number(tokens)} tokens`}>
      <span>${number(rows)}</span><i style=${{ height: `${(100 * rows) / top}%` }} /><span>≤${number(tokens)}</span>
    </div>`;
  return html`
    <${Facts} pairs=${counts} />
    <h3>Lengths of rows, in tokens</h3>
    <div class="histogram" role="img" aria-label=${`Rows by tokens: ${described}`}>${lengths.map(column)}</div>
    ${(found.warnings ?? []).map((text) => html`<p class="problem">Warning: ${text}.</p>`)}
    ${lost.length > 0 && html`<details><summary>Rows dropped (the first ${lost.length})</summary>
      <ul>${lost.map((one) => html`<li><code>${one.place}</code> ${one.reason}</li>`)}</ul></details>`}`;
}

/** A dataset's first rows as a run's model will see them, and its report. Raises Problem. */
export const previewOf = ({ dataset, model, max_tokens, too_long }) =>
  post("/preview", { source: dataset, model_uri: model, max_tokens, too_long, num_rows: 6, max_rows: 1000 });

export const PreviewRows = ({ found }) => html`
  <h3>Rows as the model sees them (<span class="trained">trained tokens</span> are coloured)</h3>
  ${found.problem && html`<p class="problem">${found.problem}</p>`}
  ${found.rows.map(previewRow)}`;

function Preview({ run }) {
  const [found, setFound] = useState(null), [error, setError] = useState(null), [isBusy, setBusy] = useState(false);
  const read = async () => {
    setBusy(true);
    await previewOf(run).then(setFound, setError);
    setBusy(false);
  };
  if (found) return html`<${PreviewRows} found=${found} />`;
  return html`<${Alert} error=${error} />
    <button type="button" id="preview-button" onClick=${acting(read)}>
      ${isBusy ? "Reading …" : "Preview examples"}</button>`;
}

const spans = (list) => html`<div class="text spans-of-tokens">${list.map(({ trained, text }) => (
  trained ? html`<span class="trained">${withTokenMarks(text)}</span>` : withTokenMarks(text)))}</div>`;

const previewRow = (one) => html`<article class="sample">
  <div class="who">${one.place}
    <span class="muted">${number(one.num_tokens)} tokens, ${number(one.num_targets)} trained</span>
    ${one.fate !== "kept" && html`<span class="mark">${words(one.fate)}</span>`}
    ${one.is_cut && html`<span class="mark calm">shown in part</span>`}</div>
  ${spans(one.spans)}
  ${one.rejected.length > 0 && html`<div class="who">rejected answer</div>${spans(one.rejected)}`}</article>`;

const download = (href, text, name) => html`<a href=${href} download aria-label=${`Download ${name}`}>${text}</a>`;
const right = (cell) => html`<td class="number">${cell}</td>`;
const mono = (cell) => html`<td class="mono">${cell}</td>`;

export function Files({ run, checkpoints, files }) {
  const path = `/api/v1/runs/${run.run_id}`;
  const saved = checkpoints.toReversed().map(({ step, fence: { epoch, attempt }, artifact }) => {
    const label = `e${String(epoch).padStart(6, "0")}-a${String(attempt).padStart(2, "0")}`;
    const link = download(`${path}/checkpoints/${label}/${step}/download`, "tar", `the checkpoint of step ${step}`);
    const lease = `${epoch}${attempt > 1 ? `, attempt ${attempt}` : ""}`;
    return [number(step), lease, mono(artifact.sha256.slice(0, 12)), right(link)];
  });
  const published = files.map(({ path: name, size }) => {
    const address = `${path}/files/${name.split("/").map(encodeURIComponent).join("/")}`;
    return [mono(name), right(bytes(size)), right(download(address, "file", name))];
  });
  return html`
    ${saved.length ? html`<${Table} names=${["Checkpoint of step", "Lease", "Manifest", ""]} rows=${saved} />`
      : html`<p class="muted">No checkpoint is stored.</p>`}
    ${published.length > 0 && html`
      <h3>Published as ${run.name}${run.version ? ` v${run.version}` : ""}</h3>
      <${Table} names=${["File", "Size", ""]} rows=${published} />
      <p><a class="button" href=${`${path}/download`} download>Everything as a tar</a></p>`}`;
}

/** A text that is read when it is opened. */
function Fold({ name, read }) {
  const [text, setText] = useState(null);
  const open = async (event) => {
    if (event.target.open && text === null) setText(await read().catch((error) => error.message));
  };
  return html`<details onToggle=${open}><summary>${name}</summary>${json(text ?? "…")}</details>`;
}

export function Request({ run, jobs }) {
  const folds = jobs.slice(-40).flatMap((job) => {
    const path = `/runs/${run.run_id}/jobs/${job.job_id}/${job.fence}`, place = `${job.job_id}, ${job.fence}`;
    const output = [`Worker's output ${place}`, `${path}/output`];
    return [job.has_job && [`Job file ${place}`, path], job.has_output && output];
  }).filter(Boolean);
  const isRunning = run.state === "running";
  const none = isRunning ? "Job files appear with the first job." : "No worker received a job of this run.";
  return html`
    <${Fold} name="The request, as it was accepted" read=${async () => JSON.stringify(run.run, null, 2)} />
    ${folds.map(([name, path]) => html`<${Fold} key=${name} name=${name} read=${() => getText(path)} />`)}
    ${jobs.length > 40 && html`<p class="muted">Showing the newest 40 of ${jobs.length} attempts.</p>`}
    ${!folds.length && html`<p class="muted">${none}</p>`}`;
}

const MOST_SHOWN = 2000;

export function Logs({ text }) {
  const [sought, setSought] = useState(""), place = useRef(), isAtEnd = useRef(true);
  const wanted = sought.trim().toLowerCase(), lines = useMemo(() => text.split("\n").filter(Boolean), [text]);
  const found = wanted ? lines.filter((line) => line.toLowerCase().includes(wanted)) : lines;
  const rows = useMemo(() => found.slice(-MOST_SHOWN).map((line) => logRow(line, wanted)), [text, wanted]);
  const all = `${number(lines.length)} line${lines.length === 1 ? "" : "s"}`, left = found.length - MOST_SHOWN;
  useLayoutEffect(() => {
    if (isAtEnd.current) place.current.scrollTop = place.current.scrollHeight;
  }, [rows]);
  const scrolled = ({ target }) => {
    isAtEnd.current = target.scrollHeight - target.scrollTop - target.clientHeight < 40;
  };
  return html`
    <div class="section-head"><h2 id="logs-h">Logs</h2>
      <label class="field grow">Search <input id="log-words" type="search" spellcheck=${false} autocomplete="off"
        onInput=${(event) => setSought(event.target.value)} /></label>
      <span id="log-count" class="muted small" role="status">
        ${wanted ? `${number(found.length)} of ${all}` : all}</span>
    </div>
    <div id="log-lines" class="log" tabindex="0" role="log" aria-label="Log lines" aria-live="off" ref=${place}
      onScroll=${scrolled}>
      ${left > 0 && html`<div class="muted">
        … ${number(left)} earlier lines are not shown; use search to find them</div>`}
      ${rows}
    </div>`;
}

function logRow(line, wanted) {
  const [, time, text] = line.match(/^(\d{4}-\S+Z) (.*)$/) ?? [null, null, line];
  const look = /failed|lost/.test(text) ? "bad" : /succeeded/.test(text) ? "good" : "";
  const at = wanted ? text.toLowerCase().indexOf(wanted) : -1, end = at + wanted.length;
  return html`<div class=${look}>
    ${time && html`<time datetime=${time}>${new Date(time).toLocaleTimeString()}</time>`}
    ${at < 0 ? text : [text.slice(0, at), html`<mark>${text.slice(at, end)}</mark>`, text.slice(end)]}</div>`;
}
