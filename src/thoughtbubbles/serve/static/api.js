// Requests to our own server. An error has one sentence for the reader; `gone` means that nobody answered.

export class Failure extends Error {
  constructor(message, gone = false) {
    super(message);
    this.gone = gone;
  }
}

const GONE = "The server does not answer. Start “thoughtbubbles watch” again; this page keeps your text.";

async function send(path, body, signal) {
  const options = body
    ? { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" }, signal }
    : { signal };
  let reply;
  try {
    reply = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(GONE, true);
  }
  if (!reply.ok) throw new Failure(await reason(reply));
  return reply;
}

async function reason(reply) {
  try {
    return sentence((await reply.json()).error);
  } catch {
    return `The server answered with status ${reply.status}.`;
  }
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

async function read(reply) {
  try {
    return await reply.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(GONE, true);
  }
}

export const models = async () => read(await send("/api/models"));

export const trace = async (settings, signal) => read(await send("/api/trace", settings, signal));
export const attention = async (settings, signal) => read(await send("/api/attention", settings, signal));

/** Yields one object per new token. */
export async function* generate(settings, signal) {
  const reply = await send("/api/generate", settings, signal);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure(GONE, true);
    }
    if (piece.done) return;
    const lines = (rest + piece.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const token = JSON.parse(line);
      if (token.error) throw new Failure(sentence(token.error));
      yield token;
    }
  }
}
