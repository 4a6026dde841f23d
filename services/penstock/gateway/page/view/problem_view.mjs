// An error, in its place: message, reason, field, and ways on.

import { button, el } from "./dom.mjs";
import { icon } from "./icons.mjs";

/** `onfield(name)` shows the option that is wrong, where it is one; `onretry` and `onshorten` may be absent. */
export function problemView(problem, { onfield, onretry, onshorten, knows }) {
  const option = problem.field.split(".").at(-1);
  const facts = [problem.reason && el("code", {}, problem.reason), problem.field && el("span", {}, "field ", el("code", {}, problem.field))];
  if (problem.retryAfter) facts.push(el("span", {}, `try again in ${problem.retryAfter} s`));
  return el(
    "div", { class: "problem", role: "alert" },
    el("p", {}, problem.message),
    el("p", { class: "problem-facts" }, facts),
    el("p", { class: "problem-ways" },
      onshorten && button(icon("down"), "Leave out the older half and try again", onshorten, { label: true, class: "small-button" }),
      onretry && button(icon("retry"), "Try again", onretry, { label: true, class: "small-button" }),
      option && knows(option) && button(icon("settings"), `Show ${option}`, () => onfield(option), { label: true, class: "small-button" })),
  );
}
