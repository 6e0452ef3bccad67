// Where the time goes, the collectives, who sends to whom.

function split(given) {
  const occurring = PARTS.filter((part, p) => given.total[p] > 0);
  function start(table) {             // with its heads; its body
    const head = element("tr"), top = element("thead"), body = element("tbody");
    head.append(element("th", "device"), element("th", "share of the makespan"));
    occurring.forEach(part => {
      const cell = element("th", undefined, "number");
      cell.append(element("span", undefined, "swatch p-" + part), part === "communication" ? "exposed" : part);
      head.append(cell);
    });
    top.append(head);
    table.replaceChildren(top, body);
    return body;
  }
  function add(body, label, parts, whole, className) {
    const row = element("tr", undefined, className), cell = element("td", undefined, "stack"), bar = element("div");
    PARTS.forEach((part, p) => {
      if (!(parts[p] > 0)) return;
      const piece = element("i", undefined, "p-" + part);
      piece.style.width = 100 * parts[p] / whole + "%";
      piece.title = part + " " + seconds(parts[p]) + ", " + (100 * parts[p] / whole).toFixed(1) + "%";
      bar.append(piece);
    });
    cell.append(bar);
    const header = element("th", label);
    header.scope = "row";
    row.append(header, cell);
    occurring.forEach(part => row.append(element("td", seconds(parts[PARTS.indexOf(part)]), "number")));
    body.append(row);
  }
  const top = start($("split"));
  add(top, "all", given.total, given.whole, "all");
  const shares = element("tr", undefined, "quiet");
  shares.append(element("th", ""), element("td", ""));
  occurring.forEach(part => shares.append(
    element("td", (100 * given.total[PARTS.indexOf(part)] / given.whole).toFixed(1) + "%", "number")));
  top.append(shares);
  function device(body, r, word) {
    const {rank, place} = data.ranks[r];
    add(body, (word ? word + ": " : "") + "rank " + rank + (place ? " \u00b7 " + place : ""), given.rows[r],
        data.makespan);
  }
  if (!given.folds) {
    given.rows.forEach((parts, r) => device(top, r));
    return;
  }
  given.outside.forEach(([word, r]) => device(top, r, word));
  const inside = start($("split-ranks"));
  given.rows.forEach((parts, r) => device(inside, r));
  $("split-folded").hidden = false;
  $("split-folded").firstElementChild.textContent = given.rows.length + " ranks";
}

function collectives(rows) {
  table($("collectives"), ["collective", "algorithm", "axes", "count", "bytes", "time", "bus bandwidth"], rows, 3);
}

function matrix(given) {
  given.of.forEach((one, i) => $("axis").append(new Option(one.label + ", " + one.total, i)));
  const mix = (share, name) => "color-mix(in srgb, " + colour(name) + " " + Math.round(100 * share) + "%, "
    + colour("paper") + ")";
  function shown() {
    const {cells, label} = given.of[$("axis").value || 0], size = given.size;
    const most = cells.reduce((most, cell) => Math.max(most, cell[2]), 0);
    const top = [...cells].sort((a, b) => b[2] - a[2])[0];
    $("matrix-said").textContent = cells.length + " pairs; most from rank " + top[0] + " to rank " + top[1] + ": "
      + bytes(top[2]);
    if (size <= 16) {
      const made = element("table"), head = element("tr");
      head.append(element("th", "from \\ to"));
      for (let r = 0; r < size; r++) head.append(element("th", r));
      made.append(head);
      const amounts = new Map(cells.map(cell => [cell[0] * size + cell[1], cell[2]]));
      for (let r = 0; r < size; r++) {
        const row = element("tr");
        row.append(element("th", r));
        for (let c = 0; c < size; c++) {
          const amount = amounts.get(r * size + c), cell = element("td", amount === undefined ? "" : bytes(amount));
          if (amount !== undefined) cell.style.background = mix(.12 + .4 * amount / most, "communication");
          row.append(cell);
        }
        made.append(row);
      }
      made.setAttribute("aria-label", "Bytes from rank to rank, along " + label);
      $("matrix").replaceChildren(made);
      return;
    }
    const each = Math.max(2, Math.floor(512 / size)), canvas = element("canvas");
    canvas.width = canvas.height = each * size;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", "Bytes from rank (down) to rank (across), along " + label);
    const context = canvas.getContext("2d");
    for (const [source, target, amount] of cells) {
      context.fillStyle = mix(.2 + .8 * amount / most, "communication");
      context.fillRect(target * each, source * each, each, each);
    }
    const amounts = new Map(cells.map(cell => [cell[0] * size + cell[1], cell[2]]));
    canvas.onpointermove = event => {
      const source = Math.floor(event.offsetY / each), target = Math.floor(event.offsetX / each);
      $("matrix-said").textContent = "rank " + source + " to rank " + target + ": "
        + bytes(amounts.get(source * size + target) || 0);
    };
    $("matrix").replaceChildren(canvas);
  }
  $("axis").onchange = shown;
  redraws.push(shown);
  shown();
}
