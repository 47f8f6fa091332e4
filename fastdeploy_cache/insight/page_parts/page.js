/* What the page asks for, and where it shows that. */

const UPDATE_SECONDS = 2,
  FINDINGS_SECONDS = 20,
  MAP_SECONDS = 10,
  ANSWER_SECONDS = 8;
const TIER_COLORS = { gpu: "var(--gpu)", cpu: "var(--cpu)", storage: "var(--storage)" };
const TIER_NAMES = { gpu: "GPU", cpu: "CPU tier", storage: "storage" };
const STATE_COLORS = {
  pinned: "var(--gpu)",
  private: "var(--both)",
  in_flight: "var(--cpu)",
  evictable: "var(--storage)",
  free: "var(--track)",
};
const STATE_NAMES = {
  pinned: "cached and in use",
  private: "of requests that compute",
  in_flight: "being copied",
  evictable: "cached, nobody uses it now",
  free: "free",
};
const CAUSES = {
  new: "Nobody has asked for these tokens before.",
  new_or_forgotten: "New, or cached so long ago that it is not remembered.",
  evicted: "They were cached and had to make room for others.",
  namespace: "The same tokens are cached under another namespace.",
  image: "The same tokens are cached with another image.",
  uncommitted: "Another request was computing them.",
  late: "They were on their way and came too late.",
  slower: "Computing them was faster than loading them.",
  rank: "A rank was down, or lost its memory.",
  room: "There was no room to load them into.",
  limit: "A setting does not allow it.",
  reset: "They were forgotten by a reset.",
  partial: "The end of a prompt that fills no block.",
  last: "The last token of a prompt, which is always computed.",
};
const at = (id) => document.getElementById(id);
const sum = (values) => values.reduce((total, value) => total + value, 0);
const view = {
  data: null,
  startedAt: null,
  map: new PrefixMap(at("map"), at("map-detail"), at("map-up")),
  opened: new Set(),
};

async function ask(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(ANSWER_SECONDS * 1000), cache: "no-store" });
  if (!answer.ok) throw new Error(`${path} answered ${answer.status}`);
  return answer.json();
}

/* Ask again and again; a manager that does not answer is asked more seldom, and shown as such. */
function keepAsking(path, everySeconds, show) {
  let wait = everySeconds;
  const next = async () => {
    try {
      if (!document.hidden) show(await ask(path));
      wait = everySeconds;
    } catch (error) {
      wait = Math.min(30, wait * 1.5);
      if (path === "/data.json")
        trouble(`The manager does not answer: ${error.message}. What is below is from before.`);
    }
    setTimeout(next, wait * 1000);
  };
  next();
}

function trouble(text) {
  at("trouble").hidden = !text;
  at("trouble").textContent = text;
  if (text) pill("no answer", "bad");
}

function pill(text, kind) {
  at("state").textContent = text;
  at("state").className = "pill " + kind;
}

/* The history within the chosen span, and the difference of two neighbours of a list of counts. */
function span(data) {
  const from = data.now - Number(at("span").value);
  const all = data.history.at;
  const first = Math.max(0, all.findIndex((time) => time >= from) - 1);
  return {
    first,
    times: all.slice(first + 1),
    rise: (values) => values.slice(first + 1).map((value, i) => value - values[first + i]),
  };
}

const column = (rows, i) => rows.map((row) => row[i]);

function showData(data) {
  trouble("");
  if (view.startedAt !== null && data.started_at !== view.startedAt) view.opened.clear();
  [view.data, view.startedAt] = [data, data.started_at];
  at("instance").textContent = `instance ${data.dp}, ${data.policy_now}, blocks of ${data.block_size} tokens`;
  pill(data.life_cycle, data.life_cycle === "running" ? "good" : "bad");
  const hour = span(data);
  showFigures(data, hour);
  showRates(data, hour);
  showCauses(data, hour);
  showTiers(data);
  showSaved(data, hour);
  showWhatIf(data);
  showMoved(data, hour);
  showRanks(data);
  showRequests(data);
}

function showFigures(data, { first }) {
  const history = data.history,
    last = history.at.length - 1;
  const grown = (name) => history[name][last] - history[name][first];
  const hits = data.tier_names.map((_, i) => history.hit_tokens[last][i] - history.hit_tokens[first][i]);
  const tokens = grown("num_tokens"),
    saved = sum(history.saved_seconds[last]) - sum(history.saved_seconds[first]);
  const figures = [
    [tokens ? percent(sum(hits) / tokens) : "-", "of prompt tokens hit"],
    [count(grown("num_requests")), "requests"],
    [count(tokens), "prompt tokens"],
    [seconds(saved), "of computing saved"],
    [String(data.num_running), "requests run now"],
  ];
  at("figures").replaceChildren(
    ...figures.map(([value, text]) => html("div", { class: "figure" }, html("b", {}, value), html("span", {}, text))),
  );
}

function showRates(data, { times, rise }) {
  const tokens = rise(data.history.num_tokens);
  const series = data.tier_names.map((tier, i) => {
    const hits = rise(column(data.history.hit_tokens, i));
    return [TIER_NAMES[tier], TIER_COLORS[tier], hits.map((hit, j) => (tokens[j] ? hit / tokens[j] : null))];
  });
  stacked(at("rate"), times, series, { most: 1, format: percent, label: "Hit rate by tier over time" });
}

function showCauses(data, { first }) {
  const history = data.history,
    last = history.at.length - 1;
  const missed = data.causes.map((name, i) => [
    name,
    history.missed_tokens[last][i] - history.missed_tokens[first][i],
  ]);
  const shown = missed.filter(([, tokens]) => tokens > 0).sort((a, b) => b[1] - a[1]);
  const total = sum(shown.map(([, tokens]) => tokens));
  at("causes-note").textContent = total
    ? `${count(total)} tokens were computed.`
    : "No token was computed in this time.";
  const rows = shown.map(([name, tokens]) => [
    name,
    CAUSES[name],
    [["var(--accent)", tokens]],
    `${percent(tokens / total)} · ${count(tokens)}`,
  ]);
  at("causes").replaceChildren(bars(rows, shown.length ? shown[0][1] : 0));
}

function showTiers(data) {
  const rows = Object.entries(data.tiers).map(([tier, states]) => {
    const total = sum(Object.values(states));
    return [
      TIER_NAMES[tier],
      "",
      Object.keys(STATE_COLORS).map((state) => [STATE_COLORS[state], total ? states[state] / total : 0]),
      total ? `${count(total)} blocks` : "there is none",
    ];
  });
  const counts = (state) =>
    Object.values(data.tiers)
      .map((states) => count(states[state]))
      .join(" and ");
  const names = Object.entries(STATE_NAMES).map(([state, name]) => [
    `${name}: ${counts(state)}`,
    STATE_COLORS[state],
  ]);
  at("tiers").replaceChildren(bars(rows, 1), legend(names));
}

function showSaved(data, { first, times }) {
  const history = data.history,
    last = history.at.length - 1;
  const since = (name) => history[name].slice(first + 1).map((each) => sum(each) - sum(history[name][first]));
  const saved = since("saved_seconds"),
    spent = since("move_seconds");
  const most = Math.max(saved[saved.length - 1], spent[spent.length - 1], 0.001);
  at("saved-note").textContent = sum(history.saved_seconds[last])
    ? "Computing that hits have saved, and waiting for copies that they cost, added up over this time."
    : "Nothing is counted before the speed of computing is known.";
  const net = saved.map((value, i) => Math.max(0, value - spent[i]));
  const series = [
    ["spent on copies", "var(--cpu)", spent],
    ["saved beyond that", "var(--storage)", net],
  ];
  stacked(at("saved"), times, series, { most, format: seconds, label: "Seconds saved and spent" });
}

function showWhatIf(data) {
  if (!data.what_if.length) {
    at("whatif-note").textContent = "Known after 50 requests, unless insight.what_if is off.";
    at("whatif").replaceChildren();
    return;
  }
  const own = data.what_if.filter((rate) => rate.policy === data.policy);
  const others = data.what_if.filter((rate) => rate.policy !== data.policy);
  const factors = [...new Set(own.map((rate) => rate.factor))];
  const line = (rates, tier, dashed) => {
    const name = (tier === "gpu" ? "GPU pool" : "CPU tier") + (dashed ? `, ${rates[0].policy}` : "");
    return [
      name,
      TIER_COLORS[tier],
      rates.filter((rate) => rate.tier === tier).map((rate) => [rate.factor, rate.token_hit_rate]),
      dashed,
    ];
  };
  const series = [
    line(own, "gpu", false),
    line(own, "cpu", false),
    ...(others.length ? [line(others, "gpu", true), line(others, "cpu", true)] : []),
  ];
  const none =
    sum(Object.values(data.tiers.cpu)) === 0
      ? " There is no CPU tier now; its sizes are in terms of the GPU pool's."
      : "";
  at("whatif-note").textContent =
    `What the last hour would have hit with other sizes, the other tier as it is.${none}`;
  curves(at("whatif"), factors, series, { format: percent, label: "Hit rate over sizes of the tiers" });
  const rows = own.map((rate) => {
    const saved = rate.saved_seconds === null ? "-" : seconds(rate.saved_seconds);
    const cells = [TIER_NAMES[rate.tier], count(rate.num_blocks), percent(rate.token_hit_rate), saved];
    return html("tr", {}, ...cells.map((text) => html("td", {}, text)));
  });
  const names = ["Tier", "Blocks", "Would hit", "Would save in an hour"];
  const head = html("tr", {}, ...names.map((text) => html("th", { scope: "col" }, text)));
  at("whatif-numbers").replaceChildren(html("table", {}, head, ...rows));
}

function showMoved(data, { times, rise }) {
  const colors = { swap_in: "var(--gpu)", swap_out: "var(--cpu)", prefetch: "var(--storage)", write: "var(--both)" };
  const names = {
    swap_in: "loads to the GPU",
    swap_out: "copies to the CPU tier",
    prefetch: "reads from storage",
    write: "writes to storage",
  };
  const gaps = times.map((time, i) => Math.max(0.5, time - (i ? times[i - 1] : time - 10)));
  const series = Object.keys(names).map((kind) => [
    names[kind],
    colors[kind],
    rise(data.history.moved_bytes.map((each) => each[kind] ?? 0)).map((moved, i) => moved / gaps[i]),
  ]);
  const most = Math.max(1, ...times.map((_, i) => sum(series.map(([, , values]) => values[i]))));
  at("moved-note").textContent =
    most > 1 ? "Bytes each second, of all ranks together." : "Nothing was copied in this time.";
  stacked(at("moved"), times, series, { most, format: bytes, label: "Bytes copied each second" });
  const storage = data.storage;
  const text = !storage
    ? "No store is attached."
    : `The store is ${storage.is_available ? "open" : "not open"}: ` +
      `${count(storage.num_fetched_blocks)} blocks came from it, ${count(storage.num_written_blocks)} were written, ` +
      `${count(storage.num_skipped_blocks)} were not taken, ${count(storage.num_damaged_objects)} objects were damaged.`;
  at("storage").replaceChildren(html("p", { class: "note" }, text));
}

function showRanks(data) {
  const ranks = data.ranks.ranks;
  if (!ranks.length) {
    at("ranks").replaceChildren(html("p", { class: "empty" }, "This cache runs without processes of its own."));
    return;
  }
  const head = html(
    "tr",
    {},
    ...["Rank", "State", "Process", "Restarts"].map((text) => html("th", { scope: "col" }, text)),
  );
  const rows = ranks.map((rank) => {
    const state = html("td", {}, rank.up ? "up" : "down");
    state.style.color = rank.up ? "var(--good)" : "var(--bad)";
    return html(
      "tr",
      {},
      html("td", {}, String(rank.rank)),
      state,
      html("td", {}, String(rank.pid ?? "-")),
      html("td", {}, String(rank.num_restarts)),
    );
  });
  const { num_loads_in_flight: loads, num_copies_down_in_flight: copies } = data.ranks;
  const flight = `${loads} loads and ${copies} copies to the CPU tier are in flight.`;
  at("ranks").replaceChildren(
    html("table", {}, html("thead", {}, head), html("tbody", {}, ...rows)),
    html("p", { class: "note" }, flight),
  );
}

function showRequests(data) {
  at("running").textContent =
    `${data.num_running} run now. Below are the last ${data.recent.length} that were admitted.`;
  const rows = data.recent.map((each) => {
    const hits = each.hits.map((hit) => [TIER_COLORS[hit.tier], hit.num_tokens]);
    const hit = sum(each.hits.map((part) => part.num_tokens));
    const summary = html(
      "summary",
      {},
      html("code", {}, each.request_id),
      track(hits, each.num_tokens),
      html("span", {}, `${percent(hit / each.num_tokens)} of ${count(each.num_tokens)}`),
    );
    const row = html("details", {}, summary, html("pre", {}, each.text));
    row.open = view.opened.has(each.request_id);
    row.addEventListener("toggle", () =>
      row.open ? view.opened.add(each.request_id) : view.opened.delete(each.request_id),
    );
    return row;
  });
  if (!document.activeElement || !at("requests").contains(document.activeElement))
    at("requests").replaceChildren(...rows);
}

function showFindings(findings) {
  const rows = findings.map((each) =>
    html(
      "div",
      { class: "finding" },
      html("b", {}, each.name),
      each.text.slice(each.name.length + 2),
    ),
  );
  at("findings").replaceChildren(
    ...(rows.length ? rows : [html("p", { class: "fine" }, "Nothing is wrong, as far as can be seen.")]),
  );
}

function changeTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
}

at("theme").addEventListener("click", changeTheme);
at("span").addEventListener("change", () => view.data && showData(view.data));
addEventListener("resize", () => {
  if (view.data) {
    showData(view.data);
    view.map.draw();
  }
});
at("map-again").addEventListener("click", async () => view.map.show(await ask("/map.json")));
at("map-legend").append(
  legend([
    ["on the GPU", "var(--gpu)"],
    ["in both", "var(--both)"],
    ["in the CPU tier", "var(--cpu)"],
  ]),
);
keepAsking("/data.json", UPDATE_SECONDS, showData);
keepAsking("/map.json", MAP_SECONDS, (tree) => view.map.show(tree));
keepAsking("/findings.json", FINDINGS_SECONDS, showFindings);
