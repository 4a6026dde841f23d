// Conversations, requests, options, events and answers, without a browser.

import assert from "node:assert/strict";
import { test } from "node:test";
import { emptyAnswer, takeChoice, takeFacts, tokenTexts } from "../../../../services/penstock/gateway/page/chat/answer.mjs";
import { decoded, encoded } from "../../../../services/penstock/gateway/page/chat/api.mjs";
import { addTurn, branches, choose, messagesOf, newConversation, pairOf, pathTo, readConversation, titleOf } from "../../../../services/penstock/gateway/page/chat/conversation.mjs";
import { events } from "../../../../services/penstock/gateway/page/chat/event_stream.mjs";
import { percent, stagesOf, tokensOf, tokensPerSecond } from "../../../../services/penstock/gateway/page/chat/figures.mjs";
import { GROUPS, grouped } from "../../../../services/penstock/gateway/page/chat/option_groups.mjs";
import { controlOf, readOption } from "../../../../services/penstock/gateway/page/chat/option_values.mjs";
import { isTooLong, problemOf } from "../../../../services/penstock/gateway/page/chat/problem.mjs";
import { BadSetting, readTools, requestBody, structure } from "../../../../services/penstock/gateway/page/chat/request.mjs";
import { defaultSettings, readSettings } from "../../../../services/penstock/gateway/page/chat/settings.mjs";
import { Session } from "../../../../services/penstock/gateway/page/chat/session.mjs";
import { Keeper } from "../../../../services/penstock/gateway/page/chat/keeper.mjs";
import { Store } from "../../../../services/penstock/gateway/page/chat/store.mjs";
import { contextFill } from "../../../../services/penstock/gateway/page/chat/context_fill.mjs";
import { laterStart, leaveOut, sentTurns } from "../../../../services/penstock/gateway/page/chat/window.mjs";

const TEMPERATURE = { name: "temperature", kind: "float", doc: "Heat.", minimum: 0 };
const TOP_H = { name: "top_h", kind: "float", doc: "", minimum: 0, maximum: 1, minimum_excluded: true };
const TABLE = [
  TEMPERATURE, TOP_H,
  { name: "num_beams", kind: "int", doc: "Beams.", minimum: 1, most: 16 },
  { name: "seed", kind: "int", doc: "Same.", minimum: 0, maximum: 2 ** 63 },
  { name: "do_sample", kind: "bool", doc: "Sample." },
  { name: "stop_strings", kind: "strings", doc: "Stop." },
  { name: "logit_bias", kind: "logit_bias", type: "Mapping[int, float]", doc: "Bias.", most: 1024 },
  { name: "early_stopping", kind: "early_stopping", doc: "Beams.", choices: [true, false, "never"] },
  { name: "negative_prompt", kind: "prompt", type: "str", doc: "Away from." },
];

function talk() {
  const conversation = newConversation(defaultSettings());
  const question = addTurn(conversation, null, { role: "user", content: "Hello\nyou" });
  const answer = addTurn(conversation, question.id, { ...emptyAnswer(), content: "Hi" });
  return { conversation, question, answer };
}

test("a retry is a branch beside the first answer, and both stay", () => {
  const { conversation, question, answer } = talk();
  const other = addTurn(conversation, question.id, { ...emptyAnswer(), content: "Hey" });
  assert.deepEqual(pathTo(conversation).map((turn) => turn.id), [question.id, other.id]);
  assert.deepEqual(branches(conversation, other), [answer, other]);
  choose(conversation, answer);
  assert.equal(conversation.leaf, answer.id);
});

test("choosing a branch shows its newest descendants", () => {
  const { conversation, question, answer } = talk();
  const next = addTurn(conversation, answer.id, { role: "user", content: "More" });
  const edited = addTurn(conversation, null, { role: "user", content: "Bye" });
  assert.deepEqual(pathTo(conversation), [edited]);
  choose(conversation, question);
  assert.equal(conversation.leaf, next.id);
});

test("compared answers are a pair, and one entry among the branches", () => {
  const { conversation, question, answer } = talk();
  const a = addTurn(conversation, question.id, { ...emptyAnswer(), pair: "p", side: "A" });
  const b = addTurn(conversation, question.id, { ...emptyAnswer(), pair: "p", side: "B" });
  assert.deepEqual(pairOf(conversation, b), [a, b]);
  assert.equal(pairOf(conversation, answer), null);
  assert.deepEqual(branches(conversation, b), [answer, b]);
  assert.deepEqual(branches(conversation, answer), [answer, a]);
});

test("messages have the system prompt, calls and their results, and no empty answer", () => {
  const { conversation, answer } = talk();
  conversation.settings.system = "Be brief.";
  answer.calls = [{ id: "c1", name: "add", arguments: '{"a": 1}' }];
  const result = addTurn(conversation, answer.id, { role: "tool", call: "c1", content: "2" });
  const failed = addTurn(conversation, result.id, emptyAnswer());
  assert.deepEqual(messagesOf(conversation, pathTo(conversation, failed.id)), [
    { role: "system", content: "Be brief." },
    { role: "user", content: "Hello\nyou" },
    { role: "assistant", content: "Hi", tool_calls: [{ id: "c1", type: "function", function: { name: "add", arguments: '{"a": 1}' } }] },
    { role: "tool", tool_call_id: "c1", content: "2" },
  ]);
});

test("a conversation is named after its first line", () => {
  const { conversation } = talk();
  assert.equal(titleOf(conversation), "Hello");
  conversation.title = "Mine";
  assert.equal(titleOf(conversation), "Mine");
});

test("a conversation that was kept reads back the same", () => {
  const { conversation } = talk();
  assert.deepEqual(readConversation(JSON.parse(JSON.stringify(conversation)), readSettings).turns["t1"], conversation.turns.t1);
  assert.equal(readConversation(JSON.parse(JSON.stringify(conversation)), readSettings).leaf, conversation.leaf);
});

for (const [what, change] of [
  ["another format", (c) => { c.format = 9; }],
  ["a parent that is not there", (c) => { c.turns.t2.parent = "t9"; }],
  ["a circle", (c) => { c.turns.t1.parent = "t2"; }],
  ["an id that is none", (c) => { c.turns.constructor = { role: "user", content: "", parent: null }; }],
  ["a content that is no text", (c) => { c.turns.t1.content = { a: 1 }; }],
  ["a role that is none", (c) => { c.turns.t1.role = "root"; }],
]) {
  test(`a file with ${what} is refused`, () => {
    const copy = JSON.parse(JSON.stringify(talk().conversation));
    change(copy);
    assert.throws(() => readConversation(copy, readSettings), Error);
  });
}

test("settings of a file are taken by their types", () => {
  const read = readSettings({ system: "a", alternatives: 900, compare: "yes", options: { A: { top_p: "0.5", bad: 3 } }, structure: { kind: "evil" } });
  assert.deepEqual([read.system, read.alternatives, read.compare, read.options.A, read.structure.kind], ["a", 20, false, { top_p: "0.5" }, "none"]);
});

test("values are read by their kinds", () => {
  const value = (name, text) => readOption(TABLE.find((option) => option.name === name), text);
  assert.deepEqual(value("temperature", " 0.5 "), { value: 0.5 });
  assert.deepEqual(value("temperature", "0,5"), { value: 0.5 });
  assert.deepEqual(value("temperature", ""), {});
  assert.deepEqual(value("num_beams", "4"), { value: 4 });
  assert.deepEqual(value("seed", "9223372036854775807"), { value: 9223372036854775807n });
  assert.deepEqual(value("do_sample", "true"), { value: true });
  assert.deepEqual(value("stop_strings", "a\nb c"), { value: ["a", "b c"] });
  assert.deepEqual(value("stop_strings", '["\\n\\n"]'), { value: ["\n\n"] });
  assert.deepEqual(value("logit_bias", '{"5": -1}'), { value: { 5: -1 } });
  assert.deepEqual(value("early_stopping", "false"), { value: false });
  assert.deepEqual(value("early_stopping", "never"), { value: "never" });
  assert.deepEqual(value("negative_prompt", "[1]"), { value: "[1]" });
  assert.equal(controlOf({ kind: "int", choices: ["a"] }), "choice");
});

for (const [name, text, error] of [
  ["temperature", "-1", "at least 0"], ["temperature", "hot", "must be a number"], ["top_h", "0", "above 0"], ["top_h", "1.5", "at most 1"],
  ["num_beams", "2.5", "whole"], ["num_beams", "0", "at least 1"], ["num_beams", "17", "at most 16"], ["num_beams", "9".repeat(17), "at most 16"],
  ["do_sample", "maybe", "true or false"], ["stop_strings", "[1]", "list of texts"], ["logit_bias", "{", "not JSON"],
]) {
  test(`${name} refuses ${JSON.stringify(text)}`, () => {
    assert.match(readOption(TABLE.find((option) => option.name === name), text).error, new RegExp(error));
  });
}

test("a request carries changed options only", () => {
  const { conversation } = talk();
  conversation.settings.options.A = { temperature: "0.5", num_beams: " " };
  conversation.settings.options.B = { num_beams: "2" };
  const body = requestBody(conversation, "t1", "A", TABLE);
  assert.deepEqual(Object.keys(body).sort(), ["messages", "return_token_ids", "stream", "stream_options", "temperature"]);
  assert.equal(requestBody(conversation, "t1", "B", TABLE).num_beams, 2);
});

test("a wrong option names itself and its set", () => {
  const { conversation } = talk();
  conversation.settings.options.B = { temperature: "-1" };
  assert.throws(() => requestBody(conversation, "t1", "B", TABLE), (error) => error instanceof BadSetting && error.part === "temperature" && error.side === "B");
});

test("structured output goes under its name", () => {
  assert.deepEqual(structure({ kind: "none", text: "x" }), {});
  assert.deepEqual(structure({ kind: "json_schema", text: '{"type": "object"}' }).response_format.json_schema.schema, { type: "object" });
  assert.deepEqual(structure({ kind: "choice", text: "yes\nno\n" }), { choice: ["yes", "no"] });
  assert.deepEqual(structure({ kind: "regex", text: "a+" }), { regex: "a+" });
  for (const text of ["", "{", "[]"]) assert.throws(() => structure({ kind: "json_schema", text }), BadSetting);
});

test("tools as OpenAI has them, or bare", () => {
  const wanted = [{ type: "function", function: { name: "add" } }];
  assert.deepEqual(readTools('[{"type": "function", "function": {"name": "add"}}]'), wanted);
  assert.deepEqual(readTools('{"name": "add"}'), wanted);
  for (const text of ["[{}]", "[", "3"]) assert.throws(() => readTools(text), BadSetting);
});

test("every option is in a group once, and a search finds it by its words", () => {
  const names = GROUPS.flatMap(([, group]) => group);
  assert.equal(new Set(names).size, names.length);
  assert.deepEqual(grouped(TABLE, "top h").flatMap(([, options]) => options), [TOP_H]);
  assert.deepEqual(grouped(TABLE, "heat").flatMap(([, options]) => options), [TEMPERATURE]);
  assert.deepEqual(grouped([{ name: "brand_new", doc: "" }]).map(([title]) => title), ["More"]);
});

async function read(...pieces) {
  const found = [];
  for await (const data of events(ReadableStream.from(pieces))) found.push(data);
  return found;
}

test("events, cut at every byte", async () => {
  const bytes = new TextEncoder().encode(": hello\r\n\r\ndata: {\"a\": \"é\"}\n\ndata: one\r\ndata: two\r\n\r\ndata:[DONE]\n\n");
  const wanted = ['{"a": "é"}', "one\ntwo", "[DONE]"];
  assert.deepEqual(await read(bytes), wanted);
  for (let at = 1; at < bytes.length; at += 1) assert.deepEqual(await read(bytes.slice(0, at), bytes.slice(at)), wanted, `cut at ${at}`);
});

test("an answer grows by its chunks", () => {
  const answer = emptyAnswer();
  takeChoice(answer, { delta: { role: "assistant", content: "" } });
  takeChoice(answer, { delta: { reasoning_content: "Hm" } });
  takeChoice(answer, { delta: { content: "A" }, token_ids: [7, 8], logprobs: { content: [{ token: "A", logprob: -0.12345, bytes: [65], top_logprobs: [{ token: "B", logprob: -2 }] }] } });
  takeChoice(answer, { delta: { tool_calls: [{ index: 0, id: "c", function: { name: "f", arguments: "" } }] } });
  takeChoice(answer, { delta: { tool_calls: [{ index: 0, function: { arguments: "{}" } }] }, finish_reason: "tool_calls" });
  assert.deepEqual(answer, {
    role: "assistant", content: "A", reasoning: "Hm", calls: [{ id: "c", name: "f", arguments: "{}" }], finish: "tool_calls", counted: 2,
    tokens: [{ token: "A", logprob: -0.123, top: [{ token: "B", logprob: -2 }] }],
  });
});

test("seeds keep all of their digits, on both ways", () => {
  assert.equal(encoded({ seed: 9223372036854775807n, model: "m", none: undefined }), '{"seed":9223372036854775807,"model":"m"}');
  assert.equal(decoded('{"choices":[],"penstock":{"timings":{},"seed":5645065306890380123}}').penstock.seed, "5645065306890380123");
  assert.equal(decoded('{"choices":[{"delta":{"content":"\\"seed\\":5"}}]}').penstock, undefined);
});

test("a character of several tokens belongs to the last of them", () => {
  const tokens = (...texts) => texts.map((token) => ({ token }));
  assert.deepEqual(tokenTexts(tokens("Hi", " \uFFFD", "\uFFFD", " you", "<end>"), "Hi 👋 you"), ["Hi", "", " 👋", " you", "<end>"]);
  assert.deepEqual(tokenTexts(tokens("a", "\uFFFD", "\uFFFD"), "aé"), ["a", "", "é"]);
  assert.deepEqual(tokenTexts(tokens("a", "\uFFFD"), "a"), ["a", ""]);
  const answer = emptyAnswer();
  const parts = [["Hi", [72, 105]], [" \\xf0\\x9f", [32, 240, 159]], ["\\x91\\x8b", [145, 139]], ["\\x91", [92, 120, 57, 49]]];
  takeChoice(answer, { delta: { content: "Hi 👋\\x91" }, logprobs: { content: parts.map(([token, bytes]) => ({ token, bytes, logprob: -1 })) } });
  assert.deepEqual(tokenTexts(answer.tokens, answer.content), ["Hi", "", " 👋", "\\x91"]);
});

test("figures", () => {
  const record = {};
  takeFacts(record, { usage: { completion_tokens: 11 }, penstock: { timings: { prefill_seconds: 0.1, decode_seconds: 0.5, total_seconds: 0.7 } } });
  assert.deepEqual(stagesOf(record.timings).map(({ name, seconds }) => [name, Math.round(seconds * 10)]), [["prefill", 1], ["decode", 5], ["other", 1]]);
  assert.equal(tokensPerSecond(record), 20);
  assert.equal(tokensPerSecond({ usage: { completion_tokens: 1 } }), null);
  // A stopped answer has no usage, nor timings: its tokens were counted as they came.
  assert.equal(tokensPerSecond({ counted: 21, firstToken: 1, elapsed: 3 }), 10);
  assert.equal(tokensOf({ counted: 21 }), 21);
  assert.deepEqual([0, Math.log(0.5), Math.log(0.0003), -20].map(percent), ["100%", "50.0%", "0.03%", "<0.001%"]);
});

test("errors keep the server's reason and field", () => {
  const problem = problemOf({ error: { message: "no", type: "invalid_request_error", param: "top_p", code: "invalid_argument", reason: "INVALID_ARGUMENT", field: "config.top_p" } }, 400);
  assert.deepEqual(problem.toJSON(), { message: "no", status: 400, reason: "INVALID_ARGUMENT", field: "top_p", retryAfter: 0 });
  assert.equal(problemOf(null, 502).message, "the server answered 502");
});

class Memory extends Map {
  constructor(room) { super(); this.room = room; }
  get length() { return this.size; }
  key(at) { return [...this.keys()][at]; }
  getItem(key) { return this.get(key) ?? null; }
  removeItem(key) { this.delete(key); }
  setItem(key, value) {
    const others = [...this].reduce((sum, [name, text]) => sum + (name === key ? 0 : text.length), 0);
    if (others + value.length > this.room) throw new Error("QuotaExceededError");
    this.set(key, value);
  }
}

test("a store keeps conversations, exports and imports them, and deletes them", () => {
  const memory = new Memory(1e6);
  const store = new Store(memory, assert.fail);
  const { conversation } = talk();
  store.save(conversation);
  assert.deepEqual(new Store(memory, assert.fail).list().map((one) => one.id), [conversation.id]);
  const file = store.exported(store.list());
  const [copy] = store.imported(file);
  assert.notEqual(copy.id, conversation.id);
  store.remove(conversation.id);
  assert.deepEqual(new Store(memory, assert.fail).list().map((one) => one.id), [copy.id]);
  for (const text of ["{", "{}", '{"conversations": [{}]}']) assert.throws(() => store.imported(text), Error);
});

test("a full store gives up probabilities before conversations, and says when nothing helps", () => {
  const told = [];
  const memory = new Memory(6000);
  const store = new Store(memory, (text) => told.push(text));
  const first = talk();
  first.answer.tokens = Array.from({ length: 60 }, () => ({ token: "aaaaaaaaaa", logprob: -1, top: [] }));
  store.save(first.conversation);
  const second = talk();
  second.answer.content = "b".repeat(1500);
  store.save(second.conversation);
  assert.deepEqual(told, []);
  assert.equal(memory.size, 2);
  second.answer.content = "b".repeat(9000);
  store.save(second.conversation);
  assert.match(told[0], /full/);
});

/** A session whose server answers as `chat` says. */
function sessionWith(chat, memory = new Memory(1e6)) {
  const store = new Store(memory, assert.fail);
  const on = { opened() {}, turned() {}, grew() {}, running() {} };
  return new Session({ chat }, store, on);
}

const said = (content) => ({ choices: [{ index: 0, delta: { content } }] });

test("a reload while an answer streams keeps what came", async () => {
  const memory = new Memory(1e6);
  let goOn;
  const session = sessionWith(async function* chat() {
    yield said("One");
    yield said(" two");
    await new Promise((resolve) => { goOn = resolve; });
  }, memory);
  session.send("Count.");
  while (!goOn) await new Promise(setImmediate);
  // As the page does when it goes.
  session.keepRunning();
  const [read] = new Store(memory, assert.fail).list();
  const answer = read.turns[read.leaf];
  assert.deepEqual([answer.content, answer.running, answer.stopped], ["One two", false, true]);
  goOn();
});

test("an answer that a leaving page ends is a stopped one, not a broken one", async () => {
  const memory = new Memory(1e6);
  let begun = false;
  const session = sessionWith(async function* chat(body, signal) {
    yield said("One");
    begun = true;
    await new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason)));
  }, memory);
  session.send("Count.");
  while (!begun) await new Promise(setImmediate);
  session.leave();
  while (session.isRunning) await new Promise(setImmediate);
  const [read] = new Store(memory, assert.fail).list();
  const answer = read.turns[read.leaf];
  assert.deepEqual([answer.content, answer.stopped, answer.problem], ["One", true, undefined]);
});

test("a growing answer is kept once a second, and a deleted one never again", () => {
  const { conversation } = talk();
  const saved = [];
  const store = { conversations: new Map([[conversation.id, conversation]]), save: (one) => saved.push(one) };
  let now = 0;
  const keeper = new Keeper(store, () => now);
  for (; now < 3; now += 0.125) keeper.grew(conversation);
  assert.equal(saved.length, 3);
  store.conversations.clear();
  now = 9;
  keeper.grew(conversation);
  keeper.keep(conversation);
  assert.equal(saved.length, 3);
});

test("a conversation longer than the context goes on without its older half", async () => {
  const sent = [];
  const session = sessionWith(async function* chat(body) {
    sent.push(body.messages.map((message) => message.content));
    if (body.messages.length > 5) throw problemOf({ error: { message: "too long", code: "context_length_exceeded", reason: "PROMPT_TOO_LONG" } }, 400);
    yield said(`answer ${sent.length}`);
  });
  session.conversation.settings.system = "Be brief.";
  const ended = async () => { while (session.isRunning) await new Promise(setImmediate); };
  for (const question of ["a", "b", "c"]) {
    session.send(question);
    await ended();
  }
  const failed = session.conversation.turns[session.conversation.leaf];
  assert.ok(isTooLong(failed.problem));
  assert.ok(session.canShorten(failed));
  session.shorten(failed);
  await ended();
  assert.deepEqual(sent.at(-1), ["Be brief.", "c"]);
  session.send("d");
  await ended();
  assert.deepEqual(sent.at(-1), ["Be brief.", "c", "answer 4", "d"]);
  const copy = readConversation(JSON.parse(JSON.stringify(session.conversation)), readSettings);
  assert.deepEqual(sentTurns(copy, copy.leaf).map((turn) => turn.content), ["c", "answer 4", "d", "answer 5"]);
  session.sendAll();
  assert.equal(sentTurns(session.conversation, session.conversation.leaf).length, 8);
});

test("the model summarises older turns on request, and the summary is sent in their place", async () => {
  const sent = [];
  const session = sessionWith(async function* chat(body) {
    sent.push(body.messages.map((message) => message.content));
    yield said(body.messages.at(-1).content.startsWith("Summarise") ? " They greeted " : `answer ${sent.length}`);
    if (body.messages.at(-1).content.startsWith("Summarise")) yield said("each other. ");
  });
  session.conversation.settings.system = "Be brief.";
  const ended = async () => { while (session.isRunning) await new Promise(setImmediate); };
  for (const question of ["a", "b", "c", "d"]) {
    session.send(question);
    await ended();
  }
  await session.summarise();
  assert.deepEqual(sent.at(-1).slice(0, -1), ["Be brief.", "a", "answer 1", "b", "answer 2"]);
  session.send("e");
  await ended();
  const short = "Be brief.\n\nThe conversation before, in short: They greeted each other.";
  assert.deepEqual(sent.at(-1), [short, "c", "answer 3", "d", "answer 4", "e"]);
  // The next summary has the first one in it.
  await session.summarise();
  assert.equal(sent.at(-1)[0], short);
  const copy = readConversation(JSON.parse(JSON.stringify(session.conversation)), readSettings);
  assert.equal(copy.summary, "They greeted each other.");
  session.sendAll();
  session.send("f");
  await ended();
  assert.deepEqual(sent.at(-1).slice(0, 2), ["Be brief.", "a"]);
});

test("a summary that is stopped or fails changes nothing", async () => {
  let fails = "";
  const session = sessionWith(async function* chat(body, signal) {
    if (!body.messages.at(-1).content.startsWith("Summarise")) return yield said("yes");
    if (fails === "at once") throw problemOf({ error: { message: "full" } }, 429);
    if (fails === "silent") return yield said(" \n");
    yield said("They");
    if (fails === "half") throw problemOf({ error: { message: "gone" } }, 500);
    await new Promise((resolve, reject) => { signal.addEventListener("abort", () => reject(new DOMException("stopped", "AbortError"))); });
  });
  const ended = async () => { while (session.isRunning) await new Promise(setImmediate); };
  assert.equal(await session.summarise(), undefined);
  for (const question of ["a", "b"]) {
    session.send(question);
    await ended();
  }
  const summary = session.summarise();
  assert.ok(session.isRunning);
  await new Promise(setImmediate);
  session.stop();
  await summary;
  for (const [way, told] of [["at once", /full/], ["half", /gone/], ["silent", /the model wrote nothing/]]) {
    fails = way;
    await assert.rejects(session.summarise(), told);
    assert.equal(session.isRunning, false);
  }
  assert.equal(session.conversation.first, undefined);
  assert.equal(session.conversation.summary, undefined);
});

test("a question that is too long by itself cannot be shortened", () => {
  const { conversation, question, answer } = talk();
  assert.equal(laterStart(conversation, question.id), null);
  const second = addTurn(conversation, answer.id, { role: "user", content: "more" });
  assert.equal(laterStart(conversation, second.id), second);
});

test("the context is as full as the last answer says, and older turns are left out on request", () => {
  const { conversation, question, answer } = talk();
  assert.equal(contextFill(conversation, 100), null);
  answer.usage = { prompt_tokens: 30, completion_tokens: 20 };
  assert.deepEqual(contextFill(conversation, 100), { used: 50, most: 100, share: 0.5 });
  assert.equal(contextFill(conversation, 0), null);
  assert.equal(leaveOut(conversation), false);
  const second = addTurn(conversation, answer.id, { role: "user", content: "more" });
  const last = addTurn(conversation, second.id, { ...emptyAnswer(), content: "Yes", usage: { prompt_tokens: 120, completion_tokens: 1 } });
  assert.equal(contextFill(conversation, 100).share, 1);
  assert.equal(leaveOut(conversation), true);
  assert.deepEqual(sentTurns(conversation, conversation.leaf), [second, last]);
  // Shown all the same.
  assert.equal(pathTo(conversation)[0], question);
});
