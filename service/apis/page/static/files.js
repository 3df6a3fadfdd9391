// Uploaded files: datasets and others, newest first.

import { Act, Alert, bytes, get, Heading, html, Loaded, moment, mount, removing, Table, toast, upload, useData,
  useState } from "./page.js";

const PAGE = 50;
const after = new URLSearchParams(location.search).get("after");

function row(file, reload) {
  const { name, uri, file_id: id } = file;
  const path = `/files/${encodeURIComponent(id)}`;
  const question = `Delete ${name}? Runs that have not read it yet will fail.`;
  return [
    html`<strong>${name}</strong><span class="under muted small mono">${id}</span>`,
    html`<td class="number">${bytes(file.size)}</td>`, file.purpose, moment(file.created_at),
    html`<td class="number"><div class="actions">
      <a class="button" href=${`/new?dataset=${encodeURIComponent(uri)}`} aria-label=${`Train on ${name}`}>Train</a>
      <a class="button" href=${`/api/v1${path}/content`} download=${name} aria-label=${`Download ${name}`}>Download</a>
      <${Act} label="Delete" name=${`Delete ${name}`} look="danger"
        work=${removing(question, path, `${name} is deleted.`, reload)} />
    </div></td>`,
  ];
}

function Files() {
  const more = after ? `&after=${encodeURIComponent(after)}` : "";
  const [page, reload, failed] = useData(() => get(`/files?limit=${PAGE}${more}`));
  const [refused, setRefused] = useState(null);
  const send = async ({ target }) => {
    const [file] = target.files;
    if (!file) return;
    target.disabled = true;
    const stored = await upload(file).then(() => null, (error) => error);
    setRefused(stored);
    if (!stored) {
      toast(`${file.name} is uploaded.`);
      reload();
    }
    Object.assign(target, { value: "", disabled: false });
  };
  return html`
    <${Heading} title="Files" />
    <form id="upload" class="form card">
      <${Alert} error=${refused} />
      <label>Upload a file <input name="file" type="file" onChange=${send} /></label>
    </form>
    <section class="card flush" aria-label="Uploaded files"><div id="files">
      <${Loaded} data=${page?.files} failed=${failed} none="No files yet." draw=${(files) => html`<${Table}
        names=${["File", "Size", "Purpose", "Uploaded", ""]} rows=${files.map((file) => row(file, reload))} />`} />
    </div></section>
    <nav class="pager" aria-label="More files">
      <button type="button" id="newest" disabled=${!after} onClick=${() => location.assign("/files")}>← Newest</button>
      <button type="button" id="older" disabled=${!page?.has_more}
        onClick=${() => location.assign(`/files?after=${encodeURIComponent(page.next)}`)}>Older →</button>
    </nav>`;
}

mount(html`<${Files} />`);
