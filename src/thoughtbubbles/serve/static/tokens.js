// The tokens of a pane as running text: one focusable element each, of which one is in the tab order.

import { described, shade } from "./colours.js";
import { el } from "./dom.js";
import { parts, spoken } from "./words.js";

export class Tokens {
  /** `events`: choose(index, by), hover(index or null). */
  constructor(label, events) {
    this.root = el("div", { class: "tokens", role: "listbox", "aria-label": label, "aria-orientation": "horizontal" });
    this.items = [];
    this.texts = [];
    this.current = 0;
    this.events = events;
    const at = (event) => this.items.indexOf(event.target.closest?.(".token"));
    this.root.addEventListener("click", (event) => at(event) >= 0 && events.choose(at(event), "click"));
    this.root.addEventListener("mouseover", (event) => at(event) >= 0 && this.#hover(at(event)));
    this.root.addEventListener("mouseleave", () => this.#hover(null));
    this.root.addEventListener("focusin", (event) => at(event) >= 0 && this.#focused(at(event)));
    this.root.addEventListener("keydown", (event) => this.#key(event));
  }

  /** The same texts keep their elements, and with them the focus. */
  fill(texts) {
    if (texts.length === this.items.length && texts.every((text, i) => text === this.texts[i])) return;
    const held = this.root.contains(document.activeElement);
    this.texts = [...texts];
    this.items = texts.map(item);
    this.root.replaceChildren(...this.items);
    this.#rove(0);
    if (held) this.focus(0);
  }

  append(text) {
    const added = item(text);
    added.classList.add("new");
    this.texts.push(text);
    this.items.push(added);
    this.root.append(added);
  }

  /** Shades and labels every token. */
  paint(lineage, stage, mode, differences) {
    this.root.dataset.mode = mode;
    this.items.forEach((node, i) => {
      const token = lineage.tokens[i];
      const streams = token.streams[stage];
      node.dataset.shade = shade(mode, token, streams, differences?.[i]);
      node.dataset.streams = streams;
      node.setAttribute("aria-label", `${spoken(lineage.texts[i])}: ${described(mode, token, streams, differences?.[i])}`);
    });
  }

  choose(index) {
    this.items.forEach((node, i) => node.setAttribute("aria-selected", i === index ? "true" : "false"));
    if (index !== null && this.items[index]) this.#rove(index);
  }

  focus(index = this.current) {
    this.items[Math.max(0, Math.min(index, this.items.length - 1))]?.focus();
  }

  /** The middle of the upper edge of each token, from the corner of the text. */
  anchors() {
    const corner = this.root.getBoundingClientRect();
    return this.items.map((node) => {
      const rect = node.lastElementChild.getClientRects()[0] ?? node.getBoundingClientRect();
      return {
        x: rect.left + rect.width / 2 - corner.left,
        y: rect.top - corner.top,
        left: rect.left - corner.left,
        width: rect.width,
        height: rect.height,
      };
    });
  }

  #rove(index) {
    if (this.items[this.current]) this.items[this.current].tabIndex = -1;
    this.current = index;
    if (this.items[index]) this.items[index].tabIndex = 0;
  }

  #hover(index) {
    if (index === this.hovered) return;
    this.hovered = index;
    this.events.hover(index);
  }

  #focused(index) {
    this.#rove(index);
    this.events.choose(index, "focus");
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const ways = {
      ArrowRight: () => this.current + 1,
      ArrowLeft: () => this.current - 1,
      ArrowDown: () => this.#line(1),
      ArrowUp: () => this.#line(-1),
      Home: () => 0,
      End: () => this.items.length - 1,
    };
    if (event.key === "Enter" || event.key === " ") this.events.enter();
    else if (ways[event.key]) this.focus(ways[event.key]());
    else return;
    event.preventDefault();
  }

  /** The nearest token on the line above or below. */
  #line(way) {
    const anchors = this.anchors();
    const here = anchors[this.current];
    const beyond = anchors.map((a, i) => ({ ...a, i })).filter((a) => way * (a.y - here.y) > 4);
    if (!beyond.length) return this.current;
    const y = way > 0 ? Math.min(...beyond.map((a) => a.y)) : Math.max(...beyond.map((a) => a.y));
    const row = beyond.filter((a) => Math.abs(a.y - y) < 4);
    return row.reduce((best, a) => (Math.abs(a.x - here.x) < Math.abs(best.x - here.x) ? a : best)).i;
  }
}

function item(text) {
  const { indent, ink, breaks } = parts(text);
  const node = el("span", { class: "token", role: "option", tabindex: "-1", "aria-selected": "false", "aria-label": spoken(text) });
  node.append(indent, el("span", { class: "ink", dir: "auto" }, ink));
  if (breaks) node.append("\n");
  return node;
}
