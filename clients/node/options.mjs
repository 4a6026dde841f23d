// Options of a request by Hugging Face's names and in its forms, as the wire's messages.
//
//   toRequest({ num_beams: 4, early_stopping: "never", bad_words_ids: [[5], [6, 7]], regex: "\\d+" })
//
// gives { config, stop, output, constraint } to spread into a request, and the fields of the request that were named.
// An unknown name throws a TypeError.

import { CONFIG, OUTPUT, STOP } from "./option_table.mjs";

const CONSTRAINTS = ["json_schema", "json_object", "regex", "grammar", "choice"];
// Fields of the request itself: of Generate, and of Chat.
const REQUEST = ["add_special_tokens", "parse_special_tokens", "suffix", "add_generation_prompt", "continue_final_message"];

const tokenIds = (ids) => ({ ids });
// A phrase, or alternatives of which one must appear.
const word = (words) => ({ alternatives: (Array.isArray(words[0]) ? words : [words]).map(tokenIds) });
const EARLY_STOPPING = { true: "EARLY_STOPPING_TRUE", false: "EARLY_STOPPING_FALSE", never: "EARLY_STOPPING_NEVER" };

const plugins = (value) =>
  typeof value === "object" && !Array.isArray(value) ? Object.entries(value) : [value].flat(1).map((one) => [one].flat(1));
const toPlugin = (name, parameters) =>
  parameters && Object.keys(parameters).length ? { name, parameters: JSON.stringify(parameters) } : { name };

function oneOf(known, value) {
  if (!(value in known)) throw new TypeError(`must be one of ${Object.keys(known).join(", ")}`);
  return known[value];
}

// Form of the option table -> a function from an option's name and value to fields of the message.
const FORMS = {
  plain: (name, value) => ({ [name]: value }),
  numbers: (name, value) => ({ [name]: value }),
  // SynthID's has keys.
  watermark: (name, value) => ({ [name]: "keys" in value ? { synthid: value } : value }),
  // One name, a list of names and [name, parameters], or parameters by name.
  plugins: (name, value) => ({ [name]: plugins(value).map(([one, parameters]) => toPlugin(one, parameters)) }),
  logit_bias: (name, value) => ({ [name]: value }),
  ids: (name, value) => ({ [name]: [value].flat() }),
  strings: (name, value) => ({ [name]: [value].flat() }),
  stop_sequences: (name, value) => ({ [name]: [value].flat(1).map((entry) => tokenIds([entry].flat())) }),
  early_stopping: (name, value) => ({ [name]: oneOf(EARLY_STOPPING, String(value)) }),
  schedule: (name, value) => ({ [name]: `ASSISTANT_TOKENS_SCHEDULE_${value.toUpperCase()}` }),
  layers: (name, value) => ({ [name]: typeof value === "string" ? { preset: value } : { indices: { indices: value } } }),
  prompt: (name, value) =>
    typeof value === "string" ? { negative_prompt_text: value } : { negative_prompt_ids: tokenIds(value) },
  sequences: (name, value) => ({ [name]: value.map(tokenIds) }),
  words: (name, value) => ({ [name]: value.map(word) }),
  constraints: (name, value) => ({ [name]: value.map((words) => ({ disjunctive: word(words) })) }),
  decay: (name, [start_index, decay_factor]) => ({ [name]: { start_index, decay_factor } }),
  // [[[ids…], bias], …]
  sequence_bias: (name, value) => ({ [name]: value.map(([token_ids, bias]) => ({ token_ids, bias })) }),
  trie: (name, value) => ({ [name]: { sequences: value.map(tokenIds) } }),
};
const SECTIONS = { config: CONFIG, stop: STOP, output: OUTPUT };

function toConstraint(name, value) {
  if (name === "choice") return { choice: { values: value } };
  if (name === "json_schema" && typeof value !== "string") return { json_schema: JSON.stringify(value) };
  return { [name]: value };
}

export function toRequest(options) {
  const request = { config: {}, stop: {}, output: {} };
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null) continue;
    const section = Object.keys(SECTIONS).find((one) => Object.hasOwn(SECTIONS[one], name));
    if (section) Object.assign(request[section], FORMS[SECTIONS[section][name]](name, value));
    else if (REQUEST.includes(name)) request[name] = value;
    else if (!CONSTRAINTS.includes(name)) throw new TypeError(`unknown option ${name}`);
    else if (request.constraint) throw new TypeError(`${name} does not go with another kind of structured output`);
    else request.constraint = toConstraint(name, value);
  }
  return request;
}
