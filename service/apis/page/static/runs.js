// The list of runs: filters and pages in the address, rows that are brought up to date while they are looked at.

import { ago, clock, duration, get, Heading, html, mount, nameOf, useData, useRef, useState } from "./page.js";
import { etaSeconds, KINDS, phaseText, progressBar, shownState, sparkline, stateBadge, tookSeconds } from "./status.js";

const STATES = ["running", "paused", "succeeded", "failed", "cancelled"];
const PAGE = 50;  // as the frame asks for it beforehand (templates/frame.html)
const MOST_COMPARED = 6;
const NAMES = ["Run", "State", "Progress", "Loss or reward", "Duration", "GPU time", "Owner", "Submitted"];
const query = new URLSearchParams(location.search);

function Progress({ run, place }) {
  const eta = etaSeconds(run), queue = `${place === 1 ? "next" : `position ${place}`} in the queue`;
  const doing = run.state === "running" ? (place ? queue : phaseText(run)) : "";
  const steps = run.num_steps ? `${run.step} / ${run.num_steps}` : run.step ? `step ${run.step}` : "";
  return html`
    ${progressBar(run)}
    <div class="progress-text"><span>${[doing, steps].filter(Boolean).join(" · ")}</span>
      ${eta !== null && html`<span>${duration(eta)} left</span>`}</div>
    ${run.state === "failed" && run.problem && html`
      <div class="why" title=${run.problem.message}>${run.problem.message}</div>`}`;
}

function Row({ run, place, owner, trend, isPicked, pick }) {
  const { name, model } = run.run, title = name ?? run.run_id, lost = run.workers_lost;
  const number = (label, value) => html`
    <td class=${value ? "number" : "number none"} data-label=${label}>${duration(value || null)}</td>`;
  return html`<tr>
    <td>
      <div class="titled">
        ${run.kind !== "session" && html`<input type="checkbox" aria-label=${`Compare ${title}`} checked=${isPicked}
          onChange=${pick} />`}
        <a class="title" href=${`/runs/${run.run_id}`} title=${title}>${title}</a><span class="kind">${run.kind}</span>
      </div>
      <span class="under" title=${model}>${name ? `${run.run_id} · ` : ""}${nameOf(model)}</span>
    </td>
    <td class="state-cell">${stateBadge(shownState(run))}
      ${lost > 0 && html`<span class="mark">${lost > 1 ? `${lost} workers lost` : "worker lost"}</span>`}</td>
    <td class="progress"><${Progress} run=${run} place=${place} /></td>
    <td class="trend">${trend && sparkline(trend)}</td>
    ${number("duration", tookSeconds(run))}
    ${number("GPU", run.gpu_seconds)}
    <td class="owner" title=${owner}><span>${owner}</span></td>
    <td class="number submitted" title=${clock(run.created_at)}>${ago(run.created_at)}</td>
  </tr>`;
}

function Filters({ overview, total, remember }) {
  const typing = useRef();
  const chip = (name, count) => html`<button type="button" aria-pressed=${String((query.get("state") ?? "") === name)}
    onClick=${() => remember({ state: name })}>${name || "all"}<span>${count.toLocaleString("en")}</span></button>`;
  const search = ({ target: { value } }) => {
    clearTimeout(typing.current);
    typing.current = setTimeout(() => remember({ words: value.trim() }), 250);
  };
  return html`<form id="filters" class="filters" role="search" aria-label="Filters"
    onSubmit=${(event) => event.preventDefault()}>
    <div class="chips" role="group" aria-label="State" id="states">
      ${overview && [chip("", total), ...STATES.map((state) => chip(state, overview.counts[state] ?? 0))]}
    </div>
    <label class="field">Kind <select id="kind" onChange=${(event) => remember({ kind: event.target.value })}>
      ${[["", "all"], ...KINDS, ["session", "Sessions"]].map(([value, text]) => html`
        <option value=${value} selected=${value === query.get("kind")}>${text}</option>`)}</select></label>
    <label class="field grow">Search <input id="words" type="search" maxlength="128" autocomplete="off"
      placeholder="name, id or model" spellcheck=${false} defaultValue=${query.get("words") ?? ""} onInput=${search} />
    </label>
  </form>`;
}

/** Hosts that take no runs. If they cannot be asked for, the list itself says what is wrong. */
function HostProblems() {
  const [roles] = useData(() => get("/hosts"));
  const told = roles?.flatMap(({ role, lacking }) => lacking.map((each) => `${role} host ${each}`)) ?? [];
  return html`<p id="hosts" class="problem" role="status" hidden=${!told.length}>
    Some hosts take no runs: ${told.join("; ")}</p>`;
}

function Runs() {
  const [picked, setPicked] = useState([]), [trends, setTrends] = useState({}), [list, setList] = useState(null);
  const [, refresh] = useData(async () => {
    const asked = new URLSearchParams({ limit: PAGE });
    for (const name of ["state", "kind", "words", "after"]) if (query.get(name)) asked.set(name, query.get(name));
    const [page, overview] = await Promise.all([get(`/runs?${asked}`), get("/overview")]);
    setList({ page, overview });  // trends follow after the first paint
    const ids = page.runs.map((run) => `run_id=${run.run_id}`);
    if (ids.length) setTrends(await get(`/sparklines?${ids.join("&")}`));
    return page;
  }, (page) => (page.runs.some((run) => run.state === "running") ? 2500 : 10000));
  const remember = (changes, keepsPage = false) => {
    for (const [name, value] of Object.entries(changes)) value ? query.set(name, value) : query.delete(name);
    if (!keepsPage) query.delete("after");
    history.pushState(null, "", query.size ? `/?${query}` : "/");
    refresh();
  };
  const { page, overview } = list ?? {}, isFiltered = ["state", "kind", "words"].some((name) => query.get(name));
  const total = Object.values(overview?.counts ?? {}).reduce((sum, count) => sum + count, 0);
  const hidden = page?.num_hidden_sessions, sessions = hidden > 1 ? "sessions are" : "session is";
  const more = hidden ? ` (${hidden.toLocaleString("en")} idle ${sessions} hidden)` : "";
  const toggle = (id) => setPicked(picked.includes(id) ? picked.filter((one) => one !== id) : [...picked, id]);
  const ids = picked.slice(0, MOST_COMPARED);
  const none = isFiltered ? "No run matches these filters."
    : html`No runs yet. <a href="/new">Start one here</a>, or see <code>longshore submit sft --help</code>.`;
  return html`
    <${Heading} title="Runs" more=${overview && `${total.toLocaleString("en")} in total${more}`}>
      <span class="push" />
      <a class="button" id="compare" hidden=${ids.length < 2}
        href=${`/compare?${ids.map((id) => `run=${encodeURIComponent(id)}`).join("&")}`}>Compare ${ids.length} runs</a>
      <a class="button strong" href="/new">New run</a>
    <//>
    <${HostProblems} />
    <${Filters} overview=${overview} total=${total} remember=${remember} />
    <div class="card flush">
      <table class="runs">
        <caption class="unseen">Runs, newest first</caption>
        <thead><tr>${NAMES.map((name) => html`
          <th scope="col" class=${["Duration", "GPU time", "Submitted"].includes(name) ? "number" : ""}>${name}</th>`)}
        </tr></thead>
        <tbody id="rows">${page?.runs.map((run) => html`<${Row} key=${run.run_id} run=${run}
          place=${overview.waiting[run.run_id]} owner=${overview.owners[run.owner] ?? run.owner ?? ""}
          trend=${trends[run.run_id]} isPicked=${picked.includes(run.run_id)} pick=${() => toggle(run.run_id)} />`)}
        </tbody>
      </table>
      <div id="empty" class="empty" hidden=${page?.runs.length > 0}>${page ? none : "Loading …"}</div>
    </div>
    <nav class="pager" aria-label="More runs">
      <button type="button" id="newer" disabled=${!query.get("after")} onClick=${() => remember({})}>← Newest</button>
      <button type="button" id="older" disabled=${!page?.has_more}
        onClick=${() => remember({ after: page.next }, true)}>Older →</button>
    </nav>`;
}

// A step back in history, but not the skip link.
addEventListener("popstate", () => { if (location.search !== (query.size ? `?${query}` : "")) location.reload(); });
mount(html`<${Runs} />`);
