// Questions that wait for an answer: the bearer token, and "really?".

import { el, freshId } from "./dom.mjs";

/** Shows a modal dialog; resolves to `read()` when it was accepted, else to null. */
function ask(title, parts, accept, read) {
  return new Promise((resolve) => {
    const heading = freshId("dialog");
    const form = el("form", { method: "dialog" },
      el("h2", { id: heading }, title), parts,
      el("div", { class: "dialog-ways" },
        el("button", { type: "button", onclick: () => dialog.close() }, "Cancel"),
        el("button", { type: "submit", value: "yes", class: "primary" }, accept)));
    const dialog = el("dialog", { "aria-labelledby": heading, onclose: () => {
      resolve(dialog.returnValue === "yes" ? read() : null);
      dialog.remove();
    } }, form);
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Asks for the bearer token. */
export function askToken(isWrong) {
  const id = freshId("token");
  const box = el("input", { id, type: "password", autocomplete: "off", required: true });
  const parts = [
    el("p", {}, isWrong ? "The server refused this token. Is it whole?" : "This server wants a bearer token."),
    el("label", { for: id }, "Token"), box,
    el("p", { class: "small" }, "It is kept until this tab is closed, and sent to this server only."),
  ];
  return ask("Sign in", parts, "Continue", () => box.value.trim() || null);
}

/** Resolves to true when the reader agrees. */
export async function confirmed(title, text, accept) {
  return (await ask(title, [el("p", {}, text)], accept, () => true)) === true;
}
