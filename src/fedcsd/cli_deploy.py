"""`fedcsd deploy`: the same methods over Flower, on one machine or across sites."""

import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import rich_click as click

from fedcsd.cli_options import MACHINE, free_name, gather, overwrite_option, set_option, setting_options
from fedcsd.config import TABLES, layered
from fedcsd.deploy.settings import Deployment, deployment_of
from fedcsd.errors import UserError
from fedcsd.naming import short

FOR_APPS = ("mods", "clipping_norm")  # of use only to an app with mods of its own
Command = TypeVar("Command", bound=Callable[..., Any])


def deployment_options(command: Command) -> Command:
    """A command-line option for everything a deployment has to know."""
    hints = get_type_hints(Deployment)
    for f in reversed([f for f in fields(Deployment) if f.name not in FOR_APPS]):
        flag, kind = "--" + f.name.replace("_", "-"), hints[f.name]
        flag += f"/--no-{flag[2:]}" if kind is bool else ""
        text = f.metadata["meaning"] + ("" if kind is bool else f"  [dim](default: {f.default})[/dim]")
        command = click.option(flag, f.name, default=None, type=kind, help=text, panel="The deployment")(
            command
        )
    return command


@click.group()
def deploy() -> None:
    """The same methods over Flower: real processes here, real sites elsewhere.

    \b
      fedcsd deploy local --nodes 4 --data digits --beta 0.1 --rounds 10
      fedcsd deploy init my-federation --server federation.example.org --sites 3
    """


@deploy.command()
@click.argument("experiment", required=False, type=click.Path(path_type=Path), metavar="[EXPERIMENT.toml]")
@click.option(
    "--nodes",
    type=click.IntRange(1, 64),
    default=4,
    help="SuperNodes, each a client  [dim](default: 4)[/dim]",
)
@click.option(
    "--method",
    metavar="NAME[:PRESET][:OPTION=VALUE]…",
    help="as for `fedcsd run`  [dim](default: fedcsd)[/dim]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="run directory  [dim](default: runs/METHOD-DATA, numbered)[/dim]",
)
@click.option(
    "--resume", type=click.Path(path_type=Path), metavar="RUN", help="go on with a run that was cut off"
)
@click.option(
    "--port", type=click.IntRange(1, 65535), help="of the SuperLink  [dim](default: a free one)[/dim]"
)
@overwrite_option
@set_option
@deployment_options
@setting_options("clients", "client_state", *MACHINE)
def local(
    experiment: Path | None,
    nodes: int,
    method: str | None,
    out: Path | None,
    resume: Path | None,
    port: int | None,
    overwrite: bool,
    assignments: tuple[str, ...],
    **options: Any,
) -> None:
    """Try a deployment on this machine: a SuperLink and SuperNodes on 127.0.0.1.

    TLS and node authentication are on, with keys that are made on the spot. The result is a run directory
    like that of `fedcsd run`, with the same weights bit for bit. Everything that is started is stopped.

    \b
      fedcsd deploy local --nodes 4 --data digits --beta 0.1 --rounds 10
      fedcsd deploy local --resume runs/fedcsd-digits
    """
    check_flower()
    given = {key: options.pop(key) for key in list(options) if key in Deployment.__dataclass_fields__}
    given = {key: value for key, value in given.items() if value is not None}
    values = gather(experiment, {} if method is None else {"method": method}, options, assignments)

    from fedcsd.cli import show_finished
    from fedcsd.console import Training

    if resume:
        plan = taken_up(resume.expanduser(), values, given)
    else:
        plan = started({**layered(TABLES, values), "clients": nodes}, given, out, overwrite)
    with Training() as training:
        follow = training.follow(short(plan["method"]), plan["rounds"])
        show_finished(carried_out(plan, port or 0, follow))


def check_flower() -> None:
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise UserError("this needs Flower: pip install 'fedcsd[flower]'") from None


def started(
    values: dict[str, Any], given: Mapping[str, Any], out: Path | None, overwrite: bool
) -> dict[str, Any]:
    """What a new run needs, all of it checked before anything is started."""
    from fedcsd.experiments import prepare
    from fedcsd.runs import RunDirectory

    deployment = deployment_of(given)
    prepared = prepare(values)
    target = (out.expanduser() if out else free_name(values)).resolve()
    RunDirectory(target).check_free(overwrite)
    clients = prepared.settings.clients
    if deployment.min_clients > clients:
        raise UserError(f"--min-clients {deployment.min_clients} is more than the {clients} nodes")
    config = {"experiment": json.dumps(values), "overwrite": overwrite, **asdict(deployment)}
    return {
        "out": target,
        "config": config,
        "nodes": clients,
        "rounds": prepared.settings.rounds,
        "method": values["method"]["name"],
        "done": 0,
    }


def taken_up(path: Path, values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What a run that goes on needs."""
    from fedcsd.deploy.local import FOLDER
    from fedcsd.runs import RunDirectory

    directory, rounds = RunDirectory.open(path), values.get("rounds")
    kept, settings = directory.config.get("deploy"), directory.settings
    if other := sorted(set(values) - {"rounds"}):
        raise UserError(f"{other[0]} cannot change in a run: start a new one, or change rounds")
    if kept is None:
        raise UserError(
            f"{path} is no run of fedcsd deploy: fedcsd resume {shlex.quote(str(path))} goes on with it"
        )
    if directory.summary is not None:
        raise UserError(f"{path} is finished: {directory.summary['rounds']} rounds")
    if not (path / FOLDER).is_dir():
        raise UserError(f"{path} was not started with fedcsd deploy local: go on with {kept['again']}")
    kept = {key: kept[key] for key in Deployment.__dataclass_fields__ if key in kept}
    config = {"resume": True, **asdict(deployment_of({**kept, **given}))}
    return {
        "out": path.resolve(),
        "config": config | ({"rounds": rounds} if rounds else {}),
        "nodes": settings["clients"],
        "rounds": rounds or settings["rounds"],
        "method": settings["method"]["name"],
        "done": directory.rounds_saved,
    }


def carried_out(plan: Mapping[str, Any], port: int, watch: Any) -> Any:
    """Start the processes, run, and stop them; the finished run."""
    from fedcsd import jobs
    from fedcsd.deploy.local import FOLDER, Federation, tidy
    from fedcsd.places import sigterm_as_interrupt
    from fedcsd.runs import RunDirectory

    out: Path = plan["out"]
    folder = out / FOLDER
    again = f"fedcsd deploy local --resume {shlex.quote(str(out))}"
    if not plan["config"].get("resume"):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror or error}: choose another --out") from None
    try:
        with sigterm_as_interrupt(), Federation(folder, plan["nodes"], port=port) as federation:
            watch.stage(f"starting a SuperLink and {plan['nodes']} SuperNodes on {federation.address}")
            federation.start()
            watch.stage("the nodes join and read their data")
            config = {**plan["config"], "out": str(out), "again": again, "join_timeout": 120.0}
            status = federation.run(config)
            federation.follow(out, status, watch, plan["rounds"], plan["done"])
    except KeyboardInterrupt as error:
        if (out / "config.toml").exists():
            rounds = RunDirectory(out).rounds_saved
            saved = f"rounds 1 to {rounds} are saved" if rounds else "no round was finished"
            error.args = (f"{saved}; go on with: {again}",)
        raise
    finally:
        if not (out / "config.toml").exists():  # nothing came of it
            tidy(folder)
            with suppress(OSError):
                out.rmdir()
    tidy(folder)
    return jobs.load_run(out)
