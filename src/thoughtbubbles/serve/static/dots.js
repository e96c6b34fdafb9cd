// All dots of a pane in one SVG over its text: the original below, its forks above. Size and opacity follow the score.

import { stillness, svg } from "./dom.js";

export const DOT = 3.5;
const PITCH = 8.6; // from one dot to the next
const TALLEST = 48; // larger bubbles are drawn closer together
const GAP = 7; // from a token to its lowest dot
const MANY = 2500; // dots that are moved without an animation
const LEAVING = 450; // milliseconds, as in the style sheet
const STRONGEST = 14; // lines of attention

export const track = (most) => Math.min(PITCH * (most - 1), TALLEST);

/** Where a stream's dot is: `anchor` is the middle of the upper edge of its token. */
export function point(anchor, place, size) {
  const pitch = size > 1 ? Math.min(PITCH, TALLEST / (size - 1)) : 0;
  return { x: anchor.x, y: anchor.y - GAP - pitch * place };
}

export class Dots {
  constructor() {
    this.lines = svg("g", { class: "lines" });
    this.layer = svg("g", { class: "dots" });
    this.root = svg("svg", { class: "overlay", "aria-hidden": "true", focusable: "false" }, this.lines, this.layer);
    this.circles = new Map();
  }

  clear() {
    this.circles.clear();
    this.layer.replaceChildren();
    this.lines.replaceChildren();
  }

  /** Draws a stage. With `from`, the stage shown before, streams move, are born from their parents, and fade away. */
  draw(lineage, stage, anchors, from = null) {
    const streams = lineage.stages[stage].streams;
    const moving = from !== null && from !== stage && !stillness() && streams.length < MANY;
    this.layer.classList.toggle("moving", moving);
    const before = this.circles;
    this.circles = new Map();
    const born = document.createDocumentFragment();
    const targets = [];
    streams.forEach((stream, index) => {
      const at = this.place(lineage, stage, index, anchors);
      const line = lineage.lines[stage][index];
      let circle = before.get(line);
      before.delete(line);
      if (!circle) {
        circle = svg("circle", { r: DOT });
        const fromParent = moving && stage > from && stream.parent !== null;
        put(circle, fromParent ? this.place(lineage, stage - 1, stream.parent, anchors) : at, 0);
        born.append(circle);
      }
      circle.setAttribute("class", stream.place === 0 ? "original" : "fork");
      circle.dataset.stream = index;
      this.circles.set(line, circle);
      targets.push([circle, at, stream.score]);
    });
    this.#leave(before, moving);
    if (moving && stage === from + 1) this.#ghosts(lineage, stage, anchors);
    this.layer.append(born);
    if (moving) this.layer.getBoundingClientRect(); // so that new dots start from where they were born
    for (const [circle, at, score] of targets) put(circle, at, score);
  }

  place(lineage, stage, index, anchors) {
    const stream = lineage.stream(stage, index);
    return point(anchors[stream.token], stream.place, lineage.tokens[stream.token].streams[stage]);
  }

  #leave(circles, moving) {
    for (const circle of circles.values()) {
      if (!moving) {
        circle.remove();
        continue;
      }
      circle.classList.add("leaving");
      setTimeout(() => circle.remove(), LEAVING);
    }
  }

  /** Candidates that did not survive: rings that fade away. */
  #ghosts(lineage, stage, anchors) {
    const rings = document.createDocumentFragment();
    for (const candidate of lineage.stages[stage].dropped) {
      if (!candidate.is_fork) continue;
      const ring = svg("circle", { r: DOT, class: "ghost" });
      const at = this.place(lineage, stage - 1, candidate.parent, anchors);
      put(ring, { x: at.x, y: at.y - PITCH }, 1, false);
      setTimeout(() => ring.remove(), 2 * LEAVING);
      rings.append(ring);
    }
    this.layer.append(rings);
  }

  /** Dots for tokens whose streams are only counted so far; null: not known yet. */
  drawCounts(counts, anchors) {
    const made = document.createDocumentFragment();
    counts.forEach((size, token) => {
      for (let place = 0; place < (size ?? 1); place += 1) {
        const kind = size === null ? "unknown" : place === 0 ? "original" : "fork";
        const circle = svg("circle", { r: DOT, class: kind });
        put(circle, point(anchors[token], place, size ?? 1), 1, false);
        made.append(circle);
      }
    });
    this.circles.clear();
    this.layer.replaceChildren(made);
  }

  /** Marks one stream, or none. */
  mark(line) {
    for (const circle of this.layer.querySelectorAll(".marked")) circle.classList.remove("marked");
    this.circles.get(line)?.classList.add("marked");
  }

  /** Lines from a stream to those that it attends to most. */
  attend(lineage, stage, index, weights, anchors) {
    const from = this.place(lineage, stage, index, anchors);
    const strongest = weights.map((weight, i) => [weight, i]).filter(([, i]) => i !== index);
    strongest.sort((a, b) => b[0] - a[0]);
    const most = strongest[0]?.[0] || 1;
    this.lines.replaceChildren(
      ...strongest.slice(0, STRONGEST).filter(([weight]) => weight > 0.004).map(([weight, i]) => {
        const line = arc(from, this.place(lineage, stage, i, anchors));
        line.setAttribute("stroke-width", (0.8 + 1.9 * (weight / most)).toFixed(2));
        line.setAttribute("stroke-opacity", (0.2 + 0.6 * (weight / most)).toFixed(2));
        return line;
      }),
    );
  }

  withoutLines() {
    this.lines.replaceChildren();
  }
}

function put(circle, at, score, scaled = true) {
  const scale = scaled ? 0.6 + 0.4 * Math.sqrt(score) : 1;
  circle.style.transform = `translate(${at.x.toFixed(1)}px, ${at.y.toFixed(1)}px) scale(${scale.toFixed(3)})`;
  circle.style.opacity = scaled ? (0.4 + 0.6 * score).toFixed(3) : "";
}

function arc(a, b) {
  const lift = Math.min(60, 12 + Math.abs(b.x - a.x) / 6);
  const height = Math.abs(a.y - b.y) < 50 ? Math.min(a.y, b.y) - lift : (a.y + b.y) / 2;
  const middle = `${((a.x + b.x) / 2).toFixed(1)} ${height.toFixed(1)}`;
  return svg("path", { d: `M${a.x.toFixed(1)} ${a.y.toFixed(1)}Q${middle} ${b.x.toFixed(1)} ${b.y.toFixed(1)}` });
}
