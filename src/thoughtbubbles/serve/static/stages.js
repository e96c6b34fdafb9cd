// The stages as steps: buttons, and a player that goes through them.

import { announce, el, stillness } from "./dom.js";
import { plural, stageName } from "./words.js";

const PAUSE = 1300; // milliseconds per stage while playing

export class Stages {
  constructor(root, step) {
    this.root = root;
    this.step = step;
    this.timer = 0;
    this.list = el("div", { class: "steps", role: "group", "aria-label": "Stages" });
    this.player = el("button", { type: "button", class: "play", title: "Play all stages (p)" });
    this.player.addEventListener("click", () => this.play());
    root.append(this.player, this.list);
    this.#sayPlaying(false);
  }

  /** Buttons for these stages; `at` is the one shown. */
  show(stages, at) {
    const names = stages.map((_, i) => stageName(stages, i)).join();
    if (names !== this.names) {
      this.names = names;
      this.buttons = stages.map((_, i) => el("button", { type: "button", onclick: () => this.#go(i) }, stageName(stages, i)));
      this.list.replaceChildren(...this.buttons.flatMap((each, i) => (i ? [el("i", { "aria-hidden": "true" }, "→"), each] : [each])));
    }
    this.stages = stages;
    this.at = at;
    this.buttons.forEach((each, i) => each.setAttribute("aria-pressed", i === at ? "true" : "false"));
    this.root.hidden = false;
    this.player.hidden = stages.length < 2;
  }

  hide() {
    this.stop();
    this.root.hidden = true;
  }

  #go(at) {
    this.stop();
    this.#set(at);
  }

  #set(at) {
    const stage = this.stages[at];
    announce(`${stageName(this.stages, at)}: ${plural(stage.streams.length, "stream")}, ${plural(stage.dropped.length, "candidate")} dropped`);
    this.step(at);
  }

  move(way) {
    if (this.stages) this.#go(Math.max(0, Math.min(this.stages.length - 1, this.at + way)));
  }

  play() {
    if (this.timer) {
      this.stop();
      return;
    }
    if (!this.stages || this.stages.length < 2) return;
    this.#sayPlaying(true);
    this.#set(0);
    const next = () => {
      this.#set(this.at + 1);
      if (this.at < this.stages.length - 1) this.timer = setTimeout(next, PAUSE);
      else this.stop();
    };
    this.timer = setTimeout(next, stillness() ? PAUSE : PAUSE / 2);
  }

  stop() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.#sayPlaying(false);
  }

  #sayPlaying(on) {
    this.player.textContent = on ? "❚❚" : "▶";
    this.player.setAttribute("aria-label", on ? "Pause" : "Play all stages");
  }
}
