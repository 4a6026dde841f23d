// The time of an answer: a line of figures, and its stages as a bar that unfolds into a table.

import { duration, speed, stagesOf, tokensOf, tokensPerSecond } from "../chat/figures.mjs";
import { el } from "./dom.mjs";

/** True for a warning that an option was left at its default. */
export function isOfDefault(warning) {
  return /^[\w.]+ is unset: /.test(warning);
}

/** Makes the figures of a finished turn; null for one that has none. */
export function timingsView(turn) {
  const perSecond = tokensPerSecond(turn);
  const cached = turn.usage?.prompt_tokens_details?.cached_tokens;
  const figures = [
    turn.firstToken != null && ["first token", duration(turn.firstToken)],
    perSecond && ["", speed(perSecond)],
    (turn.usage || tokensOf(turn) > 0) && ["tokens", `${tokensOf(turn)}`],
    turn.elapsed != null && ["total", duration(turn.elapsed)],
  ].filter(Boolean);
  if (!figures.length) return null;
  const line = figures.map(([name, value]) => el("span", { class: "figure" }, el("b", {}, value), name && ` ${name}`));
  const stages = turn.timings ? stagesOf(turn.timings) : [];
  if (!stages.length) return el("div", { class: "timings" }, el("div", { class: "figures" }, line));
  return el("details", { class: "timings" }, el("summary", {}, el("span", { class: "figures" }, line), bar(stages)), table(stages, turn, cached));
}

function bar(stages) {
  const total = stages.reduce((sum, stage) => sum + stage.seconds, 0);
  const parts = stages.map((stage) => {
    const part = el("span", { class: `stage-${stage.name}`, title: `${stage.label}: ${duration(stage.seconds)}` });
    part.style.flexGrow = String(stage.seconds / total);
    return part;
  });
  const words = stages.map((stage) => `${stage.label} ${duration(stage.seconds)}`).join(", ");
  return el("span", { class: "stages", role: "img", "aria-label": `Stages: ${words}` }, parts);
}

function table(stages, turn, cached) {
  const rows = stages.map(({ name, label, doc, seconds }) =>
    el("tr", {}, el("td", {}, el("i", { class: `dot stage-${name}` }), label), el("td", { class: "number" }, duration(seconds)), el("td", {}, doc)),
  );
  const prompt = turn.usage ? `${turn.usage.prompt_tokens} prompt tokens${cached ? `, ${cached} of them from the prefix cache` : ""}` : "";
  const facts = [prompt, turn.seed !== undefined && `seed ${turn.seed}`, turn.finish && `ended by ${turn.finish}`, ...(turn.warnings ?? []).filter(isOfDefault)].filter(Boolean);
  return el("div", {}, el("table", {}, el("tbody", {}, rows)), el("p", { class: "small" }, facts.join(" · ")));
}
