// The turns of the branch that is shown, compared answers side by side, and scrolling that follows the newest text.

import { branches, pairOf, pathTo } from "../chat/conversation.mjs";
import { button, el, fill } from "./dom.mjs";
import { icon } from "./icons.mjs";
import { TurnView } from "./turn_view.mjs";

// So near to the end, in pixels, a reader is taken to follow it.
const FOLLOWED = 80;

export class TurnsView {
  /** `element` scrolls; `latest` is the button that leads to its end. */
  constructor(element, latest, acts, welcome) {
    Object.assign(this, { element, latest, acts, welcome });
    this.views = new Map();
    this.pending = new Set();
    this.follows = true;
    element.addEventListener("scroll", () => this.look());
    // What is unfolded at the end stays in view.
    element.addEventListener("toggle", () => this.follows && this.toEnd(), true);
    latest.addEventListener("click", () => this.toEnd());
  }

  /** Shows a conversation anew. */
  show(conversation) {
    this.views.clear();
    const path = pathTo(conversation);
    const rows = [];
    path.forEach((turn, at) => {
      if (turn.role === "tool") return;
      if (at > 0 && turn.id === conversation.first) rows.push(this.leftOut(conversation.summary));
      const pair = pairOf(conversation, turn);
      const place = (one) => ({
        branches: branches(conversation, one), results: resultsAfter(path, at), isLast: at === path.length - 1,
      });
      if (pair) rows.push(el("div", { class: "pair" }, pair.map((one) => this.view(one, place(one), one === turn))));
      else rows.push(this.view(turn, place(turn)));
    });
    fill(this.element, el("div", { class: "column" }, rows.length ? rows : this.welcome()));
    this.element.setAttribute("aria-busy", String(path.some((turn) => turn.running)));
    if (this.follows) this.toEnd();
  }

  /** The line between the turns that are not sent and those that are. */
  leftOut(summary) {
    return el(
      "div", { class: "note small left-out" },
      summary ? el("p", { dir: "auto" }, `The turns above are sent as this summary: ${summary}`) : "The turns above are not sent: they would fill the model's context. ",
      button(icon("retry"), "Send them again", () => this.acts.sendAll(), { label: true, class: "small-button" }),
    );
  }

  view(turn, place, isChosen = false) {
    const view = new TurnView(turn, this.acts, place);
    view.element.classList.toggle("is-kept", isChosen);
    this.views.set(turn.id, view);
    return view.element;
  }

  /** Shows a turn that grew, with others of the same frame. */
  grow(turn) {
    if (!this.pending.size) requestAnimationFrame(() => this.draw());
    this.pending.add(turn);
  }

  draw() {
    for (const turn of this.pending) {
      const view = this.views.get(turn.id);
      if (view?.turn === turn) view.update();
    }
    this.pending.clear();
    if (this.follows) this.toEnd();
    else this.look();
  }

  look() {
    const { scrollHeight, scrollTop, clientHeight } = this.element;
    this.follows = scrollHeight - scrollTop - clientHeight < FOLLOWED;
    this.latest.hidden = this.follows;
  }

  toEnd() {
    this.follows = true;
    this.latest.hidden = true;
    this.element.scrollTop = this.element.scrollHeight;
  }
}

function resultsAfter(path, at) {
  const results = new Map();
  for (let next = at + 1; path[next]?.role === "tool"; next += 1) results.set(path[next].call, path[next].content);
  return results;
}
