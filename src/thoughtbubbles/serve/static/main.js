// Starts the page: waits for the models, then brings back the view of the link.

import { App } from "./app.js";
import * as api from "./api.js";
import { find } from "./dom.js";

const AGAIN = 3000; // milliseconds between attempts to reach the server

async function start() {
  let found;
  try {
    found = await api.models();
  } catch (error) {
    find("#start").textContent = error.message;
    find("#start").hidden = false;
    setTimeout(start, AGAIN);
    return;
  }
  find("#start").hidden = true;
  find("#version").textContent = `Version ${found.version}.`;
  globalThis.app = new App(found.models); // for the console
  try {
    await globalThis.app.start();
  } finally {
    document.body.classList.remove("starting");
  }
}

start();
