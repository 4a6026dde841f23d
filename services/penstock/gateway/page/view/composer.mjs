// The box for the next turn, with what is set for it in a line above.

import { STRUCTURES } from "../chat/settings.mjs";
import { button, el, fill } from "./dom.mjs";
import { icon } from "./icons.mjs";

const TALLEST = 240;

export class Composer {
  /** `acts`: send(text), stop(), editLast(), showPart(part). */
  constructor(acts) {
    this.acts = acts;
    this.box = el("textarea", { id: "ask", dir: "auto", rows: 1, placeholder: "Ask something", "aria-describedby": "ask-keys" });
    this.send = button(icon("send"), "Send", () => this.go(), { class: "primary round" });
    this.stop = button(icon("stop"), "Stop", acts.stop, { class: "primary round", hidden: true });
    this.set = el("div", { class: "set" });
    this.fill = el("p", { class: "keys", hidden: true });
    this.note = el("p", { class: "note problem-note", role: "alert", hidden: true });
    this.element = el(
      "form", { class: "composer", onsubmit: (event) => { event.preventDefault(); this.go(); } },
      this.set, this.note,
      el("div", { class: "ask" }, el("label", { for: "ask", class: "unseen" }, "Your turn"), this.box, this.send, this.stop),
      this.fill,
      el("p", { id: "ask-keys", class: "keys" }, el("kbd", {}, "Enter"), " sends, ", el("kbd", {}, "Shift"), " ", el("kbd", {}, "Enter"), " starts a line, ", el("kbd", {}, "Esc"), " stops"),
    );
    this.box.addEventListener("input", () => this.fit());
    this.box.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.go();
    } else if (event.key === "ArrowUp" && !this.box.value) {
      event.preventDefault();
      this.acts.editLast();
    }
  }

  go() {
    const text = this.box.value;
    if (!text.trim() || !this.acts.send(text)) return;
    this.box.value = "";
    this.fit();
  }

  /** Makes the box as tall as its text. */
  fit() {
    this.box.style.height = "auto";
    this.box.style.height = `${Math.min(TALLEST, this.box.scrollHeight)}px`;
  }

  running(isRunning) {
    // The focus does not go with the button.
    if (!isRunning && document.activeElement === this.stop) this.box.focus();
    this.send.hidden = isRunning;
    this.stop.hidden = !isRunning;
  }

  say(text) {
    this.note.textContent = text;
    this.note.hidden = !text;
  }

  /** Shows how full the context is, from half of it on with the ways to make older turns short; null: not known. */
  context(fill, canShorten) {
    this.fill.hidden = !fill;
    if (!fill) return;
    const words = `Context: ${fill.used} of ${fill.most} tokens (${Math.round(fill.share * 100)}%)`;
    const meter = el("meter", { min: 0, max: 1, low: 0.7, high: 0.9, optimum: 0, value: fill.share, "aria-label": words });
    const ways = fill.share >= 0.5 && canShorten ? [
      button(icon("compare"), "Summarise the older half", this.acts.summarise, { label: true, class: "quiet small-button" }),
      button(icon("remove"), "Leave out the older half", this.acts.shortenNext, { label: true, class: "quiet small-button" }),
    ] : [];
    this.fill.replaceChildren(meter, ` ${words} `, ...ways);
  }

  /** Shows what is set beside the text. */
  show(settings) {
    const changed = (side) => Object.values(settings.options[side]).filter((text) => text.trim()).length;
    const options = changed("A") + (settings.compare ? changed("B") : 0);
    const parts = [
      settings.system.trim() && ["system", "System prompt"],
      options && ["options", `${options} option${options > 1 ? "s" : ""} changed`],
      settings.structure.kind !== "none" && ["structure", STRUCTURES[settings.structure.kind].label],
      settings.tools.trim() && ["tools", "Tools"],
      settings.probabilities && ["answer", "Probabilities"],
      settings.compare && ["answer", "A and B side by side"],
    ].filter(Boolean);
    fill(this.set, parts.map(([part, name]) => el("button", { type: "button", class: "chip", onclick: () => this.acts.showPart(part) }, name)));
  }
}
