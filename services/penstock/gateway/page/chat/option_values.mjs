// Values of options as they are typed: text to JSON values, and checks against the table that the server gives.

// The server's kinds -> controls; a kind that is not here has parts.
const CONTROLS = { bool: "flag", int: "integer", float: "number", str: "text", strings: "strings" };

/** The control that an option needs: flag, choice, integer, number, text, strings, or json for values with parts. */
export function controlOf(option) {
  if (option.choices?.length) return "choice";
  // A prompt is a text, or ids.
  return CONTROLS[option.kind] ?? CONTROLS[option.type] ?? "json";
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
  // A seed may have more digits than a double.
  return checked(option, Number.isSafeInteger(value) ? value : BigInt(typed));
}

function readNumber(option, typed) {
  const value = Number(typed.replace(/^([+-]?\d*),(\d+)$/, "$1.$2"));
  return Number.isFinite(value) ? checked(option, value) : { error: "must be a number" };
}

function checked(option, value) {
  const { minimum = null, maximum = null, most = null } = option;
  const isLow = minimum !== null && (option.minimum_excluded ? value <= minimum : value < minimum);
  const isHigh = maximum !== null && (option.maximum_excluded ? value >= maximum : value > maximum);
  return isLow || isHigh || (most !== null && value > most) ? { error: `must be ${boundsText(option)}` } : { value };
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

/** The bounds of an option in words; empty where there are none. `most` is the server's own bound, of numbers or of entries. */
export function boundsText(option) {
  const { minimum = null, maximum = null, most = null } = option;
  const isNumber = ["integer", "number"].includes(controlOf(option));
  const parts = [];
  if (minimum !== null) parts.push(`${option.minimum_excluded ? "above" : "at least"} ${minimum}`);
  if (maximum !== null && maximum <= Number.MAX_SAFE_INTEGER) parts.push(`${option.maximum_excluded ? "below" : "at most"} ${maximum}`);
  if (most !== null) parts.push(`at most ${most}${isNumber ? "" : most === 1 ? " entry" : " entries"}`);
  return parts.join(", ");
}
