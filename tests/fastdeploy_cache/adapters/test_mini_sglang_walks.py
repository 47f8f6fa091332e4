"""Random verbs of mini-sglang's caches against a plain tree of nodes, and against the content of every slot."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.adapters.mini_sglang.manager import CacheManager, create_page_table
from fastdeploy_cache.adapters.mini_sglang.radix_cache import RadixCacheHandle, RadixPrefixCache, new_manager
from fastdeploy_cache.adapters.slots.pages import slots_of
from fastdeploy_cache.errors import OutOfBlocksError, RequestError

Page = tuple[int, ...]  # its tokens
NOTHING = RadixCacheHandle(0, [], None)


@dataclass(eq=False)
class Node:
    """Pages behind its parent's, and where they are."""

    parent: Node | None
    keys: list[Page]
    ids: list[int]
    last_used: int = 0
    children: list[Node] = field(default_factory=list)

    def above(self) -> list[Page]:
        return [] if self.parent is None else [*self.parent.above(), *self.parent.keys]


def num_common(ours: list[Page], theirs: list[Page]) -> int:
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


class Tree:
    """What the cache promises, with loops only: locks are the sequences that they protect."""

    def __init__(self, num_pages: int) -> None:
        self.root = Node(None, [], [])
        self.locks: list[list[Page]] = []
        self.free = set(range(num_pages))
        self.now = 0

    def nodes(self) -> list[Node]:
        found = [self.root]
        for node in found:
            found.extend(node.children)
        return found[1:]

    def walk(self, keys: list[Page]) -> tuple[list[Node], int]:
        """The nodes along `keys`, and how much of the last one matches."""
        path, num_found, node, num = list[Node](), 0, self.root, 0
        while num_found < len(keys) and num == len(node.keys):
            below = [child for child in node.children if child.keys[0] == keys[num_found]]
            if not below:
                break
            node = below[0]
            num = num_common(node.keys, keys[num_found:])
            num_found += num
            path.append(node)
        return path, num

    def num_held(self, node: Node) -> int:
        start = len(above := node.above())
        whole = above + node.keys
        reach = [num_common(whole, lock) for lock in self.locks]
        return max([0, *(end - start for end in reach if end > start)])

    def cut(self, node: Node, num: int) -> Node:
        upper = Node(node.parent, node.keys[:num], node.ids[:num], node.last_used, [node])
        assert node.parent is not None
        node.parent.children[node.parent.children.index(node)] = upper
        node.parent, node.keys, node.ids = upper, node.keys[num:], node.ids[num:]
        return upper

    def touch(self, path: list[Node]) -> None:
        self.now += 1
        for node in path:
            node.last_used = self.now

    def found(self, keys: list[Page]) -> list[int]:
        path, num = self.walk(keys)
        return [i for node in path[:-1] for i in node.ids] + (path[-1].ids[:num] if path else [])

    def match(self, keys: list[Page]) -> list[int]:
        (path, num), ids = self.walk(keys), self.found(keys)
        if path and num < len(path[-1].keys):
            path[-1] = self.cut(path[-1], num)
        self.touch(path)
        return ids

    def insert(self, keys: list[Page], ids: list[int]) -> int:
        path, num = self.walk(keys)
        num_known = sum(len(node.keys) for node in path[:-1]) + num
        if num_known == len(keys):
            self.match(keys)
            return num_known
        if path and num < len(path[-1].keys):
            path[-1] = self.cut(path[-1], num)
        path.append(Node(path[-1] if path else self.root, keys[num_known:], ids[num_known:]))
        parent = path[-1].parent
        assert parent is not None
        parent.children.append(path[-1])
        self.touch(path)
        return num_known

    def evict(self, num_pages: int, *, whole: bool) -> list[int]:
        """Of the oldest leaves: all that is not held, or just as much as is needed from the end."""
        gone: list[int] = []
        while len(gone) < num_pages:
            leaves = [node for node in self.nodes() if not node.children and self.num_held(node) < len(node.keys)]
            if not leaves:
                break
            leaf = min(leaves, key=lambda node: node.last_used)
            num_left = (
                self.num_held(leaf) if whole else max(self.num_held(leaf), len(leaf.keys) - num_pages + len(gone))
            )
            gone += leaf.ids[num_left:]
            del leaf.keys[num_left:], leaf.ids[num_left:]
            if not leaf.keys and leaf.parent is not None:
                leaf.parent.children.remove(leaf)
        return gone

    def sizes(self) -> tuple[int, int]:
        held = sum(self.num_held(node) for node in self.nodes())
        return sum(len(node.keys) for node in self.nodes()) - held, held

    def take(self, num_pages: int) -> list[int]:
        self.free |= set(self.evict(num_pages - len(self.free), whole=False))
        ids = sorted(self.free)[:num_pages]
        self.free -= set(ids)
        return ids


Locked = tuple[RadixCacheHandle, list[Page]]


class PrefixWalk:
    """One random story of a prefix cache beside the plain tree."""

    def __init__(self, choose: random.Random, manager: PrefixCacheManager) -> None:
        self.choose, self.manager = choose, manager
        self.cache = RadixPrefixCache(manager)
        self.size = manager.config.block_size
        self.tree = Tree(manager.config.pool_sizes()[0])
        self.handles: list[Locked] = []
        self.locked: list[Locked] = []
        self.counts = dict.fromkeys(["found", "cut", "known", "refused", "evicted", "stale"], 0)

    def keys(self) -> list[Page]:
        return [(self.choose.randint(1, 2),) * self.size for _ in range(self.choose.randint(0, 8))]

    def match(self) -> None:
        keys, num_nodes = self.keys(), len(self.tree.nodes())
        rest = [9] * self.choose.randint(0, self.size - 1)  # of less than a page nothing is found
        handle = self.cache.match_prefix(tokens_of(keys) + rest).cuda_handle
        found = self.tree.match(keys)
        assert handle.get_matched_indices().tolist() == slots_of(found, self.size).tolist()
        self.handles.append((handle, keys[: len(found)]))
        self.counts["found"] += bool(found)
        self.counts["cut"] += len(self.tree.nodes()) - num_nodes

    def insert(self) -> None:
        """What a request does that comes and goes: match, lock, take pages, insert, unlock."""
        keys, cache, tree = self.keys(), self.cache, self.tree
        known = tree.match(keys)
        handle = cache.match_prefix(tokens_of(keys)).cuda_handle
        assert handle.page_ids == known
        cache.lock_handle(handle)
        tree.locks.append(keys[: len(known)])
        num_new = len(keys) - len(known)
        if num_new > tree.sizes()[0] + len(tree.free):
            with pytest.raises(OutOfBlocksError):
                self.manager.blocks.allocate(num_new)
            self.counts["refused"] += 1
        else:
            ids = known + tree.take(num_new)
            assert self.manager.blocks.allocate(num_new) == ids[len(known) :]
            tree.insert(keys, ids)
            cached_len, new = cache.insert_prefix(tokens_of(keys), slots_of(ids, self.size))
            assert (cached_len, new.cached_len) == (len(known) * self.size, len(keys) * self.size)
            assert new.page_ids == ids
            self.handles.append((new, keys))
        cache.lock_handle(handle, unlock=True)
        tree.locks.remove(keys[: len(known)])

    def insert_again(self) -> None:
        """What a request inserts that did not look first: what is known stays its own."""
        keys = self.keys()
        if len(keys) > len(self.tree.free):
            return
        ids = self.tree.take(len(keys))
        assert self.manager.blocks.allocate(len(keys)) == ids
        num_known = self.tree.insert(keys, ids)
        cached_len, _ = self.cache.insert_prefix(tokens_of(keys), slots_of(ids, self.size))
        assert cached_len == num_known * self.size
        self.manager.blocks.free(ids[:num_known])
        self.tree.free |= set(ids[:num_known])
        self.counts["known"] += num_known

    def lock(self) -> None:
        if not self.handles:
            return
        handle, keys = self.handles.pop(self.choose.randrange(len(self.handles)))
        if self.tree.found(keys) == handle.page_ids:
            self.cache.lock_handle(handle)
            self.locked.append((handle, keys))
            self.tree.locks.append(keys)
        else:
            with pytest.raises(RequestError, match="match again"):
                self.cache.lock_handle(handle)
            self.counts["stale"] += 1

    def unlock(self) -> None:
        if self.locked:
            handle, keys = self.locked.pop(self.choose.randrange(len(self.locked)))
            self.cache.lock_handle(handle, unlock=True)
            self.tree.locks.remove(keys)

    def evict(self) -> None:
        num_pages = self.choose.randint(0, 3)
        num_tokens = max(0, num_pages * self.size - self.choose.randrange(self.size))
        if num_pages > self.tree.sizes()[0]:
            with pytest.raises(OutOfBlocksError):
                self.cache.evict(num_tokens)
            return
        gone = self.tree.evict(num_pages, whole=True)
        assert self.cache.evict(num_tokens).tolist() == slots_of(gone, self.size).tolist()
        self.manager.blocks.free(gone)
        self.tree.free |= set(gone)
        self.counts["evicted"] += len(gone)

    def check(self) -> None:
        """All is as in the plain tree."""
        self.cache.check_integrity()
        assert self.manager.blocks.view.free_block_ids() == sorted(self.tree.free)
        assert self.cache.size_info == tuple(n * self.size for n in self.tree.sizes())
        runs = {
            (v.first_block, tuple(v.token_ids.tolist()), tuple(v.block_ids)) for v in self.manager.blocks.view.runs()
        }
        assert runs == {(len(n.above()), tuple(tokens_of(n.keys)), tuple(n.ids)) for n in self.tree.nodes()}


def tokens_of(keys: list[Page]) -> list[int]:
    return [token for key in keys for token in key]


def test_random_walks_are_those_of_a_plain_tree() -> None:
    """60 stories: the same matches, nodes, sizes, free pages and evicted slots after each step."""
    total: dict[str, int] = {}
    for seed in range(60):
        choose = random.Random(seed)
        with new_manager(choose.randint(4, 24), choose.choice([1, 1, 3])) as manager:
            walk = PrefixWalk(choose, manager)
            steps = [walk.match] * 2 + [walk.insert] * 3 + [walk.insert_again, walk.lock, walk.unlock, walk.evict]
            for _ in range(80):
                choose.choice(steps)()
                walk.check()
        for name, count in walk.counts.items():
            total[name] = total.get(name, 0) + count
    assert all(count > 40 for count in total.values()), total


@dataclass(eq=False)
class Running:
    """A request of a small engine."""

    table_idx: int
    input_ids: list[int]
    cache_handle: RadixCacheHandle
    cached_len: int
    device_len: int


class EngineWalk:
    """Requests over a cache manager; each slot remembers the tokens that its KV was computed from."""

    def __init__(self, choose: random.Random, manager: PrefixCacheManager) -> None:
        self.choose, self.size = choose, manager.config.block_size
        self.caches = CacheManager(RadixPrefixCache(manager), create_page_table(4, 24))
        self.contents: dict[int, tuple[int, ...]] = {}
        self.running: list[Running] = []
        self.counts = dict.fromkeys(["hits", "duplicates", "refused", "finished", "reset"], 0)

    def admit(self) -> None:
        rows = sorted({0, 1, 2, 3} - {req.table_idx for req in self.running})
        if not rows:
            return
        tokens = [self.choose.randint(1, 2) for _ in range(self.choose.randint(1, 12))]
        pending = Running(rows[0], tokens, NOTHING, 0, 0)
        handle = self.caches.match_req(pending).cuda_handle
        assert handle.cached_len < len(tokens)
        self.caches.lock(handle)
        pending.cache_handle, pending.cached_len = handle, handle.cached_len
        pending.device_len = self.choose.randint(handle.cached_len + 1, len(tokens))  # a first chunk, or all
        self.caches.page_table[rows[0], : handle.cached_len] = handle.get_matched_indices()
        before = self.caches.prefix_cache.size_info, self.caches.page_table.copy()
        try:
            self.caches.allocate_paged([pending])
        except OutOfBlocksError:
            assert self.caches.prefix_cache.size_info == before[0]
            assert (self.caches.page_table == before[1]).all()
            self.caches.unlock(handle)
            self.counts["refused"] += 1
            return
        self.running.append(pending)
        self.compute(pending)
        self.counts["hits"] += bool(handle.cached_len)

    def compute(self, req: Running) -> None:
        row = self.caches.page_table[req.table_idx].tolist()
        for i in range(req.cached_len, req.device_len):
            self.contents[row[i]] = tuple(req.input_ids[: i + 1])
        req.cached_len = req.device_len

    def go_on(self) -> None:
        """The next chunk, or a sampled token; sometimes it is cached."""
        if not self.running:
            return
        req = self.choose.choice(self.running)
        if len(req.input_ids) >= 24:
            return
        if req.device_len == len(req.input_ids):
            req.input_ids.append(self.choose.randint(1, 2))
        req.device_len += 1
        try:
            self.caches.allocate_paged([req])
        except OutOfBlocksError:
            req.device_len = req.cached_len
            self.counts["refused"] += 1
            return
        self.compute(req)

    def cache(self) -> None:
        if self.running:
            req = self.choose.choice(self.running)
            before = self.caches.page_table[req.table_idx].copy()
            self.caches.cache_req(req, finished=False)
            self.counts["duplicates"] += int((before != self.caches.page_table[req.table_idx]).sum())

    def finish(self) -> None:
        if self.running:
            req = self.running.pop(self.choose.randrange(len(self.running)))
            with self.caches.lazy_free_region():
                self.caches.cache_req(req, finished=True)
            self.counts["finished"] += 1

    def reset(self) -> None:
        if self.choose.random() < 0.1:
            self.caches.reset()
            self.counts["reset"] += 1

    def check(self) -> None:
        """What a running request reads is its own prefix, and no page is lost."""
        num_held = 0
        for req in self.running:
            row = self.caches.page_table[req.table_idx, : req.cached_len].tolist()
            read = [self.contents[slot] for slot in row]
            assert read == [tuple(req.input_ids[: i + 1]) for i in range(req.cached_len)], "wrong KV"
            num_held += -(-req.cached_len // self.size) - req.cache_handle.cached_len // self.size
        self.caches.check_integrity(num_held)


def test_random_walks_of_an_engine() -> None:
    """60 stories: no request reads another's KV, no page is lost, and a refusal leaves nothing behind."""
    total: dict[str, int] = {}
    for seed in range(60):
        choose = random.Random(seed)
        with new_manager(choose.randint(4, 24), choose.choice([1, 1, 2, 4])) as manager:
            walk = EngineWalk(choose, manager)
            steps = [walk.admit] * 2 + [walk.go_on] * 3 + [walk.cache, walk.finish, walk.reset]
            for _ in range(120):
                choose.choice(steps)()
                walk.check()
            while walk.running:
                walk.finish()
            walk.caches.check_integrity()
        for name, count in walk.counts.items():
            total[name] = total.get(name, 0) + count
    assert all(count > 40 for count in total.values()), total
