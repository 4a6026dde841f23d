// A tool call: name, arguments, and its result or a box for it.

import { button, el, freshId } from "./dom.mjs";
import { icon } from "./icons.mjs";
import { codeElement } from "./markdown_view.mjs";

/** Arguments as people read them; as they came while they are not whole. */
function readable(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function card(call, ...rest) {
  const head = el("div", { class: "card-head" }, icon("tool"), el("b", {}, call.name || "tool"), el("span", { class: "small" }, call.id));
  return el("section", { class: "card", "aria-label": `Call of ${call.name}` }, head, codeElement(readable(call.arguments), "arguments"), ...rest);
}

/** The calls of an answer; `results` maps ids to texts, `onresults(texts)` is null where none can be given. */
export function toolCards(calls, results, onresults) {
  if (!onresults) {
    return calls.map((call) => card(call, results.has(call.id) && codeElement(readable(results.get(call.id)), "result")));
  }
  const boxes = calls.map((call) => {
    const id = freshId("result");
    const box = el("textarea", { id, rows: 2, spellcheck: "false", placeholder: '{"temperature": 21}' });
    return { box, element: card(call, el("label", { for: id }, `Result of ${call.name}`), box) };
  });
  const go = () => onresults(boxes.map(({ box }) => box.value));
  const form = el("form", { class: "results", onsubmit: (event) => { event.preventDefault(); go(); } },
    boxes.map(({ element }) => element),
    button(icon("send"), calls.length > 1 ? "Send the results" : "Send the result", go, { label: true, class: "primary small-button" }));
  return [form];
}
