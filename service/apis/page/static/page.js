// Shared by every script: calls of the native API, small components, and formatted numbers.

import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact.js";

export * from "./vendor/htm-preact.js";

const CSRF = document.body.dataset.csrf ?? "";
/** What the frame knows: the tenant, the run, links, and defaults of forms (pages.py). */
export const FRAME = JSON.parse(document.body.dataset.page ?? "{}");

export class Problem extends Error {
  constructor(status, message, place = null) {
    super(place ? `${place}: ${message}` : message);
    Object.assign(this, { status, place, rule: message });
  }
}

async function answerOf(path, options = {}) {
  const headers = { ...(options.headers ?? {}) };
  if ((options.method ?? "GET") !== "GET") headers["x-csrf-token"] = CSRF;
  let answer;
  try {
    answer = await fetch(path.startsWith("/v1/") ? path : `/api/v1${path}`, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "the service does not answer");
  }
  if (answer.status === 401) {
    location.assign(`/login?after=${encodeURIComponent(location.pathname)}`);
    throw new Problem(401, "signed out");
  }
  if (!answer.ok) throw await problemOf(answer);
  return answer;
}

async function problemOf(answer) {
  try {
    const { message, place, param } = (await answer.json()).error;
    return new Problem(answer.status, message, place ?? param);
  } catch {
    return new Problem(answer.status, `the service answered ${answer.status}`);
  }
}

export const get = async (path) => (await answerOf(path)).json();
export const getText = async (path) => (await answerOf(path)).text();
export const remove = async (path) => (await answerOf(path, { method: "DELETE" })).json();

const JSON_TYPE = { "content-type": "application/json" };

export async function send(method, path, body, headers = {}) {
  if (body === undefined) return (await answerOf(path, { method, headers })).json();
  const options = { method, body: JSON.stringify(body), headers: { ...JSON_TYPE, ...headers } };
  return (await answerOf(path, options)).json();
}

export const post = (path, body, headers = {}) => send("POST", path, body, headers);

/** Send a file's bytes; the record of the stored file. */
export async function upload(file) {
  const options = { method: "POST", body: file, headers: { "content-type": "application/octet-stream" } };
  return (await answerOf(`/files?name=${encodeURIComponent(file.name)}`, options)).json();
}

/** Post JSON, and yield the data of each event of the answer as it comes. `signal` hangs up. */
export async function* events(path, body, signal) {
  const answer = await answerOf(path, { method: "POST", body: JSON.stringify(body), headers: JSON_TYPE, signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = "", part = await reader.read(); !part.done; part = await reader.read()) {
    const found = (text + part.value).split("\n\n");
    text = found.pop();
    for (const event of found) {
      if (event.startsWith("data: ") && event !== "data: [DONE]") yield JSON.parse(event.slice(6));
    }
  }
}

export const byId = (id) => document.getElementById(id);
/** Draw a page in the frame's main part. */
export const mount = (page) => render(page, byId("main"));

let fading;
export function toast(text, isBad = false) {
  const node = byId("toast");
  node.textContent = text;
  node.className = isBad ? "seen bad" : "seen";
  clearTimeout(fading);
  fading = setTimeout(() => { node.className = ""; }, isBad ? 9000 : 4000);
}

/** A listener that does what a button asks for: meanwhile it takes no second click, and an error is shown. */
export const acting = (work) => async (event) => {
  const button = event.submitter ?? event.currentTarget;
  event.preventDefault();
  button.disabled = true;
  try {
    await work(event);
  } catch (error) {
    toast(error.message, true);
  } finally {
    button.disabled = false;
  }
};

/** Do something again and again while the page is looked at; `work` returns the milliseconds to the next time. */
function repeat(work) {
  let timer;
  let isBusy = false, again = false;
  const turn = async () => {
    clearTimeout(timer);
    again = isBusy;
    if (isBusy || document.hidden) return;
    isBusy = true;
    let pause = 5000;
    try {
      pause = await work();
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      if (error.status !== 401) toast(error.message, true);
    } finally {
      isBusy = false;
      if (again) turn();
      else if (pause) timer = setTimeout(turn, pause);
    }
  };
  document.addEventListener("visibilitychange", turn);
  turn();
  return turn;
}

/**
 * What `ask` returns, a function that asks again, and the error if there was one. `pause(data)` gives the milliseconds
 * to the next time; without it, `ask` is called once, and its error is shown in place of the data.
 */
export function useData(ask, pause) {
  const [found, setFound] = useState({ data: null, error: null });
  const latest = useRef(), turn = useRef();
  latest.current = ask;
  useEffect(() => {
    turn.current = repeat(async () => {
      try {
        const data = await latest.current();
        setFound({ data, error: null });
        return pause ? pause(data) : 0;
      } catch (error) {
        if (pause || !(error instanceof Problem)) throw error;
        setFound({ data: null, error });
        return 0;
      }
    });
  }, []);
  return [found.data, () => turn.current(), found.error];
}

export const now = () => Date.now() / 1000;

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return seconds < 9.95 && seconds > 0 ? `${seconds.toFixed(1)} s` : `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${String(s % 60).padStart(2, "0")} s`;
  if (s < 172800) return `${Math.floor(s / 3600)} h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export function ago(moment) {
  const s = Math.max(0, now() - moment);
  if (s < 5) return "just now";
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (s >= length) return `${Math.floor(s / length)} ${unit} ago`;
  }
  return `${Math.floor(s)} s ago`;
}

export const until = (moment) => `in ${duration(moment - now())}`;
export const clock = (moment) => new Date(moment * 1000).toLocaleString();

export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e12) return value.toLocaleString("en");
  if (size >= 1e6) return value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 2 });
  if (size >= 100) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  if (size >= 1e-3) return String(Number(value.toPrecision(4)));
  return value === 0 ? "0" : value.toExponential(2);
}

const CENTS = { minimumFractionDigits: 2, maximumFractionDigits: 2 };
export const money = (amount, currency) => `${amount.toLocaleString("en", CENTS)} ${currency}`;

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** The unit for a number of bytes: its name and its size in bytes. */
export function byteUnit(value) {
  const power = Math.max(0, Math.min(UNITS.length - 1, Math.floor(Math.log2(Math.max(1, value)) / 10)));
  return { name: UNITS[power], size: 1024 ** power };
}

export function bytes(value) {
  const { name, size } = byteUnit(value), amount = value / size;
  return `${size > 1 && amount < 100 ? amount.toFixed(1) : Math.round(amount)} ${name}`;
}

const GENERIC = /^(model|adapter|base|final|best|last|latest|main|data(set)?|(checkpoint|step)-\d+|checkpoint|v?\d+)$/i;

/**
 * The name that a person gave to what lies at an address: `rows.jsonl` of an upload, `harbour v1` of what was published
 * here, or else the last part, with the one before it if the last says little.
 */
export function nameOf(address) {
  const path = String(address).replace(/[?#].*$/, "").replace(/^[a-z][a-z0-9+.-]*:\/\//i, "");
  const parts = path.split("/").filter(Boolean);
  if (parts.length < 2) return String(address);
  const version = /^v(\d{6,})$/.exec(parts.at(-1));
  if (version) return `${parts.at(-2)} v${Number(version[1])}`;
  if (parts.at(-3) === "checkpoints" && isHash(parts.at(-1))) return `checkpoint of ${parts.at(-2)}`;
  const telling = parts.filter((part) => !isHash(part) && part !== "snapshots");
  const said = telling.map((part) => part.replace(/^models--/, "").replaceAll("--", "/"));
  const last = said.at(-1) ?? parts.at(-1);
  return decoded(GENERIC.test(last) && said.length > 1 ? said.slice(-2).join("/") : last);
}

const isHash = (part) => /^[0-9a-f]{32,}$/.test(part);

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** What lies at an address by its name; the address itself is the tooltip. */
export const named = (address) => html`<span title=${address}>${nameOf(address)}</span>`;

export const words = (name) => String(name).replaceAll("_", " ");

const cellOf = (cell, name) => {
  if (!["td", "th"].includes(cell?.type)) return html`<td data-label=${name || null}>${cell}</td>`;
  if (name && cell.type === "td") cell.props["data-label"] = name;
  return cell;
};

/**
 * A table in a frame that scrolls sideways. `rows` have cells or what stands in them. On narrow screens each row is a
 * block, with the names of the columns above the values.
 */
export const Table = ({ names, rows, heads = names, look = "" }) => html`
  <div class="scroll" tabindex="0" role="region" aria-label=${`Table: ${names.filter(Boolean).join(", ")}`}>
    <table class=${`stacked ${look}`}>
      <thead><tr>${heads.map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
      <tbody>${rows.map((cells) => html`<tr>${cells.map((cell, n) => cellOf(cell, names[n]))}</tr>`)}</tbody>
    </table>
  </div>`;

/** Names and values; pairs that are false are left out. */
export const Facts = ({ pairs, look = "facts", id }) => html`
  <dl class=${look} id=${id}>
    ${pairs.filter(Boolean).map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;

export const Heading = ({ title, more, children }) => html`
  <div class="heading"><h1>${title}</h1><span id="summary" class="muted">${more}</span>${children}</div>`;

export const Alert = ({ error }) => error && html`<p class="problem" role="alert">${error.message ?? error}</p>`;

/** What `draw` makes of data; else that they are being read, what went wrong, or the text `none` for no data. */
export function Loaded({ data, failed, none, look = "empty", draw }) {
  if (failed) return html`<${Alert} error=${failed} />`;
  return data?.length ? draw(data) : html`<div class=${look}>${data ? none : "Loading …"}</div>`;
}

/** A button for one thing of several. `name` says to which it belongs: screen readers have it in place of the label. */
export const Act = ({ label, name, work, look }) => html`
  <button type="button" class=${look} aria-label=${name} onClick=${acting(work)}>${label}</button>`;

/** What a button does to remove what is at a path, after a question. */
export const removing = (question, path, done, after) => async () => {
  if (!await isSure(question)) return;
  await remove(path);
  toast(done);
  after();
};

/** A small line under a value. */
export const under = (text) => html`<span class="muted small under">${text}</span>`;
export const moment = (at) => html`<td title=${clock(at)}>${ago(at)}</td>`;
export const runLink = (id) => html`<a href=${`/runs/${encodeURIComponent(id)}`}>${id}</a>`;

/** Ask in the page's own dialog; true for yes. */
export function isSure(question) {
  const place = document.body.appendChild(document.createElement("div"));
  return new Promise((resolve) => {
    const close = (event) => {
      resolve(event.target.returnValue === "yes");
      place.remove();
    };
    render(html`
      <dialog id="sure" aria-labelledby="sure-text" onClose=${close}><form method="dialog">
        <p id="sure-text">${question}</p>
        <div class="actions">
          <button value="no">No, go back</button><button value="yes" class="danger">Yes</button>
        </div>
      </form></dialog>`, place);
    place.firstElementChild.showModal();
  });
}

byId("sign-out")?.addEventListener("click", async () => {
  await fetch("/logout", { method: "POST", headers: { "x-csrf-token": CSRF } });
  location.assign("/login");
});
