// Uploaded files: datasets and others, newest first.

import { act, ago, byId, bytes, clock, get, isSure, make, remove, show, table, toast, upload } from "./page.js";

const PAGE = 50;
const query = new URLSearchParams(location.search);

async function load() {
  const after = query.get("after");
  const page = await get(`/files?limit=${PAGE}${after ? `&after=${encodeURIComponent(after)}` : ""}`);
  byId("newest").disabled = !after;
  byId("older").disabled = !page.has_more;
  byId("older").onclick = () => location.assign(`/files?after=${encodeURIComponent(page.next)}`);
  const rows = page.files.map((file) => make("tr", {},
    make("td", {}, make("strong", {}, file.name), make("span.under.muted.small.mono", {}, file.file_id)),
    make("td.number", {}, bytes(file.size)), make("td", {}, file.purpose), make("td", { title: clock(file.created_at) }, ago(file.created_at)),
    make("td.number", {}, make("div.actions", {},
      make("a.button", { href: `/new?dataset=${encodeURIComponent(file.uri)}`, "aria-label": `Train on ${file.name}` }, "Train"),
      make("a.button", { href: `/api/v1/files/${encodeURIComponent(file.file_id)}/content`, download: file.name, "aria-label": `Download ${file.name}` }, "Download"),
      make("button.danger", { type: "button", "aria-label": `Delete ${file.name}`, click: (event) => act(event.target, () => forget(file)) }, "Delete")))));
  show(byId("files"), rows.length ? table(["File", "Size", "Purpose", "Uploaded", ""], rows) : make("p.empty", {}, "No files yet."));
}

async function forget(file) {
  if (!await isSure(`Delete ${file.name}? Runs that have not read it yet will fail.`)) return;
  await remove(`/files/${encodeURIComponent(file.file_id)}`);
  toast(`${file.name} is deleted.`);
  await load();
}

byId("newest").addEventListener("click", () => location.assign("/files"));
byId("upload").elements.file.addEventListener("change", async (event) => {
  const input = event.target, [file] = input.files, said = byId("upload").querySelector(".problem");
  if (!file) return;
  said.hidden = true;
  input.disabled = true;
  try {
    await upload(file);
    toast(`${file.name} is uploaded.`);
    await load();
  } catch (error) {
    said.textContent = error.message;
    said.hidden = false;
  } finally {
    input.value = "";
    input.disabled = false;
  }
});

load().catch((error) => show(byId("files"), make("p.problem", { role: "alert" }, error.message)));
