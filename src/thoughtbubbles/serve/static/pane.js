// One pane: a model's settings, what they give in numbers, and the text with its bubbles.

import * as api from "./api.js";
import { Controls } from "./controls.js";
import { el } from "./dom.js";
import { Dots, track } from "./dots.js";
import { flow } from "./flow.js";
import { Lineage } from "./lineage.js";
import { Tokens } from "./tokens.js";
import { count, nats, plural, tidy } from "./words.js";

const LINE = 42; // pixels of a line without forks

export class Pane {
  /** `app`: changed(pane, settings), traced(pane), choose(pane, token, by), hover(pane, token), stream(pane, index), enter(). */
  constructor(letter, models, app) {
    this.letter = letter;
    this.models = models;
    this.app = app;
    this.lineage = null;
    this.stage = null;
    this.counts = null; // of a text that is being generated
    this.controls = new Controls(letter, models, (settings) => app.changed(this, settings));
    this.tokens = new Tokens(`Tokens of pane ${letter}`, {
      choose: (index, by) => this.lineage && app.choose(this, index, by),
      hover: (index) => this.lineage && app.hover(this, index),
      enter: () => app.enter(),
    });
    this.dots = new Dots();
    this.facts = el("p", { class: "facts" });
    this.note = el("p", { class: "note", hidden: true });
    this.error = el("div", { class: "error", role: "alert", hidden: true });
    this.flow = el("div", {});
    this.canvas = el("div", { class: "canvas" }, this.tokens.root, this.dots.root);
    this.root = el("section", { class: "pane", "aria-label": `Pane ${letter}`, "data-pane": letter });
    this.root.append(this.controls.root, this.facts, this.error, this.canvas, this.note, this.flow);
    this.dots.root.addEventListener("mouseover", (event) => this.#overDot(event));
    this.dots.root.addEventListener("mouseleave", () => app.stream(this, null));
    this.dots.root.addEventListener("click", (event) => this.#clickDot(event));
    new ResizeObserver(() => this.place()).observe(this.tokens.root);
  }

  /** Asks for the trace of a text; a newer request takes the place of an older one. */
  async load(text, settings) {
    this.abort?.abort();
    if (text === "") {
      this.#empty();
      return;
    }
    this.abort = new AbortController();
    const own = this.abort;
    this.root.setAttribute("aria-busy", "true");
    const asked = { text, ...settings };
    try {
      const began = performance.now();
      const trace = await api.trace(asked, own.signal);
      if (own.signal.aborted) return;
      this.times = { server: performance.now() - began };
      this.#show(trace, asked);
    } catch (error) {
      if (!own.signal.aborted) this.fail(error, () => this.load(text, settings));
    } finally {
      if (this.abort === own) this.root.removeAttribute("aria-busy");
    }
  }

  #show(trace, asked) {
    const began = performance.now();
    this.error.hidden = true;
    this.counts = null;
    this.lineage = new Lineage(trace, asked, this.models.find(({ name }) => name === asked.model));
    this.dots.clear();
    this.stage = null;
    this.tokens.fill(this.lineage.texts);
    this.note.hidden = !trace.truncated;
    this.note.textContent = `The model reads ${count(trace.settings.block_size)} tokens: ${plural(trace.truncated, "token")} at the end of your text ${trace.truncated === 1 ? "is" : "are"} left out.`;
    this.app.traced(this);
    this.times.drawing = performance.now() - began;
  }

  #empty() {
    this.lineage = null;
    this.counts = null;
    this.error.hidden = true;
    this.note.hidden = true;
    this.root.removeAttribute("aria-busy");
    this.dots.clear();
    this.tokens.fill([]);
    this.flow.replaceChildren();
    this.facts.textContent = "Type or paste a text above, or choose an example.";
    this.app.traced(this);
  }

  /** Says what went wrong, keeps what is shown, and offers to try again. */
  fail(error, again) {
    const retry = el("button", { type: "button", onclick: again }, "Try again");
    this.error.replaceChildren(el("span", {}, error.message), retry);
    this.error.hidden = false;
    this.app.failed(error);
  }

  /** Draws a stage in a mode; stages that this model does not have are its last. */
  draw(stage, mode, differences, most) {
    if (!this.lineage || this.counts) return;
    const at = Math.min(stage ?? this.lineage.last, this.lineage.last);
    this.canvas.style.setProperty("--line", `${LINE + track(most)}px`);
    this.canvas.style.setProperty("--lead", `${track(most) / 2}px`);
    this.tokens.paint(this.lineage, at, mode, differences);
    this.anchors = this.tokens.anchors();
    this.size = this.#sizeNow();
    this.dots.draw(this.lineage, at, this.anchors, this.stage);
    this.stage = at;
    this.#sum(at);
  }

  #sum(stage) {
    this.flow.replaceChildren(...(this.lineage.last > 0 ? [flow(this.lineage, stage)] : []));
    const { trace, tokens } = this.lineage;
    const streams = trace.stages[stage].streams.length;
    this.facts.replaceChildren(
      fact(nats(trace.loss), "nats per token"),
      fact(count(tokens.length), tokens.length === 1 ? "token" : "tokens"),
      fact(count(streams), `${streams === 1 ? "stream" : "streams"}, ${tidy(streams / tokens.length)} per token`),
    );
  }

  /** Dots follow the text when it wraps anew. */
  place() {
    if (this.counts) this.dots.drawCounts(this.counts, this.tokens.anchors());
    if (!this.lineage || this.stage === null || this.counts || this.size === this.#sizeNow()) return;
    this.size = this.#sizeNow();
    this.anchors = this.tokens.anchors();
    this.dots.draw(this.lineage, this.stage, this.anchors);
    this.app.placed(this);
  }

  #sizeNow = () => `${this.tokens.root.clientWidth} ${this.tokens.root.clientHeight}`;

  /** A new token of a generated text; `streams` belongs to the token before it. */
  grow(text, streams) {
    this.counts ??= this.lineage ? this.lineage.tokens.map((token) => token.streams.at(-1)) : [];
    if (this.counts.length) this.counts[this.counts.length - 1] = streams;
    this.counts.push(null);
    this.tokens.append(text);
    const most = Math.max(...this.counts.map((size) => size ?? 1));
    this.canvas.style.setProperty("--line", `${LINE + track(most)}px`);
    this.tokens.items.at(-2)?.setAttribute("data-shade", Math.min(streams, 6) - 1);
    this.dots.withoutLines();
    this.dots.drawCounts(this.counts, this.tokens.anchors());
  }

  #overDot(event) {
    const index = event.target.dataset?.stream;
    if (index !== undefined && this.lineage && !this.counts) this.app.stream(this, Number(index));
  }

  #clickDot(event) {
    const index = event.target.dataset?.stream;
    if (index === undefined || !this.lineage || this.counts) return;
    const { token, place } = this.lineage.stream(this.stage, Number(index));
    this.app.choose(this, token, "click", place);
  }
}

const fact = (value, name) => el("span", { class: "fact" }, el("b", {}, value), ` ${name}`);
