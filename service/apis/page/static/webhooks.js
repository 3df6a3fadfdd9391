// Webhooks: where messages on runs go, what became of them, and a new one.

import { act, ago, byId, clock, get, isSure, make, post, remove, send, show, table, toast } from "./page.js";
import { makesSecret, showSecret, ticked } from "./secrets.js";
import { stateBadge } from "./status.js";

export async function loadHooks() {
  const hooks = await get("/webhooks");
  show(byId("hooks"), hooks.length ? hooks.map(card) : make("p.muted", {}, "No webhooks yet."));
}

function card(hook) {
  const path = `/webhooks/${hook.id}`, seen = make("div");
  const button = (label, work, look = "") => make(`button${look}`, { type: "button", "aria-label": `${label}: ${hook.url}`, click: (event) => act(event.target, work) }, label);
  return make("article.sample", { "aria-label": `Webhook ${hook.url}` },
    make("div.schedule-head", {}, make("div", {}, make("strong.mono", {}, hook.url), make("span.muted.small.under", { title: clock(hook.created_at) }, `${hook.events.join(", ") || "all events"} · created ${ago(hook.created_at)}`)),
      !hook.enabled && make("span.mark.calm", {}, "switched off")),
    make("div.actions", {},
      button("Deliveries", async () => show(seen, deliveries(await get(`${path}/deliveries`)))),
      hook.enabled && button("Ping", async () => { await post(`${path}/ping`); toast("Ping sent. Deliveries shows the result."); }),
      button(hook.enabled ? "Switch off" : "Switch on", async () => { await send("PATCH", path, { enabled: !hook.enabled }); await loadHooks(); }),
      button("New secret", async () => {
        if (!await isSure("Create a new secret? For one day messages are signed with both secrets, then only with the new one.")) return;
        showSecret(byId("new-hook-shown"), "The new secret. It is shown only once: copy it now.", (await post(`${path}/rotate`)).secret);
      }),
      button("Delete", async () => {
        if (!await isSure(`Delete the webhook ${hook.url}, and what is known of its deliveries?`)) return;
        await remove(path);
        await loadHooks();
      }, ".danger")),
    seen);
}

function deliveries(found) {
  if (!found.length) return make("p.muted", {}, "Nothing has been sent yet.");
  const badges = { delivered: "succeeded", pending: "running", failed: "failed" };
  return table(["Event", "Run", "When", "", "Answer"], found.map((one) => {
    const last = one.attempts.at(-1), badge = stateBadge(badges[one.state]);
    badge.lastChild.textContent = one.state;
    return make("tr", {}, make("td", {}, one.type), make("td.mono", {}, one.run_id ? make("a", { href: `/runs/${encodeURIComponent(one.run_id)}` }, one.run_id) : "–"),
      make("td", { title: clock(one.created_at) }, ago(one.created_at)), make("td", {}, badge),
      make("td", {}, [last?.status, last?.problem, one.num_attempts > 1 && `${one.num_attempts} attempts`].filter(Boolean).join(" · ")));
  }));
}

makesSecret(byId("new-hook"), "new-hook-shown", "The secret that messages are signed with. It is shown only once: copy it now.",
  async (form) => (await post("/webhooks", { url: form.elements.url.value.trim(), events: ticked(form, "event") })).secret, loadHooks);
