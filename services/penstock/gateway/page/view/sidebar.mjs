// The list of conversations: open, rename, delete, export, import.

import { titleOf } from "../chat/conversation.mjs";
import { confirmed } from "./dialogs.mjs";
import { button, el, fill } from "./dom.mjs";
import { icon } from "./icons.mjs";

export class Sidebar {
  /** `acts`: begin(), open(conversation), remove(id), rename(conversation, title), exported(list), imported(text). */
  constructor(element, acts) {
    Object.assign(this, { element, acts });
    this.list = el("ul", { class: "conversations" });
    const file = el("input", { type: "file", accept: "application/json,.json", hidden: true, "aria-label": "File of conversations" });
    file.addEventListener("change", async () => {
      if (file.files[0]) acts.imported(await file.files[0].text());
      file.value = "";
    });
    fill(
      element,
      el("div", { class: "side-head" }, button(icon("plus"), "New conversation", acts.begin, { label: true, class: "wide" })),
      this.list,
      el("div", { class: "side-foot" },
        button(icon("upload"), "Import", () => file.click(), { label: true, class: "quiet" }),
        button(icon("download"), "Export all", () => acts.exported(this.shown), { label: true, class: "quiet", "data-exports": true }), file),
    );
  }

  show(conversations, current) {
    this.shown = conversations;
    const rows = conversations.map((one) => this.row(one, one.id === current.id));
    fill(this.list, rows.length ? rows : el("li", { class: "none" }, "None yet. They are kept in this browser only."));
    this.element.querySelector("[data-exports]").disabled = !rows.length;
  }

  row(conversation, isCurrent) {
    const title = titleOf(conversation);
    const row = el("li", { class: isCurrent ? "current" : null },
      el("button", { type: "button", class: "title", "aria-current": isCurrent ? "true" : null, onclick: () => this.acts.open(conversation) }, title),
      el("span", { class: "row-ways" },
        button(icon("edit"), `Rename ${title}`, () => this.rename(row, conversation), { class: "quiet" }),
        button(icon("download"), `Export ${title}`, () => this.acts.exported([conversation]), { class: "quiet" }),
        button(icon("remove"), `Delete ${title}`, () => this.remove(conversation, title), { class: "quiet" })));
    return row;
  }

  rename(row, conversation) {
    const box = el("input", { "aria-label": "Name of the conversation", value: titleOf(conversation), maxlength: 200 });
    let isDone = false;
    const end = (keeps) => {
      if (isDone) return;
      isDone = true;
      this.acts.rename(conversation, keeps ? box.value.trim() : conversation.title);
    };
    box.addEventListener("keydown", (event) => {
      if (event.key === "Enter") end(true);
      else if (event.key === "Escape") {
        event.stopPropagation();
        end(false);
      }
    });
    box.addEventListener("blur", () => end(true));
    fill(row, box);
    box.select();
  }

  async remove(conversation, title) {
    if (await confirmed("Delete this conversation?", `“${title}” is kept in this browser only.`, "Delete")) this.acts.remove(conversation.id);
  }
}
