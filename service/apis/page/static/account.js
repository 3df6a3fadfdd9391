// The tenant's account: what it uses and what that costs, its keys, its webhooks.

import { Field, Form, textOf, ticked } from "./form.js";
import { Act, ago, bytes, clock, Facts, FRAME, get, Heading, html, isSure, Loaded, moment, money, mount, now,
  number, post, removing, runLink, send, Table, toast, under, until, useData, useLayoutEffect, useRef, useState,
} from "./page.js";
import { stateBadge } from "./status.js";

function Usage() {
  const [usage, , failed] = useData(() => get("/usage"));
  if (!usage) return html`<${Loaded} failed=${failed} look="muted" />`;
  const { quotas, cost } = usage;
  const hours = (value) => `${number(Number(value.toFixed(2)))} h`;
  const pair = (name, used, most, format) => [name, html`${format(used)}
    ${under(most === null ? "no limit" : `of ${format(most)}`)}
    ${most > 0 && html`<meter min="0" max=${most} high=${most * 0.9} value=${Math.min(used, most)}
      aria-label=${`${name}: ${format(used)} of ${format(most)}`} />`}`];
  return html`
    <${Facts} look="overview" pairs=${[
      pair("Unfinished runs", usage.concurrent_runs, quotas.concurrent_runs, number),
      pair("GPU hours in 30 days", usage.gpu_hours, quotas.gpu_hours, hours),
      cost !== null && pair("Cost in 30 days", cost, quotas.spending, (amount) => money(amount, usage.currency)),
      pair("Stored", usage.stored_bytes, quotas.stored_bytes, bytes),
    ]} />
    ${cost === null && html`<p class="muted small">
      Costs are shown once the installation has a price per GPU hour.</p>`}
    ${quotas.spending !== null && html`<p class="muted small">When the cost reaches this limit, the tenant's runs are
      paused. They continue when the limit is raised.</p>`}`;
}

/** A secret that is shown until it is put away; nothing keeps it. */
function Secret({ told: { words, secret }, forget }) {
  const field = useRef();
  const copy = async () => {
    field.current.select();
    const copied = await navigator.clipboard.writeText(secret).then(() => true, () => false);
    toast(copied ? "Copied." : "The browser did not copy it. It is selected: copy it by hand.");
  };
  useLayoutEffect(() => field.current.focus(), [secret]);
  return html`<div class="secret"><p>${words}</p>
    <input class="mono" readonly value=${secret} aria-label=${words} spellcheck=${false} ref=${field} />
    <div class="actions"><button type="button" onClick=${copy}>Copy</button>
      <button type="button" onClick=${forget}>I have kept it</button></div></div>`;
}

/** What has secrets: a list of them, and a form that makes one, whose secret is shown once. */
function Secrets({ id, title, list, none, make, path, legend, words, send: ask }) {
  const [found, reload, failed] = useData(() => get(path));
  const [told, setTold] = useState(null), [round, setRound] = useState(0);
  const create = async (form) => {
    setTold({ words, secret: await ask(form) });
    setRound(round + 1);
    reload();
  };
  return html`<section class="card" aria-labelledby=${`${id}-h`}>
    <h2 id=${`${id}-h`}>${title}</h2>
    <div id=${id}><${Loaded} data=${found} failed=${failed} none=${none} look="muted"
      draw=${(all) => list(all, reload, setTold)} /></div>
    <div aria-live="polite">${told && html`<${Secret} told=${told} forget=${() => setTold(null)} />`}</div>
    <details><summary>New ${legend}</summary>
      <${Form} key=${round} id=${`new-${legend}`} send=${create}>${make}
        <div class="actions"><button class="strong" type="submit">Create ${legend}</button></div><//>
    </details>
  </section>`;
}

const ticks = (name, legend, values, isTicked) => html`<fieldset class="ticks"><legend>${legend}</legend>
  ${values.map((value) => html`<${Field} type="checkbox" name=${name} value=${value} label=${value}
    defaultChecked=${isTicked(value)} />`)}</fieldset>`;

function validity({ revoked_at: revoked, expires_at: expires }) {
  if (revoked) return `revoked ${ago(revoked)}`;
  return !expires ? "" : expires > now() ? `expires ${until(expires)}` : "expired";
}

function keyRow(key, reload) {
  const title = key.title || key.prefix, path = `/keys/${encodeURIComponent(key.key_id)}`;
  const question = `Revoke the key ${title}? Programs that use it are refused from now on. This cannot be undone.`;
  return [
    html`<strong>${key.title || "–"}</strong><span class="under muted small mono">${key.prefix}…</span>`,
    key.scopes.join(", "), moment(key.created_at), key.last_used_at ? ago(key.last_used_at) : "never", validity(key),
    html`<td class="number">${!key.revoked_at && html`<${Act} label="Revoke" name=${`Revoke ${title}`} look="danger"
      work=${removing(question, path, "The key is revoked.", reload)} />`}</td>`,
  ];
}

const keyList = (keys, reload) => html`<${Table} names=${["Key", "Scopes", "Created", "Last used", "", ""]}
  rows=${keys.map((key) => keyRow(key, reload))} />`;

async function makeKey(form) {
  const title = textOf(form.elements, "title"), days = textOf(form.elements, "days");
  const expiry = days ? { expires_at: now() + Number(days) * 86400 } : {};
  return (await post("/keys", { title, scopes: ticked(form, "scope"), ...expiry })).key;
}

const ROTATE = "Create a new secret? For one day messages are signed with both secrets, then only with the new one.";
const ROTATED = "The new secret. It is shown only once: copy it now.";

function Hook({ hook, reload, setTold }) {
  const { id, url, enabled } = hook, path = `/webhooks/${id}`, [sent, setSent] = useState(null);
  const button = (label, work, look) => html`<${Act} label=${label} name=${`${label}: ${url}`} work=${work}
    look=${look} />`;
  const question = `Delete the webhook ${url}, and what is known of its deliveries?`;
  return html`<article class="sample" aria-label=${`Webhook ${url}`}>
    <div class="schedule-head"><div><strong class="mono">${url}</strong>
      <span class="muted small under" title=${clock(hook.created_at)}>
        ${hook.events.join(", ") || "all events"} · created ${ago(hook.created_at)}</span></div>
      ${!enabled && html`<span class="mark calm">switched off</span>`}</div>
    <div class="actions">
      ${button("Deliveries", async () => setSent(await get(`${path}/deliveries`)))}
      ${enabled && button("Ping", async () => {
        await post(`${path}/ping`);
        toast("Ping sent. Deliveries shows the result.");
      })}
      ${button(enabled ? "Switch off" : "Switch on", async () => {
        await send("PATCH", path, { enabled: !enabled });
        reload();
      })}
      ${button("New secret", async () => {
        if (await isSure(ROTATE)) setTold({ words: ROTATED, secret: (await post(`${path}/rotate`)).secret });
      })}
      ${button("Delete", removing(question, path, "The webhook is deleted.", reload), "danger")}
    </div>
    ${sent?.length === 0 && html`<p class="muted">Nothing has been sent yet.</p>`}
    ${sent?.length > 0 && html`
      <${Table} names=${["Event", "Run", "When", "", "Answer"]} rows=${sent.map(delivery)} />`}
  </article>`;
}

const BADGES = { delivered: "succeeded", pending: "running", failed: "failed" };

function delivery({ type, run_id: run, created_at: at, state, attempts, num_attempts: count }) {
  const last = attempts.at(-1), answer = [last?.status, last?.problem, count > 1 && `${count} attempts`];
  return [type, html`<td class="mono">${run ? runLink(run) : "–"}</td>`, moment(at), stateBadge(BADGES[state], state),
    answer.filter(Boolean).join(" · ")];
}

const hookList = (hooks, reload, setTold) => hooks.map((hook) => html`
  <${Hook} key=${hook.id} hook=${hook} reload=${reload} setTold=${setTold} />`);

const makeHook = async (form) =>
  (await post("/webhooks", { url: textOf(form.elements, "url"), events: ticked(form, "event") })).secret;

const keyFields = html`
  <fieldset><legend class="unseen">The key</legend>
    <${Field} name="title" label="Title" maxlength="128" placeholder="nightly job" />
    <${Field} name="days" label="Expires after, in days" type="number" min="1" step="1" placeholder="never" />
  </fieldset>
  ${ticks("scope", "Scopes", FRAME.scopes, (scope) => scope !== "admin")}`;
const hookFields = html`
  <${Field} name="url" label="Address" type="url" required placeholder="https://example.org/hook" />
  ${ticks("event", "Events (none chosen means all)", FRAME.notices, () => false)}`;

mount(html`
  <${Heading} title="Account" more=${FRAME.tenant} />
  <section class="card" aria-labelledby="usage-h"><h2 id="usage-h">Usage and cost</h2>
    <div id="usage"><${Usage} /></div></section>
  <${Secrets} id="keys" title="API keys" path="/keys" legend="key" list=${keyList} make=${keyFields} send=${makeKey}
    words="The new key. It is shown only once: copy it now."
    none="No keys have been created here. The key in the installation's settings is not listed." />
  <${Secrets} id="hooks" title="Webhooks" path="/webhooks" legend="webhook" list=${hookList} make=${hookFields}
    none="No webhooks yet." send=${makeHook}
    words="The secret that messages are signed with. It is shown only once: copy it now." />`);
