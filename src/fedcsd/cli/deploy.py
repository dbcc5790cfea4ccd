"""Run the same methods over Flower, on one machine or across sites (`fedcsd deploy`)."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import rich_click as click

from fedcsd.cli.options import (
    experiment_argument,
    free_name,
    gather,
    options_from,
    out_option,
    overwrite_option,
    set_option,
    setting_options,
)
from fedcsd.config.settings import settings_where
from fedcsd.deploy.settings import Deployment, deployment_of
from fedcsd.errors import UserError
from fedcsd.plugins import short

deployment_options = options_from(Deployment)


@click.group()
def deploy() -> None:
    """Run the same methods over Flower: real processes here, real sites elsewhere.

    \b
      fedcsd deploy local --nodes 4 --data digits --beta 0.1 --rounds 10
      fedcsd deploy init my-federation --server federation.example.org --sites 3
    """


@deploy.command()
@experiment_argument
@click.option(
    "--nodes",
    type=click.IntRange(1, 64),
    default=4,
    help="SuperNodes, each a client  [dim](default: 4)[/dim]",
)
@out_option
@click.option(
    "--resume", type=click.Path(path_type=Path), metavar="RUN", help="go on with a run that was cut off"
)
@click.option(
    "--port", type=click.IntRange(1, 65535), help="of the SuperLink  [dim](default: a free one)[/dim]"
)
@overwrite_option
@set_option
@deployment_options
@setting_options(*settings_where(deployed=False), usual={"on_divergence": "skip"})
def local(
    experiment: Path | None,
    nodes: int,
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
    values = gather(experiment, options, assignments)

    from fedcsd.cli.show import show_finished
    from fedcsd.deploy.local import LocalRun
    from fedcsd.experiments.choices import resolved
    from fedcsd.results.terminal import ProgressDisplay

    if resume:
        run = LocalRun.resumed(resume.expanduser(), values, given)
    else:
        values = {**resolved(values), "clients": nodes}
        path = (out.expanduser() if out else free_name(values)).resolve()
        run = LocalRun.new(values, given, path, overwrite=overwrite)
    with ProgressDisplay() as progress:
        show_finished(run.train(progress.follow(short(run.method), run.rounds), port or 0))


def check_flower() -> None:
    """Refuse to work without Flower."""
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise UserError("this needs Flower: pip install 'fedcsd[flower]'") from None


@deploy.command()
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option(
    "--server", default="", metavar="HOST[:PORT]", help="name under which the sites reach the server"
)
@click.option(
    "--simulate", default="", metavar="DATA", help="no sites: an app for Flower's simulation on this data set"
)
@click.option(
    "--sites", type=click.IntRange(1), default=2, help="sites that take part  [dim](default: 2)[/dim]"
)
@click.option("--method", default="fedcsd", help="as for `fedcsd run`  [dim](default: fedcsd)[/dim]")
@click.option("--model", default="auto", help="as for `fedcsd run`  [dim](default: auto)[/dim]")
@click.option(
    "--rounds", type=click.IntRange(1), default=30, help="communication rounds  [dim](default: 30)[/dim]"
)
@click.option(
    "--classes",
    default="",
    metavar="A,B,…",
    help="names of all classes in order for image folders, or their number for other data; sites may lack some",
)
@click.option("--size", type=click.IntRange(0), default=0, help="scale all images to this size")
@deployment_options
def init(
    folder: Path,
    server: str,
    simulate: str,
    sites: int,
    method: str,
    model: str,
    rounds: int,
    classes: str,
    size: int,
    **options: Any,
) -> None:
    """Write a Flower app for a federation across sites, with instructions for everybody.

    Flower's own commands run it: flower-superlink at the server, flower-supernode at each site, flwr run.

    \b
      fedcsd deploy init my-federation --server federation.example.org --sites 3 --classes cat,dog
      fedcsd deploy init my-simulation --simulate digits --sites 50
    """
    from fedcsd.deploy.init import found, write_folder
    from fedcsd.experiments.choices import resolved

    host, _, port = server.partition(":")
    if bool(server) == bool(simulate):
        raise UserError("give --server with the name of the server, or --simulate with a data set")
    if server and (not host or (port and not port.isdigit())):
        raise UserError(
            f"--server takes a name, or a name and a port: federation.example.org:9092, not {server!r}"
        )
    chosen = resolved({"method": method, "model": model})
    given = asdict(deployment_of({key: value for key, value in options.items() if value is not None}))
    named, own = found(chosen)
    more = {f"method.{key}": value for key, value in chosen["method"].items() if key != "name"}
    config = {**named, "rounds": rounds, "lr": 0.01, "epochs": 5, "batch_size": 64, "seed": 0, **given}
    config["set"] = " ".join(f"{key}={json.dumps(value)}" for key, value in more.items())
    config |= {"data": simulate, "beta": 0.1, "min_samples": 1} if simulate else {}
    data_options = [f"classes={classes.replace(' ', '')}"] if classes else []
    data_options += [f"size={size}"] if size else []
    where = (folder.expanduser(), host, int(port or 9092), sites)
    write_folder(*where, config, " ".join(data_options), own)
    print(f"written: {folder}")
    print(f"how to run it:                {folder / 'README.md'}")
    if server:
        print(f"for the people at the sites:  {folder / 'JOIN.md'}")


@deploy.command()
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    required=True,
    metavar="NAME",
    help="name or address of the server; may be repeated",
)
def certificates(folder: Path, hosts: tuple[str, ...]) -> None:
    """Make the certificates by which sites know the server.

    \b
      fedcsd deploy certificates certificates --host federation.example.org
    """
    check_flower()
    from fedcsd.deploy.keys import make_certificates

    folder = folder.expanduser()
    if any((folder / name).exists() for name in ("ca.crt", "server.key")):
        raise UserError(f"{folder} has certificates already: sites rely on them; choose another folder")
    # Processes on the server itself reach the SuperLink as 127.0.0.1.
    make_certificates(folder, [*dict.fromkeys([*hosts, "127.0.0.1", "localhost"])])
    print(f"for every site:       {folder / 'ca.crt'}")
    print(f"for the server only:  {folder / 'server.crt'}, {folder / 'server.key'}")


@deploy.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="FILE")
def key(path: Path) -> None:
    """Make a site's key: FILE stays at the site, FILE.pub goes to the server.

    \b
      fedcsd deploy key site.key
    """
    check_flower()
    from fedcsd.deploy.keys import make_node_key
    from fedcsd.files import writing

    with writing(path):
        try:
            public = make_node_key(path.expanduser())
        except FileExistsError:
            raise UserError(f"{path} exists already: the server may know it; choose another name") from None
    print(f"keep:                     {path}")
    print(f"send to the person who runs the server:  {public}")


@deploy.command()
@click.argument("data", metavar="DATA")
@click.option(
    "--options",
    default="",
    metavar="'KEY=VALUE …'",
    help="options of the data, as in the node config's data-options",
)
def check(data: str, options: str) -> None:
    """Read a site's data and show what the server would be told of it; nothing is sent.

    \b
      fedcsd deploy check /path/to/data --options 'size=64'
    """
    from fedcsd.deploy.node.answers import Node
    from fedcsd.deploy.wire import Parcel
    from fedcsd.results.terminal import show_table

    node = Node({"site": "here", "data": data, "data-options": options}, Path())
    about = node.join(Parcel({"mode": "sites", "config": {}})).header
    rows = [[name, str(value)] for name, value in about.items() if name != "name"]
    show_table(["", "what the server is told"], rows, left=2)
