// The part of a conversation that is sent: all of it, or what begins at a question further down, for a model whose context is full.

import { pathTo } from "./conversation.mjs";

/** The turns of a request whose last one is `end`. */
export function sentTurns(conversation, end) {
  const path = pathTo(conversation, end);
  const at = path.findIndex((turn) => turn.id === conversation.first);
  return at > 0 ? path.slice(at) : path;
}

/** Leaves the older half of the questions out of what is sent next; false with one alone. */
export function leaveOut(conversation) {
  const start = laterStart(conversation, conversation.leaf);
  if (start) conversation.first = start.id;
  return start !== null;
}

/** The question with which a request below `end` would begin without the older half of its questions; null with one alone. */
export function laterStart(conversation, end) {
  const questions = sentTurns(conversation, end).filter((turn) => turn.role === "user");
  return questions.length > 1 ? questions[Math.ceil(questions.length / 2)] : null;
}
