// Hosts: how many of each role ask for work, and what each GPU and sampler host is, does and lacks.

import {
  bytes, duration, Facts, get, Heading, html, Loaded, moment, mount, now, number, Table, under, useData,
} from "./page.js";

const ROLES = { control: "Control", gpu: "GPU", sampler: "Sampler" };

const NONE = html`No GPU or sampler host is up. <code>python -m service.host --role gpu</code> starts one.`;

const asking = ({ role, num_polling: count, hosts }) => [`${ROLES[role]} hosts`,
  role === "control" ? `${number(count)} up` : [`${number(hosts.length)} up`, under(`${number(count)} idle`)]];

function doing(host) {
  const { lacking, lease_since: since } = host;
  if (!lacking.length) return since ? `has been working for ${duration(now() - since)}` : "idle";
  return html`<span class="mark">takes no runs</span><span class="under small">${lacking.join("; ")}</span>`;
}

const devices = ({ devices: found, max_ranks: ranks }) => [
  found ? `${number(found.number)} × ${bytes(found.num_bytes)}` : "–",
  ranks > (found?.number ?? 1) && under(`runs of up to ${number(ranks)} ranks`),
];

const row = (host) => [
  html`<strong>${host.name ?? host.id}</strong>
    ${host.name && html`<span class="under muted small mono">${host.id}</span>`}`,
  ROLES[host.role], host.shape, devices(host), doing(host), moment(host.seen_at),
];

function Hosts() {
  const [roles] = useData(() => get("/hosts"), () => 5000);
  const hosts = roles?.flatMap(({ role, hosts: found }) => found.map((host) => ({ ...host, role })));
  return html`
    <${Heading} title="Hosts" more=${hosts?.length ? `${number(hosts.length)} GPU and sampler hosts` : ""} />
    <section class="card" aria-label="Roles">
      <${Facts} id="roles" look="overview" pairs=${roles?.map(asking) ?? []} /></section>
    <section class="card flush" aria-label="GPU and sampler hosts"><div id="hosts">
      <${Loaded} data=${hosts} none=${NONE} draw=${(all) => html`
        <${Table} names=${["Host", "Role", "Shape", "Devices", "Status", "Last seen"]} rows=${all.map(row)} />`} />
    </div></section>`;
}

mount(html`<${Hosts} />`);
