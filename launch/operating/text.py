"""What a running cache has said, in lines, tables and trees for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.tree import Tree

from fastdeploy_cache.errors import counted, duration, named
from fastdeploy_cache.launch.findings import table_of

WHAT_IF_NOT_KNOWN = (
    "not known yet: it takes 10 requests, which are counted from the first metrics endpoint or the first such look on, "
    "so perhaps from now on; with insight.what_if off, and of a model with rows, it is never known"
)
_MOST_CHECKPOINTS = 3  # that are shown of one prefix
_WORDS = ("prefix", "request", "phase", "state", "matched", "namespace")


def seconds_ago(seconds: float | None) -> str:
    """An age in a word; a dash for one that nobody knows."""
    if seconds is None:
        return "-"
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 0.05 else "under 0.1 s"


def state_word(state: str) -> str:
    """A state of blocks, for people: requests and copies hold blocks, too, and a pin is what an operator has set."""
    return "held" if state == "pinned" else state


def process_word(status: Mapping[str, Any]) -> str:
    """Whether a rank's process is there, and why not; small where nothing is wrong."""
    return "up" if status["up"] else {"off": "OFF", "short": "WAITS"}.get(status["state"], "DOWN")


def status_lines(document: Mapping[str, Any]) -> list[str]:
    """The state of a cache, a line for each thing."""
    first = f"{document['life_cycle']}: pid {document['pid']}"
    if document.get("url"):
        first += f", API {document['url']}/v1/chat/completions, metrics {document.get('metrics')}"
    lines = [first]
    for rank in document["ranks"]:
        state = process_word(rank)
        lines.append(f"rank {rank['rank']}: {state}, pid {rank['pid']}, restarts {rank['num_restarts']}")
    lines += [f"trouble: {trouble}" for trouble in document.get("troubles", ())]
    for tier, states in document["tiers"].items():
        lines.append(f"{tier.upper()}: " + ", ".join(f"{count} {state_word(state)}" for state, count in states.items()))
    if storage := document["storage"]:
        state = "open" if storage["available"] else "NOT OPEN"
        counts = [f"{counted(count, 'block')} {fate}" for fate, count in storage["blocks"].items()]
        counts += [f"{counted(count, 'object')} {reason}" for reason, count in storage["lost_objects"].items() if count]
        breakers = ", ".join(f"{operation} breaker {state}" for operation, state in storage["breakers"].items())
        lines.append(f"storage: {state}; {', '.join(counts)}; {breakers}")
    lines.append(
        f"requests: {document['requests']} running; {counted(document['transfers_in_flight'], 'copy')} in flight; "
        f"eviction policy {document['eviction_policy']}; {counted(document['pins'], 'pin')}"
    )
    return [*lines, hit_rates_line(document), *_worth(document)]


def hit_rates_line(document: Mapping[str, Any]) -> str:
    """The hit rates of the last minutes; where nobody asked for anything there are none."""
    rates = document["hit_rates"].items()
    if any(rate is None for _, rate in rates):
        return f"hit rates, recently: no request came in the last {duration(document['hit_rate_window_seconds'])}"
    return "hit rates, recently: " + ", ".join(f"{name} {rate:.0%}" for name, rate in rates)


def what_if_table(rates: Sequence[Mapping[str, Any]]) -> Table:
    """What other sizes of the tiers would have hit in the last hour."""
    rows = [
        (
            rate["tier"].upper(),
            f"{rate['factor']:g}",
            rate["num_blocks"],
            rate["policy"],
            f"{rate['token_hit_rate']:.1%}",
            "-" if rate["saved_seconds"] is None else f"{rate['saved_seconds']:.1f}",
        )
        for rate in rates
    ]
    columns = ("tier", "times its size", "blocks", "policy", "hit", "seconds saved")
    table = table_of(columns, rows, words=("tier", "policy"))
    most = rates[0]["most_token_hit_rate"]
    if most is not None:
        table.caption = f"No size of any tier, and no policy, would have hit more than {most:.1%}."
    return table


def _worth(document: Mapping[str, Any]) -> list[str]:
    """What the cache has saved, and why it has not saved more; nothing before the first request."""
    lines, missed = [], {cause: count for cause, count in document["missed_tokens"].items() if count}
    if saved := sum(document["saved_seconds"].values()):
        lines.append(f"computing saved: {duration(saved)}")
    if all_missed := sum(missed.values()):
        causes = sorted(missed.items(), key=lambda item: -item[1])
        lines.append("missed tokens: " + ", ".join(f"{cause} {count / all_missed:.0%}" for cause, count in causes))
    return lines


def top_table(prefixes: Sequence[Mapping[str, Any]]) -> Table:
    """Prefixes, a row for each."""
    has_checkpoints = any(each.get("checkpoint_tokens") for each in prefixes)
    columns = ["prefix", "namespace", "tokens", "uses", "GPU\nblocks", "CPU\nblocks", "used\nbefore", "goes\non", "pin"]
    columns += ["last check-\npoint at"] * has_checkpoints
    told = ("name", "namespace", "num_prefix_tokens", "num_uses", "num_gpu_blocks", "num_cpu_blocks")
    rows = [
        (
            *(each[name] for name in told),
            seconds_ago(each["idle_seconds"]).replace("under ", "<"),
            each["num_children"],
            "yes" if each["is_pinned"] else "",
            *[next(iter(each.get("checkpoint_tokens", ())[::-1]), "")] * has_checkpoints,
        )
        for each in prefixes
    ]
    return table_of(columns, rows, words=_WORDS)


def prefix_tree(found: Mapping[str, Any]) -> Tree:
    """The prefix tree, indented; what is left out is said at its place."""
    tree = Tree(
        f"{counted(found['num_shown'], 'prefix')}, blocks of {counted(found['block_size'], 'token')}", highlight=False
    )
    _hang(tree, found)
    return tree


def _hang(tree: Tree, found: Mapping[str, Any]) -> None:
    for each in found["children"]:
        pinned = ", pinned" if each["is_pinned"] else ""
        space = "" if each["namespace"] == "default" else f", namespace {each['namespace']}"
        tokens, uses = counted(each["num_tokens"], "token"), counted(each["num_uses"], "use")
        text = (
            f"{each['name']}: {tokens}, {uses}, {each['num_gpu_blocks']} GPU and "
            f"{counted(each['num_cpu_blocks'], 'CPU block')}, used {seconds_ago(each['idle_seconds'])} before"
            f"{_checkpoints(each.get('checkpoint_tokens', ()))}{space}{pinned}"
        )
        _hang(tree.add(text), each)
    if found["num_left_out"]:
        tree.add(f"and {found['num_left_out']} more")


def _checkpoints(tokens: Sequence[int]) -> str:
    """Where a prefix of a hybrid model has some: the last few."""
    if not tokens:
        return ""
    shown = ", ".join(map(str, tokens[-_MOST_CHECKPOINTS:]))
    more = f" and {len(tokens) - _MOST_CHECKPOINTS} before" if len(tokens) > _MOST_CHECKPOINTS else ""
    return f", {'checkpoints' if len(tokens) > 1 else 'checkpoint'} at {shown}{more}"


def requests_table(found: Mapping[str, Any]) -> Table:
    """Requests that run, a row for each."""
    columns = ("request", "phase", "tokens", "computed", "blocks", "matched", "running for")
    rows = [
        (
            *(each[name] for name in ("request_id", "phase", "num_tokens", "num_computed_tokens", "num_blocks")),
            ", ".join(f"{count} {tier}" for tier, count in each["matched_tokens"].items()) or "nothing",
            f"{each['running_seconds']:.1f} s",
        )
        for each in found["running"]
    ]
    return table_of(columns, rows, words=_WORDS)


def recent_line(explanation: Mapping[str, Any]) -> str:
    """One of the last requests, in a line."""
    hits = ", ".join(f"{hit['num_tokens']} {hit['tier']}" for hit in explanation["hits"]) or "no"
    missed = ", ".join(f"{miss['num_tokens']} {miss['cause']}" for miss in explanation["misses"])
    tokens = counted(explanation["num_tokens"], "token")
    return f"{explanation['request_id']}: {tokens}; {hits} hit; missed: {missed or 'none'}"


def ranks_table(found: Mapping[str, Any]) -> Table:
    """Ranks, a row for each."""
    rows = [
        (each["rank"], process_word(each), each["pid"], each["num_restarts"], f"{each['num_busy_lanes']} of 2")
        for each in found["ranks"]
    ]
    return table_of(("rank", "state", "pid", "restarts", "busy lanes"), rows, words=_WORDS)


def pins_table(pins: Sequence[Mapping[str, Any]]) -> Table:
    """Pins, a row for each, the next to end first."""
    told = ["name", "num_tokens", "num_blocks", "num_gpu_blocks"]
    columns = ["prefix", "tokens", "blocks", "of them\non the GPU"]
    if any(each.get("checkpoint_tokens") is not None for each in pins):
        told, columns = [*told, "checkpoint_tokens"], [*columns, "goes\non at"]
    rows = [(*(each.get(name) for name in told), seconds_ago(each["seconds_left"])) for each in pins]
    return table_of((*columns, "ends in"), rows, words=_WORDS)


def forget_lines(found: Mapping[str, Any]) -> list[str]:
    """What has become of what a namespace had, and what may be left of it."""
    num_gpu, num_cpu = found["num_gpu_blocks"], found["num_cpu_blocks"]
    lines = [f"forgotten: {counted(num_gpu, 'block')} on the GPU, {num_cpu} in the CPU tier"]
    if found["num_stored_objects"]:
        lines.append(f"removed from the store: {counted(found['num_stored_objects'], 'object')}")
    return [*lines, *(f"may be left: {each}" for each in found["left"])]


def restarted_line(ranks: list[int]) -> str:
    """Which ranks are being started."""
    if not ranks:
        return "nothing to restart: every rank has its process"
    return f"{named('rank', ranks, 'is', 'are')} being started; `fastdeploy-cache ranks` shows whether that helps"


def done_text(verb: str, weights_id: str | None, tiers: list[str]) -> str:
    """What was done, where the status that follows does not say it."""
    if verb == "clear":
        return "cleared; "
    if verb == "update-weights":
        return f"cleared, for the weights {weights_id!r}; " if weights_id is not None else "cleared, for new weights; "
    return f"the {tiers[0].upper()} tier alone was put to sleep; " if len(set(tiers)) == 1 else ""
