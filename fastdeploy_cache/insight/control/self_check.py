"""The books of all rooms against each other."""

from __future__ import annotations

from fastdeploy_cache.books.block_pool import REQUEST, TASK
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.row_invariants import check_own_units, check_rows
from fastdeploy_cache.callers.blocks import CallerBlocks
from fastdeploy_cache.movement.cargo import CallersBlocks, WipedBlocks
from fastdeploy_cache.movement.images import ImageLanding
from fastdeploy_cache.movement.movement import Movement
from fastdeploy_cache.movement.unit_copies import UnitCopy
from fastdeploy_cache.peers.peers import Peers
from fastdeploy_cache.requests.invariants import Held, check
from fastdeploy_cache.requests.requests import Requests
from fastdeploy_cache.storage.access import StorageAccess


def check_all(
    books: Books, movement: Movement, requests: Requests, storage: StorageAccess, *, peers: Peers, blocks: CallerBlocks
) -> None:
    """Raise `AssertionError` naming the first broken promise. A turn of its own, which walks the whole tree."""
    with books:
        road, stored = peers.road, storage.held
        held = Held(
            requests=requests,
            transfers=list(movement.mover.in_flight.values()),
            cpu_ids=[*stored.block_ids, *blocks.copies.kept_ids],
            gpu_ids=[*road.sends.held_ids, *road.receives.held_ids],
            pins=[*books.pinned, *stored.pins, *road.sends.pins, *road.receives.pins],
            ahead=blocks.copies.ahead,
            waiting=road.receives.loads,
        )
        check(books.tree, held)
        if books.rows is not None:
            rows = [active.rows for active in requests if active.rows is not None]
            kept = [prefix.checkpoint for prefix in books.pinned.values() if prefix.checkpoint is not None]
            kept += [*stored.checkpoints, *road.sends.checkpoints, *road.receives.checkpoints]
            cargoes = [each.cargo for each in held.transfers if isinstance(each.cargo, ImageLanding | UnitCopy)]
            moving = [cargo for cargo in cargoes if cargo.pins]
            used = [each.kept_units for each in held.transfers if each.kept_units]  # by who ran ahead of their loads
            of_tasks = [cargo.checkpoint for cargo in moving]
            check_rows(books.tree, books.rows, [*kept, *of_tasks, *(each for of in rows for each in of.anchors)])
            landed = [copy.units for of in rows for copy in of.copies if copy.has_landed]
            check_own_units(books.rows, REQUEST, [*landed, *[of.own for of in rows]])
            callers = [
                each.cargo.units for each in held.transfers if isinstance(each.cargo, CallersBlocks | WipedBlocks)
            ]
            of_peers = road.receives.held_units
            filled = [units for units in (*used, *[cargo.units for cargo in moving], *callers, *of_peers) if units]
            check_own_units(books.rows, TASK, filled)
