// An error, in its place: message, reason, field, and ways on.

import { button, el } from "./dom.mjs";
import { icon } from "./icons.mjs";

/** `onfield(name)` shows the option that is wrong, where it is one; `onretry` may be absent. */
export function problemView(problem, { onfield, onretry, knows }) {
  const option = problem.field.split(".").at(-1);
  const facts = [problem.reason && el("code", {}, problem.reason), problem.field && el("span", {}, "field ", el("code", {}, problem.field))];
  if (problem.retryAfter) facts.push(el("span", {}, `try again in ${problem.retryAfter} s`));
  return el(
    "div", { class: "problem", role: "alert" },
    el("p", {}, problem.message),
    el("p", { class: "problem-facts" }, facts),
    el("p", { class: "problem-ways" },
      onretry && button(icon("retry"), "Try again", onretry, { label: true, class: "small-button" }),
      option && knows(option) && button(icon("settings"), `Show ${option}`, () => onfield(option), { label: true, class: "small-button" })),
  );
}
