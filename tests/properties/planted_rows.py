"""Faults planted into the books of rows, each of which random walks have to find."""

from __future__ import annotations

from tests.simulation.planting import Planted, Rewrite


def _plant(name: str, *rewrites: tuple[str, str, str, str]) -> Planted:
    return Planted(name, tuple(Rewrite(*each) for each in rewrites))


PLANTED = (
    _plant(
        "a window is one block short",
        ("transfer_manager.kv.groups", "Row.first_block", "self.reach_tokens + 1)", "self.reach_tokens + 1 + 4)"),
    ),
    _plant(
        "a chunk begins a block late",
        ("transfer_manager.kv.groups", "Row.first_block", "return end_tokens // self", "return 1 + end_tokens // self"),
    ),
    _plant(
        "a split forgets which part a checkpoint lies in",
        ("books.run", "Run.cut_front", "part_chain(upper, self)", "pass"),
    ),
    _plant(
        "a split leaves boundaries where they were",
        ("books.checkpoint", "part_chain", "checkpoint.end -= cut", "pass"),
    ),
    _plant("a merge forgets checkpoints", ("books.run", "Run.take_in", "join_chain(self, lower, above)", "pass")),
    _plant(
        "a merge cuts off those of the upper run",
        ("books.checkpoint", "join_chain", "last.above, upper", "_, upper"),
    ),
    _plant(
        "a reset forgets checkpoints",
        ("books.residency", "Residency.begin_epoch", "self.checkpoints.begin_epoch()", "pass"),
    ),
    _plant(
        "what a reset has forgotten stays",
        ("books.residency", "Residency._forget", "self.checkpoints.drop_unpinned(run, self._forgotten_by)", "pass"),
    ),
    _plant(
        "a checkpoint is matched and not pinned",
        ("books.checkpoints", "Checkpoints.pin", "num_pins += 1", "num_pins += 0"),
    ),
    _plant("pinned units count as room", ("books.checkpoints", "Checkpoints._pin_units", "pool.pin(ids)", "pass")),
    _plant(
        "what a failed load has brought lands",
        ("books.row_books", "RowBooks.end_units", "succeeded and self", "self"),
    ),
    _plant(
        "what a failed copy down has brought lands",
        ("books.row_books", "RowBooks.end_pages", "succeeded and self", "self"),
    ),
    _plant(
        "units land in an earlier epoch",
        (
            "books.checkpoints",
            "Checkpoints.is_here",
            "checkpoint.run is not None and checkpoint.run.epoch == self.epoch",
            "True",
        ),
    ),
    _plant(
        "room is made as in a uniform cache",
        ("books.evicting", "evict", "if residency.make_room is not None:", "if False:"),
    ),
    _plant(
        "a page counts twice",
        ("books.residency", "Residency.num_available", "count(CHECKPOINT)", "2 * count(CHECKPOINT)"),
    ),
    _plant(
        "pages of pinned images count as room",
        ("books.residency", "Residency.num_available", "- self.checkpoints.num_pinned_pages", "- 0"),
    ),
    _plant(
        "a shared unit is freed by the first", ("books.unit_pool", "UnitPool.let_go", "if not num_left:", "if True:")
    ),
    _plant(
        "a shared unit stays with the last",
        ("books.unit_pool", "UnitPool.let_go", "if not num_left:", "if num_left == 1:"),
    ),
    _plant("dead KV above a leaf that has gone stays", ("books.trimming", "Trimmer._cut", "run = above", "break")),
    _plant(
        "what waits to be trimmed is forgotten when it is joined",
        ("books.trimming", "Trimmer._joined", "if lower in self.waiting:", "if False:"),
    ),
    _plant(
        "dead KV behind a checkpoint stays",
        ("books.trimming", "Trimmer._cut", "end = checkpoint.end", "end = run.num_blocks"),
    ),
    _plant(
        "a tail goes without its checkpoints",
        ("books.residency", "Residency.truncate", "self.checkpoints.drop_behind(run, num_blocks, why)", "pass"),
    ),
    _plant(
        "a match counts on full KV that is not on the GPU",
        ("books.row_books", "usable_checkpoints", "and boundary <= on_gpu", ""),
    ),
    _plant(
        "a match ends inside an image",
        (
            "books.row_books",
            "usable_checkpoints",
            "not prompt.images or usable_end(prompt, boundary, block_size) == boundary",
            "True",
        ),
    ),
    _plant(
        "an image outlives the copies in front of it",
        ("books.tier_loss", "_image_heirs", "and checkpoint.end <= heir.num_blocks", ""),
    ),
    _plant(
        "images outlive their memory", ("books.tier_loss", "_drop_images", "rows.checkpoints.lose_images(tree)", "pass")
    ),
    _plant(
        "heirs of images are unknown to the eviction",
        ("books.checkpoints", "Checkpoints.came", "self._offer(checkpoint, tier)", "pass"),
    ),
    _plant(
        "a checkpoint without memory keeps units",
        ("books.checkpoints", "Checkpoints._take_units", "pool.hand_back(ids, giver)", "pass"),
    ),
    _plant(
        "an operator's pin keeps no checkpoint",
        ("books.row_books", "RowBooks.keep", "self.checkpoints.pin(checkpoint)", "pass"),
    ),
    _plant(
        "an unpinned checkpoint is never evicted",
        ("books.checkpoints", "Checkpoints.unpin", "self._offer_all(checkpoint)", "pass"),
    ),
)
