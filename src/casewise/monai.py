"""casewise in MONAI: a deployment as an Inferer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from casewise.core.errors import BadInput, Mismatch, MissingExtra
from casewise.core.records import Case
from casewise.core.seeds import content_id
from casewise.deployment import Deployment

try:
    from monai.inferers import Inferer
except ImportError as error:
    raise MissingExtra(f"MONAI cannot be imported ({error}); pip install 'casewise[monai]'") from error


class GuardedInferer(Inferer):  # type: ignore[misc]
    """A MONAI Inferer that returns the masks of a deployment: ``inferer(inputs, network)``.

    Args:
        deployment: The deployment that segments an image: model, proposers and policy.

    Example:
        >>> inferer = GuardedInferer(deployment)  # doctest: +SKIP
        >>> one_hot = inferer(inputs, network)  # doctest: +SKIP
    """

    def __init__(self, deployment: Deployment) -> None:
        super().__init__()
        if not isinstance(deployment, Deployment):
            raise BadInput(
                f"GuardedInferer takes a Deployment, got {type(deployment).__name__}; make one with casewise.fit, or "
                "load one with casewise.load"
            )
        self.deployment = deployment

    def __call__(self, inputs: Tensor, network: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Tensor:
        """Segment a batch, image by image.

        Args:
            inputs: Images, (n, channel, *space). A model that needs the voxel spacing, such as nnU-Net, takes a
                ``MetaTensor``.
            network: The network of the deployment; another one is refused. Default: the network of the deployment.
            args: Not used.
            kwargs: Not used.

        Returns:
            The masks as one-hot scores, (n, class, *space), so that ``AsDiscrete(argmax=True)`` gives label numbers;
            (n, 1, *space) for a network with one sigmoid output.

        Raises:
            Mismatch: ``network`` is not the network of the deployment.
            BadInput: ``inputs`` is not a batch of images.
        """
        backbone = self.deployment.backbone
        if isinstance(network, nn.Module) and network is not backbone.network:
            from casewise.adapt.snapshot import fingerprint

            if fingerprint(network) != fingerprint(backbone.network):
                raise Mismatch("the network is not the one of the deployment; fit a deployment for this network")
        if inputs.ndim not in (4, 5):
            raise BadInput(f"inputs must be (n, channel, *space) with two or three axes, got {tuple(inputs.shape)}")
        images = inputs.detach().cpu().numpy().astype(np.float32)
        known = getattr(inputs, "pixdim", None)  # of a MetaTensor; one for each image of a batch
        spacings = known if isinstance(known, list) else [known] * len(images)
        masks = [
            self.deployment.predict(
                Case(content_id(image), image, None if size is None else tuple(map(float, size)))
            ).mask
            for image, size in zip(images, spacings, strict=True)
        ]
        made = torch.from_numpy(np.stack(masks).astype(np.int64))
        if backbone.classes == 1:
            return made[:, None].to(inputs)
        return torch.movedim(nn.functional.one_hot(made, backbone.classes), -1, 1).to(inputs)
