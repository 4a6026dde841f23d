// Options of a request by Hugging Face's names and in its forms, as the wire's messages.
//
//   toRequest({ num_beams: 4, early_stopping: "never", bad_words_ids: [[5], [6, 7]], regex: "\\d+" })
//
// gives { config, stop, output, constraint } to spread into a request, and the fields of the request that were named.
// An unknown name throws a TypeError.

const CONSTRAINTS = ["json_schema", "json_object", "regex", "grammar", "choice"];
const STOP = ["stop_strings", "stop_token_ids", "ignore_eos", "include_stop_string_in_output"];
const OUTPUT = [
  "return_token_ids", "top_logprobs", "prompt_logprobs", "output_scores", "output_logits", "output_hidden_states",
  "output_attentions", "scores_top_k", "tensor_steps", "skip_special_tokens", "echo", "stream_interval",
];
// Fields of the request itself: of Generate, and of Chat.
const REQUEST = ["add_special_tokens", "add_generation_prompt", "continue_final_message"];
const PLAIN = [
  "max_new_tokens", "min_new_tokens", "max_length", "min_length", "max_time", "do_sample", "num_beams",
  "num_beam_groups", "diversity_penalty", "penalty_alpha", "length_penalty", "num_return_sequences",
  "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_model", "num_assistant_tokens",
  "assistant_confidence_threshold", "guidance_scale", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p",
  "epsilon_cutoff", "eta_cutoff", "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size",
  "encoder_no_repeat_ngram_size", "renormalize_logits", "remove_invalid_values", "forced_bos_token_id",
  "suppress_tokens", "begin_suppress_tokens", "watermarking_config", "token_healing", "frequency_penalty",
  "presence_penalty", "logit_bias", "allowed_token_ids", "seed",
];

const tokenIds = (ids) => ({ ids });
// A phrase, or alternatives of which one must appear.
const word = (words) => ({ alternatives: (Array.isArray(words[0]) ? words : [words]).map(tokenIds) });
const EARLY_STOPPING = { true: "EARLY_STOPPING_TRUE", false: "EARLY_STOPPING_FALSE", never: "EARLY_STOPPING_NEVER" };

function oneOf(known, value) {
  if (!(value in known)) throw new TypeError(`must be one of ${Object.keys(known).join(", ")}`);
  return known[value];
}

// Fields with another form on the wire: name -> a function from a value to fields of GenerationConfig.
const FORMS = {
  early_stopping: (value) => ({ early_stopping: oneOf(EARLY_STOPPING, String(value)) }),
  num_assistant_tokens_schedule: (value) => ({
    num_assistant_tokens_schedule: `ASSISTANT_TOKENS_SCHEDULE_${value.toUpperCase()}`,
  }),
  dola_layers: (value) => ({
    dola_layers: typeof value === "string" ? { preset: value } : { indices: { indices: value } },
  }),
  negative_prompt: (value) =>
    typeof value === "string" ? { negative_prompt_text: value } : { negative_prompt_ids: tokenIds(value) },
  bad_words_ids: (value) => ({ bad_words_ids: value.map(tokenIds) }),
  force_words_ids: (value) => ({ force_words_ids: value.map(word) }),
  constraints: (value) => ({ constraints: value.map((words) => ({ disjunctive: word(words) })) }),
  forced_eos_token_id: (value) => ({ forced_eos_token_id: [value].flat() }),
  exponential_decay_length_penalty: ([start_index, decay_factor]) => ({
    exponential_decay_length_penalty: { start_index, decay_factor },
  }),
  // [[[ids…], bias], …]
  sequence_bias: (value) => ({ sequence_bias: value.map(([token_ids, bias]) => ({ token_ids, bias })) }),
  allowed_token_trie: (value) => ({ allowed_token_trie: { sequences: value.map(tokenIds) } }),
};

function toConstraint(name, value) {
  if (name === "choice") return { choice: { values: value } };
  if (name === "json_schema" && typeof value !== "string") return { json_schema: JSON.stringify(value) };
  return { [name]: value };
}

export function toRequest(options) {
  const request = { config: {}, stop: {}, output: {} };
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null) continue;
    if (name in FORMS) Object.assign(request.config, FORMS[name](value));
    else if (PLAIN.includes(name)) request.config[name] = value;
    else if (name === "stop_strings") request.stop.stop_strings = [value].flat();
    else if (name === "stop_token_ids") request.stop.stop_token_ids = value.map((entry) => tokenIds([entry].flat()));
    else if (STOP.includes(name)) request.stop[name] = value;
    else if (OUTPUT.includes(name)) request.output[name] = value;
    else if (REQUEST.includes(name)) request[name] = value;
    else if (!CONSTRAINTS.includes(name)) throw new TypeError(`unknown option ${name}`);
    else if (request.constraint) throw new TypeError(`${name} does not go with another kind of structured output`);
    else request.constraint = toConstraint(name, value);
  }
  return request;
}
