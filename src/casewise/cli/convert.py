"""``casewise convert``."""

from __future__ import annotations

from pathlib import Path

import typer

app = typer.Typer()


@app.command()
def convert(
    checkpoint: Path = typer.Argument(..., help="A .pth or .pt file, or an nnU-Net model folder."),
    name: str = typer.Option("checkpoint_final.pth", "-chk", help="Which checkpoint of a model folder."),
    trust_checkpoint: bool = typer.Option(False, "--trust-checkpoint", help="Let the pickle run its code, once."),
) -> None:
    """Turn a checkpoint into safetensors and JSON, once, without running its code.

    The new file lies beside the old one and is taken instead of it from then on; the old one may be deleted.
    """
    from casewise.adapt.backbones.checkpoints import convert_checkpoint
    from casewise.core.errors import BadInput

    files = sorted(checkpoint.glob(f"fold_*/{name}")) if checkpoint.is_dir() else [checkpoint]
    if not files:
        raise BadInput(f"{checkpoint} has no fold with {name}; name another with -chk")
    for file in files:
        typer.echo(str(convert_checkpoint(file, trust=trust_checkpoint)))
