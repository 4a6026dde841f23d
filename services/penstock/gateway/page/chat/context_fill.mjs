// How full a model's context is with what a conversation sends, as the last answer's usage tells.

import { pathTo } from "./conversation.mjs";
import { sentTurns } from "./window.mjs";

/** Returns `{ used, most, share }` of the branch that is shown; null where the tokens or the model's bound are not known. */
export function contextFill(conversation, most) {
  const answer = pathTo(conversation).findLast((turn) => turn.role === "assistant" && turn.usage);
  if (!answer || !(most > 0)) return null;
  // Turns that are not sent any more were counted by an answer before.
  if (!sentTurns(conversation, conversation.leaf).includes(answer)) return null;
  const used = answer.usage.prompt_tokens + answer.usage.completion_tokens;
  return { used, most, share: Math.min(1, used / most) };
}
