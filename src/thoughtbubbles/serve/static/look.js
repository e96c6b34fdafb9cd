// Where a stream attends: asked for when somebody looks at a stream, and drawn as lines between dots.

import * as api from "./api.js";

const WAIT = 220; // milliseconds on one stream before the server is asked

export class Look {
  constructor(inspector) {
    this.inspector = inspector;
    this.known = new WeakMap(); // by trace, then by stage, stream and head
  }

  /** `block` null: the stage's last; `head` null, or one that this model does not have: the mean over heads. */
  at(pane, index, { block, head }) {
    this.leave();
    const { stage, lineage } = pane;
    this.now = { pane, index, stage, lineage, head: head < lineage.model.n_head ? head : null };
    this.block = block;
    const kept = this.#kept().get(this.#key());
    if (kept) this.#show(kept);
    else this.#ask();
  }

  /** Draws again after the text has wrapped anew. */
  again(pane) {
    if (this.now?.pane === pane && this.found) this.#show(this.found);
  }

  choose(block) {
    this.block = block;
    if (this.found) this.#show(this.found);
  }

  leave() {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.now?.pane.dots.withoutLines();
    this.now?.pane.dots.mark(null);
    this.now = null;
    this.found = null;
  }

  #key = () => `${this.now.stage}:${this.now.index}:${this.now.head}`;

  #kept() {
    if (!this.known.has(this.now.lineage)) this.known.set(this.now.lineage, new Map());
    return this.known.get(this.now.lineage);
  }

  #ask() {
    const { pane, stage, index, lineage, head } = this.now;
    pane.dots.mark(lineage.lines[stage][index]);
    this.inspector.showAttention(null);
    this.abort = new AbortController();
    const { signal } = this.abort;
    this.timer = setTimeout(async () => {
      try {
        const found = await api.attention({ ...lineage.asked, stage, stream: index, head }, signal);
        if (signal.aborted) return;
        this.#kept().set(this.#key(), found);
        this.#show(found);
      } catch (error) {
        if (!signal.aborted) this.inspector.showAttention(error.message);
      }
    }, WAIT);
  }

  #show(found) {
    const { pane, stage, index, lineage } = this.now;
    this.found = found;
    const blocks = found.blocks.map((each) => each.block);
    const block = blocks.includes(this.block) ? this.block : blocks.at(-1);
    this.inspector.showAttention({ blocks: found.blocks, block, head: found.head, heads: lineage.model.n_head });
    pane.dots.mark(lineage.lines[stage][index]);
    const weights = found.blocks.find((each) => each.block === block)?.weights;
    if (weights) pane.dots.attend(lineage, stage, index, weights, pane.anchors);
  }
}
