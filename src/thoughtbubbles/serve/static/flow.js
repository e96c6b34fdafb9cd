// A pane's stages in numbers: how many streams there are, were born, were dropped.

import { bar, el } from "./dom.js";
import { count, stageName } from "./words.js";

export function flow(lineage, now) {
  const most = Math.max(...lineage.stages.map((stage) => stage.streams.length));
  const items = lineage.stages.map((stage, at) => {
    const born = stage.streams.filter((stream) => stream.is_fork).length;
    const dropped = stage.dropped.filter((candidate) => !candidate.is_fork).length;
    const rejected = stage.dropped.length - dropped;
    const { copies } = lineage.trace.settings;
    const words = at === 0 ? (copies === 1 ? "one per token" : `${copies} copies of each token`) : `${count(born)} forked, ${count(dropped)} dropped, ${count(rejected)} forks rejected`;
    const total = el("span", { class: "total" }, el("b", {}, count(stage.streams.length)), " streams");
    const cell = el("li", { class: at === now ? "here" : "" }, el("b", {}, stageName(lineage.stages, at)), total);
    cell.append(bar(stage.streams.length / most, at === now ? "now" : ""), el("small", {}, words));
    return cell;
  });
  return el("ol", { class: "flow", "aria-label": "Streams in each stage" }, ...items);
}
