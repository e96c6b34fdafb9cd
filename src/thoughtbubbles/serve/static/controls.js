// The settings of a pane: model, budget, selection rule.

import { el, segments } from "./dom.js";
import { tidy } from "./words.js";

const STEP = 0.25; // of the budget
const HINTS = {
  causal: "Decisions depend on earlier tokens only",
  block: "The paper's rule: the whole text is ranked together, so later tokens can push out earlier forks",
};

export class Controls {
  constructor(letter, models, changed) {
    this.letter = letter;
    this.models = models;
    this.changed = changed;
    this.root = el("div", { class: "controls" });
  }

  /** Shows these settings, after replacing what this model cannot do. */
  show(settings) {
    const model = this.models.find((each) => each.name === settings.model) ?? this.models[0];
    const own = {
      model: model.name,
      budget: model.max_budget === null ? null : clamp(settings.budget ?? model.budget, 1, model.max_budget),
      selection: model.selections.includes(settings.selection) ? settings.selection : model.selection,
    };
    this.settings = own;
    if (this.built !== model.name) this.#build(model, own);
    else if (this.range) this.#update(own);
    return own;
  }

  #build(model, own) {
    this.built = model.name;
    const held = this.root.contains(document.activeElement); // by whoever chose the model
    this.root.replaceChildren(el("span", { class: "letter", "aria-hidden": "true" }, this.letter), this.#model(own));
    if (held) this.root.querySelector("select").focus();
    this.range = null;
    if (model.max_budget === null) {
      const why = model.fork_layers.length ? "In this model every token forks." : "This model has no fork layers.";
      this.root.append(el("span", { class: "quiet" }, why));
      return;
    }
    this.root.append(this.#budget(model, own), this.#selection(model, own));
  }

  #update(own) {
    this.range.value = own.budget;
    this.#say(own.budget);
    for (const input of this.root.querySelectorAll("[type=radio]")) input.checked = input.value === own.selection;
  }

  #model(own) {
    const select = el("select", { "aria-label": `Model of pane ${this.letter}` });
    for (const each of this.models) select.append(new Option(each.name, each.name, false, each.name === own.model));
    select.addEventListener("change", () => this.changed({ model: select.value, budget: null, selection: null }));
    return el("label", { class: "field model" }, el("span", {}, "Model"), select);
  }

  #budget(model, own) {
    const id = `budget-${this.letter}`;
    this.range = el("input", { type: "range", id, min: 1, max: model.max_budget, step: STEP, value: own.budget });
    this.output = el("output", { for: id });
    this.range.addEventListener("input", () => {
      this.#say(Number(this.range.value));
      this.changed({ budget: Number(this.range.value) });
    });
    this.#say(own.budget);
    const label = el("label", { for: id, title: "Streams per token that may survive; 1: no forks" }, "Budget");
    return el("div", { class: "field budget" }, label, this.range, this.output);
  }

  #say(budget) {
    this.output.textContent = `${tidy(budget)}×`;
    this.range.setAttribute("aria-valuetext", `${tidy(budget)} streams per token`);
  }

  #selection(model, own) {
    const options = model.selections.map((name) => [name, name, HINTS[name]]);
    const choose = (selection) => this.changed({ selection });
    const group = segments(`selection-${this.letter}`, `Selection rule of pane ${this.letter}`, options, own.selection, choose);
    return el("div", { class: "field" }, el("span", { "aria-hidden": "true" }, "Selection"), group);
  }

  /** One step up or down, from the keyboard. */
  nudge(way) {
    if (!this.range) return;
    this.range.value = Number(this.range.value) + way * STEP;
    this.range.dispatchEvent(new Event("input"));
  }
}

const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
