// What the playground computes.  It needs no page, so that a test runs it beside Python.

function received(table, ranks, steps, size) {       // bytes that each rank has received after so many steps
  const counts = new Array(ranks).fill(0);
  for (const step of table[1].slice(0, steps))
    for (const message of step) counts[message[1]] += pieceCount(message);
  return counts.map(count => count * size / table[0]);
}
function pieceCount(message) {
  let count = 0;
  for (let i = 4; i < message.length; i += 2) count += message[i];
  return count;
}
function collectiveSeconds(table, size, latency, perByte) {    // the phases, one after the other
  let total = 0;
  for (const [times, parts, whole] of table[2]) total += times * (latency + parts * size / whole * perByte);
  return total;
}
function scheduleTimes(order, costs) {               // costs of F, B, I, W and of a message
  const ends = new Map(), next = order.rows.map(() => 0), free = order.rows.map(() => 0);
  const spans = order.rows.map(() => []), stages = order.placement.length;
  const key = (kind, stage, k) => (kind * stages + stage) * 4096 + k;
  const end = (kinds, stage, k) => {
    for (const kind of kinds) if (ends.has(key(kind, stage, k))) return ends.get(key(kind, stage, k));
  };
  const needs = (kind, stage) => {
    if (kind === 0) return stage ? [[[0], stage - 1]] : [];
    if (kind === 3) return [[[2], stage]];
    return [[[0], stage], ...(order.local || stage + 1 === stages ? [] : [[[1, 2], stage + 1]])];
  };
  for (let moved = true; moved;) {
    moved = false;
    order.rows.forEach((row, rank) => {
      for (; next[rank] < row.length; next[rank] += 3, moved = true) {
        const [kind, stage, k] = row.slice(next[rank], next[rank] + 3);
        let start = free[rank];
        for (const [kinds, from] of needs(kind, stage)) {
          const ready = end(kinds, from, k);
          if (ready === undefined) return;
          start = Math.max(start, order.placement[from] === rank ? ready : ready + costs[4]);
        }
        free[rank] = start + costs[kind];
        ends.set(key(kind, stage, k), free[rank]);
        spans[rank].push([kind, stage, k, start, free[rank]]);
      }
    });
  }
  const all = spans.flat(), makespan = Math.max(...all.map(s => s[4])) - Math.min(...all.map(s => s[3]));
  const busy = spans.map(row => row.reduce((sum, s) => sum + s[4] - s[3], 0));
  const bubble = makespan ? 1 - busy.reduce((a, b) => a + b) / (spans.length * makespan) : 0;
  return {spans, makespan, bubble, kept: spans.map(mostKept)};
}
function mostKept(row) {                             // forwards kept at once, from F to the end of B or W
  if (!row.some(span => span[0] === 1 || span[0] === 3)) return 0;
  const changes = new Map(), add = (time, by) => changes.set(time, (changes.get(time) || 0) + by);
  for (const [kind, , , start, end] of row) {
    if (kind === 0) add(start, 1);
    if (kind === 1 || kind === 3) add(end, -1);
  }
  let now = 0, most = 0;
  for (const time of [...changes.keys()].sort((a, b) => a - b)) most = Math.max(most, now += changes.get(time));
  return most;
}
function moved(steps) {                              // bytes that all ranks receive in the steps of a resharding
  return steps.reduce((sum, step) => sum + step[4].reduce((a, b) => a + b, 0), 0);
}
function held(block) {                               // bytes of a block of float32
  return 4 * (block[1] - block[0]) * (block[3] - block[2]);
}
function productAt(tables, name, m, n, k) {          // what a product does and takes, beside its roof
  const hardware = tables.hardware[name], at = extent => tables.extents.indexOf(extent), count = tables.extents.length;
  const flops = 2 * m * n * k, bytes = 2 * (m * k + k * n + m * n), ridge = hardware.flops_per_second / hardware.bytes_per_second;
  const seconds = hardware.seconds[(at(m) * count + at(n)) * count + at(k)], intensity = flops / bytes;
  return {flops, bytes, intensity, ridge, seconds, reached: flops / seconds, share: flops / seconds / hardware.flops_per_second,
    bound: intensity < ridge ? "memory" : "compute"};
}
function fitting(plans, names, wanted) {             // the places of the plans that have the wanted settings
  const places = [];
  plans.forEach((plan, place) => {
    if (names.every((name, at) => wanted[name] === undefined || String(plan[at]) === wanted[name])) places.push(place);
  });
  return places;
}
function slower(plans, place) {                      // by how much a plan takes longer than the first
  return (100 * (plans[place].at(-2) / plans[0].at(-2) - 1)).toFixed(1) + "%";
}
function decodeStep(question, tp, context, batch) {  // a step with a token of each request, and what a device holds for it
  const at = question.tp.indexOf(tp), row = question.steps[at][question.contexts.indexOf(context)];
  const parts = row[question.batches.indexOf(batch)], weights = question.weights_bytes[at];
  const cache = question.token_bytes[at] * context * batch;
  if (parts === null) return {fits: false, weights, cache};
  const total = parts.reduce((a, b) => a + b), reading = (weights + cache) / question.memory_bytes_per_second;
  return {fits: true, weights, cache, parts, seconds: total, user: 1 / total, device: batch / total / tp, reading};
}
