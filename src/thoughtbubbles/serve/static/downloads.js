// The view as a file: an SVG of what is on the page, a PNG drawn from it, or the traces as JSON.

import { svg } from "./dom.js";
import { DOT, point } from "./dots.js";
import { nats, parts, stageName, tidy } from "./words.js";

const MARGIN = 30;
const TOP = 64; // of a panel: its caption
const MONO = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace";
const SANS = "system-ui, sans-serif";
const LARGEST = 12000; // pixels of a side; canvases have limits

const style = (name, node = document.documentElement) => getComputedStyle(node).getPropertyValue(name).trim();

/** One panel per pane, side by side. */
export function drawing(panes, title) {
  const panels = panes.map((pane) => ({ pane, width: pane.canvas.clientWidth, height: pane.canvas.clientHeight }));
  const width = panels.reduce((sum, panel) => sum + panel.width + MARGIN, MARGIN);
  const height = Math.max(...panels.map((panel) => panel.height)) + TOP + MARGIN;
  const root = svg("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  root.append(svg("title", {}, title), svg("rect", { width, height, rx: 8, fill: style("--card") }));
  let left = MARGIN;
  for (const { pane, width: wide } of panels) {
    root.append(panel(pane, left));
    left += wide + MARGIN;
  }
  return new XMLSerializer().serializeToString(root);
}

function panel(pane, left) {
  const group = svg("g", { transform: `translate(${left} ${TOP})` });
  group.append(svg("text", { y: -26, "font-family": SANS, "font-size": 14, "font-weight": 600, fill: style("--ink") }, caption(pane)));
  const ink = { "font-family": MONO, "font-size": style("font-size", pane.tokens.root) || "16px", fill: style("--ink"), "xml:space": "preserve" };
  const { offsetLeft, offsetTop } = pane.tokens.root; // in the canvas
  const shift = svg("g", { transform: `translate(${offsetLeft} ${offsetTop})` });
  pane.anchors.forEach((box, i) => {
    const node = pane.tokens.items[i].lastElementChild;
    const shade = getComputedStyle(node).backgroundColor;
    const size = { x: box.left.toFixed(1), y: box.y.toFixed(1), width: box.width.toFixed(1), height: box.height.toFixed(1) };
    if (!/, 0\)$|transparent|\/ 0\)$/.test(shade)) shift.append(svg("rect", { ...size, rx: 4, fill: shade }));
    const word = { ...ink, x: box.left.toFixed(1), y: (box.y + box.height * 0.78).toFixed(1), textLength: box.width.toFixed(1), lengthAdjust: "spacingAndGlyphs" };
    shift.append(svg("text", word, parts(pane.lineage.texts[i]).ink));
  });
  shift.append(...dots(pane));
  group.append(shift);
  return group;
}

function caption(pane) {
  const { trace, stages, model } = pane.lineage;
  const rule = trace.settings.budget === null ? "" : ` · budget ${trace.settings.budget} · ${trace.settings.selection}`;
  return `${model.name}${rule} · ${stageName(stages, pane.stage)} · loss ${nats(trace.loss)}`;
}

function dots({ lineage, stage, anchors }) {
  return lineage.stages[stage].streams.map((stream) => {
    const at = point(anchors[stream.token], stream.place, lineage.tokens[stream.token].streams[stage]);
    const fill = style(stream.place === 0 ? "--original" : "--fork");
    const r = DOT * (0.6 + 0.4 * Math.sqrt(stream.score));
    return svg("circle", { cx: at.x.toFixed(1), cy: at.y.toFixed(1), r: r.toFixed(2), fill, "fill-opacity": tidy(0.4 + 0.6 * stream.score) });
  });
}

export async function picture(panes, title) {
  const source = drawing(panes, title);
  const url = URL.createObjectURL(new Blob([source], { type: "image/svg+xml" }));
  try {
    const image = new Image();
    image.src = url;
    await image.decode();
    const scale = Math.min(2, LARGEST / Math.max(image.naturalWidth, image.naturalHeight));
    const canvas = document.createElement("canvas");
    canvas.width = Math.ceil(image.naturalWidth * scale);
    canvas.height = Math.ceil(image.naturalHeight * scale);
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    return await new Promise((done) => canvas.toBlob(done, "image/png"));
  } finally {
    URL.revokeObjectURL(url);
  }
}

export async function download(kind, panes, title) {
  const traces = panes.map((pane) => ({ model: pane.lineage.model.name, ...pane.lineage.trace }));
  const make = {
    svg: () => new Blob([drawing(panes, title)], { type: "image/svg+xml" }),
    json: () => new Blob([JSON.stringify(traces.length === 1 ? traces[0] : traces, null, 1)], { type: "application/json" }),
    png: () => picture(panes, title),
  };
  const url = URL.createObjectURL(await make[kind]());
  const link = document.createElement("a");
  link.href = url;
  link.download = `thoughtbubbles.${kind}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
