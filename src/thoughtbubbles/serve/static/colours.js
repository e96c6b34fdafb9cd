// Which shade a token gets, by mode, and the legend that says so. The shades themselves are in the style sheet.

import { el } from "./dom.js";
import { nats, plural, signed } from "./words.js";

const STEPS = { loss: [1, 2.5, 4, 6, 8], entropy: [1, 2, 3, 4.5, 6], difference: [0.02, 0.1, 0.4] };

const above = (steps, value) => steps.filter((step) => value >= step).length;

/** Differences in loss of two traces, B − A, by token; null where their tokens are not the same. */
export function differences(a, b) {
  if (!a || !b || a.tokens.length !== b.tokens.length) return null;
  if (a.tokens.some((token, i) => token.id !== b.tokens[i].id)) return null;
  return a.tokens.map((token, i) => (token.loss === null ? null : b.tokens[i].loss - token.loss));
}

/** From 0 (none) to 5; of a difference from −3 (B is better) to 3. */
export function shade(mode, token, streams, difference) {
  if (mode === "streams") return Math.min(streams, 6) - 1;
  if (mode === "loss") return token.loss === null ? 0 : above(STEPS.loss, token.loss);
  if (mode === "entropy") return above(STEPS.entropy, token.entropy);
  if (difference === null || difference === undefined) return 0;
  return Math.sign(difference) * above(STEPS.difference, Math.abs(difference));
}

export function described(mode, token, streams, difference) {
  const first = plural(streams, "stream");
  if (mode === "loss") return `${first}, loss ${nats(token.loss)}`;
  if (mode === "entropy") return `${first}, entropy ${nats(token.entropy)}`;
  if (mode === "difference" && difference !== null && difference !== undefined) return `${first}, B minus A ${signed(difference)}`;
  return first;
}

const LABELS = {
  streams: ["1", "2", "3", "4", "5", "6+"],
  loss: ["<1", "1", "2.5", "4", "6", "8+"],
  entropy: ["<1", "1", "2", "3", "4.5", "6+"],
};

export function legend(mode) {
  const box = el("div", { class: "legend", "data-mode": mode });
  box.append(el("span", { class: "key" }, dot("original"), "original"), el("span", { class: "key" }, dot("fork"), "fork"));
  if (mode === "difference") {
    const swatch = (level) => el("span", { class: "swatch", "data-shade": level });
    const row = [-3, -2, -1].map(swatch).concat([1, 2, 3].map(swatch));
    box.append(el("span", { class: "key scale" }, "B better", ...row, "A better"));
    return box;
  }
  const unit = mode === "streams" ? "streams" : `${mode}, nats`;
  const swatches = LABELS[mode].map((text, level) => el("span", { class: "swatch", "data-shade": level }, text));
  box.append(el("span", { class: "key scale" }, ...swatches, unit));
  return box;
}

const dot = (kind) => el("i", { class: `dot ${kind}` });
