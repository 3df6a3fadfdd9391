// Hosts: how many of each role ask for work, and what each GPU and sampler host is, does and lacks.

import { ago, byId, bytes, clock, duration, get, make, now, number, repeat, showIfNew, table } from "./page.js";

const ROLES = { control: "Control", gpu: "GPU", sampler: "Sampler" };

const asking = ({ role, num_polling: count, hosts }) => make("div", {}, make("dt", {}, `${ROLES[role]} hosts`), make("dd", {},
  role === "control" ? `${number(count)} up` : `${number(hosts.length)} up`, role !== "control" && make("span.muted.small.under", {}, `${number(count)} idle`)));

function doing(host) {
  if (host.lacking.length) return [make("span.mark", {}, "takes no runs"), make("span.under.small", {}, host.lacking.join("; "))];
  return host.lease_since ? `has been working for ${duration(now() - host.lease_since)}` : "idle";
}

function devices({ devices: found, max_ranks: ranks }) {
  const told = found && `${number(found.number)} × ${bytes(found.num_bytes)}`;
  return [told ?? "–", ranks > (found?.number ?? 1) && make("span.under.muted.small", {}, `runs of up to ${number(ranks)} ranks`)];
}

const row = (host) => make("tr", {},
  make("td", {}, make("strong", {}, host.name ?? host.id), host.name && make("span.under.muted.small.mono", {}, host.id)),
  [ROLES[host.role], host.shape, devices(host), doing(host)].map((cell) => make("td", {}, cell)),
  make("td", { title: clock(host.seen_at) }, ago(host.seen_at)));

repeat(async () => {
  const roles = await get("/hosts"), hosts = roles.flatMap(({ role, hosts: found }) => found.map((host) => ({ ...host, role })));
  byId("summary").textContent = hosts.length ? `${number(hosts.length)} GPU and sampler hosts` : "";
  showIfNew(byId("roles"), roles, () => roles.map(asking));
  showIfNew(byId("hosts"), [hosts, Math.floor(Date.now() / 5000)], () => (hosts.length ? table(["Host", "Role", "Shape", "Devices", "Status", "Last seen"], hosts.map(row)) : make("p.empty", {}, "No GPU or sampler host is up. ", make("code", {}, "python -m service.host --role gpu"), " starts one.")));
  return 5000;
});
