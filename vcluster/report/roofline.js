// The roofline: computes by flops per byte, log-log, below the peak and the bandwidth of the hardware.

function quantity(value, unit) {
  const size = Math.abs(value);
  const [factor, prefix] = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""], [1e-3, "m"]]
    .find(([least]) => size >= least) || [1e-6, "u"];
  return (value / factor).toPrecision(3) + " " + prefix + unit;
}

function roofline(given) {
  const canvas = $("roof"), tip = $("roof-tip"), points = given.points, peaks = given.roofs.map(roof => roof.peak);
  const most = points.reduce((most, point) => Math.max(most, point.seconds), 0);
  const height = 380, left = 78, bottom = height - 40, top = 18;
  let chosen = -1, x, y, width;
  const xs = points.map(point => point.x), ys = points.map(point => point.y);
  const ridges = given.bandwidth ? peaks.map(peak => peak / given.bandwidth) : [];
  const least = (...of) => of.reduce((a, b) => Math.min(a, b)), greatest = (...of) => -least(...of.map(a => -a));
  const low = Math.floor(Math.log10(least(...xs, ...ridges)) - .3), down = Math.floor(Math.log10(least(...ys)) - .3);
  const high = Math.ceil(Math.log10(greatest(...xs, ...ridges)) + .3);
  const up = Math.ceil(Math.log10(greatest(...ys, ...peaks)) + .2);
  const radius = point => 3.5 + 8 * Math.sqrt(point.seconds / (most || 1));

  function line(context, x1, y1, x2, y2) {
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x2, y2);
    context.stroke();
  }
  function decades(first, last, room) {
    const by = Math.max(1, Math.ceil((last - first) / room)), found = [];
    for (let power = first; power <= last; power += by) found.push(power);
    return found;
  }
  function draw() {
    let context;
    [context, width] = fitted(canvas, height);
    x = value => left + (Math.log10(value) - low) / (high - low) * (width - left - 16);
    y = value => bottom - (Math.log10(value) - down) / (up - down) * (bottom - top);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.lineWidth = 1;
    for (const power of decades(low, high, (width - left) / 70)) {
      context.strokeStyle = colour("line");
      line(context, x(10 ** power), top, x(10 ** power), bottom);
      context.fillStyle = colour("quiet");
      const text = Math.abs(power) < 5 ? String(Number((10 ** power).toPrecision(1))) : "1e" + power;
      context.fillText(text, clamp(x(10 ** power) - context.measureText(text).width / 2, 0, width - 30), bottom + 12);
    }
    for (const power of decades(down, up, 9)) {
      context.strokeStyle = colour("line");
      line(context, left, y(10 ** power), width - 16, y(10 ** power));
      context.fillStyle = colour("quiet");
      context.fillText(quantity(10 ** power, "flop/s"), 4, y(10 ** power));
    }
    context.fillStyle = colour("quiet");
    context.fillText("flops per byte", width - 100, bottom + 29);
    context.save();
    context.beginPath();
    context.rect(left, top - 12, width - left - 16, bottom - top + 12);
    context.clip();
    context.strokeStyle = colour("ink");
    context.lineWidth = 1.6;
    const end = 10 ** high, begin = 10 ** low, bandwidth = given.bandwidth;
    if (bandwidth) {
      const ridge = Math.max(...peaks) / bandwidth;
      line(context, x(begin), y(begin * bandwidth), x(ridge), y(ridge * bandwidth));
    }
    given.roofs.forEach((roof, i) => {
      context.setLineDash(i ? [7, 4 + 2 * i] : []);
      line(context, x(Math.max(begin, roof.peak / bandwidth)), y(roof.peak), x(end), y(roof.peak));
      context.setLineDash([]);
      const text = roof.dtype + " " + quantity(roof.peak, "flop/s");
      context.fillStyle = colour("ink");
      context.fillText(text, width - 24 - context.measureText(text).width, y(roof.peak) - 8);
    });
    if (bandwidth) {
      const text = quantity(bandwidth, "B/s"), at = clamp(x(begin) + 14, left, width), to = 10 ** (low + (at - left) /
        (width - left - 16) * (high - low)), place = y(to * bandwidth);
      context.fillStyle = colour("ink");
      if (place < bottom - 10) context.fillText(text, at, Math.max(top + 4, place - 14));
    }
    const fills = Object.fromEntries(PARTS.map(part => [part, hatched(context, part)]));
    points.forEach(point => {
      context.beginPath();
      context.arc(x(point.x), y(point.y), radius(point), 0, 2 * Math.PI);
      context.globalAlpha = .8;
      context.fillStyle = fills[point.part];
      context.fill();
      context.globalAlpha = 1;
      context.strokeStyle = colour("ink");
      context.lineWidth = .75;
      context.stroke();
    });
    if (chosen >= 0) {
      context.beginPath();
      context.arc(x(xs[chosen]), y(ys[chosen]), radius(points[chosen]) + 4, 0, 2 * Math.PI);
      context.strokeStyle = colour("accent");
      context.lineWidth = 2.5;
      context.stroke();
    }
    context.restore();
  }
  function told(point) {
    const roof = given.bandwidth ? Math.min(Math.max(...peaks), point.x * given.bandwidth) : 0;
    const bound = roof < Math.max(...peaks) ? "memory" : "arithmetic";
    return [point.name + " (" + (LABELS[point.part] || point.part) + ")",
      point.count.toLocaleString("en") + (point.count === 1 ? " time, " : " times, ") + seconds(point.seconds) + " in all",
      point.x.toPrecision(3) + " flops per byte, " + quantity(point.y, "flop/s"),
      ...(roof ? [(100 * point.y / roof).toPrecision(3) + "% of the roof there, which is that of " + bound] : [])];
  }
  function choose(i) {
    chosen = clamp(i, 0, points.length - 1);
    $("roof-said").textContent = "point " + (chosen + 1) + " of " + points.length + ": "
      + told(points[chosen]).join("; ");
    draw();
  }
  function at(event) {
    const box = canvas.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    let best = -1, near = Infinity;
    points.forEach((point, i) => {
      const far = Math.hypot(x(point.x) - px, y(point.y) - py);
      if (far < near && far < radius(point) + 5) { best = i; near = far; }
    });
    return [best, px, py];
  }
  canvas.addEventListener("pointermove", event => {
    const [i, px, py] = at(event);
    tip.hidden = i < 0;
    if (i < 0) return;
    tip.textContent = told(points[i]).join("\n");
    tip.style.left = clamp(px + 14, 0, Math.max(0, width - tip.offsetWidth)) + "px";
    tip.style.top = py + 18 + "px";
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("click", event => { const [i] = at(event); if (i >= 0) choose(i); });
  canvas.addEventListener("keydown", event => {
    const to = {ArrowRight: chosen + 1, n: chosen + 1, ArrowLeft: chosen - 1, p: chosen - 1, Home: 0,
      End: points.length - 1};
    if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(to, event.key)) return;
    event.preventDefault();
    choose(to[event.key]);
  });
  const words = ["The roof is that of " + given.hardware + "."];
  if (given.compute === "measured") words.push("Seconds are CPU seconds of the machine that ran it.");
  words.push("A point is " + (given.of === points.length ? "a compute" : "computes that look alike")
    + ", the larger the more time it takes in all.");
  if (given.more) words.push(given.more.toLocaleString("en") + " more points, of least time, are left out.");
  if (given.without) words.push(given.without.toLocaleString("en")
    + " computes without flops, bytes or a duration have no place here.");
  $("roof-words").textContent = words.join(" ");
  canvas.setAttribute("aria-label", "Roofline, " + points.length + " points");
  document.documentElement.dataset.points = points.length;
  redraws.push(draw);
  draw();
}

function measured(given) {            // each row: what it is, and its two times as bars of one scale
  const body = element("tbody"), head = element("tr");
  ["", "virtual", "wall", "virtual / wall", "times"].forEach((text, i) => {
    const cell = element("th", undefined, i ? "number" : "");
    if (i === 1 || i === 2) cell.append(element("span", undefined, "swatch c-" + text));
    cell.append(text);
    head.append(cell);
  });
  head.insertBefore(element("th", "side by side"), head.children[1]);
  const top = element("thead");
  top.append(head);
  given.rows.forEach((row, i) => {
    const line = element("tr", undefined, i ? "" : "all"), name = element("th", row.name), pair = element("td", undefined,
      "pair"), longest = Math.max(row.virtual, row.wall);
    name.scope = "row";
    for (const clock of ["virtual", "wall"]) {
      const bar = element("i", undefined, "c-" + clock);
      bar.style.width = (longest ? 100 * row[clock] / longest : 0) + "%";
      bar.title = clock + " " + seconds(row[clock]);
      pair.append(bar);
    }
    line.append(name, pair, element("td", seconds(row.virtual), "number"), element("td", seconds(row.wall), "number"),
      element("td", row.wall ? (row.virtual / row.wall).toPrecision(3) : "-", "number"),
      element("td", row.count.toLocaleString("en"), "number"));
    body.append(line);
  });
  $("measured").replaceChildren(top, body);
  for (const sentence of given.words) $("measured-words").append(element("p", sentence, "quiet"));
  if (given.more) $("measured-words").append(element("p", given.more + " more are left out.", "quiet"));
}
