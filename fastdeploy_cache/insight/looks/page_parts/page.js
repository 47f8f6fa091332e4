/* What the page asks for, the span of time that it shows, and its settings. */

const UPDATE_SECONDS = 2,
  FINDINGS_SECONDS = 20,
  MAP_SECONDS = 10,
  ANSWER_SECONDS = 8;
const view = {
  data: null,
  startedAt: null,
  map: new PrefixMap(at("map"), at("map-detail"), at("map-up"), at("map-when")),
  opened: new Set(),
};

async function ask(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(ANSWER_SECONDS * 1000), cache: "no-store" });
  if (!answer.ok) throw new Error(`${path} answered ${answer.status}`);
  return answer.json();
}

/* Ask again and again; a manager that does not answer is asked more seldom, and shown as such. */
function keepAsking(path, everySeconds, show, onError) {
  let wait = everySeconds;
  const next = async () => {
    try {
      if (!document.hidden) show(await ask(path));
      wait = everySeconds;
    } catch (error) {
      wait = Math.min(30, wait * 1.5);
      onError(error);
    }
    setTimeout(next, wait * 1000);
  };
  next();
}

function trouble(text) {
  at("trouble").hidden = !text;
  if (at("trouble").textContent !== text) at("trouble").textContent = text;
  if (text) pill("no answer", "bad");
}

/* It is read out when it changes, so what has not changed is not written again. */
function pill(text, kind) {
  if (at("state").textContent !== text) at("state").textContent = text;
  at("state").className = "pill " + kind;
}

/* The history within the chosen span: which moments are shown, when they were, and what counts rose by until each. */
function span(data) {
  const chosen = Number(at("span").value),
    all = data.history.at,
    last = all.length - 1;
  const first = Math.max(0, all.findIndex((time) => time >= data.now - chosen) - 1);
  const kept = all.map((_, i) => i).slice(first);
  if (kept.length > 2 && all[last] - all[last - 1] < 2) kept.splice(-2, 1); // too short to say how fast anything was
  const rise = (values) => kept.map((at, i) => (i ? values[at] - values[kept[i - 1]] : null));
  const period = all[last] - all[first];
  return { first, last, kept, times: kept.map((i) => all[i]), rise, period, isWhole: period > chosen - 15 };
}

function showPeriod({ period, isWhole, times }) {
  const chosen = at("span").selectedOptions[0].textContent;
  const text = `last ${isWhole ? chosen : seconds(period)}`;
  for (const each of document.querySelectorAll(".when[data-span]")) each.textContent = text;
  const from = `${text}, from ${clock(times[0], period)} to ${clock(times[times.length - 1], period)}`;
  at("period").textContent = isWhole ? from : `${from}; nothing older is known`;
}

function showData(data) {
  trouble("");
  if (view.startedAt !== null && data.started_at !== view.startedAt) view.opened.clear();
  [view.data, view.startedAt] = [data, data.started_at];
  at("instance").textContent =
    `instance ${data.dp}, eviction policy ${data.policy_now}, blocks of ${data.block_size} tokens`;
  pill(data.life_cycle, data.life_cycle === "running" ? "good" : "bad");
  const within = span(data);
  showPeriod(within);
  showFigures(data, within);
  showRates(data, within);
  showCauses(data, within);
  showTiers(data);
  showSaved(data, within);
  showWhatIf(data);
  showMoved(data, within);
  showRanks(data);
  showRunning(data);
  showRequests(data);
  if (document.querySelector("#findings .fine")) document.querySelector("#findings .fine").textContent = fine();
}

/* The theme that is not shown now can be had; until then the system chooses. */
const darkSystem = matchMedia("(prefers-color-scheme: dark)");
const themeNow = () => document.documentElement.dataset.theme ?? (darkSystem.matches ? "dark" : "light");
const otherTheme = () => (themeNow() === "dark" ? "light" : "dark");

function nameTheme() {
  at("theme").textContent = otherTheme() === "dark" ? "Dark theme" : "Light theme";
}

at("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = otherTheme();
  nameTheme();
});
darkSystem.addEventListener("change", nameTheme);
nameTheme();
at("span").addEventListener("change", () => view.data && showData(view.data));
addEventListener("resize", () => {
  if (view.data) {
    showData(view.data);
    view.map.draw();
  }
});
const showMap = (tree) => view.map.show(tree);
const noMap = (error) => (at("map-when").textContent = `no answer: ${error.message}`);
at("map-again").addEventListener("click", () => ask("/map.json").then(showMap, noMap));
at("map-legend").append(
  legend([
    ["on the GPU", "var(--gpu)"],
    ["in both", "var(--both)"],
    ["in the CPU tier", "var(--cpu)"],
  ]),
);
at("requests-legend").append(
  legend([
    ...Object.entries(TIER_NAMES).map(([tier, name]) => [`from ${name}`, TIER_COLORS[tier]]),
    ["computed", "var(--track)"],
  ]),
);
keepAsking("/data.json", UPDATE_SECONDS, showData, (error) =>
  trouble(`The manager does not answer: ${error.message}. What is below is from before.`),
);
keepAsking("/map.json", MAP_SECONDS, showMap, noMap);
keepAsking(
  "/findings.json",
  FINDINGS_SECONDS,
  (findings) => showFindings(findings, Date.now() / 1000),
  (error) => (at("doctor-when").textContent = `the doctor does not answer: ${error.message}`),
);
