// Reading values: with the pointer, or with the arrow keys where a figure has the focus. A click, or Enter, leads
// to the trajectories of the step.
"use strict";
const inspect = JSON.parse(document.getElementById("inspect").textContent);

// A list item for a run: a link to the kept step that is nearest, and the command that serves it.
const leadTo = (run, wanted) => {
  const step = run.steps.reduce((best, one) => (Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best));
  const item = document.createElement("li"), link = document.createElement("a"), code = document.createElement("code");
  link.href = `http://localhost:${inspect.port}/#${new URLSearchParams({ run: run.name, from: step, to: step })}`;
  link.target = "_blank";
  link.rel = "noopener";
  link.textContent = `${run.label}, step ${step}${step === wanted ? "" : " (the nearest that is kept)"}`;
  code.textContent = run.command;
  item.append(link, ", served by ", code);
  return item;
};

for (const figure of document.querySelectorAll("figure")) {
  const svg = figure.querySelector("svg");
  const panels = JSON.parse(figure.querySelector("script").textContent);
  const out = figure.querySelector("output");
  const steps = [...new Set(panels.flatMap((panel) => panel.curves.flatMap((curve) => curve.steps)))];
  steps.sort((a, b) => a - b);
  let chosen = null;

  const nearest = (wanted) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= wanted) low = middle; else high = middle;
    }
    return wanted - steps[low] <= steps[high] - wanted ? low : high;
  };
  const value = (curve, step) => {
    const index = curve.steps.indexOf(step);
    if (index < 0 || curve.mean[index] === null) return null;
    const band = curve.low[index] === curve.high[index] ? "" : ` (${curve.low[index]} to ${curve.high[index]})`;
    return `${curve.name ? curve.name + " " : ""}${curve.mean[index]}${band}`;
  };
  const show = (index) => {
    chosen = index;
    svg.querySelectorAll(".cursor").forEach((line) => line.remove());
    if (index === null) { out.textContent = ""; return; }
    const step = steps[index];
    const texts = [];
    for (const panel of panels) {
      const share = (step - panel.first) / (panel.last - panel.first);
      const x = panel.left + share * (panel.right - panel.left);
      const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
      for (const [name, number] of [["x1", x], ["x2", x], ["y1", panel.top], ["y2", panel.bottom]])
        line.setAttribute(name, number);
      line.setAttribute("class", "cursor");
      svg.append(line);
      const shown = panel.curves.map((curve) => value(curve, step)).filter((text) => text !== null);
      if (shown.length) texts.push((panel.title ? panel.title + ": " : "") + shown.join(", "));
    }
    out.textContent = `step ${step}: ${texts.join("; ")}`;
  };
  const lead = figure.querySelector(".lead");
  const open = () => {
    if (chosen === null || !inspect.runs.length) return;
    const list = document.createElement("ul");
    list.append(...inspect.runs.map((run) => leadTo(run, steps[chosen])));
    lead.replaceChildren("Trajectories:", list);
  };
  const point = (event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const { left, right, first, last } = panels[0];
    show(nearest(first + (x - left) / (right - left) * (last - first)));
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("click", open);
  // A finger that is lifted leaves too: what it chose stays until the next touch elsewhere.
  svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") show(null); });
  figure.addEventListener("blur", () => show(null));
  figure.addEventListener("keydown", (event) => {
    if (event.target !== figure) return;
    const last = steps.length - 1, from = chosen === null ? last : chosen;
    const next = { ArrowLeft: from - 1, ArrowRight: from + 1, PageUp: from - 10, PageDown: from + 10,
      Home: 0, End: last }[event.key];
    if (event.key === "Escape") { show(null); lead.replaceChildren(); }
    if (event.key === "Enter") { open(); lead.querySelector("a")?.focus(); }
    if (next === undefined) return;
    event.preventDefault();
    show(chosen === null && event.key.startsWith("Arrow") ? last : Math.min(Math.max(next, 0), last));
  });
}
