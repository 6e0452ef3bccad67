// The section of serving: what a token of an answer waits for, and what a larger batch and more devices bring.

function serving(questions) {
  const PARTS_OF_STEP = [["products", "forward"], ["attention", "backward"], ["messages", "communication"], ["host", "other"]];
  const TOLD = ["products with the weights", "attention over the cache", "messages between devices", "the host"];
  const now = id => $(id).value, asked = () => questions[now("served")];
  const chosen = () => [Number(now("serving-tp")), Number(now("context")), Number(now("batch"))];
  function draw() {
    const [tp, context, batch] = chosen(), step = decodeStep(asked(), tp, context, batch);
    say("serving-said", step.fits ? told(step, tp, batch) : `It does not fit: of the ${gigabytes(asked().memory_bytes)} of a ` +
      `device the weights take ${gigabytes(step.weights)}, and the caches ${gigabytes(step.cache)}.`);
    front(tp, context, batch);
    bars(tp, context, batch);
  }
  const gigabytes = value => (value / 1e9).toPrecision(3) + " GB";
  function told(step, tp, batch) {
    const spent = step.parts.map((value, at) => `${seconds(value)} for ${TOLD[at]}`).filter((_, at) => step.parts[at] > 0);
    return `A step makes a token for each of ${batch} request${batch > 1 ? "s" : ""} and takes ${seconds(step.seconds)}: ` +
      `${spent.join(", ")}. A user sees ${digits(step.user)} tokens a second; a device makes ${digits(step.device)}. ` +
      `A device reads ${gigabytes(step.weights)} of weights and ${gigabytes(step.cache)} of caches in the step, ` +
      `which takes its memory ${seconds(step.reading)} at least.`;
  }
  function front(tp, context, batch) {
    const lines = asked().tp.map(each => [each, asked().batches.map(size => [size, decodeStep(asked(), each, context, size)])
      .filter(([, step]) => step.fits)]).filter(([, points]) => points.length);
    const all = lines.flatMap(([, points]) => points.map(([, step]) => step)), drawn = [];
    const range = values => [Math.min(...values) / 1.15, Math.max(...values) * 1.15];
    const [x0, x1] = range(all.map(step => step.user)), [y0, y1] = range(all.map(step => step.device));
    const x = value => 80 + 640 * Math.log(value / x0) / Math.log(x1 / x0);
    const y = value => 300 - 280 * Math.log(value / y0) / Math.log(y1 / y0);
    for (let i = 0; i <= 3; i++) {
      const [user, device] = [x0 * (x1 / x0) ** (i / 3), y0 * (y1 / y0) ** (i / 3)];
      drawn.push(shape("path", {d: `M${x(user)} 20V300M80 ${y(device)}H720`, class: "grid"}),
        shape("text", {x: x(user), y: 322, "text-anchor": "middle"}, Number(user.toPrecision(2))),
        shape("text", {x: 74, y: y(device) + 4, "text-anchor": "end"}, Number(device.toPrecision(2))));
    }
    drawn.push(shape("text", {x: 400, y: 350, "text-anchor": "middle"}, "tokens a second of a user"),
      shape("text", {x: 80, y: 15}, "tokens a second of a device"));
    for (const [each, points] of lines) {
      const at = points.map(([, step]) => `${x(step.user)} ${y(step.device)}`);
      drawn.push(shape("path", {d: "M" + at.join("L"), class: each === tp ? "roof" : "grid"}));
      for (const [size, step] of points) {
        const dot = shape("circle", {cx: x(step.user), cy: y(step.device), r: each === tp && size === batch ? 8 : 4,
          class: each === tp ? "chosen" : "other"});
        dot.append(shape("title", {}, `tp=${each}, ${size} at a time: ${digits(step.user)} and ${digits(step.device)}`));
        drawn.push(dot);
      }
      const [, first] = points[0];
      drawn.push(shape("text", {x: x(first.user) + 9, y: y(first.device) + 4}, "tp=" + each));
    }
    $("front").replaceChildren(...drawn);
  }
  function bars(tp, context, batch) {
    const steps = asked().batches.map(size => [size, decodeStep(asked(), tp, context, size)]), drawn = [];
    const most = Math.max(...steps.filter(([, step]) => step.fits).map(([, step]) => step.seconds), 0);
    steps.forEach(([size, step], at) => {
      const left = 20 + 78 * at;
      let top = 300;
      if (step.fits) step.parts.forEach((value, part) => {
        const height = 262 * value / most;
        top -= height;
        const bar = shape("rect", {x: left, y: top, width: 62, height, class: "p-" + PARTS_OF_STEP[part][1]});
        bar.append(shape("title", {}, `${size} at a time: ${seconds(value)} for ${TOLD[part]}`));
        drawn.push(bar);
      });
      drawn.push(shape("text", {x: left + 31, y: top - 6, "text-anchor": "middle"}, step.fits ? (1e3 * step.seconds).toPrecision(3) : "no room"),
        shape("text", {x: left + 31, y: 320, "text-anchor": "middle", class: size === batch ? "now" : ""}, size));
    });
    drawn.push(shape("text", {x: 370, y: 348, "text-anchor": "middle"}, "requests at a time; above each bar the milliseconds of a step"));
    $("steps").replaceChildren(...drawn);
    $("steps-key").replaceChildren(...PARTS_OF_STEP.map(([, part], at) => {
      const item = element("span", TOLD[at], "item"), swatch = element("i", undefined, "swatch p-" + part);
      item.prepend(swatch);
      return item;
    }));
  }
  choices("served", Object.keys(questions), state.get("served") ?? "llama3.1-70b in bf16");
  choices("serving-tp", asked().tp.map(String), state.get("serving-tp") ?? "8");
  choices("context", asked().contexts.map(String), state.get("context") ?? "4096");
  choices("batch", asked().batches.map(String), state.get("batch") ?? "16");
  for (const id of ["served", "serving-tp", "context", "batch"]) control(id, draw);
  draw();
}
