// Block Markdown as a tree of plain objects: paragraph, heading, code, math, list, quote, table, rule.
// A block carries its source, so that a view changes only the blocks that a longer text changed.

import { parseInline } from "./inline.mjs";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const MATH = /^ {0,3}(\\\[|\$\$)/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:( +)(.*)|)$/;
const TASK = /^\[([ xX])\]\s+/;
const TABLE_RULE = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
// Quotes and lists within each other beyond this are text.
const DEEPEST = 12;
const MOST_COLUMNS = 64;

/** Parses Markdown; an unfinished text, as it streams, gives the blocks so far. */
export function parseBlocks(text, depth = 0) {
  const lines = text.replace(/\r\n?/g, "\n").replaceAll("\0", "\ufffd").split("\n").map(withoutTabs);
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const { block, end } = nextBlock(lines, at, depth);
    blocks.push({ ...block, source: lines.slice(at, end).join("\n") });
    at = end;
  }
  return blocks;
}

function withoutTabs(line) {
  return line.replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    "));
}

function nextBlock(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return code(lines, at);
  const formula = math(lines, at);
  if (formula) return formula;
  const heading = HEADING.exec(line);
  if (heading) return { block: { type: "heading", level: heading[1].length, children: parseInline(heading[2] ?? "") }, end: at + 1 };
  if (RULE.test(line)) return { block: { type: "rule" }, end: at + 1 };
  if (QUOTE.test(line) && depth < DEEPEST) return quote(lines, at, depth);
  if (ITEM.test(line) && depth < DEEPEST) return list(lines, at, depth);
  if (isTable(lines, at)) return table(lines, at);
  return paragraph(lines, at);
}

function code(lines, at) {
  const [, fence, info] = FENCE.exec(lines[at]);
  const indent = lines[at].search(/\S/);
  const body = [];
  let end = at + 1;
  let closed = false;
  for (; end < lines.length && !closed; end += 1) {
    const mark = lines[end].trim();
    closed = mark.length >= fence.length && mark === fence[0].repeat(mark.length);
    if (!closed) body.push(lines[end].slice(Math.min(indent, Math.max(0, lines[end].search(/\S|$/)))));
  }
  return { block: { type: "code", language: info.trim().split(/\s+/)[0], text: body.join("\n"), closed }, end };
}

/** Mathematics on lines of its own, as it was typed; null where none begins, or where its end has not come. */
function math(lines, at) {
  const opens = MATH.exec(lines[at])?.[1];
  if (!opens) return null;
  const closes = opens === "$$" ? "$$" : "\\]";
  let end = at;
  for (let from = lines[at].indexOf(opens) + 2; end < lines.length && lines[end].trim(); end += 1, from = 0) {
    const found = lines[end].indexOf(closes, from);
    if (found < 0) continue;
    // Text behind it belongs to a paragraph, which reads it as well.
    if (lines[end].slice(found + 2).trim()) return null;
    return { block: { type: "math", text: lines.slice(at, end + 1).join("\n") }, end: end + 1 };
  }
  return null;
}

function quote(lines, at, depth) {
  const body = [];
  let end = at;
  // Like a paragraph's, a quote's lines go on without the mark.
  while (end < lines.length && (QUOTE.test(lines[end]) || (end > at && isLazy(lines[end], body)))) {
    body.push(lines[end].replace(QUOTE, ""));
    end += 1;
  }
  return { block: { type: "quote", blocks: parseBlocks(body.join("\n"), depth + 1) }, end };
}

function isLazy(line, body) {
  return line.trim() !== "" && body.at(-1).trim() !== "" && !startsBlock(line);
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const kind = listKind(first[2]);
  const items = [];
  let end = at;
  let loose = false;
  while (end < lines.length) {
    const mark = ITEM.exec(lines[end]);
    if (!mark || listKind(mark[2]) !== kind || RULE.test(lines[end])) break;
    const width = mark[1].length + mark[2].length + Math.min(mark[3]?.length ?? 1, 4);
    const body = [mark[4] ?? ""];
    end += 1;
    for (; end < lines.length; end += 1) {
      const line = lines[end];
      const indent = line.search(/\S/);
      if (indent < 0) body.push("");
      else if (indent >= width) body.push(line.slice(width));
      else if (indent >= 2 && ITEM.test(line.trim()) && indent > mark[1].length) body.push(line.slice(indent));
      else if (isLazy(line, body)) body.push(line.trim());
      else break;
    }
    const isSpaced = body.length > 1 && body.at(-1) === "";
    while (body.length > 1 && body.at(-1) === "") body.pop();
    const goesOn = end < lines.length && listKind(ITEM.exec(lines[end])?.[2]) === kind;
    loose ||= body.includes("") || (isSpaced && goesOn);
    items.push(item(body.join("\n"), depth));
  }
  const start = /\d/.test(kind) ? Number.parseInt(first[2], 10) : null;
  return { block: { type: "list", ordered: start !== null, start, loose, items }, end };
}

/** Names the kind of a mark: a list goes on with the same sign only, and numbers with the same sign after them. */
function listKind(mark) {
  if (mark === undefined) return undefined;
  return /\d/.test(mark) ? `1${mark.at(-1)}` : mark;
}

function item(text, depth) {
  const task = TASK.exec(text);
  const done = task ? task[1] !== " " : null;
  return { done, blocks: parseBlocks(task ? text.slice(task[0].length) : text, depth + 1) };
}

function isTable(lines, at) {
  const rule = lines[at + 1];
  return (
    lines[at].includes("|") && rule !== undefined && rule.includes("-") && TABLE_RULE.test(rule) &&
    cells(rule).length === cells(lines[at]).length && cells(rule).length <= MOST_COLUMNS
  );
}

function table(lines, at) {
  const head = cells(lines[at]);
  const align = cells(lines[at + 1]).map((rule) => (rule.endsWith(":") ? (rule.startsWith(":") ? "center" : "right") : "left"));
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].includes("|") && lines[end].trim(); end += 1) {
    const row = cells(lines[end]);
    rows.push(head.map((_, column) => parseInline(row[column] ?? "")));
  }
  return { block: { type: "table", align, head: head.map(parseInline), rows }, end };
}

/** Splits a table's line at its bars; an escaped bar, or one in code, is none. */
function cells(line) {
  const found = [""];
  let inCode = false;
  const text = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") {
      found[found.length - 1] += "|";
      at += 1;
      continue;
    }
    if (text[at] === "`") inCode = !inCode && text.includes("`", at + 1);
    if (text[at] === "|" && !inCode) found.push("");
    else found[found.length - 1] += text[at];
  }
  return found.map((cell) => cell.trim());
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end)) end += 1;
  const text = lines.slice(at, end).map((line) => line.trim()).join("\n");
  return { block: { type: "paragraph", children: parseInline(text) }, end };
}

function interrupts(lines, at) {
  const line = lines[at];
  const mark = ITEM.exec(line);
  // A number other than 1 in running text begins no list.
  const isItem = mark && mark[4] && (!/\d/.test(mark[2]) || Number.parseInt(mark[2], 10) === 1);
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || isItem || isTable(lines, at);
}
