// Texts of models: a chat template's own tokens are shown as turns and small marks.

import { html } from "./page.js";

const TURN = /<\|im_start\|>(\w+)\n?|<\|start_header_id\|>(\w+)<\|end_header_id\|>\n*/;
const END = /(?:<\|(?:im_end|eot_id|end_of_text|endoftext)\|>\s*)+$/;
const TOKEN = /(<\|[\w.\- ]{1,40}\|>)/;

/** The turns of a text: who speaks (null if the template does not say), and what is said. */
export function turns(text) {
  const [before, ...rest] = text.replace(/<\|begin_of_text\|>/g, "").split(TURN);
  const found = before.trim() || !rest.length ? [{ who: null, text: before.replace(END, "") }] : [];
  for (let n = 0; n < rest.length; n += 3) {
    found.push({ who: rest[n] ?? rest[n + 1], text: rest[n + 2].replace(END, "") });
  }
  // A prompt ends at the beginning of an answer: that turn has nothing in it yet.
  return found.length > 1 && !found.at(-1).text.trim() ? found.slice(0, -1) : found;
}

/** A text in which the tokens of templates are small marks. */
export const withTokenMarks = (text) => text.split(TOKEN).map((piece) => (
  TOKEN.test(piece) ? html`<span class="token" title=${piece}>${piece.slice(2, -2).replaceAll("_", " ")}</span>` : piece
));

/** The last thing that a user says in a prompt, in one line. */
export function lastLine(text) {
  const said = turns(text);
  const last = said.findLast((turn) => turn.who === "user") ?? said.at(-1);
  return last.text.replace(TOKEN, " ").replace(/\s+/g, " ").trim() || "(empty)";
}

/** A text as its turns, each under who says it; a text without turns under `who`. */
export const spoken = (who, text) => turns(text).map((turn) => html`
  <div class="who">${turn.who ?? who}</div>
  <pre tabindex="0">${turn.text.trim() ? withTokenMarks(turn.text.trim()) : "(empty)"}</pre>`);

/** What a policy drew, under `who`. */
export const drawn = (who, text) => html`<div class="who">${who}</div>
  <pre class="drawn" tabindex="0">${withTokenMarks(text.replace(END, "").trim()) || "(empty)"}</pre>`;
