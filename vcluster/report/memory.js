// Memory over time by category, of one device.

function memory(given) {
  const time = unpack(given.time), category = unpack(given.category), amount = unpack(given.nbytes);
  const kinds = given.categories.length, looks = ["forward", "backward", "communication", "recompute", "other"];
  const curves = (begin, end) => {    // the moments, what is held of each category from then on, and the peak
    const held = new Float64Array(kinds), moments = [];
    let peak = {total: 0, time: 0, held: Array.from(held)};
    for (let i = begin; i < end; i++) {
      held[category[i]] += amount[i];
      const total = held.reduce((sum, part) => sum + part, 0);
      if (total > peak.total) peak = {total, time: time[i], held: Array.from(held)};
      if (i + 1 === end || time[i + 1] !== time[i]) moments.push([time[i], Array.from(held)]);
    }
    return [moments, peak];
  };
  given.ranks.forEach((rank, i) => $("memory-rank").append(new Option("rank " + rank, i)));
  let most = -1;
  given.bounds.forEach(([begin, end], i) => {         // the device with the highest peak comes first
    let total = 0, peak = 0;
    for (let j = begin; j < end; j++) { total += amount[j]; peak = Math.max(peak, total); }
    if (peak > most) { most = peak; $("memory-rank").value = i; }
  });
  function shown() {
    const canvas = $("memory"), height = 220, [context, width] = fitted(canvas, height);
    const [begin, end] = given.bounds[$("memory-rank").value], [moments, peak] = curves(begin, end);
    const left = 70, bottom = height - 22, top = 12, longest = data.makespan || 1;
    const x = t => left + clamp(t / longest, 0, 1) * (width - left - 10);
    const y = bytes => bottom - bytes / (peak.total || 1) * (bottom - top);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.strokeStyle = colour("line");
    context.fillStyle = colour("quiet");
    const each = peak.total / 4 || 1;
    for (let n = 0; n <= 4; n++) {
      context.fillText(bytes(Math.round(n * each)), 6, y(n * each));
      context.beginPath();
      context.moveTo(left, y(n * each));
      context.lineTo(width - 10, y(n * each));
      context.stroke();
    }
    const tick = step(longest, (width - left) / 110);
    for (let t = 0; t <= longest; t += tick) {
      const text = seconds(Number(t.toPrecision(12)));
      if (x(t) + context.measureText(text).width < width) context.fillText(text, x(t), height - 9);
    }
    const stacked = (k, held) => { let sum = 0; for (let j = 0; j <= k; j++) sum += Math.max(held[j], 0); return sum; };
    const lean = [];                  // of many moments in one pixel, the one that holds most
    for (const moment of moments) {
      const last = lean[lean.length - 1];
      if (last && Math.floor(2 * x(last[0])) === Math.floor(2 * x(moment[0]))) {
        if (stacked(kinds - 1, moment[1]) > stacked(kinds - 1, last[1])) lean[lean.length - 1] = moment;
      } else lean.push(moment);
    }
    for (let k = kinds - 1; k >= 0; k--) {
      context.beginPath();
      context.moveTo(x(lean[0][0]), bottom);
      let level = bottom;
      for (const [t, held] of lean) {
        context.lineTo(x(t), level);
        level = y(stacked(k, held));
        context.lineTo(x(t), level);
      }
      context.lineTo(x(longest), level);
      context.lineTo(x(longest), bottom);
      context.fillStyle = k < looks.length ? hatched(context, looks[k]) : colour("bubble");
      context.fill();
      context.strokeStyle = colour("ink");
      context.lineWidth = .75;
      context.stroke();
    }
    for (let k = 0; k < kinds; k++) { // the name on the area, where there is room at the peak
      const low = y(stacked(k, peak.held) - Math.max(peak.held[k], 0)), high = y(stacked(k, peak.held));
      if (low - high < 14) continue;
      const text = given.categories[k].slice(0, 24), length = context.measureText(text).width;
      const at = clamp(x(peak.time) + 6, left + 4, width - length - 16);
      context.fillStyle = colour("paper");
      context.fillRect(at - 3, (low + high) / 2 - 7, length + 6, 14);
      context.fillStyle = colour("ink");
      context.fillText(text, at, (low + high) / 2);
    }
    $("memory-said").textContent = "peak " + bytes(peak.total) + " at " + seconds(peak.time);
    table($("memory-table"), ["category", "held at the peak"], given.categories.map((name, k) =>
      [name, bytes(peak.held[k])]).slice(0, 40), 1);
  }
  $("memory-rank").onchange = shown;
  redraws.push(shown);
  shown();
}
