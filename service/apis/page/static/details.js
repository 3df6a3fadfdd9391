// What a run left behind: its data and their report, its log, checkpoints, published files, its request and job files.

import { withTokenMarks } from "./texts.js";
import { byId, bytes, get, getText, make, named, number, post, show, table } from "./page.js";

export async function showData(place, previewPlace, run) {
  const source = run.run.dataset ?? run.run.rollouts?.prompts ?? null;
  const { dataset, packing } = await get(`/runs/${run.run_id}/report`);
  show(place,
    make("p", {}, source ? named(source.uri) : make("span.muted", {}, "Trajectory groups sent by a client.")),
    dataset && report(dataset), packing && packed(packing),
    !dataset && make("p.muted", {}, run.state === "running" ? "The report appears once the data has been read." : "There is no report."));
  if (run.run.dataset && !previewPlace.childElementCount) show(previewPlace, previewButton(previewPlace, run.run));
}

const facts = (pairs) => make("dl.facts", {}, pairs.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
const percent = (share) => `${(100 * share).toFixed(1)} %`;

export function report(found) {
  if (!("lengths" in found)) return make("details", {}, make("summary", {}, "Report of the last step's groups"), make("pre.json", { tabindex: "0" }, JSON.stringify(found, null, 2)));
  const top = Math.max(...found.lengths.map((one) => one.num_rows), 1);
  const columns = found.lengths.map((one) => {
    const bar = make("i");
    bar.style.height = `${(100 * one.num_rows) / top}%`;
    return make(`div${one.up_to_tokens / 2 >= found.max_tokens ? ".long" : ""}`, { title: `${number(one.num_rows)} rows of up to ${number(one.up_to_tokens)} tokens` }, make("span", {}, number(one.num_rows)), bar, make("span", {}, `≤${number(one.up_to_tokens)}`));
  });
  const lost = found.lost.map((one) => make("li", {}, make("code", {}, one.place), ` ${one.reason}`));
  const described = found.lengths.map((one) => `${one.num_rows} of up to ${one.up_to_tokens}`).join(", ");
  return [
    facts([["Format", found.format], ["Rows", number(found.num_rows)], ["Kept", number(found.num_kept)], ["Tokens", number(found.num_tokens)], ["Trained tokens", `${number(found.num_targets)} (${percent(found.trained_fraction)})`], ["Longest", `${number(found.longest_tokens)} of ${number(found.max_tokens)}`], ["Truncated", number(found.num_truncated)], ["Too long", number(found.num_too_long)], ["Nothing to train", number(found.num_fully_masked)], ["Refused by the template", number(found.num_refused || 0)]]),
    make("h3", {}, "Lengths of rows, in tokens"),
    make("div.histogram", { role: "img", "aria-label": `Rows by tokens: ${described}` }, columns),
    ...(found.warnings ?? []).map((text) => make("p.problem", {}, `Warning: ${text}.`)),
    lost.length > 0 && make("details", {}, make("summary", {}, `Rows dropped (the first ${lost.length})`), make("ul", {}, lost)),
  ];
}

function packed(plan) {
  return [make("h3", {}, "Packing"), facts([["Steps", number(plan.num_steps)], ["Tokens of all steps", number(plan.num_tokens)], ["Bins", number(plan.num_bins)], ["Tokens of a bin", number(plan.bin_tokens)], ["Filled", percent(plan.packing_efficiency)]])];
}

/** Show a dataset's first rows as a run's model will see them, and its report. Raises Problem. */
export async function preview(place, { dataset, model, max_tokens, too_long }, more = () => []) {
  const found = await post("/preview", { source: dataset, model_uri: model, max_tokens, too_long, num_rows: 6, max_rows: 1000 });
  show(place, more(found), make("h3", {}, "Rows as the model sees them (", make("span.trained", {}, "trained tokens"), " are coloured)"), found.problem && make("p.problem", {}, found.problem), found.rows.map(previewRow));
}

function previewButton(place, run) {
  return make("button", { type: "button", id: "preview-button", click: async (event) => {
    event.target.disabled = true;
    event.target.textContent = "Reading …";
    try {
      await preview(place, run);
    } catch (error) {
      show(place, make("p.problem", { role: "alert" }, error.message), previewButton(place, run));
    }
  } }, "Preview examples");
}

const spans = (list) => make("div.text.spans-of-tokens", {}, list.map((span) => (span.trained ? make("span.trained", {}, withTokenMarks(span.text)) : withTokenMarks(span.text))));

function previewRow(one) {
  const fate = one.fate === "kept" ? "" : make("span.mark", {}, one.fate.replaceAll("_", " "));
  return make("article.sample", {},
    make("div.who", {}, one.place, make("span.muted", {}, `${number(one.num_tokens)} tokens, ${number(one.num_targets)} trained`), fate, one.is_cut && make("span.mark.calm", {}, "shown in part")),
    spans(one.spans), one.rejected.length > 0 && [make("div.who", {}, "rejected answer"), spans(one.rejected)]);
}

export async function showFiles(place, run) {
  const checkpoints = await get(`/runs/${run.run_id}/checkpoints`);
  const published = run.adapter ? await get(`/runs/${run.run_id}/files`) : [];
  show(place, checkpoints.length ? checkpointTable(run, checkpoints) : make("p.muted", {}, "No checkpoint is stored."), published.length > 0 && publishedTable(run, published));
}

const download = (href, text, name) => make("a", { href, download: true, "aria-label": `Download ${name}` }, text);

function checkpointTable(run, checkpoints) {
  const rows = checkpoints.toReversed().map(({ step, fence, artifact }) => {
    const label = `e${String(fence.epoch).padStart(6, "0")}-a${String(fence.attempt).padStart(2, "0")}`;
    return make("tr", {}, make("td", {}, number(step)), make("td", {}, `${fence.epoch}${fence.attempt > 1 ? `, attempt ${fence.attempt}` : ""}`), make("td.mono", {}, artifact.sha256.slice(0, 12)),
      make("td.number", {}, download(`/api/v1/runs/${run.run_id}/checkpoints/${label}/${step}/download`, "tar", `the checkpoint of step ${step}`)));
  });
  return table(["Checkpoint of step", "Lease", "Manifest", ""], rows);
}

function publishedTable(run, files) {
  const rows = files.map(({ path, size }) => make("tr", {}, make("td.mono", {}, path), make("td.number", {}, bytes(size)),
    make("td.number", {}, download(`/api/v1/runs/${run.run_id}/files/${path.split("/").map(encodeURIComponent).join("/")}`, "file", path))));
  return [
    make("h3", {}, `Published as ${run.name}${run.version ? ` v${run.version}` : ""}`),
    table(["File", "Size", ""], rows),
    make("p", {}, make("a.button", { href: `/api/v1/runs/${run.run_id}/download`, download: true }, "Everything as a tar")),
  ];
}

export async function showRequest(place, run) {
  const jobs = await get(`/runs/${run.run_id}/jobs`);
  const isOpen = [...place.querySelectorAll("details[open]")].map((node) => node.dataset.name);
  const fold = (name, text) => {
    const body = make("pre.json", { tabindex: "0" }, "…");
    const node = make("details", { "data-name": name, toggle: async () => { if (node.open && body.textContent === "…") body.textContent = await text().catch((error) => error.message); } }, make("summary", {}, name), body);
    node.open = isOpen.includes(name);
    return node;
  };
  const path = (job) => `/runs/${run.run_id}/jobs/${job.job_id}/${job.fence}`;
  const files = jobs.slice(-40).flatMap((job) => [
    job.has_job && fold(`Job file ${job.job_id}, ${job.fence}`, () => getText(path(job))),
    job.has_output && fold(`Worker's output ${job.job_id}, ${job.fence}`, () => getText(`${path(job)}/output`)),
  ]).filter(Boolean);
  show(place, fold("The request, as it was accepted", async () => JSON.stringify(run.run, null, 2)), files,
    jobs.length > 40 && make("p.muted", {}, `Showing the newest 40 of ${jobs.length} attempts.`), !files.length && make("p.muted", {}, run.state === "running" ? "Job files appear with the first job." : "No worker received a job of this run."));
}

const MOST_SHOWN = 2000;

export class Logs {
  constructor(runId) {
    this.runId = runId;
    this.lines = [];
    byId("log-words").addEventListener("input", () => this.draw());
  }

  async read() {
    const text = await getText(`/runs/${this.runId}/logs`);
    this.lines = text.split("\n").filter(Boolean);
    this.draw();
  }

  draw() {
    const place = byId("log-lines"), wanted = byId("log-words").value.trim().toLowerCase();
    const found = wanted ? this.lines.filter((line) => line.toLowerCase().includes(wanted)) : this.lines;
    const isAtEnd = place.scrollHeight - place.scrollTop - place.clientHeight < 40;
    const all = `${number(this.lines.length)} line${this.lines.length === 1 ? "" : "s"}`;
    byId("log-count").textContent = wanted ? `${number(found.length)} of ${all}` : all;
    const left = found.length - MOST_SHOWN;
    const more = left > 0 ? [make("div.muted", {}, `… ${number(left)} earlier lines are not shown; use search to find them`)] : [];
    place.replaceChildren(...more, ...found.slice(-MOST_SHOWN).map((line) => logRow(line, wanted)));
    if (isAtEnd) place.scrollTop = place.scrollHeight;
  }
}

function logRow(line, wanted) {
  const [, time, text] = line.match(/^(\d{4}-\S+Z) (.*)$/) ?? [null, null, line];
  const kind = /failed|lost/.test(text) ? ".bad" : /succeeded/.test(text) ? ".good" : "";
  return make(`div${kind}`, {}, time && make("time", { datetime: time }, new Date(time).toLocaleTimeString()), marked(text, wanted));
}

function marked(text, wanted) {
  const at = wanted ? text.toLowerCase().indexOf(wanted) : -1;
  if (at < 0) return [text];
  return [text.slice(0, at), make("mark", {}, text.slice(at, at + wanted.length)), text.slice(at + wanted.length)];
}
