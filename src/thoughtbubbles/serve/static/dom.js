// Elements without a framework. Data only ever becomes text nodes and attributes, never markup.

const SVG = "http://www.w3.org/2000/svg";

export const find = (selector, within = document) => within.querySelector(selector);

export function el(tag, attributes = {}, ...children) {
  return dressed(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return dressed(document.createElementNS(SVG, tag), attributes, children);
}

function dressed(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** A bar whose length is a share of its track. The style is set by script: the page's policy allows no style attribute. */
export function bar(share, kind = "") {
  const node = el("span", { class: `bar ${kind}`, "aria-hidden": "true" }, el("i"));
  node.firstChild.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return node;
}

/** A row of buttons of which one is chosen. `options`: [value, label, hint]. */
export function segments(name, label, options, chosen, choose) {
  const group = el("div", { class: "segments", role: "radiogroup", "aria-label": label });
  for (const [value, text, hint] of options) {
    const input = el("input", { type: "radio", name, value, class: "sr" });
    input.checked = value === chosen;
    input.addEventListener("change", () => choose(value));
    group.append(el("label", { title: hint }, input, el("span", {}, text)));
  }
  return group;
}

export function debounced(delay, call) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(call, delay, ...given);
  };
}

export const stillness = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

let speaker = null;

/** Tells a screen reader, without moving the focus. */
export function announce(text) {
  speaker ??= find("#live");
  speaker.textContent = text;
}

let toastTimer = 0;

export function toast(text) {
  const box = find("#toast");
  box.textContent = text;
  box.classList.add("on");
  announce(text);
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => box.classList.remove("on"), 2600);
}
