// Keeps conversations while their answers grow: a reload, a crash or a closed tab loses a moment of them.

const SECONDS = 1;

export class Keeper {
  /** `now` is a clock in seconds. */
  constructor(store, now = () => performance.now() / 1000) {
    Object.assign(this, { store, now, kept: new Map() });
  }

  /** Keeps a conversation whose answer grew, once a second. */
  grew(conversation) {
    const time = this.now();
    if (time - (this.kept.get(conversation.id) ?? -Infinity) < SECONDS) return;
    this.kept.set(conversation.id, time);
    this.keep(conversation);
  }

  /** Keeps it now, unless it was deleted. */
  keep(conversation) {
    if (this.store.conversations.has(conversation.id)) this.store.save(conversation);
  }
}
