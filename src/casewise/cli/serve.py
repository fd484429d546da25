"""``casewise serve``."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from casewise.cli.nnunet_style import NnUNetStyle, folds_of

app = typer.Typer()


@app.command(cls=NnUNetStyle)
def serve(
    model: str = typer.Option(..., "-m", "--model", help="Model folder, hub id or package.module:factory."),
    policy: str = typer.Option(None, help="policy.json, the archive that holds it, or m0."),
    certificate: Path = typer.Option(None, help="certificate.json; refused unless it is this policy's."),
    watch: Path = typer.Option(None, help="watch.json of casewise monitor: continued, and M0 once it alarms."),
    host: str = typer.Option("127.0.0.1", help="Address to bind to; others than this machine need a token."),
    port: int = typer.Option(8000, help="Port."),
    allow_host: list[str] = typer.Option([], "--allow-host", help="A further name for the Host header; repeat."),
    places: int = typer.Option(8, "--places", help="Requests inside at once; further ones are answered 429."),
    timeout: float = typer.Option(60.0, help="Seconds from acceptance; then M0 is the answer. 0 for none."),
    max_body: str = typer.Option("256M", "--max-body", help="Largest body of a request."),
    max_ram: str = typer.Option(None, "--max-ram", help="Refuse images that need more, such as 16G."),
    contract: str = typer.Option("refuse", help="Input contract: refuse, warn or off."),
    objective: str = typer.Option(None, help="Default: the archive's, else eata."),
    learning_rate: float = typer.Option(None, "--lr", help="Learning rate; default: the archive's."),
    steps: int = typer.Option(None, help="Horizon for policies that are not calibrated."),
    seed: int = typer.Option(None, help="Seed; default: the archive's, else 0."),
    max_slices: int = typer.Option(None, help="Slices or patches at once: less memory, same result."),
    folds: str = typer.Option(None, "-f", help="Folds of an nnU-Net; default: all that are there."),
    checkpoint: str = typer.Option("checkpoint_final.pth", "-chk", help="Checkpoint of an nnU-Net."),
    weights: Path = typer.Option(None, help="Weights for package.module:factory or network.json."),
    device: str = typer.Option(None, "-device", help="cuda, cpu or mps; default: cuda where there is one."),
    trust_checkpoint: bool = typer.Option(False, "--trust-checkpoint", help="Let a pickled checkpoint run its code."),
    trust_bundle: bool = typer.Option(False, "--trust-bundle", help="Let a MONAI bundle run its code."),
    trust_architecture: list[str] = typer.Option(
        [], "--trust-architecture", help="Class that a model folder may name, such as mypackage.nets.Net."
    ),
) -> None:
    """Guarded segmentation over HTTP (Open Inference Protocol v2): /v2/..., POST /segment, /metrics.

    Without a token only this machine can ask. For others, set CASEWISE_TOKEN and send Authorization: Bearer TOKEN.
    """
    from casewise.judge.certificates.certificate import read_certificate
    from casewise.run.allocator import keep_freed_memory
    from casewise.run.choice import chosen_policy
    from casewise.run.memory import parse_size
    from casewise.run.model import Adaptation, Model, device_of

    keep_freed_memory()
    service = _service()
    decided, recorded = chosen_policy(policy, steps=steps, objective=objective)
    asked: dict[str, Any] = {
        "objective": objective, "learning_rate": learning_rate, "seed": seed, "max_slices": max_slices,
    }  # fmt: skip
    how = replace(recorded or Adaptation(), steps=decided.steps, **{k: v for k, v in asked.items() if v is not None})
    source = Model(
        model, weights, folds_of(folds), checkpoint, device_of(device), trust=trust_checkpoint,
        trust_bundle=trust_bundle, trust_architectures=tuple(trust_architecture),
    )  # fmt: skip
    token, fresh = service.token_for(host, os.environ)
    settings = service.Settings(
        host=host, port=port, token=token, hosts=tuple(allow_host), places=places, max_bytes=parse_size(max_body),
        timeout_s=timeout or None,
    )  # fmt: skip
    segmenter = service.Segmenter(
        source, how, decided, certificate=None if certificate is None else read_certificate(certificate), watch=watch,
        contract=contract, max_ram=parse_size(max_ram) if max_ram else None,
    )  # fmt: skip
    if fresh:
        typer.echo(f"CASEWISE_TOKEN was not set; the token of this run is {token}", err=True)
    typer.echo(
        f"casewise serves {segmenter.backbone.name} on http://{host}:{port} with policy {decided.name}", err=True
    )
    service.run(segmenter, settings)


def _service() -> Any:
    """The service, whose libraries are an extra."""
    from casewise.core.errors import MissingExtra

    try:
        from casewise.serve import running
    except ImportError as error:
        raise MissingExtra(f"the service cannot be imported ({error}); pip install 'casewise[serve]'") from error
    return running
