/* The prefix map: the tree as bars. Across, the tokens from a prompt's beginning on; a bar's height says how many
   blocks are cached in it and behind it. */

const MAP = { height: 380, axis: 20, least: 3 };

class PrefixMap {
  constructor(place, detail, upButton, shown) {
    [this.place, this.detail, this.upButton, this.shown] = [place, detail, upButton, shown];
    this.chosen = null; // the name of a prefix
    this.open = []; // names of the prefixes that were opened, from the outside in
    this.tree = { children: [] };
    upButton.addEventListener("click", () => {
      this.open.pop();
      this.draw();
    });
    place.addEventListener("keydown", (event) => this.onKey(event));
  }

  show(tree) {
    this.tree = tree;
    const more = tree.num_left_out ? `, and ${count(tree.num_left_out)} more that begin a prompt` : "";
    this.shown.textContent = `${count(tree.num_shown)} prefixes${more}, as of ${clock(Date.now() / 1000)}`;
    this.draw();
  }

  /* The prefix that is open now, or the whole tree; prefixes that have gone are forgotten. */
  root() {
    let node = this.tree;
    for (const [depth, name] of this.open.entries()) {
      const next = find(node, name);
      if (!next) {
        this.open.length = depth;
        break;
      }
      node = next;
    }
    return node;
  }

  draw() {
    const root = this.root(),
      bars = [];
    const top = root === this.tree ? root.children : [root];
    const weigh = (node) =>
      (node.weight = node.num_blocks + node.children.reduce((sum, child) => sum + weigh(child), 0));
    const total = top.reduce((sum, node) => sum + weigh(node), 0);
    const place = (node, level, y, height) => {
      bars.push({ node, level, y, height });
      const behind = Math.max(1, node.weight - node.num_blocks);
      let at = y;
      for (const child of node.children) {
        const share = (height * child.weight) / behind;
        if (share >= MAP.least) place(child, level + 1, at, share);
        at += share;
      }
    };
    let y = 0;
    for (const node of top) {
      const height = (MAP.height * node.weight) / Math.max(1, total);
      if (height >= MAP.least) place(node, 0, y, height);
      y += height;
    }
    this.paint(bars, root === this.tree ? 0 : root.num_prefix_tokens - root.num_tokens);
    this.upButton.disabled = this.open.length === 0;
  }

  paint(bars, firstToken) {
    const focused = document.activeElement?.dataset?.name;
    if (!bars.length) {
      const sentence = "Nothing is cached. As soon as a request has committed a full block, its prefix appears here.";
      this.place.replaceChildren(html("p", { class: "empty" }, sentence));
      this.detail.replaceChildren();
      return;
    }
    const width = Math.max(240, this.place.clientWidth);
    const lastToken = Math.max(...bars.map(({ node }) => node.num_prefix_tokens));
    const x = (token) => (width * (token - firstToken)) / Math.max(1, lastToken - firstToken);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${MAP.height + MAP.axis}`, role: "none" });
    this.bars = bars.map((each, i) => ({ ...each, bar: this.bar(each, i, x) }));
    picture.append(...this.bars.map(({ bar }) => bar), ...tokenAxis(firstToken, lastToken, x));
    this.place.replaceChildren(picture);
    const same = this.bars.find(({ node }) => node.name === this.chosen);
    if (same) this.mark(same.bar);
    else if (!this.detail.contains(document.activeElement)) {
      this.chosen = null;
      this.detail.textContent = "Choose a bar, and why it is still there appears here.";
    }
    this.bars.find(({ node }) => node.name === focused)?.bar.focus({ preventScroll: true });
  }

  mark(chosen) {
    for (const { bar } of this.bars) {
      bar.classList.toggle("chosen", bar === chosen);
      bar.setAttribute("aria-selected", bar === chosen);
      bar.setAttribute("tabindex", bar === chosen ? 0 : -1);
    }
  }

  bar({ node, level, y, height }, i, x) {
    const from = x(node.num_prefix_tokens - node.num_tokens),
      wide = x(node.num_prefix_tokens) - from;
    const rect = svg("rect", {
      x: from + 1, // the mark of a chosen bar is drawn on its edge, and no neighbour may cover it
      y: y + 1,
      width: Math.max(2, wide - 2),
      height: Math.max(1, height - 2),
      rx: 2,
    });
    const left = from + 1.5;
    const front = svg("line", { class: "front", x1: left, x2: left, y1: y + 1, y2: y + Math.max(2, height - 1) });
    const bar = svg(
      "g",
      {
        role: "treeitem",
        tabindex: i ? -1 : 0,
        "aria-level": level + 1,
        "aria-label": sentence(node),
        "data-name": node.name,
      },
      rect,
      front,
      svg("title", {}, sentence(node)),
    );
    bar.style.setProperty("--tier", tierColor(node));
    bar.style.setProperty("--fresh", freshness(node.idle_seconds));
    if (height > 15 && wide > 44)
      bar.append(svg("text", { x: from + 8, y: y + Math.min(height / 2 + 4, 16) }, count(node.num_tokens)));
    bar.addEventListener("focus", () => this.choose(bar, node));
    bar.addEventListener("dblclick", () => this.enter(node));
    return bar;
  }

  choose(bar, node) {
    this.chosen = node.name;
    this.mark(bar);
    const enter = html("button", { type: "button" }, "Open it");
    enter.addEventListener("click", () => this.enter(node));
    enter.disabled = !node.children.length;
    this.detail.replaceChildren(
      html("div", {}, html("b", {}, "Prefix "), html("code", {}, node.name), ". ", ...why(node)),
      enter,
    );
  }

  enter(node) {
    if (!node.children.length || node.name === this.open[this.open.length - 1]) return;
    this.open.push(node.name);
    this.draw();
    this.bars[0]?.bar.focus();
  }

  onKey(event) {
    const at = this.bars?.findIndex(({ bar }) => bar === document.activeElement) ?? -1;
    if (at < 0) return;
    const { node, level } = this.bars[at];
    const ahead = this.bars.slice(at + 1),
      before = this.bars.slice(0, at).reverse();
    const steps = {
      ArrowDown: () => ahead[0],
      ArrowUp: () => before[0],
      ArrowRight: () => (ahead[0]?.level === level + 1 ? ahead[0] : undefined),
      ArrowLeft: () => before.find((each) => each.level < level),
      Home: () => this.bars[0],
      End: () => this.bars[this.bars.length - 1],
    };
    if (event.key === "Enter") this.enter(node);
    else if (event.key === "Backspace" || event.key === "Escape") {
      this.open.pop();
      this.draw();
      this.bars[0]?.bar.focus();
    } else if (event.key in steps) steps[event.key]()?.bar.focus();
    else return;
    event.preventDefault();
  }
}

function tokenAxis(first, last, x) {
  return [0, 0.25, 0.5, 0.75, 1].map((share) => {
    const token = Math.round(first + share * (last - first));
    const anchor = share === 0 ? "start" : share === 1 ? "end" : "middle";
    const inside = share === 0 ? 4 : share === 1 ? -4 : 0;
    const text = count(token) + (share === 0 ? " tokens" : "");
    return svg("text", { x: x(token) + inside, y: MAP.height + 14, "text-anchor": anchor }, text);
  });
}

function find(node, name) {
  for (const child of node.children) {
    const found = child.name === name ? child : find(child, name);
    if (found) return found;
  }
  return null;
}

function tierColor(node) {
  if (node.num_gpu_blocks && node.num_cpu_blocks) return "var(--both)";
  return node.num_gpu_blocks ? "var(--gpu)" : "var(--cpu)";
}

/* From 1, used just now, to 0.35, not used for an hour or more. */
function freshness(idle) {
  return idle === null ? 1 : Math.max(0.35, 1 - (0.65 * Math.log10(1 + idle)) / Math.log10(3601));
}

const idleText = (node) =>
  node.idle_seconds === null ? "in use since it came" : `last used ${seconds(node.idle_seconds)} ago`;

function sentence(node) {
  return (
    `${count(node.num_tokens)} tokens behind ${count(node.num_prefix_tokens - node.num_tokens)}, ${idleText(node)}, ` +
    `${node.num_uses} uses, ${node.num_gpu_blocks} blocks on the GPU, ${node.num_cpu_blocks} in the CPU tier`
  );
}

/* Why is it still here? */
function why(node) {
  const where = [];
  if (node.num_gpu_blocks) where.push(`${node.num_gpu_blocks} on the GPU`);
  if (node.num_cpu_blocks) where.push(`${node.num_cpu_blocks} in the CPU tier`);
  const parts = [
    `It is ${count(node.num_tokens)} tokens long and ends a prefix of ${count(node.num_prefix_tokens)}. `,
    `Of its ${node.num_blocks} blocks there are ${where.join(" and ")}. `,
  ];
  if (node.is_pinned) parts.push("It is pinned, so it stays. ");
  else if (node.num_held_blocks)
    parts.push(`${node.num_held_blocks} of its blocks are held by requests or copies that run now. `);
  else if (node.num_children)
    parts.push(`It stays at least as long as one of the ${node.num_children} that go on from it. `);
  else parts.push("Nothing holds it: it goes when room is needed and the eviction policy names it. ");
  parts.push(`${node.num_uses} requests have used it, and it was ${idleText(node)}. `);
  if (node.checkpoint_tokens.length)
    parts.push(`Requests go on at its checkpoints, after ${node.checkpoint_tokens.map(count).join(", ")} tokens. `);
  if (node.num_left_out) parts.push(`${node.num_left_out} that go on from it are not shown. `);
  if (node.namespace !== "default") parts.push(`Its namespace is ${node.namespace}. `);
  return parts;
}
