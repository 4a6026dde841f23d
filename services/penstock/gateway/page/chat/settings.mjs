// Settings of a conversation: model, system prompt, two sets of options, structured output, tools, switches.

/** Forms of structured output; the key is the extra field that carries it, and JSON goes as response_format. */
export const STRUCTURES = {
  none: { label: "Free text" },
  json_object: { label: "Any JSON object" },
  json_schema: { label: "JSON schema", placeholder: '{"type": "object", "properties": {"gpu": {"type": "boolean"}}, "required": ["gpu"]}' },
  regex: { label: "Regular expression", placeholder: "(yes|no), because .+" },
  grammar: { label: "Grammar (Lark or GBNF)", placeholder: 'root ::= "yes" | "no"' },
  choice: { label: "One of these lines", placeholder: "yes\nno" },
};

/** Values of tool_choice that the server takes. */
export const TOOL_CHOICES = ["auto", "required", "none"];

export function defaultSettings() {
  return {
    model: "", system: "", options: { A: {}, B: {} }, compare: false, probabilities: false, alternatives: 5,
    isSimple: true, reasoning: "", structure: { kind: "none", text: "" }, tools: "", toolChoice: "auto",
  };
}

/** Takes known settings of `value`, and defaults for the rest. */
export function readSettings(value) {
  const settings = defaultSettings();
  if (!value || typeof value !== "object") return settings;
  for (const [name, preset] of Object.entries(settings)) {
    if (typeof preset !== "object" && typeof value[name] === typeof preset) settings[name] = value[name];
  }
  for (const side of ["A", "B"]) {
    for (const [name, text] of Object.entries(value.options?.[side] ?? {})) {
      if (typeof text === "string") settings.options[side][name] = text;
    }
  }
  if (Object.hasOwn(STRUCTURES, value.structure?.kind)) {
    settings.structure = { kind: value.structure.kind, text: String(value.structure.text ?? "") };
  }
  if (!TOOL_CHOICES.includes(settings.toolChoice)) settings.toolChoice = "auto";
  settings.alternatives = Math.min(20, Math.max(0, Math.trunc(settings.alternatives)));
  return settings;
}
