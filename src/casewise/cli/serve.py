"""``casewise serve``: segment images over HTTP."""

from __future__ import annotations

import os
from typing import Any

import typer

from casewise.cli.options import DeploymentOptions, ModelOptions, NnUNetStyle, grouped, setting

app = typer.Typer()


@app.command(cls=NnUNetStyle)
@grouped
def serve(
    source: ModelOptions,
    decides: DeploymentOptions,
    host: str = typer.Option("127.0.0.1", help="Address to listen on; requests from other machines need a token."),
    port: int = typer.Option(8000, min=0, max=65535, help="Port."),
    allow_host: list[str] = setting([], help="Another allowed name in the Host header; repeat for several."),
    places: int = setting(8, min=1, help="Largest number of requests at a time; others get status 429."),
    timeout: float = setting(60.0, help="Seconds per request; after that the original mask is returned. 0: no limit."),
    max_body: str = setting("256M", help="Largest body of a request."),
) -> None:
    """Segment images over HTTP, one image per request: POST /segment, /model, /health.

    Example:

        casewise serve -m deployment --port 8000

    Without a token only this machine can send requests. For other machines, set CASEWISE_TOKEN and send the header
    Authorization: Bearer TOKEN.
    """
    from casewise.adapt.contract import available_bytes, parse_size
    from casewise.run.local import keep_freed_memory

    keep_freed_memory()
    service = _service()
    deployment = decides.open_deployment(source.as_model(), max_ram=int(0.8 * (available_bytes() or 0)) or None)
    token, fresh = service.token_for(host, os.environ)
    settings = service.ServiceSettings(
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
