// Shared by every script: calls of the native API, elements made of text, and formatted numbers.

const CSRF = document.body.dataset.csrf ?? "";

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
export const send = async (method, path, body, headers = {}) => {
  const options = { method, headers };
  if (body !== undefined) Object.assign(options, { body: JSON.stringify(body), headers: { "content-type": "application/json", ...headers } });
  return (await answerOf(path, options)).json();
};
export const post = (path, body, headers = {}) => send("POST", path, body, headers);

/** Send a file's bytes; the record of the stored file. */
export const upload = async (file) => (await answerOf(`/files?name=${encodeURIComponent(file.name)}`, { method: "POST", body: file, headers: { "content-type": "application/octet-stream" } })).json();

/** Post JSON, and yield the data of each event of the answer as it comes. `signal` hangs up. */
export async function* events(path, body, signal) {
  const answer = await answerOf(path, { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" }, signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = "", part = await reader.read(); !part.done; part = await reader.read()) {
    const found = (text + part.value).split("\n\n");
    text = found.pop();
    for (const event of found) if (event.startsWith("data: ") && event !== "data: [DONE]") yield JSON.parse(event.slice(6));
  }
}

export const remove = async (path) => (await answerOf(path, { method: "DELETE" })).json();

/** An element: `make("a.strong", {href}, "text", child)`. Text stays text; functions are listeners. */
export function make(what, options = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  const node = document.createElement(tag);
  if (classes.length) node.className = classes.join(" ");
  return filled(node, options, children);
}

export function svg(tag, options = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), options, children);
}

function filled(node, options, children) {
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const byId = (id) => document.getElementById(id);
export const show = (node, ...children) => node.replaceChildren(...children.flat(Infinity).filter(Boolean));

/** Replace what is shown only where it is another than before: focus, selection and open details stay. */
export function showIfNew(node, stamp, draw) {
  const text = JSON.stringify(stamp);
  if (node.dataset.stamp === text) return false;
  node.dataset.stamp = text;
  show(node, draw());
  return true;
}

let fading;
export function toast(text, isBad = false) {
  const node = byId("toast");
  node.textContent = text;
  node.className = isBad ? "seen bad" : "seen";
  clearTimeout(fading);
  fading = setTimeout(() => { node.className = ""; }, isBad ? 9000 : 4000);
}

/** Do what a button asks for: meanwhile it takes no second click, and what goes wrong is said. */
export async function act(button, work) {
  button.disabled = true;
  try {
    await work();
  } catch (error) {
    toast(error.message, true);
  } finally {
    button.disabled = false;
  }
}

/** Do something again and again while the page is looked at; `work` says in how many milliseconds. */
export function repeat(work) {
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
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) if (s >= length) return `${Math.floor(s / length)} ${unit} ago`;
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

export const money = ({ amount, currency }) => `${amount.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 })} ${currency}`;

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** The unit for so many bytes: its name and its size in bytes. */
export function byteUnit(value) {
  const power = Math.max(0, Math.min(UNITS.length - 1, Math.floor(Math.log2(Math.max(1, value)) / 10)));
  return { name: UNITS[power], size: 1024 ** power };
}

export function bytes(value) {
  const { name, size } = byteUnit(value), amount = value / size;
  return `${size > 1 && amount < 100 ? amount.toFixed(1) : Math.round(amount)} ${name}`;
}

const GENERIC = /^(model|adapter|base|final|best|last|latest|main|data|dataset|checkpoint|(checkpoint|step)-\d+|v?\d+)$/i;

/**
 * The name that a person gave to what lies at an address: `rows.jsonl` of an upload, `harbour v1` of what was published
 * here, or else the last part, with the one before it where the last says little.
 */
export function nameOf(address) {
  const parts = String(address).replace(/[?#].*$/, "").replace(/^[a-z][a-z0-9+.-]*:\/\//i, "").split("/").filter(Boolean);
  if (parts.length < 2) return String(address);
  const version = /^v(\d{6,})$/.exec(parts.at(-1));
  if (version) return `${parts.at(-2)} v${Number(version[1])}`;
  if (parts.at(-3) === "checkpoints" && isHash(parts.at(-1))) return `checkpoint of ${parts.at(-2)}`;
  const said = parts.filter((part) => !isHash(part) && part !== "snapshots").map((part) => part.replace(/^models--/, "").replaceAll("--", "/"));
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

/** What lies at an address by its name; the address itself is shown where the name is pointed at. */
export const named = (address) => make("span", { title: address }, nameOf(address));

export const words = (name) => String(name).replaceAll("_", " ");

/**
 * A table of rows of cells in a frame that scrolls sideways. `names`: of its columns. On narrow screens a `stacked` one has
 * a block for each row, with the names above the values.
 */
export function table(names, rows, { stacked = true } = {}) {
  if (stacked) for (const row of rows) [...row.cells].forEach((cell, n) => n && names[n] && (cell.dataset.label = names[n]));
  const head = make("thead", {}, make("tr", {}, names.map((name) => make("th", { scope: "col" }, name))));
  return make("div.scroll", { tabindex: "0", role: "region", "aria-label": `Table: ${names.filter(Boolean).join(", ")}` }, make(`table${stacked ? ".stacked" : ""}`, {}, head, make("tbody", {}, rows)));
}

/** Ask in the page's own dialog; true for yes. */
export function isSure(question) {
  const dialog = byId("sure");
  byId("sure-text").textContent = question;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

byId("sign-out")?.addEventListener("click", async () => {
  await fetch("/logout", { method: "POST", headers: { "x-csrf-token": CSRF } });
  location.assign("/login");
});
