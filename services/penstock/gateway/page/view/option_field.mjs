// One option: name, control, its words, the error of its value, and the way back to unset.

import { boundsText, controlOf, readOption } from "../chat/option_values.mjs";
import { button, el, freshId } from "./dom.mjs";
import { icon } from "./icons.mjs";

const HINTS = { integer: "whole number", number: "number", text: "text", strings: "one a line, or a JSON list", json: "JSON" };
// Examples of values with parts, by their kind.
const EXAMPLES = {
  ids: "[13, 198]", prompt: "[13, 198]", sequences: "[[13, 198], [50]]", words: "[[13, 198], [50]]", constraints: "[[13, 198], [50]]",
  stop_sequences: "[13, [198, 198]]", trie: "[[13, 198], [13, 50]]", logit_bias: '{"13": -5}', sequence_bias: "[[[13, 198], -5]]",
  decay: "[20, 1.05]", layers: "high, or [2, 4]", watermark: '{"bias": 2.5}', plugins: '["name"]',
};

/** Makes the field; `onchange(text)` hears what was typed, "" for unset. */
export function optionField(option, text, onchange) {
  const id = freshId("option");
  const control = controlOf(option);
  const error = el("p", { class: "field-error", id: `${id}-error`, role: "alert", hidden: true });
  const preset = option.default === null || option.default === undefined ? "" : String(option.default);
  const input = inputOf(option, control, { id, value: text, "aria-describedby": `${id}-doc ${id}-error`, placeholder: preset || exampleOf(option, control) });
  const reset = button(icon("close"), `Reset ${option.name}`, () => { input.value = ""; changed(); input.focus(); }, { class: "quiet reset" });
  const facts = [boundsText(option), option.allowed && !option.choices && option.allowed, option.effect && `for ${option.effect}`].filter(Boolean);
  const field = el(
    "div", { class: "field", "data-option": option.name },
    el("label", { for: id }, option.name), el("div", { class: "control" }, input, reset), error,
    el("p", { class: "doc", id: `${id}-doc` }, coded(option.doc), facts.length > 0 && [" ", coded(sentence(facts))]),
  );
  const look = () => {
    const wrong = readOption(option, input.value).error;
    error.hidden = !wrong;
    error.textContent = wrong ? `${option.name} ${wrong}` : "";
    input.setAttribute("aria-invalid", String(Boolean(wrong)));
    field.classList.toggle("is-set", input.value.trim() !== "");
  };
  const changed = () => {
    look();
    onchange(input.value);
  };
  input.addEventListener("input", changed);
  look();
  return field;
}

function inputOf(option, control, attributes) {
  if (control === "flag") return choice(["true", "false"], attributes);
  if (control === "choice") return choice(option.choices.map(String), attributes);
  if (control === "json" || control === "strings") return el("textarea", { ...attributes, rows: 1, spellcheck: "false" });
  const inputmode = { integer: "numeric", number: "decimal" }[control];
  return el("input", { ...attributes, type: "text", inputmode, autocomplete: "off", spellcheck: "false" });
}

function choice(values, { value, placeholder, ...attributes }) {
  const options = ["", ...values].map((one) => el("option", { value: one }, one || (placeholder ? `as the model has it: ${placeholder}` : "as the model has it")));
  const select = el("select", attributes, options);
  select.value = value;
  return select;
}

function exampleOf(option, control) {
  return control === "json" && EXAMPLES[option.kind] ? `such as ${EXAMPLES[option.kind]}` : HINTS[control];
}

/** A text in which backticks hold code. */
function coded(text) {
  return text.split("`").map((part, at) => (at % 2 ? el("code", {}, part) : part));
}

function sentence(facts) {
  const text = facts.join("; ");
  return `${text[0].toUpperCase()}${text.slice(1)}.`;
}
