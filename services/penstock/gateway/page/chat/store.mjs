// Conversations in the browser's localStorage: one entry each, so that a change writes one.

import { FORMAT, newId, readConversation } from "./conversation.mjs";
import { readSettings } from "./settings.mjs";

const PREFIX = "penstock.conversation.";
const LARGEST_FILE = 32 * 1024 * 1024;

export class Store {
  /** `storage` is localStorage or one like it; `onproblem(text)` hears of entries that cannot be kept. */
  constructor(storage, onproblem) {
    Object.assign(this, { storage, onproblem, conversations: new Map() });
    for (const key of Array.from({ length: storage.length }, (_, at) => storage.key(at))) {
      if (key.startsWith(PREFIX)) this.read(key);
    }
  }

  read(key) {
    try {
      const conversation = readConversation(JSON.parse(this.storage.getItem(key)), readSettings);
      this.conversations.set(conversation.id, conversation);
    } catch (error) {
      this.onproblem(`A kept conversation cannot be read: it ${error.message}`);
    }
  }

  /** Newest first. */
  list() {
    return [...this.conversations.values()].sort((one, other) => other.updated - one.updated);
  }

  /** Keeps a conversation; one without turns is in memory only. */
  save(conversation) {
    this.conversations.set(conversation.id, conversation);
    if (!Object.keys(conversation.turns).length) return;
    try {
      this.write(conversation);
    } catch {
      this.makeRoom(conversation);
    }
  }

  write(conversation) {
    this.storage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
  }

  /** Leaves the tokens' probabilities out, which take the most room, of all conversations but `conversation`. */
  makeRoom(conversation) {
    try {
      for (const other of this.conversations.values()) {
        if (other === conversation || !this.storage.getItem(PREFIX + other.id)) continue;
        for (const turn of Object.values(other.turns)) if (turn.tokens) turn.tokens = [];
        this.write(other);
      }
      this.write(conversation);
    } catch {
      this.onproblem("The browser's storage is full: export and delete conversations to keep new ones.");
    }
  }

  remove(id) {
    this.conversations.delete(id);
    this.storage.removeItem(PREFIX + id);
  }

  /** The text of a file with these conversations. */
  exported(conversations) {
    return JSON.stringify({ penstock: "conversations", format: FORMAT, conversations }, null, 1);
  }

  /** Adds the conversations of a file's text and returns them; a known id gets a new one. Throws Error. */
  imported(text) {
    if (text.length > LARGEST_FILE) throw new Error("The file is too large.");
    let file;
    try {
      file = JSON.parse(text);
    } catch {
      throw new Error("The file is not JSON.");
    }
    if (!Array.isArray(file?.conversations)) throw new Error("The file has no list of conversations.");
    const read = file.conversations.map((one, at) => {
      try {
        return readConversation(one, readSettings);
      } catch (error) {
        throw new Error(`Conversation ${at + 1} of the file: it ${error.message}`);
      }
    });
    for (const conversation of read) {
      if (this.conversations.has(conversation.id)) conversation.id = newId();
      this.save(conversation);
    }
    return read;
  }
}
