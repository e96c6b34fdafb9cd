// What the page shows, and the link that brings it back.

export const EXAMPLES = [
  ["A science text", "The cell is the basic unit of life. In 1665 Robert Hooke looked at a thin slice of cork through his microscope and saw small chambers, which he called cells."],
  ["A story", "The old lighthouse keeper wrote the names of the passing ships into a book. One winter night, when the lamp went out, he lit a fire on the rocks."],
  ["Names and facts", "Anna is the sister of Ben, and Ben is the father of Clara. Therefore Anna is the aunt of"],
  ["Numbers", "In 1912 the town had 3,450 people; ten years later it had 4,120, which is 670 more."],
  ["Many languages", "naïve café — Привет, мир! שלום עולם 你好 😀"],
];

export const MODES = ["streams", "loss", "entropy", "difference"];

export function initial() {
  return {
    text: EXAMPLES[0][1],
    stage: null, // null: the last one
    mode: "streams",
    compare: false,
    token: null,
    stream: null, // in the chosen token's bubble, as its place
    block: null, // null: the stage's last
    head: null, // null: the mean over heads
    active: 0, // the pane whose token is inspected
    temperature: 0.8,
    length: 64,
    panes: [{ model: null, budget: null, selection: null }, { model: null, budget: 1, selection: null }],
  };
}

/** Halves of surrogate pairs, which JSON of the server cannot have, become replacement characters. */
export const wellFormed = (text) => (text.toWellFormed ? text.toWellFormed() : text);

const number = (value, low, high) => (Number.isFinite(value) && value >= low && value <= high ? value : null);
const whole = (value, high = 1e6) => (Number.isInteger(value) ? number(value, 0, high) : null);

/** Only what is known and in range: a link may come from anywhere. */
export function sane(given) {
  const state = initial();
  if (typeof given !== "object" || given === null) return state;
  const pane = (each = {}, otherwise) => ({
    model: typeof each?.model === "string" ? each.model : otherwise.model,
    budget: each?.budget === null ? null : (number(each?.budget, 1, 1e6) ?? otherwise.budget),
    selection: ["causal", "block"].includes(each?.selection) ? each.selection : null,
  });
  return {
    text: typeof given.text === "string" ? wellFormed(given.text) : state.text,
    stage: whole(given.stage),
    mode: MODES.includes(given.mode) ? given.mode : state.mode,
    compare: given.compare === true,
    token: whole(given.token),
    stream: whole(given.stream),
    block: whole(given.block),
    head: whole(given.head),
    active: given.active === 1 && given.compare === true ? 1 : 0,
    temperature: number(given.temperature, 0, 2) ?? state.temperature,
    length: whole(given.length) || state.length,
    panes: [0, 1].map((i) => pane(given.panes?.[i], state.panes[i])),
  };
}

const LONG = 300;

/** "#j." and the JSON, or "#z." and it compressed, as URL-safe base64. */
export async function toHash(state) {
  const bytes = new TextEncoder().encode(JSON.stringify(state));
  if (bytes.length < LONG || !globalThis.CompressionStream) return `#j.${toBase64(bytes)}`;
  return `#z.${toBase64(await through(bytes, new CompressionStream("deflate-raw")))}`;
}

export async function fromHash(hash) {
  const found = /^#([jz])\.([\w-]*)$/.exec(hash);
  if (!found) return null;
  try {
    const bytes = fromBase64(found[2]);
    const plain = found[1] === "j" ? bytes : await through(bytes, new DecompressionStream("deflate-raw"), 1 << 21);
    return sane(JSON.parse(new TextDecoder().decode(plain)));
  } catch {
    return null;
  }
}

/** `most`: a link of a few bytes must not unpack to gigabytes. */
async function through(bytes, transform, most = Infinity) {
  const reader = new Blob([bytes]).stream().pipeThrough(transform).getReader();
  const pieces = [];
  let size = 0;
  while (true) {
    const { done, value } = await reader.read();
    if (done) break;
    size += value.length;
    if (size > most) throw new RangeError("too large");
    pieces.push(value);
  }
  return new Uint8Array(await new Blob(pieces).arrayBuffer());
}

function toBase64(bytes) {
  let text = "";
  for (let at = 0; at < bytes.length; at += 8192) text += String.fromCharCode(...bytes.subarray(at, at + 8192));
  return btoa(text).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

function fromBase64(text) {
  const plain = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
  return Uint8Array.from(plain, (character) => character.charCodeAt(0));
}
