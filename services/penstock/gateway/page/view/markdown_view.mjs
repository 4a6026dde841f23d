// Markdown's tree as elements. A longer text changes only the blocks that it changed, so a selection stays.

import { parseBlocks } from "../markdown/blocks.mjs";
import { codePieces } from "../markdown/code_colours.mjs";
import { copyButton } from "./copy.mjs";
import { el } from "./dom.mjs";

// Arabic and Hebrew run from the right: each block's own text decides.
const AUTO = { dir: "auto" };
const INLINE = { strong: "strong", emphasis: "em", strike: "s" };

/** Shows a text that grows. */
export class MarkdownView {
  constructor() {
    this.element = el("div", { class: "markdown" });
    this.sources = [];
  }

  update(text) {
    const blocks = parseBlocks(text);
    let same = 0;
    while (same < blocks.length && blocks[same].source === this.sources[same]) same += 1;
    // A code block that grows keeps its element: the reader may have scrolled in it.
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    this.element.append(...blocks.slice(same).map(blockElement));
    this.sources = blocks.map((block) => block.source);
  }
}

function blockElement(block) {
  switch (block.type) {
    case "heading":
      // The page's own headings come first.
      return el(`h${Math.min(6, block.level + 2)}`, AUTO, inline(block.children));
    case "code":
      return codeElement(block.text, block.language);
    case "math":
      return el("pre", { class: "math", dir: "ltr" }, block.text);
    case "rule":
      return el("hr");
    case "quote":
      return el("blockquote", AUTO, block.blocks.map(blockElement));
    case "list":
      return listElement(block);
    case "table":
      return tableElement(block);
    default:
      return el("p", AUTO, inline(block.children));
  }
}

/** A block of code with its language and a button that copies it. */
export function codeElement(text, language) {
  const head = el("div", { class: "code-head" }, el("span", {}, language || "text"), copyButton("Copy code", () => text));
  return el("div", { class: "code" }, head, el("pre", { tabindex: 0, dir: "ltr" }, el("code", {}, coloured(text, language ?? ""))));
}

function coloured(text, language) {
  return codePieces(text, language).map((piece) => (piece.kind === "plain" ? piece.text : el("span", { class: `code-${piece.kind}` }, piece.text)));
}

function listElement({ ordered, start, loose, items }) {
  const children = items.map(({ done, blocks }) => {
    const [first, ...rest] = blocks;
    const isTight = !loose && first?.type === "paragraph";
    const lead = isTight ? inline(first.children) : first ? [blockElement(first)] : [];
    const box = done === null ? null : el("input", { type: "checkbox", checked: done, disabled: true, "aria-label": done ? "done" : "open" });
    return el("li", { ...AUTO, class: done === null ? null : "task" }, box, lead, rest.map(blockElement));
  });
  return el(ordered ? "ol" : "ul", { ...AUTO, start: ordered && start !== 1 ? start : null }, children);
}

function tableElement({ align, head, rows }) {
  const cell = (name) => (children, column) => el(name, { ...AUTO, class: `align-${align[column]}` }, inline(children));
  const body = rows.map((row) => el("tr", {}, row.map(cell("td"))));
  return el("div", { class: "table", tabindex: 0 }, el("table", {}, el("thead", {}, el("tr", {}, head.map(cell("th")))), el("tbody", {}, body)));
}

function inline(nodes) {
  return nodes.map((node) => {
    if (node.type === "text") return node.text;
    if (node.type === "code") return el("code", { dir: "ltr" }, node.text);
    if (node.type === "math") return el("span", { class: "math", dir: "ltr" }, node.text);
    if (node.type === "break") return el("br");
    if (node.type === "link") {
      return el("a", { href: node.address, target: "_blank", rel: "noopener noreferrer nofollow" }, inline(node.children));
    }
    return el(INLINE[node.type], {}, inline(node.children));
  });
}
