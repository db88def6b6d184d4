// One curve as SVG: axes with round numbers, a line that breaks where a value is missing, the value under the pointer.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const BOX = { left: 64, right: 16, top: 14, bottom: 34, width: 900, height: 260 };

function draw(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function ticks(low, high, most) {
  const raw = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const first = Math.ceil(low / step) * step;
  const result = [];
  for (let at = first; at <= high + step * 1e-9; at += step) result.push(Number(at.toPrecision(12)));
  return result;
}

function drawCurve(svg, steps, values) {
  const points = steps.map((step, index) => [step, values[index]]);
  const known = points.filter(([, value]) => value !== null);
  if (known.length === 0) {
    svg.replaceChildren();
    return;
  }
  let low = Math.min(...known.map(([, value]) => value));
  let high = Math.max(...known.map(([, value]) => value));
  if (high === low) [low, high] = [low - 0.5, high + 0.5];
  const margin = (high - low) * 0.06;
  [low, high] = [low - margin, high + margin];
  const first = steps[0];
  const last = Math.max(steps[steps.length - 1], first + 1);
  const x = (step) => BOX.left + ((step - first) / (last - first)) * (BOX.width - BOX.left - BOX.right);
  const y = (value) => BOX.height - BOX.bottom - ((value - low) / (high - low)) * (BOX.height - BOX.top - BOX.bottom);
  const parts = [];
  for (const value of ticks(low, high, 5)) {
    parts.push(draw("line", { class: "grid", x1: BOX.left, x2: BOX.width - BOX.right, y1: y(value), y2: y(value) }));
    parts.push(draw("text", { class: "tick", x: BOX.left - 8, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  }
  for (const step of ticks(first, last, 8).filter(Number.isInteger)) {
    parts.push(draw("text", { class: "tick", x: x(step), y: BOX.height - 12, "text-anchor": "middle" }, String(step)));
  }
  let path = "";
  let open = false;
  for (const [step, value] of points) {
    if (value === null) { open = false; continue; }
    path += `${open ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
    open = true;
  }
  parts.push(draw("path", { class: "line", d: path }));
  if (known.length <= 60) for (const [step, value] of known) parts.push(draw("circle", { class: "point", r: 2.5, cx: x(step), cy: y(value) }));
  const mark = draw("circle", { class: "mark", r: 4.5, visibility: "hidden" });
  const label = draw("text", { class: "value", x: BOX.width - BOX.right, y: 12, "text-anchor": "end" });
  const say = ([step, value]) => { label.textContent = `step ${step}: ${short(value)}`; };
  say(known[known.length - 1]);
  svg.onpointermove = (event) => {
    const inside = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const near = known.reduce((best, point) => (Math.abs(x(point[0]) - inside.x) < Math.abs(x(best[0]) - inside.x) ? point : best));
    mark.setAttribute("cx", x(near[0]));
    mark.setAttribute("cy", y(near[1]));
    mark.setAttribute("visibility", "visible");
    say(near);
  };
  svg.onpointerleave = () => { mark.setAttribute("visibility", "hidden"); say(known[known.length - 1]); };
  svg.replaceChildren(...parts, mark, label);
}
