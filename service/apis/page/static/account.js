// The tenant's account: what it uses and what that costs, its keys, its webhooks.

import { act, ago, byId, bytes, clock, get, isSure, make, money, now, number, post, remove, show, table, toast, until } from "./page.js";
import { makesSecret, ticked } from "./secrets.js";
import { loadHooks } from "./webhooks.js";

async function loadUsage() {
  const usage = await get("/usage"), { quotas } = usage;
  const hours = (value) => `${number(Number(value.toFixed(2)))} h`;
  const costs = (amount) => money({ amount, currency: usage.currency });
  const parts = [
    ["Unfinished runs", usage.concurrent_runs, quotas.concurrent_runs, number],
    ["GPU hours in 30 days", usage.gpu_hours, quotas.gpu_hours, hours],
    ...(usage.cost !== null ? [["Cost in 30 days", usage.cost, quotas.spending, costs]] : []),
    ["Stored", usage.stored_bytes, quotas.stored_bytes, bytes],
  ];
  show(byId("usage"), make("dl.overview", {}, parts.map(([name, used, most, format]) => make("div", {}, make("dt", {}, name), make("dd", {}, format(used), make("span.muted.small.under", {}, most === null ? "no limit" : `of ${format(most)}`), most > 0 && make("meter", { min: 0, max: most, high: most * 0.9, value: Math.min(used, most), "aria-label": `${name}: ${format(used)} of ${format(most)}` }))))),
    usage.cost === null && make("p.muted.small", {}, "Costs are shown once the installation has a price per GPU hour."),
    quotas.spending !== null && make("p.muted.small", {}, "When the cost reaches this limit, the tenant's runs are paused. They continue when the limit is raised."));
}

async function loadKeys() {
  const keys = await get("/keys");
  const rows = keys.map((key) => make("tr", {},
    make("td", {}, make("strong", {}, key.title || "–"), make("span.under.muted.small.mono", {}, `${key.prefix}…`)),
    make("td", {}, key.scopes.join(", ")),
    make("td", { title: clock(key.created_at) }, ago(key.created_at)),
    make("td", {}, key.last_used_at ? ago(key.last_used_at) : "never"),
    make("td", {}, validity(key)),
    make("td.number", {}, !key.revoked_at && make("button.danger", { type: "button", "aria-label": `Revoke ${key.title || key.prefix}`, click: (event) => act(event.target, () => revoke(key)) }, "Revoke"))));
  show(byId("keys"), rows.length ? table(["Key", "Scopes", "Created", "Last used", "", ""], rows) : make("p.muted", {}, "No keys have been created here. The key in the installation's settings is not listed."));
}

function validity(key) {
  if (key.revoked_at) return `revoked ${ago(key.revoked_at)}`;
  if (!key.expires_at) return "";
  return key.expires_at > now() ? `expires ${until(key.expires_at)}` : "expired";
}

async function revoke(key) {
  if (!await isSure(`Revoke the key ${key.title || key.prefix}? Programs that use it are refused from now on. This cannot be undone.`)) return;
  await remove(`/keys/${encodeURIComponent(key.key_id)}`);
  toast("The key is revoked.");
  await loadKeys();
}

makesSecret(byId("new-key"), "new-key-shown", "The new key. It is shown only once: copy it now.", async (form) => {
  const { title, days } = form.elements;
  const expiry = days.value ? { expires_at: now() + Number(days.value) * 86400 } : {};
  return (await post("/keys", { title: title.value.trim(), scopes: ticked(form, "scope"), ...expiry })).key;
}, loadKeys);

const say = (id) => (error) => show(byId(id), make("p.problem", { role: "alert" }, error.message));
loadUsage().catch(say("usage"));
loadKeys().catch(say("keys"));
loadHooks().catch(say("hooks"));
