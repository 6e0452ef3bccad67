// The page of a hang: what the dumps tell, and a lane for each rank with its last calls.

function told(given) {
  $("told").textContent = given;
}

function lanes(given) {
  const HEIGHT = 18, LEFT = 78, COLUMNS = given.last - given.first + 1;
  const canvas = $("lanes"), view = $("lanes-view"), tip = $("lanes-tip");
  const start = unpack(given.start), call = unpack(given.call), site = unpack(given.site), state = unpack(given.state);
  const column = unpack(given.column), number = unpack(given.number), waits = new Set(given.waits);
  let shown = [], chosen = -1;

  for (const [look, text] of [["done", "collective"], ["message", "message"], ["open", "has not ended"],
                              ...(given.alike ? [["alike", "the last call that all made alike"]] : [])]) {
    const item = element("li");
    item.append(element("span", undefined, "swatch l-" + look), text);
    $("lanes-legend").append(item);
  }
  function filter() {
    const wanted = $("lane-rank").value.trim(), only = $("lane-waiting").checked;
    shown = given.ranks.map((rank, i) => i).filter(i =>
      (!wanted || String(given.ranks[i]).startsWith(wanted)) && (!only || waits.has(given.ranks[i])));
    $("lanes-shown").textContent = shown.length + " of " + given.ranks.length + " ranks";
    $("lanes-tall").style.height = Math.max(HEIGHT, shown.length * HEIGHT) + "px";
    draw();
  }
  const wide = () => clamp((view.clientWidth - LEFT - 8) / COLUMNS, 6, 60);
  function draw() {
    const height = Math.min(560, Math.max(HEIGHT, shown.length * HEIGHT)), step = wide();
    const [pen] = fitted(canvas, height), top = view.scrollTop;
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    for (let row = Math.floor(top / HEIGHT); row < shown.length && row * HEIGHT < top + height; row++) {
      const i = shown[row], y = row * HEIGHT - top;
      if (i === chosen) {
        pen.fillStyle = colour("panel");
        pen.fillRect(0, y, LEFT, HEIGHT);
      }
      pen.fillStyle = colour(waits.has(given.ranks[i]) ? "path" : "ink");
      pen.fillText("rank " + given.ranks[i], 6, y + HEIGHT / 2);
      for (let at = start[i]; at < start[i + 1]; at++) {
        const x = LEFT + (column[at] - given.first) * step;
        if (state[at] & 1) {
          pen.lineWidth = 2;
          pen.strokeStyle = colour("path");
          pen.strokeRect(x + 1.5, y + 3, Math.max(2, step - 3), HEIGHT - 6);
        } else {
          pen.fillStyle = colour(state[at] & 2 ? "other" : "communication");
          pen.fillRect(x + 0.5, y + 2, Math.max(2, step - 1.5), HEIGHT - 4);
        }
      }
    }
    if (!given.alike) return;
    pen.lineWidth = 2;
    pen.strokeStyle = colour("ink");
    pen.strokeRect(LEFT - given.first * step, 1, step, height - 2);
  }
  function under(event) {               // the lane and the call at the pointer
    const box = canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top + view.scrollTop) / HEIGHT);
    const at = Math.floor((event.clientX - box.left - LEFT) / wide()) + given.first, i = shown[row];
    if (i === undefined) return [-1, -1];
    for (let each = start[i]; each < start[i + 1]; each++) if (column[each] === at) return [i, each];
    return [i, -1];
  }
  const words = at => given.calls[call[at]] + (number[at] >= 0 ? ", number " + number[at] : "")
    + (state[at] & 1 ? ", has not ended" : "");
  function list(i) {
    chosen = i;
    $("lane-title").textContent = "The last calls of rank " + given.ranks[i];
    const body = element("tbody"), head = element("thead"), line = element("tr");
    for (const text of ["call", "number in its group", "state", "line"]) line.append(element("th", text));
    head.append(line);
    for (let at = start[i + 1] - 1; at >= start[i]; at--) {
      const row = element("tr");
      row.append(element("td", given.calls[call[at]]), element("td", number[at] >= 0 ? number[at] : "", "number"),
                 element("td", state[at] & 1 ? "has not ended" : "ended"), element("td", given.sites[site[at]]));
      body.append(row);
    }
    $("lane-calls").replaceChildren(head, body);
    draw();
  }
  canvas.addEventListener("pointermove", event => {
    const [i, at] = under(event);
    tip.hidden = at < 0;
    if (at < 0) return;
    tip.textContent = "rank " + given.ranks[i] + ": " + words(at) + "\n" + given.sites[site[at]];
    const box = view.getBoundingClientRect();
    tip.style.left = clamp(event.clientX - box.left + 14, 0, Math.max(0, view.clientWidth - tip.offsetWidth - 4)) + "px";
    tip.style.top = Math.max(0, event.clientY - box.top - tip.offsetHeight - 10) + "px";
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("click", event => { const [i] = under(event); if (i >= 0) list(i); });
  view.addEventListener("scroll", draw);
  $("lane-rank").addEventListener("input", filter);
  $("lane-waiting").addEventListener("change", filter);
  redraws.push(draw);
  filter();
  const odd = Math.max(0, given.ranks.indexOf(given.odd));
  if (!given.ranks.length) return;
  view.scrollTop = (odd - 15) * HEIGHT;
  list(odd);
}
