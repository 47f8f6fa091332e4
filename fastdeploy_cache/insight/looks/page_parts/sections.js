/* The sections with figures and charts: each shows its part of the data, or says what will stand in its place. */

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
  pinned: "cached and held by requests, copies or pins",
  private: "of requests that compute",
  in_flight: "being copied",
  evictable: "cached, nothing holds it now",
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
const column = (rows, i) => rows.map((row) => row[i]);
const grown = (values, { first, last }) => values[last] - values[first];

function showFigures(data, within) {
  const history = data.history;
  const tokens = grown(history.num_tokens, within);
  const hits = data.tier_names.map((_, i) => grown(column(history.hit_tokens, i), within));
  const saved = grown(history.saved_seconds.map(sum), within);
  const knows = sum(history.saved_seconds[within.last]) > 0;
  const figures = [
    tokens ? [percent(sum(hits) / tokens), "of prompt tokens hit"] : ["–", "no prompt tokens in this time"],
    [count(grown(history.num_requests, within)), "requests admitted"],
    [count(tokens), "prompt tokens"],
    knows ? [seconds(saved), "of computing saved"] : ["–", "of computing saved is not known yet"],
    [count(data.num_running), "requests run now"],
  ];
  at("figures").replaceChildren(
    ...figures.map(([value, text]) => html("div", { class: "figure" }, html("b", {}, value), html("span", {}, text))),
  );
}

function showRates(data, { times, rise }) {
  const tokens = rise(data.history.num_tokens);
  if (!sum(tokens))
    return nothingYet(at("rate"), "No request came in this time. What the next ones hit in each tier appears here.");
  const series = data.tier_names.map((tier, i) => {
    const hits = rise(column(data.history.hit_tokens, i));
    return [TIER_NAMES[tier], TIER_COLORS[tier], hits.map((hit, j) => (tokens[j] ? hit / tokens[j] : null))];
  });
  const label = "Hit rate by tier over time";
  stacked(at("rate"), times, series, { most: 1, format: percent, label, steps: true, absent: "no requests" });
}

function showCauses(data, within) {
  const missed = data.causes.map((name, i) => [name, grown(column(data.history.missed_tokens, i), within)]);
  const shown = missed.filter(([, tokens]) => tokens > 0).sort((a, b) => b[1] - a[1]);
  const total = sum(shown.map(([, tokens]) => tokens));
  at("causes-note").textContent = total ? `${count(total)} tokens were computed.` : "";
  if (!total)
    return nothingYet(at("causes"), "No token was computed in this time. As soon as one is, the cause appears here.");
  const rows = shown.map(([name, tokens]) => [
    name.replaceAll("_", " "),
    CAUSES[name],
    [["var(--accent)", tokens]],
    `${percent(tokens / total)} · ${count(tokens)} tokens`,
  ]);
  at("causes").replaceChildren(bars(rows, shown[0][1]));
}

function showTiers(data) {
  const tiers = Object.entries(data.tiers).filter(([, states]) => sum(Object.values(states)) > 0);
  const rows = tiers.map(([tier, states]) => {
    const total = sum(Object.values(states));
    const parts = Object.keys(STATE_COLORS).map((state) => [STATE_COLORS[state], states[state]]);
    return [TIER_NAMES[tier], "", parts.map(([color, num]) => [color, num / total]), `${count(total)} blocks`];
  });
  const states = Object.entries(STATE_NAMES).map(([state, name]) => [
    legend([[name, STATE_COLORS[state]]]),
    ...tiers.map(([, counts]) => counts[state]),
  ]);
  const head = ["Blocks that are", ...tiers.map(([tier]) => TIER_NAMES[tier])];
  const size = `A block has ${data.block_size} tokens` + (data.block_bytes ? `, ${bytes(data.block_bytes)}.` : ".");
  const none = tiers.length < 2 ? " There is no CPU tier; num_cpu_blocks makes one." : "";
  at("tiers").replaceChildren(
    bars(rows, 1),
    table("Blocks of each tier by state", head, states),
    html("p", { class: "note" }, size + none),
  );
}

function showSaved(data, { first, last, kept, times }) {
  const history = data.history;
  const since = (name) => kept.map((i) => sum(history[name][i]) - sum(history[name][first]));
  const saved = since("saved_seconds"),
    spent = since("move_seconds");
  const most = Math.max(saved[saved.length - 1], spent[spent.length - 1]);
  if (!most) {
    const sentence = sum(history.saved_seconds[last])
      ? "Nothing was hit in this time. What the next hits save appears here."
      : "What hits save appears here as soon as there are some, and the speed of computing is known.";
    return nothingYet(at("saved"), sentence);
  }
  const net = saved.map((value, i) => Math.max(0, value - spent[i]));
  const series = [
    ["spent on copies", "var(--cpu)", spent],
    ["saved beyond that", "var(--storage)", net],
  ];
  stacked(at("saved"), times, series, { most, format: seconds, label: "Time saved and spent, added up" });
}

function showWhatIf(data) {
  at("whatif-more").hidden = !data.what_if.length;
  if (!data.what_if.length) {
    at("whatif-note").textContent = "";
    const needs = data.needs;
    const sentence =
      needs.what_if_off !== null
        ? `Nothing is estimated, because ${needs.what_if_off}.`
        : `What other sizes would have hit appears here after ${needs.what_if} requests within an hour.`;
    return nothingYet(at("whatif"), sentence);
  }
  const isKnown = data.what_if.some((rate) => rate.policy === data.policy_now); // not yet, where it has just changed
  const inForce = isKnown ? data.policy_now : data.policy;
  const own = data.what_if.filter((rate) => rate.policy === inForce);
  const others = data.what_if.filter((rate) => rate.policy !== inForce);
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
  const label = "Hit rate of the last hour with other sizes of the tiers; the numbers are in the table below";
  curves(at("whatif"), factors, series, { format: percent, label });
  const rows = own.map((rate) => [
    TIER_NAMES[rate.tier],
    rate.num_blocks,
    percent(rate.token_hit_rate),
    rate.saved_seconds === null ? "not known" : seconds(rate.saved_seconds),
  ]);
  const names = ["Tier", "Blocks", "Would hit", "Would save in an hour"];
  at("whatif-numbers").replaceChildren(table("What other sizes would hit", names, rows));
}

function showMoved(data, { times, rise }) {
  const kinds = {
    swap_in: ["loads to the GPU", "var(--gpu)"],
    swap_out: ["copies to the CPU tier", "var(--cpu)"],
    prefetch: ["reads from storage", "var(--storage)"],
    write: ["writes to storage", "var(--both)"],
  };
  const series = Object.entries(kinds).map(([kind, [name, color]]) => {
    const moved = rise(data.history.moved_bytes.map((each) => each[kind] ?? 0));
    return [name, color, moved.map((value, i) => (i ? value / Math.max(0.5, times[i] - times[i - 1]) : null))];
  });
  const most = Math.max(...times.map((_, i) => sum(series.map(([, , values]) => values[i]))));
  const each = (number) => bytes(number) + "/s";
  if (most) stacked(at("moved"), times, series, { most, format: each, label: "Bytes copied each second", steps: true });
  else nothingYet(at("moved"), "Nothing was copied in this time. Copies between the tiers appear here as they happen.");
  at("storage").textContent = aboutStorage(data.storage);
}

function aboutStorage(storage) {
  if (!storage) return "No store is attached.";
  return (
    `The store is ${storage.is_available ? "open" : "not open"}. Since the start ` +
    `${count(storage.num_fetched_blocks)} blocks came from it and ${count(storage.num_written_blocks)} were written. ` +
    `${count(storage.num_skipped_blocks)} were not taken, ${count(storage.num_damaged_objects)} objects were damaged.`
  );
}
