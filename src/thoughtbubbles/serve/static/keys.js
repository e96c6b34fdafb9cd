// Keys for everything, wherever no text is being typed.

import { el, find } from "./dom.js";

const TYPING = "input:not([type=radio]):not([type=range]), textarea, select, dialog *";

/** `actions`: [key, what it does, function]. */
export function listen(actions, dialog) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches?.(TYPING)) return;
    const found = actions.find(([keys]) => keys.split(" ").includes(event.key));
    if (!found) return;
    event.preventDefault();
    found[2]();
  });
  describe(actions, dialog);
}

const FIXED = [
  ["← → ↑ ↓", "move from token to token, when one has the focus"],
  ["Home End", "first and last token"],
  ["Enter", "from a token to its streams; ↑ ↓ move among them"],
  ["Esc", "from its streams back to the token; from a token: choose none"],
];

function describe(actions, dialog) {
  const row = ([keys, what]) => el("div", {}, el("dt", {}, ...keys.split(" ").map((key) => el("kbd", {}, key))), el("dd", {}, what));
  find("dl", dialog).replaceChildren(...[...FIXED, ...actions.filter(([key]) => key !== "Escape")].map(row));
}
