// The dataset: what became of its rows, how long they are, how they were packed, and rows as the model sees them.

import { get, make, number, post, show } from "./page.js";

export async function showData(place, previewPlace, run) {
  const source = run.run.dataset ?? run.run.rollouts?.prompts ?? null;
  const { dataset, packing } = await get(`/runs/${run.run_id}/report`);
  show(place,
    make("p", {}, source ? make("code", {}, source.uri) : make("span.muted", {}, "Trajectory groups that a client sends.")),
    dataset && report(dataset), packing && packed(packing),
    !dataset && make("p.muted", {}, run.state === "running" ? "The report comes once the data is read." : "There is no report."));
  if (run.run.dataset && !previewPlace.childElementCount) show(previewPlace, previewButton(previewPlace, run));
}

const facts = (pairs) => make("dl.facts", {}, pairs.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
const percent = (share) => `${(100 * share).toFixed(1)} %`;

function report(found) {
  if (!("lengths" in found)) return make("details", {}, make("summary", {}, "Report of the last step's groups"), make("pre.json", { tabindex: "0" }, JSON.stringify(found, null, 2)));
  const top = Math.max(...found.lengths.map((one) => one.num_rows), 1);
  const columns = found.lengths.map((one) => {
    const bar = make("i");
    bar.style.height = `${(100 * one.num_rows) / top}%`;
    return make(`div${one.up_to_tokens / 2 >= found.max_tokens ? ".long" : ""}`, { title: `${number(one.num_rows)} rows of up to ${number(one.up_to_tokens)} tokens` }, make("span", {}, number(one.num_rows)), bar, make("span", {}, `≤${number(one.up_to_tokens)}`));
  });
  const lost = found.lost.map((one) => make("li", {}, make("code", {}, one.place), ` ${one.reason}`));
  const described = found.lengths.map((one) => `${one.num_rows} of up to ${one.up_to_tokens}`).join(", ");
  return [
    facts([["Format", found.format], ["Rows", number(found.num_rows)], ["Kept", number(found.num_kept)], ["Tokens", number(found.num_tokens)], ["Trained tokens", `${number(found.num_targets)} (${percent(found.trained_fraction)})`], ["Longest", `${number(found.longest_tokens)} of ${number(found.max_tokens)}`], ["Truncated", number(found.num_truncated)], ["Too long", number(found.num_too_long)], ["Nothing to train", number(found.num_fully_masked)]]),
    make("h3", {}, "Lengths of rows, in tokens"),
    make("div.histogram", { role: "img", "aria-label": `Rows by tokens: ${described}` }, columns),
    ...(found.warnings ?? []).map((text) => make("p.problem", {}, `Warning: ${text}.`)),
    lost.length > 0 && make("details", {}, make("summary", {}, `Rows left out (the first ${lost.length})`), make("ul", {}, lost)),
  ];
}

function packed(plan) {
  return [make("h3", {}, "Packing"), facts([["Steps", number(plan.num_steps)], ["Bins", number(plan.num_bins)], ["Tokens of a bin", number(plan.bin_tokens)], ["Filled", percent(plan.packing_efficiency)]])];
}

function previewButton(place, run) {
  return make("button", { type: "button", id: "preview-button", click: async (event) => {
    event.target.disabled = true;
    event.target.textContent = "Reading …";
    try {
      const { dataset, model, max_tokens, too_long } = run.run;
      const found = await post("/preview", { source: dataset, model_uri: model, max_tokens, too_long, num_rows: 6, max_rows: 1000 });
      show(place, make("h3", {}, "Rows as the model sees them; ", make("span.trained", {}, "trained tokens"), " are coloured"), found.problem && make("p.problem", {}, found.problem), found.rows.map(row));
    } catch (error) {
      show(place, make("p.problem", { role: "alert" }, error.message), previewButton(place, run));
    }
  } }, "Preview examples");
}

const spans = (list) => make("div.text.spans-of-tokens", {}, list.map((span) => (span.trained ? make("span.trained", {}, span.text) : span.text)));

function row(one) {
  const fate = one.fate === "kept" ? "" : make("span.mark", {}, one.fate.replaceAll("_", " "));
  return make("article.sample", {},
    make("div.who", {}, one.place, make("span.muted", {}, `${number(one.num_tokens)} tokens, ${number(one.num_targets)} trained`), fate, one.is_cut && make("span.mark.calm", {}, "shown in part")),
    spans(one.spans), one.rejected.length > 0 && [make("div.who", {}, "rejected answer"), spans(one.rejected)]);
}
