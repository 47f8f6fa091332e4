"""What is asked of a page in a browser: whether its words can be read, and what the keyboard reaches."""

from __future__ import annotations

from typing import Any

from tests.rigs.browser import Browser

LEAST_CONTRAST = 4.5  # of words that are not large, by WCAG 2.2, level AA

# A bar of the prefix map has its words upon a shape, all others upon the next element with a colour behind it.
_CONTRASTS = """
const numbers = (text) => {
  const found = text.match(/[\\d.]+/g).map(Number);
  return text.startsWith("color(") ? found.map((value, i) => (i < 3 ? 255 * value : value)) : found;
};
const light = (text) => {
  const [r, g, b] = numbers(text).map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (element) => {
  const bar = element.closest("g[role=treeitem]");
  if (bar) return getComputedStyle(bar.querySelector("rect")).fill;
  const colour = getComputedStyle(element).backgroundColor;
  return numbers(colour)[3] !== 0 ? colour : behind(element.parentElement);
};
const hasWords = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
return [...document.querySelectorAll("body *")]
  .filter((each) => hasWords(each) && each.checkVisibility() && !each.matches("script, title, :disabled, option"))
  .map((each) => {
    const style = getComputedStyle(each);
    const [a, b] = [light(each instanceof SVGElement ? style.fill : style.color), light(behind(each))];
    return [each.textContent.slice(0, 40), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
  });
"""
# Where the focus is: which element, whether its mark can be seen, and whether it stands behind the one before.
_FOCUS = """
const now = document.activeElement, before = window.focusBefore;
window.focusBefore = now;
const style = getComputedStyle(now), shape = now.querySelector(":scope > rect");
const marked = shape ? parseFloat(getComputedStyle(shape).strokeWidth) >= 2
  : style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
const isBehind = !before || Boolean(before.compareDocumentPosition(now) & Node.DOCUMENT_POSITION_FOLLOWING);
return now === document.body ? null : { name: now.id || now.tagName, marked, isBehind };
"""


def poor_contrasts(window: Browser) -> list[tuple[str, float]]:
    """Words that cannot be read well, each with its contrast. That there are words at all is asserted."""
    found = window.run(_CONTRASTS)
    assert len(found) > 30
    return [(text, contrast) for text, contrast in found if contrast < LEAST_CONTRAST]


def tab_stops(window: Browser, num_most: int = 60) -> list[dict[str, Any]]:
    """What the Tab key reaches, one after another, from the beginning of the page to its end."""
    window.run("window.focusBefore = null; document.activeElement.blur()")
    stops = list[dict[str, Any]]()
    for _ in range(num_most):
        window.press("Tab")
        stop = window.run(_FOCUS)
        if stop is None:
            break
        stops.append(stop)
    return stops
