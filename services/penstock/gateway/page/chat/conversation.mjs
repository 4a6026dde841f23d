// A conversation: a tree of turns. An edit or a retry is a further child of the same parent, so nothing is lost;
// `leaf` is the end of the branch that is shown.

/** Version of the form in which conversations are kept and exported. */
export const FORMAT = 1;
const ROLES = new Set(["user", "assistant", "tool"]);
const MOST_TURNS = 10000;

/** An id that no other conversation or pair has. randomUUID is there on localhost and behind TLS only. */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation(settings, now = Date.now()) {
  return { format: FORMAT, id: newId(), title: "", created: now, updated: now, settings, turns: {}, next: 1, leaf: null };
}

/** Adds a turn below `parent` (null: at the root) and shows its branch. */
export function addTurn(conversation, parent, fields) {
  const turn = { ...fields, id: `t${conversation.next}`, parent };
  conversation.next += 1;
  conversation.turns[turn.id] = turn;
  conversation.leaf = turn.id;
  return turn;
}

/** The turns from the root to `end`. */
export function pathTo(conversation, end = conversation.leaf) {
  const path = [];
  for (let turn = conversation.turns[end]; turn; turn = conversation.turns[turn.parent]) path.push(turn);
  return path.reverse();
}

function children(conversation, parent) {
  return Object.values(conversation.turns).filter((turn) => turn.parent === parent);
}

/** The turns that stand where `turn` does; of a compared pair one, `turn` itself where it is in it. */
export function branches(conversation, turn) {
  const same = children(conversation, turn.parent);
  return same.filter((other) => other === turn || !other.pair || (other.pair !== turn.pair && other.side === "A"));
}

/** The compared answers of which `turn` is one, side A first; null for a turn that is not compared. */
export function pairOf(conversation, turn) {
  if (!turn.pair) return null;
  const both = children(conversation, turn.parent).filter((other) => other.pair === turn.pair);
  return both.length === 2 ? both : null;
}

/** Shows the branch of `turn`: its newest descendants. */
export function choose(conversation, turn) {
  let leaf = turn;
  for (let below = children(conversation, leaf.id); below.length; below = children(conversation, leaf.id)) leaf = below.at(-1);
  conversation.leaf = leaf.id;
}

/** The messages of a request of these turns. A summary of those before them follows the system prompt. */
export function messagesOf(conversation, turns) {
  const { settings, summary, first } = conversation;
  const isShort = turns[0]?.id === first && turns[0]?.parent !== null;
  const parts = [settings.system.trim() && settings.system, isShort && summary && `The conversation before, in short: ${summary}`].filter(Boolean);
  const messages = parts.length ? [{ role: "system", content: parts.join("\n\n") }] : [];
  for (const turn of turns) {
    if (turn.role === "user") messages.push({ role: "user", content: turn.content });
    else if (turn.role === "tool") messages.push({ role: "tool", tool_call_id: turn.call, content: turn.content });
    else if (turn.content || turn.calls.length) messages.push(assistantMessage(turn));
  }
  return messages;
}

function assistantMessage(turn) {
  const message = { role: "assistant", content: turn.content };
  if (turn.reasoning) message.reasoning_content = turn.reasoning;
  if (turn.calls.length) {
    message.tool_calls = turn.calls.map((call) => ({
      id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
    }));
  }
  return message;
}

/** The conversation's name: its own, or the first line that was asked. */
export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = Object.values(conversation.turns).find((turn) => turn.role === "user");
  const line = first ? first.content.trim().split("\n")[0] : "";
  return line.length > 60 ? `${line.slice(0, 59)}…` : line || "New conversation";
}

/** Checks a conversation that comes from a file or the browser's store; returns a copy with known fields. Throws Error. */
export function readConversation(value, readSettings) {
  if (value?.format !== FORMAT) throw new Error(`is not a conversation of format ${FORMAT}`);
  const entries = Object.entries(value.turns ?? {});
  if (entries.length > MOST_TURNS) throw new Error(`has more than ${MOST_TURNS} turns`);
  const conversation = { ...newConversation(readSettings(value.settings)), id: text(value.id, "id"), title: text(value.title ?? "", "title") };
  conversation.created = Number(value.created) || Date.now();
  conversation.updated = Number(value.updated) || conversation.created;
  for (const [id, turn] of entries) {
    if (!/^t\d{1,9}$/.test(id)) throw new Error(`has a turn with the id ${JSON.stringify(id)}`);
    // A parent comes before its children, so there is no circle.
    const isKnown = turn.parent === null || Object.hasOwn(conversation.turns, turn.parent);
    if (!isKnown) throw new Error(`turn ${id} has no parent`);
    conversation.turns[id] = readTurn(id, turn);
    conversation.next = Math.max(conversation.next, Number(id.slice(1)) + 1);
  }
  if (Object.hasOwn(conversation.turns, value.first)) conversation.first = value.first;
  if (conversation.first && value.summary !== undefined) conversation.summary = text(value.summary, "summary");
  conversation.leaf = Object.hasOwn(conversation.turns, value.leaf) ? value.leaf : Object.keys(conversation.turns).at(-1) ?? null;
  return conversation;
}

function readTurn(id, turn) {
  if (!ROLES.has(turn.role)) throw new Error(`turn ${id} has the role ${JSON.stringify(turn.role)}`);
  const read = { ...turn, id, content: text(turn.content, `${id}.content`) };
  if (turn.role === "assistant") {
    read.reasoning = text(turn.reasoning ?? "", `${id}.reasoning`);
    read.tokens = Array.isArray(turn.tokens) ? turn.tokens.filter((one) => typeof one?.token === "string") : [];
    read.calls = (Array.isArray(turn.calls) ? turn.calls : []).map((call) => ({
      id: text(call.id, `${id}.calls`), name: text(call.name, `${id}.calls`), arguments: text(call.arguments, `${id}.calls`),
    }));
    // What came of an answer that was on its way when the page went.
    if (turn.running) read.stopped = true;
    read.running = false;
  }
  return read;
}

function text(value, field) {
  if (typeof value !== "string") throw new Error(`${field} is not text`);
  return value;
}
