// The panel of settings: system prompt, answer, options, structured output, tools.

import { grouped } from "../chat/option_groups.mjs";
import { BadSetting, readTools, structure } from "../chat/request.mjs";
import { STRUCTURES, TOOL_CHOICES } from "../chat/settings.mjs";
import { button, el, fill, freshId } from "./dom.mjs";
import { icon } from "./icons.mjs";
import { optionField } from "./option_field.mjs";

const EXAMPLE_TOOL = [{
  type: "function",
  function: {
    name: "get_weather", description: "Get the weather of a city",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];

export class SettingsPanel {
  /** `onchange()` hears of every change of the settings. */
  constructor(element, onchange) {
    Object.assign(this, { element, onchange, side: "A", search: "", opened: new Set(["Common"]) });
    this.parts = Object.fromEntries(["system", "answer", "options", "structure", "tools"].map((name) => [name, el("div", { class: "part" })]));
    const titles = { system: "System prompt", answer: "Answer", options: "Options", structure: "Structured output", tools: "Tools" };
    this.amount = el("div", { class: "sides amount", role: "group", "aria-label": "Amount of settings" });
    fill(element, this.amount, Object.entries(this.parts).map(([name, part]) =>
      el("details", { class: "section", "data-part": name, open: name !== "structure" && name !== "tools" }, el("summary", {}, titles[name]), part)));
  }

  /** Shows the settings of a conversation. */
  show(settings, table) {
    Object.assign(this, { settings, table });
    if (!settings.compare) this.side = "A";
    this.showAmount();
    this.showSystem();
    this.showAnswer();
    this.showOptions();
    this.showStructure();
    this.showTools();
  }

  /** Opens a part, or an option's place in it, and puts the focus there. */
  reveal(part, side = this.side) {
    const isOption = !(part in this.parts);
    const section = this.element.querySelector(`[data-part="${isOption ? "options" : part}"]`);
    section.open = true;
    section.hidden = false;
    if (isOption) {
      this.side = side;
      this.search = "";
      this.showOptions(part);
    }
    const target = isOption ? section.querySelector(`[data-option="${CSS.escape(part)}"]`) : section;
    target?.scrollIntoView({ block: "nearest" });
    target?.querySelector("input, select, textarea")?.focus();
  }

  changed() {
    this.onchange();
  }

  /** Simple: system prompt, answer and the common options; what is set is there in any case. */
  showAmount() {
    const { settings } = this;
    const choose = (isSimple) => () => {
      settings.isSimple = isSimple;
      this.show(settings, this.table);
      this.changed();
    };
    fill(this.amount, [["Simple", true], ["All", false]].map(([name, isSimple]) =>
      el("button", { type: "button", "aria-pressed": String(settings.isSimple === isSimple), onclick: choose(isSimple) }, name)));
    const isUsed = { structure: settings.structure.kind !== "none", tools: settings.tools.trim() !== "" };
    for (const [name, isSet] of Object.entries(isUsed)) this.element.querySelector(`[data-part="${name}"]`).hidden = settings.isSimple && !isSet;
  }

  showSystem() {
    const box = el("textarea", { rows: 3, "aria-label": "System prompt", placeholder: "Instructions for the model", value: this.settings.system });
    box.addEventListener("input", () => {
      this.settings.system = box.value;
      this.changed();
    });
    fill(this.parts.system, box);
  }

  showAnswer() {
    const { settings } = this;
    const toggle = (name, label, doc, after = () => {}) => {
      const id = freshId(name);
      const box = el("input", { id, type: "checkbox", role: "switch", checked: settings[name], "aria-describedby": `${id}-doc` });
      box.addEventListener("change", () => {
        settings[name] = box.checked;
        after();
        this.changed();
      });
      return el("div", { class: "switch" }, el("label", { for: id }, label), box, el("p", { class: "doc", id: `${id}-doc` }, doc));
    };
    const id = freshId("reasoning");
    const reasoning = el("select", { id }, [["", "template default"], ["on", "on"], ["off", "off"]].map(([value, name]) => el("option", { value }, name)));
    reasoning.value = settings.reasoning;
    reasoning.addEventListener("change", () => {
      settings.reasoning = reasoning.value;
      this.changed();
    });
    fill(
      this.parts.answer,
      toggle("compare", "Compare A and B", "One prompt, two sets of options, side by side.", () => this.showOptions()),
      toggle("probabilities", "Token probabilities", "Tokens coloured by probability, with their alternatives."),
      el("div", { class: "switch" }, el("label", { for: id }, "Reasoning"), reasoning),
    );
  }

  showOptions(focus = "") {
    const { settings, table } = this;
    if (!table.length) return fill(this.parts.options, el("p", { class: "doc" }, "The server's options are not known yet."));
    const search = el("input", { type: "search", placeholder: "Search options", "aria-label": "Search options", value: this.search });
    const groups = el("div");
    search.addEventListener("input", () => {
      this.search = search.value;
      this.showGroups(groups, focus);
    });
    const sides = settings.compare && el("div", { class: "sides", role: "group", "aria-label": "Set of options" }, ["A", "B"].map((side) =>
      el("button", { type: "button", "aria-pressed": String(side === this.side), onclick: () => { this.side = side; this.showOptions(); } }, `Set ${side}`)));
    const clear = button(icon("close"), settings.compare ? `Reset set ${this.side}` : "Reset all", () => {
      settings.options[this.side] = {};
      this.showOptions();
      this.changed();
    }, { label: true, class: "quiet" });
    this.showGroups(groups, focus);
    fill(this.parts.options, sides, el("div", { class: "search" }, search, clear), groups);
  }

  showGroups(element, focus) {
    const texts = this.settings.options[this.side];
    const found = grouped(this.table, this.search).filter(([title, options]) =>
      !this.settings.isSimple || title === "Common" || this.search || options.some(({ name }) => name === focus || texts[name]?.trim()));
    const groups = found.map(([title, options]) => {
      const count = () => options.filter(({ name }) => texts[name]?.trim()).length;
      const changes = el("span", { class: "count" });
      const look = () => { changes.textContent = count() ? `${count()} changed` : ""; };
      const fields = options.map((option) => optionField(option, texts[option.name] ?? "", (text) => {
        if (text.trim()) texts[option.name] = text;
        else delete texts[option.name];
        look();
        this.changed();
      }));
      look();
      const isOpen = Boolean(this.search) || this.opened.has(title) || options.some(({ name }) => name === focus);
      const group = el("details", { class: "group", open: isOpen }, el("summary", {}, title, changes), fields);
      group.addEventListener("toggle", () => this.search || (group.open ? this.opened.add(title) : this.opened.delete(title)));
      return group;
    });
    fill(element, groups.length ? groups : el("p", { class: "doc" }, "No option has these words."));
  }

  showStructure() {
    const { structure: chosen } = this.settings;
    const id = freshId("structure");
    const kind = el("select", { id }, Object.entries(STRUCTURES).map(([value, { label }]) => el("option", { value }, label)));
    kind.value = chosen.kind;
    const { placeholder } = STRUCTURES[chosen.kind];
    const box = el("textarea", { rows: 5, spellcheck: "false", "aria-label": STRUCTURES[chosen.kind].label, placeholder, value: chosen.text, class: "mono" });
    const error = el("p", { class: "field-error", role: "alert" });
    const look = () => { error.textContent = chosen.text.trim() ? problemIn(() => structure(chosen)) : ""; };
    kind.addEventListener("change", () => {
      chosen.kind = kind.value;
      this.showStructure();
      this.changed();
    });
    box.addEventListener("input", () => {
      chosen.text = box.value;
      look();
      this.changed();
    });
    look();
    fill(this.parts.structure, el("label", { for: id }, "The answer is"), kind, placeholder && [box, error]);
  }

  showTools() {
    const { settings } = this;
    const id = freshId("tools");
    const box = el("textarea", { id, rows: 6, spellcheck: "false", class: "mono", placeholder: "JSON: a list of functions", value: settings.tools });
    const error = el("p", { class: "field-error", role: "alert" });
    const choiceId = freshId("choice");
    const choice = el("select", { id: choiceId }, TOOL_CHOICES.map((value) => el("option", { value }, value)));
    choice.value = settings.toolChoice;
    const look = () => { error.textContent = problemIn(() => readTools(settings.tools)); };
    const typed = () => {
      settings.tools = box.value;
      look();
      this.changed();
    };
    box.addEventListener("input", typed);
    choice.addEventListener("change", () => {
      settings.toolChoice = choice.value;
      this.changed();
    });
    look();
    const example = button(icon("plus"), "Put in an example", () => {
      box.value = JSON.stringify(EXAMPLE_TOOL, null, 2);
      typed();
    }, { label: true, class: "quiet" });
    fill(this.parts.tools, el("label", { for: id }, "Functions that the model may call"), box, error, example,
      el("label", { for: choiceId }, "tool_choice"), choice);
  }
}

function problemIn(read) {
  try {
    read();
    return "";
  } catch (error) {
    if (error instanceof BadSetting) return error.message;
    throw error;
  }
}
