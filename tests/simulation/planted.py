"""Faults that are planted into the product, one at a time, to see whether the simulation finds them."""

from __future__ import annotations

from tests.simulation.planting import Planted, Rewrite


def _planted(name: str, *rewrites: tuple[str, str, str, str]) -> Planted:
    return Planted(name, tuple(Rewrite(*each) for each in rewrites))


ALL = (
    # -- landing
    _planted(
        "a failed load counts as loaded",
        ("movement.block_mover", "BlockMover._finish", "succeeded = result.error is None", "succeeded = True"),
    ),
    _planted(
        "a refused task is answered as done",
        ("transfer_manager.process.lane_task", "LaneTask._ended", "error=error,", "error=None,"),
    ),
    # -- ranks
    _planted(
        "a task ends with the first rank",
        ("transfer_manager.process.flights", "Flights.answer", "if flight.waiting:", "if False:"),
    ),
    _planted(
        "layers are shown before they are copied",
        (
            "transfer_manager.device.cpu",
            "CpuDevice.copy",
            "_copy(pairs, route)\n            on_layer(num_layers)",
            "on_layer(num_layers)\n            _copy(pairs, route)",
        ),
    ),
    _planted(
        "a wake-up is taken away",
        ("transfer_manager.process.io_thread", "ProcessIO._turn", "self.wakeup.clear()", "pass"),
        (
            "transfer_manager.process.io_thread",
            "ProcessIO._turn",
            "self._send()  #",
            "self._send(); self.wakeup.clear()  #",
        ),
    ),
    _planted(
        "a dead rank keeps its descriptors",
        ("transfer_manager.process.child", "ChildProcess.close", "os.close(self.pidfd)", "pass"),
    ),
    _planted(
        "the queue of a dead rank stays",
        ("transfer_manager.process.supervisor", "RankSupervisor._drop", "self.queue.close()", "pass"),
    ),
    # -- what is forgotten
    _planted(
        "a landing of an older epoch joins",
        ("books.arrivals", "land", "if succeeded and run.epoch == tree.epoch:", "if succeeded:"),
    ),
    _planted(
        "a caller's copy of before a reset joins",
        ("callers.copies", "BlockCopies._copy_down", "succeeded and began == self._tree.generation", "succeeded"),
    ),
    _planted(
        "a request publishes after a reset",
        (
            "requests.publisher",
            "Publisher._may",
            "is_current = active.generation >= self._tree.generations.last_reset",
            "is_current = True",
        ),
    ),
    _planted(
        "the death of a rank with its arrays is not told",
        ("ranks", "RankAccess.on_kv_lost", "self._forget_gpu(rank, has_kv=False)", "pass"),
        ("ranks", "RankAccess.on_kv_lost", "self._forget_gpu(rank, has_kv=True)", "pass"),
    ),
    _planted(
        "new arrays of a rank are not told",
        ("transfer_manager.rank.owner", "RankOwner.take_report", "if num_restarts:", "if False:"),
    ),
    _planted(
        "the death of a worker is not told",
        (
            "ranks",
            "RankAccess.kv_lost",
            'self._forget_gpu(rank, has_kv=False if self._config.transfer.owner_of_kv == "worker" else None)',
            "pass",
        ),
    ),
    _planted(
        "what was computed without a worker counts",
        (
            "ranks",
            "RankAccess.attach_kv",
            "self._forget_gpu(rank, has_kv=has_kv)",
            "self._mover.note_kv(rank, is_there=True)",
        ),
    ),
    _planted(
        "sleep forgets nothing of the GPU",
        (
            "life_cycle",
            "LifeCycle._forget",
            "elif GPU in tiers:\n        drop_gpu(tree)",
            "elif GPU in tiers:\n        pass",
        ),
    ),
    _planted(
        "sleep forgets nothing of the CPU tier",
        ("life_cycle", "LifeCycle._forget", "drop_cpu(self._books)", "pass"),
    ),
    _planted(
        "new weights keep the store's name",
        (
            "life_cycle",
            "LifeCycle._rename",
            "dataclasses.replace(storage, weights_id=weights_id) if",
            "storage if",
        ),
    ),
    _planted(
        "new weights keep the offers' name",
        ("peers.peers", "Peers._on_forgotten", "self.road.offers.rename_weights(forgotten.weights_id)", "pass"),
    ),
    _planted(
        "new weights forget nothing",
        ("life_cycle", "LifeCycle._rename", "self._books.forget(weights_id)", "pass"),
        ("books.books", "Books.follow_weights", "self.forget(weights_id)", "pass"),
    ),
    _planted(
        "a namespace is no part of the key",
        (
            "books.prefix_tree",
            "PrefixTree.root",
            "run = self.roots.get(namespace)",
            'namespace = ""; run = self.roots.get("")',
        ),
        ("books.prefix_tree", "PrefixTree.find", "self.roots.get(namespace)", 'self.roots.get("")'),
    ),
    _planted(
        "a namespace is no part of storage's key",
        ("books.block_hash", "root_hash", "+ namespace.encode()", ""),
    ),
    # -- requests
    _planted(
        "a match settles at more than was shown",
        ("requests.matcher", "Matcher.settle", "del ids[active.num_readable_blocks :]", "pass"),
    ),
    _planted(
        "a whole prompt is found",
        ("requests.matcher", "Matcher.find", "(request.num_tokens - 1) //", "request.num_tokens //"),
    ),
    _planted(
        "too much may be committed",
        (
            "manager",
            "PrefixCacheManager.commit",
            "if not is_more or num_computed_tokens > request.num_tokens:",
            "if False:",
        ),
    ),
    _planted(
        "a wait has no deadline",
        (
            "requests.loads",
            "MatchLoads._wait_until_settled",
            "wait_done(transfers, deadline - now, clock)",
            "wait_done(transfers, 1e6, clock)",
        ),
    ),
    _planted(
        "only the first box is handed over",
        ("books.books", "Books.__exit__", "for outlet in self._outlets:", "for outlet in self._outlets[:1]:"),
    ),
    # -- storage
    _planted(
        "what storage reads may be given out",
        ("books.block_pool", "BlockPool.begin_reading", "for block_id in ids:", "for block_id in ():"),
        ("books.block_pool", "BlockPool.end_reading", "for block_id in ids:", "for block_id in ():"),
    ),
    _planted(
        "a torn object is accepted",
        (
            "transfer_manager.storage.file_store",
            "FileStorage.read",
            "return min(bad, default=len(puts))",
            "return len(puts)",
        ),
    ),
    _planted(
        "a read counts as far as it was asked for",
        (
            "transfer_manager.storage.worker",
            "StorageExecutor._do",
            "num_whole = store.read(blocks)",
            "num_whole = max(store.read(blocks), len(task.destination_ids))",
        ),
    ),
    _planted(
        "all pages of a checkpoint have one name",
        ("transfer_manager.storage.keys", "page_names", "place.to_bytes", "bool(place).to_bytes"),
    ),
    _planted(
        "the rank that read most decides",
        ("transfer_manager.task", "TransferResult.num_blocks", "min((r.num_blocks", "max((r.num_blocks"),
    ),
    _planted(
        "a prefetch lands behind a hole",
        (
            "books.arrivals",
            "insert_copies",
            "if num_found < first or not joined:",
            "first = min(first, num_found)\n    if not joined:",
        ),
    ),
    _planted(
        "a store that is opening owns nothing",
        (
            "storage.access",
            "StorageAccess.held",
            "tiers = (*self._beside, self._tier)",
            "tiers = (self._tier,)",
        ),
    ),
    # -- what is never given back
    _planted(
        "a release keeps its own blocks",
        ("requests.requests", "Requests.release", "active.free_private(self.books.pools[GPU])", "pass"),
    ),
    _planted(
        "a failed load keeps its room",
        ("movement.cargo", "Landings._send_home", "self._books.pools[self._transfer.tier].free(ids, TASK)", "pass"),
    ),
    _planted(
        "a copy keeps its source in place",
        ("books.arrivals", "land", "tree.unpin(segment)", "pass"),
    ),
    _planted(
        "a prefetch keeps what did not come",
        ("storage.reads", "StorageReads._end_piece", "self._pool.free(ids, TASK)", "pass"),
    ),
    _planted(
        "a detach leaves its processes",
        ("storage.access", "StorageAccess._detach", "tier.link.client.stop()", "pass"),
    ),
    _planted(
        "a failed receive keeps its room",
        ("peers.receives", "PeerReceives.try_land", "self._tree.pools[0].free(mine.ids, TASK)", "pass"),
    ),
    # -- other instances
    _planted(
        "a failed receive joins",
        (
            "peers.receives",
            "PeerReceives.answered",
            "mine.is_answered, mine.why = True, why",
            "mine.is_answered, mine.why = True, None",
        ),
    ),
    _planted(
        "new arrays while the peers start are told to nobody",
        ("peers.peers", "Peers.open", "if generations.last_gpu_loss != last_loss else ()", "if False else ()"),
    ),
    # -- where a copy fails, memory runs out, or something outside raises
    _planted(
        "a write that got no memory stays in the queue",
        (
            "storage.writes",
            "StorageWrites._start_writes",
            "except MemoryError:  # left",
            "except ZeroDivisionError:  #",
        ),
    ),
    _planted(
        "a copy that got no memory keeps its pin",
        (
            "requests.matcher",
            "Matcher._copy_last",
            "finally:\n        self._tree.move_pin(with_source, None, 0)",
            "finally:\n        pass",
        ),
    ),
    _planted(
        "a commit that got no memory counts",
        (
            "requests.publisher",
            "Publisher.commit",
            "active.num_computed_tokens, active.trail.stepped_at = num_before, stepped_at",
            "pass",
        ),
    ),
    _planted(
        "a receive that got no memory keeps its pin",
        ("peers.receives", "PeerReceives.begin", "tree.move_pin(mine.pin, None, 0)\n        raise", "raise"),
    ),
    # -- rows of a hybrid model
    _planted(
        "a window is a unit short",
        ("requests.anchors", "Anchors._slide", "gone = first - rows", "gone = 1 + first - rows"),
    ),
    _planted(
        "a state is written where a checkpoint has it",
        ("requests.snapshots", "Snapshots.replace_slots", "return slots", "return old"),
    ),
    _planted(
        "a match ends at a checkpoint that has not come",
        ("requests.row_matches", "RowMatches._reached", "each.units is not None", "True"),
    ),
    _planted(
        "a unit goes with the first of its checkpoints",
        ("books.unit_pool", "UnitPool.let_go", "if not num_left:", "if True:"),
    ),
    _planted(
        "a failed load of a checkpoint lands",
        ("books.row_books", "RowBooks.end_units", "if succeeded and", "if"),
    ),
    _planted(
        "an image goes while it is read",
        ("movement.images", "ImageMover._start", "self._rows.checkpoints.pin(checkpoint)", "pass"),
    ),
)

# Seen by the order of things, long before a byte is wrong: see `order_oracles` and `tests/model`
BY_ORDER = (
    _planted(
        "a copy down lands where it does not fit",
        ("books.arrivals", "_fitting", "fits = not run.cpu or run.cpu_end == segment.start or", "fits = True or"),
    ),
    _planted(
        "ids go home before the rank is reaped",
        (
            "transfer_manager.process.io_thread",
            "ProcessIO._kill_stuck",
            'self.ranks[rank].kill(f"task {task_id} passed its deadline")',
            (
                'self.ranks[rank].kill("late"); [self._fail(each, self.ranks[rank], "late") for each in '
                "self.tasks.flights.of_rank(rank)]"
            ),
        ),
    ),
    _planted(
        "a receive joins without the owner's last word",
        (
            "transfer_manager.peer.receiver",
            "RankReceive._read_all",
            "while not all(source.is_confirmed for",
            "while not all(source.is_read for",
        ),
    ),
    _planted(
        "an owner confirms what it does not hold any more",
        (
            "transfer_manager.peer.sender",
            "Sender.confirm",
            "send.receiver != (reader.instance_id, reader.number) or not send.is_final:",
            (
                "False:\n        pass\n    if send is None or mine is None:\n        "
                "self._put(connection, Confirmed(key, reader)); return\n    if False:"
            ),
        ),
    ),
)


def named(name: str) -> Planted:
    """The fault of that name."""
    return next(each for each in (*ALL, *BY_ORDER) if each.name == name)
