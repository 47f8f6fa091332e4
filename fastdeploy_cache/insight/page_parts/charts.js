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
  if (number >= 7200) return (number / 3600).toFixed(1) + " h";
  if (number >= 120) return (number / 60).toFixed(1) + " min";
  if (number >= 1) return number.toFixed(number >= 10 ? 0 : 1) + " s";
  return (number * 1000).toFixed(number >= 0.01 ? 0 : 1) + " ms";
}

const percent = (share) => (100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0) + " %";

function legend(entries) {
  const parts = entries.map(([name, color]) => {
    const mark = html("i");
    mark.style.background = color;
    return html("span", {}, mark, name);
  });
  return html("div", { class: "legend" }, ...parts);
}

/* A picture is as wide as its place, so that its words are as large as all others. */
function plotFor(place, height = 190) {
  return { width: Math.max(240, place.clientWidth), height, left: 48, right: 10, top: 8, bottom: 22 };
}

function frame(plot, most, format, label) {
  const picture = svg("svg", { viewBox: `0 0 ${plot.width} ${plot.height}`, role: "img", "aria-label": label });
  for (const share of [0, 0.5, 1]) {
    const y = plot.top + (1 - share) * (plot.height - plot.top - plot.bottom);
    picture.append(svg("line", { class: "grid", x1: plot.left, x2: plot.width - plot.right, y1: y, y2: y }));
    picture.append(svg("text", { x: plot.left - 6, y: y + 4, "text-anchor": "end" }, format(most * share)));
  }
  return picture;
}

/* Values stacked upon each other over time. series: [name, color, values]; times in seconds; null leaves a gap. */
function stacked(place, times, series, { most, format, label }) {
  const plot = plotFor(place);
  const picture = frame(plot, most, format, label);
  const from = times[0],
    to = Math.max(times[times.length - 1], from + 1);
  const x = (time) => plot.left + ((time - from) / (to - from)) * (plot.width - plot.left - plot.right);
  const y = (value) => plot.top + (1 - Math.min(1, value / most)) * (plot.height - plot.top - plot.bottom);
  const below = times.map(() => 0);
  for (const [, color, values] of series) {
    const upper = values.map((value, i) => below[i] + (value ?? 0));
    for (const part of withoutGaps(values)) {
      const top = part.map((i) => `${x(times[i]).toFixed(1)},${y(upper[i]).toFixed(1)}`);
      const bottom = part.map((i) => `${x(times[i]).toFixed(1)},${y(below[i]).toFixed(1)}`).reverse();
      const shape = svg("polygon", { points: [...top, ...bottom].join(" ") });
      shape.style.fill = shape.style.stroke = color;
      shape.style.opacity = 0.85;
      picture.append(shape);
    }
    upper.forEach((value, i) => {
      below[i] = value;
    });
  }
  picture.append(...timeAxis(plot, from, to), hover(plot, times, series, x, format));
  place.replaceChildren(picture, legend(series.map(([name, color]) => [name, color])));
}

/* The places of values in a row that are there. */
function withoutGaps(values) {
  const parts = [[]];
  values.forEach((value, i) => (value === null ? parts.push([]) : parts[parts.length - 1].push(i)));
  return parts.filter((part) => part.length);
}

function timeAxis(plot, from, to) {
  const ago = (share) => {
    const back = (1 - share) * (to - from);
    return back < 1 ? "now" : "-" + seconds(back);
  };
  return [0, 0.5, 1].map((share) =>
    svg(
      "text",
      {
        x: plot.left + share * (plot.width - plot.left - plot.right),
        y: plot.height - 5,
        "text-anchor": share === 0 ? "start" : share === 1 ? "end" : "middle",
      },
      ago(share),
    ),
  );
}

/* A line under the pointer, and what the series were there. */
function hover(plot, times, series, x, format) {
  const line = svg("line", { class: "grid", y1: plot.top, y2: plot.height - plot.bottom, visibility: "hidden" });
  const title = svg("title");
  const area = svg(
    "rect",
    {
      x: plot.left,
      y: plot.top,
      width: plot.width - plot.left - plot.right,
      height: plot.height - plot.top - plot.bottom,
      fill: "transparent",
    },
    title,
  );
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    const at = plot.left + ((event.clientX - box.left) / box.width) * (plot.width - plot.left - plot.right);
    let nearest = 0;
    times.forEach((time, i) => {
      if (Math.abs(x(time) - at) < Math.abs(x(times[nearest]) - at)) nearest = i;
    });
    line.setAttribute("x1", x(times[nearest]));
    line.setAttribute("x2", x(times[nearest]));
    line.setAttribute("visibility", "visible");
    const when = new Date(times[nearest] * 1000).toLocaleTimeString();
    title.textContent = [
      when,
      ...series.map(
        ([name, , values]) => `${name}: ${values[nearest] == null ? "no requests" : format(values[nearest])}`,
      ),
    ].join("\n");
  });
  area.addEventListener("pointerleave", () => line.setAttribute("visibility", "hidden"));
  return svg("g", {}, line, area);
}

/* Lines over the factors of a size, which stand at equal distances. series: [name, color, [[factor, value], ...]]. */
function curves(place, factors, series, { format, label, most = 1 }) {
  const plot = plotFor(place);
  const picture = frame(plot, most, format, label);
  const inner = plot.width - plot.left - plot.right;
  const x = (factor) => plot.left + ((factors.indexOf(factor) + 0.5) / factors.length) * inner;
  const y = (value) => plot.top + (1 - value / most) * (plot.height - plot.top - plot.bottom);
  for (const factor of factors) {
    const text = factor === 1 ? "as it is" : factor + " times";
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

function track(parts, most) {
  return html(
    "div",
    { class: "track" },
    ...parts.map(([color, value]) => {
      const part = html("i");
      part.style.width = (most ? (100 * value) / most : 0) + "%";
      part.style.background = color;
      return part;
    }),
  );
}
