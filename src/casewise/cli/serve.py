"""``casewise serve``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer

from casewise.cli.options import AdaptationOptions, ModelOptions, NnUNetStyle, grouped

app = typer.Typer()


@app.command(cls=NnUNetStyle)
@grouped
def serve(
    source: ModelOptions,
    how: AdaptationOptions,
    policy: str = typer.Option(None, help="policy.json, the archive that holds it, or m0."),
    controller: str = typer.Option(None, help="package.module:Name that the policy was calibrated with."),
    certificate: Path = typer.Option(None, help="certificate.json; refused unless it is this policy's."),
    watch: Path = typer.Option(None, help="watch.json of casewise monitor: continued, and M0 once it alarms."),
    force: bool = typer.Option(False, "--force", help="Deploy a policy that calibration called NO-GO."),
    host: str = typer.Option("127.0.0.1", help="Address to bind to; others than this machine need a token."),
    port: int = typer.Option(8000, min=0, max=65535, help="Port."),
    allow_host: list[str] = typer.Option([], "--allow-host", help="A further name for the Host header; repeat."),
    places: int = typer.Option(8, "--places", min=1, help="Requests inside at once; further ones are answered 429."),
    timeout: float = typer.Option(60.0, help="Seconds from acceptance; then M0 is the answer. 0 for none."),
    max_body: str = typer.Option("256M", "--max-body", help="Largest body of a request."),
    max_ram: str = typer.Option(None, "--max-ram", help="Refuse images that need more; default: 80 % of what is free."),
    contract: str = typer.Option("refuse", help="Input contract: refuse, warn or off."),
) -> None:
    """Guarded segmentation over HTTP (Open Inference Protocol v2): /v2/..., POST /segment, /metrics.

    Without a token only this machine can ask. For others, set CASEWISE_TOKEN and send Authorization: Bearer TOKEN.
    """
    from casewise.adapt.contract import available_bytes, parse_size
    from casewise.run.assemble import assembled
    from casewise.run.local import keep_freed_memory

    keep_freed_memory()
    service = _service()
    model = source.chosen()
    deployment = assembled(
        model, policy, asked=how.asked(model), controller=controller, certificate=certificate, watch=watch,
        contract=contract,
        max_ram=parse_size(max_ram) if max_ram else int(0.8 * (available_bytes() or 0)) or None, force=force,
    )  # fmt: skip
    how.check_used(deployment)
    token, fresh = service.token_for(host, os.environ)
    settings = service.Settings(
        host=host, port=port, token=token, hosts=tuple(allow_host), places=places, max_bytes=parse_size(max_body),
        timeout_s=timeout or None,
    )  # fmt: skip
    if fresh:
        typer.echo(f"CASEWISE_TOKEN was not set; the token of this run is {token}", err=True)
    typer.echo(
        f"casewise serves {deployment.backbone.name} on http://{host}:{port} with policy {deployment.policy.name}",
        err=True,
    )
    service.run(deployment, settings)


def _service() -> Any:
    """The service, whose libraries are an extra."""
    from casewise.core.errors import MissingExtra

    try:
        from casewise.serve import server
    except ImportError as error:
        raise MissingExtra(f"the service cannot be imported ({error}); pip install 'casewise[serve]'") from error
    return server
