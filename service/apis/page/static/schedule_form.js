// Forms of schedules: a new schedule, and a backfill. What the API refuses is shown at its field.

import { byId, make, post } from "./page.js";
import { fieldOfRun, forget, prepareSettings, refuse, runOf, settingsOf } from "./run_form.js";

/** The form of a new schedule. `made` is called with its name. */
export function prepareForm(made) {
  const form = byId("new-schedule"), { elements } = form;
  const zones = Intl.supportedValuesOf?.("timeZone") ?? [];
  byId("zones").append(...["UTC", ...zones].map((value) => make("option", { value })));
  const beginAnew = prepareSettings(form);
  const byTheClock = () => { for (const part of form.querySelectorAll("[data-when]")) part.hidden = part.dataset.when !== elements.when.value; };
  elements.when.addEventListener("change", byTheClock);
  byTheClock();
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    forget(form);
    const settings = settingsOf(form);
    if (!settings) return;
    event.submitter.disabled = true;
    try {
      const { scheduled } = await post("/schedules", asked(elements, settings));
      form.reset();
      beginAnew();
      byTheClock();
      byId("new").open = false;
      made(scheduled.name);
    } catch (error) {
      refuse(form, error, fieldOf);
    } finally {
      event.submitter.disabled = false;
    }
  });
}

/** The body of the request. An empty number is sent as it is, for the service to say that it is none. */
function asked(elements, settings) {
  const value = (name) => elements[name].value.trim();
  const seconds = (name) => (value(name) === "" ? "" : Math.round(Number(value(name)) * Number(elements[`${name}_unit`].value)));
  const isCron = value("when") === "cron";
  return {
    name: value("name"),
    ...(isCron ? { cron: value("cron"), timezone: value("timezone") || "UTC" } : { every_s: seconds("every") }),
    overlap: value("overlap"),
    catch_up_s: seconds("catch_up"),
    continues: elements.continues.checked,
    even_unchanged: elements.even_unchanged.checked,
    run: runOf(elements, settings),
  };
}

/** The field of the form for a place in the request. */
function fieldOf(place, kind) {
  const [first, ...rest] = place.split(".");
  if (first !== "run") return { every_s: "every", catch_up_s: "catch_up" }[first] ?? first;
  return fieldOfRun(rest.join("."), kind);
}

/** Ask for a span of time and send it; the answer, or nothing where nobody sent it. */
export function askForSpan(name, send) {
  const dialog = byId("backfill"), form = byId("backfill-form"), { elements } = form;
  byId("backfill-h").textContent = `Backfill ${name}`;
  form.reset();
  forget(form);
  let answer = null;
  const submit = async (event) => {
    event.preventDefault();
    forget(form);
    try {
      const at = (field) => new Date(elements[field].value).getTime() / 1000;
      answer = await send({ begin: at("begin"), end: at("end"), overlap: elements.overlap.value });
      dialog.close();
    } catch (error) {
      refuse(form, error, (place) => place);
    }
  };
  form.addEventListener("submit", submit);
  byId("backfill-no").onclick = () => dialog.close();
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => {
    form.removeEventListener("submit", submit);
    resolve(answer);
  }, { once: true }));
}
