// Secrets that are shown once: a new key, a webhook's secret.

import { make, show, toast } from "./page.js";

/** Show a secret until it is put away; nothing keeps it. */
export function showSecret(place, words, secret) {
  const field = make("input.mono", { readonly: true, value: secret, "aria-label": words, spellcheck: "false" });
  const copy = async () => {
    field.select();
    try {
      await navigator.clipboard.writeText(secret);
      toast("Copied.");
    } catch {
      toast("Copy it by hand: it is selected.");
    }
  };
  show(place, make("div.secret", {}, make("p", {}, words), field,
    make("div.actions", {}, make("button", { type: "button", click: copy }, "Copy"), make("button", { type: "button", click: () => show(place) }, "I have kept it"))));
  field.focus();
}
