// The head of the page, and its sections: those whose data are there.

for (const sentence of data.verdict) $("verdict").append(element("p", sentence));
for (const [label, value] of data.facts) {
  const pair = element("div");
  pair.append(element("dt", label), element("dd", value));
  $("facts").append(pair);
}
for (const sentence of data.left_out) $("left-out").append(element("p", sentence));

for (const [key, draw] of Object.entries(SECTIONS)) {
  if (!data[key]) continue;
  document.querySelector("[data-section=" + key + "]").hidden = false;
  draw(data[key]);
}
const again = () => redraws.forEach(redraw => redraw());
window.addEventListener("resize", again);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
document.documentElement.dataset.ready = "yes";
