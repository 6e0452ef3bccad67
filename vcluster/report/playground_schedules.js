// The section of schedules: one, or two on one time axis.

function schedules(tables) {
  const letters = "FBIW", fills = ["forward", "backward", "recompute", "other"], now = id => $(id).value;
  const sizes = () => {                             // those that both schedules have an order for, apart from chunks
    const plain = name => Object.keys(tables[name]).map(key => {
      const [stages, microbatches, chunks] = key.split("/").map(Number);
      return `${stages / chunks} ranks, ${microbatches} microbatches`;
    });
    const other = now("against") ? plain(now("against")) : null;
    return [...new Set(plain(now("first")))].filter(size => !other || other.includes(size));
  };
  const chunksOf = name => {
    const [ranks, microbatches] = now("sizes").match(/\d+/g).map(Number);
    return Object.keys(tables[name]).filter(key => {
      const [stages, count, chunks] = key.split("/").map(Number);
      return stages / chunks === ranks && count === microbatches;
    });
  };
  function draw() {
    choices("sizes", sizes());
    choices("chunks", chunksOf(now("first")).map(key => key.split("/")[2]));
    const costs = ["cost-F", "cost-B", "cost-I", "cost-W", "cost-message"].map(id => Number(now(id)));
    ["F", "B", "I", "W", "message"].forEach((name, i) => { $(`cost-${name}-said`).textContent = costs[i]; });
    const shown = [now("first"), now("against")].filter(Boolean).map(name => {
      const keys = chunksOf(name), same = keys.find(key => key.split("/")[2] === now("chunks"));
      return [name, same ?? keys[0]];
    });
    const times = shown.map(([name, key]) => {
      const chunks = Number(key.split("/")[2]);     // a stage of one of several chunks has that part of the work
      return scheduleTimes(tables[name][key], costs.map((cost, i) => i < 4 ? cost / chunks : cost));
    });
    say("race-said", times.map((each, i) => `${shown[i][0].replaceAll("_", " ")}: makespan ` +
      `${digits(each.makespan)}, bubble ${(100 * each.bubble).toFixed(1)}% of it, at most ` +
      `${Math.max(...each.kept)} forwards kept on a rank`).join(". ") + ".");
    rows($("kept"), ["schedule", "stages", "makespan", "bubble", "forwards kept, by rank"], times.map((each, i) => [
      shown[i][0].replaceAll("_", " "), shown[i][1].split("/")[0], digits(each.makespan),
      (100 * each.bubble).toFixed(1) + "%", each.kept.join(" ")]));
    race(times, shown);
  }
  function race(times, shown) {
    const longest = Math.max(...times.map(each => each.makespan)) || 1, drawn = [];
    let y = 0;
    times.forEach((each, i) => {
      drawn.push(shape("text", {x: 0, y: y + 14}, shown[i][0].replaceAll("_", " ")));
      y += 20;
      each.spans.forEach((row, rank) => {
        drawn.push(shape("text", {x: 0, y: y + 15}, "rank " + rank));
        for (const [kind, stage, k, start, end] of row) {
          const x = 60 + start / longest * 1000, width = (end - start) / longest * 1000;
          const box = shape("rect", {x, y, width, height: 20, class: "p-" + fills[kind]});
          box.append(shape("title", {}, `${letters[kind]}${k} from ${digits(start)} to ${digits(end)}`));
          drawn.push(box);
          if (width > 22) drawn.push(shape("text", {x: x + width / 2, y: y + 15, "text-anchor": "middle",
            class: "on"}, letters[kind] + k));
        }
        y += 23;
      });
      y += 8;
    });
    $("bars").setAttribute("viewBox", `0 0 1064 ${y}`);
    $("bars").replaceChildren(...drawn);
  }
  choices("first", Object.keys(tables), state.get("first") ?? "1f1b");
  $("against").replaceChildren(new Option("nothing", ""), ...Object.keys(tables).map(name =>
    new Option(name.replaceAll("_", " "), name)));
  choices("sizes", sizes(), state.get("sizes") ?? "4 ranks, 8 microbatches");
  choices("chunks", chunksOf(now("first")).map(key => key.split("/")[2]), state.get("chunks") ?? undefined);
  for (const id of ["first", "against", "sizes", "chunks", "cost-F", "cost-B", "cost-I", "cost-W", "cost-message"])
    control(id, draw);
  draw();
}
