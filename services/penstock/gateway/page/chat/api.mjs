// Calls to the server that the page came from. A token is asked for when the server wants one, and kept for the tab.

import { events } from "./event_stream.mjs";
import { Problem, problemOf, unreachable } from "./problem.mjs";

const TOKEN = "penstock.token";

export class Api {
  /** `askToken(isWrong)` resolves to a token, or null when the reader gives none. */
  constructor(askToken, base = document.baseURI) {
    Object.assign(this, { askToken, base, asking: null });
  }

  models() {
    return this.json("v1/models").then((answer) => answer.data ?? []);
  }

  options() {
    return this.json("options").then((answer) => answer.data ?? []);
  }

  /** Yields the chunks of a streamed chat completion. Throws Problem; an abort ends it with AbortError. */
  async *chat(body, signal) {
    const response = await this.fetch("v1/chat/completions", {
      method: "POST", headers: { "content-type": "application/json" }, body: encoded(body), signal,
    });
    let isWhole = false;
    try {
      for await (const data of events(response.body)) {
        if (data === "[DONE]") {
          isWhole = true;
          break;
        }
        const chunk = decoded(data);
        if (chunk.error) throw problemOf(chunk, response.status);
        yield chunk;
      }
    } catch (error) {
      if (error instanceof Problem || error.name === "AbortError") throw error;
      throw new Problem(`The answer broke off: ${error.message}`, { reason: "BROKEN_STREAM" });
    }
    if (!isWhole) throw new Problem("The answer broke off before its end.", { reason: "BROKEN_STREAM" });
  }

  async json(path) {
    return (await this.fetch(path)).json();
  }

  async fetch(path, init = {}) {
    for (let isWrong = false; ; isWrong = true) {
      const token = sessionStorage.getItem(TOKEN);
      const response = await this.send(path, init, token);
      if (response.ok) return response;
      if (response.status !== 401) throw await refused(response);
      // Several calls at once ask once; one that lost the race takes the token that another was given.
      if (sessionStorage.getItem(TOKEN) === token) await this.renew(isWrong || token !== null);
      if (sessionStorage.getItem(TOKEN) === null) throw await refused(response);
    }
  }

  async send(path, init, token) {
    const headers = { ...init.headers, ...(token && { authorization: `Bearer ${token}` }) };
    try {
      return await fetch(new URL(path, this.base), { ...init, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw unreachable();
    }
  }

  async renew(isWrong) {
    this.asking ??= this.askToken(isWrong).finally(() => { this.asking = null; });
    const token = await this.asking;
    if (token) sessionStorage.setItem(TOKEN, token);
    else sessionStorage.removeItem(TOKEN);
  }
}

/** A body as JSON. Integers that a double would round are BigInts, at the top only. */
export function encoded(body) {
  const fields = Object.entries(body).filter(([, value]) => value !== undefined);
  return `{${fields.map(([name, value]) => `${JSON.stringify(name)}:${typeof value === "bigint" ? value : JSON.stringify(value)}`).join(",")}}`;
}

/** A chunk of a stream; the seed, which has up to 63 bits, is a text with all of its digits. */
export function decoded(data) {
  const chunk = JSON.parse(data);
  // The chunk with our own part has no text of the model, which could look like a seed.
  if (chunk.penstock && !chunk.choices?.length) chunk.penstock.seed = /"seed":\s*(\d+)/.exec(data)?.[1];
  return chunk;
}

async function refused(response) {
  const body = await response.json().catch(() => null);
  return problemOf(body, response.status, Number(response.headers.get("retry-after")) || 0);
}
