// The page of plans: their time against memory, the best by part, a table to sort and filter, and what was refused.

const PAGE = 100, SVG = "http://www.w3.org/2000/svg";
let picked = -1;
const onPick = [];
function isSwitch(name) {              // whether a setting is on or off
  return (data.plans.switches || ["sp", "overlap"]).includes(name);      // older files do not say it
}
function pick(plan) {
  picked = plan;
  onPick.forEach(act => act());
}

function valueOf(name, plan) {        // of a setting, as a word or a number
  const value = data.plans.columns[name][plan], words = data.plans.words[name];
  return words ? words[value] : isSwitch(name) ? (value ? "yes" : "no") : value;
}
function splitOf(plan) {
  return data.plans.names.filter(name => !isSwitch(name) || data.plans.columns[name][plan])
    .map(name => isSwitch(name) ? name : name + "=" + valueOf(name, plan)).join(" ");
}
const gigabytes = value => (value / 1e9).toPrecision(3) + " GB";

function ticks(low, high, steps = [1, 2, 5]) {           // round numbers of a logarithmic axis
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const n of steps) if (n * 10 ** power >= low && n * 10 ** power <= high) found.push(n * 10 ** power);
  if (found.length < 2 && steps.length < 9) return ticks(low, high, [1, 2, 3, 4, 5, 6, 7, 8, 9]);
  return found.length > 9 ? found.filter(n => Math.abs(Math.log10(n) - Math.round(Math.log10(n))) < 1e-9) : found;
}

function front(given) {
  const svg = $("front"), tip = $("front-tip"), {seconds: time, peaks} = data.plans;
  let places = [];
  function draw() {
    const width = svg.clientWidth, height = 380, left = 74, right = 18, top = 14, bottom = height - 40;
    const add = (kind, given, text) => {
      const made = document.createElementNS(SVG, kind);
      for (const [name, value] of Object.entries(given)) made.setAttribute(name, value);
      if (text !== undefined) made.textContent = text;
      svg.append(made);
    };
    const range = (values, more) => {
      let low = Infinity, high = -Infinity;
      for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
      return [low / more, high * more];
    };
    svg.setAttribute("viewBox", "0 0 " + width + " " + height);
    svg.replaceChildren();
    const [x0, x1] = range(peaks, 1.1), [y0, y1] = range(time, 1.05);
    const x = value => left + Math.log(value / x0) / Math.log(x1 / x0) * (width - left - right);
    const y = value => bottom - Math.log(value / y0) / Math.log(y1 / y0) * (bottom - top);
    let grid = "", taken = -Infinity;                    // a label that would touch the one before it is left out
    for (const value of ticks(x0, x1)) {
      const label = gigabytes(value), half = 3.8 * label.length;
      grid += "M" + x(value) + " " + top + "V" + bottom;
      if (x(value) - half < taken) continue;
      add("text", {x: x(value), y: bottom + 17, "text-anchor": "middle"}, label);
      taken = x(value) + half;
    }
    for (const value of ticks(y0, y1)) {
      grid += "M" + left + " " + y(value) + "H" + (width - right);
      add("text", {x: left - 8, y: y(value) + 4, "text-anchor": "end"}, seconds(value));
    }
    add("path", {class: "axis", d: grid});
    add("text", {x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle"},
        "memory of the fullest device");
    places = time.map((value, i) => [x(peaks[i]), y(value)]);
    add("path", {class: "all", "stroke-width": places.length > 500 ? 3 : 6, d: places.map(([a, b]) => "M" + a.toFixed(1) + " " + b.toFixed(1) + "h0").join("")});
    add("path", {class: "line", d: given.map((plan, i) => (i ? "L" : "M") + places[plan].join(" ")).join("")});
    add("path", {class: "best", d: given.map(plan => "M" + places[plan].join(" ") + "h0").join("")});
    if (picked >= 0) add("circle", {class: "pick", cx: places[picked][0], cy: places[picked][1], r: 8});
  }
  function nearest(event) {
    const box = svg.getBoundingClientRect(), a = event.clientX - box.left, b = event.clientY - box.top;
    let best = -1, least = 30 ** 2;
    places.forEach(([x, y], i) => {
      const far = (x - a) ** 2 + (y - b) ** 2;
      if (far < least) { least = far; best = i; }
    });
    return best;
  }
  svg.addEventListener("pointermove", event => {
    const plan = nearest(event);
    tip.hidden = plan < 0;
    if (plan < 0) return;
    tip.textContent = seconds(time[plan]) + ", " + gigabytes(peaks[plan]) + "\n" + splitOf(plan);
    const [x, y] = places[plan];
    tip.style.left = clamp(x + 14, 0, Math.max(0, svg.clientWidth - tip.offsetWidth - 4)) + "px";
    tip.style.top = Math.max(0, y - tip.offsetHeight - 10) + "px";
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; });
  svg.addEventListener("click", event => { const plan = nearest(event); if (plan >= 0) pick(plan); });
  onPick.push(draw);
  redraws.push(draw);
  draw();
}

function best(given) {
  const names = given.names, slowest = given.rows.reduce((most, row) => Math.max(most, row.seconds), 0);
  for (const name of names) {
    const item = element("li");
    item.append(element("span", undefined, "swatch q-" + name), given.labels[name] || name);
    $("parts-legend").append(item);
  }
  const head = element("tr"), top = element("thead"), body = element("tbody");
  for (const [text, look] of [["", ""], ["plan", ""], ["step", "number"], ["MFU", "number"], ["memory", "number"],
                              ["by part", ""]]) head.append(element("th", text, look));
  top.append(head);
  given.rows.forEach((row, i) => {
    const line = element("tr"), cell = element("td", undefined, "stack"), bar = element("div");
    bar.style.width = 100 * row.seconds / slowest + "%";
    for (const name of names) {
      if (!(row.parts[name] > 0)) continue;
      const piece = element("i", undefined, "q-" + name);
      piece.style.width = 100 * row.parts[name] / row.seconds + "%";
      piece.title = (given.labels[name] || name) + " " + seconds(row.parts[name]) + ", "
        + (100 * row.parts[name] / row.seconds).toFixed(1) + "%";
      bar.append(piece);
    }
    cell.append(bar);
    line.append(element("td", i + 1, "number"), element("td", row.split, "split"),
                element("td", seconds(row.seconds), "number"), element("td", (100 * row.mfu).toFixed(1) + "%", "number"),
                element("td", gigabytes(row.peak_bytes), "number"), cell);
    body.append(line);
  });
  $("parts").replaceChildren(top, body);
}

function plans(given) {
  const heads = ["#", "step", "memory", ...given.names], count = given.seconds.length;
  const look = name => given.words[name] || isSwitch(name) ? "" : "number";
  const order = Uint32Array.from({length: count}, (_, i) => i);
  let shown = order, sorted = 0, upwards = true, start = 0;
  const key = column => column === 0 ? i => i : column === 1 ? i => given.seconds[i]
    : column === 2 ? i => given.peaks[i] : i => given.columns[heads[column]][i];
  function sort() {
    const of = key(sorted), values = Float64Array.from({length: count}, (_, i) => of(i)), sign = upwards ? 1 : -1;
    order.sort((a, b) => sign * (values[a] - values[b]) || a - b);
    filter();
  }
  function test(word) {               // whether a plan has what a word of the filter says
    const found = /^([a-z]+)(=|<|>)(.+)$/.exec(word);
    if (isSwitch(word) && given.columns[word]) return i => given.columns[word][i] === 1;
    if (!found || !given.names.includes(found[1])) return i => splitOf(i).includes(word);
    const [, name, sign, text] = found, words = given.words[name];
    if (words) return i => sign === "=" && words[given.columns[name][i]].startsWith(text);
    const number = text === "yes" ? 1 : text === "no" ? 0 : Number(text);
    return sign === "=" ? i => given.columns[name][i] === number
      : sign === "<" ? i => given.columns[name][i] < number : i => given.columns[name][i] > number;
  }
  function filter() {
    const words = $("filter").value.trim().split(/\s+/).filter(Boolean).map(test);
    shown = words.length ? order.filter(i => words.every(has => has(i))) : order;
    start = 0;
    render();
  }
  function render() {
    const head = element("tr"), top = element("thead"), body = element("tbody");
    heads.forEach((text, column) => {
      const cell = element("th", undefined, look(text)), button = element("button", text);
      button.type = "button";
      button.addEventListener("click", () => {
        upwards = column === sorted ? !upwards : true;
        sorted = column;
        const begun = performance.now();
        sort();
        document.documentElement.dataset.sorted = (performance.now() - begun).toFixed(1);
      });
      if (column === sorted) cell.setAttribute("aria-sort", upwards ? "ascending" : "descending");
      cell.append(button);
      head.append(cell);
    });
    top.append(head);
    for (const i of shown.subarray(start, start + PAGE)) {
      const row = element("tr", undefined, i === picked ? "pick" : "");
      row.append(element("td", i + 1, "number"),
                 element("td", (given.full[i] ? "" : "\u2265 ") + seconds(given.seconds[i]), "number"),
                 element("td", gigabytes(given.peaks[i]), "number"));
      for (const name of given.names) row.append(element("td", valueOf(name, i), look(name)));
      row.addEventListener("click", () => pick(i));
      body.append(row);
    }
    $("plans").replaceChildren(top, body);
    $("shown").textContent = shown.length ? (start + 1) + " to " + Math.min(start + PAGE, shown.length) + " of "
      + shown.length : "no plan has this";
    $("before").disabled = start === 0;
    $("after").disabled = start + PAGE >= shown.length;
  }
  $("filter").addEventListener("input", filter);
  $("before").addEventListener("click", () => { start -= PAGE; render(); });
  $("after").addEventListener("click", () => { start += PAGE; render(); });
  onPick.push(() => {
    const place = shown.indexOf(picked);
    if (place >= 0) start = PAGE * Math.floor(place / PAGE);
    render();
  });
  render();
}

function notes(given) {
  $("notes").append(...given.map(text => element("p", text)));
}

function refused(given) {
  table($("refused"), ["reason", "combinations"], given, 1);
}

function answers(given) {
  for (const [text, command] of given) {
    $("answers").append(element("p", text));
    if (command) $("answers").append(element("code", command, "command"));
  }
}
