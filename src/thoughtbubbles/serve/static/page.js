// The parts of the page around the panes: text box, examples, menus, keys.

import { download } from "./downloads.js";
import { el, find, toast } from "./dom.js";
import { listen } from "./keys.js";
import { EXAMPLES } from "./state.js";
import { signed } from "./words.js";

export function wire(app) {
  const box = find("#text");
  box.addEventListener("input", () => {
    app.setText(box.value);
    app.reload();
  });
  const examples = EXAMPLES.map(([name, text]) => el("button", { type: "button", class: "chip-button", onclick: () => take(app, box, text) }, name));
  find("#examples").append(...examples);
  find("#compare").addEventListener("click", () => app.toggleCompare());
  find("#close").addEventListener("click", () => app.clearChoice());
  find("#link").addEventListener("click", () => copyLink(app));
  find("#theme").addEventListener("click", () => globalThis.toggleTheme());
  const dialog = find("#keys");
  find("#help").addEventListener("click", () => dialog.showModal());
  find("#keys-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  const menu = find("#download");
  for (const button of menu.querySelectorAll("button")) {
    button.addEventListener("click", () => save(app, button.value, menu));
  }
  document.addEventListener("click", (event) => !menu.contains(event.target) && menu.removeAttribute("open"));
  menu.addEventListener("keydown", (event) => event.key === "Escape" && closeMenu(menu));
  listen(actions(app, dialog), dialog);
}

function take(app, box, text) {
  box.value = text;
  app.setText(text);
  app.load();
}

function closeMenu(menu) {
  menu.removeAttribute("open");
  find("summary", menu).focus();
}

async function save(app, kind, menu) {
  closeMenu(menu);
  const panes = app.visible.filter((pane) => pane.lineage);
  if (!panes.length) {
    toast("There is nothing to save yet");
    return;
  }
  await download(kind, panes, "Streams of each token");
  toast(`Saved thoughtbubbles.${kind}`);
}

async function copyLink(app) {
  if (!(await app.link())) {
    toast("This text is too long for a link: download it as JSON instead");
    return;
  }
  try {
    await navigator.clipboard.writeText(location.href);
    toast("Link copied: it brings this view back");
  } catch {
    toast("The link is in the address bar: copy it from there");
  }
}

function actions(app, dialog) {
  const box = find("#text");
  return [
    ["[", "previous stage", () => app.stages.move(-1)],
    ["]", "next stage", () => app.stages.move(1)],
    ["p", "play or pause the stages", () => app.stages.play()],
    ["+ =", "a larger budget", () => app.panes[app.state.active].controls.nudge(1)],
    ["-", "a smaller budget", () => app.panes[app.state.active].controls.nudge(-1)],
    ["g", "generate, or stop", () => app.generation.toggle()],
    ["c", "compare two panes", () => app.toggleCompare()],
    ["l", "copy the link to this view", () => copyLink(app)],
    ["d", "light or dark", () => globalThis.toggleTheme()],
    ["/", "to the text", () => box.focus()],
    ["t", "to the tokens", () => app.panes[app.state.active].tokens.focus()],
    ["?", "these keys", () => dialog.showModal()],
    ["Escape", "", () => app.clearChoice()],
  ];
}

const LN2 = Math.log(2);

/** Which pane predicts better, in one line. */
export function comparison(root, pair, between) {
  root.hidden = !pair || !pair[0] || !pair[1];
  if (root.hidden) return;
  const [a, b] = pair;
  if (between) {
    const known = between.filter((each) => each !== null);
    const mean = known.reduce((sum, each) => sum + each, 0) / Math.max(1, known.length);
    const better = known.filter((each) => each < 0).length;
    const share = known.length ? ` B predicts ${better} of ${known.length} tokens better.` : "";
    root.replaceChildren("Loss of B minus A: ", el("b", {}, signed(mean)), ` nats per token.${share}`);
    return;
  }
  const bits = [a, b].map((each) => perByte(each).toFixed(3));
  root.replaceChildren("The panes have different tokens, so compare bits per byte: ", el("b", {}, `A ${bits[0]}, B ${bits[1]}`), ".");
}

function perByte({ tokens }) {
  const total = tokens.reduce((sum, token) => sum + (token.loss ?? 0), 0);
  return total / LN2 / Math.max(1, tokens.at(-1).end - tokens[0].end);
}
