// A button that copies a text and says so for a moment.

import { button, fill } from "./dom.mjs";
import { icon } from "./icons.mjs";

const SHOWN_MILLISECONDS = 1500;

/** `text` is a function, so that a text that still grows is copied as it is then. */
export function copyButton(name, text) {
  const made = button(icon("copy"), name, async () => {
    try {
      await navigator.clipboard.writeText(text());
    } catch {
      return; // the browser allows no clipboard here; the text can be selected
    }
    fill(made, icon("done"));
    setTimeout(() => fill(made, icon("copy")), SHOWN_MILLISECONDS);
  }, { class: "quiet" });
  return made;
}
