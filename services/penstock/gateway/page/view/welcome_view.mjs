// The start of a conversation: the model's card, and three questions that a click asks.

import { el } from "./dom.mjs";

const STARTS = ["Explain how a transformer writes text, in three sentences.", "Write a Python function that finds duplicate lines.", "Give me three ideas for a short walk."];

/** Makes it; `model` is an entry of /v1/models, `ask(text)` sends a question. */
export function welcomeView(model, ask) {
  const facts = model ? [
    ["Model", model.id], model.parent && ["Adapter of", model.parent], model.max_model_len > 0 && ["Context", `${model.max_model_len} tokens`],
    model.state && ["State", model.state],
  ].filter(Boolean) : [];
  return el(
    "div", { class: "welcome" }, el("h2", {}, "A new conversation"),
    facts.length > 0 && el("dl", {}, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    el("div", { class: "starts" }, STARTS.map((text) => el("button", { type: "button", onclick: () => ask(text) }, text))),
  );
}
