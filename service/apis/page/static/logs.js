// The log as lines, searched as one types.

import { byId, getText, make, number } from "./page.js";

const MOST_SHOWN = 2000;

export class Logs {
  constructor(runId) {
    this.runId = runId;
    this.lines = [];
    byId("log-words").addEventListener("input", () => this.draw());
  }

  async read() {
    const text = await getText(`/runs/${this.runId}/logs`);
    this.lines = text.split("\n").filter(Boolean);
    this.draw();
  }

  draw() {
    const place = byId("log-lines"), wanted = byId("log-words").value.trim().toLowerCase();
    const found = wanted ? this.lines.filter((line) => line.toLowerCase().includes(wanted)) : this.lines;
    const isAtEnd = place.scrollHeight - place.scrollTop - place.clientHeight < 40;
    const all = `${number(this.lines.length)} line${this.lines.length === 1 ? "" : "s"}`;
    byId("log-count").textContent = wanted ? `${number(found.length)} of ${all}` : all;
    const left = found.length - MOST_SHOWN;
    const more = left > 0 ? [make("div.muted", {}, `… ${number(left)} lines before these; search finds them`)] : [];
    place.replaceChildren(...more, ...found.slice(-MOST_SHOWN).map((line) => row(line, wanted)));
    if (isAtEnd) place.scrollTop = place.scrollHeight;
  }
}

function row(line, wanted) {
  const [, time, text] = line.match(/^(\d{4}-\S+Z) (.*)$/) ?? [null, null, line];
  const kind = /failed|lost/.test(text) ? ".bad" : /succeeded/.test(text) ? ".good" : "";
  return make(`div${kind}`, {}, time && make("time", { datetime: time }, new Date(time).toLocaleTimeString()), marked(text, wanted));
}

function marked(text, wanted) {
  const at = wanted ? text.toLowerCase().indexOf(wanted) : -1;
  if (at < 0) return [text];
  return [text.slice(0, at), make("mark", {}, text.slice(at, at + wanted.length)), text.slice(at + wanted.length)];
}
