"""How many workers generate, and where. Plain data, checked on construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from detgen.declaring import Option
from detgen.errors import EngineError

_MOST = 100_000


@dataclass(frozen=True, slots=True)
class WorkersConfig:
    """How many workers generate, and where.

    Attributes:
        number: number of workers; None for one per GPU of the cluster, or one per node without GPUs.
        ray: address of a running Ray cluster that this machine belongs to, HOST:PORT or auto; None starts a Ray on
            this machine for the duration of the run.
    """

    PANEL: ClassVar = "Speed"

    number: Annotated[
        int | None,
        Option("N", "--workers", default="one process"),
        "Processes to run in parallel: one per GPU, or each with a share of the cores (--threads counts the threads of"
        " each). Needs detgen[ray]. Never changes the text.",
    ] = None
    ray: Annotated[
        str | None,
        Option("ADDRESS"),
        "Run on a Ray cluster that this machine is part of: HOST:PORT, or auto. Without --workers, one worker per GPU"
        " of the cluster, or per node if it has none.",
    ] = None

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            EngineError: if one is wrong; the message names the option and its value.
        """
        if self.number is None and self.ray is None:
            raise EngineError("workers must be a whole number of at least 1 where there is no --ray")
        if self.number is not None and (type(self.number) is not int or self.number < 1):
            raise EngineError(f"workers must be a whole number of at least 1, got {self.number!r}")
        if self.number is not None and self.number > _MOST:
            raise EngineError(f"workers must be at most {_MOST}, got {self.number}")
        if self.ray is not None and self.ray != "auto":
            host, _, port = self.ray.rpartition(":")
            if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
                raise EngineError(f"ray must be auto or HOST:PORT, such as 10.0.0.1:6379, got {self.ray!r}")
