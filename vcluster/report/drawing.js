// What all sections draw with.  Text reaches the page as text only (textContent, fillText), never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const PARTS = data.parts;
const LABELS = {communication: "exposed communication", other: "other compute",
  bubble: "bubble: waits for others", idle: "idle"};
const redraws = [];

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}
function unpack(packed) {
  const text = atob(packed.data), bytes = new Uint8Array(text.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
  const of = {u1: Uint8Array, i1: Int8Array, u2: Uint16Array, i2: Int16Array, u4: Uint32Array, i4: Int32Array,
    f8: Float64Array};
  return new of[packed.type](bytes.buffer);
}
function digits(value) {
  return Number.isInteger(value) && Math.abs(value) < 1000 ? String(value) : value.toPrecision(3);
}
function seconds(value) {
  if (value === 0) return "0 s";
  const size = Math.abs(value);
  const [factor, unit] = size >= 1 ? [1, "s"] : size >= 1e-3 ? [1e3, "ms"] : size >= 1e-6 ? [1e6, "us"] : [1e9, "ns"];
  return (value * factor).toPrecision(3) + " " + unit;
}
function bytes(value) {
  let unit = 0;
  while (Math.abs(value) >= 1023.5 && unit < 4) { value /= 1024; unit++; }
  return digits(value) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][unit];
}
const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

function fitted(canvas, height) {     // a canvas as sharp as the screen; its context in CSS pixels
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.style.height = height + "px";
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width];
}
function hatched(context, part) {     // the fill of a part: a colour, and lines that tell it without colour
  const fill = colour(part), lines = {backward: "/", recompute: "x", other: "-", communication: "|"}[part];
  if (!lines) return fill;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.fillStyle = fill;
  pen.fillRect(0, 0, 6, 6);
  pen.strokeStyle = colour("hatch");
  pen.lineWidth = 1.4;
  pen.beginPath();
  if (lines === "/" || lines === "x") for (const x of [-6, 0, 6]) { pen.moveTo(x, 6); pen.lineTo(x + 6, 0); }
  if (lines === "x") for (const x of [-6, 0, 6]) { pen.moveTo(x, 0); pen.lineTo(x + 6, 6); }
  if (lines === "-") { pen.moveTo(0, 3); pen.lineTo(6, 3); }
  if (lines === "|") { pen.moveTo(3, 0); pen.lineTo(3, 6); }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}
function rgb(fill) {                  // of any colour of CSS
  const dot = document.createElement("canvas");
  dot.width = dot.height = 1;
  const pen = dot.getContext("2d", {willReadFrequently: true});
  pen.fillStyle = fill;
  pen.fillRect(0, 0, 1, 1);
  return pen.getImageData(0, 0, 1, 1).data;
}
function step(longest, most) {        // a round step, so that at most so many cover the longest
  const least = longest / Math.max(most, 1), power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map(n => n * power).find(n => n >= least) || 10 * power;
}
function table(into, head, rows, words) {
  const header = element("tr");
  head.forEach((text, i) => header.append(element("th", text, i < words ? "" : "number")));
  const body = element("tbody");
  for (const cells of rows) {
    const row = element("tr");
    cells.forEach((text, i) => row.append(element("td", text, i < words ? "" : "number")));
    body.append(row);
  }
  const top = element("thead");
  top.append(header);
  into.replaceChildren(top, body);
}
