// What stands in the store of a run: checkpoints, what was published, its request and its job files.

import { bytes, get, getText, make, number, show } from "./page.js";

export async function showFiles(place, run) {
  const checkpoints = await get(`/runs/${run.run_id}/checkpoints`);
  const published = run.adapter ? await get(`/runs/${run.run_id}/files`) : [];
  show(place, checkpoints.length ? checkpointTable(run, checkpoints) : make("p.muted", {}, "No checkpoint stands in the store."), published.length > 0 && publishedTable(run, published));
}

const download = (href, text, name) => make("a", { href, download: true, "aria-label": `Download ${name}` }, text);
const head = (...names) => make("thead", {}, make("tr", {}, names.map((name) => make(`th${name === "Size" ? ".number" : ""}`, { scope: "col" }, name))));

function checkpointTable(run, checkpoints) {
  const rows = checkpoints.toReversed().map(({ step, fence, artifact }) => {
    const label = `e${String(fence.epoch).padStart(6, "0")}-a${String(fence.attempt).padStart(2, "0")}`;
    return make("tr", {}, make("td", {}, number(step)), make("td", {}, `${fence.epoch}${fence.attempt > 1 ? `, attempt ${fence.attempt}` : ""}`), make("td.mono", {}, artifact.sha256.slice(0, 12)),
      make("td.number", {}, download(`/api/v1/runs/${run.run_id}/checkpoints/${label}/${step}/download`, "tar", `the checkpoint of step ${step}`)));
  });
  return make("div.scroll", {}, make("table", {}, head("Checkpoint of step", "Lease", "Manifest", ""), make("tbody", {}, rows)));
}

function publishedTable(run, files) {
  const rows = files.map(({ path, size }) => make("tr", {}, make("td.mono", {}, path), make("td.number", {}, bytes(size)),
    make("td.number", {}, download(`/api/v1/runs/${run.run_id}/files/${path.split("/").map(encodeURIComponent).join("/")}`, "file", path))));
  return [
    make("h3", {}, `Published as ${run.name}${run.version ? ` v${run.version}` : ""}`),
    make("div.scroll", {}, make("table", {}, head("File", "Size", ""), make("tbody", {}, rows))),
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
    jobs.length > 40 && make("p.muted", {}, `The newest 40 of ${jobs.length} attempts.`), !files.length && make("p.muted", {}, run.state === "running" ? "Job files come with the first job." : "No worker had a job of it."));
}
