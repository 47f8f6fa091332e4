"""The command `fastdeploy-cache`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastdeploy_cache.launch.background.cli import background_app
from fastdeploy_cache.launch.bench.options import LEAST_BYTES, ControlOptions, StorageOptions
from fastdeploy_cache.launch.config_cli import config_app
from fastdeploy_cache.launch.faults.options import SimulateFaultsOptions, SoakOptions
from fastdeploy_cache.launch.operating.cli import operating_app
from fastdeploy_cache.launch.options import LogOptions, size_given, spread
from fastdeploy_cache.launch.reference_engine.installed import check_installed
from fastdeploy_cache.launch.server.library import check_library
from fastdeploy_cache.launch.server.options import RouteOptions, ServeOptions
from fastdeploy_cache.launch.simulator.options import SimulateOptions
from fastdeploy_cache.launch.storage.cli import storage_app

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=__doc__,
    epilog="Example: fastdeploy-cache start",
)
app.add_typer(background_app)
app.add_typer(operating_app)
app.add_typer(config_app, name="config")
bench_app = typer.Typer(
    no_args_is_help=True,
    help="Measure the cache beside its floors, in one run.",
    epilog="Example: fastdeploy-cache bench control",
)
app.add_typer(bench_app, name="bench")
app.add_typer(storage_app, name="storage")
engines_app = typer.Typer(
    no_args_is_help=True,
    help="Run an installed vLLM or SGLang alone and with this cache, and compare the answers. In a checkout of this "
    "project, launch/engines.sh installs the engine first.",
    epilog="Example: fastdeploy-cache engines vllm --only-answers",
)
app.add_typer(engines_app, name="engines")

Ranks = Annotated[int, typer.Option(help="Tensor-parallel ranks, one transfer process each: 1 or 3.")]
LogDir = Annotated[Path | None, typer.Option(help="Folder for one log per rank.")]
TraceFile = Annotated[
    Path, typer.Argument(help="Request trace: JSON lines, gzip-compressed or not; or a flight recording.")
]
IsReplay = Annotated[
    bool, typer.Option("--replay", help="Run a flight recording again, and compare. Status 4: it differs.")
]


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        from fastdeploy_cache.books.tokens import IS_NATIVE

        typer.echo(f"fastdeploy-cache {version('fastdeploy-cache')}")
        typer.echo(f"native packing: {'yes' if IS_NATIVE else 'no'}")
        raise typer.Exit


@app.callback()
def about(
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and leave.")
    ] = False,
) -> None:
    """Options that stand before a command."""


@app.command(epilog="Example: fastdeploy-cache demo --ranks 1 --json facts.json")
def demo(
    ranks: Ranks = 3,
    new_tokens: Annotated[int, typer.Option(min=1, max=200, help="Tokens of each answer, at most.")] = 24,
    json: Annotated[Path | None, typer.Option(help="Also write the facts to this file.")] = None,
    log_dir: LogDir = None,
    *,
    kill: Annotated[bool, typer.Option(help="Kill one rank in the middle.")] = True,
    hybrid: Annotated[bool, typer.Option("--hybrid", help="A model with windows and states in some layers.")] = False,
    router: Annotated[
        bool, typer.Option("--router", help="Instead: two instances, and a router that knows what each has.")
    ] = False,
) -> None:
    """Serve real conversations with the cache and without, and compare speed and answers."""
    check_installed()
    if router:
        check_library()
        from fastdeploy_cache.launch.demo.routed import routed_demo

        raise typer.Exit(0 if routed_demo(new_tokens, json, log_dir) else 1)
    from fastdeploy_cache.launch.demo.command import demo as run

    raise typer.Exit(0 if run(ranks, new_tokens, json, log_dir, kill=kill, is_hybrid=hybrid) else 1)


@app.command(epilog="Example: fastdeploy-cache serve --port 8000 --storage /ssd/kv --set num_cpu_blocks=4096")
@spread
def serve(options: ServeOptions, log: LogOptions) -> None:
    """Serve SmolLM2 over HTTP (POST /v1/chat/completions, /v1/completions) until SIGTERM or Ctrl-C."""
    check_installed()
    check_library()
    from fastdeploy_cache.launch.server.serve import serve as run

    log.set_up()
    run(options)


@app.command(epilog="Example: fastdeploy-cache route --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000")
@spread
def route(options: RouteOptions, log: LogOptions) -> None:
    """Answer chats with prefill and decode instances (`serve --role ...`) until SIGTERM or Ctrl-C."""
    check_library()
    from fastdeploy_cache.launch.server.route import route as run

    log.set_up()
    run(options)


@app.command(epilog="Example: fastdeploy-cache peer-keys keys")
def peer_keys(
    folder: Annotated[Path, typer.Argument(help="A new folder for this host's keys: peer.keys_folder.")],
) -> None:
    """Make the keys that instances on different hosts know each other by."""
    from fastdeploy_cache.ipc.peer_channel import make_keys

    public = make_keys(folder)
    typer.echo(f"copy {public} to every other host, into the folder trusted/ of its own keys, as THIS_HOST.key")
    typer.echo(
        f"and each one's own.key into {folder / 'trusted'}/ as OTHER_HOST.key; what has _secret in its name stays"
    )
    typer.echo("instances read them when they start")


@app.command(epilog="Example: fastdeploy-cache peer-secret group.secret")
def peer_secret(
    file: Annotated[Path, typer.Argument(help="A new file for the secret of a group: peer.secret_file.")],
) -> None:
    """Make the secret that the instances of a group sign their offers with."""
    from fastdeploy_cache.transfer_manager.peer.signature import make_secret

    make_secret(file)
    typer.echo(f"give every instance of the group --set peer.secret_file={file}; on other hosts, a copy of mode 600")


@app.command(epilog="Example: fastdeploy-cache simulate trace.jsonl.gz --gpu-blocks 1%,5% --policy lru,reuse")
@spread
def simulate(trace: TraceFile, options: SimulateOptions, replay: IsReplay = False) -> int:
    """Replay a request trace: which hit rate would which capacity and policy have had?

    Options that take several values can be repeated or separated by commas: --gpu-blocks 1%,5%.
    """
    from fastdeploy_cache.launch.simulator.command import simulate as run
    from fastdeploy_cache.launch.simulator.replay_command import replay_recording

    if replay:
        return replay_recording(trace, options.json_file)
    run(trace, options)
    return 0


@app.command(epilog="Example: fastdeploy-cache simulate-faults --minutes 5 --seed 1000 --json found.json")
@spread
def simulate_faults(options: SimulateFaultsOptions) -> int:
    """Run engines, ranks and stores on a simulated machine whose parts fail, and compare every block.

    Exit status 0: nothing was found; 1: something was, and is printed as a test; 130: Ctrl-C, with what was seen.
    """
    from fastdeploy_cache.launch.faults.command import simulate_faults as run

    return run(options)


@app.command(epilog="Example: fastdeploy-cache soak --minutes 60 --faults 'kill rank,stop rank' --json soak.json")
@spread
def soak(options: SoakOptions) -> int:
    """Run real engines with real caches, kill and stop their processes, and compare every block.

    Exit status 0: nothing was wrong; 1: something was; 130: Ctrl-C, with what was seen.
    """
    from fastdeploy_cache.launch.faults.soak_command import soak as run

    return run(options)


@bench_app.command(epilog="Example: fastdeploy-cache bench control --json control.json")
@spread
def control(
    options: ControlOptions,
    json: Annotated[Path | None, typer.Option(help="Also write the figures here; - is standard output.")] = None,
) -> bool:
    """What the engine's thread pays: verbs, steps, pauses, bytes, each beside a floor. Status 1: a figure missed."""
    from fastdeploy_cache.launch.bench.control_command import bench_control as run

    return run(options, json)


@bench_app.command(epilog="Example: fastdeploy-cache bench transfer --memory 256MiB")
def transfer(
    json: Annotated[Path | None, typer.Option(help="Also write the figures here; - is standard output.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often each copy is measured; medians count.")] = 7,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Size of each pool; up to eight are there at a time.")
    ] = "512MiB",
    idle_seconds: Annotated[float, typer.Option(min=0.5, help="How long the ranks are watched at rest.")] = 5.0,
    device: Annotated[str, typer.Option(help="cpu, or cuda: copy speed alone, beside pinned copies.")] = "cpu",
) -> None:
    """What ranks reach: copy speed, round trips, rest, start, each beside its floor. Status 1: a figure missed."""
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device {device}; use cpu or cuda")
    memory_bytes = size_given("--memory", memory, LEAST_BYTES)
    if device == "cuda":
        from fastdeploy_cache.launch.bench.cuda_transfer_command import bench_cuda_transfer

        raise typer.Exit(0 if bench_cuda_transfer(json, repeats, memory_bytes) else 1)
    from fastdeploy_cache.launch.bench.transfer_command import bench_transfer as run

    raise typer.Exit(0 if run(json, repeats, memory_bytes, idle_seconds) else 1)


@bench_app.command(epilog="Example: fastdeploy-cache bench storage --folder /ssd/kv-bench")
@spread
def storage(
    options: StorageOptions,
    json: Annotated[Path | None, typer.Option(help="Also write the figures here; - is standard output.")] = None,
) -> bool:
    """What stores reach beside plain files, and what one costs that hangs. Status 1: a figure missed."""
    from fastdeploy_cache.launch.bench.storage_command import bench_storage as run

    return run(options, json)


@bench_app.command(epilog="Example: fastdeploy-cache bench peer --link shm")
def peer(
    json: Annotated[Path | None, typer.Option(help="Also write the figures here; - is standard output.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; medians count.")] = 15,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="What is moved at a time; 8 times as much is needed.")
    ] = "128MiB",
    link: Annotated[list[str], typer.Option(help="Links to measure.")] = ["shm", "nixl", "mooncake"],  # noqa: B006
) -> None:
    """What links between instances reach beside plain copies and their libraries. Status 1: a figure missed."""
    from fastdeploy_cache.launch.bench.peer_command import bench_peer as run

    raise typer.Exit(0 if run(json, repeats, size_given("--memory", memory, LEAST_BYTES), link) else 1)


@bench_app.command(epilog="Example: fastdeploy-cache bench simulation --steps 1000000")
def simulation(
    json: Annotated[Path | None, typer.Option(help="Also write the figures here; - is standard output.")] = None,
    steps: Annotated[int, typer.Option(min=1000, help="How many steps of stories, at least.")] = 300_000,
    seed: Annotated[int, typer.Option(min=0, help="Of the first story.")] = 0,
) -> None:
    """How fast `simulate-faults` looks, beside a bare loop of its scheduler. Status 1: a figure missed."""
    from fastdeploy_cache.launch.bench.simulation_command import bench_simulation as run

    raise typer.Exit(0 if run(json, steps, seed) else 1)


@bench_app.command("events", epilog="Example: fastdeploy-cache bench events --json events.json")
def bench_events(
    json: Annotated[Path | None, typer.Option(help="Also write the figures here; - is standard output.")] = None,
    blocks: Annotated[int, typer.Option(min=1000, help="Of the cache that a listener comes to.")] = 100_000,
) -> None:
    """What publishing events costs a request, and how soon a listener knows all. Status 1: a figure missed."""
    from fastdeploy_cache.launch.bench.events_command import bench_events as run

    raise typer.Exit(0 if run(json, blocks) else 1)


@bench_app.command("lending", epilog="Example: fastdeploy-cache bench lending --json lending.json")
def bench_lending(
    json: Annotated[Path | None, typer.Option(help="Also write the figures here; - is standard output.")] = None,
) -> None:
    """A prompt that another instance has cached, borrowed beside computed. Status 1: a figure missed."""
    check_installed()
    check_library()
    from fastdeploy_cache.launch.bench.lending_command import bench_lending as run

    raise typer.Exit(0 if run(json) else 1)


@bench_app.command("tenants", epilog="Example: fastdeploy-cache bench tenants --json tenants.json")
def bench_tenants(
    json: Annotated[Path | None, typer.Option(help="Also write the figures here; - is standard output.")] = None,
) -> None:
    """The hit rate of a quiet tenant beside a flood, with shares and without. Status 1: a figure missed."""
    from fastdeploy_cache.launch.bench.tenants_command import bench_tenants as run

    raise typer.Exit(0 if run(json) else 1)


@engines_app.command(epilog="Example: fastdeploy-cache engines vllm --only-answers --json lane.json")
def vllm(
    json: Annotated[Path | None, typer.Option(help="Also write the tables to this file; - is standard output.")] = None,
    only_answers: Annotated[bool, typer.Option("--only-answers", help="Short prompts, each engine once.")] = False,
    lmcache: Annotated[Path | None, typer.Option(help="Folder where LMCache is installed, to run it beside.")] = None,
) -> None:
    """vLLM alone and with this cache, its ranks killed, and restarted. Status 1: an answer differs, or nothing hits."""
    from fastdeploy_cache.launch.engines.vllm_lane import run_vllm_lane as run

    raise typer.Exit(0 if run(json, only_answers=only_answers, lmcache=lmcache) else 1)


@engines_app.command(epilog="Example: fastdeploy-cache engines sglang --json lane.json")
def sglang(
    json: Annotated[Path | None, typer.Option(help="Also write the table to this file; - is standard output.")] = None,
) -> None:
    """SGLang alone and with HiCache over our storage, with faults, and restarted. Status 1: an answer differs, or
    nothing hits."""
    from fastdeploy_cache.launch.engines.sglang_lane import run_sglang_lane as run

    raise typer.Exit(0 if run(json) else 1)


def main() -> None:
    """What the entry point runs: an expected error is one line on standard error and exit status 1."""
    from fastdeploy_cache.errors import CacheError
    from fastdeploy_cache.ipc.shortage import raise_open_files

    raise_open_files()
    try:
        app()
    except CacheError as error:
        typer.echo(f"fastdeploy-cache: {error}", err=True)
        raise SystemExit(1) from None
