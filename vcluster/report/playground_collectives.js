// The state in the address, what both sections share, and the section of collectives.

const state = new URLSearchParams(location.hash.slice(1));
function keep(id) {
  state.set(id, $(id).value);
  history.replaceState(null, "", "#" + state);
}
function control(id, draw) {                         // a control whose value the address keeps
  if (state.has(id)) $(id).value = state.get(id);
  if ($(id).selectedIndex === -1) $(id).selectedIndex = 0;
  $(id).addEventListener("input", () => { keep(id); draw(); });
}
function choices(id, names, wanted) {                // fills a select, and keeps its choice if it is still there
  const before = wanted ?? $(id).value;
  $(id).replaceChildren(...names.map(name => new Option(name.replaceAll("_", " "), name)));
  $(id).value = names.includes(before) ? before : names[0];
}
function shape(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
function say(id, text) {              // no line ends between a number and its unit
  $(id).textContent = text.replace(/(\d) (?=(?:[um]?s|[KMG]?i?B|[kMGT]?flops?)\b)/g, "$1\u00a0");
}
function rows(table, head, lines) {
  const line = (tag, cells) => {
    const made = element("tr");
    cells.forEach((cell, i) => {
      const put = element(tag === "td" && i === 0 ? "th" : tag, cell);
      if (put.tagName === "TH") put.scope = tag === "th" ? "col" : "row";
      made.append(put);
    });
    return made;
  };
  const [top, body] = [element("thead"), element("tbody")];
  top.append(line("th", head));
  body.append(...lines.map(cells => line("td", cells)));
  table.replaceChildren(top, body);
}

function collectives(tables) {
  const kinds = Object.keys(tables), now = id => $(id).value;
  const table = () => tables[now("kind")][now("algorithm")][now("ranks")];
  const pieces = message => {
    const words = [];
    for (let i = 3; i < message.length; i += 2)
      words.push(message[i + 1] === 1 ? message[i] : message[i] + "-" + (message[i] + message[i + 1] - 1));
    return words.join(", ");
  };
  function draw() {
    choices("algorithm", Object.keys(tables[now("kind")]));
    choices("ranks", Object.keys(tables[now("kind")][now("algorithm")]));
    const chosen = table(), ranks = Number(now("ranks")), size = 2 ** Number(now("size"));
    const latency = Number(now("latency")) * 1e-6, perByte = 1e-9 / Number(now("bandwidth"));
    const last = chosen[1].length;
    $("step").max = last;
    const number = Number(now("step")), step = number ? chosen[1][number - 1] : [];
    const bytesBefore = received(chosen, ranks, number, size), piece = size / chosen[0];
    const total = collectiveSeconds(chosen, size, latency, perByte);
    $("size-said").textContent = bytes(size);
    $("latency-said").textContent = now("latency") + " us";
    $("bandwidth-said").textContent = now("bandwidth") + " GB/s";
    $("step-said").textContent = number + " of " + last;
    say("ring-said", `Step ${number} of ${last}: ${step.length} messages; the buffer has ${chosen[0]} ` +
      `pieces of ${bytes(piece)}; the most that a rank has received so far is ${bytes(Math.max(...bytesBefore))}. ` +
      `All steps take ${seconds(total)}.`);
    picture(ranks, step);
    rows($("messages"), ["rank", "sends (pieces to rank)", "receives (pieces from rank)", "received so far"],
      bytesBefore.map((had, rank) => [String(rank),
        step.filter(m => m[0] === rank).map(m => `${pieces(m)} to ${m[1]}`).join("; ") || "nothing",
        step.filter(m => m[1] === rank).map(m => `${pieces(m)} from ${m[0]}, ${m[2] ? "adds" : "copies"}`).join("; ")
          || "nothing", bytes(had)]));
  }
  function picture(ranks, step) {
    const at = rank => [Math.sin(2 * Math.PI * rank / ranks), -Math.cos(2 * Math.PI * rank / ranks)]
      .map(v => 180 + 150 * v), radius = ranks > 16 ? 11 : 15;
    const drawn = step.map(([source, target, adds]) => {
      const [a, b] = [at(source), at(target)], length = Math.hypot(b[0] - a[0], b[1] - a[1]) || 1;
      const cut = i => (b[i] - a[i]) / length * (radius + 3);
      return shape("line", {x1: a[0] + cut(0), y1: a[1] + cut(1), x2: b[0] - cut(0), y2: b[1] - cut(1),
        class: adds ? "adds" : "copies", "marker-end": "url(#head)"});
    });
    for (let rank = 0; rank < ranks; rank++) {
      const [x, y] = at(rank);
      drawn.push(shape("circle", {cx: x, cy: y, r: radius}),
        shape("text", {x, y: y + 4, "text-anchor": "middle"}, rank));
    }
    $("arrows").replaceChildren(...drawn);
  }
  choices("kind", kinds, state.get("kind"));
  choices("algorithm", Object.keys(tables[now("kind")]), state.get("algorithm"));
  choices("ranks", Object.keys(tables[now("kind")][now("algorithm")]), state.get("ranks") ?? "4");
  $("step").max = table()[1].length;
  for (const id of ["kind", "algorithm", "ranks", "size", "latency", "bandwidth", "step"]) control(id, draw);
  draw();
}
