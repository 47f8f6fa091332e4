"""The page beside the metrics: what is served, what it says, and how it behaves in a real browser."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.config.insight import InsightConfig
from fastdeploy_cache.insight.looks.history import History, Moment
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from tests.rigs.browser import Browser, browser, missing
from tests.rigs.page_looks import poor_contrasts, tab_stops
from tests.rigs.sick_caches import rank_down

SIZE = 4


def new_cache(num_gpu: int = 60, num_cpu: int = 0, *, what_if: bool = False, page: bool = True) -> PrefixCacheManager:
    insight = InsightConfig(what_if=what_if, page=page)
    return PrefixCacheManager(
        CacheConfig(
            block_size=SIZE,
            num_gpu_blocks=num_gpu,
            num_cpu_blocks=num_cpu,
            transfer_client="inline",
            prefill_tokens_per_second=1000.0,
            insight=insight,
        )
    )


def serve(cache: PrefixCacheManager, name: str, tokens: list[int]) -> None:
    request = Request(request_id=name, prompt_token_ids=tokens)
    match = cache.match(request).wait(5)
    cache.allocate(request, -(-len(tokens) // SIZE) - len(match.block_ids))
    cache.commit(request, len(tokens))
    cache.release(request)


def some_traffic(cache: PrefixCacheManager) -> None:
    """Three conversations of two branches each behind one beginning, each sent twice."""
    beginning = list(range(700_000, 700_000 + 5 * SIZE))
    for turn in range(2):
        for i in range(3):
            serve(cache, f"request {turn} {i}", [*beginning, *range(1000 * i, 1000 * i + 5 * SIZE + 1)])


def get(url: str, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(url.replace("/metrics", path), method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def data_of(url: str, path: str) -> Any:
    return json.loads(get(url, path)[2])


def test_the_page_is_one_file_that_needs_nothing_else() -> None:
    """All parts are in it, no address but this server's own, and the browser is told to load nothing from elsewhere."""
    with new_cache() as cache:
        status, headers, body = get(cache.serve_metrics(), "/")
    text = body.decode()
    assert status == 200 and headers["Content-Type"].startswith("text/html")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert not re.search(r"/\*\w+\.(js|css)\*/", text) and "class PrefixMap" in text and "--gpu" in text
    assert set(re.findall(r"https?://[^\s\"')]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|eval\(|document\.write", text)


def test_each_colour_is_stated_once() -> None:
    """A name has its light and its dark colour on one line, whoever chooses the theme."""
    with new_cache() as cache:
        text = get(cache.serve_metrics(), "/")[2].decode()
    names = re.findall(r"^\s*(--\w[\w-]*):", text, flags=re.MULTILINE)
    assert len(names) == len(set(names)) > 10 and "--card" in names
    assert "@media (prefers-color-scheme" not in text


def test_nothing_but_get_is_answered() -> None:
    """Other methods are refused, other paths are not there, and the metrics are where they were."""
    with new_cache() as cache:
        url = cache.serve_metrics()
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert get(url, "/data.json", method)[0] in (405, 501)
        assert get(url, "/data.json", "HEAD")[2] == b""
        assert get(url, "/etc/passwd")[0] == get(url, "/../data")[0] == 404
        assert b"fastdeploy_cache_requests_total" in get(url, "/metrics")[2]


def test_a_setting_leaves_it_out() -> None:
    """Then only metrics are served."""
    with new_cache(page=False) as cache:
        url = cache.serve_metrics()
        assert b"<!doctype" not in get(url, "/")[2] and b"requests_total" in get(url, "/metrics")[2]


def test_the_data_adds_up_and_has_no_tokens() -> None:
    """Hits and misses add up to the prompt tokens, states to the pool, and no token of a prompt is anywhere in it."""
    with new_cache() as cache:
        url = cache.serve_metrics()
        some_traffic(cache)
        data, tree, findings = (data_of(url, path) for path in ("/data.json", "/map.json", "/findings.json"))
        pages = b"".join(get(url, path)[2] for path in ("/data.json", "/map.json", "/findings.json", "/"))
    history = data["history"]
    assert set(history) == set(Moment._fields)
    assert sum(history["hit_tokens"][-1]) + sum(history["missed_tokens"][-1]) == history["num_tokens"][-1] == 6 * 41
    assert history["num_requests"][-1] == 6 == len(data["recent"]) and history["saved_seconds"][-1][0] > 0
    assert sum(data["tiers"]["gpu"].values()) == 60 and data["life_cycle"] == "running"
    assert tree["num_shown"] == 4 and len(tree["children"][0]["children"]) == 3 and findings == []
    assert not re.search(rb"(?<![\d.e-])7000[01]\d(?!\d)", pages)


def test_history_keeps_an_hour_and_the_present() -> None:
    """The oldest moments go, the last one is of now; ending it twice does no harm."""
    looks = list[float]()

    def look() -> Moment:
        looks.append(1.0)
        return Moment(float(len(looks)), 0, 0, (), (), (), (), (), (), (), {})

    history = History(look, SYSTEM_CLOCK)
    history.start()
    history.start()
    assert [moment.at for moment in history.moments()] == [1.0, 2.0]
    history.stop()
    history.stop()


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    problem = missing()
    if problem is not None:
        pytest.skip(problem)
    with browser() as opened:
        yield opened


NUM_BARS = "document.querySelectorAll('#map g[role=treeitem]').length"
BARS = f"return {NUM_BARS}"
# Numbers, map and findings are three answers, which come in any order on a busy machine.
FOUND = "document.querySelector('#findings .finding, #findings .fine') !== null"
LOADED = f"return view.data !== null && document.querySelector('#map .empty, #map svg') !== null && {FOUND}"


@pytest.mark.processes
class TestInChromium:
    """In a real browser without a window."""

    @pytest.mark.parametrize("is_dark", [False, True])
    @pytest.mark.parametrize("width", [1300, 390])
    def test_it_shows_what_is_there(self, window: Browser, tmp_path: Path, is_dark: bool, width: int) -> None:
        """Figures, chart, causes, map and requests, in both themes, on a screen and on a phone, without scrolling
        sideways and without an error."""
        with new_cache() as cache:
            some_traffic(cache)
            url = cache.serve_metrics()
            some_traffic(cache)
            window.size(width, 900, is_dark=is_dark)
            window.open(url.replace("/metrics", "/"))
            window.wait_for(LOADED)
            figures = window.run("return [...document.querySelectorAll('.figure b')].map((each) => each.textContent)")
            assert figures[1:3] == ["6", "246"] and figures[0].endswith("%")
            assert "Nothing is wrong" in window.run("return document.getElementById('findings').textContent")
            assert window.run(BARS) == 4
            assert "last" in window.run("return document.getElementById('causes').textContent")
            assert window.run("return document.querySelectorAll('#requests details').length") == 12
            assert window.run("return document.documentElement.scrollWidth <= innerWidth")
            colour = window.run("return getComputedStyle(document.body).backgroundColor")
            assert colour == ("rgb(16, 20, 27)" if is_dark else "rgb(246, 247, 249)")
            window.picture(tmp_path / "page.png")
            assert (tmp_path / "page.png").stat().st_size > 10_000
            assert window.problems() == []

    def test_it_follows_what_happens(self, window: Browser) -> None:
        """New requests come by themselves; a request opens and says why it missed."""
        with new_cache() as cache:
            url = cache.serve_metrics()
            window.open(url.replace("/metrics", "/"))
            window.wait_for(LOADED)
            assert "Nothing is cached" in window.run("return document.getElementById('map').textContent")
            some_traffic(cache)
            window.wait_for("return document.querySelectorAll('#requests details').length === 6")
            window.run("document.querySelector('#requests summary').click()")
            text = window.run("return document.querySelector('#requests details[open] pre').textContent")
            assert "'request 1 2': 40 of 41 prompt tokens" in text and "(last)" in text

    def test_the_map_is_used_by_keyboard(self, window: Browser) -> None:
        """Arrows go from bar to bar, Enter opens one, Escape goes back, and each says why it is still there."""
        with new_cache() as cache:
            some_traffic(cache)
            window.open(cache.serve_metrics().replace("/metrics", "/"))
            window.wait_for(f"{LOADED} && {NUM_BARS} === 4")
            press = (
                "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0], bubbles: true}))"
            )
            detail = "return document.getElementById('map-detail').textContent"
            window.run("document.querySelector('#map g').focus()")
            assert "It is 20 tokens long" in window.run(detail) and "3 that go on from it" in window.run(detail)
            window.run(press, "ArrowRight")
            assert "Nothing holds it" in window.run(detail) and "a prefix of 40" in window.run(detail)
            window.run(press, "ArrowLeft")
            window.run(press, "Enter")
            assert window.run("return view.map.open.length") == 1
            assert not window.run("return document.getElementById('map-up').disabled")
            window.run(press, "Escape")
            assert window.run("return view.map.open.length") == 0 and window.run(BARS) == 4
            assert window.problems() == []

    def test_it_survives_a_restart_of_the_manager(self, window: Browser) -> None:
        """While nobody answers it says so and keeps what it shows; then it goes on with the new one."""
        state = "return document.getElementById('state').textContent"
        with new_cache() as cache:
            some_traffic(cache)
            url = cache.serve_metrics()
            port = int(url.rpartition(":")[2].partition("/")[0])
            window.open(url.replace("/metrics", "/"))
            window.wait_for(f"{LOADED} && {NUM_BARS} === 4")
        window.wait_for("return !document.getElementById('trouble').hidden")
        assert (
            window.run(BARS) == 4 and window.run("return document.getElementById('state').textContent") == "no answer"
        )
        with new_cache() as cache:
            serve(cache, "another", list(range(9)))
            cache.serve_metrics(port=port)
            window.wait_for("return document.getElementById('trouble').hidden && view.data.recent.length === 1")
            assert window.run(state) == "running"
        assert all("ERR_CONNECTION_REFUSED" in problem or "json" in problem for problem in window.problems())


EMPTY = ("rate", "causes", "saved", "map", "whatif", "moved", "ranks", "running", "requests")
LONGER = """
const data = structuredClone(view.data), history = data.history;
for (const name of Object.keys(history)) history[name] = Array(360).fill(history[name][0]);
history.at = history.at.map((_, i) => data.now - 10 * (359 - i));
history.num_tokens = history.num_tokens.map((_, i) => (i % 7 ? 100 * i : 100 * (i - 1)));
document.getElementById("span").value = arguments[0];
showData(data);
"""


@pytest.mark.processes
class TestItsLooks:
    """What an operator sees who has a minute, a phone, or no mouse."""

    @pytest.mark.parametrize("is_dark", [False, True])
    def test_all_words_can_be_read(self, window: Browser, is_dark: bool) -> None:
        """Their contrast is that of WCAG's level AA in both themes: in charts, on bars, findings, and in trouble."""
        with rank_down().cache as cache:
            window.size(1300, 900, is_dark=is_dark)
            window.open(cache.serve_metrics().replace("/metrics", "/"))
            window.wait_for(LOADED)
            window.run("document.querySelector('#map g').focus()")
            assert poor_contrasts(window) == []
            window.run("trouble('The manager does not answer.')")
            assert poor_contrasts(window) == []

    def test_what_is_empty_says_what_will_appear(self, window: Browser) -> None:
        """Without traffic each section has a whole sentence in place of an empty picture or table."""
        with new_cache() as cache:
            window.size(1300, 900)
            window.open(cache.serve_metrics().replace("/metrics", "/"))
            window.wait_for(LOADED)
            for name in EMPTY:
                text = window.run(f"return document.querySelector('#{name} .empty')?.textContent")
                assert text and len(text.split()) > 5 and text.endswith("."), name
                assert window.run(f"return document.querySelector('#{name} svg, #{name} table')") is None
            words = window.run("return document.getElementById('findings').textContent")
            assert "the other checks begin with 20 requests, and there were 0" in words

    @pytest.mark.parametrize("width", [1300, 390])
    def test_what_is_wrong_is_seen_first(self, window: Browser, width: int) -> None:
        """A finding, what to do, and how many there are stand on the first screen, above all charts."""
        with rank_down().cache as cache:
            window.size(width, 844)
            window.open(cache.serve_metrics().replace("/metrics", "/"))
            window.wait_for(LOADED)
            text = window.run("return document.querySelector('.finding').textContent")
            assert text.startswith("Rank down") and "What to do: See its log" in text
            assert "found, looked at" in window.run("return document.getElementById('doctor-when').textContent")
            top = window.run("return document.querySelector('.finding').getBoundingClientRect().bottom + scrollY")
            assert top < 844 and top < window.run("return at('rate').getBoundingClientRect().top + scrollY")
            assert window.run("return document.documentElement.scrollWidth <= innerWidth")
            wide = "return [...document.querySelectorAll('.card')].filter((e) => e.scrollWidth > e.clientWidth).length"
            assert window.run(wide) == 0

    def test_it_says_how_many_of_how_many(self, window: Browser) -> None:
        """Where lists are cut the page says so: requests that run, and the last ones."""
        with new_cache(num_gpu=400) as cache:
            for i in range(30):
                serve(cache, f"request {i}", list(range(1000 * i, 1000 * i + 9)))
            running = [Request(request_id=f"running {i}", prompt_token_ids=list(range(9))) for i in range(22)]
            for request in running:
                cache.match(request)
            window.open(cache.serve_metrics().replace("/metrics", "/"))
            window.wait_for(LOADED)
            texts = window.run("return ['requests-when', 'running-when'].map((name) => at(name).textContent)")
            assert texts == ["25 of 30 requests", "20 of 22 requests, the oldest"]
            assert "explain --last 30" in window.run("return at('requests').textContent")
            assert window.run("return document.querySelectorAll('#running tbody tr').length") == 20
            assert window.run("return [...document.querySelectorAll('th')].every((each) => each.scope === 'col')")
            for request in running:
                cache.release(request)

    def test_it_says_which_time_it_shows(self, window: Browser) -> None:
        """Each section over time has its span, each time axis its times of day; a young process says that it is."""
        with new_cache() as cache:
            some_traffic(cache)
            window.open(cache.serve_metrics().replace("/metrics", "/"))
            window.wait_for(LOADED)
            assert window.run("return at('period').textContent").endswith("; nothing older is known")
            for value, words in (("900", "last 15 minutes"), ("3600", "last hour")):
                window.run(LONGER, value)
                assert re.fullmatch(
                    words + r", from \d\d:\d\d to \d\d:\d\d", window.run("return at('period').textContent")
                )
                spans = window.run(
                    "return [...document.querySelectorAll('.when[data-span]')].map((e) => e.textContent)"
                )
                assert spans == [words] * 4
            axis = window.run("return [...document.querySelectorAll('#rate svg > text')].map((e) => e.textContent)")
            assert [bool(re.fullmatch(r"\d\d:\d\d( \(now\))?", text)) for text in axis] == [False] * 3 + [True] * 3
            assert axis[-1].endswith("(now)")

    def test_a_chart_is_read_by_keyboard(self, window: Browser) -> None:
        """Arrows choose a moment of it, which stays chosen while new numbers come."""
        with new_cache() as cache:
            some_traffic(cache)
            window.open(cache.serve_metrics().replace("/metrics", "/"))
            window.wait_for(LOADED)
            window.run(LONGER, "3600")
            window.run("at('rate').focus()")
            window.press("ArrowLeft")
            read = "return document.querySelector('#rate .legend b').textContent"
            assert re.fullmatch(r"\d\d:\d\d:\d\d", chosen := window.run(read))
            assert window.run("return document.querySelector('#rate .legend').textContent").count("%") == 3
            window.run(LONGER, "3600")
            assert window.run(read) == chosen
            assert window.run("return document.querySelector('#rate .cursor').getAttribute('visibility')") == "visible"
            window.run("at('rate').blur()")
            assert window.run(read) == "now"

    def test_tab_goes_through_it_in_order(self, window: Browser) -> None:
        """It reaches each control, chart, table and list from top to bottom, and what has the focus can be seen."""
        with new_cache() as cache:
            url = cache.serve_metrics()
            some_traffic(cache)
            window.size(1300, 900)
            window.open(url.replace("/metrics", "/"))
            window.wait_for(LOADED)
            stops = tab_stops(window)
            assert {"span", "theme", "rate", "map-again", "g", "ranks", "SUMMARY"} <= {stop["name"] for stop in stops}
            assert [stop for stop in stops if not stop["marked"] or not stop["isBehind"]] == []

    def test_the_theme_is_changed(self, window: Browser) -> None:
        """The button names the theme that it changes to, and takes the other colours."""
        with new_cache() as cache:
            window.size(1300, 900)
            window.open(cache.serve_metrics().replace("/metrics", "/"))
            look = "return [at('theme').textContent, getComputedStyle(document.body).backgroundColor]"
            assert window.run(look) == ["Dark theme", "rgb(246, 247, 249)"]
            window.run("at('theme').click()")
            assert window.run(look) == ["Light theme", "rgb(16, 20, 27)"]
