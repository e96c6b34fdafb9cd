// Everything about one token: its streams at this stage, what was dropped, where a stream looks, what comes next.

import { bar, el, segments } from "./dom.js";
import { named, nats, percent, placeName, plural, score, signed, stageName, tidy } from "./words.js";

const TARGETS = 6;
const FEW_HEADS = 6;

export class Inspector {
  /** `app`: stream(pane, index) on hover and focus, pin(place), block(number), head(number or null), back(). */
  constructor(root, app) {
    this.root = root;
    this.app = app;
    this.body = root.querySelector(".body");
    root.addEventListener("keydown", (event) => this.#key(event));
  }

  empty(text) {
    this.body.replaceChildren(el("p", { class: "quiet" }, text));
  }

  /** `view`: {pane, token, place, difference, compare}. */
  show(view) {
    const held = this.root.contains(document.activeElement) ? document.activeElement.dataset.place : undefined;
    this.view = view;
    const { pane, token } = view;
    const { lineage, stage } = pane;
    this.streams = lineage.bubble(stage, token);
    this.rows = this.streams.map((index) => this.#row(lineage.stream(stage, index), index));
    this.descent = el("ol", { class: "descent" });
    this.attention = el("div", { class: "attention" });
    this.body.replaceChildren(
      this.#head(),
      this.#title(plural(this.streams.length, "stream"), stage === 0 ? "from the embedding" : `from block ${lineage.stages[stage].layer} on`),
      el("ul", { class: "rows", "aria-label": "Streams" }, ...this.rows.map((row) => el("li", {}, row))),
      ...this.#dropped(),
      this.#title("Line of descent", ""),
      this.descent,
      this.#title("Where it attends", ""),
      this.attention,
      this.#title("Next token", `entropy ${nats(lineage.tokens[token].entropy)} nats`),
      this.#guesses(),
    );
    this.point(this.streams[Math.min(view.place ?? 0, this.streams.length - 1)]);
    if (held !== undefined) this.rows[Math.min(Number(held), this.rows.length - 1)]?.focus();
  }

  #head() {
    const { pane, token, difference, compare } = this.view;
    const { id, loss, entropy, streams } = pane.lineage.tokens[token];
    const facts = el("dl", { class: "numbers" });
    const add = (name, value, hint) => facts.append(el("div", { title: hint }, el("dt", {}, name), el("dd", {}, value)));
    add("streams", streams.join(" → "), "in each stage");
    add("loss", nats(loss), "nats: how surprising this token was, given the tokens before it");
    if (difference !== null && difference !== undefined) add("B − A", signed(difference), "difference in loss");
    else add("entropy", nats(entropy), "nats: how unsure the model is about the next token");
    const where = `${compare ? `pane ${pane.letter} · ` : ""}token ${token + 1} · id ${id}`;
    const chip = el("bdi", { class: "chip" }, named(pane.lineage.texts[token]));
    return el("div", { class: "head" }, el("h3", {}, chip), el("p", { class: "quiet" }, where), facts);
  }

  #title(text, more) {
    return el("h4", {}, text, more ? el("span", { class: "quiet" }, ` ${more}`) : null);
  }

  #row(stream, index) {
    const { pane } = this.view;
    const origin = this.#origin(stream, pane.stage);
    const label = `${placeName(stream.place)}, ${origin}, position ${tidy(stream.position)}, score ${score(stream.score)}, weight ${percent(stream.weight)}`;
    const row = el("button", { type: "button", class: "row", "data-place": stream.place, "aria-label": label });
    row.append(
      el("i", { class: `dot ${stream.place === 0 ? "original" : "fork"}` }),
      el("span", { class: "name" }, placeName(stream.place), el("small", {}, origin)),
      el("span", { class: "meter" }, bar(stream.score, stream.place === 0 ? "original" : "fork"), el("small", {}, `score ${score(stream.score)}`)),
      el("span", { class: "more" }, percent(stream.weight), el("small", {}, `at ${tidy(stream.position)}`)),
    );
    row.addEventListener("mouseenter", () => this.app.stream(pane, index));
    row.addEventListener("mouseleave", () => this.app.stream(pane, null));
    row.addEventListener("focus", () => this.app.pin(stream.place));
    row.addEventListener("click", () => this.app.pin(stream.place));
    return row;
  }

  #origin(stream, stage) {
    if (stream.parent === null) return "from the embedding";
    const { place } = this.view.pane.lineage.stream(stage - 1, stream.parent);
    if (stream.is_fork) return `new, from ${placeName(place)}`;
    return place === stream.place ? "continues" : `was ${placeName(place)}`;
  }

  #dropped() {
    const { pane, token } = this.view;
    const gone = pane.lineage.dropped(pane.stage, token);
    if (!gone.length) return [];
    const name = (each) => placeName(pane.lineage.stream(pane.stage - 1, each.parent).place);
    const items = gone.map((each) =>
      el("li", {}, each.is_fork ? `fork of ${name(each)}` : name(each), el("small", {}, ` ${score(each.score)}`)),
    );
    return [this.#title("Dropped", "candidates and their scores"), el("ul", { class: "gone" }, ...items)];
  }

  /** Shows one stream of the bubble: where it comes from, and what becomes of it. */
  point(index) {
    const { pane } = this.view;
    const { lineage, stage } = pane;
    this.pointed = index;
    this.rows.forEach((row, i) => row.classList.toggle("on", this.streams[i] === index));
    const past = lineage.ancestors(stage, index).map((each, i, all) => this.#step(each, i, all.length - 1));
    const future = lineage.future(stage, index).map((each) => this.#later(each));
    this.descent.replaceChildren(...past, ...future);
  }

  #step({ stage, index }, at, last) {
    const { lineage } = this.view.pane;
    const stream = lineage.stream(stage, index);
    const what = stage === 0 ? placeName(stream.place) : stream.is_fork ? "forked off" : "continues";
    return el("li", { class: at === last ? "here" : "" }, el("b", {}, stageName(lineage.stages, stage)), ` ${what}`, el("small", {}, ` ${score(stream.score)}`));
  }

  #later({ stage, index, forks }) {
    const { lineage } = this.view.pane;
    const what = index === null ? "dropped" : "continues";
    const more = forks ? `, ${plural(forks, "fork")}` : "";
    const value = index === null ? "" : ` ${score(lineage.stream(stage, index).score)}`;
    return el("li", { class: index === null ? "later end" : "later" }, el("b", {}, stageName(lineage.stages, stage)), ` ${what}${more}`, el("small", {}, value));
  }

  /** `found`: null while it is computed, a text if it cannot be, or {blocks, block, head, heads}. */
  showAttention(found) {
    if (found === null || typeof found === "string") {
      this.attention.querySelector(".bars, p")?.remove(); // the choosers stay, and keep the focus
      this.attention.append(el("p", { class: "quiet" }, found ?? "Computing attention…"));
      return;
    }
    if (!found.blocks.length) {
      this.attention.replaceChildren(el("p", { class: "quiet" }, "No block between these fork layers."));
      return;
    }
    const held = this.attention.contains(document.activeElement) ? document.activeElement.name : null;
    const blocks = found.blocks.map(({ block }) => [String(block), String(block), `Block ${block}`]);
    const block = segments("attention-block", "Block", blocks, String(found.block), (value) => this.app.block(Number(value)));
    const weights = found.blocks.find((each) => each.block === found.block).weights;
    const field = (label, chooser) => el("div", { class: "field" }, el("span", { "aria-hidden": "true" }, label), chooser);
    this.attention.replaceChildren(field("Block", block), field("Head", this.#heads(found)), this.#targets(weights));
    if (held) this.attention.querySelector(`[name=${held}]:checked, select[name=${held}]`)?.focus();
  }

  /** Buttons; a list, if the model has more heads than fit. */
  #heads({ head, heads }) {
    const choose = (value) => this.app.head(value === "" ? null : Number(value));
    const options = [["", "mean", "Mean over all heads"], ...Array.from({ length: heads }, (_, i) => [String(i), String(i), `Head ${i}`])];
    const chosen = head === null ? "" : String(head);
    if (heads <= FEW_HEADS) return segments("attention-head", "Head", options, chosen, choose);
    const list = el("select", { name: "attention-head", "aria-label": "Head" }, ...options.map(([value, text]) => el("option", { value }, text)));
    list.value = chosen;
    list.addEventListener("change", () => choose(list.value));
    return list;
  }

  #targets(weights) {
    const { lineage, stage } = this.view.pane;
    const best = weights.map((weight, i) => [weight, i]).sort((a, b) => b[0] - a[0]).slice(0, TARGETS);
    const items = best.map(([weight, i]) => {
      const stream = lineage.stream(stage, i);
      const whose = i === this.pointed ? "itself" : placeName(stream.place);
      const name = el("span", { class: "name" }, el("bdi", { class: "mono" }, named(lineage.texts[stream.token])), el("small", {}, whose));
      return el("li", {}, el("i", { class: `dot ${stream.place === 0 ? "original" : "fork"}` }), name, bar(weight / best[0][0], "look"), el("span", { class: "more" }, percent(weight)));
    });
    return el("ul", { class: "bars" }, ...items);
  }

  #guesses() {
    const { lineage } = this.view.pane;
    const next = lineage.tokens[this.view.token + 1];
    const items = lineage.tokens[this.view.token].top.map((guess) => {
      const right = next?.id === guess.id;
      const name = el("span", { class: "name" }, el("bdi", { class: "mono" }, named(guess.text)), right ? el("small", {}, "what follows") : null);
      return el("li", { class: right ? "right" : "" }, name, bar(guess.probability, "guess"), el("span", { class: "more" }, percent(guess.probability)));
    });
    return el("ul", { class: "bars guesses" }, ...items);
  }

  focus() {
    this.rows?.[Math.min(this.view.place ?? 0, this.rows.length - 1)]?.focus();
  }

  #key(event) {
    const at = this.rows?.indexOf(document.activeElement) ?? -1;
    const way = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (at >= 0 && way) this.rows[Math.max(0, Math.min(this.rows.length - 1, at + way))].focus();
    else if (event.key === "Escape") this.app.back();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
