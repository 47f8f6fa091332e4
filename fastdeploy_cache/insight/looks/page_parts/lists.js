/* The sections with lists: what is wrong, ranks, requests that run, and the last requests. */

const PHASES = {
  waiting: "waits for loads",
  ahead: "runs ahead of its loads",
  settled: "computes",
  void: "void: a load was lost",
};

/* "12 of 50 requests" where a list is cut, and "50 requests" where it is whole. */
const shownOf = (shown, known, what) => `${shown < known ? `${count(shown)} of ` : ""}${count(known)} ${what}`;

function showFindings(findings, now) {
  at("doctor-when").textContent = `${findings.length ? `${findings.length} found, ` : ""}looked at ${clock(now)}`;
  const rows = findings.length ? findings.map(aboutFinding) : [html("p", { class: "fine" }, fine())];
  at("findings").replaceChildren(...rows);
}

function aboutFinding({ name, evidence, advice, share }) {
  const title = name.replaceAll("_", " ");
  const gain = share === null ? "" : ` At most ${percent(share)} of all prompt tokens can be won by it.`;
  return html(
    "div",
    { class: "finding" },
    html("h3", {}, title[0].toUpperCase() + title.slice(1)),
    html("p", {}, evidence),
    html("p", {}, html("b", {}, "What to do: "), advice + gain),
  );
}

function fine() {
  const { num_known: known, needs } = view.data ?? { num_known: 0, needs: null };
  if (!needs || known >= needs.doctor) return "Nothing is wrong, as far as can be seen.";
  return (
    `Nothing is wrong so far. Ranks and storage are looked at already; the other checks begin with ` +
    `${needs.doctor} requests, and there were ${known}. What they find will appear here.`
  );
}

function showRanks(data) {
  const ranks = data.ranks.ranks;
  if (!ranks.length)
    return at("ranks").replaceChildren(
      html("p", { class: "empty" }, "This cache runs without processes of its own, so there are no ranks to show."),
    );
  const rows = ranks.map((rank) => [
    String(rank.rank),
    html("span", { class: rank.up ? "good" : "bad" }, rank.up ? "up" : "down"),
    String(rank.pid ?? "none"),
    rank.num_restarts,
  ]);
  const { num_loads_in_flight: loads, num_copies_down_in_flight: copies } = data.ranks;
  at("ranks").replaceChildren(
    table("Ranks", ["Rank", "State", "Process", "Restarts"], rows),
    html("p", { class: "note" }, `${loads} loads and ${copies} copies to the CPU tier are in flight.`),
  );
}

function showRunning(data) {
  const shown = data.running.length;
  const isCut = shown < data.num_running;
  at("running-when").textContent = isCut ? shownOf(shown, data.num_running, "requests, the oldest") : "now";
  if (!shown)
    return at("running").replaceChildren(
      html("p", { class: "empty" }, "No request runs now. One appears here from its match to its release."),
    );
  const rows = data.running.map((each) => [
    html("code", { title: each.request_id }, each.request_id),
    PHASES[each.phase] ?? each.phase,
    each.num_tokens,
    sum(Object.values(each.matched_tokens)),
    each.num_computed_tokens,
    each.num_blocks,
    seconds(each.running_seconds),
  ]);
  const head = ["Request", "What it does", "Tokens", "Hit tokens", "Committed tokens", "Blocks", "Runs for"];
  at("running").replaceChildren(table("Requests that run", head, rows));
}

function showRequests(data) {
  const [place, shown] = [at("requests"), data.recent.length];
  const selected = getSelection();
  if (place.contains(document.activeElement)) return;
  if (!selected.isCollapsed && place.contains(selected.anchorNode)) return; // somebody copies from it
  at("requests-when").textContent = shownOf(shown, data.num_known, "requests");
  at("requests-legend").hidden = !shown;
  if (!shown) {
    const off = "Requests are not remembered, because num_explained_requests is 0.";
    const sentence = "No request was admitted yet. The last ones will appear here, each with its hits and misses.";
    place.replaceChildren(html("p", { class: "empty" }, data.needs.remembers ? sentence : off));
    return;
  }
  const command = html("code", {}, `fastdeploy-cache explain --last ${data.num_known}`);
  place.replaceChildren(
    ...data.recent.map(aboutRequest),
    ...(shown < data.num_known ? [html("p", { class: "note more" }, command, " tells of the older ones, too.")] : []),
  );
}

function aboutRequest(each) {
  const hits = each.hits.map((hit) => [TIER_COLORS[hit.tier], hit.num_tokens]);
  const hit = sum(each.hits.map((part) => part.num_tokens));
  const words = each.hits.map((part) => `${count(part.num_tokens)} tokens from ${TIER_NAMES[part.tier]}`).join(", ");
  const row = html(
    "details",
    {},
    html(
      "summary",
      {},
      html("code", { title: each.request_id }, each.request_id),
      track(hits, each.num_tokens, words || "nothing hit"),
      html("span", {}, `${percent(hit / each.num_tokens)} of ${count(each.num_tokens)} tokens`),
    ),
    html("pre", {}, each.text),
  );
  row.open = view.opened.has(each.request_id);
  row.addEventListener("toggle", () =>
    row.open ? view.opened.add(each.request_id) : view.opened.delete(each.request_id),
  );
  return row;
}
