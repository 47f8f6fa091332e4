"""Watches over a group: starts its members, and starts again whichever ends, later and later."""

from __future__ import annotations

import json
import logging
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.ipc.private_directory import PrivateDirectory
from fastdeploy_cache.launch.background.group_plan import ROUTER, GroupPlan, at_known_ports, discovery_file, secret_file
from fastdeploy_cache.launch.background.own_files import write_own
from fastdeploy_cache.launch.background.program import END_SECONDS, START_SECONDS, EndSignals, Program, wait_ends
from fastdeploy_cache.launch.background.run_folder import RunFolder, Slot
from fastdeploy_cache.launch.server.readiness import tell_ready, tell_status
from fastdeploy_cache.transfer_manager.peer.signature import make_secret

logger = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 1.0, 60.0  # doubled from one end to the next
_GOOD_SECONDS = 60.0  # who has been ready for so long begins anew
_IDLE_SECONDS = 3600.0


@dataclass(eq=False)
class Member:
    """One of the group, running or about to be started again."""

    slot: Slot
    command: list[str]
    program: Program | None = None
    facts: dict[str, str] = field(default_factory=dict)
    ready_at: float | None = None
    due: float = 0.0  # to be ready by then; of one that does not run: to be started then
    num_ends: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether it has said so since it was started."""
        return self.ready_at is not None


class Supervisor:
    """One group, in the thread that makes it, which must live as long as the group."""

    def __init__(self, plan: GroupPlan, folder: RunFolder, clock: Callable[[], float] = time.monotonic) -> None:
        self._plan, self._folder, self._clock = plan, folder, clock
        self._members: dict[str, Member] = {}
        self._has_been_ready = False
        self._discovery, self._secret = discovery_file(folder), secret_file(folder)

    def run(self) -> bool:
        """Run until SIGTERM or SIGINT; then end all members. False where one of them had to be killed.

        Raises:
            LaunchError: a member cannot start; none is left running.
        """
        with self._folder.locked("supervisor", "a group is watched over already"), EndSignals() as self._asked:
            self._sockets = PrivateDirectory()
            try:
                self._secret.unlink(missing_ok=True)
                make_secret(self._secret)
                self._start_all()
                while not self._asked.is_set:
                    self._wait()
            finally:
                all_ended = self._end_all()
                self._sockets.remove()
        return all_ended

    def _start_all(self) -> None:
        for name, command in self._plan.instances(self._folder).items():
            self._add(name, command)
        self._wait_all_ready()
        if self._asked.is_set:
            return
        urls = {name: member.facts["url"] for name, member in self._members.items()}
        self._add(ROUTER, self._plan.router(urls, self._folder))
        self._wait_all_ready()
        if not self._asked.is_set:
            self._has_been_ready = True
            logger.info("event=group_ready url=%s", self._members[ROUTER].facts["url"])
            tell_ready(**self._members[ROUTER].facts)

    def _wait_all_ready(self) -> None:
        while not self._asked.is_set and not all(member.is_ready for member in self._members.values()):
            self._wait()

    def _add(self, name: str, command: list[str]) -> None:
        if not self._asked.is_set:
            self._members[name] = Member(self._folder.member(name), command)
            self._start(self._members[name])

    def _start(self, member: Member) -> None:
        member.ready_at, member.due = None, self._clock() + START_SECONDS
        member.program = Program(member.slot, member.command, self._sockets.path, dies_with_us=True)
        logger.info("event=member_started name=%s pid=%d", member.slot.name, member.program.pid)

    def _wait(self) -> None:
        """Deal with what happens next: a member is ready or has ended, or a time has come."""
        now = self._clock()
        running = {m: m.program for m in self._members.values() if m.program is not None}
        due = [m.due for m in self._members.values() if m.program is None or not m.is_ready]
        what = [self._asked.fileno(), *(fd for p in running.values() for fd in (p.ready.fileno(), p.pidfd))]
        readable, _, _ = select.select(what, [], [], min([_IDLE_SECONDS, *(max(0.0, each - now) for each in due)]))
        for member, program in running.items():
            if program.ready.fileno() in readable:
                if (facts := program.ready.take()) is not None:
                    self._on_ready(member, facts)
                elif not self._has_been_ready:
                    tell_status(f"{member.slot.name}: {program.ready.status}")
            if program.pidfd in readable:
                self._on_end(member, program)
        for member in self._members.values():
            if not self._asked.is_set and self._clock() >= member.due:
                self._on_due(member)

    def _on_ready(self, member: Member, facts: dict[str, str]) -> None:
        member.facts, member.ready_at = facts, self._clock()
        if not member.num_ends:  # started again it takes the ports that the others know
            member.command = at_known_ports(member.command, facts)
        member.slot.note_facts(facts)
        self._show_prometheus()
        logger.info("event=member_ready name=%s url=%s", member.slot.name, facts.get("url"))

    def _on_end(self, member: Member, program: Program) -> None:
        code, ready_at, now = program.reap(), member.ready_at, self._clock()
        program.close()
        member.program = member.ready_at = None
        if not self._has_been_ready:
            raise LaunchError(program.why_ended())
        if ready_at is not None and now - ready_at >= _GOOD_SECONDS:
            member.num_ends = 0
        seconds = min(FIRST_BACKOFF_SECONDS * 2**member.num_ends, MAX_BACKOFF_SECONDS)
        member.num_ends, member.due = member.num_ends + 1, now + seconds
        logger.warning("event=member_ended name=%s code=%d again_in=%.0f", member.slot.name, code, seconds)

    def _on_due(self, member: Member) -> None:
        if member.program is None:
            self._start(member)
        elif not member.is_ready:
            logger.warning("event=member_not_ready name=%s seconds=%.0f", member.slot.name, START_SECONDS)
            member.due = self._clock() + START_SECONDS
            member.program.signal(signal.SIGKILL)

    def _end_all(self) -> bool:
        """SIGTERM to all, the router first, and SIGKILL to those that are there after 30 seconds."""
        programs = [m.program for m in self._members.values() if m.program is not None]
        for program in sorted(programs, key=lambda program: program.slot.name != ROUTER):
            program.signal(signal.SIGTERM)
        all_ended = wait_ends([program.pidfd for program in programs], END_SECONDS)
        for program in programs:
            if not wait_ends([program.pidfd], 0.001):
                logger.error("event=member_killed name=%s log=%s", program.slot.name, program.slot.log_file)
                program.signal(signal.SIGKILL)
            program.reap()
            program.close()
        for member in self._members.values():
            member.slot.forget()
        for file in (self._secret, self._discovery):
            file.unlink(missing_ok=True)
        return all_ended

    def _show_prometheus(self) -> None:
        """Where each member's metrics are, for `file_sd_configs`; replaced as a whole, as it may be read meanwhile."""
        targets = [
            {"targets": [url.removeprefix("http://").removesuffix("/metrics")], "labels": {"member": name}}
            for name, member in self._members.items()
            if (url := member.facts.get("metrics"))
        ]
        new = self._discovery.with_suffix(".new")
        write_own(new, json.dumps(targets, indent=2) + "\n")
        new.replace(self._discovery)
