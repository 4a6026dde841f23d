// An answer's tokens, coloured by their probability; a hover, or the arrow keys, show the alternatives.

import { tokenTexts } from "../chat/answer.mjs";
import { percent } from "../chat/figures.mjs";
import { el, fill } from "./dom.mjs";

// Lower ends of the classes of probability, likeliest first.
const LEVELS = [0.9, 0.6, 0.3, 0.1];
const GAP = 6;

function levelOf(logprob) {
  const share = Math.exp(logprob);
  const level = LEVELS.findIndex((low) => share >= low);
  return level < 0 ? LEVELS.length : level;
}

function visible(text) {
  if (text === "") return "·"; // a part of a character
  return text.replace(/\n/g, "↵\n");
}

/** Shows tokens as they come. */
export class TokenView {
  constructor() {
    this.shown = [];
    this.tokens = [];
    this.text = el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens of the answer; arrow keys go through them" });
    this.tip = el("div", { class: "tip", hidden: true, role: "status" });
    this.element = el("div", { class: "token-view" }, this.text, this.tip, legend());
    this.text.addEventListener("mouseover", (event) => this.show(event.target.closest(".token")));
    this.text.addEventListener("click", (event) => this.show(event.target.closest(".token")));
    this.text.addEventListener("mouseleave", () => this.show(null));
    this.text.addEventListener("blur", () => this.show(null));
    this.text.addEventListener("keydown", (event) => this.move(event));
  }

  /** `text` is that of the answer. */
  update(tokens, text) {
    this.tokens = tokens;
    const texts = tokenTexts(tokens, text);
    texts.forEach((shown, at) => {
      if (shown === this.shown[at]) return;
      // A character may become whole later.
      const span = this.text.children[at] ?? this.text.appendChild(el("span", { "data-at": at }));
      span.className = `token p${levelOf(tokens[at].logprob)}${shown ? "" : " part"}`;
      span.textContent = visible(shown);
    });
    this.shown = texts;
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape" && !this.tip.hidden) {
      event.stopPropagation();
      this.show(null);
    }
    if (!step || !this.shown.length) return;
    event.preventDefault();
    const now = this.current ? Number(this.current.dataset.at) + step : 0;
    this.show(this.text.children[Math.min(this.shown.length - 1, Math.max(0, now))]);
  }

  show(token) {
    this.current?.classList.remove("chosen");
    this.current = token;
    this.tip.hidden = !token;
    if (!token) return;
    token.classList.add("chosen");
    const { token: text, logprob, top } = this.tokens[Number(token.dataset.at)];
    const others = top.some((one) => one.token === text) ? top : [{ token: text, logprob }, ...top];
    fill(this.tip, el("div", { class: "tip-head" }, el("code", {}, JSON.stringify(text)), el("b", {}, percent(logprob))), alternatives(others, text));
    this.place(token);
  }

  /** Puts the tip under the token, or above it, within the view. */
  place(token) {
    // Of a token over a line break the second part, which has its letters.
    const box = [...token.getClientRects()].at(-1);
    const own = this.element.getBoundingClientRect();
    const left = Math.min(box.left - own.left, own.width - this.tip.offsetWidth);
    const isLow = box.bottom + this.tip.offsetHeight + GAP > window.innerHeight;
    const top = isLow ? box.top - own.top - this.tip.offsetHeight - GAP : box.bottom - own.top + GAP;
    this.tip.style.left = `${Math.max(0, left)}px`;
    this.tip.style.top = `${top}px`;
  }
}

function alternatives(others, chosen) {
  const rows = others.map(({ token, logprob }) => {
    const bar = el("span", { class: "bar" });
    bar.style.width = `${Math.exp(logprob) * 100}%`;
    const classes = token === chosen ? "is-chosen" : null;
    return el("li", { class: classes }, el("code", {}, JSON.stringify(token)), el("span", { class: "track" }, bar), el("span", { class: "share" }, percent(logprob)));
  });
  return el("ul", {}, rows);
}

function legend() {
  const names = ["90% or more", "60%", "30%", "10%", "less"];
  const keys = names.map((name, level) => el("span", {}, el("i", { class: `token p${level}`, "aria-hidden": "true" }, "\u2003"), name));
  return el("div", { class: "legend" }, el("span", {}, "Probability"), keys);
}
