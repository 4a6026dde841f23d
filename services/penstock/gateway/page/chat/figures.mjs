// Figures as people read them, and the stages of an answer.

/** Stages that follow one another, as the server times them; the rest of the total is "other". */
export const STAGES = [
  ["template", "Template", "rendering the chat template"],
  ["tokenize", "Tokenize", "text to token ids"],
  ["route", "Route", "waiting for admission, choosing a backend"],
  ["queue", "Queue", "waiting in the engine before the first step"],
  ["prefill", "Prefill", "computing the prompt, to the first token"],
  ["decode", "Decode", "first to last token"],
  ["other", "Other", "the way between the services, turning ids into text"],
];

/** Returns `[{ name, label, doc, seconds }]` of the stages that took time. */
export function stagesOf(timings) {
  const seconds = (name) => Number(timings[`${name}_seconds`] ?? timings[name] ?? 0) || 0;
  const total = seconds("total");
  const known = STAGES.reduce((sum, [name]) => sum + (name === "other" ? 0 : seconds(name)), 0);
  return STAGES.map(([name, label, doc]) => ({
    name, label, doc, seconds: name === "other" ? Math.max(0, total - known) : seconds(name),
  })).filter((stage) => stage.seconds > 0);
}

/** Tokens of an answer: as the server counted them, or as they came where it was stopped. */
export function tokensOf({ usage, counted }) {
  return usage?.completion_tokens ?? counted ?? 0;
}

/** Tokens a second between the first and the last token; null for fewer than two. */
export function tokensPerSecond(turn) {
  const { timings, firstToken, elapsed } = turn;
  const tokens = tokensOf(turn);
  const decode = timings?.decode_seconds ?? (elapsed ?? 0) - (firstToken ?? 0);
  return tokens > 1 && decode > 0 ? (tokens - 1) / decode : null;
}

export function duration(seconds) {
  if (seconds >= 60) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (seconds >= 1) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  const milliseconds = seconds * 1000;
  return `${milliseconds.toFixed(milliseconds < 10 ? 1 : 0)} ms`;
}

export function speed(perSecond) {
  return `${perSecond.toFixed(perSecond < 10 ? 1 : 0)} tok/s`;
}

export function percent(logprob) {
  const share = Math.exp(logprob) * 100;
  if (share >= 99.95) return "100%";
  if (share >= 0.1) return `${share.toFixed(1)}%`;
  return share >= 0.001 ? `${Number(share.toPrecision(1))}%` : "<0.001%";
}
