// Texts of models: a chat template's own tokens are told as turns and small marks, and not shown raw.

import { make } from "./page.js";

const TURN = /<\|im_start\|>(\w+)\n?|<\|start_header_id\|>(\w+)<\|end_header_id\|>\n*/;
const END = /(?:<\|(?:im_end|eot_id|end_of_text|endoftext)\|>\s*)+$/;
const TOKEN = /(<\|[\w.\- ]{1,40}\|>)/;

/** The turns of a text: who speaks (null where the template does not say), and what is said. */
export function turns(text) {
  const [before, ...rest] = text.replace(/<\|begin_of_text\|>/g, "").split(TURN);
  const found = before.trim() || !rest.length ? [{ who: null, text: before.replace(END, "") }] : [];
  for (let n = 0; n < rest.length; n += 3) found.push({ who: rest[n] ?? rest[n + 1], text: rest[n + 2].replace(END, "") });
  // A prompt ends where an answer begins: that turn has nothing in it yet.
  return found.length > 1 && !found.at(-1).text.trim() ? found.slice(0, -1) : found;
}

/** A text's nodes: tokens of templates that are left in it are small marks. */
export function withTokenMarks(text) {
  return text.split(TOKEN).map((piece) => (TOKEN.test(piece) ? make("span.token", { title: piece }, piece.slice(2, -2).replaceAll("_", " ")) : piece));
}

/** The last thing that a user says in a prompt, in one line. */
export function lastLine(text) {
  const said = turns(text);
  const last = said.findLast((turn) => turn.who === "user") ?? said.at(-1);
  return last.text.replace(TOKEN, " ").replace(/\s+/g, " ").trim() || "(empty)";
}

/** A text as its turns, each under who says it; a text without turns under `who`. */
export function spoken(who, text, more) {
  return turns(text).map((turn, n) => [
    make("div.who", {}, turn.who ?? who, n === 0 && more && make("span.muted", {}, more)),
    make("pre", { tabindex: "0" }, turn.text.trim() ? withTokenMarks(turn.text.trim()) : "(empty)"),
  ]);
}
