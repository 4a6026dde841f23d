// One turn: its text, reasoning, tool calls, tokens, figures and actions. `update` follows an answer as it grows.

import { duration } from "../chat/figures.mjs";
import { isTooLong } from "../chat/problem.mjs";
import { copyButton } from "./copy.mjs";
import { button, el, fill, freshId } from "./dom.mjs";
import { icon } from "./icons.mjs";
import { MarkdownView, codeElement } from "./markdown_view.mjs";
import { problemView } from "./problem_view.mjs";
import { isOfDefault, timingsView } from "./timings_bar.mjs";
import { TokenView } from "./token_view.mjs";
import { toolCards } from "./tool_card.mjs";

/** `acts`: retry, edit, choose(turn), results(turn, texts), keep, showOption, knows. `place`: branches, results, isLast. */
export class TurnView {
  constructor(turn, acts, place) {
    Object.assign(this, { turn, acts, place });
    this.isAnswer = turn.role === "assistant";
    this.markdown = new MarkdownView();
    this.body = el("div", { class: "turn-body" });
    this.reasoning = el("div");
    this.calls = el("div", { class: "cards" });
    this.foot = el("footer");
    this.element = el(
      "article", { class: `turn ${turn.role}`, "data-turn": turn.id, "aria-label": this.isAnswer ? "Answer" : "Your turn" },
      this.isAnswer && el("h2", { class: "turn-name" }, this.name()), this.reasoning, this.body, this.calls, this.foot,
    );
    this.update();
  }

  name() {
    const { turn } = this;
    return [turn.model || "Answer", turn.side && el("span", { class: "side" }, turn.side), turn.edited && el("span", { class: "small" }, " edited")];
  }

  update() {
    this.element.classList.toggle("running", Boolean(this.turn.running));
    if (!this.isAnswer) fill(this.body, el("div", { class: "asked", dir: "auto" }, this.turn.content));
    else {
      this.showReasoning();
      this.showText();
      this.showCalls();
    }
    if (!this.turn.running || !this.foot.hasChildNodes()) this.showFoot();
  }

  showReasoning() {
    const { turn } = this;
    if (!turn.reasoning) return;
    if (!this.thought) {
      this.thought = new MarkdownView();
      this.summary = el("summary");
      this.reasoning.append(el("details", { class: "reasoning" }, this.summary, this.thought.element));
    }
    const isOpen = turn.running && !turn.content && !turn.calls.length;
    const seconds = turn.reasoned != null ? ` for ${duration(turn.reasoned)}` : "";
    this.summary.textContent = isOpen ? "Reasoning…" : `Reasoned${seconds}`;
    this.thought.update(turn.reasoning);
  }

  showText() {
    const { turn } = this;
    if (this.acts.showsTokens() && turn.tokens.length) {
      this.tokens ??= new TokenView();
      this.tokens.update(turn.tokens, turn.reasoning + turn.content);
      this.put(this.tokens.element);
    } else if (turn.json && !turn.running) {
      this.put(codeElement(indented(turn.content), "json"));
    } else if (turn.content) {
      this.markdown.update(turn.content);
      this.put(this.markdown.element);
    } else if (turn.running) {
      this.put(el("div", { class: "waiting" }, el("span", { class: "small" }, turn.reasoning ? "" : "Waiting for the first token…")));
    } else if (!turn.problem && !turn.calls.length) {
      this.put(el("p", { class: "small" }, turn.stopped ? "Stopped before the first token." : "The answer is empty."));
    }
  }

  put(element) {
    if (this.body.firstChild !== element) fill(this.body, element);
  }

  showCalls() {
    const { turn } = this;
    if (!turn.calls.length && !turn.problem) return;
    // While it runs the arguments grow; at the end the boxes for results are made once.
    if (!turn.running && this.callsDone) return;
    this.callsDone = !turn.running;
    const isOpen = !turn.running && this.place.isLast && !turn.problem && !turn.pair;
    const cards = toolCards(turn.calls.filter(Boolean), this.place.results, isOpen ? (texts) => this.acts.results(turn, texts) : null);
    const problem = turn.problem && problemView(turn.problem, {
      onfield: this.acts.showOption, knows: this.acts.knows, onretry: () => this.acts.retry(turn),
      onshorten: isTooLong(turn.problem) && this.acts.canShorten(turn) ? () => this.acts.shorten(turn) : null,
    });
    fill(this.calls, cards, problem);
  }

  showFoot() {
    const { turn, acts } = this;
    const isDone = !turn.running;
    const isEmpty = this.isAnswer && !turn.content && !turn.calls.length;
    const notes = [turn.stopped && "Stopped.", turn.finish === "length" && "Cut at the longest length.", ...warningsOf(turn)].filter(Boolean);
    fill(
      this.foot,
      isDone && this.isAnswer && !(turn.problem && isEmpty) && timingsView(turn),
      isDone && notes.map((note) => el("p", { class: "note small" }, note)),
      el("div", { class: "actions" },
        this.branchControls(),
        isDone && turn.content && copyButton("Copy text", () => turn.content),
        isDone && !turn.problem && button(icon("retry"), this.isAnswer ? "Retry" : "Answer again", () => acts.retry(turn), { class: "quiet" }),
        isDone && !isEmpty && button(icon("edit"), "Edit", () => this.edit(), { class: "quiet" }),
        isDone && turn.pair && !isEmpty && button(icon("done"), "Go on with this", () => acts.keep(turn), { class: "small-button", label: true })),
    );
  }

  branchControls() {
    const { branches } = this.place;
    if (branches.length < 2) return null;
    const at = branches.findIndex((branch) => branch.id === this.turn.id);
    const go = (step) => () => this.acts.choose(branches[at + step]);
    return el(
      "span", { class: "branches" },
      button(icon("left"), "Earlier version", go(-1), { class: "quiet", disabled: at === 0 }),
      el("span", { "aria-label": `version ${at + 1} of ${branches.length}` }, `${at + 1}/${branches.length}`),
      button(icon("right"), "Later version", go(1), { class: "quiet", disabled: at === branches.length - 1 }),
    );
  }

  edit() {
    const id = freshId("edit");
    const box = el("textarea", { id, dir: "auto", rows: Math.min(16, this.turn.content.split("\n").length + 1), value: this.turn.content });
    const cancel = () => {
      this.body.replaceChildren();
      this.update();
      this.showFoot();
    };
    const send = () => box.value.trim() && this.acts.edit(this.turn, box.value);
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !this.isAnswer) send();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    fill(this.body, el("label", { for: id, class: "unseen" }, "Text of the turn"), box);
    fill(this.foot, el("div", { class: "actions" },
      button(icon("done"), this.isAnswer ? "Keep as a new version" : "Send as a new branch", send, { label: true, class: "primary small-button" }),
      button(icon("close"), "Cancel", cancel, { label: true, class: "small-button" })));
    box.focus();
  }
}

/** Warnings of what the request set; a default that was left is a fact among the timings. */
function warningsOf({ warnings = [] }) {
  return warnings.filter((text) => !isOfDefault(text));
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
