// The page: its parts, put together.

import { Api } from "./chat/api.mjs";
import { BadSetting } from "./chat/request.mjs";
import { Session } from "./chat/session.mjs";
import { Store } from "./chat/store.mjs";
import { titleOf } from "./chat/conversation.mjs";
import { contextFill } from "./chat/context_fill.mjs";
import { duration } from "./chat/figures.mjs";
import { laterStart } from "./chat/window.mjs";
import { Composer } from "./view/composer.mjs";
import { askToken } from "./view/dialogs.mjs";
import { button, el, fill } from "./view/dom.mjs";
import { icon } from "./view/icons.mjs";
import { SettingsPanel } from "./view/settings_panel.mjs";
import { Sidebar } from "./view/sidebar.mjs";
import { applyTheme, shownTheme, toggleTheme } from "./view/theme.mjs";
import { TurnsView } from "./view/turns_view.mjs";
import { welcomeView } from "./view/welcome_view.mjs";

const SAVED_AFTER_MILLISECONDS = 400;
const $ = (id) => document.getElementById(id);

let saving = 0;
let tokensShown = false;
let models = [];

applyTheme();

const status = $("status");
const say = (text) => { status.textContent = text; };
const api = new Api(askToken);
const store = new Store(localStorage, (text) => composer.say(text));

const acts = {
  send: (text) => attempt(() => session.send(text)),
  stop: () => session.stop(),
  retry: (turn) => attempt(() => session.retry(turn)),
  canShorten: (turn) => session.canShorten(turn),
  shorten: (turn) => attempt(() => session.shorten(turn)),
  sendAll: () => session.sendAll(),
  shortenNext: () => session.shortenNext(),
  summarise: () => session.summarise().catch((error) => composer.say(`Not summarised: ${error.message}`)),
  edit: (turn, text) => attempt(() => session.edit(turn, text)),
  results: (turn, texts) => attempt(() => session.giveResults(turn, texts)),
  choose: (turn) => session.choose(turn),
  keep: (turn) => session.keep(turn),
  editLast: () => turns.views.get(session.lastQuestion()?.id)?.edit(),
  showsTokens: () => session.conversation.settings.probabilities,
  showOption: (name) => showPart(name),
  showPart: (part) => showPart(part),
  knows: (name) => session.table.some((option) => option.name === name),
};

const composer = new Composer(acts);
$("ask-place").append(composer.element);
const turns = new TurnsView($("turns"), $("latest"), acts, welcome);
const session = new Session(api, store, { opened: showAll, turned: showTurns, grew: (turn) => turns.grow(turn), running: showRunning });
const settingsPanel = new SettingsPanel($("settings-body"), settingsChanged);
const sidebar = new Sidebar($("side-body"), {
  begin: () => { session.begin(); closeDrawers(); composer.box.focus(); },
  open: (conversation) => { session.open(conversation); closeDrawers(); },
  remove: (id) => session.remove(id),
  rename: (conversation, title) => { conversation.title = title; store.save(conversation); showList(); },
  exported: download,
  imported: (text) => {
    try {
      session.open(store.imported(text)[0] ?? session.conversation);
    } catch (error) {
      composer.say(error.message);
    }
  },
});

/** Does what may find a setting that is wrong; returns false then, and shows it. */
function attempt(act) {
  composer.say("");
  try {
    turns.follows = true;
    act();
    return true;
  } catch (error) {
    if (!(error instanceof BadSetting)) throw error;
    composer.say(`Not sent: ${error.message}`);
    showPart(error.part, error.side);
    return false;
  }
}

function welcome() {
  return welcomeView(currentModel(), (text) => acts.send(text));
}

function currentModel() {
  return models.find(({ id }) => id === $("model").value) ?? models[0];
}

function showAll() {
  settingsPanel.show(session.conversation.settings, session.table);
  composer.show(session.conversation.settings);
  tokensShown = session.conversation.settings.probabilities;
  $("model").value = session.conversation.settings.model || $("model").options[0]?.value || "";
  showTurns();
}

/** Shows the turns anew, and leaves the settings to the reader, who may be typing there. */
function showTurns() {
  turns.show(session.conversation);
  showContext();
  composer.running(session.isRunning);
  document.title = `${titleOf(session.conversation)} – Penstock`;
  showList();
}

/** Shows how full the chosen model's context is. */
function showContext() {
  const { conversation } = session;
  const canShorten = !session.isRunning && laterStart(conversation, conversation.leaf) !== null;
  composer.context(contextFill(conversation, currentModel()?.max_model_len), canShorten);
}

function showList() {
  sidebar.show(store.list(), session.conversation);
}

function showRunning(ended) {
  composer.running(session.isRunning);
  if (!ended) return say("Answering");
  const [first] = ended;
  if (first.problem) say(`The answer failed: ${first.problem.message}`);
  else say(first.stopped ? "Stopped" : `Answered in ${duration(first.elapsed)}`);
}

function settingsChanged() {
  const { conversation } = session;
  composer.say("");
  composer.show(conversation.settings);
  clearTimeout(saving);
  saving = setTimeout(() => store.conversations.has(conversation.id) && store.save(conversation), SAVED_AFTER_MILLISECONDS);
  if (tokensShown !== conversation.settings.probabilities) turns.show(conversation);
  tokensShown = conversation.settings.probabilities;
}

function showPart(part, side) {
  toggleDrawer("settings", true);
  settingsPanel.reveal(part, side);
}

function download(conversations) {
  const address = URL.createObjectURL(new Blob([store.exported(conversations)], { type: "application/json" }));
  el("a", { href: address, download: conversations.length === 1 ? `${titleOf(conversations[0])}.json` : "conversations.json" }).click();
  setTimeout(() => URL.revokeObjectURL(address));
}

// Beside the turns on a wide screen, over them on a narrow one.
const NARROW = matchMedia("(max-width: 900px)");

function toggleDrawer(name, isOpen = document.body.dataset[name] !== "open") {
  document.body.dataset[name] = isOpen ? "open" : "closed";
  $(`${name}-toggle`).setAttribute("aria-expanded", String(isOpen));
}

function closeDrawers() {
  if (!NARROW.matches) return;
  toggleDrawer("side", false);
  toggleDrawer("settings", false);
}

function showModels(served) {
  models = served;
  const named = models.map(({ id, parent }) => el("option", { value: id }, parent ? `${id} (adapter of ${parent})` : id));
  fill($("model"), named);
  // A model that is served no more is not asked for again.
  const { settings } = session.conversation;
  if (!models.some(({ id }) => id === settings.model)) settings.model = "";
}

async function load() {
  fill($("load-problem"));
  try {
    const [models, table] = await Promise.all([api.models(), api.options()]);
    session.table = table;
    showModels(models);
    showAll();
  } catch (error) {
    const text = [error.message, error.reason && ` (${error.reason})`];
    fill($("load-problem"), el("div", { class: "problem", role: "alert" }, el("p", {}, text), button(icon("retry"), "Try again", load, { label: true, class: "small-button" })));
  }
}

for (const [id, name, label, act] of [
  ["side-toggle", "menu", "Conversations", () => toggleDrawer("side")],
  ["theme-toggle", "theme", "Theme", () => { toggleTheme(); nameTheme(); }],
  ["settings-toggle", "settings", "Settings", () => toggleDrawer("settings")],
  ["side-close", "close", "Close the conversations", () => toggleDrawer("side", false)],
  ["settings-close", "close", "Close the settings", () => toggleDrawer("settings", false)],
  ["latest", "down", "To the newest text", null],
]) {
  const made = $(id);
  made.append(icon(name));
  made.setAttribute("aria-label", label);
  made.title = label;
  if (act) made.addEventListener("click", act);
}

function nameTheme() {
  const name = `Theme: ${shownTheme()}`;
  $("theme-toggle").setAttribute("aria-label", name);
  $("theme-toggle").title = name;
}

nameTheme();
$("model").addEventListener("change", (event) => {
  session.conversation.settings.model = event.target.value;
  showContext();
  // The card of the start; turns stay as they are, somebody may be editing one.
  if (session.conversation.leaf === null) turns.show(session.conversation);
  settingsChanged();
});
addEventListener("visibilitychange", () => session.keepRunning());
addEventListener("pagehide", () => session.leave());
$("shade").addEventListener("click", closeDrawers);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  const isOver = NARROW.matches && (document.body.dataset.side === "open" || document.body.dataset.settings === "open");
  if (isOver) closeDrawers();
  else if (session.isRunning) session.stop();
});

toggleDrawer("side", !NARROW.matches);
toggleDrawer("settings", false);
showAll();
composer.box.focus({ preventScroll: true });
void load();
