// A summary of a conversation's older turns, which the model writes on request and which is sent in their place.

import { messagesOf } from "./conversation.mjs";
import { sentTurns } from "./window.mjs";

const MOST_TOKENS = 512;
const WISH = "Summarise our conversation so far in a few sentences. Keep names, numbers and what was decided. Write the summary alone.";

/** The body of the request for a summary of the turns before `start` that the branch sends. */
export function summaryBody(conversation, start) {
  const sent = sentTurns(conversation, conversation.leaf);
  const messages = messagesOf(conversation, sent.slice(0, sent.indexOf(start)));
  const { model } = conversation.settings;
  return {
    ...(model && { model }), messages: [...messages, { role: "user", content: WISH }],
    stream: true, max_tokens: MOST_TOKENS, chat_template_kwargs: { enable_thinking: false },
  };
}

/** Sends `text` in place of the turns before `start`. */
export function takeSummary(conversation, start, text) {
  conversation.first = start.id;
  conversation.summary = text;
}
