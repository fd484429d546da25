"""What a service may be asked for and by whom; checked before anything listens."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from casewise.core.errors import Refused

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
MIB = 2**20


@dataclass(frozen=True)
class Settings:
    """Limits and doors of a service."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None  # needed wherever others can connect
    hosts: tuple[str, ...] = ()  # further names that the Host header may hold
    places: int = 8  # requests inside at once: one on the model, the others uploading or waiting
    max_bytes: int = 256 * MIB  # of a request's body
    max_json_bytes: int = 32 * MIB  # of its JSON part: parsed JSON takes many times its size
    max_unpacked_bytes: int = 2048 * MIB  # of the voxels that a compressed file promises
    upload_s: float = 60.0  # a body that is slower loses its place
    timeout_s: float | None = 60.0  # from acceptance; then M0 is the answer

    def __post_init__(self) -> None:
        if not self.is_local and not self.token:
            raise Refused(
                f"binding to {self.host} lets others connect, so a token is needed; "
                f"set CASEWISE_TOKEN, or bind to 127.0.0.1"
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def allowed_hosts(self) -> frozenset[str] | None:
        """Names a request may be addressed to; None for any, where the token alone decides.

        A page of another site that points its own name at 127.0.0.1 (DNS rebinding) sends its own name.
        """
        if self.is_local:
            return frozenset((*LOOPBACK_NAMES, self.host, *self.hosts))
        return frozenset(self.hosts) or None
