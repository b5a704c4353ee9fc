// From numbers to places on an axis, and the numbers that are written beside it.

export function extent(values) {
  let least = Infinity;
  let most = -Infinity;
  for (const value of values) {
    if (value === null || !Number.isFinite(value)) continue;
    if (value < least) least = value;
    if (value > most) most = value;
  }
  return least <= most ? [least, most] : null;
}

function step(span, count) {
  const rough = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
}

export function linear([least, most], from, to, count) {
  if (least === most) [least, most] = [least - (Math.abs(least) || 1) * 0.5, most + (Math.abs(most) || 1) * 0.5];
  const size = step(most - least, count);
  const ticks = [];
  for (let tick = Math.ceil(least / size - 1e-9) * size; tick <= most + size * 1e-9; tick += size) {
    ticks.push(Math.abs(tick) < size * 1e-9 ? 0 : +tick.toPrecision(12));
  }
  return { at: (value) => from + ((value - least) / (most - least)) * (to - from), ticks };
}

export function logarithmic([least, most], from, to, count) {
  if (least === most) [least, most] = [least / 2, most * 2];
  const [low, high] = [Math.log10(least), Math.log10(most)];
  const factors = high - low > 1.5 ? [1] : [1, 2, 5];
  let ticks = [];
  for (let power = Math.floor(low); power <= high; power += 1) {
    for (const factor of factors) {
      const tick = +(factor * 10 ** power).toPrecision(12);
      if (tick >= least * 0.999 && tick <= most * 1.001) ticks.push(tick);
    }
  }
  const every = Math.ceil(ticks.length / Math.max(2, count));
  ticks = ticks.filter((_, place) => place % every === 0);
  return { at: (value) => from + ((Math.log10(value) - low) / (high - low)) * (to - from), ticks };
}
