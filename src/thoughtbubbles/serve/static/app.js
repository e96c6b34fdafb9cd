// The page as a whole: what is chosen, which panes show it, and what follows from a change.

import * as api from "./api.js";
import { differences, legend } from "./colours.js";
import { announce, debounced, find, segments, toast } from "./dom.js";
import { Generation } from "./generate.js";
import { Inspector } from "./inspector.js";
import { Look } from "./look.js";
import { Pane } from "./pane.js";
import { Stages } from "./stages.js";
import { fromHash, initial, toHash, wellFormed } from "./state.js";
import { comparison, wire } from "./page.js";
import { count, nats, plural } from "./words.js";

const HINT = "Choose a token to see its streams, their scores and what the model expects next.";
const LONGEST = 1_000_000; // characters of an address
const TYPING = 160; // milliseconds without a key before a text is sent

export class App {
  constructor(models) {
    this.models = models;
    this.state = initial();
    if (models.length > 1) this.state.panes[1] = { model: models[1].name, budget: null, selection: null };
    this.panes = ["A", "B"].map((letter) => new Pane(letter, models, this));
    find("#panes").append(...this.panes.map((pane) => pane.root));
    this.inspector = new Inspector(find("#inspector"), this);
    this.look = new Look(this.inspector);
    this.stages = new Stages(find("#stages"), (stage) => this.set({ stage: stage === this.panes[0].lineage.last ? null : stage }));
    this.generation = new Generation(this);
    this.reload = debounced(TYPING, () => this.load());
    this.save = debounced(250, () => this.link());
    this.reloadSoon = [0, 1].map((i) => debounced(60, () => this.load(i)));
    wire(this);
    addEventListener("hashchange", () => this.restore());
  }

  async start() {
    const found = await fromHash(location.hash);
    // The first view chooses a token by itself, to show what there is to see; on a phone that would cover the text.
    this.fresh = !found && matchMedia("(min-width: 721px)").matches;
    await this.apply(found ?? this.state);
  }

  async restore() {
    const found = await fromHash(location.hash);
    if (found) await this.apply(found);
  }

  async apply(state) {
    if (this.generation.running) this.generation.discard();
    this.state = state;
    find("#text").value = state.text;
    this.generation.show(state);
    await this.load();
  }

  /** Text, or the settings of one pane (or of all), have changed. */
  async load(only = null) {
    this.save();
    this.panes[1].root.hidden = !this.state.compare;
    find("#panes").classList.toggle("two", this.state.compare);
    find("#compare").setAttribute("aria-pressed", String(this.state.compare));
    this.#modes();
    const shown = this.visible.filter((pane) => only === null || pane === this.panes[only]);
    await Promise.all(
      shown.map((pane) => {
        const settings = pane.controls.show(this.state.panes[this.panes.indexOf(pane)]);
        return pane.load(this.state.text, settings);
      }),
    );
  }

  /** Puts the view into the address; false if its text is too long for one. */
  async link() {
    const hash = await toHash(this.state);
    const fits = hash.length < LONGEST;
    history.replaceState(null, "", fits ? hash : location.pathname);
    return fits;
  }

  get visible() {
    return this.state.compare ? this.panes : this.panes.slice(0, 1);
  }

  /** For a generation, whose engine may have room for smaller budgets only than traces. */
  settings() {
    const { settings, models } = this.panes[0].controls;
    const { model, budget } = settings;
    const most = models.find((each) => each.name === model).max_generate_budget;
    return { model, budget: budget === null ? null : Math.min(budget, most) };
  }

  /** Changes that need no new trace. */
  set(changes) {
    Object.assign(this.state, changes);
    this.generation.show(this.state);
    this.save();
    this.redraw();
  }

  setText(text) {
    if (this.generation.running) this.generation.discard();
    Object.assign(this.state, { text: wellFormed(text), token: null, stream: null });
    this.look.leave();
  }

  toggleCompare() {
    this.generation.stop();
    const compare = !this.state.compare;
    const mode = compare ? "difference" : this.state.mode === "difference" ? "streams" : this.state.mode;
    Object.assign(this.state, { compare, mode, active: 0 });
    announce(compare ? "Comparing two panes" : "One pane");
    this.load();
  }

  // Called by panes.

  changed(pane, settings) {
    this.generation.stop();
    const index = this.panes.indexOf(pane);
    const all = { ...this.state.panes[index], ...settings };
    this.state.panes[index] = pane.controls.show(all);
    this.reloadSoon[index]();
  }

  traced(pane) {
    if (this.fresh && pane.lineage) {
      const sizes = pane.lineage.tokens.map((token) => token.streams.at(-1));
      this.state.token = sizes.indexOf(Math.max(...sizes));
      this.fresh = false;
    }
    this.redraw();
    if (!pane.lineage) return;
    const { tokens, total, trace } = pane.lineage;
    announce(`${pane.letter}: ${plural(tokens.length, "token")}, ${plural(total, "stream")}, loss ${nats(trace.loss)}`);
  }

  redraw() {
    const ready = this.visible.filter((pane) => pane.lineage);
    const [a, b] = this.panes.map((pane) => pane.lineage);
    this.between = this.state.compare ? differences(a, b) : null;
    const most = Math.max(1, ...ready.map((pane) => pane.lineage.most));
    const stage = this.state.stage;
    for (const pane of ready) pane.draw(stage, this.state.mode, this.between, most);
    if (a) this.stages.show(a.stages, this.panes[0].stage);
    else this.stages.hide();
    find("#size").textContent = a ? `${plural(a.tokens.length, "token")} of ${count(a.trace.settings.block_size)}` : "";
    find("#legend").replaceChildren(legend(this.state.mode));
    comparison(find("#comparison"), this.state.compare ? [a, b] : null, this.between);
    this.inspect();
  }

  #modes() {
    const options = ["streams", "loss", "entropy", ...(this.state.compare ? ["difference"] : [])];
    if (!options.includes(this.state.mode)) this.state.mode = "streams";
    const root = find("#modes");
    if (root.dataset.shown !== options.join()) {
      const choose = (mode) => this.set({ mode });
      root.replaceChildren(segments("mode", "Colour by", options.map((name) => [name, name]), null, choose));
      root.dataset.shown = options.join();
    }
    find(`[value=${this.state.mode}]`, root).checked = true;
  }

  choose(pane, token, by, place = null) {
    const active = this.panes.indexOf(pane);
    const same = token === this.state.token && active === this.state.active;
    if (same && place === null) return;
    Object.assign(this.state, { token, active, stream: place });
    this.save();
    this.inspect();
  }

  clearChoice() {
    Object.assign(this.state, { token: null, stream: null });
    this.save();
    this.inspect();
  }

  hover(pane, token) {
    if (matchMedia("(hover: none)").matches) return;
    this.inspect(token === null ? undefined : { pane, token });
  }

  /** Shows a token: the one that is hovered, or the chosen one. */
  inspect(hovered) {
    const pane = hovered?.pane ?? this.panes[this.state.active];
    const token = hovered?.token ?? this.state.token;
    for (const each of this.panes) each.tokens.choose(this.state.active === this.panes.indexOf(each) ? this.state.token : null);
    const known = pane.lineage && pane.stage !== null && token !== null && token < pane.lineage.tokens.length;
    find("#inspector").classList.toggle("open", Boolean(known));
    if (!known) {
      this.look.leave();
      this.inspector.empty(HINT);
      return;
    }
    const pinned = token === this.state.token && pane === this.panes[this.state.active];
    const place = pinned ? this.state.stream : null;
    this.inspector.show({ pane, token, place, difference: this.between?.[token], compare: this.state.compare });
    this.look.at(pane, this.inspector.pointed, this.state);
  }

  /** A stream that is hovered, in the text or in the inspector; null: none any more. */
  stream(pane, index) {
    if (index === null) {
      this.inspect();
      return;
    }
    const { token } = pane.lineage.stream(pane.stage, index);
    if (this.inspector.view?.pane !== pane || this.inspector.view?.token !== token) {
      this.inspector.show({ pane, token, place: null, difference: this.between?.[token], compare: this.state.compare });
      find("#inspector").classList.add("open");
    }
    this.inspector.point(index);
    this.look.at(pane, index, this.state);
  }

  placed(pane) {
    this.look.again(pane);
  }

  enter() {
    this.inspector.focus();
  }

  // Called by the inspector.

  pin(place) {
    const { pane, token } = this.inspector.view;
    Object.assign(this.state, { token, active: this.panes.indexOf(pane), stream: place });
    this.save();
    this.inspector.view.place = place;
    for (const each of this.panes) each.tokens.choose(each === pane ? token : null);
    this.inspector.point(this.inspector.streams[Math.min(place, this.inspector.streams.length - 1)]);
    this.look.at(pane, this.inspector.pointed, this.state);
  }

  block(block) {
    this.state.block = block;
    this.save();
    this.look.choose(block);
  }

  head(head) {
    this.state.head = head;
    this.save();
    this.look.at(this.inspector.view.pane, this.inspector.pointed, this.state);
  }

  back() {
    this.panes[this.state.active].tokens.focus(this.state.token ?? 0);
  }

  // Called by a generation.

  grow(token, text) {
    if (this.state.token !== null) this.clearChoice();
    this.panes[0].grow(token.token, token.streams);
    find("#text").value = text;
  }

  finished(text) {
    find("#text").value = text;
    this.setText(text);
    this.state.stage = null;
    this.load();
  }

  failed(error, again) {
    if (again) this.panes[0].fail(error, again);
    else announce(error.message);
    if (!error.gone || this.polling) return;
    this.polling = setInterval(async () => {
      try {
        await api.models();
        clearInterval(this.polling);
        this.polling = null;
        toast("The server is back");
        this.load();
      } catch {
        // still away: the message stays
      }
    }, 3000);
  }
}
