/* Pictures out of numbers. Nothing is kept here. */

const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function html(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function count(number) {
  for (const [size, letter] of [
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e4, "k"],
  ]) {
    if (number >= size)
      return (number / (letter === "k" ? 1e3 : size)).toFixed(number >= size * 100 ? 0 : 1) + " " + letter;
  }
  return String(Math.round(number));
}

function bytes(number) {
  for (const [size, unit] of [
    [2 ** 40, "TiB"],
    [2 ** 30, "GiB"],
    [2 ** 20, "MiB"],
    [2 ** 10, "KiB"],
  ]) {
    if (number >= size) return (number / size).toFixed(number >= size * 100 ? 0 : 1) + " " + unit;
  }
  return Math.round(number) + " B";
}

function seconds(number) {
  if (number === 0) return "0 s";
  if (number >= 7200) return (number / 3600).toFixed(1) + " h";
  if (number >= 120) return (number / 60).toFixed(1) + " min";
  if (number >= 1) return number.toFixed(number >= 10 ? 0 : 1) + " s";
  return (number * 1000).toFixed(number >= 0.01 ? 0 : 1) + " ms";
}

const percent = (share) =>
  share > 0 && share < 0.0005 ? "< 0.1 %" : (100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0) + " %";

function legend(entries) {
  const parts = entries.map(([name, color]) => {
    const mark = html("i");
    mark.style.background = color;
    return html("span", {}, mark, name);
  });
  return html("div", { class: "legend" }, ...parts);
}

/* A picture is as wide as its place, so that its words are as large as all others. */
function plotFor(place, labels, height = 190) {
  const left = 12 + 6.5 * Math.max(...labels.map((text) => text.length));
  return { width: Math.max(240, place.clientWidth), height, left, right: 10, top: 8, bottom: 22 };
}

function frame(plot, labels, label) {
  const picture = svg("svg", { viewBox: `0 0 ${plot.width} ${plot.height}`, role: "img", "aria-label": label });
  for (const [i, text] of labels.entries()) {
    const y = plot.top + (1 - i / (labels.length - 1)) * (plot.height - plot.top - plot.bottom);
    picture.append(svg("line", { class: "grid", x1: plot.left, x2: plot.width - plot.right, y1: y, y2: y }));
    picture.append(svg("text", { x: plot.left - 6, y: y + 4, "text-anchor": "end" }, text));
  }
  return picture;
}

const scale = (most, format) => [0, 0.5, 1].map((share) => format(most * share));

/* Values stacked upon each other over time. series: [name, color, values]; times in seconds. A value holds from the
   time before it to its own (steps), or is what had been reached by then; null leaves a gap. */
function stacked(place, times, series, { most, format, label, steps = false, absent = "nothing" }) {
  const labels = scale(most, format),
    plot = plotFor(place, labels);
  const from = times[0],
    to = Math.max(times[times.length - 1], from + 1);
  const picture = frame(plot, labels, `${label}, from ${clock(from, to - from)} to ${clock(to, to - from)}`);
  const x = (time) => plot.left + ((time - from) / (to - from)) * (plot.width - plot.left - plot.right);
  const y = (value) => plot.top + (1 - Math.min(1, value / most)) * (plot.height - plot.top - plot.bottom);
  const below = times.map(() => 0);
  for (const [, color, values] of series) {
    const upper = values.map((value, i) => below[i] + (value ?? 0));
    for (const part of withoutGaps(values)) {
      const edge = (heights) =>
        part.flatMap((i) => {
          const ends = steps ? [times[i - 1], times[i]] : [times[i]];
          return ends.map((time) => `${x(time).toFixed(1)},${y(heights[i]).toFixed(1)}`);
        });
      const shape = svg("polygon", { points: [...edge(upper), ...edge(below).reverse()].join(" ") });
      shape.style.fill = color;
      shape.style.opacity = 0.9;
      picture.append(shape);
    }
    upper.forEach((value, i) => {
      below[i] = value;
    });
  }
  picture.append(...timeAxis(plot, from, to));
  const words = html("div", { class: "legend" });
  place.replaceChildren(picture, words);
  place.setAttribute("aria-label", `${label}. The arrow keys go through time.`);
  readable(place, { picture, words, plot, times, series, x, format, absent, first: steps ? 1 : 0 });
}

/* The places of values in a row that are there. */
function withoutGaps(values) {
  const parts = [[]];
  values.forEach((value, i) => (value === null ? parts.push([]) : parts[parts.length - 1].push(i)));
  return parts.filter((part) => part.length);
}

/* The time of day, with seconds where the time around it is short. */
function clock(time, around = 0) {
  const parts = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  return new Date(time * 1000).toLocaleTimeString([], around < 600 ? { ...parts, second: "2-digit" } : parts);
}

function timeAxis(plot, from, to) {
  return [0, 0.5, 1].map((share) =>
    svg(
      "text",
      {
        x: plot.left + share * (plot.width - plot.left - plot.right),
        y: plot.height - 5,
        "text-anchor": share === 0 ? "start" : share === 1 ? "end" : "middle",
      },
      share === 1 ? `${clock(to, to - from)} (now)` : clock(from + share * (to - from), to - from),
    ),
  );
}

/* In place of a picture that would be empty: what will stand there. */
function nothingYet(place, sentence) {
  place.replaceChildren(html("p", { class: "empty" }, sentence));
  notReadable(place);
}

/* Lines over the factors of a size, which stand at equal distances. series: [name, color, [[factor, value], ...]]. */
function curves(place, factors, series, { format, label, most = 1 }) {
  const labels = scale(most, format),
    plot = plotFor(place, labels);
  const picture = frame(plot, labels, label);
  const inner = plot.width - plot.left - plot.right;
  const x = (factor) => plot.left + ((factors.indexOf(factor) + 0.5) / factors.length) * inner;
  const y = (value) => plot.top + (1 - value / most) * (plot.height - plot.top - plot.bottom);
  for (const factor of factors) {
    const text = factor === 1 ? "as it is" : factor === 0.5 ? "half" : factor + " times";
    picture.append(svg("text", { x: x(factor), y: plot.height - 5, "text-anchor": "middle" }, text));
  }
  for (const [name, color, points, dashed] of series) {
    const path = svg("polyline", {
      points: points.map(([f, v]) => `${x(f)},${y(v)}`).join(" "),
      fill: "none",
      "stroke-width": 2,
    });
    path.style.stroke = color;
    if (dashed) path.setAttribute("stroke-dasharray", "5 4");
    picture.append(path);
    for (const [factor, value] of points) {
      const dot = svg(
        "circle",
        { cx: x(factor), cy: y(value), r: 4 },
        svg("title", {}, `${name}, ${factor} times: ${format(value)}`),
      );
      dot.style.fill = color;
      picture.append(dot);
    }
  }
  place.replaceChildren(picture, legend(series.map(([name, color]) => [name, color])));
}

/* rows: [name, explanation, [[color, value], ...], text] */
function bars(rows, most) {
  const list = html("div", { class: "bars" });
  for (const [name, meaning, parts, text] of rows) {
    list.append(html("span", {}, name), track(parts, most), html("em", {}, text));
    if (meaning) list.append(html("small", {}, meaning));
  }
  return list;
}

function track(parts, most, label) {
  return html(
    "div",
    label ? { class: "track", role: "img", "aria-label": label, title: label } : { class: "track" },
    ...parts.map(([color, value]) => {
      const part = html("i");
      part.style.width = (most ? (100 * value) / most : 0) + "%";
      part.style.background = color;
      return part;
    }),
  );
}

/* A number, or a text that is one with its unit. */
const isAmount = (cell) => typeof cell === "number" || (typeof cell === "string" && /^[\d.]+ \S/.test(cell));

/* head: names of columns; rows of cells that are texts, numbers or elements. Amounts are set to the right. */
function table(caption, head, rows) {
  const isNumber = head.map((_, i) => rows.length > 0 && rows.every((row) => isAmount(row[i])));
  const kind = (i) => (isNumber[i] ? { class: "number" } : {});
  return html(
    "table",
    {},
    html("caption", { class: "unseen" }, caption),
    html("thead", {}, html("tr", {}, ...head.map((text, i) => html("th", { scope: "col", ...kind(i) }, text)))),
    html(
      "tbody",
      {},
      ...rows.map((row) =>
        html("tr", {}, ...row.map((cell, i) => html("td", kind(i), typeof cell === "number" ? count(cell) : cell))),
      ),
    ),
  );
}
