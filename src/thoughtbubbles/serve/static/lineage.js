// A trace with what the page asks of it again and again: bubbles, and lines of descent.

export class Lineage {
  /** `asked`: the request that this trace answers; the pane's settings may be newer. `model`: its description. */
  constructor(trace, asked, model) {
    this.trace = trace;
    this.asked = asked;
    this.model = model;
    this.tokens = trace.tokens;
    this.stages = trace.stages;
    this.texts = readable(trace);
    this.last = this.stages.length - 1;
    this.bubbles = this.stages.map((stage) => group(stage.streams, this.tokens.length).map((bubble) => bubble.reverse()));
    this.lines = this.#findLines();
    this.most = Math.max(1, ...this.tokens.flatMap((token) => token.streams));
    this.total = this.stages[this.last].streams.length;
  }

  /** Indices of a token's streams, the original first. */
  bubble(stage, token) {
    return this.bubbles[stage]?.[token] ?? [];
  }

  stream(stage, index) {
    return this.stages[stage].streams[index];
  }

  dropped(stage, token) {
    return this.stages[stage].dropped.filter((candidate) => candidate.token === token);
  }

  /** Every stream of a line of descent has one name: a fork begins a new line, a stream that continues keeps its own. */
  #findLines() {
    const lines = [];
    this.stages.forEach((stage, at) => {
      lines.push(stage.streams.map((s, i) => (at === 0 || s.is_fork ? `${at}:${i}` : lines[at - 1][s.parent])));
    });
    return lines;
  }

  /** From stage 0 to this stream: its ancestors, each as {stage, index}. */
  ancestors(stage, index) {
    const found = [];
    for (let at = stage, i = index; at >= 0 && i !== null; at -= 1) {
      found.unshift({ stage: at, index: i });
      i = this.stream(at, i).parent;
    }
    return found;
  }

  /** The streams of the next stage that come from this one. */
  children(stage, index) {
    if (stage >= this.last) return [];
    const token = this.stream(stage, index).token;
    return this.bubble(stage + 1, token).filter((i) => this.stream(stage + 1, i).parent === index);
  }

  /** The stream that this one becomes in each later stage, until it is dropped. */
  future(stage, index) {
    const found = [];
    for (let at = stage, i = index; at < this.last; at += 1) {
      const children = this.children(at, i);
      const next = children.find((child) => !this.stream(at + 1, child).is_fork);
      found.push({ stage: at + 1, index: next ?? null, forks: children.length - (next === undefined ? 0 : 1) });
      if (next === undefined) break;
      i = next;
    }
    return found;
  }
}

const PART = "◦";

/** Texts of the tokens. Of a character that several tokens share, the first one shows it, the others a mark. */
function readable({ text, tokens }) {
  if (!tokens.some((token) => token.text.includes("\ufffd"))) return tokens.map((token) => token.text);
  const bytes = new TextEncoder().encode(text);
  const decoder = new TextDecoder();
  const inside = (at) => (bytes[at] & 0xc0) === 0x80; // not the first byte of a character
  return tokens.map((token) => {
    if (!token.text.includes("\ufffd")) return token.text;
    let { begin, end } = token;
    while (begin < token.end && inside(begin)) begin += 1;
    while (begin < token.end && inside(end)) end += 1;
    return (begin > token.begin ? PART : "") + decoder.decode(bytes.subarray(begin, Math.max(begin, end)));
  });
}

function group(streams, n) {
  const bubbles = Array.from({ length: n }, () => []);
  streams.forEach((stream, index) => bubbles[stream.token].push(index));
  return bubbles;
}
