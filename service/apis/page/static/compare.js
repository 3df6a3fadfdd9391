// Several runs: their charts laid over each other, and a table of results and settings. The address names the runs.

import { Comparison, namesOf, runName } from "./comparison.js";
import { ago, get, html, mount, Problem, toast, useData } from "./page.js";
import { Charts, RunMetrics, useChartOptions } from "./series.js";
import { shownState, stateBadge } from "./status.js";

const MOST = 6;  // as many as there are colours
const ids = [...new Set(new URLSearchParams(location.search).getAll("run"))].slice(0, MOST);
const metrics = new Map();

const go = (chosen) => location.assign(`/compare?${chosen.map((id) => `run=${encodeURIComponent(id)}`).join("&")}`);

async function found(id) {
  try {
    return await get(`/runs/${encodeURIComponent(id)}`);
  } catch (error) {
    if (!(error instanceof Problem) || error.status === 401) throw error;
    toast(`${id}: ${error.message}`, true);
    return null;
  }
}

async function read() {
  const runs = (await Promise.all(ids.map(found))).filter(Boolean);
  for (const { run_id: id, kind } of runs) if (!metrics.has(id)) metrics.set(id, new RunMetrics(id, kind));
  await Promise.all(runs.map((run) => metrics.get(run.run_id).read()));
  return runs;
}

async function others() {
  const { runs } = await get("/runs?limit=200");
  return runs.filter((run) => !ids.includes(run.run_id) && run.kind !== "session");
}

function Compare() {
  const [runs] = useData(read, (all) => (all.some((run) => run.state === "running") ? 2500 : 0));
  const [offered] = useData(others), [options, fields] = useChartOptions(), names = namesOf(runs ?? []);
  const none = ids.length ? "These runs recorded no steps." : "Choose runs to compare, here or in the list of runs.";
  const chip = (run, n) => html`<li>
    <i class=${`b${n}`} />
    <a href=${`/runs/${encodeURIComponent(run.run_id)}`} title=${names[n]}>${names[n]}</a>${stateBadge(shownState(run))}
    <button type="button" class="plain" aria-label=${`Leave out ${names[n]}`}
      onClick=${() => go(ids.filter((id) => id !== run.run_id))}>✕</button></li>`;
  return html`
    <div class="heading run-heading"><div><p class="crumb"><a href="/">Runs</a></p><h1>Compare runs</h1></div></div>
    <section class="card" aria-label="Runs compared">
      <ul id="compared" class="compared">
        ${runs && (runs.length ? runs.map(chip) : html`<li class="muted">No run is chosen yet.</li>`)}
      </ul>
      <div class="section-head">
        <label class="field">Add <select id="add" disabled=${ids.length >= MOST}
          onChange=${({ target: { value } }) => value && go([...ids, value])}>
          <option value="">a run</option>
          ${offered?.map((run) => html`<option value=${run.run_id}>
            ${`${runName(run)} · ${run.kind} · ${run.state} · ${ago(run.created_at)}`}</option>`)}
        </select></label>
        ${fields}
      </div>
    </section>
    <section aria-label="Charts">
      <${Charts} runs=${(runs ?? []).map((run, n) => ({ name: names[n], metrics: metrics.get(run.run_id) }))}
        ...${options} none=${runs ? none : "Loading …"} />
    </section>
    <section aria-label="Results and settings" id="table">
      ${runs?.length > 0 && html`<${Comparison} runs=${runs} />`}
    </section>`;
}

mount(html`<${Compare} />`);
