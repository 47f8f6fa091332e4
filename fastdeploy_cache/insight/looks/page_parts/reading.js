/* Reading a chart: a line at one moment, and what the values were there, by pointer and by arrow keys. A chart is drawn
   anew every few seconds, so its place keeps which moment was chosen. */

const readings = new WeakMap(); // by place: { chart, time }

function readable(place, chart) {
  const reading = readings.get(place) ?? listening(place, { time: null });
  const { plot, picture } = chart;
  chart.line = svg("line", { class: "cursor", y1: plot.top, y2: plot.height - plot.bottom, visibility: "hidden" });
  picture.append(chart.line);
  reading.chart = chart;
  place.tabIndex = 0;
  place.setAttribute("role", "group");
  showReading(place, reading);
}

function notReadable(place) {
  for (const name of ["tabindex", "role", "aria-label"]) place.removeAttribute(name);
  if (readings.has(place)) readings.get(place).chart = null;
}

function listening(place, reading) {
  readings.set(place, reading);
  const choose = (time) => {
    reading.time = time;
    if (reading.chart) showReading(place, reading);
  };
  place.addEventListener("pointermove", (event) => choose(timeUnder(event, reading.chart)));
  place.addEventListener("pointerleave", () => choose(null));
  place.addEventListener("blur", () => choose(null));
  place.addEventListener("keydown", (event) => {
    if (!reading.chart) return;
    const { times, first } = reading.chart,
      last = times.length - 1;
    const now = reading.time === null ? last : nearest(reading.chart, reading.time);
    const steps = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: first, End: last };
    if (!(event.key in steps)) return;
    choose(times[Math.min(last, Math.max(first, steps[event.key]))]);
    event.preventDefault();
  });
  return reading;
}

function timeUnder(event, chart) {
  if (!chart) return null;
  const { plot, times, picture } = chart,
    box = picture.getBoundingClientRect();
  const inside = ((event.clientX - box.left) / box.width) * plot.width - plot.left;
  const across = inside / (plot.width - plot.left - plot.right);
  return times[0] + Math.min(1, Math.max(0, across)) * (times[times.length - 1] - times[0]);
}

function nearest({ times, first }, time) {
  let best = first;
  for (let i = first; i < times.length; i++) if (Math.abs(times[i] - time) < Math.abs(times[best] - time)) best = i;
  return best;
}

/* The names of the series are the legend, too; without a chosen moment their newest values stand there. */
function showReading(place, { chart, time }) {
  const { times, series, x, format, absent, line, words } = chart;
  const at = time === null ? times.length - 1 : nearest(chart, time);
  line.setAttribute("visibility", time === null ? "hidden" : "visible");
  line.setAttribute("x1", x(times[at]));
  line.setAttribute("x2", x(times[at]));
  words.setAttribute("aria-live", document.activeElement === place ? "polite" : "off");
  const entries = series.map(([name, color, values]) => [
    `${name}: ${values[at] == null ? absent : format(values[at])}`,
    color,
  ]);
  words.replaceChildren(html("b", {}, time === null ? "now" : clock(times[at])), ...legend(entries).childNodes);
}
