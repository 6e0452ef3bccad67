// The section of layouts: what each rank holds of a matrix, before, between and after the steps of a resharding.

function layouts(tables) {
  const now = id => $(id).value, texts = () => table().layouts.slice(0, table().choices);
  const mesh = () => tables[now("mesh")], table = () => mesh().shapes[now("tensor")];
  function draw() {
    choices("source", texts());
    choices("target", texts());
    const {layouts: names, steps: all, blocks} = table(), source = names.indexOf(now("source"));
    const steps = all[source][names.indexOf(now("target"))];
    $("layout-step").max = steps.length;
    const number = Number(now("layout-step")), at = number ? steps[number - 1][3] : source;
    const total = moved(steps), most = steps.length ? Math.max(...blocks[at].map((_, rank) =>
      steps.reduce((sum, step) => sum + step[4][rank], 0))) : 0;
    $("layout-step-said").textContent = number + " of " + steps.length;
    say("moves-said", `${now("source")} to ${now("target")}: ` + (steps.length ? "" : "nothing to do. ") +
      steps.map(([kind, axes, what]) => `${kind.replaceAll("_", " ")} over ${axes} (${what})`).join(", then ") +
      (steps.length ? ". " : "") + `All ranks together receive ${bytes(total)}, the busiest ${bytes(most)}. ` +
      `Shown after step ${number} of ${steps.length}: ${names[at]}.`);
    shards(blocks[at], table().partial[at]);
    rows($("moves"), ["step", "layout after it", ...blocks[at].map((_, rank) => "rank " + rank)], [
      ["before", names[source], ...blocks[source].map(block => "holds " + bytes(held(block)))],
      ...steps.map((step, i) => [`${i + 1}. ${step[0].replaceAll("_", " ")}`, names[step[3]], ...step[4].map(bytes)])]);
  }
  function shards(blocks, partial) {                // one grid a rank, in the order of the mesh
    const [height, width] = now("tensor").split("x").map(Number), cell = 14;
    const columns = Math.min(mesh().columns, 3 - mesh().columns % 2), drawn = [];
    blocks.forEach(([top, bottom, left, right], rank) => {
      const x = rank % columns * (width * cell + 24) + 2, y = Math.floor(rank / columns) * (height * cell + 42) + 22;
      drawn.push(shape("text", {x, y: y - 6}, `rank ${rank} (${mesh().places[rank]})`),
        shape("rect", {x: x + left * cell, y: y + top * cell, width: (right - left) * cell,
          height: (bottom - top) * cell, class: partial ? "term" : "block"}));
      let lines = "";
      for (let row = 0; row <= height; row++) lines += `M${x} ${y + row * cell}h${width * cell}`;
      for (let column = 0; column <= width; column++) lines += `M${x + column * cell} ${y}v${height * cell}`;
      drawn.push(shape("path", {d: lines}));
    });
    $("shards").setAttribute("viewBox", `0 0 ${columns * (width * cell + 24)} ` +
      Math.ceil(blocks.length / columns) * (height * cell + 42));
    $("grids").replaceChildren(...drawn);
  }
  choices("mesh", Object.keys(tables), state.get("mesh") ?? "x=2, y=2");
  choices("tensor", Object.keys(mesh().shapes), state.get("tensor"));
  choices("source", texts(), state.get("source") ?? "[x, None]");
  choices("target", texts(), state.get("target") ?? "[None, x]");
  $("layout-step").max = 9;
  for (const id of ["mesh", "tensor", "source", "target", "layout-step"]) control(id, draw);
  draw();
}
