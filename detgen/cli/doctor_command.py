"""`detgen doctor`: what this machine has and lacks, by `detgen.doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from detgen.cli.declared import DONE, FAILED, command, epilog

if TYPE_CHECKING:
    from detgen.show.progress_view import QuietDisplay

EPILOG = epilog("detgen doctor", status="0 detgen works here, 1 something is broken")


@command
def doctor_command(*, display: QuietDisplay) -> int:
    """Look at the processor, the compiled code, memory, caches and libraries, and generate a few tokens.

    What is missing is shown with the command that mends it.
    """
    from detgen.doctor import examine
    from detgen.show.answers import show_finding

    broken = False
    for finding in examine():
        broken |= finding.broken
        if finding.broken or not display.quiet:
            show_finding(finding)
    return FAILED if broken else DONE


COMMANDS = {"doctor": (doctor_command, EPILOG)}
