// An answer that grows by the chunks of a streamed chat completion.

const MOST_TOKENS_KEPT = 8192;
const PART = "\uFFFD";
// Characters that a run of such tokens may make; what is further off is another part of the answer.
const LONGEST_RUN = 64;

/** Fields of a turn that is an answer without content yet. */
export function emptyAnswer() {
  return { role: "assistant", content: "", reasoning: "", calls: [], tokens: [], counted: 0, finish: null };
}

/** Puts one choice's delta into its answer. */
export function takeChoice(answer, choice) {
  const delta = choice.delta ?? {};
  answer.content += delta.content ?? "";
  answer.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
  for (const piece of delta.tool_calls ?? []) takeCall(answer.calls, piece);
  for (const token of choice.logprobs?.content ?? []) {
    if (answer.tokens.length < MOST_TOKENS_KEPT) answer.tokens.push(tokenOf(token));
  }
  answer.counted += choice.token_ids?.length ?? 0;
  if (choice.finish_reason) answer.finish = choice.finish_reason;
}

function takeCall(calls, piece) {
  const index = piece.index ?? calls.length;
  const call = (calls[index] ??= { id: "", name: "", arguments: "" });
  call.id ||= piece.id ?? "";
  call.name += piece.function?.name ?? "";
  call.arguments += piece.function?.arguments ?? "";
}

function tokenOf({ token, logprob, bytes, top_logprobs: top }) {
  const alternatives = (top ?? []).map((one) => ({ token: one.token, logprob: rounded(one.logprob) }));
  return { token, logprob: rounded(logprob), top: alternatives, ...(isPart(bytes) && { part: true }) };
}

/** True for bytes that are no whole characters. */
function isPart(bytes) {
  try {
    if (bytes) new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(bytes));
  } catch {
    return true;
  }
  return false;
}

function rounded(logprob) {
  return Math.round(logprob * 1000) / 1000;
}

/** Puts usage, timings and warnings, which come with a chunk of their own, into `record`. */
export function takeFacts(record, chunk) {
  if (chunk.usage) record.usage = chunk.usage;
  const own = chunk.penstock ?? {};
  if (own.timings) record.timings = own.timings;
  if (own.warnings?.length) record.warnings = own.warnings;
  if (own.seed !== undefined && own.seed !== null) record.seed = own.seed;
}

/**
 * The text that each token adds. A part of a character has no text of its own (U+FFFD in older conversations): the character itself, which `text` has, belongs to the
 * last of its tokens, and the others are empty.
 */
export function tokenTexts(tokens, text) {
  const texts = tokens.map(({ token }) => token);
  let place = 0;
  let parts = 0;
  tokens.forEach(({ token, part }, at) => {
    if (part || token.includes(PART)) {
      parts += 1;
      texts[at] = "";
      return;
    }
    const found = text.indexOf(token, place);
    const isNear = found >= 0 && found - place <= LONGEST_RUN;
    if (parts && isNear) texts[at - 1] = text.slice(place, found);
    if (isNear) place = found + token.length;
    parts = 0;
  });
  if (parts && text.length - place <= LONGEST_RUN) texts[texts.length - 1] = text.slice(place);
  return texts;
}
