// Markdown as a tree: the marks of an answer, hostile text, and the text of an answer cut anywhere.

import assert from "node:assert/strict";
import { test } from "node:test";
import { parseBlocks } from "../../../../services/penstock/gateway/page/markdown/blocks.mjs";
import { codePieces } from "../../../../services/penstock/gateway/page/markdown/code_colours.mjs";
import { parseInline, safeAddress } from "../../../../services/penstock/gateway/page/markdown/inline.mjs";

const types = (text) => parseBlocks(text).map((block) => block.type);
/** Inline nodes as a short line: text as it is, others as name(children). */
const line = (text) => parseInline(text).map(short).join("");
const short = (node) => {
  if (node.type === "text") return node.text;
  if (node.type === "break") return "/";
  const inside = node.text ?? node.children.map(short).join("");
  return `${node.type}(${inside}${node.address ? `→${node.address}` : ""})`;
};

test("emphasis", () => {
  assert.equal(line("*a* _b_ **c** __d__ ***e***"), "emphasis(a) emphasis(b) strong(c) strong(d) emphasis(strong(e))");
  assert.equal(line("**a *b* c** ~~d~~ ~e~"), "strong(a emphasis(b) c) strike(d) ~e~");
  assert.equal(line("snake_case_name 2 * 3 * 4 a**b"), "snake_case_name 2 * 3 * 4 a**b");
  assert.equal(line("**open *and never closed"), "**open *and never closed");
});

test("code keeps its marks", () => {
  assert.equal(line("`*a*` ``b`c`` `open"), "code(*a*) code(b`c) `open");
  assert.equal(line("`<img src=x>`"), "code(<img src=x>)");
});

test("links with safe addresses", () => {
  assert.equal(line("[a *b*](https://x.org/c_(d) \"t\")"), "link(a emphasis(b)→https://x.org/c_(d))");
  assert.equal(line("<https://x.org> and https://y.org/z. (https://w.org)"),
    "link(https://x.org→https://x.org/) and link(https://y.org/z→https://y.org/z). (link(https://w.org→https://w.org/))");
  assert.equal(line("[mail](mailto:a@b.org)"), "link(mail→mailto:a@b.org)");
});

for (const address of [
  "javascript:alert(1)", "JaVaScRiPt:alert(1)", " javascript:alert(1)", "java\tscript:alert(1)", "data:text/html,x", "vbscript:x",
  "file:///etc/passwd", "blob:https://x/y", "//x.org", "/v1/models", "https://", "https://x y",
]) {
  test(`${JSON.stringify(address)} is no address of a link`, () => {
    assert.equal(safeAddress(address), null);
    const tree = JSON.stringify(parseBlocks(`[a](${address}) <${address}> ![b](${address})`));
    // An address within the text may become a link of its own.
    for (const [, made] of tree.matchAll(/"address":"([^"]*)"/g)) assert.match(made, /^https:\/\/[xy]/);
  });
}

test("HTML stays text", () => {
  const text = '<img src=x onerror=alert(1)><script>alert(1)</script> &lt;b&gt;';
  assert.equal(line(text), '<img src=x onerror=alert(1)><script>alert(1)</script> <b>');
});

test("an image is a link: nothing is loaded", () => {
  assert.equal(line("![a](https://x.org/p.png)"), "link(a→https://x.org/p.png)");
});

test("escapes and entities", () => {
  assert.equal(line("\\*a\\* \\q &amp; &#65;&#x42; &#0; &nope;"), "*a* \\q & AB \ufffd &nope;");
});

test("mathematics stays as it was typed", () => {
  assert.equal(line("\\(a_i * b_j\\) and \\[x\\] and $$y_1*z_1$$"), "math(\\(a_i * b_j\\)) and math(\\[x\\]) and math($$y_1*z_1$$)");
  assert.equal(line("costs $5 and $6, \\(open, $$open"), "costs $5 and $6, (open, $$open");
  const [block, after] = parseBlocks("\\[\n- a_1\n= b\\_2\n\\]\nEnd");
  assert.deepEqual([block.type, block.text, after.type], ["math", "\\[\n- a_1\n= b\\_2\n\\]", "paragraph"]);
  assert.deepEqual(types("$$\nx\n$$"), ["math"]);
  assert.deepEqual(types("$$x$$ is short"), ["paragraph"]);
  assert.deepEqual(types("$$\nnever closed\n\nmore"), ["paragraph", "paragraph"]);
});

test("code has colours by its language, and loses no character", () => {
  const kinds = (text, language) => codePieces(text, language).filter(({ kind }) => kind !== "plain").map(({ kind, text: part }) => `${kind}:${part}`);
  assert.deepEqual(kinds("def f(a): # it's\n  return 'x' + 12", "python"), ["keyword:def", "comment:# it's", "keyword:return", "string:'x'", "number:12"]);
  assert.deepEqual(kinds("let a = `b`; // c", "js"), ["keyword:let", "string:`b`", "comment:// c"]);
  assert.deepEqual(kinds("SELECT 1 -- all", "sql"), ["keyword:SELECT", "number:1", "comment:-- all"]);
  assert.deepEqual(kinds("if a # b", ""), []);
  for (const text of ["'open", '"""\nopen', "/* open", "a'b\n\"c", "x".repeat(30000)]) {
    for (const language of ["python", "c", "sql"]) assert.equal(codePieces(text, language).map((piece) => piece.text).join(""), text);
  }
});

test("a new line is one", () => {
  assert.equal(line("a\nb"), "a/b");
});

test("blocks", () => {
  assert.deepEqual(types("# a\n\nb\n\n---\n\n> c\n\n- d\n\n1. e\n\n```js\nf\n```\n\n|a|b|\n|-|-|\n|1|2|"),
    ["heading", "paragraph", "rule", "quote", "list", "list", "code", "table"]);
});

test("code blocks keep their lines, and are whole before their end has come", () => {
  const [open] = parseBlocks("```python\nif a:\n    b()\n\n# c");
  assert.deepEqual([open.type, open.language, open.text, open.closed], ["code", "python", "if a:\n    b()\n\n# c", false]);
  const [closed, after] = parseBlocks("~~~~\n```\n~~~~\nd");
  assert.deepEqual([closed.text, closed.closed, after.type], ["```", true, "paragraph"]);
});

test("lists within lists, with their numbers and tasks", () => {
  const [list] = parseBlocks("3. a\n   - b\n     - c\n4. d\n   e");
  assert.deepEqual([list.ordered, list.start, list.loose, list.items.length], [true, 3, false, 2]);
  assert.deepEqual(list.items[0].blocks.map((block) => block.type), ["paragraph", "list"]);
  const [tasks] = parseBlocks("- [x] a\n- [ ] b\n- c");
  assert.deepEqual(tasks.items.map((item) => item.done), [true, false, null]);
  assert.equal(parseBlocks("- a\n\n- b")[0].loose, true);
});

test("tables: alignment, escaped bars, missing cells", () => {
  const [table] = parseBlocks("a | b \\| c | `d|e`\n:- | :-: | -:\n1 | 2");
  assert.deepEqual(table.align, ["left", "center", "right"]);
  assert.deepEqual(table.head.map((cell) => cell.map(short).join("")), ["a", "b | c", "code(d|e)"]);
  assert.deepEqual(table.rows[0].map((cell) => cell.map(short).join("")), ["1", "2", ""]);
});

test("a year in running text begins no list", () => {
  assert.deepEqual(types("It was in\n1984. A year"), ["paragraph"]);
});

const ANSWER = "# Title\n\nSome **bold** and `code` with [a link](https://x.org/a).\n\n1. one\n   - two\n\n```js\nlet a = `b`;\n```\n\n| a | b |\n|---|--:|\n| *1* | 2 |\n\n> quote\n\nEnd.";

test("every beginning of an answer parses, and blocks that are followed do not change", () => {
  const whole = parseBlocks(ANSWER);
  for (let end = 0; end <= ANSWER.length; end += 1) {
    const blocks = parseBlocks(ANSWER.slice(0, end));
    blocks.slice(0, -2).forEach((block, at) => assert.deepEqual(block, whole[at]));
  }
});

// Each would take minutes if a loop within a loop went over the text.
for (const piece of ["*", "_", "[", "![", "`", "<", ">", "> ", "- ", "**a ", "*a_", "[](", "&#", "|", "~~", "a*", "*\n", "- a\n", "|a|\n", "`a``", "$", "$$", "$$a ", "\\(", "\\[\n", "- \\[\n", "$$a\n"]) {
  test(`100 000 of ${JSON.stringify(piece)} parse`, () => {
    assert.ok(parseBlocks(piece.repeat(100_000)).length >= 1);
  });
}
