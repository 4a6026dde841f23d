// Values of options as they are typed: text to JSON values, and checks against the table that the server gives.

const INTEGERS = new Set(["int", "integer", "entries", "token_id"]);
const NUMBERS = new Set(["float", "number", "float32"]);
const FLAGS = new Set(["bool", "boolean", "flag"]);

/** The control that an option needs: flag, choice, integer, number, text, strings, or json for values with parts. */
export function controlOf(option) {
  const kind = String(option.kind ?? "").toLowerCase();
  if (option.choices?.length) return "choice";
  if (FLAGS.has(kind)) return "flag";
  if (INTEGERS.has(kind)) return "integer";
  if (NUMBERS.has(kind)) return "number";
  if (kind === "text" || kind === "str" || kind === "string") return "text";
  if (kind === "strings" || kind === "stop_strings") return "strings";
  return "json";
}

/** Reads the text of an option: `{ value }`, `{ error }`, or `{}` where it is not set. */
export function readOption(option, text) {
  const typed = text.trim();
  if (typed === "") return {};
  switch (controlOf(option)) {
    case "flag":
      return typed === "true" || typed === "false" ? { value: typed === "true" } : { error: "must be true or false" };
    case "choice":
      return readChoice(option, typed);
    case "integer":
      return readInteger(option, typed);
    case "number":
      return readNumber(option, typed);
    case "text":
      return { value: text };
    case "strings":
      return readStrings(text);
    default:
      return readJson(typed);
  }
}

function readChoice(option, typed) {
  const found = option.choices.find((choice) => String(choice) === typed);
  return found === undefined ? { error: `must be one of ${option.choices.join(", ")}` } : { value: found };
}

function readInteger(option, typed) {
  if (!/^[+-]?\d+$/.test(typed)) return { error: "must be a whole number" };
  const value = Number(typed);
  if (!Number.isSafeInteger(value)) return { error: "is larger than a browser can send exactly (2^53 - 1)" };
  return checked(option, value);
}

function readNumber(option, typed) {
  const value = Number(typed.replace(/^([+-]?\d*),(\d+)$/, "$1.$2"));
  return Number.isFinite(value) ? checked(option, value) : { error: "must be a number" };
}

function checked(option, value) {
  const { low = null, high = null, above = false, below = false } = option.bounds ?? {};
  const isLow = low !== null && (above ? value <= low : value < low);
  const most = typeof option.limit === "number" && Number.isInteger(value) ? option.limit : null;
  const isHigh = (high !== null && (below ? value >= high : value > high)) || (most !== null && value > most);
  return isLow || isHigh ? { error: `must be ${boundsText(option)}` } : { value };
}

function readStrings(text) {
  if (!text.trim().startsWith("[")) return { value: text.split("\n").filter((line) => line !== "") };
  const { value, error } = readJson(text);
  if (error) return { error };
  return Array.isArray(value) && value.every((one) => typeof one === "string") ? { value } : { error: "must be a list of texts" };
}

function readJson(typed) {
  try {
    return { value: JSON.parse(typed) };
  } catch {
    // A bare word, such as DoLa's "high", is what was meant.
    return /^[\w.-]+$/.test(typed) ? { value: typed } : { error: "is not JSON" };
  }
}

/** The bounds of an option in words; empty where there are none. */
export function boundsText(option) {
  const { low = null, high = null, above = false, below = false } = option.bounds ?? {};
  const parts = [];
  if (low !== null) parts.push(above ? `above ${low}` : `at least ${low}`);
  if (high !== null) parts.push(below ? `below ${high}` : `at most ${high}`);
  if (typeof option.limit === "number" && high === null) parts.push(`at most ${option.limit}`);
  return parts.join(", ");
}
