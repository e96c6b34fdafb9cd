// Continues the text: tokens appear with their bubbles as they are generated.

import * as api from "./api.js";
import { announce, find } from "./dom.js";
import { plural } from "./words.js";

export class Generation {
  /** `app`: state, set(changes), settings(), grow(token, text), finished(text), failed(error, again). */
  constructor(app) {
    this.app = app;
    this.button = find("#generate");
    this.temperature = find("#temperature");
    this.length = find("#length");
    this.button.addEventListener("click", () => this.toggle());
    this.temperature.addEventListener("input", () => app.set({ temperature: Number(this.temperature.value) }));
    this.length.addEventListener("change", () => app.set({ length: Math.max(1, Math.round(Number(this.length.value)) || 64) }));
  }

  get running() {
    return Boolean(this.abort);
  }

  show(state) {
    this.temperature.value = state.temperature;
    find("#temperature-out").textContent = state.temperature.toFixed(1);
    this.temperature.setAttribute("aria-valuetext", state.temperature ? state.temperature.toFixed(1) : "0, greedy");
    this.length.value = state.length;
  }

  toggle() {
    if (this.running) this.stop();
    else this.start();
  }

  stop() {
    this.abort?.abort();
  }

  /** Ends it because the text is being changed: what was written stays in the box, and is not written again. */
  discard() {
    this.discarded = true;
    this.stop();
  }

  async start() {
    const { app } = this;
    const prompt = app.state.text;
    this.abort = new AbortController();
    const { signal } = this.abort;
    this.discarded = false;
    this.#say(true);
    let text = "";
    let n = 0;
    const seed = crypto.getRandomValues(new Uint32Array(1))[0];
    const asked = { ...app.settings(), text: prompt, max_new: app.state.length, temperature: app.state.temperature, seed };
    try {
      for await (const token of api.generate(asked, signal)) {
        text += token.text;
        if (token.finish !== "end") app.grow(token, prompt + text);
        n += 1;
      }
    } catch (error) {
      if (!signal.aborted) app.failed(error, () => this.start());
    } finally {
      this.abort = null;
      this.#say(false);
      if (n && !this.discarded) app.finished(prompt + text);
      announce(`${plural(n, "new token")}`);
    }
  }

  #say(on) {
    this.button.textContent = on ? "Stop" : "Generate";
    this.button.classList.toggle("stop", on);
    document.body.classList.toggle("generating", on);
    if (on) announce("Generating");
  }
}
