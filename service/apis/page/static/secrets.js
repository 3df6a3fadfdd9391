// Secrets that are shown once: a new key, a webhook's secret.

import { act, byId, make, show, toast } from "./page.js";

/** Show a secret until it is put away; nothing keeps it. */
export function showSecret(place, words, secret) {
  const field = make("input.mono", { readonly: true, value: secret, "aria-label": words, spellcheck: "false" });
  const copy = async () => {
    field.select();
    try {
      await navigator.clipboard.writeText(secret);
      toast("Copied.");
    } catch {
      toast("The browser did not copy it. It is selected: copy it by hand.");
    }
  };
  show(place, make("div.secret", {}, make("p", {}, words), field,
    make("div.actions", {}, make("button", { type: "button", click: copy }, "Copy"), make("button", { type: "button", click: () => show(place) }, "I have kept it"))));
  field.focus();
}

/** Have a form make something with a secret, which is shown at `place`. `ask(form)` returns it; `after` follows. */
export function makesSecret(form, place, words, ask, after) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const said = form.querySelector(".problem");
    said.hidden = true;
    act(event.submitter, async () => {
      try {
        const secret = await ask(form);
        form.reset();
        showSecret(byId(place), words, secret);
        await after();
      } catch (error) {
        said.textContent = error.message;
        said.hidden = false;
      }
    });
  });
}

/** The values of the boxes of a name that are ticked. */
export const ticked = (form, name) => [...form.querySelectorAll(`[name=${name}]:checked`)].map((box) => box.value);
