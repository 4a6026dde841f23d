// Options in the order in which people look for them. A name that is nowhere here is in the last group.

export const GROUPS = [
  ["Common", ["max_new_tokens", "do_sample", "temperature", "top_p", "top_k", "min_p", "seed", "stop_strings"]],
  ["Length", ["min_new_tokens", "max_length", "min_length", "max_time", "exponential_decay_length_penalty"]],
  ["Sampling", ["top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_n_sigma", "renormalize_logits"]],
  ["Repetition", [
    "repetition_penalty", "frequency_penalty", "presence_penalty", "no_repeat_ngram_size", "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
  ]],
  ["Beams and searches", [
    "num_beams", "num_return_sequences", "length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty",
    "penalty_alpha", "dola_layers", "force_words_ids", "constraints",
  ]],
  ["Drafts", [
    "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_model", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "ngram_memory_num_tokens", "ngram_memory_match",
    "lookahead_window", "lookahead_ngram_size", "lookahead_guesses",
  ]],
  ["Guidance", ["guidance_scale", "negative_prompt", "negative_prompt_ids"]],
  ["Stopping", ["stop_token_ids", "ignore_eos", "include_stop_string_in_output", "eos_token_id", "stopping_criteria"]],
  ["Tokens and biases", [
    "logit_bias", "sequence_bias", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "allowed_token_ids",
    "allowed_token_trie", "forced_bos_token_id", "forced_eos_token_id", "bos_token_id", "pad_token_id", "token_healing",
  ]],
  ["More", []],
];

// The page has a switch of its own for the first; a chat's answer has no place for the others.
const ELSEWHERE = new Set([
  "top_logprobs", "prompt_logprobs", "return_token_ids", "echo", "output_scores", "output_logits", "output_hidden_states", "output_attentions",
  "scores_top_k", "tensor_steps",
]);

/** Returns `[title, options]` of the groups that have some which `search` matches. */
export function grouped(table, search = "") {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = ({ name, doc }) => words.every((word) => `${name} ${name.replaceAll("_", " ")} ${doc}`.toLowerCase().includes(word));
  const left = new Map(table.filter((option) => !ELSEWHERE.has(option.name)).map((option) => [option.name, option]));
  const groups = GROUPS.map(([title, names]) => [title, names.map((name) => left.get(name)).filter(Boolean)]);
  for (const [, options] of groups) for (const { name } of options) left.delete(name);
  groups.at(-1)[1].push(...left.values());
  return groups.map(([title, options]) => [title, options.filter(matches)]).filter(([, options]) => options.length);
}
