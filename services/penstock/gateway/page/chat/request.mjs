// A conversation and its settings as the body of a chat completion. Only changed options are sent.

import { messagesOf } from "./conversation.mjs";
import { readOption } from "./option_values.mjs";
import { sentTurns } from "./window.mjs";

/** A setting that cannot be sent; `part` names the place in the panel: an option's name, "structure" or "tools". */
export class BadSetting extends Error {
  constructor(part, message, side = "A") {
    super(message);
    Object.assign(this, { part, side });
  }
}

/** Makes the body of the request whose last turn is `end`, with the options of `side`. Throws BadSetting. */
export function requestBody(conversation, end, side, table) {
  const { settings } = conversation;
  const tools = readTools(settings.tools);
  return {
    ...(settings.model && { model: settings.model }),
    messages: messagesOf(conversation, sentTurns(conversation, end)),
    stream: true,
    stream_options: { include_usage: true },
    // An answer that is stopped has no usage: its tokens are counted as they come.
    return_token_ids: true,
    ...changedOptions(settings.options[side], table, side),
    ...structure(settings.structure),
    ...(tools.length && { tools, tool_choice: settings.toolChoice }),
    ...(settings.probabilities && { logprobs: true, top_logprobs: settings.alternatives }),
    ...(settings.reasoning && { chat_template_kwargs: { enable_thinking: settings.reasoning === "on" } }),
  };
}

/** The values of the options that are set. Throws BadSetting for the first that is wrong. */
export function changedOptions(texts, table, side = "A") {
  const values = {};
  for (const option of table) {
    const { value, error } = readOption(option, texts[option.name] ?? "");
    if (error) throw new BadSetting(option.name, `${option.name} ${error}`, side);
    if (value !== undefined) values[option.name] = value;
  }
  return values;
}

/** The request's part for structured output. Throws BadSetting. */
export function structure({ kind, text }) {
  if (kind === "none") return {};
  if (kind === "json_object") return { response_format: { type: "json_object" } };
  if (!text.trim()) throw new BadSetting("structure", "the structured output has no text yet");
  if (kind !== "json_schema") return { [kind]: kind === "choice" ? text.split("\n").filter((line) => line !== "") : text };
  const schema = parsed(text, "structure", "the JSON schema");
  const isSchema = typeof schema === "object" && schema !== null && !Array.isArray(schema);
  if (!isSchema) throw new BadSetting("structure", "the JSON schema is not an object");
  return { response_format: { type: "json_schema", json_schema: { name: "answer", schema, strict: true } } };
}

/** The tools of the text: a list of functions, or one; each as OpenAI has it or bare. Throws BadSetting. */
export function readTools(text) {
  if (!text.trim()) return [];
  const value = parsed(text, "tools", "the tools");
  return (Array.isArray(value) ? value : [value]).map((tool, index) => {
    const bare = tool?.function ?? tool;
    if (typeof bare?.name !== "string") throw new BadSetting("tools", `tool ${index + 1} has no name`);
    return { type: "function", function: bare };
  });
}

function parsed(text, part, subject) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new BadSetting(part, `${subject}: not JSON: ${error.message}`);
  }
}
