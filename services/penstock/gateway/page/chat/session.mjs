// What a reader does with conversations: send, stop, retry, edit, answer a tool, compare.

import { addTurn, choose, newId, newConversation, pathTo } from "./conversation.mjs";
import { Keeper } from "./keeper.mjs";
import { Problem } from "./problem.mjs";
import { requestBody } from "./request.mjs";
import { run } from "./run.mjs";
import { defaultSettings, readSettings } from "./settings.mjs";
import { summaryBody, takeSummary } from "./summary.mjs";
import { laterStart, leaveOut } from "./window.mjs";

export class Session {
  /** `on`: opened() another conversation, turned() its turns changed, grew(turn), running(ended) a run began or ended. */
  constructor(api, store, on) {
    Object.assign(this, { api, store, on, table: [], runs: new Map(), keeper: new Keeper(store) });
    this.conversation = store.list()[0] ?? newConversation(defaultSettings());
  }

  get isRunning() {
    return this.runs.has(this.conversation.id);
  }

  /** Begins a conversation with the settings of this one. */
  begin() {
    this.open(newConversation(readSettings(structuredClone(this.conversation.settings))));
  }

  open(conversation) {
    this.conversation = conversation;
    this.on.opened();
  }

  remove(id) {
    this.runs.get(id)?.abort();
    this.store.remove(id);
    if (id === this.conversation.id) this.open(this.store.list()[0] ?? newConversation(defaultSettings()));
    else this.on.turned();
  }

  stop() {
    this.runs.get(this.conversation.id)?.abort();
  }

  /** Asks `text` at the end of the branch that is shown. Throws BadSetting. */
  send(text) {
    this.ask(this.conversation.leaf, [{ role: "user", content: text }]);
  }

  /** Gives the results of an answer's tool calls. */
  giveResults(turn, texts) {
    this.ask(turn.id, turn.calls.map((call, at) => ({ role: "tool", call: call.id, content: texts[at] })));
  }

  /** An edited question is asked anew; an edited answer stands beside the first. */
  edit(turn, text) {
    if (turn.role === "user") return this.ask(turn.parent, [{ role: "user", content: text }]);
    const { role, model, reasoning, calls } = turn;
    addTurn(this.conversation, turn.parent, { role, model, reasoning, calls, content: text, tokens: [], edited: true });
    this.changed();
  }

  /** Answers a question again, or the question of an answer. */
  retry(turn) {
    this.check();
    const parent = turn.role === "user" ? turn.id : turn.parent;
    void this.answer(parent);
  }

  /** Keeps all that answers on their way have so far: the page may go. */
  keepRunning() {
    for (const conversation of this.store.conversations.values()) if (this.runs.has(conversation.id)) this.keeper.keep(conversation);
  }

  /** The page goes: ends all answers as stopped ones, before the browser breaks their connections off. */
  leave() {
    this.keepRunning();
    for (const abort of this.runs.values()) abort.abort();
  }

  /** True where a request that was too long could leave out older turns. */
  canShorten(turn) {
    return laterStart(this.conversation, turn.parent) !== null;
  }

  /** Sends the question of an answer again without the older half of what was sent. */
  shorten(turn) {
    this.conversation.first = laterStart(this.conversation, turn.parent).id;
    this.retry(turn);
  }

  /** Leaves the older half of the turns out from the next question on, which are shown all the same. */
  shortenNext() {
    if (leaveOut(this.conversation)) this.changed();
  }

  /** Has the model summarise the older half of the turns, and sends the summary in their place. Throws Problem; does nothing when it is stopped. */
  async summarise() {
    const { conversation } = this;
    const start = laterStart(conversation, conversation.leaf);
    if (!start || this.isRunning) return;
    const abort = new AbortController();
    this.runs.set(conversation.id, abort);
    this.changed();
    let text = "";
    try {
      for await (const chunk of this.api.chat(summaryBody(conversation, start), abort.signal)) text += chunk.choices?.[0]?.delta?.content ?? "";
      if (abort.signal.aborted) return;
      if (!text.trim()) throw new Problem("the model wrote nothing");
      takeSummary(conversation, start, text.trim());
    } catch (error) {
      if (!abort.signal.aborted) throw error;
    } finally {
      if (this.runs.get(conversation.id) === abort) this.runs.delete(conversation.id);
      if (this.store.conversations.has(conversation.id)) this.store.save(conversation);
      if (conversation === this.conversation) this.on.turned();
    }
  }

  /** Sends all turns again from now on. */
  sendAll() {
    delete this.conversation.first;
    delete this.conversation.summary;
    this.changed();
  }

  choose(turn) {
    choose(this.conversation, turn);
    this.changed();
  }

  /** Goes on with one of two compared answers. */
  keep(turn) {
    const pair = turn.pair;
    for (const other of Object.values(this.conversation.turns)) if (other.pair === pair) delete other.pair;
    this.choose(turn);
  }

  changed() {
    this.conversation.updated = Date.now();
    this.store.save(this.conversation);
    this.on.turned();
  }

  ask(parent, turns) {
    this.check();
    let last = parent;
    for (const fields of turns) last = addTurn(this.conversation, last, fields).id;
    void this.answer(last);
  }

  /** Throws BadSetting before anything is changed. */
  check() {
    const { conversation, table } = this;
    for (const side of conversation.settings.compare ? ["A", "B"] : ["A"]) requestBody(conversation, null, side, table);
  }

  async answer(parent) {
    const { conversation, table } = this;
    if (this.isRunning) this.stop();
    const abort = new AbortController();
    this.runs.set(conversation.id, abort);
    const pair = conversation.settings.compare ? newId() : undefined;
    const one = (side) => run({
      api: this.api, conversation, parent, signal: abort.signal,
      body: requestBody(conversation, parent, side, table),
      fields: pair ? { pair, side } : {},
      onturn: (turn, isNew) => this.heard(conversation, turn, isNew),
    });
    const answers = await Promise.all(pair ? [one("A"), one("B")] : [one("A")]);
    if (pair) conversation.leaf = answers[0].id;
    conversation.updated = Date.now();
    if (this.store.conversations.has(conversation.id)) this.store.save(conversation);
    if (this.runs.get(conversation.id) === abort) this.runs.delete(conversation.id);
    if (conversation === this.conversation) this.on.turned();
    this.on.running(answers);
  }

  heard(conversation, turn, isNew) {
    if (isNew) this.store.save(conversation);
    else this.keeper.grew(conversation);
    if (conversation !== this.conversation) return;
    if (isNew) {
      this.on.turned();
      this.on.running();
    } else this.on.grew(turn);
  }

  /** The last question of the branch that is shown. */
  lastQuestion() {
    return pathTo(this.conversation).findLast((turn) => turn.role === "user");
  }
}
