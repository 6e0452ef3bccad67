// The section of plans: those of a search, time against memory, those with the wanted settings set off.

function plans(questions) {
  const now = id => $(id).value, asked = () => questions[now("question")];
  const wanted = () => Object.fromEntries(asked().names.map(name => ["plan-" + name, name])
    .filter(([id]) => $(id) && now(id) !== "").map(([id, name]) => [name, now(id)]));
  function filters() {
    $("wanted").replaceChildren(...asked().names.map((name, at) => {
      const label = element("label", name + " "), select = element("select"), id = "plan-" + name;
      const values = [...new Set(asked().plans.map(plan => String(plan[at])))];
      values.sort((a, b) => isNaN(a) || isNaN(b) ? a < b ? -1 : 1 : a - b);
      select.id = label.htmlFor = id;
      select.append(new Option("any", ""), ...values.map(value => new Option(value, value)));
      if (values.includes(state.get(id))) select.value = state.get(id);
      select.addEventListener("input", () => { keep(id); draw(); });
      label.append(select);
      return label;
    }));
  }
  const words = plan => asked().names.map((name, at) => `${name}=${plan[at]}`).join(" ");
  const figures = plan => [seconds(plan.at(-2)), (plan.at(-1) / 1e9).toPrecision(3) + " GB"];
  function draw() {
    const all = asked().plans, left = fitting(all, asked().names, wanted()), first = all[left[0]];
    say("plans-said", first === undefined ? "No plan that fits has these settings." :
      `${left.length} of ${all.length} plans that fit. The fastest takes ${figures(first)[0]} a step and ` +
      `${figures(first)[1]} on the fullest device` +
      (left[0] ? `, ${slower(all, left[0])} more time than the fastest of all` : "") + `: ${words(first)}.`);
    $("plans-asked").textContent = asked().command;
    picture(all, new Set(left));
    rows($("plans-table"), ["place", "a step", "memory", ...asked().names],
      left.slice(0, 12).map(at => [String(at + 1), ...figures(all[at]), ...all[at].slice(0, -2)]));
  }
  function picture(all, left) {
    const range = values => [Math.min(...values) / 1.05, Math.max(...values) * 1.05], drawn = [];
    const [x0, x1] = range(all.map(plan => plan.at(-1))), [y0, y1] = range(all.map(plan => plan.at(-2)));
    const x = value => 90 + 660 * Math.log(value / x0) / Math.log(x1 / x0);
    const y = value => 300 - 280 * Math.log(value / y0) / Math.log(y1 / y0);
    for (let i = 0; i <= 3; i++) {
      const [gb, time] = [x0 * (x1 / x0) ** (i / 3), y0 * (y1 / y0) ** (i / 3)];
      drawn.push(shape("path", {d: `M${x(gb)} 20V300M90 ${y(time)}H750`}),
        shape("text", {x: x(gb), y: 322, "text-anchor": "middle"}, (gb / 1e9).toPrecision(2) + " GB"),
        shape("text", {x: 84, y: y(time) + 4, "text-anchor": "end"}, seconds(time)));
    }
    drawn.push(shape("text", {x: 420, y: 348, "text-anchor": "middle"}, "memory of the fullest device"));
    const dots = all.map((plan, at) => {
      const dot = shape("circle", {cx: x(plan.at(-1)), cy: y(plan.at(-2)), r: 4, class: left.has(at) ? "wanted" : "other"});
      dot.append(shape("title", {}, `${words(plan)}: ${figures(plan).join(", ")}`));
      return dot;
    });
    drawn.push(...dots.filter((_, at) => !left.has(at)), ...dots.filter((_, at) => left.has(at)));
    $("dots").replaceChildren(...drawn);
  }
  choices("question", Object.keys(questions), state.get("question"));
  filters();
  control("question", () => { filters(); draw(); });
  draw();
}
