// How tokens and numbers are written.

// White space, control, formatting and direction characters would be invisible, or would rearrange the page.
const HIDDEN = /[\u0000-\u001f\u007f-\u00a0\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb]|[\u{e0000}-\u{e0fff}]/gu;

/** The parts of a token: spaces before it, and what is drawn, in which everything is visible. */
export function parts(text) {
  if (text === "") return { indent: "", ink: "¶", breaks: false };
  const indent = text.match(/^ */)[0];
  if (indent.length === text.length) return { indent: "", ink: "·".repeat(text.length), breaks: false };
  const ink = text.slice(indent.length).replace(HIDDEN, visible);
  return { indent, ink, breaks: text.endsWith("\n") };
}

function visible(character) {
  const code = character.codePointAt(0);
  if (character === "\n") return "↵";
  if (character === "\t") return "⇥";
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  if (code === 0x7f) return "␡";
  if (code === 0xfe0f || code === 0x200d) return character; // part of an emoji
  return `‹${code.toString(16).toUpperCase().padStart(4, "0")}›`;
}

/** A token on one line, for lists and labels. */
export function named(text) {
  const { indent, ink } = parts(text);
  return "␣".repeat(indent.length) + ink;
}

/** For a screen reader. */
export function spoken(text) {
  if (text === "") return "end of text";
  const { ink } = parts(text);
  const words = { "↵": "newline", "⇥": "tab", "�": "part of a character", "◦": "rest of a character" };
  return words[ink] ?? (/^·+$/.test(ink) && text.trim() === "" ? `${text.length} spaces` : ink);
}

export const count = (n) => n.toLocaleString("en");
export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
export const nats = (value) => (value === null || value === undefined ? "–" : value.toFixed(2));
export function percent(share) {
  if (share > 0 && share < 0.0005) return "<0.1 %";
  return share >= 0.0995 ? `${Math.round(share * 100)} %` : `${(share * 100).toFixed(1)} %`;
}
export const score = (value) => (value >= 0.0005 || value === 0 ? value.toFixed(3) : value.toExponential(0));
export const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`;
export const tidy = (value) => String(Math.round(value * 100) / 100);

export const stageName = (stages, at) => (at === 0 ? "Embedding" : `Block ${stages[at].layer}`);

/** What a stream is called in its bubble. */
export const placeName = (place) => (place === 0 ? "original" : `fork ${place}`);
