// Inline Markdown as a tree of plain objects: text, code, math, strong, emphasis, strike, link, break.
// Emphasis follows CommonMark's delimiter runs. Every loop is bounded by the text's length; nothing here makes HTML.

const PUNCTUATION = /[!-/:-@[-`{-~\p{P}\p{S}]/u;
const SPACE = /\s/;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
// Schemes that a link of a model's answer may have; a relative address is none of them, so it stays text.
const SAFE_SCHEME = /^(?:https?:\/\/|mailto:)/i;
const BARE_ADDRESS = /^https?:\/\/[^\s<>"'`|\\^{}]+/i;
const LONGEST_ADDRESS = 2000;
// Mathematics stays as it was typed: its signs are no Markdown.
const MATH = { "\\(": "\\)", "\\[": "\\]", "$$": "$$" };

/** Returns the address when a link may have it, else null. */
export function safeAddress(text) {
  const address = text.trim();
  if (!SAFE_SCHEME.test(address) || address.length > LONGEST_ADDRESS || /[\u0000-\u0020\u007f]/.test(address)) return null;
  try {
    return new URL(address).href;
  } catch {
    return null;
  }
}

/** Parses one paragraph's text. */
export function parseInline(source) {
  return new InlineParser(source).parse();
}

class InlineParser {
  constructor(source) {
    this.source = source;
    this.at = 0;
    this.nodes = [];
    this.brackets = []; // indices of nodes that are an open bracket
    this.missingCode = new Set(); // lengths of backtick runs that are not found again
    this.missingMath = new Set(); // marks of mathematics whose ends are not found again
  }

  parse() {
    while (this.at < this.source.length) this.step();
    return tidy(withEmphasis(this.nodes));
  }

  step() {
    const { source, at } = this;
    const character = source[at];
    if ((character === "\\" || character === "$") && this.math()) return;
    if (character === "\\") return this.escape();
    if (character === "`") return this.code();
    if (character === "*" || character === "_" || character === "~") return this.run(character);
    if (character === "!" && source[at + 1] === "[") return this.open(2);
    if (character === "[") return this.open(1);
    if (character === "]") return this.close();
    if (character === "<") return this.autolink();
    if (character === "&") return this.entity();
    if (character === "\n") return this.newline();
    if ((character === "h" || character === "H") && !/\w/.test(source[at - 1] ?? "")) return this.bareAddress();
    const end = nextSpecial(source, at + 1);
    this.text(source.slice(at, end));
    this.at = end;
  }

  text(text) {
    this.nodes.push({ type: "text", text });
  }

  escape() {
    const next = this.source[this.at + 1];
    if (next === "\n") this.nodes.push({ type: "break" });
    else if (next && /[!-/:-@[-`{-~]/.test(next)) this.text(next);
    else {
      this.text("\\");
      this.at += 1;
      return;
    }
    this.at += 2;
  }

  /** Reads \(…\), \[…\] or $$…$$; false where there is none. */
  math() {
    const opens = this.source.slice(this.at, this.at + 2);
    const closes = MATH[opens];
    const end = closes && !this.missingMath.has(opens) ? this.source.indexOf(closes, this.at + 2) : -1;
    if (closes && end < 0) this.missingMath.add(opens);
    if (end < 0) return false;
    this.nodes.push({ type: "math", text: this.source.slice(this.at, end + 2) });
    this.at = end + 2;
    return true;
  }

  code() {
    const fence = /^`+/.exec(this.source.slice(this.at, this.at + 64))[0];
    const start = this.at + fence.length;
    const end = this.missingCode.has(fence.length) ? -1 : closingFence(this.source, start, fence.length);
    if (end < 0) {
      this.missingCode.add(fence.length);
      this.text(fence);
      this.at = start;
      return;
    }
    let text = this.source.slice(start, end).replaceAll("\n", " ");
    if (text.startsWith(" ") && text.endsWith(" ") && text.trim()) text = text.slice(1, -1);
    this.nodes.push({ type: "code", text });
    this.at = end + fence.length;
  }

  run(character) {
    let end = this.at;
    while (this.source[end] === character) end += 1;
    const before = this.at > 0 ? lastCharacter(this.source, this.at) : " ";
    const after = end < this.source.length ? String.fromCodePoint(this.source.codePointAt(end)) : " ";
    const left = !SPACE.test(after) && (!PUNCTUATION.test(after) || SPACE.test(before) || PUNCTUATION.test(before));
    const right = !SPACE.test(before) && (!PUNCTUATION.test(before) || SPACE.test(after) || PUNCTUATION.test(after));
    const count = end - this.at;
    this.at = end;
    if (character === "~" && count !== 2) return this.text("~".repeat(count));
    const word = character === "_";
    this.nodes.push({
      type: "delimiter",
      character,
      count,
      size: count,
      opens: left && (!word || !right || PUNCTUATION.test(before)),
      closes: right && (!word || !left || PUNCTUATION.test(after)),
    });
  }

  open(length) {
    this.brackets.push(this.nodes.length);
    this.nodes.push({ type: "bracket", text: this.source.slice(this.at, this.at + length) });
    this.at += length;
  }

  close() {
    const opener = this.brackets.pop();
    const target = opener === undefined ? null : linkTarget(this.source, this.at + 1);
    this.at += 1;
    if (!target) return this.text("]");
    this.at = target.end;
    const isImage = this.nodes[opener].text === "![";
    const inside = tidy(withEmphasis(this.nodes.splice(opener).slice(1)));
    const address = safeAddress(target.address);
    // An image is a link to it: nothing is loaded from elsewhere because a model says so.
    if (address) this.nodes.push({ type: "link", address, children: inside.length ? inside : [{ type: "text", text: address }] });
    else this.nodes.push({ type: "text", text: isImage ? "![" : "[" }, ...inside, { type: "text", text: `](${target.raw})` });
    if (!isImage) this.brackets.length = 0; // no link within a link
  }

  autolink() {
    const found = /^<([a-z][a-z0-9+.-]*:[^\s<>]*)>/i.exec(this.source.slice(this.at, this.at + LONGEST_ADDRESS));
    const address = found && safeAddress(found[1]);
    if (!address) {
      this.text("<");
      this.at += 1;
      return;
    }
    this.nodes.push({ type: "link", address, children: [{ type: "text", text: found[1] }] });
    this.at += found[0].length;
  }

  bareAddress() {
    const found = this.brackets.length ? null : BARE_ADDRESS.exec(this.source.slice(this.at, this.at + LONGEST_ADDRESS));
    let text = found ? trimAddress(found[0]) : null;
    const address = text && safeAddress(text);
    if (!address) {
      const end = nextSpecial(this.source, this.at + 1);
      text = this.source.slice(this.at, end);
      this.text(text);
    } else this.nodes.push({ type: "link", address, children: [{ type: "text", text }] });
    this.at += text.length;
  }

  entity() {
    const found = /^&(?:(amp|lt|gt|quot|apos|nbsp)|#(\d{1,7})|#x([0-9a-f]{1,6}));/i.exec(this.source.slice(this.at, this.at + 12));
    if (!found) {
      this.text("&");
      this.at += 1;
      return;
    }
    const code = found[2] ? Number(found[2]) : Number.parseInt(found[3] ?? "0", 16);
    const known = found[1] ? ENTITIES[found[1].toLowerCase()] : null;
    this.text(known ?? (code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : "\ufffd"));
    this.at += found[0].length;
  }

  newline() {
    // A chat's line is a line: models write verses and addresses without two spaces at the end.
    this.nodes.push({ type: "break" });
    this.at += 1;
    while (this.source[this.at] === " ") this.at += 1;
  }
}

function nextSpecial(source, from) {
  let at = from;
  while (at < source.length && !"\\`*_~![]<&$\nhH".includes(source[at])) at += 1;
  return at;
}

function lastCharacter(source, end) {
  const low = source.charCodeAt(end - 1);
  return low >= 0xdc00 && low <= 0xdfff ? source.slice(end - 2, end) : source[end - 1];
}

function closingFence(source, from, length) {
  let at = source.indexOf("`", from);
  while (at >= 0) {
    let end = at;
    while (source[end] === "`") end += 1;
    if (end - at === length) return at;
    at = source.indexOf("`", end);
  }
  return -1;
}

/** Reads `(address "title")` at `from`; the title is not shown. */
function linkTarget(source, from) {
  if (source[from] !== "(") return null;
  const found = /^\(\s*(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\((?:[^\s()\\]|\\.)*\))*))(?:\s+(?:"[^"\n]*"|'[^'\n]*'))?\s*\)/.exec(
    source.slice(from, from + LONGEST_ADDRESS),
  );
  if (!found) return null;
  const address = (found[1] ?? found[2]).replace(/\\([!-/:-@[-`{-~])/g, "$1");
  return { address, raw: found[0].slice(1, -1), end: from + found[0].length };
}

/** Leaves out the punctuation that ends the sentence rather than the address. */
function trimAddress(text) {
  let end = text.length;
  for (;;) {
    const last = text[end - 1];
    const isUnpaired = last === ")" && text.slice(0, end).split(")").length > text.slice(0, end).split("(").length;
    if (!".,:;!?*_~]".includes(last) && !isUnpaired) return text.slice(0, end);
    end -= 1;
  }
}

/** Pairs the runs of `*`, `_` and `~~`: CommonMark's process_emphasis, on an array. */
function withEmphasis(nodes) {
  const output = [];
  const openers = []; // { index in output, delimiter }
  const bottoms = new Map(); // kind of closer -> number of openers below which none fits
  for (const node of nodes) {
    if (node.type !== "delimiter") {
      output.push(node);
      continue;
    }
    const run = { ...node };
    while (run.closes && run.count > 0) {
      const kind = `${run.character}${run.opens}${run.size % 3}`;
      const found = matching(openers, run, bottoms.get(kind) ?? 0);
      if (found < 0) {
        bottoms.set(kind, openers.length);
        break;
      }
      const { index, delimiter } = openers[found];
      const used = run.count >= 2 && delimiter.count >= 2 ? 2 : 1;
      const children = output.splice(index + 1);
      delimiter.count -= used;
      run.count -= used;
      openers.length = found + (delimiter.count > 0 ? 1 : 0);
      for (const [key, bottom] of bottoms) bottoms.set(key, Math.min(bottom, openers.length));
      if (delimiter.count === 0) output.pop();
      output.push({ type: typeOf(run.character, used), children: tidy(children) });
    }
    if (run.count > 0) {
      if (run.opens) openers.push({ index: output.length, delimiter: run });
      output.push(run);
    }
  }
  return output;
}

function typeOf(character, used) {
  if (character === "~") return "strike";
  return used === 2 ? "strong" : "emphasis";
}

function matching(openers, closer, bottom) {
  for (let at = openers.length - 1; at >= bottom; at -= 1) {
    const { delimiter } = openers[at];
    if (delimiter.character !== closer.character) continue;
    const isMixed = (delimiter.closes || closer.opens) && (delimiter.size + closer.size) % 3 === 0;
    if (!isMixed || (delimiter.size % 3 === 0 && closer.size % 3 === 0)) return at;
  }
  return -1;
}

/** Turns what was left open into text and joins neighbouring texts. */
function tidy(nodes) {
  const output = [];
  for (const node of nodes) {
    const isText = node.type === "text" || node.type === "bracket" || node.type === "delimiter";
    const text = node.type === "delimiter" ? node.character.repeat(node.count) : node.text;
    const last = output.at(-1);
    if (!isText) output.push(node);
    else if (last?.type === "text") last.text += text;
    else if (text) output.push({ type: "text", text });
  }
  return output;
}
