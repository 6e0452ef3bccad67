// The section of products: a product of matrices under the roofline of a device.

function products(tables) {
  const now = id => $(id).value;
  const rate = value => value >= 1e12 ? digits(value / 1e12) + " Tflop/s" : digits(value / 1e9) + " Gflop/s";
  function draw() {
    const [m, n, k] = ["m", "n", "k"].map(id => Number(now(id))), hardware = tables.hardware[now("device")];
    const each = productAt(tables, now("device"), m, n, k);
    say("product-said", `(${m} x ${k}) times (${k} x ${n}) in ${hardware.dtype} on ${hardware.title}: ` +
      `${each.flops.toPrecision(3)} flop and ${bytes(each.bytes)}, so ${digits(each.intensity)} flop per byte. ` +
      `The roof has its corner at ${digits(each.ridge)}: bound by ${each.bound}. ` +
      `It takes ${seconds(each.seconds)} and reaches ${rate(each.reached)}, ${(100 * each.share).toFixed(1)}% of the peak.`);
    picture(hardware, each);
  }
  function picture(hardware, chosen) {
    const [x0, x1] = [0.1, 1e4], top = hardware.flops_per_second * 2, bottom = top / 1e6;
    const x = value => 70 + 680 * Math.log(value / x0) / Math.log(x1 / x0);
    const y = value => 320 - 300 * Math.log(clamp(value, bottom, top) / bottom) / Math.log(top / bottom);
    const drawn = [];
    let grid = "";
    for (const value of [0.1, 1, 10, 100, 1000, 10000]) {
      grid += `M${x(value)} 20V320`;
      drawn.push(shape("text", {x: x(value), y: 338, "text-anchor": "middle"}, value));
    }
    for (let power = Math.ceil(Math.log10(bottom)); 10 ** power <= top; power++) {
      grid += `M70 ${y(10 ** power)}H750`;
      drawn.push(shape("text", {x: 64, y: y(10 ** power) + 4, "text-anchor": "end"}, "1e" + power));
    }
    drawn.unshift(shape("path", {d: grid, class: "grid"}));
    drawn.push(shape("text", {x: 410, y: 360, "text-anchor": "middle"}, "flop per byte"),
      shape("text", {x: 70, y: 17}, "flop/s"));
    const low = bottom / hardware.bytes_per_second, start = Math.max(x0, low);
    drawn.push(shape("path", {class: "roof", d: `M${x(start)} ${y(start * hardware.bytes_per_second)}` +
      `L${x(chosen.ridge)} ${y(hardware.flops_per_second)}H750`}));
    for (const m of tables.extents) for (const n of tables.extents) for (const k of tables.extents) {
      const other = productAt(tables, now("device"), m, n, k);
      if (other.reached > bottom)
        drawn.push(shape("circle", {cx: x(other.intensity), cy: y(other.reached), r: 2.5, class: "other"}));
    }
    drawn.push(shape("circle", {cx: x(chosen.intensity), cy: y(chosen.reached), r: 7, class: "chosen"}));
    $("roof").replaceChildren(...drawn);
  }
  choices("device", Object.keys(tables.hardware), state.get("device") ?? "dgx-h100");
  for (const [id, first] of [["m", "16"], ["n", "4096"], ["k", "4096"]])
    choices(id, tables.extents.map(String), state.get(id) ?? first);
  for (const id of ["device", "m", "n", "k"]) control(id, draw);
  draw();
}
