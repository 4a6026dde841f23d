// An error as the page shows it: a message, the server's reason, and the field that is wrong.

/** Error of a call to the server, or of the way to it. */
export class Problem extends Error {
  constructor(message, { status = 0, reason = "", field = "", retryAfter = 0 } = {}) {
    super(message);
    Object.assign(this, { name: "Problem", status, reason, field, retryAfter });
  }

  /** Plain data, for a conversation that is kept. */
  toJSON() {
    const { message, status, reason, field, retryAfter } = this;
    return { message, status, reason, field, retryAfter };
  }
}

/** Makes a Problem of an error's body, in OpenAI's shape with ours inside. */
export function problemOf(body, status = 0, retryAfter = 0) {
  const error = body?.error;
  if (typeof error === "string") return new Problem(error, { status, retryAfter });
  if (!error || typeof error.message !== "string") return new Problem(`the server answered ${status}`, { status, retryAfter });
  // A proxy before the server may know OpenAI's fields only.
  const reason = error.reason ?? error.code ?? error.type ?? "";
  const field = error.param ?? error.field ?? "";
  return new Problem(error.message, { status, reason: String(reason), field: String(field), retryAfter });
}

/** True for a conversation that is longer than the model's context, by the server's reason or OpenAI's code. */
export function isTooLong({ reason }) {
  return reason === "PROMPT_TOO_LONG" || reason === "context_length_exceeded";
}

/** Makes a Problem of a failed fetch. */
export function unreachable() {
  return new Problem("The server cannot be reached. Is it running?", { reason: "UNREACHABLE" });
}
