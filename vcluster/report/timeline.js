// The timeline on a canvas: zoom, pan, hover, keys, the critical path.

function timeline(given) {
  const canvas = $("bars"), tip = $("tip"), makespan = data.makespan;
  const [rank, lane, part, start, duration, waited] =
    ["rank", "lane", "part", "start", "duration", "waited"].map(name => unpack(given[name]));
  const path = {rank: unpack(given.path.rank), start: unpack(given.path.start), end: unpack(given.path.end)};
  const details = Object.entries(given.details).map(([name, column]) =>
    column.values ? [name, (index => i => column.values[index[i]])(unpack(column.index))]
      : [name, (numbers => i => numbers[i])(unpack(column))]);
  const detail = Object.fromEntries(details);
  const bars = given.count, devices = data.ranks.length;
  document.documentElement.dataset.bars = bars;

  // Rows: a device has one for compute, one for what holds it, and one for each thing under way beside.
  const rows = [], top = 26, small = devices > 24;
  const tall = small ? 9 : 18, low = small ? 5 : 10, gap = small ? 4 : 8;
  const extent = new Float64Array(2 * devices);       // of each device: its top and its bottom
  let y = 0;
  for (let r = 0, i = 0; r < devices; r++) {
    extent[2 * r] = y;
    for (let k = 0; k < 2 || (i < bars && rank[i] === r); k++) {
      const begin = i;
      while (i < bars && rank[i] === r && lane[i] === k) i++;
      if (k > 1 && begin === i) continue;
      rows.push({rank: r, lane: k, begin, end: i, y, height: k ? low : tall});
      y += (k ? low : tall) + 1;
    }
    extent[2 * r + 1] = y;
    y += gap;
  }
  const full = y, height = top + Math.min(full, 560) + 4;
  let from = 0, to = makespan, scroll = 0, chosen = -1, row = 0, gutter = 96, width = 0, looks = null, wanted = false;

  const closest = makespan * 1e-9;
  function show(a, b) {
    let length = clamp(b - a, closest, makespan);
    if (!(length > 0)) length = makespan;
    from = clamp(a, 0, makespan - length);
    to = from + length;
    redraw();
  }
  const zoom = (factor, at = (from + to) / 2) => show(at - (at - from) * factor, at + (to - at) * factor);
  const pan = part => show(from + (to - from) * part, to + (to - from) * part);
  function roll(by) { scroll = clamp(scroll + by, 0, Math.max(0, full - (height - top - 4))); redraw(); }
  const x = time => gutter + (time - from) / (to - from) * (width - gutter);
  const time = x => from + (x - gutter) / (width - gutter) * (to - from);

  function first(row, time) {         // the first bar of a row that ends after the time: they do not overlap
    let low = row.begin, high = row.end;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (start[middle] + duration[middle] <= time) low = middle + 1; else high = middle;
    }
    return low;
  }
  const name = i => detail.name ? detail.name(i) : "";

  // Bars narrower than NARROW pixels are added up by pixel, and a pixel shows its largest part, as strong as it is
  // full: a row of them is one line of an image, stretched.  So a frame costs no more for a million bars than for thousands.
  const NARROW = 4, strip = document.createElement("canvas");
  let cover = [], pixels = null;
  function stripes(wide) {
    if (strip.width === wide && pixels) return;
    strip.width = wide;
    strip.height = 1;
    cover = PARTS.map(() => new Float32Array(wide));
    pixels = strip.getContext("2d").createImageData(wide, 1);
  }
  function paintStripes(context, row, at) {
    const wide = strip.width, out = pixels.data;
    for (let p = 0; p < wide; p++) {
      let most = 0, sum = 0;
      for (let k = 0; k < cover.length; k++) {
        sum += cover[k][p];
        if (cover[k][p] > cover[most][p]) most = k;
      }
      for (let c = 0; c < 3; c++) out[4 * p + c] = looks.rgb[most][c];
      out[4 * p + 3] = sum > 0 ? 255 * clamp(sum, .25, 1) : 0;
    }
    for (const part of cover) part.fill(0);
    strip.getContext("2d").putImageData(pixels, 0, 0);
    context.drawImage(strip, 0, 0, wide, 1, gutter, at, wide, row.height);
  }
  function spread(part, left, right) {        // adds a stretch of the row, in pixels from the gutter, to its pixels
    const line = cover[part], last = line.length - 1;
    for (let p = Math.max(0, Math.floor(left)); p <= last && p < right; p++)
      line[p] += Math.min(right, p + 1) - Math.max(left, p);
  }

  function drawRow(context, row) {
    const at = top + row.y - scroll, scale = (width - gutter) / (to - from), bubble = PARTS.indexOf("bubble");
    const large = [];
    let narrow = false;
    for (let i = first(row, from); i < row.end && start[i] < to; i++) {
      const wide = duration[i] * scale;
      if (wide >= NARROW) { large.push(i); continue; }
      const left = (start[i] - from) * scale, moved = left + waited[i] * scale;
      if (moved > left) spread(bubble, left, moved);
      spread(part[i], moved, left + wide);
      narrow = true;
    }
    if (narrow) paintStripes(context, row, at);
    for (const i of large) drawBar(context, row, i, at, scale, bubble);
  }
  function drawBar(context, row, i, at, scale, bubble) {
    const left = (start[i] - from) * scale + gutter, wide = duration[i] * scale;
    const begin = Math.max(left, gutter), end = Math.min(left + wide, width);
    const moved = clamp(left + waited[i] * scale, begin, end);
    if (moved > begin) {
      context.fillStyle = looks.plain[bubble];
      context.fillRect(begin, at, moved - begin, row.height);
      context.fillStyle = looks.quiet;
      context.fillRect(begin, at + row.height / 2 - .5, moved - begin, 1);
    }
    if (end > moved) {
      context.fillStyle = wide < 8 ? looks.plain[part[i]] : looks.fill[part[i]];
      context.fillRect(moved, at, Math.max(end - moved, .5), row.height);
    }
    context.fillStyle = looks.paper;  // a seam between neighbours
    context.fillRect(left + wide - .5, at, .5, row.height);
    if (end - begin < 22 || row.height < 13) return;
    const text = name(i), room = Math.floor((end - begin - 4) / 6.4), shown = text.slice(0, room);
    if (shown.length < 2 || (shown.length < text.length && room < 4)) return;
    const length = context.measureText(shown).width;
    context.fillStyle = looks.plain[part[i]];         // a plate, so that no hatching runs through the letters
    context.fillRect(begin + 2, at + 2, Math.min(length + 3, end - begin - 3), row.height - 4);
    context.fillStyle = looks.on;
    context.fillText(shown, begin + 3, at + row.height / 2 + .5);
  }
  function drawRuler(context) {
    const longest = to - from, each = step(longest, (width - gutter) / 96);
    context.fillStyle = looks.quiet;
    context.strokeStyle = looks.line;
    context.lineWidth = 1;
    const places = Math.max(0, -Math.floor(Math.log10(each / scaleOf(to)[0]) + 1e-9));
    for (let n = Math.ceil(from / each); n * each <= to; n++) {
      const at = Math.round(x(n * each)) + .5;
      context.beginPath();
      context.moveTo(at, top - 6);
      context.lineTo(at, height);
      context.stroke();
      const [unit, word] = scaleOf(to), text = (n * each / unit).toFixed(Math.min(places, 12)) + " " + word;
      if (at + context.measureText(text).width + 4 < width) context.fillText(text, at + 3, 12);
    }
  }
  function scaleOf(longest) {
    return longest >= 1 ? [1, "s"] : longest >= 1e-3 ? [1e-3, "ms"] : longest >= 1e-6 ? [1e-6, "us"] : [1e-9, "ns"];
  }
  function drawPath(context) {
    let low = 0, high = path.end.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (path.end[middle] <= from) low = middle + 1; else high = middle;
    }
    context.strokeStyle = looks.path;
    context.lineWidth = 2;
    context.beginPath();
    let drawn = -2;
    for (let i = Math.max(low - 1, 0); i < path.end.length && path.start[i] <= to; i++) {
      const left = Math.max(x(path.start[i]), gutter), right = Math.min(Math.max(x(path.end[i]), gutter), width);
      const level = top + extent[2 * path.rank[i]] - scroll - 2;
      if (i > low && path.rank[i] !== path.rank[i - 1] && left - drawn > 1) {
        context.moveTo(Math.max(x(path.end[i - 1]), gutter), top + extent[2 * path.rank[i - 1]] - scroll - 2);
        context.lineTo(left, level);
        drawn = left;
      }
      if (right - left > .3) { context.moveTo(left, level); context.lineTo(right, level); }
    }
    context.stroke();
  }
  function draw() {
    wanted = false;
    const [context, wide] = fitted(canvas, height);
    width = wide;
    gutter = width < 600 ? 62 : 118;
    if (!looks) looks = {fill: PARTS.map(part => hatched(context, part)), plain: PARTS.map(colour), on: colour("on"),
      paper: colour("paper"), quiet: colour("quiet"), rgb: PARTS.map(part => rgb(colour(part))), line: colour("line"), path: colour("path"), ink: colour("ink")};
    stripes(Math.max(1, Math.ceil(width - gutter)));
    context.imageSmoothingEnabled = false;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    drawRuler(context);
    context.save();
    context.beginPath();
    context.rect(0, top - 4, width, height - top + 4);
    context.clip();
    for (const row of rows) {
      const at = top + row.y - scroll;
      if (at > height || at + row.height < top) continue;
      drawRow(context, row);
    }
    context.fillStyle = looks.ink;
    let below = -99;
    for (let r = 0; r < devices; r++) {
      const at = top + extent[2 * r] - scroll + (small ? 5 : 9);
      if (at < below + 12 || at > height) continue;
      below = at;
      const {rank, place} = data.ranks[r];
      context.fillStyle = looks.ink;
      context.fillText("rank " + rank, 6, at);
      if (place && width >= 600 && !small) {
        context.fillStyle = looks.quiet;
        context.fillText(place.length > 19 ? place.slice(0, 18) + "\u2026" : place, 6, at + 13);
      }
    }
    if (full > height - top) {        // how far down the rows are scrolled
      const room = height - top - 8, part = room / full;
      context.fillStyle = looks.quiet;
      context.fillRect(width - 5, top + scroll * part, 3, Math.max(room * part, 12));
    }
    if ($("show-path").checked) {
      context.beginPath();
      context.rect(gutter, top - 4, width - gutter, height - top + 4);
      context.clip();
      drawPath(context);
    }
    if (chosen >= 0) {
      const where = rows.find(row => chosen >= row.begin && chosen < row.end);
      const left = Math.max(x(start[chosen]), gutter);
      const right = Math.min(x(start[chosen] + duration[chosen]), width);
      context.strokeStyle = looks.ink;
      context.lineWidth = 2;
      if (right >= gutter) context.strokeRect(left - 1, top + where.y - scroll - 1, Math.max(right - left, 2) + 2,
        where.height + 2);
    }
    context.restore();
    $("window").textContent = seconds(from) + " to " + seconds(to) + ", " + seconds(to - from) + " of "
      + seconds(makespan);
    const root = document.documentElement.dataset;
    root.from = from;
    root.to = to;
    root.drawn = (Number(root.drawn) || 0) + 1;
  }
  function redraw() { if (!wanted) { wanted = true; requestAnimationFrame(draw); } }

  function told(i) {
    const lines = [], known = key => detail[key] && detail[key](i) !== "" && detail[key](i) === detail[key](i);
    const place = data.ranks[rank[i]];
    const kind = known("kind") ? detail.kind(i) : "";
    lines.push((name(i) || kind) + (kind && kind !== name(i) ? " (" + kind + ")" : ""));
    lines.push("rank " + place.rank + (place.place ? ", " + place.place : "") + "; " + seconds(duration[i]) + " from "
      + seconds(start[i]));
    if (waited[i] > 0) lines.push("waits " + seconds(waited[i]) + " of it for others");
    const words = [PARTS[part[i]] === "communication" ? "" : LABELS[PARTS[part[i]]] || PARTS[part[i]]];
    for (const key of ["stage", "microbatch", "phase", "algorithm", "priced_algorithm", "axes"])
      if (known(key)) words.push(key.replace("_", " ") + " " + detail[key](i));
    if (known("peer")) words.push(detail.peer(i) === -1 ? "with the host" : "with rank " + detail.peer(i));
    if (known("bytes_received") && detail.bytes_received(i)) words.push(bytes(detail.bytes_received(i)) + " received");
    if (known("bytes_sent") && detail.bytes_sent(i)) words.push(bytes(detail.bytes_sent(i)) + " sent");
    if (known("flops") && detail.flops(i)) words.push(detail.flops(i).toPrecision(4) + " flops");
    if (words.some(Boolean)) lines.push(words.filter(Boolean).join(", "));
    if (known("location")) lines.push(detail.location(i));
    return lines;
  }
  function at(px, py) {               // the bar at a place, or near it
    const down = py - top + scroll, time_ = time(px), near = (to - from) / (width - gutter) * 3;
    const row = rows.find(row => down >= row.y - 1 && down < row.y + row.height + 1);
    if (!row || px < gutter) return -1;
    const i = first(row, time_ - near);
    if (i >= row.end || start[i] > time_ + near) return -1;
    let best = i;                     // of several that near, the one below the pointer
    for (let j = i; j < row.end && start[j] <= time_; j++) best = j;
    return best;
  }
  function hover(event) {
    const box = canvas.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    const i = at(px, py);
    tip.hidden = i < 0;
    if (i < 0) return;
    tip.textContent = told(i).join("\n");
    const left = clamp(px + 14, 0, Math.max(0, width - tip.offsetWidth));
    tip.style.left = left + "px";
    tip.style.top = py + 18 + "px";
  }
  function choose(i) {
    chosen = i;
    if (i < 0) return;
    row = rows.findIndex(row => i >= row.begin && i < row.end);
    const length = to - from, end = start[i] + duration[i];
    if (end > to || start[i] < from) from = clamp(start[i] + duration[i] / 2 - length / 2, 0, makespan - length);
    to = from + length;
    const where = rows[row];
    if (where.y < scroll) roll(where.y - scroll);
    if (where.y + where.height > scroll + height - top - 4) roll(where.y + where.height + 8 - scroll - height + top);
    $("said").textContent = told(i).join("; ");
    redraw();
  }
  function along(by) {                // to the next row that has bars
    let next = row;
    do next += by; while (rows[next] && rows[next].begin === rows[next].end);
    if (!rows[next]) return;
    const middle = chosen < 0 ? (from + to) / 2 : start[chosen] + duration[chosen] / 2;
    choose(Math.min(first(rows[next], middle), rows[next].end - 1));
  }
  function beside(by) {
    if (!bars) return;
    if (chosen < 0) {
      const begin = rows.findIndex(row => row.end > row.begin);
      return choose(Math.min(first(rows[begin], from), rows[begin].end - 1));
    }
    choose(clamp(chosen + by, rows[row].begin, rows[row].end - 1));
  }
  const everything = () => show(0, makespan);
  const keys = {"+": () => zoom(1 / 1.5), "=": () => zoom(1 / 1.5), "-": () => zoom(1.5), "_": () => zoom(1.5),
    "0": everything, Home: everything, ArrowLeft: () => pan(-.2), ArrowRight: () => pan(.2),
    ArrowUp: () => along(-1), ArrowDown: () => along(1), PageUp: () => roll(-300), PageDown: () => roll(300),
    n: () => beside(1), p: () => beside(-1),
    z: () => chosen >= 0 && show(start[chosen] - duration[chosen], start[chosen] + 2 * duration[chosen]),
    c: () => { $("show-path").checked = !$("show-path").checked; redraw(); }};
  canvas.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  });
  canvas.addEventListener("wheel", event => {
    event.preventDefault();
    if (event.shiftKey) return roll(event.deltaY || event.deltaX);
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) return pan(event.deltaX / width);
    zoom(1.0015 ** event.deltaY, time(event.clientX - canvas.getBoundingClientRect().left));
  }, {passive: false});
  let held = null;
  canvas.addEventListener("pointerdown", event => {
    held = {x: event.clientX, y: event.clientY, moved: false};
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("held");
  });
  canvas.addEventListener("pointermove", event => {
    if (!held) return hover(event);
    tip.hidden = true;
    const dx = event.clientX - held.x, dy = event.clientY - held.y;
    if (!held.moved && Math.hypot(dx, dy) < 4) return;
    held = {x: event.clientX, y: event.clientY, moved: true};
    const by = dx / (width - gutter) * (to - from);
    show(from - by, to - by);
    roll(-dy);
  });
  canvas.addEventListener("pointerup", event => {
    const box = canvas.getBoundingClientRect();
    if (held && !held.moved) { choose(at(event.clientX - box.left, event.clientY - box.top)); redraw(); }
    held = null;
    canvas.classList.remove("held");
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  document.querySelector("[data-do=in]").onclick = () => zoom(1 / 1.5);
  document.querySelector("[data-do=out]").onclick = () => zoom(1.5);
  document.querySelector("[data-do=fit]").onclick = everything;
  $("show-path").onchange = redraw;
  canvas.setAttribute("aria-label", "Timeline of " + devices + " devices, " + bars + " bars");
  const occurring = new Set(part);
  const named = PARTS.filter((name, p) => occurring.has(p) || name === "bubble");
  for (const name of named) {
    const item = element("li");
    item.append(element("span", undefined, "swatch p-" + name),
      name === "bubble" ? "waits for others" : (LABELS[name] || name).replace("exposed ", ""));
    $("legend").append(item);
  }
  const item = element("li", "\u2014 critical path");
  item.style.color = "var(--path)";
  $("legend").append(item);
  if (given.points) $("legend").append(element("li", given.points.toLocaleString("en") + " events take no time and "
    + "have no bar", "quiet"));
  redraws.push(() => { looks = null; redraw(); });
  redraw();
}
